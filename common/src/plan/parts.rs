//! What a plan holds: runs, and the groups of tensor pairs that move by them. Groups are made once,
//! with the planner, so a plan is as large for 1 layer as for 100.

use std::sync::Arc;

use crate::ids::{ByteLen, ComponentId};
use crate::plan::bounds::ItemBounds;
use crate::plan::layers::EntryPair;
use crate::plan::{PlanError, RunList};

/// A pair of tensors and the runs that move between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPair<'a> {
    /// Position of the source tensor in its component.
    pub src: usize,
    /// Position of the destination tensor in its component.
    pub dst: usize,
    /// The runs; shared by all pairs of a group.
    pub runs: &'a RunList,
}

/// What one component of one room (or one chunk of it) moves to one decode rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentPlan {
    /// The component.
    pub component: ComponentId,
    /// What moves; nothing where this rank has nothing to send.
    pub(crate) parts: Vec<PlanPart>,
    /// Items beyond the common prefix of the two index lists.
    pub truncated_items: u64,
}

/// Runs and the pairs of tensors that move by them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlanPart {
    pub group: Arc<TensorGroup>,
    pub runs: RunList,
}

/// Pairs of tensors that move alike.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TensorGroup {
    pub pairs: Vec<EntryPair>,
    /// Bytes of the smallest source tensor.
    pub src_bytes: u64,
    /// Bytes of the smallest destination tensor.
    pub dst_bytes: u64,
}

impl ComponentPlan {
    /// The pairs of tensors, each with its runs.
    pub fn pairs(&self) -> impl Iterator<Item = TensorPair<'_>> {
        self.parts.iter().flat_map(|part| {
            let pairs = part.group.pairs.iter();
            pairs.map(|(src, dst)| TensorPair {
                src: *src,
                dst: *dst,
                runs: &part.runs,
            })
        })
    }

    /// Pairs of tensors that move alike, with the runs that they share.
    pub fn groups(&self) -> impl Iterator<Item = (&[(usize, usize)], &RunList)> {
        let parts = self.parts.iter();
        parts.map(|part| (part.group.pairs.as_slice(), &part.runs))
    }

    /// Whether nothing moves.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Bytes of memory that the plan takes. Groups belong to the planner.
    pub fn heap_bytes(&self) -> usize {
        let runs = self.parts.iter().map(|part| size_of_val(part.runs.runs()));
        size_of_val(self.parts.as_slice()) + runs.sum::<usize>()
    }

    /// Bytes over all pairs. The sum cannot overflow: the planner added it up.
    pub fn bytes(&self) -> ByteLen {
        ByteLen(self.pairs().map(|pair| pair.runs.bytes().get()).sum())
    }

    /// Contiguous ranges over all pairs.
    pub fn ranges(&self) -> u64 {
        self.pairs().map(|pair| pair.runs.ranges()).sum()
    }
}

impl PlanPart {
    /// A number of the runs, over all pairs; `None` on overflow.
    pub(crate) fn total(&self, of: fn(&RunList) -> u64) -> Option<u64> {
        let pairs = u64::try_from(self.group.pairs.len()).ok()?;
        of(&self.runs).checked_mul(pairs)
    }
}

/// Pairs of tensors by what their runs depend on beside the indices.
#[derive(Clone, Debug)]
pub(crate) struct Groups<K>(Vec<(K, Arc<TensorGroup>)>);

impl<K: PartialEq> Groups<K> {
    pub(crate) fn new<'a>(keyed: impl IntoIterator<Item = (K, &'a ItemBounds)>) -> Self {
        let mut groups: Vec<(K, TensorGroup)> = Vec::new();
        for (key, entry) in keyed {
            let pair = (entry.src, entry.dst);
            match groups.iter_mut().find(|(known, _)| *known == key) {
                Some((_, group)) => {
                    group.pairs.push(pair);
                    group.src_bytes = group.src_bytes.min(entry.src_bytes);
                    group.dst_bytes = group.dst_bytes.min(entry.dst_bytes);
                }
                None => groups.push((
                    key,
                    TensorGroup {
                        pairs: vec![pair],
                        src_bytes: entry.src_bytes,
                        dst_bytes: entry.dst_bytes,
                    },
                )),
            }
        }
        let shared = groups
            .into_iter()
            .map(|(key, group)| (key, Arc::new(group)));
        Self(shared.collect())
    }

    /// The parts of a plan: one run list for each group, none where it has no range.
    pub(crate) fn parts(
        &self,
        run_list: impl Fn(&K) -> Result<RunList, PlanError>,
    ) -> Result<Vec<PlanPart>, PlanError> {
        let mut parts = Vec::with_capacity(self.0.len());
        for (key, group) in &self.0 {
            let runs = run_list(key)?;
            if runs.ranges() > 0 {
                let group = Arc::clone(group);
                parts.push(PlanPart { group, runs });
            }
        }
        Ok(parts)
    }
}

impl Groups<u64> {
    /// Groups of pairs whose source items have the same length.
    pub(crate) fn by_item_len(bounds: &[ItemBounds]) -> Self {
        Self::new(bounds.iter().map(|entry| (entry.src_item_len, entry)))
    }
}

//! Checksums of what was written for a room, as the prefill reads its source and as the decode finds
//! its memory. Both passes are made here, beside the copy: a transport may cut a range anywhere, so
//! that its pieces pass no one place in order. Bytes are copied out of the pools before they are
//! summed, because others may write there.

use std::collections::{BTreeMap, HashSet};
use std::hash::Hasher;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};

use common::check::{CheckMode, CheckRun, Units, pieces};
use common::ids::{ByteLen, ByteOffset, ComponentId, Room};
use common::plan::ComponentPlan;
use common::schema::TensorLayout;
use common::wire::{CheckGroup, Checks};
use io_engine::{Location, Region, TransportError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use twox_hash::XxHash3_64;

use crate::rank::RankBuffers;
use crate::rank::core::{Announcement, Mismatch};

/// What is read at once of host memory: it stays in the processor's nearest caches.
const HOST_BYTES: usize = 32 << 10;
/// The same of a device's: several pinned buffers, so that their copies overlap.
const DEVICE_BYTES: usize = 4 << 20;
/// Threads of this process that sum at once, at most.
const MOST_THREADS: usize = 4;

/// May make one pass.
pub(crate) struct Turn {
    /// Held until the pass is over.
    _permit_opt: Option<OwnedSemaphorePermit>,
}

/// Waits until few enough other passes are made.
pub(crate) async fn turn() -> Turn {
    static THREADS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Semaphore::new(threads.min(MOST_THREADS)))
    });
    Turn {
        // It is never closed.
        _permit_opt: Arc::clone(&THREADS).acquire_owned().await.ok(),
    }
}

impl Turn {
    /// Makes the pass on a thread of its own.
    pub(crate) async fn make<T: Send + 'static>(
        self,
        pass: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let done = tokio::task::spawn_blocking(move || {
            let result = pass();
            drop(self);
            result
        });
        done.await
            .map_err(|error| format!("the thread of its checksums ended: {error}"))
    }
}

/// The sums of what a plan reads, for the decode to compare.
pub(crate) fn of_sources(
    buffers: &RankBuffers,
    plan: &ComponentPlan,
    (mode, room): (CheckMode, Room),
) -> Result<Vec<CheckGroup>, String> {
    let mut groups = Vec::new();
    for (pairs, runs) in plan.groups() {
        let destinations = CheckRun::destinations(runs);
        let units = Units::new(mode, room, plan.component, &destinations, pairs.len())
            .ok_or("its checksums are too many to be counted")?;
        let sources = pairs.iter().map(|(src, _)| {
            let region = buffers.region(plan.component, *src);
            region.ok_or_else(|| format!("tensor {src} of the prefill side has no buffer"))
        });
        let sources: Vec<&Region> = sources.collect::<Result<_, String>>()?;
        let mut sums = Vec::with_capacity(usize::try_from(units.sums()).unwrap_or_default());
        let stopped = each_sum(&sources, &CheckRun::sources(runs), &units, |_, _, sum| {
            sums.push(sum);
            ControlFlow::<()>::Continue(())
        });
        stopped.map_err(|error| format!("its checksums cannot be made: {error}"))?;
        let tensors = pairs.iter().map(|(_, dst)| u32::try_from(*dst));
        groups.push(CheckGroup {
            component: plan.component,
            tensors: tensors
                .collect::<Result<_, _>>()
                .map_err(|_| "a tensor's number does not fit 32 bits")?,
            runs: destinations,
            sums,
        });
    }
    Ok(groups)
}

/// Where a unit lies in its tensor: all of its ranges are in here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    begin: u64,
    end: u64,
    bytes: u64,
    pieces: u64,
}

/// Goes through the units that have a sum, tensor by tensor, until it is told to stop.
fn each_sum<B>(
    tensors: &[&Region],
    runs: &[CheckRun],
    units: &Units,
    mut each: impl FnMut(usize, Span, u64) -> ControlFlow<B>,
) -> Result<Option<B>, TransportError> {
    let mut buffer = Vec::new();
    for (position, region) in tensors.iter().enumerate() {
        let most = match region.location() {
            Location::Host => HOST_BYTES,
            Location::Device { .. } => DEVICE_BYTES,
        };
        buffer.resize(most.max(buffer.len()), 0);
        let (mut hasher_opt, mut span_opt) = (None, None::<Span>);
        for (piece, (offset, len)) in (0u64..).zip(pieces(runs)) {
            if !units.has_sum(position, piece) {
                continue;
            }
            let end = offset.get() + len.get();
            let span = span_opt.get_or_insert(Span {
                begin: offset.get(),
                end,
                bytes: 0,
                pieces: 0,
            });
            span.begin = span.begin.min(offset.get());
            span.end = span.end.max(end);
            span.bytes += len.get();
            span.pieces += 1;
            let is_whole = units.fold() == 1 && len.get() <= most as u64;
            let sum_opt = if is_whole {
                let bytes = buffer.get_mut(..len.get() as usize).unwrap_or_default();
                region.read(offset, bytes)?;
                Some(XxHash3_64::oneshot(bytes))
            } else {
                let hasher = hasher_opt.get_or_insert_with(XxHash3_64::new);
                add(hasher, region, (offset, len), &mut buffer)?;
                units.is_end(piece).then(|| hasher.finish())
            };
            let Some(sum) = sum_opt else { continue };
            hasher_opt = None;
            let span = *span;
            span_opt = None;
            if let ControlFlow::Break(stop) = each(position, span, sum) {
                return Ok(Some(stop));
            }
        }
    }
    Ok(None)
}

fn add(
    hasher: &mut XxHash3_64,
    region: &Region,
    (offset, len): (ByteOffset, ByteLen),
    buffer: &mut [u8],
) -> Result<(), TransportError> {
    let (mut at, end) = (offset.get(), offset.get() + len.get());
    while at < end {
        let step = (end - at).min(buffer.len() as u64);
        let bytes = buffer.get_mut(..step as usize).unwrap_or_default();
        region.read(ByteOffset(at), bytes)?;
        hasher.write(bytes);
        at += step;
    }
    Ok(())
}

/// Compares what a prefill rank says of its bytes with what is here; how many bytes were compared,
/// by component.
pub(crate) fn compare(
    buffers: &RankBuffers,
    announcement: &Announcement,
    checks: &Checks,
) -> Result<BTreeMap<ComponentId, u64>, Mismatch> {
    let mut told = BTreeMap::new();
    let mut compared = BTreeMap::new();
    for group in &checks.groups {
        let component = group.component;
        let mismatch = |reason: String| Mismatch {
            component: buffers.layout.component_label(component),
            reason,
        };
        let units = Units::new(
            checks.mode,
            checks.room,
            component,
            &group.runs,
            group.tensors.len(),
        );
        let units = units
            .filter(|units| units.sums() == group.sums.len() as u64)
            .ok_or_else(|| {
                mismatch(format!(
                    "prefill rank {} sent {} checksums for its ranges, which is not their number",
                    checks.prefill_rank,
                    group.sums.len()
                ))
            })?;
        let places = Places::of(buffers, announcement, component);
        let bytes = places.check(group).map_err(|reason| {
            mismatch(format!(
                "the checksums of prefill rank {} are of places that the room does not have: {reason}",
                checks.prefill_rank
            ))
        })?;
        let so_far: &mut u64 = told.entry(component).or_default();
        *so_far = so_far.saturating_add(bytes);
        if *so_far > places.bytes() {
            return Err(mismatch(format!(
                "the checksums of prefill rank {} are of {so_far} bytes, the room has {}",
                checks.prefill_rank,
                places.bytes()
            )));
        }
        let regions = group.tensors.iter().filter_map(|tensor| {
            let tensor = usize::try_from(*tensor).ok()?;
            buffers.region(component, tensor)
        });
        let regions: Vec<&Region> = regions.collect();
        let mut sums = group.sums.iter();
        let found = each_sum(&regions, &group.runs, &units, |position, span, here| {
            let bytes: &mut u64 = compared.entry(component).or_default();
            *bytes += span.bytes;
            match sums.next() {
                Some(there) if *there == here => ControlFlow::Continue(()),
                there => ControlFlow::Break((position, span, there.copied(), here)),
            }
        });
        let found = found.map_err(|error| {
            mismatch(format!("its bytes cannot be read to be compared: {error}"))
        })?;
        if let Some((position, span, there_opt, here)) = found {
            let tensor = group.tensors.get(position).copied().unwrap_or_default();
            return Err(mismatch(format!(
                "{}: checksum {:016x} at prefill rank {}, {here:016x} here",
                places.describe(tensor, span),
                there_opt.unwrap_or_default(),
                checks.prefill_rank
            )));
        }
    }
    Ok(compared)
}

/// What a room was announced to have of one component.
struct Places<'a> {
    component: ComponentId,
    tensors: &'a [TensorLayout],
    items: HashSet<u64>,
}

impl<'a> Places<'a> {
    fn of(buffers: &'a RankBuffers, announcement: &Announcement, component: ComponentId) -> Self {
        let layout = &buffers.layout;
        let aux;
        let (tensors, indices): (&[TensorLayout], &[i32]) = match component {
            ComponentId::Kv => (&layout.kv.tensors, &announcement.kv_indices),
            ComponentId::Aux => {
                let row = announcement.aux_index_opt;
                aux = row.and_then(|row| i32::try_from(row).ok());
                (&layout.aux, aux.as_slice())
            }
            ComponentId::State(index) => {
                let index = usize::from(index);
                let state = layout.states.get(index);
                let indices = announcement.state_indices.get(index);
                (
                    state.map_or(&[], |state| &state.tensors),
                    indices.map_or(&[], Vec::as_slice),
                )
            }
        };
        let items = indices
            .iter()
            .filter_map(|index| u64::try_from(*index).ok());
        Self {
            component,
            tensors,
            items: items.collect(),
        }
    }

    /// Bytes of the room's items in all tensors.
    fn bytes(&self) -> u64 {
        let of_each = self.tensors.iter().map(|tensor| {
            let items = self.items.len() as u64;
            tensor.item_len.get().saturating_mul(items)
        });
        of_each.fold(0, u64::saturating_add)
    }

    /// Whether every range of a group is within the room's items; how many bytes they are.
    fn check(&self, group: &CheckGroup) -> Result<u64, String> {
        let (mut end, mut bytes) = (0, 0u64);
        for run in &group.runs {
            let more = run.bytes().filter(|more| *more > 0);
            let sum = more.and_then(|more| bytes.checked_add(more));
            let (Some(run_end), Some(sum)) = (run.end(), sum) else {
                return Err(format!("{run:?} are no ranges"));
            };
            (end, bytes) = (run_end.max(end), sum);
        }
        let all = bytes.checked_mul(group.tensors.len() as u64);
        let all = all.filter(|all| *all <= self.bytes()).ok_or_else(|| {
            format!(
                "{bytes} bytes in each of {} tensors, the room has {} in all",
                group.tensors.len(),
                self.bytes()
            )
        })?;
        let mut known = HashSet::new();
        for number in &group.tensors {
            let tensor = self.tensors.get(*number as usize);
            let tensor = tensor.filter(|tensor| tensor.item_len.get() > 0);
            let tensor = tensor.ok_or_else(|| format!("there is no tensor {number}"))?;
            if end > tensor.bytes.get() {
                return Err(format!("ranges end at {end}, behind tensor {number}"));
            }
            // Tensors of one item length have the same places.
            if !known.insert(tensor.item_len) {
                continue;
            }
            for (offset, len) in pieces(&group.runs) {
                let last = offset.get() + len.get() - 1;
                let mut items = offset.get() / tensor.item_len.get()..=last / tensor.item_len.get();
                if let Some(other) = items.find(|item| !self.items.contains(item)) {
                    let what = self.item();
                    return Err(format!(
                        "{what} {other} of tensor {number} is not the room's"
                    ));
                }
            }
        }
        Ok(all)
    }

    const fn item(&self) -> &'static str {
        match self.component {
            ComponentId::Kv => "page",
            _ => "row",
        }
    }

    fn describe(&self, tensor: u32, span: Span) -> String {
        let Span {
            begin, end, pieces, ..
        } = span;
        let layout = self.tensors.get(tensor as usize);
        let item_len = layout.map_or(1, |tensor| tensor.item_len.get().max(1));
        let (first, last) = (begin / item_len, end.saturating_sub(1) / item_len);
        let item = self.item();
        let items = match first == last {
            true => format!("{item} {first}"),
            false => format!("{item}s {first} to {last}"),
        };
        let pieces = match pieces {
            1 => String::new(),
            _ => format!(", {pieces} ranges"),
        };
        format!("tensor {tensor}, {items} (bytes {begin} to {end}{pieces})")
    }
}

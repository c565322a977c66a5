//! The planner of one pair of ranks.

use crate::ids::ComponentId;
use crate::metrics::{COMPONENT_AUX, COMPONENT_KV};
use crate::plan::bounds::{
    ItemBounds, Side, check_bounds, check_distinct, check_ends, check_row, is_elided,
};
use crate::plan::dcp::{DcpChunk, dcp_tokens, needs_resplit, token_lens};
use crate::plan::heads::{TokenSlice, TpPair};
use crate::plan::layers::{mha_pairs, mla_pairs};
use crate::plan::pages::{IndexRun, index_runs, item_run_list};
use crate::plan::parts::Groups;
use crate::plan::state::StatePlanner;
use crate::plan::{ComponentPlan, PlanError};
use crate::schema::{AttentionKind, PeerLayout, RankLayout};
use crate::topology::ParallelConfig;

/// How strict a planner is where 0.5.23 is lenient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlannerOptions {
    /// Whether index lists of a paged component must have the same length. If not, their common
    /// prefix moves and the rest is counted.
    pub strict_lengths: bool,
}

/// The pages of one chunk.
#[derive(Clone, Copy, Debug)]
pub struct KvChunk<'a> {
    /// Source pages, in the order of the prompt.
    pub src_pages: &'a [i32],
    /// Pages of the request before this chunk.
    pub position: usize,
    /// All destination pages that the decode announced.
    pub dst_pages: &'a [i32],
    /// Tokens that the decode already holds.
    pub decode_prefix_len: u64,
    /// Tokens in this chunk; needed when pages are re-split by token.
    pub num_kv_tokens: Option<u64>,
}

/// How the KV pages of this pair of ranks move.
#[derive(Clone, Debug)]
enum KvRule {
    /// Whole pages.
    Pages(Groups<u64>),
    /// A slice of heads of each token.
    Heads(Groups<TokenSlice>),
    /// Tokens re-split over decode context ranks.
    Tokens {
        page_size: u64,
        dcp_size: u64,
        dcp_rank: u64,
        /// By whether a pair belongs to a draft model, and the bytes of one of its tokens.
        groups: Groups<(bool, u64)>,
        /// Whether this is the one of several ranks with the same bytes that sends them.
        sends: bool,
    },
    /// Another rank sends the same bytes.
    Nothing,
}

/// Joins one prefill rank and one decode rank. Built once for each peer; then only indices vary.
#[derive(Clone, Debug)]
pub struct PeerPlanner {
    options: PlannerOptions,
    kv: Vec<ItemBounds>,
    kv_rule: KvRule,
    states: Vec<StatePlanner>,
    aux: Vec<ItemBounds>,
    aux_groups: Groups<u64>,
    sends_aux: bool,
}

impl PeerPlanner {
    /// Compares the two sides.
    ///
    /// # Errors
    /// A [`PlanError`] that names the component and both sides' values, for whatever cannot work
    /// between these two ranks.
    pub fn new(
        local: &RankLayout,
        parallel: &ParallelConfig,
        peer: &PeerLayout,
        options: PlannerOptions,
    ) -> Result<Self, PlanError> {
        parallel.validate()?;
        let tp = TpPair::new(
            parallel.tp_size,
            parallel.tp_rank,
            peer.tp_size,
            peer.engine_rank,
        )?;
        // A prefill without components accepts whatever the decode registered: nothing of it moves.
        if !local.states.is_empty() && local.states.len() != peer.states.len() {
            return Err(PlanError::ComponentCount {
                local: local.states.len(),
                peer: peer.states.len(),
            });
        }
        let (kv, kv_rule) = kv_rule(local, parallel, peer, tp)?;
        let states = local.states.iter().zip(&peer.states);
        let states =
            states.map(|(state, peer)| StatePlanner::new(local, parallel, tp, state, peer));
        let aux = local.aux.iter().zip(&peer.aux).enumerate();
        let aux =
            aux.filter(|(_, (src, dst))| src.bytes.0 > 0 && src.item_len.0 > 0 && dst.bytes.0 > 0);
        // Several ranks may feed one decode rank; its aux row is written once, by the first of them
        // in the last pipeline stage.
        let sends_aux = tp.sends_replicated() && parallel.pp_rank + 1 == parallel.pp_size;
        let aux: Vec<ItemBounds> = aux
            .map(|(position, (src, dst))| ItemBounds {
                src: position,
                dst: position,
                src_bytes: src.bytes.0,
                src_item_len: src.item_len.0,
                dst_bytes: dst.bytes.0,
                dst_item_len: src.item_len.0,
            })
            .collect();
        Ok(Self {
            options,
            sends_aux,
            kv,
            kv_rule,
            states: states.collect::<Result<_, _>>()?,
            aux_groups: Groups::by_item_len(&aux),
            aux,
        })
    }

    /// Checks the destinations that a decode announced for a room, before anything is written:
    /// every index lies inside every tensor that it addresses, and none stands in a list twice.
    ///
    /// # Errors
    /// A [`PlanError`] with component, tensor, index and bounds.
    pub fn check_announcement(
        &self,
        kv_indices: &[i32],
        aux_index: Option<u32>,
        state_indices: &[Vec<i32>],
    ) -> Result<(), PlanError> {
        check_distinct(COMPONENT_KV, kv_indices)?;
        check_bounds(COMPONENT_KV, Side::Decode, &self.kv, kv_indices)?;
        if !self.states.is_empty() && state_indices.len() > self.states.len() {
            return Err(PlanError::ComponentCount {
                local: self.states.len(),
                peer: state_indices.len(),
            });
        }
        for (state, indices) in self.states.iter().zip(state_indices) {
            state.check_destination(indices)?;
        }
        let Some(aux_index) = aux_index else {
            return Ok(());
        };
        check_row(Side::Decode, &self.aux, aux_index)
    }

    /// Checks a chunk's pages, before anything of it is written.
    ///
    /// # Errors
    /// As [`PeerPlanner::check_announcement`], or a chunk that reaches beyond the announcement.
    pub fn check_kv_chunk(&self, chunk: &KvChunk<'_>) -> Result<(), PlanError> {
        check_bounds(COMPONENT_KV, Side::Prefill, &self.kv, chunk.src_pages)?;
        if let KvRule::Tokens { .. } = self.kv_rule {
            // Tokens do not pair with pages one to one; the plan itself is the check.
            return self.plan_kv(chunk).map(|_| ());
        }
        announced_pages(chunk).map(|_| ())
    }

    /// Checks the source indices of a state component against the announced ones.
    ///
    /// # Errors
    /// As [`PeerPlanner::check_announcement`], or lists that do not pair.
    pub fn check_state(&self, index: u16, src: &[i32], dst: &[i32]) -> Result<(), PlanError> {
        self.state(index)?.check_source(src, dst, self.options)
    }

    /// Checks the source row of the aux buffers.
    ///
    /// # Errors
    /// [`PlanError::OutOfBounds`].
    pub fn check_aux(&self, src_row: u32) -> Result<(), PlanError> {
        check_row(Side::Prefill, &self.aux, src_row)
    }

    /// The KV runs of one chunk.
    ///
    /// # Errors
    /// As [`PeerPlanner::check_kv_chunk`].
    pub fn plan_kv(&self, chunk: &KvChunk<'_>) -> Result<ComponentPlan, PlanError> {
        let component = ComponentId::Kv;
        let parts = match &self.kv_rule {
            KvRule::Nothing | KvRule::Tokens { sends: false, .. } => Vec::new(),
            KvRule::Pages(groups) => {
                let runs = page_runs(chunk)?;
                groups.parts(|item_len| item_run_list(&runs, *item_len))?
            }
            KvRule::Heads(groups) => {
                let runs = page_runs(chunk)?;
                groups.parts(|slice| slice.run_list(&runs))?
            }
            KvRule::Tokens {
                page_size,
                dcp_size,
                dcp_rank,
                groups,
                sends: true,
            } => {
                let tokens = dcp_tokens(&DcpChunk {
                    src_pages: chunk.src_pages,
                    dst_pages: chunk.dst_pages,
                    page_size: *page_size,
                    dcp_size: *dcp_size,
                    dcp_rank: *dcp_rank,
                    first_page: chunk.position as u64,
                    decode_prefix_len: chunk.decode_prefix_len,
                    num_tokens: Some(chunk.num_kv_tokens.ok_or_else(|| PlanError::Argument {
                        what: "num_kv_tokens",
                        detail:
                            "pages are re-split by token, so the chunk must say how many".into(),
                    })?),
                })?;
                let target = index_runs(&tokens.target_src, &tokens.target_dst)?;
                let draft = index_runs(&tokens.draft_src, &tokens.draft_dst)?;
                groups.parts(|(is_draft, token_len)| {
                    item_run_list(if *is_draft { &draft } else { &target }, *token_len)
                })?
            }
        };
        let plan = ComponentPlan {
            component,
            parts,
            truncated_items: 0,
        };
        check_ends(COMPONENT_KV, &plan, &self.kv)?;
        Ok(plan)
    }

    /// The runs of one state component.
    ///
    /// # Errors
    /// As [`PeerPlanner::check_state`].
    pub fn plan_state(
        &self,
        index: u16,
        src: &[i32],
        dst: &[i32],
    ) -> Result<ComponentPlan, PlanError> {
        self.state(index)?
            .plan(ComponentId::State(index), src, dst, self.options)
    }

    /// The runs of the auxiliary rows.
    ///
    /// # Errors
    /// [`PlanError::OutOfBounds`].
    pub fn plan_aux(&self, src_row: u32, dst_row: u32) -> Result<ComponentPlan, PlanError> {
        self.check_aux(src_row)?;
        check_row(Side::Decode, &self.aux, dst_row)?;
        if !self.sends_aux {
            return Ok(ComponentPlan {
                component: ComponentId::Aux,
                parts: Vec::new(),
                truncated_items: 0,
            });
        }
        let run = [IndexRun {
            src: src_row.into(),
            dst: dst_row.into(),
            count: 1,
        }];
        let row = |item_len: &u64| item_run_list(&run, *item_len);
        let parts = self.aux_groups.parts(row)?;
        let plan = ComponentPlan {
            component: ComponentId::Aux,
            parts,
            truncated_items: 0,
        };
        check_ends(COMPONENT_AUX, &plan, &self.aux)?;
        Ok(plan)
    }

    /// Whether this rank is the one of those that feed the decode rank that sends the aux row.
    pub const fn sends_aux(&self) -> bool {
        self.sends_aux
    }

    /// The metric label of a state component.
    pub fn state_label(&self, index: u16) -> &'static str {
        let state = self.states.get(usize::from(index));
        state.map_or(crate::metrics::COMPONENT_UNKNOWN, StatePlanner::label)
    }

    /// How many state components both sides have.
    pub fn state_count(&self) -> usize {
        self.states.len()
    }

    fn state(&self, index: u16) -> Result<&StatePlanner, PlanError> {
        self.states
            .get(usize::from(index))
            .ok_or_else(|| PlanError::Argument {
                what: "state component",
                detail: format!(
                    "there is no component {index}, there are {}",
                    self.states.len()
                ),
            })
    }
}

fn kv_rule(
    local: &RankLayout,
    parallel: &ParallelConfig,
    peer: &PeerLayout,
    tp: TpPair,
) -> Result<(Vec<ItemBounds>, KvRule), PlanError> {
    let kv = &local.kv;
    let latent = kv.attention != AttentionKind::Mha;
    let (src_count, dst_count) = (kv.tensors.len(), peer.kv.len());
    let start_layer = kv.start_layer as usize;
    let num_draft = kv.num_draft_entries as usize;
    let pairs = if latent {
        mla_pairs(
            src_count,
            dst_count,
            start_layer,
            &kv.layer_ids,
            &peer.kv_layer_ids,
            num_draft,
        )?
    } else {
        // A prefill of one stage holds the whole model: what the decode has beyond it is a draft.
        let surplus = (dst_count / 2).saturating_sub(src_count / 2);
        let draft_layers = if parallel.pp_size == 1 { surplus } else { 0 };
        mha_pairs(
            src_count,
            dst_count,
            start_layer,
            &kv.layer_ids,
            &peer.kv_layer_ids,
            draft_layers,
        )?
    };
    let prefill_dcp = (parallel.dcp_size, parallel.dcp_rank);
    let resplit = needs_resplit(prefill_dcp, (peer.dcp_size, peer.dcp_rank), latent)?;
    let first_item_len = peer
        .kv
        .first()
        .and_then(|tensor| tensor.item_len_opt)
        .map(|length| length.0);
    let known_item_len = |dst: usize| first_item_len.filter(|_| dst == 0);
    let mut bounds = Vec::with_capacity(pairs.len());
    for (src, dst) in pairs {
        let both = kv.tensors.get(src).zip(peer.kv.get(dst));
        let (source, target) = both.ok_or_else(|| PlanError::Layers {
            component: COMPONENT_KV,
            detail: format!("tensors {src} and {dst} do not both exist"),
        })?;
        if is_elided(source, target) {
            continue;
        }
        bounds.push(ItemBounds {
            src,
            dst,
            src_bytes: source.bytes.0,
            src_item_len: source.item_len.0,
            dst_bytes: target.bytes.0,
            dst_item_len: source.item_len.0,
        });
    }
    let geometry = |detail: String| PlanError::Geometry {
        component: COMPONENT_KV,
        detail,
    };
    if resplit {
        let src_lens: Vec<u64> = kv.tensors.iter().map(|tensor| tensor.item_len.0).collect();
        let dst_lens: Vec<Option<u64>> = (0..dst_count).map(known_item_len).collect();
        let page_size = u64::from(local.page_size);
        let dcp_size = u64::from(peer.dcp_size);
        let token_lens = token_lens(&src_lens, &dst_lens, page_size, dcp_size, num_draft)?;
        let first_draft = src_count.saturating_sub(num_draft);
        for entry in bounds.iter_mut().filter(|entry| entry.src >= first_draft) {
            entry.dst_item_len = entry.src_item_len.saturating_mul(dcp_size);
        }
        let dcp_rank = u64::from(peer.dcp_rank);
        let groups = Groups::new(bounds.iter().map(|entry| {
            let token_len = token_lens.get(entry.src).copied().unwrap_or_default();
            ((entry.src >= first_draft, token_len), entry)
        }));
        return Ok((
            bounds,
            KvRule::Tokens {
                page_size,
                dcp_size,
                dcp_rank,
                groups,
                sends: tp.sends_replicated(),
            },
        ));
    }
    if !latent && !tp.is_equal() {
        let mut slices = Vec::with_capacity(bounds.len());
        for entry in &mut bounds {
            let slice = TokenSlice::new(
                COMPONENT_KV,
                tp,
                total_heads(local, parallel),
                local.page_size,
                entry.src_item_len,
                known_item_len(entry.dst),
            )?;
            entry.dst_item_len = slice.dst_item_len;
            slices.push(slice);
        }
        let rule = if tp.sends_heads(total_heads(local, parallel)) {
            KvRule::Heads(Groups::new(slices.into_iter().zip(&bounds)))
        } else {
            KvRule::Nothing
        };
        return Ok((bounds, rule));
    }
    for entry in &bounds {
        if let Some(dst_item_len) =
            known_item_len(entry.dst).filter(|length| *length != entry.src_item_len)
        {
            return Err(geometry(format!(
                "a page has {} bytes at the prefill and {dst_item_len} at the decode (page size or \
                 data type differ)",
                entry.src_item_len
            )));
        }
    }
    let rule = if !latent || tp.sends_replicated() {
        KvRule::Pages(Groups::by_item_len(&bounds))
    } else {
        KvRule::Nothing
    };
    Ok((bounds, rule))
}

/// KV heads of the model. Engines that do not say give heads per rank times TP, as SGLang does.
pub(crate) fn total_heads(local: &RankLayout, parallel: &ParallelConfig) -> u32 {
    match local.kv.total_head_num {
        0 => local.kv.head_num.saturating_mul(parallel.tp_size),
        total => total,
    }
}

/// The announced pages that a chunk's pages go to.
fn announced_pages<'a>(chunk: &KvChunk<'a>) -> Result<&'a [i32], PlanError> {
    let end = chunk.position.saturating_add(chunk.src_pages.len());
    chunk
        .dst_pages
        .get(chunk.position..end)
        .ok_or(PlanError::ChunkBeyondAnnouncement {
            position: chunk.position,
            end,
            announced: chunk.dst_pages.len(),
        })
}

fn page_runs(chunk: &KvChunk<'_>) -> Result<Vec<IndexRun>, PlanError> {
    index_runs(chunk.src_pages, announced_pages(chunk)?)
}

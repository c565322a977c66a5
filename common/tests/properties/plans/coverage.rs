//! Carries out the plans of all prefill ranks that feed one decode rank.

use std::collections::HashSet;
use std::fmt::Display;

use common::plan::{ComponentPlan, KvChunk, PeerPlanner, PlannerOptions};
use common::schema::{AttentionKind, PeerLayout, RankLayout, StateKind};
use common::topology::{DecodeSide, ParallelConfig, PrefillTopology, resolve_rank_mapping};
use proptest::collection::vec;
use proptest::prelude::*;

use super::case::{Case, DST_ITEMS, Ids, SRC_ITEMS, Slab, StateCase, case};
use super::image::{Coordinate, Tensor, aux, decode_kv, decode_kv_ids, kv_layout, prefill_kv};
use super::junk::{bytes_of, check_plan, peer_bytes_of};
use super::state_image::{decode_state, prefill_state};

fn failed(error: impl Display) -> TestCaseError {
    TestCaseError::fail(error.to_string())
}

/// The buffers of one component of a decode rank while they are written.
struct Component {
    name: String,
    expected: Vec<Tensor>,
    written: Vec<Vec<Option<Coordinate>>>,
}

impl Component {
    fn new(name: impl Into<String>, expected: Vec<Tensor>) -> Self {
        let written = expected
            .iter()
            .map(|tensor| vec![None; tensor.meaning.len()]);
        Self {
            name: name.into(),
            written: written.collect(),
            expected,
        }
    }

    /// Copies the meaning of every byte that a plan moves.
    fn carry_out(&mut self, source: &[Tensor], plan: &ComponentPlan) -> Result<(), TestCaseError> {
        let name = &self.name;
        for pair in plan.pairs() {
            let (src, dst) = (&source[pair.src].meaning, &mut self.written[pair.dst]);
            let mut bytes = 0;
            for range in pair.runs.iter_ranges() {
                let (from, to) = (range.src.get() as usize, range.dst.get() as usize);
                let len = range.len.get() as usize;
                prop_assert!(
                    from + len <= src.len(),
                    "{name}: {range:?} leaves the source"
                );
                prop_assert!(
                    to + len <= dst.len(),
                    "{name}: {range:?} leaves the destination"
                );
                for byte in 0..len {
                    let meaning = src[from + byte];
                    prop_assert!(meaning.is_some(), "{name}: {range:?} sends another's bytes");
                    let target = &mut dst[to + byte];
                    prop_assert!(
                        target.is_none(),
                        "{name}: byte {} of decode tensor {} is written twice: {target:?}",
                        to + byte,
                        pair.dst
                    );
                    *target = meaning;
                }
                bytes += range.len.get();
            }
            prop_assert_eq!(bytes, pair.runs.bytes().get());
        }
        Ok(())
    }

    /// Every byte that the request has is there, and nothing else.
    fn check(&self) -> Result<(), TestCaseError> {
        for (position, (written, expected)) in self.written.iter().zip(&self.expected).enumerate() {
            let bytes = written.iter().zip(&expected.meaning).enumerate();
            for (offset, (written, expected)) in bytes {
                prop_assert_eq!(
                    written,
                    expected,
                    "{}: byte {} of decode tensor {}",
                    self.name,
                    offset,
                    position
                );
            }
        }
        Ok(())
    }
}

/// The prefill TP ranks that have something for the decode rank, from the sizes alone.
fn feeding_ranks(case: &Case) -> Vec<u32> {
    let (prefill, decode, rank) = (case.prefill_tp, case.decode_tp, case.decode_rank);
    // Both sides cut the same whole into even shares; a writer's share meets the reader's.
    let meets = |writer: &u32| {
        let (writer, prefill) = (u64::from(*writer), u64::from(prefill));
        let (reader, decode) = (u64::from(rank), u64::from(decode));
        writer * decode < (reader + 1) * prefill && reader * prefill < (writer + 1) * decode
    };
    (0..prefill).filter(meets).collect()
}

fn check_mapping(case: &Case) -> Result<(), TestCaseError> {
    let stages = case.layers_of_stage.len() as u32;
    let is_mla = case.attention == AttentionKind::Mla;
    let prefill = PrefillTopology {
        attn_tp_size: case.prefill_tp,
        attn_cp_size: 1,
        dp_size: 1,
        pp_size: stages,
        page_size: Some(case.page_size),
        kv_cache_dtype: None,
        follow_bootstrap_room: true,
        enable_dsa_cache_layer_split: false,
        enable_kv_cache_sharding: false,
        decode_allocation_policy: "early".to_owned(),
    };
    let decode = DecodeSide {
        attn_tp_size: case.decode_tp,
        engine_rank: case.decode_dp_rank * case.decode_tp + case.decode_rank,
        attn_cp_size: 1,
        pp_size: case.decode_stage.map_or(1, |_| stages),
        pp_rank: case.decode_stage.map_or(0, |stage| stage as u32),
        is_mla,
        all_cp_ranks: false,
    };
    let mapping = resolve_rank_mapping(&prefill, &decode).map_err(failed)?;
    let feeding = feeding_ranks(case);
    let stages: Vec<u32> = case.decode_stages().map(|stage| stage as u32).collect();
    let real = feeding
        .iter()
        .filter(|rank| !mapping.is_dummy(is_mla, **rank));
    let responses = real.count() * stages.len();
    prop_assert_eq!(&mapping.target_tp_ranks, &feeding);
    prop_assert_eq!(&mapping.target_pp_ranks, &stages);
    prop_assert_eq!(mapping.required_prefill_response_num as usize, responses);
    let readers = (0..case.decode_tp).filter(|rank| {
        let reader = Case {
            decode_rank: *rank,
            ..case.clone()
        };
        feeding_ranks(&reader).contains(&feeding[0])
    });
    prop_assert_eq!(mapping.required_dst_info_num as usize, readers.count());
    Ok(())
}

/// The chunks of a request, as ranges of its pages.
fn chunks(case: &Case) -> impl Iterator<Item = std::ops::Range<usize>> {
    let starts = std::iter::once(0).chain(case.cuts.clone());
    let ends = case.cuts.clone().into_iter().chain([case.src_pages.len()]);
    starts.zip(ends).map(|(start, end)| start..end)
}

/// What the decode rank registers, and its buffers as they must be in the end.
struct Decode {
    peer: PeerLayout,
    kv: Component,
    aux: Component,
    states: Vec<Component>,
}

impl Decode {
    fn new(case: &Case) -> Self {
        let sends_aux = case.decode_stages().end == case.layers_of_stage.len();
        let kv = Component::new("kv", decode_kv(case));
        let aux = Component::new("aux", aux(case, DST_ITEMS, case.aux_rows.1, sends_aux));
        let (mut states, mut peer_states) = (Vec::new(), Vec::new());
        for (at, state) in case.states.iter().enumerate() {
            let (expected, peer) = decode_state(case, at);
            states.push(Component::new(state.kind.name(), expected));
            peer_states.push(peer);
        }
        let tensors = kv.expected.iter().enumerate();
        let peer = PeerLayout {
            kv: tensors.map(|(at, tensor)| tensor.peer(at == 0)).collect(),
            kv_layer_ids: decode_kv_ids(case),
            aux: aux
                .expected
                .iter()
                .map(|tensor| tensor.peer(false))
                .collect(),
            states: peer_states,
            tp_size: case.decode_tp,
            engine_rank: case.decode_dp_rank * case.decode_tp + case.decode_rank,
            dcp_size: case.dcp_size,
            dcp_rank: case.dcp_rank,
        };
        Self {
            peer,
            kv,
            aux,
            states,
        }
    }
}

/// A prefill rank's buffers and its planner for the decode rank.
struct Prefill {
    kv: Vec<Tensor>,
    aux: Vec<Tensor>,
    states: Vec<Vec<Tensor>>,
    layout: RankLayout,
    planner: PeerPlanner,
}

impl Prefill {
    fn new(
        case: &Case,
        stage: usize,
        tp_rank: u32,
        peer: &PeerLayout,
    ) -> Result<Self, TestCaseError> {
        let kv = prefill_kv(case, tp_rank, stage);
        let aux = aux(case, SRC_ITEMS, case.aux_rows.0, true);
        let (states, layouts) = (0..case.states.len())
            .map(|at| prefill_state(case, at, tp_rank, stage))
            .unzip();
        let layout = RankLayout {
            page_size: case.page_size,
            kv: kv_layout(case, stage, &kv),
            aux: aux.iter().map(Tensor::layout).collect(),
            states: layouts,
        };
        let parallel = ParallelConfig {
            tp_size: case.prefill_tp,
            tp_rank,
            pp_size: case.layers_of_stage.len() as u32,
            pp_rank: stage as u32,
            ..ParallelConfig::default()
        };
        let options = PlannerOptions::default();
        let planner = PeerPlanner::new(&layout, &parallel, peer, options).map_err(failed)?;
        Ok(Self {
            kv,
            aux,
            states,
            layout,
            planner,
        })
    }
}

fn check_request(case: &Case) -> Result<(), TestCaseError> {
    let mut decode = Decode::new(case);
    let announced: Vec<Vec<i32>> = case
        .states
        .iter()
        .map(|state| state.dst_indices.clone())
        .collect();
    for stage in case.decode_stages() {
        for tp_rank in feeding_ranks(case) {
            let prefill = Prefill::new(case, stage, tp_rank, &decode.peer)?;
            let planner = &prefill.planner;
            planner
                .check_announcement(&case.dst_pages, Some(case.aux_rows.1), &announced)
                .map_err(failed)?;
            for pages in chunks(case) {
                let behind = (pages.end as u32 * case.page_size).min(case.tokens);
                let before = pages.start as u32 * case.page_size;
                let chunk = KvChunk {
                    src_pages: &case.src_pages[pages.clone()],
                    position: pages.start,
                    dst_pages: &case.dst_pages,
                    decode_prefix_len: (case.prefix_pages * case.page_size * case.dcp_size).into(),
                    num_kv_tokens: Some(behind.saturating_sub(before).into()),
                };
                planner.check_kv_chunk(&chunk).map_err(failed)?;
                let plan = planner.plan_kv(&chunk).map_err(failed)?;
                decode.kv.carry_out(&prefill.kv, &plan)?;
            }
            let components = case
                .states
                .iter()
                .zip(&mut decode.states)
                .zip(&prefill.states);
            for (at, ((state, component), source)) in components.enumerate() {
                let (src, dst) = (&state.src_indices, &state.dst_indices);
                planner.check_state(at as u16, src, dst).map_err(failed)?;
                let plan = planner.plan_state(at as u16, src, dst).map_err(failed)?;
                prop_assert_eq!(plan.truncated_items as usize, src.len().abs_diff(dst.len()));
                component.carry_out(source, &plan)?;
            }
            let (src_row, dst_row) = case.aux_rows;
            planner.check_aux(src_row).map_err(failed)?;
            let plan = planner.plan_aux(src_row, dst_row).map_err(failed)?;
            decode.aux.carry_out(&prefill.aux, &plan)?;
        }
    }
    decode.kv.check()?;
    decode.aux.check()?;
    decode.states.iter().try_for_each(Component::check)
}

fn has_live(tensors: &[Tensor]) -> bool {
    tensors.iter().any(|tensor| !tensor.meaning.is_empty())
}

fn are_good(indices: &[i32], items: i32) -> bool {
    let distinct: HashSet<&i32> = indices.iter().collect();
    distinct.len() == indices.len() && indices.iter().all(|index| (0..items).contains(index))
}

/// Good layouts, any indices: what is announced is good or refused, and so is what is planned.
fn check_wrong_indices(case: &Case, src: &[i32], dst: &[i32]) -> Result<(), TestCaseError> {
    let decode = Decode::new(case);
    let stage = case.decode_stages().start;
    let prefill = Prefill::new(case, stage, feeding_ranks(case)[0], &decode.peer)?;
    let planner = &prefill.planner;
    // At most one pair is elided, so of two pairs one moves.
    let has_kv = prefill.kv.len() > 1 && has_live(&decode.kv.expected);
    if planner.check_announcement(dst, None, &[]).is_ok() {
        prop_assert!(!has_kv || are_good(dst, DST_ITEMS), "{dst:?} was announced");
        let chunk = KvChunk {
            src_pages: src,
            position: 0,
            dst_pages: dst,
            decode_prefix_len: 0,
            num_kv_tokens: Some(src.len() as u64 * u64::from(case.page_size)),
        };
        if let Ok(plan) = planner.plan_kv(&chunk) {
            let layouts = (&prefill.layout.kv.tensors[..], &decode.peer.kv[..]);
            check_plan(&plan, &bytes_of(layouts.0), &peer_bytes_of(layouts.1))?;
        }
    }
    for at in 0..case.states.len() {
        let layouts = (
            &prefill.layout.states[at].tensors,
            &decode.peer.states[at].tensors,
        );
        if let Ok(plan) = planner.plan_state(at as u16, src, dst) {
            prop_assert!(
                plan.is_empty() || are_good(dst, DST_ITEMS),
                "{dst:?} was planned"
            );
            check_plan(&plan, &bytes_of(layouts.0), &peer_bytes_of(layouts.1))?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn every_byte_of_a_request_lands_once_where_it_belongs(case in case()) {
        check_mapping(&case)?;
        check_request(&case)?;
    }

    #[test]
    fn wrong_indices_are_refused(
        case in case(),
        src in vec(prop_oneof![9 => 0..SRC_ITEMS, 1 => -2..SRC_ITEMS + 2], 1..5),
        dst in vec(prop_oneof![9 => 0..DST_ITEMS, 1 => -2..DST_ITEMS + 2], 1..5),
    ) {
        check_wrong_indices(&case, &src, &dst)?;
    }

    /// The wire does not say which layers of a window a stage has, so heads of windows cannot be
    /// sliced where the prefill has stages.
    #[test]
    fn windows_of_staged_prefills_across_tp_sizes_are_refused(mut case in case(), chosen: bool) {
        case.attention = AttentionKind::Mha;
        (case.prefill_tp, case.decode_tp) = if chosen { (1, 2) } else { (2, 1) };
        (case.decode_rank, case.total_heads) = (0, 2);
        (case.dcp_size, case.dcp_rank) = (1, 0);
        (case.layers_of_stage, case.decode_stage) = (vec![1, 1], None);
        (case.decode_drafts, case.kv_elided) = (0, None);
        case.dst_pages.truncate(case.src_pages.len());
        case.src_pages.truncate(case.dst_pages.len());
        case.tokens = case.src_pages.len() as u32 * case.page_size;
        case.cuts.clear();
        case.states.clear();
        check_request(&case)?;
        case.states = vec![StateCase {
            kind: StateKind::Swa,
            slabs: vec![Slab::Heads { head_len: case.head_len }],
            layers_of_stage: vec![1, 1],
            ids: Ids::Both,
            decode_reversed: false,
            src_indices: vec![0],
            dst_indices: vec![0],
            elided: None,
        }];
        let refused = check_request(&case).expect_err("not sliced").to_string();
        prop_assert!(refused.contains("swa: not supported"), "{refused}");
    }
}

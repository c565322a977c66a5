//! Whole lifetimes of rooms, without sockets, threads or waiting.

mod checks;
mod decode;
mod decode_end;
mod flight;
mod grants;
mod lives;
mod network;
mod network_rules;
mod prefill;
mod prefill_end;
mod properties;
mod rank;
mod simulation;

use std::time::{Duration, Instant};

use common::check::CheckMode;
use common::ids::{ByteLen, ComponentId, Endpoint, Generation, Room};
use common::plan::PlannerOptions;
use common::schema::{AttentionKind, KvLayout, RankLayout, StateKind, StateLayout, TensorLayout};
use common::topology::{
    DecodeSide, ParallelConfig, PrefillTopology, RankMapping, resolve_rank_mapping,
};
use common::wire::{
    Abort, AbortAck, Bootstrap, Checked, Checks, ControlMessage, EngineDesc, Hello, KvPoll,
    MemoryDesc, Register, Release, Status, TransferInfo, UnreadableSender,
};

use rank::{Done, Rank, components};

use crate::api::{RoomStatus, RoomView};
use crate::rank::core::{
    Announcement, ChunkCommand, ComponentKey, ComponentOutcome, ComponentReport, Counted,
    DecodeCore, DecodeIdentity, Effect, Event, Life, Limits, Mismatch, OpenCommand, PrefillCore,
    PrefillIdentity, PrefillTarget, RankCore, ResolvedPrefill, Timeouts, WhenFull,
};

const KV_PAGES: u64 = 16;
const STATE_ROWS: u64 = 8;
const AUX_ROWS: u64 = 4;
const BOOTSTRAP: &str = "bootstrap:1";

/// Every timeout is another one, so a test sees which applies.
const TIMEOUTS: Timeouts = Timeouts {
    bootstrap: Duration::from_secs(10),
    waiting: Duration::from_secs(20),
    transfer: Duration::from_secs(30),
    retention: Duration::from_secs(60),
    tombstone: Duration::from_secs(90),
    heartbeat: Duration::from_secs(5),
    heartbeat_misses: 2,
    report: Duration::from_secs(5),
};

fn room(number: u64) -> Room {
    Room::new(number).expect("a room")
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn prefill_endpoint(rank: u32) -> Endpoint {
    Endpoint::new("prefill", 1 + rank as u16)
}

fn decode_endpoint(rank: u32) -> Endpoint {
    Endpoint::new("decode", 1 + rank as u16)
}

fn engine_key(rank: u32) -> String {
    format!("decode-engine-{rank}")
}

fn tensor(items: u64, item_len: u64) -> TensorLayout {
    TensorLayout {
        bytes: ByteLen(items * item_len),
        item_len: ByteLen(item_len),
    }
}

/// K and V of one layer with four heads (or one latent tensor), one paged component, one aux row.
fn layout(attention: AttentionKind, tp_size: u32) -> RankLayout {
    let (tensors, heads) = match attention {
        AttentionKind::Mha => (2, 4),
        _ => (1, 1),
    };
    let page_len = if heads == 1 {
        128
    } else {
        128 / u64::from(tp_size)
    };
    RankLayout {
        page_size: 2,
        kv: KvLayout {
            tensors: vec![tensor(KV_PAGES, page_len); tensors],
            layer_ids: Vec::new(),
            start_layer: 0,
            num_draft_entries: 0,
            attention,
            head_num: (heads / tp_size).max(1),
            total_head_num: heads,
        },
        aux: vec![tensor(AUX_ROWS, 16)],
        states: vec![StateLayout {
            kind: StateKind::Dsa,
            tensors: vec![tensor(STATE_ROWS, 32)],
            dims: Vec::new(),
            outer_counts: Vec::new(),
            conv_shard_groups: Vec::new(),
            layer_ids: Vec::new(),
        }],
    }
}

/// Two engines, as far as ranks of either need to know.
#[derive(Clone, Copy, Debug)]
struct Engines {
    attention: AttentionKind,
    prefill_tp: u32,
    decode_tp: u32,
    policy: &'static str,
    limits: Limits,
    /// What decode ranks ask for.
    checks_opt: Option<CheckMode>,
}

impl Engines {
    fn of(attention: AttentionKind, prefill_tp: u32, decode_tp: u32) -> Self {
        Self {
            attention,
            prefill_tp,
            decode_tp,
            policy: "early",
            limits: Limits::default(),
            checks_opt: None,
        }
    }

    fn one_to_one() -> Self {
        Self::of(AttentionKind::Mha, 1, 1)
    }

    fn deferred() -> Self {
        Self {
            policy: "prefill_complete",
            ..Self::one_to_one()
        }
    }

    fn prefill(&self, rank: u32) -> Rank {
        let identity = PrefillIdentity {
            layout: layout(self.attention, self.prefill_tp),
            parallel: ParallelConfig {
                tp_size: self.prefill_tp,
                tp_rank: rank,
                ..ParallelConfig::default()
            },
            planner: PlannerOptions::default(),
            unique_rank: i64::from(rank),
            is_deferred: self.policy == "prefill_complete",
            contact: (prefill_endpoint(rank), EngineDesc::default()),
            checks_opt: None,
        };
        let core = PrefillCore::new(identity, TIMEOUTS, self.limits);
        Rank::new(RankCore::Prefill(Box::new(core)))
    }

    fn decode(&self, rank: u32) -> Rank {
        let identity = DecodeIdentity {
            layout: layout(self.attention, self.decode_tp),
            register: self.register(rank),
            allocation_policy: self.policy.to_owned(),
            first_generation: 0,
            is_only_way_in: |_, peer| peer.hostname == "tcp only",
            checks_opt: self.checks_opt,
        };
        let core = DecodeCore::new(identity, TIMEOUTS, self.limits);
        Rank::new(RankCore::Decode(Box::new(core)))
    }

    fn register(&self, rank: u32) -> Register {
        let layout = layout(self.attention, self.decode_tp);
        let desc = |tensor: &TensorLayout| MemoryDesc {
            engine_key: engine_key(rank),
            size: tensor.bytes.0,
            ..MemoryDesc::default()
        };
        let state = &layout.states[0];
        Register {
            endpoint: decode_endpoint(rank),
            engine: EngineDesc {
                key: engine_key(rank),
                ..EngineDesc::default()
            },
            kv: layout.kv.tensors.iter().map(desc).collect(),
            aux: layout.aux.iter().map(desc).collect(),
            states: vec![
                state
                    .tensors
                    .iter()
                    .map(|tensor| Some(desc(tensor)))
                    .collect(),
            ],
            gpu_id: 0,
            tp_size: self.decode_tp,
            engine_rank: rank,
            kv_item_len: layout.kv.tensors[0].item_len.0,
            state_item_lens: vec![vec![state.tensors[0].item_len.0 as u32]],
            state_dims: vec![Vec::new()],
            dcp_size: 1,
            dcp_rank: 0,
            state_layer_ids: vec![Vec::new()],
            kv_layer_ids: Vec::new(),
            release: Release::NEWEST,
        }
    }

    fn mapping(&self, decode_rank: u32) -> RankMapping {
        let prefill = PrefillTopology {
            attn_tp_size: self.prefill_tp,
            attn_cp_size: 1,
            dp_size: 1,
            pp_size: 1,
            page_size: None,
            kv_cache_dtype: None,
            follow_bootstrap_room: false,
            enable_dsa_cache_layer_split: false,
            enable_kv_cache_sharding: false,
            decode_allocation_policy: self.policy.to_owned(),
        };
        let decode = DecodeSide {
            attn_tp_size: self.decode_tp,
            engine_rank: decode_rank,
            attn_cp_size: 1,
            pp_size: 1,
            pp_rank: 0,
            is_mla: self.attention == AttentionKind::Mla,
            all_cp_ranks: false,
        };
        resolve_rank_mapping(&prefill, &decode).expect("sizes that fit")
    }

    /// What the bootstrap server would lead a decode rank to.
    fn resolved(&self, decode_rank: u32) -> ResolvedPrefill {
        let mapping = self.mapping(decode_rank);
        let is_mla = self.attention == AttentionKind::Mla;
        let targets = mapping.target_tp_ranks.iter().map(|rank| PrefillTarget {
            endpoint: prefill_endpoint(*rank),
            is_dummy: mapping.is_dummy(is_mla, *rank),
            unique_rank: i64::from(*rank),
            is_ferry: false,
        });
        ResolvedPrefill {
            bootstrap: BOOTSTRAP.to_owned(),
            dp_rank: 0,
            is_only_dp_rank: true,
            targets: targets.collect(),
            mapping,
            decode_allocation_policy: self.policy.to_owned(),
        }
    }

    /// A decode rank's TRANSFER_INFO for pages 4 to 7, state row 2 and aux row 3.
    fn info(&self, number: u64, decode_rank: u32) -> TransferInfo {
        TransferInfo {
            room: room(number),
            endpoint: decode_endpoint(decode_rank),
            engine_key: engine_key(decode_rank),
            kv_indices: vec![4, 5, 6, 7],
            aux_index: Some(3),
            state_indices: vec![vec![2]],
            required_dst_info_num: self.mapping(decode_rank).required_dst_info_num,
            decode_prefix_len: None,
            grant_opt: None,
        }
    }
}

fn dummy(info: TransferInfo) -> TransferInfo {
    TransferInfo {
        kv_indices: Vec::new(),
        aux_index: None,
        state_indices: Vec::new(),
        ..info
    }
}

fn announcement() -> Announcement {
    Announcement {
        kv_indices: vec![4, 5, 6, 7],
        aux_index_opt: Some(3),
        state_indices: vec![vec![2]],
        decode_prefix_len_opt: None,
    }
}

fn chunk(pages: impl IntoIterator<Item = i32>, is_last: bool) -> ChunkCommand {
    ChunkCommand {
        kv_indices: pages.into_iter().collect(),
        state_indices: if is_last { vec![vec![1]] } else { Vec::new() },
        num_kv_tokens_opt: None,
        aux_index_opt: None,
        is_last,
    }
}

fn open(number: u64) -> Event {
    Event::Open(OpenCommand {
        room: room(number),
        bootstrap_opt: Some(BOOTSTRAP.to_owned()),
        prefill_dp_rank_opt: None,
        aux_index_opt: Some(0),
    })
}

fn abort_message(number: u64, decode_rank: u32, generation: i64) -> ControlMessage {
    ControlMessage::Abort(Abort {
        room: room(number),
        reply_to: Some(decode_endpoint(decode_rank)),
        generation: Some(generation),
    })
}

fn status_message(number: u64, prefill_rank: i64, poll: KvPoll) -> ControlMessage {
    ControlMessage::Status(Status {
        room: room(number),
        poll,
        prefill_rank,
        reason: None,
    })
}

fn ack_message(number: u64, prefill_rank: i64, generation: i64) -> ControlMessage {
    ControlMessage::AbortAck(AbortAck {
        room: room(number),
        prefill_rank,
        generation: Some(generation),
    })
}

fn bootstrap_message(number: u64, decode_rank: u32) -> ControlMessage {
    ControlMessage::Bootstrap(Bootstrap {
        room: room(number),
        reply_to: decode_endpoint(decode_rank),
    })
}

fn moved() -> ComponentOutcome {
    ComponentOutcome::Moved {
        bytes: 64,
        ranges: 1,
        truncated_items: 0,
        elapsed: Duration::from_millis(1),
        transport: "local",
        checks: Vec::new(),
    }
}

fn failed(is_quiesced: bool) -> ComponentOutcome {
    ComponentOutcome::Failed {
        kind: "io",
        reason: "the peer reset the connection".to_owned(),
        is_quiesced,
        is_source_free: is_quiesced,
        transport: "tcp",
    }
}

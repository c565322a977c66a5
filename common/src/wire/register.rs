//! `REGISTER`: what a decode rank tells a prefill rank once, before its first room.

use crate::ids::Endpoint;
use crate::wire::Release;
use crate::wire::descriptor::{EngineDesc, MemoryDesc};

/// The decoded frames of one REGISTER. Lists keep the order of the wire.
#[derive(Clone, Debug, PartialEq)]
pub struct Register {
    /// The decode rank's control socket.
    pub endpoint: Endpoint,
    /// The decode rank's io engine.
    pub engine: EngineDesc,
    /// One descriptor for each KV tensor.
    pub kv: Vec<MemoryDesc>,
    /// One descriptor for each aux buffer.
    pub aux: Vec<MemoryDesc>,
    /// For each state component one descriptor a tensor; `None` where the buffer is elided.
    pub states: Vec<Vec<Option<MemoryDesc>>>,
    /// The decode rank's device number; -1 for host memory.
    pub gpu_id: i64,
    /// Attention TP size of the decode side.
    pub tp_size: u32,
    /// The decode side's engine rank.
    pub engine_rank: u32,
    /// Bytes of one page of the first KV tensor (the only one that the wire carries).
    pub kv_item_len: u64,
    /// Bytes of one item, by component and tensor.
    pub state_item_lens: Vec<Vec<u64>>,
    /// Sharded dimension, by component and tensor; 0 marks a replicated item.
    pub state_dims: Vec<Vec<u32>>,
    /// Decode context parallel size; 1 where the peer's release has no such frame.
    pub dcp_size: u32,
    /// Decode context parallel rank.
    pub dcp_rank: u32,
    /// Layer of each state tensor, by component; empty where not given.
    pub state_layer_ids: Vec<Vec<u32>>,
    /// Layer of each KV tensor; empty where not given.
    pub kv_layer_ids: Vec<u32>,
    /// The row of the release table whose shape these frames have.
    pub release: Release,
}

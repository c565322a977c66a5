//! `TRANSFER_INFO`: where the state of one room must land.

use crate::ids::{Endpoint, Room};

/// The decoded frames of one TRANSFER_INFO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferInfo {
    /// The room.
    pub room: Room,
    /// The decode rank's control socket.
    pub endpoint: Endpoint,
    /// The decode rank's engine key, as registered before.
    pub engine_key: String,
    /// Destination pages, in the order of the prompt.
    pub kv_indices: Vec<i32>,
    /// Destination row of the aux buffers; `None` when the frame is empty.
    pub aux_index: Option<u32>,
    /// Destination indices by component; an empty list where the component has none.
    pub state_indices: Vec<Vec<i32>>,
    /// How many decode ranks report to this prefill rank for the room.
    pub required_dst_info_num: u32,
    /// Tokens that the decode side already holds; `None` when the frame is empty or absent.
    pub decode_prefix_len: Option<u64>,
}

impl TransferInfo {
    /// A dummy has nothing to receive from this prefill rank: no pages and no aux row, whatever
    /// the prefix says (0.5.23 puts the prefix into dummy messages, then takes them for real).
    pub fn is_dummy(&self) -> bool {
        self.kv_indices.is_empty() && self.aux_index.is_none()
    }
}

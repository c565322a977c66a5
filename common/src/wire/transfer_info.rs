//! `TRANSFER_INFO`: where the state of one room must land.

use serde::{Deserialize, Serialize};

use crate::ids::{Endpoint, Room};
use crate::wire::Release;
use crate::wire::error::WireError;
use crate::wire::frame::{self, Frame};
use crate::wire::int_lists;

/// Whom a TRANSFER_INFO is for, and perhaps permission to write, in its trailer between Ferry ranks.
/// What a process's exit proves, or a permission that was taken back, is not true of another process
/// that has taken its place, so that must not take its announcements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Key of the io engine that it is for.
    pub engine: String,
    /// What the decode's io engine is shown by each write, if its permission can be taken back.
    #[serde(with = "serde_bytes")]
    pub key: Option<[u8; 16]>,
}

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
    /// What stands in the trailer beside it; whoever reads both puts it here. The frames hold none.
    pub grant_opt: Option<Grant>,
}

impl TransferInfo {
    /// Frames without which there is no TRANSFER_INFO, the guard included: everything through the
    /// state indices.
    pub(crate) const MIN_FRAMES: usize = 8;
    /// Frames that a TRANSFER_INFO can have.
    pub(crate) const KNOWN_FRAMES: usize = 10;

    /// A dummy has nothing to receive from this prefill rank: no pages and no aux row, whatever
    /// the prefix says (0.5.23 puts the prefix into dummy messages, then takes them for real).
    pub fn is_dummy(&self) -> bool {
        self.kv_indices.is_empty() && self.aux_index.is_none()
    }

    pub(crate) fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [
            _guard,
            room,
            host,
            port,
            engine_key,
            kv_indices,
            aux_index,
            state_indices,
            rest @ ..,
        ] = frames
        else {
            return Err(WireError::TooFewFrames {
                message: "transfer_info",
                need: Self::MIN_FRAMES,
                have: frames.len(),
            });
        };
        let aux_index = if aux_index.is_empty() {
            None
        } else {
            Some(frame::parse_u32(aux_index, "aux index")?)
        };
        // 0.5.12 and before have one flat array here. It is not recognised as such: its REGISTER
        // was refused already, and the bytes of a flat array are no list of lists.
        let state_indices = int_lists::unpack_lists(state_indices, "state indices")?;
        let required_dst_info_num = match rest.first() {
            Some(number) => frame::parse_u32(number, "required_dst_info_num")?,
            None => 1,
        };
        let decode_prefix_len = match rest.get(1) {
            Some(length) if !length.is_empty() => {
                Some(frame::parse_u64(length, "decode_prefix_len")?)
            }
            _ => None,
        };
        Ok(Self {
            room: frame::parse_room(room)?,
            endpoint: frame::parse_endpoint(host, port)?,
            engine_key: frame::parse_ascii(engine_key, "engine key")?,
            kv_indices: int_lists::unpack_array(kv_indices, "kv indices")?,
            aux_index,
            state_indices,
            required_dst_info_num,
            decode_prefix_len,
            grant_opt: None,
        })
    }

    pub(crate) fn encode(&self, release: Release) -> Result<Vec<Frame>, WireError> {
        let form = release.form();
        let state_indices = if form.nested_state {
            int_lists::pack_lists(&self.state_indices, "state indices")?
        } else {
            match self.state_indices.as_slice() {
                [] => Frame::new(),
                [only] => int_lists::pack_array(only),
                _ => {
                    return Err(WireError::NotInRelease {
                        what: "transfer_info",
                        release: form.name,
                        detail: "it has one flat list of state indices",
                    });
                }
            }
        };
        let mut frames = vec![
            frame::GUARD.to_vec(),
            frame::ascii(self.room),
            self.endpoint.host.clone().into_bytes(),
            frame::ascii(self.endpoint.port),
            self.engine_key.clone().into_bytes(),
            int_lists::pack_array(&self.kv_indices),
            self.aux_index.map(frame::ascii).unwrap_or_default(),
            state_indices,
            frame::ascii(self.required_dst_info_num),
        ];
        if form.transfer_info_frames > frames.len() {
            // SGLang writes a prefix of zero as an empty frame.
            let prefix = self.decode_prefix_len.filter(|length| *length > 0);
            frames.push(prefix.map(frame::ascii).unwrap_or_default());
        }
        Ok(frames)
    }
}

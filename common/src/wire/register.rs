//! `REGISTER`: what a decode rank tells a prefill rank once, before its first room.

use crate::ids::Endpoint;
use crate::wire::Release;
use crate::wire::descriptor::{self, EngineDesc, MemoryDesc};
use crate::wire::error::{STATE_DESCRIPTORS, WireError};
use crate::wire::frame::{self, Frame};
use crate::wire::int_lists;

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
    pub state_item_lens: Vec<Vec<u32>>,
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
    /// The oldest row of the release table whose shape these frames have.
    pub release: Release,
}

impl Register {
    /// Frames without which there is no REGISTER, the guard included: everything through
    /// `kv_item_lens[0]`. Frames behind it may be absent (older peers).
    pub(crate) const MIN_FRAMES: usize = 12;
    /// Frames that a REGISTER can have.
    pub(crate) const KNOWN_FRAMES: usize = 18;

    pub(crate) fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [
            _guard,
            _no_room,
            host,
            port,
            engine,
            kv,
            aux,
            states,
            gpu_id,
            tp_size,
            engine_rank,
            kv_item_len,
            rest @ ..,
        ] = frames
        else {
            return Err(WireError::TooFewFrames {
                message: "register",
                need: Self::MIN_FRAMES,
                have: frames.len(),
            });
        };
        // States first: a flat list decides that nothing else of the message can be trusted.
        let states = descriptor::unpack_nested(states, STATE_DESCRIPTORS)?;
        let optional = |position: usize| rest.get(position).copied().unwrap_or_default();
        let number_or = |position: usize, what: &'static str, absent: u32| match optional(position)
        {
            b"" => Ok(absent),
            number => frame::parse_u32(number, what),
        };
        Ok(Self {
            endpoint: frame::parse_endpoint(host, port)?,
            engine: EngineDesc::unpack(engine)?,
            kv: descriptor::unpack_list(kv, "kv descriptors")?,
            aux: descriptor::unpack_list(aux, "aux descriptors")?,
            states,
            gpu_id: frame::parse_i64(gpu_id, "gpu id")?,
            tp_size: frame::parse_u32(tp_size, "decode attn_tp_size")?,
            engine_rank: frame::parse_u32(engine_rank, "decode engine_rank")?,
            kv_item_len: frame::parse_u64(kv_item_len, "kv item length")?,
            state_item_lens: int_lists::unpack_lists(optional(0), "state item lengths")?,
            state_dims: int_lists::unpack_lists(optional(1), "state dims")?,
            dcp_size: number_or(2, "dcp_size", 1)?,
            dcp_rank: number_or(3, "dcp_rank", 0)?,
            state_layer_ids: int_lists::unpack_lists(optional(4), "state layer ids")?,
            kv_layer_ids: int_lists::unpack_array(optional(5), "kv layer ids")?,
            release: Release::of_register(frames.len()),
        })
    }

    pub(crate) fn encode(&self, release: Release) -> Result<Vec<Frame>, WireError> {
        let form = release.form();
        let mut frames = vec![
            frame::GUARD.to_vec(),
            frame::NO_ROOM.to_vec(),
            self.endpoint.host.clone().into_bytes(),
            frame::ascii(self.endpoint.port),
            self.engine.pack()?,
            descriptor::pack_list(&self.kv, "kv descriptors")?,
            descriptor::pack_list(&self.aux, "aux descriptors")?,
        ];
        let lengths_and_dims = if form.nested_state {
            frames.push(descriptor::pack_nested(&self.states, STATE_DESCRIPTORS)?);
            [
                int_lists::pack_lists(&self.state_item_lens, "state item lengths")?,
                int_lists::pack_lists(&self.state_dims, "state dims")?,
            ]
        } else {
            self.flat_state(release, &mut frames)?
        };
        frames.extend([
            frame::ascii(self.gpu_id),
            frame::ascii(self.tp_size),
            frame::ascii(self.engine_rank),
            frame::ascii(self.kv_item_len),
        ]);
        frames.extend(lengths_and_dims);
        if form.register_frames > frames.len() {
            frames.extend([
                frame::ascii(self.dcp_size),
                frame::ascii(self.dcp_rank),
                int_lists::pack_lists(&self.state_layer_ids, "state layer ids")?,
                int_lists::pack_array(&self.kv_layer_ids),
            ]);
        }
        Ok(frames)
    }

    /// The flat form of 0.5.12 and before: it can hold one component.
    fn flat_state(
        &self,
        release: Release,
        frames: &mut Vec<Frame>,
    ) -> Result<[Frame; 2], WireError> {
        let refused = |detail| WireError::NotInRelease {
            what: "register",
            release: release.name(),
            detail,
        };
        let several = || refused("it has one flat list for all components");
        let descs = match self.states.as_slice() {
            [] => Vec::new(),
            [only] => only
                .iter()
                .cloned()
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| refused("it has no elided buffers"))?,
            _ => return Err(several()),
        };
        let flat = |lists: &[Vec<u32>]| match lists {
            [] => Ok(Frame::new()),
            [only] => Ok(int_lists::pack_array(only)),
            _ => Err(several()),
        };
        frames.push(descriptor::pack_list(&descs, STATE_DESCRIPTORS)?);
        Ok([flat(&self.state_item_lens)?, flat(&self.state_dims)?])
    }
}

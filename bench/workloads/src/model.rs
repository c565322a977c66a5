//! The models of the reference runs: what one request's state consists of, and how both engines
//! lay it out.

use common::ids::ByteLen;
use common::schema::{AttentionKind, KvLayout, RankLayout, StateKind, StateLayout, TensorLayout};

/// Tokens of every prompt of the reference runs.
pub const PROMPT_TOKENS: u32 = 1024;

/// Rows of SGLang's metadata buffers: token ids, cached tokens, log-probabilities, their indices,
/// the top ones of both, and the room.
const AUX_ROW_BYTES: [u64; 7] = [64, 64, 64, 64, 512, 512, 64];

/// Linear-attention layers, each with a convolution and a recurrent state for every request.
#[derive(Clone, Copy, Debug)]
pub struct LinearAttention {
    /// How many layers.
    pub layers: u32,
    /// Channels of the convolution's q, k and v.
    pub conv_groups: [u32; 3],
    /// Bytes that one channel keeps.
    pub conv_channel_bytes: u64,
    /// Heads of the recurrent state.
    pub recurrent_heads: u32,
    /// Bytes of one head's matrix.
    pub recurrent_head_bytes: u64,
}

/// A model and the run that was measured with it.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Its name on the command line and in the results.
    pub name: &'static str,
    /// Layers that have K and V.
    pub kv_layers: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Bytes of one head of one token.
    pub kv_head_bytes: u64,
    /// Linear attention, if any.
    pub linear_opt: Option<LinearAttention>,
    /// Requests that the reference run kept in flight.
    pub concurrency: usize,
    /// Requests a second that the reference run moved.
    pub reference_rate: f64,
}

/// Dense: 36 layers, 8 KV heads of 128 in bfloat16.
pub const QWEN3_8B: Model = Model {
    name: "qwen3-8b",
    kv_layers: 36,
    kv_heads: 8,
    kv_head_bytes: 128 * 2,
    linear_opt: None,
    concurrency: 32,
    reference_rate: 17.1,
};

/// Hybrid: 12 of 48 layers with 2 KV heads of 256 in bfloat16, 36 gated-delta-net layers.
pub const QWEN35_122B: Model = Model {
    name: "qwen3.5-122b",
    kv_layers: 12,
    kv_heads: 2,
    kv_head_bytes: 256 * 2,
    linear_opt: Some(LinearAttention {
        layers: 36,
        conv_groups: [2048, 2048, 8192],
        conv_channel_bytes: 3 * 2,
        recurrent_heads: 64,
        recurrent_head_bytes: 128 * 128 * 4,
    }),
    concurrency: 64,
    reference_rate: 9.8,
};

/// All of them.
pub const MODELS: [Model; 2] = [QWEN3_8B, QWEN35_122B];

/// How many items of each component a side has room for.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Pages of each KV tensor.
    pub pages: u32,
    /// Slots of each state tensor and rows of each aux buffer.
    pub requests: u32,
}

impl Capacity {
    /// Room for so many requests and a quarter more, so that a request's pages are never just
    /// those that the last one gave back.
    pub fn for_requests(requests: usize, page_size: u32) -> Self {
        let requests = u32::try_from(requests + requests.div_ceil(4)).unwrap_or(u32::MAX);
        Self {
            pages: requests.saturating_mul(pages_per_request(page_size)),
            requests,
        }
    }
}

/// Pages of one request.
pub const fn pages_per_request(page_size: u32) -> u32 {
    PROMPT_TOKENS.div_ceil(page_size)
}

impl Model {
    /// The model of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        MODELS.into_iter().find(|model| model.name == name)
    }

    /// Bytes of K, or of V, of one token in one layer.
    pub fn token_bytes(&self) -> u64 {
        u64::from(self.kv_heads) * self.kv_head_bytes
    }

    /// Bytes of one request's state.
    pub fn request_bytes(&self, page_size: u32) -> u64 {
        let one = Capacity {
            pages: pages_per_request(page_size),
            requests: 1,
        };
        let layout = self.layout(page_size, one);
        let states = layout.states.iter().flat_map(|state| &state.tensors);
        let tensors = layout.kv.tensors.iter().chain(states).chain(&layout.aux);
        tensors.map(|tensor| tensor.bytes.get()).sum()
    }

    /// A rank's buffers; TP size 1, so that both sides have the same.
    pub fn layout(&self, page_size: u32, capacity: Capacity) -> RankLayout {
        let tensor = |item_len: u64, items: u32| TensorLayout {
            bytes: ByteLen(item_len * u64::from(items)),
            item_len: ByteLen(item_len),
        };
        let page = tensor(self.token_bytes() * u64::from(page_size), capacity.pages);
        let states = self.linear_opt.map(|linear| {
            let layers = linear.layers as usize;
            let channels: u32 = linear.conv_groups.iter().sum();
            let conv = u64::from(channels) * linear.conv_channel_bytes;
            let recurrent = u64::from(linear.recurrent_heads) * linear.recurrent_head_bytes;
            let twice = |conv, recurrent| [vec![conv; layers], vec![recurrent; layers]].concat();
            let slots = capacity.requests;
            let mut conv_shard_groups = vec![Some(linear.conv_groups.to_vec()); layers];
            conv_shard_groups.resize(2 * layers, None);
            // Three linear layers, then one of full attention.
            let layer_ids = (0..linear.layers).map(|layer| layer / 3 * 4 + layer % 3);
            StateLayout {
                kind: StateKind::Mamba,
                tensors: [
                    vec![tensor(conv, slots); layers],
                    vec![tensor(recurrent, slots); layers],
                ]
                .concat(),
                dims: twice(channels, linear.recurrent_heads),
                outer_counts: vec![1; 2 * layers],
                conv_shard_groups,
                layer_ids: layer_ids.clone().chain(layer_ids).collect(),
            }
        });
        RankLayout {
            page_size,
            kv: KvLayout {
                tensors: vec![page; 2 * self.kv_layers as usize],
                layer_ids: Vec::new(),
                start_layer: 0,
                num_draft_entries: 0,
                attention: AttentionKind::Mha,
                head_num: self.kv_heads,
                total_head_num: self.kv_heads,
            },
            aux: AUX_ROW_BYTES
                .iter()
                .map(|row_bytes| tensor(*row_bytes, capacity.requests))
                .collect(),
            states: states.into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_sizes_of_the_reference_runs() {
        let dense = QWEN3_8B.request_bytes(64);
        assert_eq!(dense, 1024 * 36 * 2 * 2048 + 1344);
        let hybrid = QWEN35_122B.request_bytes(64);
        let kv = 1024 * 12 * 2 * 1024;
        let mamba = 36 * (12_288 * 3 * 2 + 64 * 128 * 128 * 4);
        assert_eq!(hybrid, kv + mamba + 1344);
    }
}

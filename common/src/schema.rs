//! A rank's buffers, as its engine registers them: tensors, pages, components.

use crate::ids::{ByteLen, ComponentId};
use crate::wire::Register;

/// One buffer of equal items (pages, slots or rows) that lie one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// Size of the whole buffer; 0 when the buffer is elided on this rank.
    pub bytes: ByteLen,
    /// Size of one item; 0 when the buffer is elided on this rank.
    pub item_len: ByteLen,
}

/// How a model keeps its KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// K and V lists: the first half of the tensors is K, the second half is V.
    Mha,
    /// One latent list, the same on every TP rank.
    Mla,
    /// One latent list beside sharded linear-attention state (SGLang's `is_hybrid_mla_backend`).
    HybridMla,
}

/// The paged KV cache of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// K then V (MHA) or one list (MLA).
    pub tensors: Vec<TensorLayout>,
    /// Layer of each tensor; empty when the engine gives none.
    pub layer_ids: Vec<u32>,
    /// First layer of this pipeline stage.
    pub start_layer: u32,
    /// How many trailing entries belong to a draft model.
    pub num_draft_entries: u32,
    /// MHA or MLA.
    pub attention: AttentionKind,
    /// KV heads held by this rank.
    pub head_num: u32,
    /// KV heads of the model, over all ranks, replicas counted once.
    pub total_head_num: u32,
}

/// What a state component is; each kind has its own rule for moving (`spec/planning.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StateKind {
    /// One slot a request: convolution and recurrent tensors.
    Mamba,
    /// Sliding-window pages.
    Swa,
    /// Sparse-attention indexer pages.
    Dsa,
    /// Ring rows of a sliding window.
    SwaRing,
    /// Compressed rows, one per 128 tokens.
    C128State,
    /// Pending rows of quantised sparse attention.
    QsaPending,
    /// Compressed rows of quantised sparse attention.
    QsaCompressed,
    /// MiniMax's index keys.
    MinimaxIndexK,
    /// MiniMax's dense KV rows.
    MinimaxDenseKv,
    /// Refused: its indices are a descriptor, not rows.
    DsaTail,
    /// Refused by MoRI-flavoured peers.
    RequestRow,
    /// Refused by MoRI-flavoured peers.
    BlockScale,
    /// Refused by MoRI-flavoured peers.
    BlockScaleSwa,
}

impl StateKind {
    /// Every kind, in the order of the specification.
    pub const ALL: [Self; 13] = [
        Self::Mamba,
        Self::Swa,
        Self::Dsa,
        Self::SwaRing,
        Self::C128State,
        Self::QsaPending,
        Self::QsaCompressed,
        Self::MinimaxIndexK,
        Self::MinimaxDenseKv,
        Self::DsaTail,
        Self::RequestRow,
        Self::BlockScale,
        Self::BlockScaleSwa,
    ];

    /// SGLang's name, which is also the metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mamba => "mamba",
            Self::Swa => "swa",
            Self::Dsa => "dsa",
            Self::SwaRing => "swa_ring",
            Self::C128State => "c128_state",
            Self::QsaPending => "qsa_pending",
            Self::QsaCompressed => "qsa_compressed",
            Self::MinimaxIndexK => "minimax_index_k",
            Self::MinimaxDenseKv => "minimax_dense_kv",
            Self::DsaTail => "dsa_tail",
            Self::RequestRow => "request_row",
            Self::BlockScale => "block_scale",
            Self::BlockScaleSwa => "block_scale_swa",
        }
    }

    /// The kind of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// One state component of one rank. Lists run parallel to `tensors`, or are empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Which rule it moves by.
    pub kind: StateKind,
    /// Its buffers.
    pub tensors: Vec<TensorLayout>,
    /// Size of the sharded dimension of each tensor on this rank; 0 marks a replicated item.
    pub dims: Vec<u32>,
    /// How many outer rows stand before the sharded dimension of each tensor (1 if none).
    pub outer_counts: Vec<u32>,
    /// Sizes of the parts (q, k, v) of a convolution's sharded dimension over all ranks of one
    /// shard; `None` for a tensor that is one slice.
    pub conv_shard_groups: Vec<Option<Vec<u32>>>,
    /// Layer of each tensor; empty when the engine gives none.
    pub layer_ids: Vec<u32>,
}

/// All registered buffers of one rank (SGLang's `KVArgs`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLayout {
    /// Tokens of one page.
    pub page_size: u32,
    /// The paged KV cache.
    pub kv: KvLayout,
    /// Auxiliary buffers, one row a request in each.
    pub aux: Vec<TensorLayout>,
    /// State components, in the order of their registration.
    pub states: Vec<StateLayout>,
}

impl RankLayout {
    /// The metric label of a component: `kv`, `aux`, or the state kind's name.
    /// `unknown` for a position that this layout does not have.
    pub fn component_label(&self, component: ComponentId) -> &'static str {
        match component {
            ComponentId::Kv => crate::metrics::COMPONENT_KV,
            ComponentId::Aux => crate::metrics::COMPONENT_AUX,
            ComponentId::State(index) => self
                .states
                .get(usize::from(index))
                .map_or(crate::metrics::COMPONENT_UNKNOWN, |state| state.kind.name()),
        }
    }
}

/// One buffer of a decode rank, as it registered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerTensor {
    /// Size of the whole buffer; 0 when the buffer is elided there.
    pub bytes: ByteLen,
    /// Size of one item; `None` where the wire does not carry it.
    pub item_len_opt: Option<ByteLen>,
}

impl PeerTensor {
    /// Whether nothing can land in this buffer: a length of 0, or no buffer at all.
    pub const fn is_elided(&self) -> bool {
        self.bytes.0 == 0 || matches!(self.item_len_opt, Some(ByteLen(0)))
    }
}

/// One state component of a decode rank. Lists run parallel to `tensors`, or are empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerState {
    /// Its buffers.
    pub tensors: Vec<PeerTensor>,
    /// Sharded dimension of each tensor; 0 marks a replicated item.
    pub dims: Vec<u32>,
    /// Layer of each tensor.
    pub layer_ids: Vec<u32>,
}

/// What a prefill rank knows of a decode rank's buffers: a REGISTER carries no state types, page
/// size or data type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerLayout {
    /// The KV tensors; only the first one's item length is on the wire.
    pub kv: Vec<PeerTensor>,
    /// Layer of each KV tensor; may be empty.
    pub kv_layer_ids: Vec<u32>,
    /// Auxiliary buffers; item lengths are not on the wire.
    pub aux: Vec<PeerTensor>,
    /// State components.
    pub states: Vec<PeerState>,
    /// Attention TP size.
    pub tp_size: u32,
    /// Engine rank, which counts over data-parallel groups too.
    pub engine_rank: u32,
    /// Decode context parallel size.
    pub dcp_size: u32,
    /// Decode context parallel rank.
    pub dcp_rank: u32,
}

impl From<&Register> for PeerLayout {
    /// Takes the sizes out of a registration. Item lengths, dims and layer ids of a component that
    /// the lists do not reach are unknown (`None`, empty); nothing is guessed.
    fn from(register: &Register) -> Self {
        let kv = register
            .kv
            .iter()
            .enumerate()
            .map(|(position, desc)| PeerTensor {
                bytes: ByteLen(desc.size),
                item_len_opt: (position == 0).then_some(ByteLen(register.kv_item_len)),
            });
        let aux = register.aux.iter().map(|desc| PeerTensor {
            bytes: ByteLen(desc.size),
            item_len_opt: None,
        });
        let states = register
            .states
            .iter()
            .enumerate()
            .map(|(component, descs)| {
                let item_lens = register
                    .state_item_lens
                    .get(component)
                    .map_or(&[][..], Vec::as_slice);
                let tensors = descs
                    .iter()
                    .enumerate()
                    .map(|(position, desc_opt)| PeerTensor {
                        bytes: ByteLen(desc_opt.as_ref().map_or(0, |desc| desc.size)),
                        item_len_opt: item_lens
                            .get(position)
                            .map(|length| ByteLen(u64::from(*length))),
                    });
                PeerState {
                    tensors: tensors.collect(),
                    dims: register
                        .state_dims
                        .get(component)
                        .cloned()
                        .unwrap_or_default(),
                    layer_ids: register
                        .state_layer_ids
                        .get(component)
                        .cloned()
                        .unwrap_or_default(),
                }
            });
        Self {
            kv: kv.collect(),
            kv_layer_ids: register.kv_layer_ids.clone(),
            aux: aux.collect(),
            states: states.collect(),
            tp_size: register.tp_size,
            engine_rank: register.engine_rank,
            dcp_size: register.dcp_size,
            dcp_rank: register.dcp_rank,
        }
    }
}

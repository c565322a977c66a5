//! Why a plan cannot be made.

use crate::wire::WireError;

/// What is wrong, with both sides' values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// An offset or length does not fit 64 bits.
    #[error("{what} overflows 64 bits")]
    Overflow {
        /// The quantity.
        what: &'static str,
    },
    /// The two sides do not have the same number of state components.
    #[error("prefill has {local} state components, decode has {peer}")]
    ComponentCount {
        /// Components of the prefill rank.
        local: usize,
        /// Components of the decode rank.
        peer: usize,
    },
    /// The two sides' layouts of a component cannot be joined.
    #[error("{component}: {detail}")]
    Geometry {
        /// The component's label.
        component: &'static str,
        /// What differs, with both values.
        detail: String,
    },
    /// This component cannot move between these two ranks.
    #[error("{component}: not supported: {detail}")]
    Unsupported {
        /// The component's label.
        component: &'static str,
        /// What is not supported, and what to change.
        detail: String,
    },
    /// The parallel groups of the two sides do not fit.
    #[error("topology: {detail}")]
    Topology {
        /// What does not fit, with both values.
        detail: String,
    },
    /// Layer ids do not pair the two sides' tensors.
    #[error("{component}: layer ids: {detail}")]
    Layers {
        /// The component's label.
        component: &'static str,
        /// What does not pair.
        detail: String,
    },
    /// An index leaves its buffer.
    #[error(
        "{component}: {side} index {index} leaves tensor {tensor}, which has {items} items of \
         {item_len} bytes ({bytes} bytes)"
    )]
    OutOfBounds {
        /// The component's label.
        component: &'static str,
        /// `prefill` or `decode`.
        side: &'static str,
        /// Position of the tensor in its component.
        tensor: usize,
        /// The index.
        index: i64,
        /// How many items the tensor has.
        items: u64,
        /// Bytes of one item.
        item_len: u64,
        /// Bytes of the tensor.
        bytes: u64,
    },
    /// A destination index stands in the list twice.
    #[error("{component}: decode index {index} stands in the list twice")]
    DuplicateDestination {
        /// The component's label.
        component: &'static str,
        /// The index.
        index: i32,
    },
    /// The two index lists cannot be paired.
    #[error("{component}: prefill has {local} indices, decode has {peer}: {detail}")]
    IndexCount {
        /// The component's label.
        component: &'static str,
        /// Indices of the prefill.
        local: usize,
        /// Indices of the decode.
        peer: usize,
        /// What is needed.
        detail: &'static str,
    },
    /// A chunk reaches beyond the pages that the decode side announced.
    #[error("kv: pages {position} to {end} of the request, the decode side announced {announced}")]
    ChunkBeyondAnnouncement {
        /// First page of the chunk, counted from the announcement's first.
        position: usize,
        /// First page behind the chunk.
        end: usize,
        /// Pages of the announcement.
        announced: usize,
    },
    /// An argument has no meaning.
    #[error("{what}: {detail}")]
    Argument {
        /// The argument.
        what: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// The registration could not be decoded.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl PlanError {
    /// A short fixed word for metrics.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Overflow { .. } => "overflow",
            Self::ComponentCount { .. } => "component_count",
            Self::Geometry { .. } => "geometry",
            Self::Unsupported { .. } => "unsupported",
            Self::Topology { .. } => "topology",
            Self::Layers { .. } => "layers",
            Self::OutOfBounds { .. } => "out_of_bounds",
            Self::DuplicateDestination { .. } => "duplicate_destination",
            Self::IndexCount { .. } => "index_count",
            Self::ChunkBeyondAnnouncement { .. } => "chunk_beyond_announcement",
            Self::Argument { .. } => "argument",
            Self::Wire(_) => "wire",
        }
    }
}

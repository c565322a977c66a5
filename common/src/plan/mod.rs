//! From indices to byte ranges (`spec/planning.md`): pure arithmetic.
//!
//! [`PeerPlanner`] joins a prefill rank's layout with a decode rank's once, when the peer
//! registers; everything that cannot work is refused there. For each chunk of a room it then turns
//! index lists into a [`ComponentPlan`]: pairs of tensors that share a [`RunList`].

pub mod bounds;
pub mod dcp;
pub mod error;
pub mod heads;
pub mod layers;
pub mod mamba;
pub mod pages;
pub mod parts;
pub mod peer;
pub mod runs;
mod state;

pub use error::PlanError;
pub use parts::{ComponentPlan, TensorPair};
pub use peer::{KvChunk, PeerPlanner, PlannerOptions};
pub use runs::{ByteRange, RunList, StridedRun};

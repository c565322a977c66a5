//! From indices to byte ranges (`spec/planning.md`): pure arithmetic.

pub mod error;
pub mod runs;

pub use error::PlanError;
pub use runs::{RunList, StridedRun};

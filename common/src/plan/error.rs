//! Why a plan cannot be made.

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
}

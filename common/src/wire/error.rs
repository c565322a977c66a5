//! What the decoders say about bad bytes.

/// Why frames or bytes could not be decoded. `offset`, `need` and `have` count bytes within the
/// named frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes ended too early.
    #[error("{what}: need {need} bytes at offset {offset}, have {have}")]
    Truncated {
        /// The frame or field.
        what: &'static str,
        /// Where the missing bytes start.
        offset: usize,
        /// How many are needed.
        need: usize,
        /// How many are there.
        have: usize,
    },
}

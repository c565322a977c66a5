//! What the decoders say about bad bytes.

/// What errors call the state frame of a REGISTER.
pub(crate) const STATE_DESCRIPTORS: &str = "state descriptors";

/// Why frames or bytes could not be decoded (or a message could not be encoded). `offset`, `need`
/// and `have` count bytes within the named frame.
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
    /// Bytes stand behind the end of a frame's content.
    #[error("{what}: {extra} bytes stand behind the content, which ends at offset {offset}")]
    TrailingBytes {
        /// The frame or field.
        what: &'static str,
        /// Where the content ends.
        offset: usize,
        /// How many bytes follow.
        extra: usize,
    },
    /// A message has fewer frames than any release sends.
    #[error("{message}: {have} frames, at least {need} are needed")]
    TooFewFrames {
        /// The message's kind.
        message: &'static str,
        /// How many are needed.
        need: usize,
        /// How many came.
        have: usize,
    },
    /// The first frame names no known message.
    #[error("no message begins with {seen}")]
    UnknownMessage {
        /// The first bytes of the first frame, escaped.
        seen: String,
    },
    /// A number is not plain ASCII digits, or does not fit its field.
    #[error("{what}: {seen} is not {expected}")]
    Number {
        /// The field.
        what: &'static str,
        /// What came, escaped and shortened.
        seen: String,
        /// What the field holds.
        expected: &'static str,
    },
    /// Text is not in the field's encoding.
    #[error("{what}: {seen} is not {expected}")]
    Text {
        /// The field.
        what: &'static str,
        /// What came, escaped and shortened.
        seen: String,
        /// The encoding.
        expected: &'static str,
    },
    /// A msgpack value has the wrong form.
    #[error("{what}: {detail}")]
    Msgpack {
        /// The frame or field.
        what: &'static str,
        /// What the msgpack decoder found.
        detail: String,
    },
    /// The state frames are the flat lists of 0.5.12 and before.
    #[error(
        "state descriptors are one flat list ({descriptors} descriptors, the form of sglang 0.5.12 \
         and before); needed is one list for each component (0.5.13 and later): a flat list of \
         several components cannot be told apart, upgrade the decode side"
    )]
    FlatState {
        /// How many descriptors the flat list has.
        descriptors: usize,
    },
    /// A message cannot be written in the form of this release.
    #[error("{what} cannot be written in the form of sglang {release}: {detail}")]
    NotInRelease {
        /// The message or field.
        what: &'static str,
        /// The release's name.
        release: &'static str,
        /// Why.
        detail: &'static str,
    },
}

impl WireError {
    /// Whether a REGISTER has a shape that no release which can be served sends: too few frames,
    /// or state frames of another form. Who sends such a message will send no other.
    pub fn is_unknown_shape(&self) -> bool {
        match self {
            Self::TooFewFrames { .. } | Self::FlatState { .. } => true,
            Self::Msgpack { what, .. } => *what == STATE_DESCRIPTORS,
            _ => false,
        }
    }

    /// A short fixed word for logs and metrics.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Truncated { .. } => "truncated",
            Self::TrailingBytes { .. } => "trailing_bytes",
            Self::TooFewFrames { .. } => "too_few_frames",
            Self::UnknownMessage { .. } => "unknown_message",
            Self::Number { .. } => "number",
            Self::Text { .. } => "text",
            Self::Msgpack { .. } => "msgpack",
            Self::FlatState { .. } => "flat_state",
            Self::NotInRelease { .. } => "not_in_release",
        }
    }
}

/// What a msgpack decoder found, shortened: some of its texts quote a whole string of the peer.
pub(crate) fn msgpack_error(what: &'static str, error: impl std::fmt::Display) -> WireError {
    const MOST_CHARACTERS: usize = 80;
    let mut detail = error.to_string();
    if let Some((end, _)) = detail.char_indices().nth(MOST_CHARACTERS) {
        detail.truncate(end);
        detail.push_str("...");
    }
    WireError::Msgpack { what, detail }
}

/// At most 40 bytes of what came, escaped, for an error text.
pub(crate) fn shown(bytes: &[u8]) -> String {
    const SHOWN_BYTES: usize = 40;
    let head = bytes.get(..SHOWN_BYTES).unwrap_or(bytes);
    let ellipsis = if bytes.len() > SHOWN_BYTES { "..." } else { "" };
    format!("\"{}{ellipsis}\"", head.escape_ascii())
}

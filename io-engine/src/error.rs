//! Why a transfer or a connection failed.

use std::io;

/// What kind of failure it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportErrorKind {
    /// A range leaves its region.
    OutOfBounds,
    /// A region is not registered, or not any more.
    NotRegistered,
    /// The key of a region is wrong.
    BadKey,
    /// No transport is offered by both sides.
    NoCommonTransport,
    /// The peer cannot be reached.
    Unreachable,
    /// The operating system forbids it.
    PermissionDenied,
    /// The peer's process is gone.
    PeerDead,
    /// The peer did not answer in time.
    Timeout,
    /// The batch was cancelled.
    Cancelled,
    /// The peer said something that is not in the protocol.
    Protocol,
    /// The session or engine was closed.
    Closed,
    /// Memory could not be had or mapped.
    Memory,
    /// A device's driver failed, or there is none.
    Device,
    /// An injected fault.
    Injected,
    /// Any other error of the operating system.
    Io,
}

impl TransportErrorKind {
    /// The metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutOfBounds => "out_of_bounds",
            Self::NotRegistered => "not_registered",
            Self::BadKey => "bad_key",
            Self::NoCommonTransport => "no_common_transport",
            Self::Unreachable => "unreachable",
            Self::PermissionDenied => "permission_denied",
            Self::PeerDead => "peer_dead",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::Protocol => "protocol",
            Self::Closed => "closed",
            Self::Memory => "memory",
            Self::Device => "device",
            Self::Injected => "injected",
            Self::Io => "io",
        }
    }
}

/// A failure, in words for a person, with what a caller may decide on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TransportError {
    kind: TransportErrorKind,
    message: String,
    quiesced: bool,
    source_free: bool,
}

impl TransportError {
    /// A failure of which it is proved that nothing will be written any more (usually because
    /// nothing was begun).
    pub fn quiesced(kind: TransportErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            quiesced: true,
            source_free: true,
        }
    }

    /// A failure after which bytes that were sent may still land.
    pub fn unproved(kind: TransportErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            quiesced: false,
            source_free: false,
        }
    }

    /// An error of the operating system, with what was tried.
    pub(crate) fn io(what: impl std::fmt::Display, error: &io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => TransportErrorKind::Timeout,
            io::ErrorKind::PermissionDenied => TransportErrorKind::PermissionDenied,
            io::ErrorKind::ConnectionRefused
            | io::ErrorKind::NotFound
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable => TransportErrorKind::Unreachable,
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionAborted => TransportErrorKind::PeerDead,
            _ => TransportErrorKind::Io,
        };
        Self::quiesced(kind, format!("{what}: {error}"))
    }

    /// What a session that was closed, or whose engine has ended, says of every batch.
    pub(crate) fn closed_session() -> Self {
        Self::quiesced(TransportErrorKind::Closed, "the session is closed")
    }

    /// The same failure, without any proof.
    pub(crate) fn without_proof(mut self) -> Self {
        (self.quiesced, self.source_free) = (false, false);
        self
    }

    /// The same failure, of a batch whose bytes have left their source or never will, though they
    /// may still land.
    pub(crate) fn with_free_source(mut self) -> Self {
        self.source_free = true;
        self
    }

    /// The same failure, with what both prove.
    pub(crate) fn proving_no_more_than(mut self, other: &Self) -> Self {
        self.quiesced &= other.quiesced;
        self.source_free &= other.source_free;
        self
    }

    /// The same failure, of a batch of which nothing is under way.
    pub(crate) fn with_proof(mut self) -> Self {
        (self.quiesced, self.source_free) = (true, true);
        self
    }

    /// What kind of failure it was.
    pub const fn kind(&self) -> TransportErrorKind {
        self.kind
    }

    /// Whether a new session may succeed where this one failed.
    pub const fn is_retryable(&self) -> bool {
        matches!(
            self.kind,
            TransportErrorKind::Unreachable
                | TransportErrorKind::PeerDead
                | TransportErrorKind::Timeout
                | TransportErrorKind::Closed
                | TransportErrorKind::Io
        )
    }

    /// Whether it is proved that no byte of the batch will be written any more. Only then may the
    /// destination be used for something else.
    pub const fn is_quiesced(&self) -> bool {
        self.quiesced
    }

    /// Whether it is proved that no byte of the batch's source will be read any more. Only then may the
    /// source be used for something else.
    pub const fn is_source_free(&self) -> bool {
        self.source_free
    }
}

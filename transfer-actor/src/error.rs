//! What an engine is told when a call cannot be done.

use crate::api::ErrorBody;

/// An error of the rank API and of the HTTP API above it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct ApiError {
    /// The HTTP status that carries it.
    pub status: u16,
    /// A stable word to match on.
    pub code: &'static str,
    /// What happened, where, and what to do.
    pub message: String,
}

impl ApiError {
    /// Joins the three parts.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
        }
    }

    /// The JSON body that goes over the wire.
    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            code: self.code.to_owned(),
            message: self.message.clone(),
        }
    }
}

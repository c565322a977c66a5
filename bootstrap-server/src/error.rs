//! What a client is told, and what ends the process.

use std::io;
use std::net::SocketAddr;

use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use serde_json::json;

/// An error of the admin API: `{code, message, detail}` with a stable code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct ApiError {
    /// The HTTP status.
    pub status: u16,
    /// A stable word.
    pub code: &'static str,
    /// What happened, where, and what to do.
    pub message: String,
    /// More, where there is more.
    pub detail_opt: Option<String>,
}

impl ApiError {
    /// Joins the three parts.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            detail_opt: None,
        }
    }

    /// Adds what a library said.
    pub fn with_detail(mut self, detail: impl ToString) -> Self {
        self.detail_opt = Some(detail.to_string());
        self
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        let body = json!({ "code": self.code, "message": self.message, "detail": self.detail_opt });
        HttpResponse::build(self.status_code()).json(body)
    }
}

/// Why the server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Options that contradict each other.
    #[error("{0}")]
    Config(String),
    /// A port is taken, or the address is not this host's.
    #[error("{address} cannot be listened on: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The registrations cannot be loaded.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Two metrics have one name.
    #[error("registering metrics: {0}")]
    Metrics(String),
    /// A bound port cannot be served.
    #[error("the http server ended: {0}")]
    Serve(io::Error),
}

/// Why the store cannot be used or a change could not be made durable.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process holds the folder, or it cannot be opened.
    #[error("the store in {folder} cannot be opened: {reason}")]
    Open {
        /// The folder.
        folder: String,
        /// What is wrong.
        reason: String,
    },
    /// A value was written by a version that this one does not know.
    #[error(
        "the store holds {key} in version {version}, this server knows version {known}; use the newer server or another --data-dir"
    )]
    Version {
        /// The value's key.
        key: String,
        /// Its version.
        version: u8,
        /// Ours.
        known: u8,
    },
    /// The layout of a newer server.
    #[error(
        "the store in {folder} has layout {found}, this server knows layouts up to {known}; use the newer server or another --data-dir"
    )]
    Schema {
        /// The folder.
        folder: String,
        /// Its layout.
        found: u64,
        /// Ours.
        known: u32,
    },
    /// Something that was acknowledged is not there, or cannot be read.
    #[error(
        "the store has lost {number} entries that were acknowledged: {names}. Restore the data folder from a copy; or start with --damaged-store read-only to serve what can be read and change nothing, or with --damaged-store accept-loss to go on without them: a rank that is lost must be restarted so that it registers again"
    )]
    Damaged {
        /// How many.
        number: usize,
        /// Their names, not all if there are many.
        names: String,
    },
    /// A change could not be written or synchronised.
    #[error("the change could not be made durable: {0}")]
    Commit(String),
}

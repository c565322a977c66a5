//! The audit log: one line for every write, done or refused, with the target `audit`.
//!
//! What is done is told by whoever does it and knows what was there before: the registry's writer
//! for most. What is refused is told here, wherever on its way that happened.

use std::net::SocketAddr;
use std::sync::Arc;

use actix_web::dev::ServiceRequest;
use actix_web::http::{Method, StatusCode};
use actix_web::{HttpMessage, HttpRequest};

use super::is_write;
use crate::listener::Connection;

/// Characters of a path that are shown.
const MAX_PATH: usize = 256;

/// Who asks, for the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// Its address.
    pub peer_opt: Option<SocketAddr>,
    /// The name of the token that it showed.
    pub token_opt: Option<Arc<str>>,
    /// The names in its client certificate.
    pub certificate_opt: Option<Arc<str>>,
}

/// The name of the token that a request showed.
pub(super) struct ShownToken(pub(super) Arc<str>);

/// Why a request was refused; left by whoever answers with a text that is not at hand later.
pub(crate) struct Reason(pub(crate) String);

impl Who {
    /// Whoever sent a request.
    pub fn of(request: &HttpRequest) -> Self {
        let extensions = request.extensions();
        let token = extensions.get::<ShownToken>();
        let connection = request.conn_data::<Connection>();
        Self {
            peer_opt: request.peer_addr(),
            token_opt: token.map(|shown| Arc::clone(&shown.0)),
            certificate_opt: connection.and_then(|connection| connection.certificate_opt.clone()),
        }
    }
}

impl std::fmt::Display for Who {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.peer_opt {
            Some(peer) => write!(formatter, "{peer}")?,
            None => write!(formatter, "unknown")?,
        }
        if let Some(token) = &self.token_opt {
            write!(formatter, " with the {token} token")?;
        }
        if let Some(names) = &self.certificate_opt {
            write!(formatter, " certified as {names}")?;
        }
        Ok(())
    }
}

/// A write that is under way.
#[derive(Debug)]
pub(crate) struct Attempt {
    namespace_opt: Option<String>,
    method: Method,
    path: String,
}

impl Attempt {
    /// `None` for what only reads.
    pub(crate) fn of(request: &ServiceRequest) -> Option<Self> {
        if !is_write(request) {
            return None;
        }
        let connection = request.conn_data::<Connection>();
        let port_opt = connection.and_then(|connection| connection.port_opt.as_ref());
        Some(Self {
            namespace_opt: port_opt.map(|port| port.namespace.clone()),
            method: request.method().clone(),
            path: request.path().chars().take(MAX_PATH).collect(),
        })
    }

    /// Writes the line of a write that was refused.
    pub(crate) fn refused(&self, who: &Who, status: StatusCode, reason: &str) {
        tracing::warn!(
            target: "audit",
            %who,
            namespace = self.namespace_opt.as_deref(),
            method = self.method.as_str(),
            path = self.path.as_str(),
            status = status.as_u16(),
            reason,
            "write refused"
        );
    }
}

/// A client whose certificate does not count never gets to write anything.
pub(crate) fn refused_certificate(
    peer: SocketAddr,
    namespace_opt: Option<&str>,
    certificate_opt: Option<&str>,
    error: &rustls::Error,
) {
    tracing::warn!(
        target: "audit",
        who = %peer,
        namespace = namespace_opt,
        certificate = certificate_opt,
        reason = %error,
        "client certificate refused"
    );
}

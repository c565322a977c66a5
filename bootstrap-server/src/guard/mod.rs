//! Who is let in: the rate of each peer, tokens, and the audit log.
//!
//! Everything is refused that is not known to be harmless: on an engine's port what reads is open
//! and the rest needs a rank's token; on the admin port a few paths are open and the rest needs an
//! operator's token. Paths are compared as they came, so that an escaped one, which the router
//! would take for a guarded one, is never taken for an open one.

pub mod audit;
mod tokens;
pub(crate) mod watched;

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::HttpMessage;
use actix_web::dev::ServiceRequest;
use actix_web::http::{Method, header};
use actix_web::{HttpResponse, ResponseError};

use self::audit::ShownToken;
pub use self::audit::Who;
use self::tokens::{Denied, Tokens};
use crate::config::Config;
use crate::error::ApiError;
use crate::listener::{Connection, RequestRate, Tls};
use crate::{page, sglang};

/// SGLang's variable for the ranks' token.
pub const SGLANG_TOKEN_VARIABLE: &str = "SGLANG_DISAGGREGATION_BOOTSTRAP_AUTH_TOKEN";
/// The only `POST` of an engine's port that changes nothing.
const QUERY_PATH: &str = "/query_dp_ranks";
/// What anyone may read on the admin port beside the page's files, which hold no data. No rank's
/// address stands in it.
const OPEN_ADMIN_PATHS: [&str; 3] = ["/metrics", "/v1/health/live", "/v1/health/ready"];

/// The checks and what they remember.
#[derive(Debug)]
pub struct Guard {
    ranks_opt: Option<Tokens>,
    operators_opt: Option<Tokens>,
    rate_opt: Option<RequestRate>,
    pub(crate) tls_opt: Option<Arc<Tls>>,
}

/// Why a request gets no further.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    error: Box<ApiError>,
    header_opt: Option<(header::HeaderName, header::HeaderValue)>,
}

/// Whether a request may change something.
pub(crate) fn is_write(request: &ServiceRequest) -> bool {
    let reads = [Method::GET, Method::HEAD, Method::OPTIONS];
    !reads.contains(request.method()) && request.path() != QUERY_PATH
}

/// Whether a request came in by the admin port.
fn is_admin(request: &ServiceRequest) -> bool {
    let connection = request.conn_data::<Connection>();
    connection.is_none_or(|connection| connection.port_opt.is_none())
}

impl Guard {
    /// Reads tokens and certificates.
    ///
    /// # Errors
    /// When a file cannot be used, or operators could be anybody.
    pub fn new(config: &Config) -> Result<Self, String> {
        let from_file = |kind, file: &Option<std::path::PathBuf>| {
            let tokens = file.as_deref().map(|file| Tokens::from_file(kind, file));
            tokens.transpose()
        };
        let mut ranks_opt = from_file("rank", &config.auth_token_file)?;
        if ranks_opt.is_none()
            && let Ok(token) = std::env::var(SGLANG_TOKEN_VARIABLE)
        {
            let tokens = Tokens::fixed("rank", &token);
            let tokens = tokens.map_err(|reason| format!("{SGLANG_TOKEN_VARIABLE}: {reason}"))?;
            ranks_opt = Some(tokens);
        }
        let operators_opt = from_file("admin", &config.admin_token_file)?;
        let admin = config.admin_listen;
        let is_guarded = ranks_opt.is_some()
            || operators_opt.is_some()
            || (admin.is_tls && config.tls_client_ca.is_some());
        let is_near = admin.address.ip().to_canonical().is_loopback();
        if !is_guarded && !is_near && !config.admin_without_token {
            return Err(format!(
                "--admin-listen {admin} can be reached from other hosts and nothing guards it; give \
                 --admin-token-file, or --admin-without-token if everybody there may delete engines"
            ));
        }
        Ok(Self {
            ranks_opt,
            operators_opt,
            rate_opt: RequestRate::new(config.max_requests_per_peer),
            tls_opt: Tls::open(config)?.map(Arc::new),
        })
    }

    /// Lets a request in, or not. The name of its token is left for the audit log.
    pub(crate) fn admit(&self, request: &ServiceRequest) -> Result<(), Refusal> {
        if let (Some(rate), Some(peer)) = (&self.rate_opt, request.peer_addr()) {
            rate.admit(peer.ip(), Instant::now())
                .map_err(Refusal::too_fast)?;
        }
        let (tokens_opt, is_open) = if is_admin(request) {
            let path = request.path();
            let is_known = page::is_file(path) || OPEN_ADMIN_PATHS.contains(&path);
            let is_open = !is_write(request) && is_known;
            (
                self.operators_opt.as_ref().or(self.ranks_opt.as_ref()),
                is_open,
            )
        } else {
            (self.ranks_opt.as_ref(), !is_write(request))
        };
        let Some(tokens) = tokens_opt.filter(|_| !is_open) else {
            return Ok(());
        };
        let shown_opt = request.headers().get(header::AUTHORIZATION);
        let owner = tokens.owner(shown_opt);
        let owner = owner.map_err(|denied| Refusal::denied(tokens.kind, denied))?;
        request.extensions_mut().insert(ShownToken(owner));
        Ok(())
    }

    /// Reads files again that have changed.
    pub fn reload(&self) {
        if let Some(tls) = &self.tls_opt {
            tls.reload();
        }
        let tokens = [&self.ranks_opt, &self.operators_opt];
        tokens.into_iter().flatten().for_each(Tokens::reload);
    }

    /// What is wrong with files that have changed; what they said before is in force.
    pub fn troubles(&self) -> Vec<String> {
        let tls = self.tls_opt.as_ref().and_then(|tls| tls.trouble());
        let tokens = [&self.ranks_opt, &self.operators_opt].into_iter().flatten();
        tokens.filter_map(Tokens::trouble).chain(tls).collect()
    }
}

impl Refusal {
    /// It breaks a rule of HTTP, or a limit of ours.
    pub(crate) fn broken(message: &str) -> Self {
        Self {
            error: Box::new(ApiError::new(400, "bad_request", message)),
            header_opt: None,
        }
    }

    fn too_fast(wait: Duration) -> Self {
        let seconds = (wait.as_secs_f64().ceil() as u64).max(1);
        let message = format!("too many requests from this address; wait {seconds} s");
        Self {
            error: Box::new(ApiError::new(429, "too_many_requests", message)),
            header_opt: Some((header::RETRY_AFTER, seconds.into())),
        }
    }

    fn denied(kind: &str, denied: Denied) -> Self {
        let (code, what) = match denied {
            Denied::Missing => ("no_token", "is missing"),
            Denied::Wrong => ("wrong_token", "is wrong"),
        };
        let message = format!("the {kind} token {what}: Authorization: Bearer TOKEN");
        let bearer = header::HeaderValue::from_static("Bearer");
        Self {
            error: Box::new(ApiError::new(401, code, message)),
            header_opt: Some((header::WWW_AUTHENTICATE, bearer)),
        }
    }

    /// The answer: JSON to operators, text to SGLang, which shows it.
    pub(crate) fn response(self, request: &ServiceRequest) -> HttpResponse {
        request
            .extensions_mut()
            .insert(audit::Reason(self.error.message.clone()));
        let mut response = if is_admin(request) {
            self.error.error_response()
        } else {
            sglang::text(self.error.status_code(), self.error.message)
        };
        if let Some((name, value)) = self.header_opt {
            response.headers_mut().insert(name, value);
        }
        response
    }
}

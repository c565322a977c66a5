//! What a request must pass before it reaches its handler: the rate of its peer, and the token of
//! what it wants to change or see.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::{Method, StatusCode, header};
use actix_web::middleware::Next;
use actix_web::web::Data;
use actix_web::{Error, HttpMessage, HttpRequest, HttpResponse, ResponseError};

use crate::config::Config;
use crate::error::ApiError;
use crate::fleet::Fleet;
use crate::sglang;
use crate::token::{SGLANG_TOKEN_VARIABLE, Token};

/// Peers whose rate is remembered at most.
const MAX_PEERS: usize = 16_384;

/// Whom a port is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortKind {
    /// An engine's ranks and decodes.
    Engine,
    /// Operators.
    Admin,
}

/// The checks and what they remember.
#[derive(Debug)]
pub struct Guard {
    rank_opt: Option<Token>,
    admin_opt: Option<Token>,
    rates: Rates,
}

/// Who asks, for the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// Its address.
    pub peer_opt: Option<SocketAddr>,
    /// The name of the token that it showed.
    pub token_opt: Option<&'static str>,
    /// The name in its client certificate.
    pub certificate_opt: Option<String>,
}

impl Who {
    /// Whoever sent a request.
    pub fn of(request: &HttpRequest) -> Self {
        let token_opt = request
            .extensions()
            .get::<ShownToken>()
            .map(|shown| shown.0);
        Self {
            peer_opt: request.peer_addr(),
            token_opt,
            certificate_opt: request
                .conn_data::<CertificateName>()
                .map(|name| name.0.clone()),
        }
    }
}

impl std::fmt::Display for Who {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.peer_opt {
            Some(peer) => write!(formatter, "{peer}")?,
            None => write!(formatter, "unknown")?,
        }
        if let Some(token) = self.token_opt {
            write!(formatter, " with the {token} token")?;
        }
        if let Some(name) = &self.certificate_opt {
            write!(formatter, " certified as {name}")?;
        }
        Ok(())
    }
}

struct ShownToken(&'static str);

/// The name in a client's certificate, kept with its connection.
pub(crate) struct CertificateName(pub String);

impl Guard {
    /// Reads the tokens.
    ///
    /// # Errors
    /// When one cannot be read, or operators could be anybody.
    pub fn new(config: &Config) -> Result<Self, String> {
        let from_file = |name, file: &Option<std::path::PathBuf>| {
            file.as_deref()
                .map(|file| Token::from_file(name, file))
                .transpose()
        };
        let mut rank_opt = from_file("rank", &config.auth_token_file)?;
        if rank_opt.is_none()
            && let Ok(text) = std::env::var(SGLANG_TOKEN_VARIABLE)
        {
            rank_opt = Some(Token::fixed("rank", &text)?);
        }
        let admin_opt = from_file("admin", &config.admin_token_file)?;
        let has_token = rank_opt.is_some() || admin_opt.is_some();
        let admin = config.admin_listen.address;
        if !has_token && !admin.ip().is_loopback() && !config.admin_without_token {
            return Err(format!(
                "--admin-listen {admin} can be reached from other hosts and nothing guards it; give \
                 --admin-token-file, or --admin-without-token if everybody there may delete engines"
            ));
        }
        Ok(Self {
            rank_opt,
            admin_opt,
            rates: Rates::new(config.max_requests_per_peer),
        })
    }

    /// Reads tokens again whose files have changed.
    pub fn reload(&self) {
        let tokens = [&self.rank_opt, &self.admin_opt];
        tokens.into_iter().flatten().for_each(Token::reload);
    }

    /// The token that a request needs. What stock decodes read is open, and so are health and
    /// metrics; the page holds no data, it asks the admin API for them.
    fn needed(&self, request: &ServiceRequest, kind: PortKind) -> Option<&Token> {
        let is_read = [Method::GET, Method::HEAD].contains(request.method());
        let path = request.path();
        if kind == PortKind::Admin {
            let is_guarded = path.starts_with("/v1/") && !path.starts_with("/v1/health/");
            return self
                .admin_opt
                .as_ref()
                .or(self.rank_opt.as_ref())
                .filter(|_| is_guarded);
        }
        let is_open = is_read || path == "/query_dp_ranks";
        self.rank_opt.as_ref().filter(|_| !is_open)
    }

    fn check(&self, request: &ServiceRequest, kind: PortKind) -> Result<(), ApiError> {
        let peer_opt = request.peer_addr().map(|peer| peer.ip().to_canonical());
        if !peer_opt.is_none_or(|peer| self.rates.admit(peer, Instant::now())) {
            let message = "too many requests from this address; wait a second";
            return Err(ApiError::new(429, "too_many_requests", message));
        }
        let Some(token) = self.needed(request, kind) else {
            return Ok(());
        };
        let shown = request.headers().get(header::AUTHORIZATION);
        if token.is_shown(shown.map(|shown| shown.as_bytes())) {
            request.extensions_mut().insert(ShownToken(token.name));
            return Ok(());
        }
        let (code, what) = match shown {
            None => ("no_token", "is missing"),
            Some(_) => ("wrong_token", "is wrong"),
        };
        let message = format!(
            "the {} token {what}: Authorization: Bearer TOKEN",
            token.name
        );
        let who = Who::of(request.request());
        tracing::warn!(target: "audit", %who, method = %request.method(), path = request.path(), refused = what, "unauthorized");
        Err(ApiError::new(401, code, message))
    }
}

/// The middleware of every port.
///
/// # Errors
/// As the handlers.
pub async fn check(
    fleet: Data<Fleet>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let kind = request.app_data().copied().unwrap_or(PortKind::Admin);
    let Err(refused) = fleet.guard.check(&request, kind) else {
        return Ok(next.call(request).await?.map_into_left_body());
    };
    let response = match kind {
        PortKind::Admin => refused.error_response(),
        // The other side is SGLang, which shows the text.
        PortKind::Engine => sglang::text(refused.status_code(), refused.message),
    };
    let response = request.into_response(with_headers(response));
    Ok(response.map_into_right_body())
}

fn with_headers(mut response: HttpResponse) -> HttpResponse {
    let extra = match response.status() {
        StatusCode::UNAUTHORIZED => (header::WWW_AUTHENTICATE, "Bearer"),
        _ => (header::RETRY_AFTER, "1"),
    };
    let value = header::HeaderValue::from_static(extra.1);
    response.headers_mut().insert(extra.0, value);
    response
}

/// Requests of each peer in the last moments: as many at once as may come in a second.
#[derive(Debug)]
struct Rates {
    per_second: u32,
    peers: Mutex<HashMap<IpAddr, Bucket>>,
}

#[derive(Debug)]
struct Bucket {
    left: f64,
    filled_at: Instant,
}

impl Rates {
    /// 0 is no limit.
    fn new(per_second: u32) -> Self {
        Self {
            per_second,
            peers: Mutex::default(),
        }
    }

    fn admit(&self, peer: IpAddr, now: Instant) -> bool {
        if self.per_second == 0 {
            return true;
        }
        let most = f64::from(self.per_second);
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.len() >= MAX_PEERS && !peers.contains_key(&peer) {
            // Who has been quiet for a second has a full bucket, as an unknown peer has.
            peers.retain(|_, bucket| now - bucket.filled_at < Duration::from_secs(1));
            if peers.len() >= MAX_PEERS {
                return false;
            }
        }
        let full = Bucket {
            left: most,
            filled_at: now,
        };
        let bucket = peers.entry(peer).or_insert(full);
        let passed = now.saturating_duration_since(bucket.filled_at);
        bucket.left = (bucket.left + passed.as_secs_f64() * most).min(most);
        bucket.filled_at = now;
        let is_admitted = bucket.left >= 1.0;
        bucket.left -= f64::from(u8::from(is_admitted));
        is_admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_its_rate_and_others_have_theirs() {
        let rates = Rates::new(10);
        let begin = Instant::now();
        let (one, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let admitted = |peer, now| (0..20).filter(|_| rates.admit(peer, now)).count();
        assert_eq!(admitted(one, begin), 10);
        assert_eq!(admitted(other, begin), 10);
        assert_eq!(admitted(one, begin + Duration::from_millis(500)), 5);
        assert_eq!(
            admitted(one, begin + Duration::from_secs(60)),
            10,
            "not more than at first"
        );
        assert_eq!(
            (0..99).filter(|_| Rates::new(0).admit(one, begin)).count(),
            99
        );
    }

    #[test]
    fn peers_that_are_remembered_are_bounded() {
        let rates = Rates::new(1);
        let begin = Instant::now();
        let peer = |number: u32| IpAddr::from(number.to_be_bytes());
        let admitted = (0..20_000)
            .filter(|number| rates.admit(peer(*number), begin))
            .count();
        assert_eq!(admitted, MAX_PEERS);
        assert!(rates.admit(peer(30_000), begin + Duration::from_secs(2)));
        assert_eq!(rates.peers.lock().unwrap().len(), 1);
    }
}

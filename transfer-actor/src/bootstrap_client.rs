//! The bootstrap server as a rank sees it: register, learn a topology, find a rank's address.
//!
//! The routes are those of `spec/bootstrap-http.md`. Any SGLang bootstrap server answers the first
//! four; `PUT /v1/registrations/{key}` is Ferry's own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::wire::route::{
    RankAddress, RankReport, RegistrationBody, RouteRegistration, RouteRelease, TopologyReply,
};
use reqwest::header::{AUTHORIZATION, HeaderMap};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use serde::de::DeserializeOwned;

use crate::bootstrap_access::{BootstrapAccess, CA_FILE};

const HTTP: &str = "http";
const HTTPS: &str = "https";

/// How long a connection may take to open.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long one request may take, connection and answer included.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause after the first failed registration; it doubles from there.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause between two registrations.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Longest answer that is read, in bytes: a topology and a map of rooms are far smaller.
const MAX_ANSWER_BYTES: usize = 8 * 1024 * 1024;

/// How much of an answer with an error is kept, in bytes.
const MAX_ERROR_TEXT_BYTES: usize = 1024;

/// Why the bootstrap server did not do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BootstrapError {
    /// Not every rank of the prefill engine has registered yet (503); asking again may help.
    #[error("the bootstrap server is not ready: {text}")]
    NotReady {
        /// What the server said.
        text: String,
    },
    /// The server answered, and the answer is no. Asking again gives the same answer.
    #[error("the bootstrap server refused with status {status}: {text}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// What the server said, or what is wrong with its answer.
        text: String,
    },
    /// No whole answer came.
    #[error("the bootstrap server cannot be reached: {detail}")]
    Unreachable {
        /// What was tried and how it failed.
        detail: String,
    },
}

impl BootstrapError {
    /// Whether asking the same again may help.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::NotReady { .. } | Self::Unreachable { .. } => true,
            // 5xx is the server's trouble; 408 and 429 ask for patience.
            Self::Refused { status, .. } => *status >= 500 || *status == 408 || *status == 429,
        }
    }
}

/// Asks one bootstrap server. Clones share its connections.
#[derive(Clone, Debug)]
pub struct BootstrapClient {
    http: reqwest::Client,
    base: Url,
}

impl BootstrapClient {
    /// A client of the server at `host:port`, with `http://` or `https://` before it where one is
    /// wanted. An IPv6 host may come bare (`fd00::1:8998`: what stands behind the last colon is the
    /// port) or in brackets. Nothing is sent yet.
    ///
    /// The environment says which token it shows and what it trusts (`bootstrap_access`); without a
    /// scheme TLS is spoken where authorities are given.
    ///
    /// # Errors
    /// [`BootstrapError::Refused`] with status 400 when the text is no host and port, or with 401
    /// when what the environment names cannot be used.
    pub fn new(host_port: &str) -> Result<Self, BootstrapError> {
        let refused = |status: StatusCode, text: String| BootstrapError::Refused {
            status: status.as_u16(),
            text,
        };
        let access = BootstrapAccess::from_environment()
            .map_err(|reason| refused(StatusCode::UNAUTHORIZED, reason))?;
        let base = base_url(host_port, access.is_tls).ok_or_else(|| {
            let text = format!("{host_port:?} is no bootstrap server: expected host:port");
            refused(StatusCode::BAD_REQUEST, text)
        })?;
        if base.scheme() == HTTPS && !access.is_tls {
            let text =
                format!("{host_port} speaks TLS: set {CA_FILE} to what signs its certificate");
            return Err(refused(StatusCode::UNAUTHORIZED, text));
        }
        let headers = access
            .authorization_opt
            .map(|shown| (AUTHORIZATION, shown))
            .into_iter()
            .collect::<HeaderMap>();
        let http = reqwest::Client::builder()
            .tls_backend_preconfigured(access.tls)
            .default_headers(headers)
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(REQUEST_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            // Ranks and their bootstrap server talk inside the cluster.
            .no_proxy()
            .build()
            .map_err(|error| BootstrapError::Unreachable {
                detail: format!("building an http client: {}", chain(&error)),
            })?;
        Ok(Self { http, base })
    }

    /// `host:port` of the server, an IPv6 host in brackets.
    pub fn authority(&self) -> &str {
        self.base.authority()
    }

    /// Registers a prefill rank (`PUT /route`) in the form of a release. Tries again, with pauses that grow and are spread
    /// at random, until it works or `timeout` has passed.
    ///
    /// # Errors
    /// The server's text at once when it refuses (4xx); the last failure when the time is over.
    pub async fn register_route(
        &self,
        registration: &RouteRegistration,
        release: RouteRelease,
        timeout: Duration,
    ) -> Result<(), BootstrapError> {
        let started = Instant::now();
        let body = registration.for_release(release);
        let mut pause = FIRST_PAUSE;
        let mut was_logged = false;
        loop {
            let request = self.request(Method::PUT, "/route").json(&body);
            let error = match self.send(request).await {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            let sleep = jittered(pause);
            if !error.is_retryable() || started.elapsed() + sleep >= timeout {
                return Err(error);
            }
            if !was_logged {
                was_logged = true;
                tracing::warn!(
                    bootstrap = self.authority(),
                    %error,
                    timeout_seconds = timeout.as_secs_f64(),
                    "registering at the bootstrap server failed, trying again"
                );
            }
            tokio::time::sleep(sleep).await;
            pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
        }
    }

    /// The shape of the prefill engine (`GET /route` with all ranks -1).
    ///
    /// # Errors
    /// [`BootstrapError::NotReady`] while some of its ranks have not registered.
    pub async fn topology(&self) -> Result<TopologyReply, BootstrapError> {
        self.get_route([-1; 4]).await
    }

    /// The control socket of one prefill rank (`GET /route`).
    ///
    /// # Errors
    /// [`BootstrapError::Refused`] with status 404 when there is no such rank.
    pub async fn rank_address(
        &self,
        dp_rank: u32,
        cp_rank: u32,
        tp_rank: u32,
        pp_rank: u32,
    ) -> Result<RankAddress, BootstrapError> {
        self.get_route([dp_rank, cp_rank, tp_rank, pp_rank].map(i64::from))
            .await
    }

    /// Says which data-parallel rank serves a room (`POST /register_dp_rank`).
    ///
    /// # Errors
    /// As the server answers; nothing is tried again.
    pub async fn register_dp_rank(&self, room: u64, dp_rank: u32) -> Result<(), BootstrapError> {
        let body = serde_json::json!({ "bootstrap_room": room, "dp_rank": dp_rank });
        let request = self.request(Method::POST, "/register_dp_rank").json(&body);
        self.send(request).await.map(|_| ())
    }

    /// Which data-parallel ranks serve these rooms (`POST /query_dp_ranks`); rooms that the server
    /// does not know are absent.
    ///
    /// # Errors
    /// As the server answers; nothing is tried again.
    pub async fn query_dp_ranks(
        &self,
        rooms: &[u64],
    ) -> Result<BTreeMap<u64, u32>, BootstrapError> {
        let body = serde_json::json!({ "bootstrap_rooms": rooms });
        let request = self.request(Method::POST, "/query_dp_ranks").json(&body);
        let ranks: BTreeMap<String, u32> = read_json(self.send(request).await?).await?;
        ranks
            .into_iter()
            .map(|(room, dp_rank)| match room.parse() {
                Ok(room) => Ok((room, dp_rank)),
                Err(_) => Err(not_understood(format!("{room:?} is no room"))),
            })
            .collect()
    }

    /// Publishes what a rank registered at its peers (`PUT /v1/registrations/{key}`), for people
    /// to see. `key` is the key of the rank's io engine.
    ///
    /// # Errors
    /// [`BootstrapError::Refused`] with status 404 from a server that is not Ferry's.
    pub async fn put_registration(
        &self,
        key: &str,
        body: &RegistrationBody,
    ) -> Result<(), BootstrapError> {
        let request = self.http.put(self.keyed("registrations", key)).json(body);
        self.send(request).await.map(|_| ())
    }

    /// Says how a rank fares (`PUT /v1/reports/{key}`). `key` is the key of the rank's io engine.
    ///
    /// # Errors
    /// [`BootstrapError::Refused`] with status 404 from a server that is not Ferry's.
    pub async fn put_report(&self, key: &str, report: &RankReport) -> Result<(), BootstrapError> {
        let request = self.http.put(self.keyed("reports", key)).json(report);
        self.send(request).await.map(|_| ())
    }

    fn keyed(&self, collection: &str, key: &str) -> Url {
        let mut url = self.base.clone();
        // Pushed as one segment, so that a slash in a key is escaped.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.clear().extend(["v1", collection, key]);
        }
        url
    }

    async fn get_route<T: DeserializeOwned>(&self, ranks: [i64; 4]) -> Result<T, BootstrapError> {
        let mut url = self.base.clone();
        url.set_path("/route");
        let names = [
            "prefill_dp_rank",
            "prefill_cp_rank",
            "target_tp_rank",
            "target_pp_rank",
        ];
        url.query_pairs_mut()
            .extend_pairs(names.into_iter().zip(ranks.map(|rank| rank.to_string())));
        read_json(self.send(self.http.get(url)).await?).await
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let mut url = self.base.clone();
        url.set_path(path);
        self.http.request(method, url)
    }

    /// Sends a request and sorts the answer by its status.
    async fn send(&self, request: RequestBuilder) -> Result<Response, BootstrapError> {
        let response = request.send().await.map_err(unreachable)?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let bytes = read_capped(response, MAX_ERROR_TEXT_BYTES).await?;
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        Err(match status {
            StatusCode::SERVICE_UNAVAILABLE => BootstrapError::NotReady { text },
            _ => BootstrapError::Refused {
                status: status.as_u16(),
                text,
            },
        })
    }
}

/// `http://host:port/` of a server, with brackets around an IPv6 address.
fn base_url(text: &str, is_tls: bool) -> Option<Url> {
    let text = text.trim();
    let (scheme, host_port) = match text.split_once("://") {
        Some((scheme, rest)) => (scheme, rest),
        None if is_tls => (HTTPS, text),
        None => (HTTP, text),
    };
    let (host, port) = host_port.rsplit_once(':')?;
    let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let host = bare.unwrap_or(host);
    let is_ipv6 = host.parse::<std::net::Ipv6Addr>().is_ok();
    let is_name = host
        .chars()
        .all(|character| character.is_ascii_alphanumeric() || ".-_".contains(character));
    let host = match (is_ipv6, !host.is_empty() && is_name && bare.is_none()) {
        (true, _) => format!("[{host}]"),
        (false, true) => host.to_owned(),
        (false, false) => return None,
    };
    let is_known = [HTTP, HTTPS].contains(&scheme);
    Url::parse(&format!("{scheme}://{host}:{port}/"))
        .ok()
        .filter(|_| is_known)
}

/// A pause between half of `pause` and all of it, so that ranks that failed together do not all
/// come back together.
pub(crate) fn jittered(pause: Duration) -> Duration {
    // Without random bytes the whole pause is as good as any.
    let random = getrandom::u32().unwrap_or(u32::MAX);
    pause.mul_f64(0.5 + 0.5 * f64::from(random) / f64::from(u32::MAX))
}

/// Reads at most `max` bytes of a body; what is beyond is not waited for.
async fn read_capped(mut response: Response, max: usize) -> Result<Vec<u8>, BootstrapError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
        let room = max.saturating_sub(bytes.len());
        bytes.extend(chunk.iter().take(room));
        if chunk.len() > room {
            break;
        }
    }
    Ok(bytes)
}

async fn read_json<T: DeserializeOwned>(response: Response) -> Result<T, BootstrapError> {
    let bytes = read_capped(response, MAX_ANSWER_BYTES).await?;
    let mut reader = serde_json::Deserializer::from_slice(&bytes);
    T::deserialize(&mut reader).map_err(|error| not_understood(error.to_string()))
}

/// A 200 whose body is not what the protocol says.
fn not_understood(detail: String) -> BootstrapError {
    BootstrapError::Refused {
        status: StatusCode::OK.as_u16(),
        text: format!("the answer is not understood: {detail}"),
    }
}

fn unreachable(error: reqwest::Error) -> BootstrapError {
    BootstrapError::Unreachable {
        detail: chain(&error),
    }
}

/// An error with its causes: reqwest's own text leaves out why a connection failed.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source_opt = error.source();
    while let Some(source) = source_opt {
        text.push_str(": ");
        text.push_str(&source.to_string());
        source_opt = source.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};

    use super::*;

    /// Starts a server that answers every request through `answer`; its address.
    fn serve(
        answer: impl Fn(&HttpRequest, &str) -> HttpResponse + Clone + Send + 'static,
    ) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        let server = HttpServer::new(move || {
            let answer = answer.clone();
            App::new().default_service(web::to(move |request: HttpRequest, body: String| {
                let response = answer(&request, &body);
                async move { response }
            }))
        });
        let server = server.workers(1).disable_signals();
        actix_rt::spawn(server.listen(listener).expect("it listens").run());
        address
    }

    fn registration() -> RouteRegistration {
        RouteRegistration {
            attn_tp_size: 1,
            attn_tp_rank: 0,
            attn_cp_size: 1,
            attn_cp_rank: 0,
            attn_dp_size: 1,
            attn_dp_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            system_dp_size: 1,
            system_dp_rank: 0,
            rank_ip: "127.0.0.1".to_owned(),
            rank_port: 1,
            page_size: 64,
            kv_cache_dtype: "auto".to_owned(),
            kv_layout: None,
            dsv41_spec_layout: None,
            load_balance_method: "round_robin".to_owned(),
            enable_dsa_cache_layer_split: false,
            enable_kv_cache_sharding: false,
            prefill_http_port: None,
            decode_allocation_policy: "early".to_owned(),
        }
    }

    #[test]
    fn addresses_are_read() {
        for (text, expected) in [
            ("10.0.0.1:8998", "10.0.0.1:8998"),
            ("prefill-0.svc:80", "prefill-0.svc:80"),
            ("[fd00::1]:8998", "[fd00::1]:8998"),
            ("fd00::1:8998", "[fd00::1]:8998"),
        ] {
            let client = BootstrapClient::new(text).expect(text);
            assert_eq!(
                (client.base.host_str(), client.base.port_or_known_default()),
                expected
                    .rsplit_once(':')
                    .map(|(host, port)| (Some(host), port.parse().ok()))
                    .expect("it has a port"),
            );
        }
        for text in [
            "",
            "host",
            "host:",
            ":1",
            "host:0",
            "host:99999",
            "a/b:1",
            "u@h:1",
            "[h]:1",
        ] {
            assert!(BootstrapClient::new(text).is_err(), "{text:?}");
        }
    }

    #[actix_rt::test]
    async fn registering_is_tried_again_until_it_works() {
        let tries = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&tries);
        let address = serve(move |_, _| match counted.fetch_add(1, Ordering::SeqCst) {
            0 => HttpResponse::ServiceUnavailable().body("starting"),
            1 => HttpResponse::InternalServerError().finish(),
            _ => HttpResponse::Ok().body("OK"),
        });
        let client = BootstrapClient::new(&address).expect("an address");
        let registered = client
            .register_route(
                &registration(),
                RouteRelease::NEWEST,
                Duration::from_secs(30),
            )
            .await;
        assert_eq!(registered, Ok(()));
        assert_eq!(tries.load(Ordering::SeqCst), 3);
    }

    #[actix_rt::test]
    async fn a_refusal_ends_registering_at_once_with_the_servers_text() {
        let tries = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&tries);
        let address = serve(move |_, _| {
            counted.fetch_add(1, Ordering::SeqCst);
            HttpResponse::BadRequest().body("policy differs")
        });
        let client = BootstrapClient::new(&address).expect("an address");
        let refused = client
            .register_route(
                &registration(),
                RouteRelease::NEWEST,
                Duration::from_secs(30),
            )
            .await;
        let expected = BootstrapError::Refused {
            status: 400,
            text: "policy differs".to_owned(),
        };
        assert_eq!(refused, Err(expected));
        assert_eq!(tries.load(Ordering::SeqCst), 1);
    }

    #[actix_rt::test]
    async fn an_absent_server_is_given_up_on_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        drop(listener);
        let client = BootstrapClient::new(&address).expect("an address");
        let started = Instant::now();
        let given_up = client
            .register_route(
                &registration(),
                RouteRelease::NEWEST,
                Duration::from_millis(400),
            )
            .await;
        assert!(matches!(given_up, Err(BootstrapError::Unreachable { .. })));
        assert!(started.elapsed() < REQUEST_TIMEOUT);
    }

    #[actix_rt::test]
    async fn ranks_rooms_and_registrations_are_asked_for_by_the_protocols_names() {
        let address = serve(|request, body| {
            let answer = match (
                request.method().as_str(),
                request.uri().to_string().as_str(),
            ) {
                (
                    "GET",
                    "/route?prefill_dp_rank=1&prefill_cp_rank=2&target_tp_rank=3&target_pp_rank=4",
                ) => r#"{"rank_ip": "fd00::1", "rank_port": 7}"#,
                ("POST", "/query_dp_ranks") if body == r#"{"bootstrap_rooms":[5,6]}"# => {
                    r#"{"5": 1}"#
                }
                ("POST", "/register_dp_rank") if body == r#"{"bootstrap_room":5,"dp_rank":1}"# => {
                    "OK"
                }
                ("PUT", "/v1/registrations/a%2Fb") => "{}",
                (
                    "GET",
                    "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1",
                ) => return HttpResponse::ServiceUnavailable().body("2 workers registered"),
                _ => return HttpResponse::NotFound().body("no such rank"),
            };
            HttpResponse::Ok().body(answer)
        });
        let client = BootstrapClient::new(&address).expect("an address");
        let rank = client.rank_address(1, 2, 3, 4).await.expect("it is there");
        assert_eq!((rank.rank_ip.as_str(), rank.rank_port), ("fd00::1", 7));
        let ranks = client.query_dp_ranks(&[5, 6]).await;
        assert_eq!(ranks, Ok(BTreeMap::from([(5, 1)])));
        assert_eq!(client.register_dp_rank(5, 1).await, Ok(()));
        let body = RegistrationBody {
            role: "decode".to_owned(),
            instance: "127.0.0.1:1".to_owned(),
            rank: 0,
            register_frames: Vec::new(),
            component_types: Vec::new(),
        };
        assert_eq!(client.put_registration("a/b", &body).await, Ok(()));
        let absent = client.rank_address(9, 9, 9, 9).await;
        assert!(matches!(
            absent,
            Err(BootstrapError::Refused { status: 404, .. })
        ));
        let topology = client.topology().await;
        let text = "2 workers registered".to_owned();
        assert_eq!(topology, Err(BootstrapError::NotReady { text }));
    }

    #[actix_rt::test]
    async fn an_answer_that_is_not_the_protocols_is_refused() {
        let address = serve(|_, _| HttpResponse::Ok().body("<html>"));
        let client = BootstrapClient::new(&address).expect("an address");
        let error = client.topology().await.expect_err("it is no json");
        assert!(!error.is_retryable());
    }
}

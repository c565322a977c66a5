//! Requests to the admin API, and what they can come to.

use std::path::Path;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Method, RequestBuilder, Response, Url};
use serde::de::DeserializeOwned;

use super::{Ctl, Failure, trust};
use crate::api::ErrorBody;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Nothing may be silent for longer; a stream of events says every few seconds that all is well.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a refusal that are looked at.
const MAX_SHOWN: usize = 300;
/// Entries of one page, the API's most.
const PAGE: u64 = 1000;

/// Asks one server.
pub(super) struct Client {
    http: reqwest::Client,
    base: Url,
}

impl Client {
    pub(super) fn new(ctl: &Ctl) -> Result<Self, Failure> {
        let no_url = || {
            Failure::Arguments(format!(
                "{:?} is no URL of an admin port, such as http://127.0.0.1:8997",
                ctl.url
            ))
        };
        let base = Url::parse(&ctl.url).map_err(|_| no_url())?;
        let is_tls = base.scheme() == "https";
        if !(is_tls || base.scheme() == "http") || base.host_str().is_none() {
            return Err(no_url());
        }
        if is_tls && ctl.ca_file.is_none() {
            let message = format!(
                "{} speaks TLS: give --ca-file, the authority that signed its certificate",
                ctl.url
            );
            return Err(Failure::Arguments(message));
        }
        let mut headers = HeaderMap::new();
        if let Some(file) = &ctl.token_file {
            headers.insert(AUTHORIZATION, token(file)?);
        }
        let http = reqwest::Client::builder()
            .tls_backend_preconfigured(trust::of(ctl)?)
            .default_headers(headers)
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            // A fleet's server stands inside the cluster.
            .no_proxy()
            .build()
            .map_err(|error| Failure::NoAnswer(chain(&error)))?;
        Ok(Self { http, base })
    }

    /// The server, for messages.
    pub(super) fn server(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// A request of a path, whose parts are escaped here.
    pub(super) fn request(&self, method: Method, path: &[&str]) -> RequestBuilder {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("v1").extend(path);
        }
        self.http.request(method, url)
    }

    /// Sends a request. What is no success is a failure.
    pub(super) async fn send(&self, request: RequestBuilder) -> Result<Response, Failure> {
        let response = request.send().await.map_err(|error| self.lost(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let bytes = response.bytes().await.map_err(|error| self.lost(&error))?;
        if let Ok(body) = serde_json::from_slice::<ErrorBody>(&bytes) {
            return Err(Failure::Refused(body));
        }
        let text = String::from_utf8_lossy(&bytes);
        let text: String = text.trim().chars().take(MAX_SHOWN).collect();
        Err(Failure::NoAnswer(format!(
            "{} is no admin port of a bootstrap server, it answered {status}: {text}",
            self.server()
        )))
    }

    /// Sends a request whose answer is JSON.
    pub(super) async fn json<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
    ) -> Result<T, Failure> {
        let response = self.send(request).await?;
        let bytes = response.bytes().await.map_err(|error| self.lost(&error))?;
        serde_json::from_slice(&bytes).map_err(|error| {
            Failure::NoAnswer(format!(
                "{} answered what this version does not understand: {error}",
                self.server()
            ))
        })
    }

    /// Reads a list page by page until it ends or holds `limit_opt` entries. `add` joins a page
    /// to what there is, says how many entries it had and where the next page begins.
    pub(super) async fn pages<T: DeserializeOwned>(
        &self,
        path: &[&str],
        query: &[(&str, String)],
        limit_opt: Option<u64>,
        cursor: &str,
        mut add: impl FnMut(T) -> (usize, Option<String>),
    ) -> Result<(), Failure> {
        let mut wanted = limit_opt.unwrap_or(u64::MAX);
        let mut after_opt: Option<String> = None;
        while wanted > 0 {
            let limit = wanted.min(PAGE).to_string();
            let mut request = self.request(Method::GET, path).query(query);
            request = request.query(&[("limit", &limit)]);
            if let Some(after) = &after_opt {
                request = request.query(&[(cursor, after)]);
            }
            let (entries, next_opt) = add(self.json(request).await?);
            wanted = wanted.saturating_sub(entries as u64);
            if entries == 0 || next_opt.is_none() {
                return Ok(());
            }
            after_opt = next_opt;
        }
        Ok(())
    }

    pub(super) fn lost(&self, error: &reqwest::Error) -> Failure {
        Failure::NoAnswer(format!(
            "no answer from {}: {}",
            self.server(),
            chain(error)
        ))
    }
}

fn token(file: &Path) -> Result<HeaderValue, Failure> {
    let shown = file.display().to_string();
    let text =
        std::fs::read_to_string(file).map_err(|error| Failure::File(shown.clone(), error))?;
    // As the server reads it: one token a line, its owner's name before it. The first one is ours.
    let mut lines = text.lines().map(str::trim);
    let line = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    let token = line.and_then(|line| line.split_whitespace().last());
    let token = token.unwrap_or_default();
    let value = HeaderValue::from_str(&format!("Bearer {token}"))
        .ok()
        .filter(|_| !token.is_empty());
    let mut value =
        value.ok_or_else(|| Failure::Arguments(format!("{shown} holds no token on a line")))?;
    value.set_sensitive(true);
    Ok(value)
}

/// An error with its causes: reqwest's own text leaves out why a connection failed.
fn chain(error: &reqwest::Error) -> String {
    let mut causes = Vec::new();
    let mut source_opt: Option<&dyn std::error::Error> = Some(error);
    while let Some(source) = source_opt {
        causes.push(source.to_string());
        source_opt = source.source();
    }
    // The last one says it; those before name the URL again and again.
    causes.pop().unwrap_or_default()
}

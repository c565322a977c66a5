//! How this process reaches bootstrap servers: the token it shows and what it trusts over TLS.
//!
//! Routers tell a decode no more than `host:port`, so this is one setting for all of them, and it
//! comes from the environment, where SGLang keeps its token, too.

use std::sync::Arc;

use reqwest::header::HeaderValue;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};

/// SGLang's variable for the token that a guarded server wants to see.
const TOKEN: &str = "SGLANG_DISAGGREGATION_BOOTSTRAP_AUTH_TOKEN";
/// A file with the token: the server's own, or one with nothing but the token. It comes first.
const TOKEN_FILE: &str = "FERRY_BOOTSTRAP_TOKEN_FILE";
/// Authorities (PEM) that sign the servers' certificates. TLS is spoken when it is set.
pub(crate) const CA_FILE: &str = "FERRY_BOOTSTRAP_CA_FILE";
/// This process's own certificate chain (PEM), for servers that ask for one.
const CERT_FILE: &str = "FERRY_BOOTSTRAP_CERT_FILE";
/// The key of that certificate (PEM).
const KEY_FILE: &str = "FERRY_BOOTSTRAP_KEY_FILE";

/// What a client needs to reach its bootstrap server.
#[derive(Clone, Debug)]
pub(crate) struct BootstrapAccess {
    /// The `Authorization` header.
    pub(crate) authorization_opt: Option<HeaderValue>,
    /// Whether addresses without a scheme are asked over TLS.
    pub(crate) is_tls: bool,
    /// What is trusted.
    pub(crate) tls: ClientConfig,
}

/// A builder of HTTP clients that trust nobody, for servers without TLS.
pub fn plain_http() -> reqwest::ClientBuilder {
    let config = builder()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    reqwest::Client::builder().tls_backend_preconfigured(config)
}

fn builder() -> ConfigBuilder<ClientConfig, WantsVerifier> {
    ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .expect("the provider has suites for these versions")
}

impl BootstrapAccess {
    /// Reads the files that the environment names.
    ///
    /// # Errors
    /// The variable or file, and what is wrong with it.
    pub(crate) fn from_environment() -> Result<Self, String> {
        Self::read(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let token_opt = match (variable(TOKEN_FILE), variable(TOKEN)) {
            (Some(file), _) => Some((TOKEN_FILE, token_in(&file)?)),
            (None, Some(token)) => Some((TOKEN, token.trim().to_owned())),
            (None, None) => None,
        };
        let authorization = token_opt.map(|(name, token)| {
            let shown = HeaderValue::from_str(&format!("Bearer {token}"));
            let mut shown = shown
                .map_err(|_| format!("{name}: the token has characters that no header can have"))?;
            shown.set_sensitive(true);
            Ok::<_, String>(shown)
        });
        let mut authorities = RootCertStore::empty();
        let ca_opt = variable(CA_FILE);
        if let Some(file) = &ca_opt {
            for authority in certificates(file)? {
                let added = authorities.add(authority);
                added.map_err(|error| format!("{CA_FILE} {file}: {error}"))?;
            }
        }
        let trusting = builder().with_root_certificates(authorities);
        let tls = match (variable(CERT_FILE), variable(KEY_FILE)) {
            (None, None) => trusting.with_no_client_auth(),
            (Some(certificate), Some(key_file)) => {
                let key = PrivateKeyDer::from_pem_file(&key_file);
                let key = key.map_err(|error| format!("{KEY_FILE} {key_file}: {error}"))?;
                trusting
                    .with_client_auth_cert(certificates(&certificate)?, key)
                    .map_err(|error| format!("{certificate} with {key_file}: {error}"))?
            }
            _ => return Err(format!("{CERT_FILE} and {KEY_FILE} need each other")),
        };
        Ok(Self {
            authorization_opt: authorization.transpose()?,
            is_tls: ca_opt.is_some(),
            tls,
        })
    }
}

/// The first token of a file that is written as the server's: one a line, perhaps with a name.
fn token_in(file: &str) -> Result<String, String> {
    let failed = |reason: &str| format!("{TOKEN_FILE} {file}: {reason}");
    let text = std::fs::read_to_string(file).map_err(|error| failed(&error.to_string()))?;
    let mut lines = text.lines().map(str::trim);
    let line = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    let token_opt = line.and_then(|line| line.split_whitespace().last());
    let token = token_opt.ok_or_else(|| failed("there is no token in it"))?;
    Ok(token.to_owned())
}

fn certificates(file: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(chain) if chain.is_empty() => Err(format!("{file}: there is no certificate in it")),
        Ok(chain) => Ok(chain),
        Err(error) => Err(format!("{file}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<BootstrapAccess, String> {
        BootstrapAccess::read(|name| {
            let known = variables.iter().find(|(known, _)| *known == name);
            known.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_token_comes_from_the_file_before_the_variable() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokens");
        std::fs::write(&file, "# of the fleet\nprefill-a  from-file\nother\n").unwrap();
        let file = file.to_str().unwrap();
        let shown = |variables: &[(&str, &str)]| {
            let access = read(variables).unwrap();
            let header = access.authorization_opt?;
            Some(header.to_str().unwrap().to_owned())
        };
        assert_eq!(shown(&[]), None);
        let from_variable = shown(&[(TOKEN, " from-variable\n")]);
        assert_eq!(from_variable.as_deref(), Some("Bearer from-variable"));
        let from_file = shown(&[(TOKEN, "from-variable"), (TOKEN_FILE, file)]);
        assert_eq!(from_file.as_deref(), Some("Bearer from-file"));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let empty = folder.path().join("empty");
        std::fs::write(&empty, "\n").unwrap();
        let empty = empty.to_str().unwrap();
        for (variables, named) in [
            (&[(TOKEN_FILE, empty)][..], "there is no token"),
            (&[(TOKEN_FILE, "/absent")], "/absent"),
            (&[(TOKEN, "a\nb")], TOKEN),
            (&[(CA_FILE, empty)], "there is no certificate"),
            (&[(CA_FILE, "/absent")], "/absent"),
            (&[(CERT_FILE, empty)], KEY_FILE),
        ] {
            let refused = read(variables).unwrap_err();
            assert!(refused.contains(named), "{refused}");
        }
    }
}

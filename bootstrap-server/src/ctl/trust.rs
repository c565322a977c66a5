//! What the client trusts over TLS, and what it shows.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::{Ctl, Failure};

fn wrong(file: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::Arguments(format!("{}: {error}", file.display()))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(chain) if chain.is_empty() => Err(wrong(file, &"there is no certificate in it")),
        Ok(chain) => Ok(chain),
        Err(error) => Err(wrong(file, &error)),
    }
}

/// Reads the files that the command line names. Without any, nobody is trusted.
pub(super) fn of(ctl: &Ctl) -> Result<ClientConfig, Failure> {
    let mut authorities = RootCertStore::empty();
    if let Some(file) = &ctl.ca_file {
        for authority in certificates(file)? {
            authorities
                .add(authority)
                .map_err(|error| wrong(file, &error))?;
        }
    }
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::Arguments(error.to_string()))?
        .with_root_certificates(authorities);
    match (&ctl.cert_file, &ctl.key_file) {
        (Some(certificate), Some(key_file)) => {
            let key = PrivateKeyDer::from_pem_file(key_file);
            let key = key.map_err(|error| wrong(key_file, &error))?;
            config
                .with_client_auth_cert(certificates(certificate)?, key)
                .map_err(|error| wrong(certificate, &error))
        }
        // Each of the two requires the other.
        _ => Ok(config.with_no_client_auth()),
    }
}

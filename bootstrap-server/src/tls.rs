//! TLS on the ports that ask for it: a certificate that may change while the server runs, and
//! client certificates where an authority for them is given.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use actix_tls::accept::rustls_0_23::TlsStream;
use actix_web::dev::Extensions;
use actix_web::rt::net::TcpStream;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
};

use crate::guard::CertificateName;

/// What the files together say.
#[derive(Debug)]
pub struct Tls {
    /// For every port that speaks TLS.
    pub config: ServerConfig,
    certificate: Arc<Certificate>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// When one cannot be read, or the key is not the certificate's.
    pub fn load(
        certificate: &Path,
        key: &Path,
        client_ca_opt: Option<&Path>,
    ) -> Result<Self, String> {
        let provider = Arc::new(ring::default_provider());
        let certificate = Arc::new(Certificate::load(certificate, key, &provider)?);
        let versions = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let clients = match client_ca_opt {
            None => versions.with_no_client_auth(),
            Some(file) => {
                versions.with_client_cert_verifier(Arc::new(AuditedVerifier::load(file, provider)?))
            }
        };
        let resolver: Arc<dyn ResolvesServerCert> = certificate.clone();
        Ok(Self {
            config: clients.with_cert_resolver(resolver),
            certificate,
        })
    }

    /// Reads certificate and key again if they have changed. Connections go on with what they
    /// began with; files that cannot be used leave the certificate as it is.
    pub fn reload(&self) {
        self.certificate.reload();
    }
}

#[derive(Debug)]
struct Certificate {
    files: [PathBuf; 2],
    provider: Arc<CryptoProvider>,
    current: RwLock<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    key: Arc<CertifiedKey>,
    changed_at: [Option<SystemTime>; 2],
}

impl Certificate {
    fn load(
        certificate: &Path,
        key: &Path,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, String> {
        let files = [certificate.to_owned(), key.to_owned()];
        let current = RwLock::new(load(&files, provider)?);
        Ok(Self {
            files,
            provider: Arc::clone(provider),
            current,
        })
    }

    fn reload(&self) {
        let known = {
            let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
            current.changed_at
        };
        let changed_at = changed_at(&self.files);
        if changed_at == known {
            return;
        }
        let loaded = load(&self.files, &self.provider);
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        match loaded {
            Ok(loaded) => {
                *current = loaded;
                tracing::info!(file = %self.files[0].display(), "certificate reloaded");
            }
            Err(reason) => {
                // Half of a pair may be there; the other half changes the times again.
                current.changed_at = changed_at;
                tracing::error!(reason, "the certificate stays as it was");
            }
        }
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(&current.key))
    }
}

fn changed_at(files: &[PathBuf; 2]) -> [Option<SystemTime>; 2] {
    let [certificate, key] = files;
    [certificate, key].map(|file| {
        std::fs::metadata(file)
            .and_then(|about| about.modified())
            .ok()
    })
}

fn load(files: &[PathBuf; 2], provider: &CryptoProvider) -> Result<Loaded, String> {
    let changed_at = changed_at(files);
    let [certificate, key] = files;
    let chain = certificates(certificate)?;
    let private = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| format!("the private key in {}: {error}", key.display()))?;
    let key = CertifiedKey::from_der(chain, private, provider)
        .map_err(|error| format!("{} with {}: {error}", certificate.display(), key.display()))?;
    Ok(Loaded {
        key: Arc::new(key),
        changed_at,
    })
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let shown = file.display();
    let failed = |error: &dyn std::fmt::Display| format!("the certificates in {shown}: {error}");
    let read = CertificateDer::pem_file_iter(file).map_err(|error| failed(&error))?;
    let chain = read
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| failed(&error))?;
    if chain.is_empty() {
        return Err(format!("there is no certificate in {shown}"));
    }
    Ok(chain)
}

/// Webpki's rules, and a line in the audit log for everyone who is refused.
#[derive(Debug)]
struct AuditedVerifier(Arc<dyn ClientCertVerifier>);

impl AuditedVerifier {
    fn load(file: &Path, provider: Arc<CryptoProvider>) -> Result<Self, String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let mut roots = RootCertStore::empty();
        for certificate in certificates(file)? {
            roots.add(certificate).map_err(|error| failed(&error))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|error| failed(&error))?;
        Ok(Self(verifier))
    }
}

impl ClientCertVerifier for AuditedVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.0.verify_client_cert(certificate, intermediates, now);
        if let Err(error) = &verified {
            let name = name_in(certificate);
            tracing::warn!(target: "audit", certificate = name, refused = %error, "client certificate refused");
        }
        verified
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// The first DNS name of a certificate.
fn name_in(certificate: &CertificateDer<'_>) -> String {
    let parsed = webpki::EndEntityCert::try_from(certificate);
    let name_opt = parsed
        .ok()
        .and_then(|parsed| parsed.valid_dns_names().next().map(str::to_owned));
    name_opt.unwrap_or_else(|| "a certificate without a dns name".to_owned())
}

/// Keeps the name of a client's certificate with its connection.
pub(crate) fn remember_certificate(connection: &dyn Any, extensions: &mut Extensions) {
    let Some(stream) = connection.downcast_ref::<TlsStream<TcpStream>>() else {
        return;
    };
    let (_, tls) = stream.get_ref();
    if let Some([certificate, ..]) = tls.peer_certificates() {
        extensions.insert(CertificateName(name_in(certificate)));
    }
}

//! TLS: certificates that may be replaced while connections are open.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::certificate_names::names_in;
use crate::config::Config;
use crate::guard::watched::Watched;

/// HTTP/2 is not offered: nobody here needs it.
const PROTOCOLS: [&[u8]; 1] = [b"http/1.1"];

/// What this server shows, and what it asks for.
#[derive(Debug)]
pub(crate) struct Tls(Watched<Loaded>);

/// What the files say.
#[derive(Debug)]
struct Loaded {
    provider: Arc<CryptoProvider>,
    certificate: Arc<dyn ResolvesServerCert>,
    clients_opt: Option<Arc<dyn ClientCertVerifier>>,
}

/// Why a handshake did not succeed.
#[derive(Debug)]
pub(crate) enum HandshakeError {
    /// The other end showed no certificate, or one that does not count; its names, if any.
    Certificate(rustls::Error, Option<Arc<str>>),
    /// Anything else, for example no TLS at all.
    Other(io::Error),
}

impl Tls {
    /// Reads the files; `None` where no certificate is configured.
    pub(crate) fn open(config: &Config) -> Result<Option<Self>, String> {
        let (Some(certificate), Some(key)) = (&config.tls_cert, &config.tls_key) else {
            return Ok(None);
        };
        let mut files = vec![certificate.clone(), key.clone()];
        files.extend(config.tls_client_ca.clone());
        Watched::open(files, Loaded::parse).map(|watched| Some(Self(watched)))
    }

    pub(crate) fn reload(&self) {
        self.0.reload();
    }

    pub(crate) fn trouble(&self) -> Option<String> {
        self.0.trouble()
    }

    /// Shakes hands with the certificates that are in force now. Returns the names in the
    /// certificate that the other end proved to own, too.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
    ) -> Result<(TlsStream<TcpStream>, Option<Arc<str>>), HandshakeError> {
        let refused = Refused::default();
        let config = self.0.value().config(&refused);
        let config = config.map_err(|error| HandshakeError::Other(io::Error::other(error)))?;
        let accepted = TlsAcceptor::from(Arc::new(config)).accept(stream).await;
        match accepted {
            Ok(stream) => {
                let (_, session) = stream.get_ref();
                let certificate_opt = session.peer_certificates().and_then(<[_]>::first);
                let names_opt = certificate_opt.map(|certificate| names_in(certificate));
                Ok((stream, names_opt))
            }
            Err(error) => Err(refused.explain(error)),
        }
    }
}

impl Loaded {
    fn parse(contents: &[Vec<u8>]) -> Result<Self, String> {
        let [certificate, key, authorities_opt @ ..] = contents else {
            return Err("a certificate and its key are needed".to_owned());
        };
        let provider = Arc::new(default_provider());
        let chain = certificates(certificate)?;
        let key =
            PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the key: {error}"))?;
        let certified = CertifiedKey::from_der(chain, key, &provider)
            .map_err(|error| format!("the certificate with this key: {error}"))?;
        let clients_opt = match authorities_opt.first() {
            None => None,
            Some(authorities) => Some(verifier(authorities, &provider)?),
        };
        let loaded = Self {
            provider,
            certificate: Arc::new(SingleCertAndKey::from(certified)),
            clients_opt,
        };
        let usable = loaded.config(&Refused::default());
        usable.map(|_| loaded).map_err(|error| error.to_string())
    }

    /// For one connection, so that a certificate which is refused can be named with its sender.
    fn config(&self, refused: &Refused) -> Result<ServerConfig, rustls::Error> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?;
        let builder = match &self.clients_opt {
            None => builder.with_no_client_auth(),
            Some(verifier) => builder.with_client_cert_verifier(Arc::new(ReportingVerifier {
                verifier: Arc::clone(verifier),
                refused: refused.clone(),
            })),
        };
        let mut config = builder.with_cert_resolver(Arc::clone(&self.certificate));
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        // A resumed session would not show its certificate again, though it may have expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }
}

fn verifier(
    authorities: &[u8],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(authorities)? {
        roots
            .add(authority)
            .map_err(|error| format!("an authority: {error}"))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(|error| format!("the authorities: {error}"))
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match chain {
        Ok(chain) if chain.is_empty() => Err("there is no certificate in it".to_owned()),
        Ok(chain) => Ok(chain),
        Err(error) => Err(format!("a certificate: {error}")),
    }
}

/// The names in the certificate that one connection was refused for.
#[derive(Clone, Debug, Default)]
struct Refused(Arc<Mutex<Option<Arc<str>>>>);

impl Refused {
    fn explain(&self, error: io::Error) -> HandshakeError {
        use rustls::Error::{InvalidCertificate, NoCertificatesPresented};
        let cause_opt = error
            .get_ref()
            .and_then(|cause| cause.downcast_ref::<rustls::Error>());
        match cause_opt {
            Some(cause @ (InvalidCertificate(_) | NoCertificatesPresented)) => {
                let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                HandshakeError::Certificate(cause.clone(), names.take())
            }
            _ => HandshakeError::Other(error),
        }
    }
}

/// Webpki's rules; keeps the names in what it refuses.
#[derive(Debug)]
struct ReportingVerifier {
    verifier: Arc<dyn ClientCertVerifier>,
    refused: Refused,
}

impl ClientCertVerifier for ReportingVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self
            .verifier
            .verify_client_cert(certificate, intermediates, now);
        if verified.is_err() {
            let mut names = self
                .refused
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            *names = Some(names_in(certificate));
        }
        verified
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

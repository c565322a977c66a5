//! How connections arrive: bound sockets, limits, TLS, and the HTTP service behind them.
//!
//! actix-web's own `HttpServer` would do the same, but says nothing of a refused certificate (the
//! audit log must), stops accepting at its limit instead of refusing, and cannot tell a handler
//! which port a request came in by.

mod certificate_names;
mod limits;
mod stream;
mod tls;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix_http::error::DispatchError;
use actix_http::{HttpService, KeepAlive};
use actix_service::{IntoServiceFactory, ServiceFactoryExt, fn_service, map_config};
use actix_web::App;
use actix_web::dev::AppConfig;
use actix_web::middleware::from_fn;
use actix_web::web::{Data, ServiceConfig};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use self::limits::Full;
pub(crate) use self::limits::{Connections, RequestRate};
pub use self::stream::Connection;
use self::stream::{Bytes, Stream};
use self::tls::HandshakeError;
pub(crate) use self::tls::Tls;
use crate::config::Address;
use crate::fleet::{Fleet, Port};
use crate::guard::audit;
use crate::routes;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;
/// Time for a client to send its request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a client to shake hands.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an idle connection is kept.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
const SHUTDOWN_SECONDS: u64 = 1;

/// Why connections are closed before any request: words for the metric's label.
pub(crate) const REFUSED: [&str; 4] = [
    Full::All.word(),
    Full::OfPeer.word(),
    NO_CERTIFICATE,
    NO_HANDSHAKE,
];
const NO_CERTIFICATE: &str = "certificate";
const NO_HANDSHAKE: &str = "handshake";

/// What a group of ports has in common.
#[derive(Clone)]
pub(crate) struct Listening {
    pub(crate) fleet: Data<Fleet>,
    pub(crate) connections: Connections,
    pub(crate) configure: fn(&mut ServiceConfig),
    /// Threads of all ports of the group together: handlers never block.
    pub(crate) workers: usize,
}

/// A bound socket.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) listener: TcpListener,
    pub(crate) address: SocketAddr,
    /// Whether it speaks TLS.
    pub(crate) is_tls: bool,
}

impl Bound {
    /// Binds an address. `[::]` takes IPv4 as well, whatever the system's default is.
    pub(crate) fn new(at: Address) -> io::Result<Self> {
        let address = at.address;
        let socket = Socket::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            socket.set_only_v6(!address.ip().is_unspecified())?;
        }
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let listener = TcpListener::from(socket);
        Ok(Self {
            address: listener.local_addr()?,
            listener,
            is_tls: at.is_tls,
        })
    }
}

impl Listening {
    /// Starts to serve sockets, each with its engine's port; `None` is the admin port.
    pub(crate) fn serve(
        self,
        bound: impl IntoIterator<Item = (Bound, Option<Arc<Port>>)>,
    ) -> io::Result<actix_server::Server> {
        let mut server = actix_server::Server::build()
            .workers(self.workers)
            .shutdown_timeout(SHUTDOWN_SECONDS)
            // Ours refuses before this one would let clients wait.
            .max_concurrent_connections(usize::MAX >> 1)
            .disable_signals();
        for (bound, port_opt) in bound {
            let tls_opt = self.fleet.guard.tls_opt.clone().filter(|_| bound.is_tls);
            let shutdown = server.graceful_shutdown_signal();
            let listening = self.clone();
            let factory = move || {
                let app = App::new()
                    .app_data(listening.fleet.clone())
                    .wrap(from_fn(routes::around))
                    .configure(listening.configure)
                    .into_factory()
                    .map_err(|error: actix_web::Error| error.error_response());
                let shutdown = shutdown.clone();
                let http = HttpService::build()
                    .graceful_shutdown_signal(move || {
                        let shutdown = shutdown.clone();
                        async move { shutdown.notified().await }
                    })
                    .keep_alive(KeepAlive::Timeout(KEEP_ALIVE))
                    .client_request_timeout(HEAD_TIMEOUT)
                    .on_connect_ext(|stream: &Stream, data| {
                        data.insert(stream.connection.clone());
                    })
                    .h1(map_config(app, |()| AppConfig::default()));
                let (listening, port_opt) = (listening.clone(), port_opt.clone());
                let tls_opt = tls_opt.clone();
                fn_service(move |stream: TcpStream| {
                    let (listening, port_opt) = (listening.clone(), port_opt.clone());
                    let tls_opt = tls_opt.clone();
                    async move { listening.accept(stream, port_opt, tls_opt).await }
                })
                .and_then(http)
            };
            server = server.listen(bound.address.to_string(), bound.listener, factory)?;
        }
        Ok(server.run())
    }

    async fn accept(
        &self,
        stream: TcpStream,
        port_opt: Option<Arc<Port>>,
        tls_opt: Option<Arc<Tls>>,
    ) -> Result<(Stream, Option<SocketAddr>), DispatchError> {
        let peer = stream.peer_addr().map_err(DispatchError::Io)?;
        let permit = self.connections.admit(peer.ip()).map_err(|full| {
            self.refuse(peer, full.word());
            DispatchError::Io(io::ErrorKind::ConnectionRefused.into())
        })?;
        // An answer is written whole; waiting for more to send would only delay it.
        stream.set_nodelay(true).map_err(DispatchError::Io)?;
        let (bytes, certificate_opt) = match tls_opt {
            None => (Bytes::Plain(stream), None),
            Some(tls) => {
                let namespace_opt = port_opt.as_ref().map(|port| port.namespace.as_str());
                let (stream, names_opt) =
                    self.shake_hands(&tls, stream, peer, namespace_opt).await?;
                (Bytes::Tls(Box::new(stream)), names_opt)
            }
        };
        let connection = Connection {
            port_opt,
            peer,
            certificate_opt,
        };
        let stream = Stream {
            connection,
            bytes,
            _permit: permit,
        };
        Ok((stream, Some(peer)))
    }

    async fn shake_hands(
        &self,
        tls: &Tls,
        stream: TcpStream,
        peer: SocketAddr,
        namespace_opt: Option<&str>,
    ) -> Result<(TlsStream<TcpStream>, Option<Arc<str>>), DispatchError> {
        let shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await;
        let error = match shaken {
            Ok(Ok(shaken)) => return Ok(shaken),
            Ok(Err(HandshakeError::Certificate(error, names_opt))) => {
                self.refuse(peer, NO_CERTIFICATE);
                audit::refused_certificate(peer, namespace_opt, names_opt.as_deref(), &error);
                return Err(DispatchError::Io(io::Error::other(error)));
            }
            Ok(Err(HandshakeError::Other(error))) => error,
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        self.refuse(peer, NO_HANDSHAKE);
        tracing::debug!(%peer, %error, "no tls handshake");
        Err(DispatchError::Io(error))
    }

    fn refuse(&self, peer: SocketAddr, reason: &str) {
        tracing::debug!(%peer, reason, "a connection was refused");
        let counter = &self.fleet.metrics.connections_refused;
        counter.with_label_values(&[reason]).inc();
    }
}

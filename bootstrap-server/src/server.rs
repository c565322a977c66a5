//! The server itself: its ports, its probes, its end. A program or a thread of another runs it.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use actix_web::middleware::from_fn;
use actix_web::web::Data;
use actix_web::{App, HttpServer};

use crate::config::{Address, Config};
use crate::error::ServeError;
use crate::fleet::Fleet;
use crate::guard::{self, Guard, PortKind};
use crate::metrics::Metrics;
use crate::routes;
use crate::store::{MemoryStore, SledStore, Store};
use crate::tls::{self, Tls};
use crate::writer::Registrations;

/// For all engines' ports together: handlers never block.
const WORKERS: usize = 2;
/// For the admin port, so that a slow operator holds up no engine.
const ADMIN_WORKERS: usize = 1;
/// Time for a client to send its request's head.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const SHUTDOWN_SECONDS: u64 = 1;
/// How often files of tokens and certificates are looked at.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// A server whose ports are bound and whose registrations are loaded.
#[derive(Debug)]
pub struct Server {
    engines: Vec<(Bound, String)>,
    admin: Bound,
    tls_opt: Option<Tls>,
    fleet: Data<Fleet>,
}

/// A port that nobody else can take any more.
#[derive(Debug)]
struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    is_tls: bool,
}

impl Bound {
    fn new(at: Address) -> Result<Self, ServeError> {
        let bound = TcpListener::bind(at.address).and_then(|listener| {
            Ok(Self {
                address: listener.local_addr()?,
                listener,
                is_tls: at.is_tls,
            })
        });
        let address = at.address;
        bound.map_err(|source| ServeError::Bind { address, source })
    }
}

impl Server {
    /// Binds every port and loads the registrations.
    ///
    /// # Errors
    /// [`ServeError`]; nothing is served then.
    pub fn bind(config: Config) -> Result<Self, ServeError> {
        config.check().map_err(ServeError::Config)?;
        let guard = Guard::new(&config).map_err(ServeError::Config)?;
        let tls_opt = match (&config.tls_cert, &config.tls_key) {
            (Some(certificate), Some(key)) => {
                let tls = Tls::load(certificate, key, config.tls_client_ca.as_deref());
                Some(tls.map_err(ServeError::Config)?)
            }
            _ => None,
        };
        let engines = config
            .listen
            .iter()
            .map(|listen| Ok((Bound::new(listen.at)?, listen.namespace.clone())));
        let engines: Vec<_> = engines.collect::<Result<_, ServeError>>()?;
        let admin = Bound::new(config.admin_listen)?;
        let store: Box<dyn Store> = if config.ephemeral {
            Box::new(MemoryStore::default())
        } else {
            Box::new(SledStore::open(&config.data_dir)?)
        };
        let metrics = Metrics::new().map_err(|error| ServeError::Metrics(error.to_string()))?;
        let registrations = Registrations::start(store, metrics.clone())?;
        let ports = engines
            .iter()
            .map(|(port, namespace)| (port.address, namespace.clone()));
        let fleet = Fleet::new(config, ports, registrations, guard, metrics);
        Ok(Self {
            engines,
            admin,
            tls_opt,
            fleet: Data::new(fleet),
        })
    }

    /// The engines' ports by name, in the order of the configuration.
    pub fn engines(&self) -> impl Iterator<Item = (&str, SocketAddr)> {
        self.engines
            .iter()
            .map(|(port, namespace)| (namespace.as_str(), port.address))
    }

    /// The admin port.
    pub const fn admin(&self) -> SocketAddr {
        self.admin.address
    }

    /// Serves until `stop` completes. Requests that have begun are answered.
    ///
    /// # Errors
    /// When a port cannot be served.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), ServeError> {
        let tls_opt = self.tls_opt.as_ref();
        let ports = self.engines.into_iter().map(|(port, _)| port);
        let engines = serve(&self.fleet, PortKind::Engine, ports, tls_opt)?;
        let admin = serve(&self.fleet, PortKind::Admin, [self.admin], tls_opt)?;
        let tending = [
            actix_web::rt::spawn(probe(self.fleet.clone())),
            actix_web::rt::spawn(reload(self.fleet, self.tls_opt)),
        ];
        let handles = [engines.handle(), admin.handle()];
        let ended = {
            let serving = futures::future::try_join(engines, admin);
            tokio::pin!(serving);
            tokio::select! {
                ended = &mut serving => ended,
                () = stop => {
                    let stops = handles.map(|handle| async move { handle.stop(true).await });
                    // A server acts on its handle only while it is polled.
                    let (_, ended) = tokio::join!(futures::future::join_all(stops), serving);
                    ended
                }
            }
        };
        tending
            .iter()
            .for_each(actix_web::rt::task::JoinHandle::abort);
        ended.map(|_| ()).map_err(ServeError::Serve)
    }
}

fn serve(
    fleet: &Data<Fleet>,
    kind: PortKind,
    ports: impl IntoIterator<Item = Bound>,
    tls_opt: Option<&Tls>,
) -> Result<actix_web::dev::Server, ServeError> {
    let workers = match kind {
        PortKind::Engine => WORKERS,
        PortKind::Admin => ADMIN_WORKERS,
    };
    let connections = fleet.config.max_connections.div_ceil(workers);
    let fleet = fleet.clone();
    let mut server = HttpServer::new(move || {
        App::new()
            .app_data(fleet.clone())
            .app_data(kind)
            .wrap(from_fn(guard::check))
            .wrap(from_fn(routes::around))
            .configure(match kind {
                PortKind::Engine => routes::configure_engine,
                PortKind::Admin => routes::configure_admin,
            })
    })
    .workers(workers)
    .on_connect(tls::remember_certificate)
    .client_request_timeout(REQUEST_TIMEOUT)
    .shutdown_timeout(SHUTDOWN_SECONDS)
    .max_connections(connections)
    .disable_signals();
    for port in ports {
        server = match tls_opt.filter(|_| port.is_tls) {
            Some(tls) => server.listen_rustls_0_23(port.listener, tls.config.clone()),
            None => server.listen(port.listener),
        }
        .map_err(ServeError::Serve)?;
    }
    Ok(server.run())
}

async fn probe(fleet: Data<Fleet>) {
    let interval = Duration::from_secs(fleet.config.probe_interval);
    while !interval.is_zero() {
        tokio::time::sleep(interval).await;
        fleet.probes.round(&fleet.registrations).await;
    }
}

/// Tokens and certificates are replaced by whoever deploys them, at any time.
async fn reload(fleet: Data<Fleet>, tls_opt: Option<Tls>) {
    loop {
        tokio::time::sleep(RELOAD_INTERVAL).await;
        fleet.guard.reload();
        if let Some(tls) = &tls_opt {
            tls.reload();
        }
    }
}

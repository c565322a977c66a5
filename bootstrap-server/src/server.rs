//! The server itself: its ports, its probes, its end. A program or a thread of another runs it.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use actix_web::middleware::from_fn;
use actix_web::web::{Data, ServiceConfig};
use actix_web::{App, HttpServer};

use crate::config::Config;
use crate::error::ServeError;
use crate::fleet::Fleet;
use crate::metrics::Metrics;
use crate::routes;
use crate::store::{MemoryStore, SledStore, Store};
use crate::writer::Registrations;

/// For all engines' ports together: handlers never block.
const WORKERS: usize = 2;
/// For the admin port, so that a slow operator holds up no engine.
const ADMIN_WORKERS: usize = 1;
/// Time for a client to send its request's head.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const SHUTDOWN_SECONDS: u64 = 1;
/// Of one worker.
const MAX_CONNECTIONS: usize = 10_000;

/// A server whose ports are bound and whose registrations are loaded.
#[derive(Debug)]
pub struct Server {
    engines: Vec<(TcpListener, SocketAddr, String)>,
    admin: (TcpListener, SocketAddr),
    fleet: Data<Fleet>,
}

fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ServeError> {
    let bound = TcpListener::bind(address).and_then(|listener| {
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    bound.map_err(|source| ServeError::Bind { address, source })
}

impl Server {
    /// Binds every port and loads the registrations.
    ///
    /// # Errors
    /// [`ServeError`]; nothing is served then.
    pub fn bind(config: Config) -> Result<Self, ServeError> {
        config.check().map_err(ServeError::Config)?;
        let engines = config.listen.iter().map(|listen| {
            let (listener, address) = bind(listen.address)?;
            Ok((listener, address, listen.namespace.clone()))
        });
        let engines: Vec<_> = engines.collect::<Result<_, ServeError>>()?;
        let admin = bind(config.admin_listen)?;
        let store: Box<dyn Store> = if config.ephemeral {
            Box::new(MemoryStore::default())
        } else {
            Box::new(SledStore::open(&config.data_dir)?)
        };
        let metrics = Metrics::new().map_err(|error| ServeError::Metrics(error.to_string()))?;
        let registrations = Registrations::start(store, metrics.clone())?;
        let ports = engines
            .iter()
            .map(|(_, address, namespace)| (*address, namespace.clone()));
        let fleet = Data::new(Fleet::new(config, ports, registrations, metrics));
        Ok(Self {
            engines,
            admin,
            fleet,
        })
    }

    /// The engines' ports by name, in the order of the configuration.
    pub fn engines(&self) -> impl Iterator<Item = (&str, SocketAddr)> {
        self.engines
            .iter()
            .map(|(_, address, namespace)| (namespace.as_str(), *address))
    }

    /// The admin port.
    pub const fn admin(&self) -> SocketAddr {
        self.admin.1
    }

    /// Serves until `stop` completes. Requests that have begun are answered.
    ///
    /// # Errors
    /// When a port cannot be served.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), ServeError> {
        let listeners = self.engines.into_iter().map(|(listener, ..)| listener);
        let engines = serve(&self.fleet, listeners, WORKERS, routes::configure_engine)?;
        let admin = serve(
            &self.fleet,
            [self.admin.0],
            ADMIN_WORKERS,
            routes::configure_admin,
        )?;
        let probing = actix_web::rt::spawn(probe(self.fleet));
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
        probing.abort();
        ended.map(|_| ()).map_err(ServeError::Serve)
    }
}

fn serve(
    fleet: &Data<Fleet>,
    listeners: impl IntoIterator<Item = TcpListener>,
    workers: usize,
    configure: fn(&mut ServiceConfig),
) -> Result<actix_web::dev::Server, ServeError> {
    let fleet = fleet.clone();
    let mut server = HttpServer::new(move || {
        App::new()
            .app_data(fleet.clone())
            .wrap(from_fn(routes::around))
            .configure(configure)
    })
    .workers(workers)
    .client_request_timeout(REQUEST_TIMEOUT)
    .shutdown_timeout(SHUTDOWN_SECONDS)
    .max_connections(MAX_CONNECTIONS)
    .disable_signals();
    for listener in listeners {
        server = server.listen(listener).map_err(ServeError::Serve)?;
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

//! The server itself: its ports, its probes, its end. A program or a thread of another runs it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix_web::web::Data;
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::config::{Address, Config, StoreKind};
use crate::error::ServeError;
use crate::events::Events;
use crate::fleet::Fleet;
use crate::guard::Guard;
use crate::listener::{Bound, Connections, Listening};
use crate::metrics::Metrics;
use crate::routes;
use crate::store::{MemoryStore, SledStore, Store};
use crate::writer::Registrations;

/// For all engines' ports together: handlers never block.
const WORKERS: usize = 2;
/// For the admin port, so that a slow operator holds up no engine.
const ADMIN_WORKERS: usize = 1;
/// Of the admin port, however many the engines' ports have.
const ADMIN_CONNECTIONS: usize = 512;
/// Open files that are no connections of engines' ports: listening sockets, the store, probes.
const OTHER_FILES: u64 = 2048;
/// How long the end of a server waits for what is being written.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often files of tokens and certificates are looked at, and old rooms dropped.
const TEND_INTERVAL: Duration = Duration::from_secs(1);

/// A server whose ports are bound and whose registrations are loaded.
#[derive(Debug)]
pub struct Server {
    engines: Vec<Bound>,
    admin: Bound,
    fleet: Data<Fleet>,
}

fn bind(at: Address) -> Result<Bound, ServeError> {
    let address = at.address;
    Bound::new(at).map_err(|source| ServeError::Bind { address, source })
}

/// Lets this process have as many open files as the system gives it. For a program of its own:
/// another that runs a server may depend on small numbers.
pub fn take_all_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If it cannot be changed, what it is counts.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Each connection is an open file, so the limit of those is one of connections.
fn connections_at_most(wanted: usize) -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let possible = usize::try_from(files.saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX);
    if possible < wanted {
        tracing::info!(
            files,
            wanted,
            possible,
            "the limit of open files allows fewer connections than --max-connections"
        );
    }
    wanted.min(possible).max(1)
}

impl Server {
    /// Binds every port and loads the registrations.
    ///
    /// # Errors
    /// [`ServeError`]; nothing is served then.
    pub fn bind(config: Config) -> Result<Self, ServeError> {
        config.check().map_err(ServeError::Config)?;
        let guard = Guard::new(&config).map_err(ServeError::Config)?;
        let engines = config.listen.iter().map(|listen| bind(listen.at));
        let engines: Vec<Bound> = engines.collect::<Result<_, ServeError>>()?;
        let admin = bind(config.admin_listen)?;
        let store: Box<dyn Store> = match config.store {
            StoreKind::Memory => Box::new(MemoryStore),
            StoreKind::Sled => Box::new(SledStore::open(&config.data_dir, config.store_log_bytes)?),
        };
        let metrics = Metrics::new().map_err(|error| ServeError::Metrics(error.to_string()))?;
        let events = Arc::new(Events::new(metrics.events.clone()));
        let registrations = Registrations::start(
            store,
            config.damaged_store,
            metrics.clone(),
            Arc::clone(&events),
        )?;
        let connections = Connections::new(
            connections_at_most(config.max_connections),
            config.max_connections_per_peer,
        );
        let fleet = Fleet::new(config, registrations, guard, connections, events, metrics);
        Ok(Self {
            engines,
            admin,
            fleet: Data::new(fleet),
        })
    }

    /// The engines' ports by name, in the order of the configuration.
    pub fn engines(&self) -> impl Iterator<Item = (&str, SocketAddr)> {
        let ports = self.fleet.ports().iter().zip(&self.engines);
        ports.map(|(port, bound)| (port.namespace.as_str(), bound.address))
    }

    /// The admin port.
    pub const fn admin(&self) -> SocketAddr {
        self.admin.address
    }

    /// Serves until `stop` completes. Requests that have begun are answered; then its folder is
    /// free.
    ///
    /// # Errors
    /// When a port cannot be served.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), ServeError> {
        let engines = Listening {
            fleet: self.fleet.clone(),
            connections: self.fleet.connections.clone(),
            configure: routes::configure_engine,
            workers: WORKERS,
        };
        let admin = Listening {
            fleet: self.fleet.clone(),
            connections: Connections::new(ADMIN_CONNECTIONS, ADMIN_CONNECTIONS),
            configure: routes::configure_admin,
            workers: ADMIN_WORKERS,
        };
        let ports = self.fleet.ports().iter().map(|port| Some(Arc::clone(port)));
        let engines = engines.serve(self.engines.into_iter().zip(ports));
        let engines = engines.map_err(ServeError::Serve)?;
        let admin = admin.serve([(self.admin, None)]);
        let admin = admin.map_err(ServeError::Serve)?;
        let store_is_free = self.fleet.registrations.ended();
        let tending = [
            actix_web::rt::spawn(probe(self.fleet.clone())),
            actix_web::rt::spawn(tend(self.fleet)),
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
        for task in tending {
            task.abort();
            // Its end, whichever it is, lets go of what it had.
            let _ = task.await;
        }
        if tokio::time::timeout(STORE_TIMEOUT, store_is_free)
            .await
            .is_err()
        {
            tracing::warn!("the store is still in use, {STORE_TIMEOUT:?} after the end");
        }
        ended.map(|_| ()).map_err(ServeError::Serve)
    }
}

async fn probe(fleet: Data<Fleet>) {
    let interval = Duration::from_secs(fleet.config.probe_interval);
    while !interval.is_zero() {
        fleet.probes.round(&fleet.registrations, interval).await;
    }
}

/// Tokens and certificates are replaced by whoever deploys them, at any time; rooms get old.
async fn tend(fleet: Data<Fleet>) {
    loop {
        tokio::time::sleep(TEND_INTERVAL).await;
        fleet.guard.reload();
        fleet.expire_rooms();
    }
}

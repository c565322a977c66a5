//! The processes: a bootstrap server and eight services with a rank each, what is done to them, and
//! how it is put right.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use tests::process::{BootstrapServer, signal};
use tests::service::TransferService;
use tokio::runtime::Handle;
use transfer_actor::client::ClientError;

use crate::engine::{Engine, lock};
use crate::load::{Load, TIMEOUT_S};
use crate::network::Network;

/// Ranks of each role.
pub const RANKS: usize = 4;

/// What can be hit: ranks by number, prefills first, or the bootstrap server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Rank(usize),
    Bootstrap,
}

/// What is done to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strike {
    /// SIGKILL; a new process takes its place.
    Kill,
    /// SIGSTOP, until SIGCONT.
    Stop,
    /// Its network link goes down, until it is up again.
    Cut,
}

impl Target {
    pub fn name(self) -> String {
        match self {
            Self::Rank(rank) if rank < RANKS => format!("prefill {rank}"),
            Self::Rank(rank) => format!("decode {}", rank - RANKS),
            Self::Bootstrap => "bootstrap server".to_owned(),
        }
    }

    /// Its place in the network of namespaces.
    const fn host(self) -> usize {
        match self {
            Self::Rank(rank) => rank,
            Self::Bootstrap => 2 * RANKS,
        }
    }
}

pub struct Fleet {
    folder: PathBuf,
    network_opt: Option<Network>,
    transports: Vec<String>,
    bootstrap_opt: Option<BootstrapServer>,
    services: Vec<Option<TransferService>>,
    starts: usize,
}

impl Fleet {
    /// Starts a bootstrap server and these ranks' services.
    pub fn start(
        folder: &Path,
        network_opt: Option<Network>,
        transports: &[String],
        ranks: &[usize],
    ) -> Self {
        let mut fleet = Self {
            folder: folder.to_owned(),
            network_opt,
            transports: transports.to_vec(),
            bootstrap_opt: None,
            services: (0..2 * RANKS).map(|_| None).collect(),
            starts: 0,
        };
        let listen = format!("{}:0", fleet.host_of(Target::Bootstrap));
        fleet.start_bootstrap(&vec![listen; RANKS]);
        for rank in ranks {
            fleet.start_service(*rank);
        }
        fleet
    }

    /// Where each prefill's engine is found at the bootstrap server. Each is an engine of one rank:
    /// an engine of several is complete again only once all of them were started anew.
    pub fn bootstrap_addresses(&self) -> Vec<String> {
        let server = self.bootstrap_opt.as_ref().expect("it runs");
        server.engines().iter().map(ToString::to_string).collect()
    }

    fn log(&mut self, name: &str) -> File {
        self.starts += 1;
        let name = format!("{:03}-{}.log", self.starts, name.replace(' ', "-"));
        File::create(self.folder.join(name)).expect("a log can be made")
    }

    /// A command in its own namespace where there are any, and out of the terminal's group, so that
    /// an interrupt is this program's to handle.
    fn placed(&self, target: Target, command: Command) -> Command {
        let mut placed = match &self.network_opt {
            None => command,
            Some(network) => network.inside(target.host(), &command),
        };
        placed.process_group(0);
        placed
    }

    fn host_of(&self, target: Target) -> String {
        let network = self.network_opt.as_ref();
        network.map_or("127.0.0.1".to_owned(), |network| {
            network.address(target.host())
        })
    }

    /// At these addresses, a port for each prefill's engine, with what it had on its disk.
    fn start_bootstrap(&mut self, addresses: &[String]) {
        let mut command = Command::new(tests::process::program("bootstrap-server"));
        let data = self.folder.join("bootstrap");
        let listens = addresses.iter().enumerate();
        let listens: Vec<_> = listens
            .flat_map(|(engine, address)| {
                ["--listen".to_owned(), format!("{address}=prefill-{engine}")]
            })
            .collect();
        let listens: Vec<_> = listens.iter().map(String::as_str).collect();
        BootstrapServer::command(&mut command, &data, &listens);
        let mut command = self.placed(Target::Bootstrap, command);
        command.stderr(self.log("bootstrap"));
        self.bootstrap_opt = Some(BootstrapServer::spawn_tls(&mut command));
    }

    fn start_service(&mut self, rank: usize) {
        let target = Target::Rank(rank);
        let host = self.host_of(target);
        let timeout = TIMEOUT_S.to_string();
        // Each prefill has one transport; decodes take what comes.
        let all = self.transports.join(",");
        let transports = match rank {
            rank if rank < RANKS => self.transport_of(rank),
            _ => &all,
        };
        let folder = tempfile::tempdir_in(&self.folder).expect("a folder can be made");
        let command = TransferService::command(
            folder.path(),
            &[
                "--host",
                &host,
                "--bind",
                &host,
                "--transports",
                transports,
                "--bootstrap-timeout",
                &timeout,
                "--waiting-timeout",
                &timeout,
                "--transfer-timeout",
                &timeout,
                "--heartbeat-interval",
                "0.5",
                "--heartbeat-misses",
                "2",
                "--report-interval",
                "1",
            ],
        );
        let mut command = self.placed(target, command);
        command.stderr(self.log(&target.name()));
        self.services[rank] = Some(TransferService::spawn(folder, &mut command));
    }

    /// The only transport of a prefill rank.
    fn transport_of(&self, rank: usize) -> &str {
        &self.transports[rank % self.transports.len()]
    }

    /// Attaches an engine to a rank.
    pub async fn engine(&self, load: &Load, rank: usize) -> Result<Engine, ClientError> {
        let service = self.services[rank].as_ref().expect("it runs");
        let (role, index) = if rank < RANKS {
            ("prefill", rank)
        } else {
            ("decode", rank - RANKS)
        };
        let bootstrap = load.bootstraps.get(rank);
        Engine::attach(service, role, index, bootstrap).await
    }

    /// Attaches a rank's engine and gives it to the load.
    pub fn attach(&self, runtime: &Handle, load: &Load, rank: usize) -> Result<(), String> {
        let attached = runtime
            .block_on(self.engine(load, rank))
            .map_err(|error| error.to_string())?;
        *lock(slot(load, rank)) = Some(Arc::new(attached));
        Ok(())
    }

    pub fn strike(&mut self, load: &Load, target: Target, strike: Strike) {
        let engine_opt = match target {
            Target::Rank(rank) => lock(slot(load, rank)).clone(),
            Target::Bootstrap => {
                let for_ever = Instant::now() + std::time::Duration::from_secs(86_400);
                *lock(&load.bootstrap_down_until) = Some(for_ever);
                None
            }
        };
        if let Some(engine) = engine_opt {
            engine.strike(strike == Strike::Kill);
        }
        match (strike, target) {
            (Strike::Kill, Target::Bootstrap) => {
                self.bootstrap_opt.take().expect("it runs").kill();
            }
            (Strike::Kill, Target::Rank(rank)) => {
                *lock(slot(load, rank)) = None;
                self.services[rank].take().expect("it runs").kill();
            }
            (Strike::Stop, _) => signal(self.pid(target), "STOP"),
            (Strike::Cut, _) => self.network().link(target.host(), "down"),
        }
    }

    /// Puts right what a strike did. The error is what the service said to its new engine.
    pub fn repair(
        &mut self,
        runtime: &Handle,
        load: &Load,
        target: Target,
        strike: Strike,
    ) -> Result<(), String> {
        match (strike, target) {
            (Strike::Kill, Target::Bootstrap) => self.start_bootstrap(&load.bootstraps),
            (Strike::Kill, Target::Rank(rank)) => {
                self.start_service(rank);
                self.attach(runtime, load, rank)?;
            }
            (Strike::Stop, _) => signal(self.pid(target), "CONT"),
            (Strike::Cut, _) => self.network().link(target.host(), "up"),
        }
        match target {
            Target::Bootstrap => *lock(&load.bootstrap_down_until) = Some(Instant::now()),
            Target::Rank(rank) => {
                if let Some(engine) = lock(slot(load, rank)).as_ref() {
                    engine.repaired();
                }
            }
        }
        Ok(())
    }

    fn network(&self) -> &Network {
        self.network_opt
            .as_ref()
            .expect("links are cut where there are any")
    }

    /// The process of a target.
    pub fn pid(&self, target: Target) -> u32 {
        match target {
            Target::Rank(rank) => self.services[rank].as_ref().expect("it runs").pid(),
            Target::Bootstrap => self.bootstrap_opt.as_ref().expect("it runs").pid(),
        }
    }

    /// Every process that runs, by name.
    pub fn pids(&self) -> Vec<(String, u32)> {
        let ranks = (0..2 * RANKS).map(Target::Rank);
        ranks
            .chain([Target::Bootstrap])
            .map(|target| (target.name(), self.pid(target)))
            .collect()
    }

    /// What must hold of a service: it must not have ended by itself.
    pub fn ended(&mut self) -> Vec<String> {
        let mut ended = Vec::new();
        for (rank, service) in self.services.iter_mut().enumerate() {
            if let Some(status) = service.as_mut().and_then(TransferService::ended) {
                ended.push(format!("{} ended: {status}", Target::Rank(rank).name()));
            }
        }
        ended
    }

    /// Asks everything to end, and waits; what did not end well.
    pub fn end(mut self) -> Vec<String> {
        let mut wrong = Vec::new();
        for service in self.services.iter().flatten() {
            service.signal("TERM");
        }
        for (rank, service) in self.services.iter_mut().enumerate() {
            if let Some(status) = service.as_mut().map(TransferService::wait)
                && !status.success()
            {
                wrong.push(format!("{} ended with {status}", Target::Rank(rank).name()));
            }
        }
        if let Some(server) = self.bootstrap_opt.take() {
            let status = server.end_with("TERM");
            if !status.success() {
                wrong.push(format!("the bootstrap server ended with {status}"));
            }
        }
        wrong
    }
}

/// Where the load finds a rank's engine.
pub fn slot(load: &Load, rank: usize) -> &std::sync::Mutex<Option<Arc<Engine>>> {
    if rank < RANKS {
        &load.prefills[rank]
    } else {
        &load.decodes[rank - RANKS]
    }
}

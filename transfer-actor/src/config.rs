//! The command line and environment of `transfer-actor`. SGLang's variables are honoured where it
//! has one.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use common::check::CheckMode;
use io_engine::{FaultSpec, NicMap, TransportKind};
use zmtp::PushOptions;

use crate::rank::{Limits, Timeouts, WhenFull};

const DEFAULT_METRICS_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 9401);
const DEFAULT_BIND: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
const DEFAULT_HOST: &str = "127.0.0.1";
const DEFAULT_ATTACH_SOCKET: &str = "/tmp/ferry-attach.sock";
const DEFAULT_API_SOCKET: &str = "/tmp/ferry-api.sock";

const BOOTSTRAP_HELP: &str = "\
Environment, for bootstrap servers that are guarded:
  FERRY_BOOTSTRAP_TOKEN_FILE  file with the token to show; without it, the token in
                              SGLANG_DISAGGREGATION_BOOTSTRAP_AUTH_TOKEN
  FERRY_BOOTSTRAP_CA_FILE     authorities (PEM) of their certificates; TLS is spoken when it is set
  FERRY_BOOTSTRAP_CERT_FILE, FERRY_BOOTSTRAP_KEY_FILE
                              certificate and key (PEM) for those that ask for one";

/// Moves the state of requests between prefill and decode engines.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Hosts the rank actors of this host for engines that attach over a Unix socket.
    #[command(after_help = BOOTSTRAP_HELP)]
    Serve(Box<ServeConfig>),
}

/// How logs are written, to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Pretty,
    /// One JSON object a line.
    Json,
}

/// How much of what arrives is compared with checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Verify {
    /// Nothing.
    Off,
    /// One range in 16 of every component.
    Sampled,
    /// Every byte.
    Full,
}

impl Verify {
    /// The word on the command line.
    pub const fn name(self) -> &'static str {
        match self.mode() {
            None => "off",
            Some(mode) => mode.name(),
        }
    }

    /// What ranks are told.
    pub const fn mode(self) -> Option<CheckMode> {
        match self {
            Self::Off => None,
            Self::Sampled => Some(CheckMode::Sampled),
            Self::Full => Some(CheckMode::Full),
        }
    }
}

/// Options of `serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeConfig {
    /// Unix socket where engines attach their pools.
    #[arg(long, value_name = "PATH", env = "FERRY_ATTACH_SOCKET", default_value = DEFAULT_ATTACH_SOCKET)]
    pub attach_socket: PathBuf,
    /// Unix socket of the HTTP API, where engines drive their rooms.
    #[arg(long, value_name = "PATH", env = "FERRY_API_SOCKET", default_value = DEFAULT_API_SOCKET)]
    pub api_socket: PathBuf,
    /// Address of /metrics and /health for all ranks of this process.
    #[arg(long, value_name = "ADDR:PORT", env = "FERRY_METRICS_LISTEN", default_value_t = DEFAULT_METRICS_LISTEN)]
    pub metrics_listen: SocketAddr,
    /// Address of this host that peers are told; they must be able to reach it.
    #[arg(long, value_name = "ADDR", env = "SGLANG_HOST_IP", default_value = DEFAULT_HOST)]
    pub host: String,
    /// Address that control and transfer sockets listen on.
    #[arg(long, value_name = "ADDR", env = "FERRY_BIND", default_value_t = DEFAULT_BIND)]
    pub bind: IpAddr,
    /// Ports for control sockets, for example 20000-20063; any free port if absent.
    #[arg(long, value_name = "FIRST-LAST", env = "FERRY_CONTROL_PORTS", value_parser = parse_ports)]
    pub control_ports: Option<RangeInclusive<u16>>,
    /// Transports that may be used, in the order of choice: local, shm, cma, rdma (if it was built with it), tcp.
    #[arg(long, value_name = "NAMES", env = "FERRY_TRANSPORTS", value_delimiter = ',', default_values_t = TransportKind::ALL)]
    pub transports: Vec<TransportKind>,
    /// Network devices of rdma by where memory is, for example cuda:0=mlx5_0,cuda:1=mlx5_1+mlx5_2,numa:0=mlx5_3,host=mlx5_4; elsewhere those of the same NUMA node, or all.
    #[arg(long, value_name = "MAP", env = "FERRY_NIC_MAP", default_value_t = NicMap::default())]
    pub nic_map: NicMap,
    /// Believes the pid and addresses of peers that are no Ferry engines, for the cma transport.
    #[arg(long, env = "FERRY_CMA_TRUST_DESCRIPTORS")]
    pub cma_trust_descriptors: bool,
    /// Fails a room whose two index lists of a paged component differ in length, instead of moving
    /// their common prefix.
    #[arg(long, env = "FERRY_STRICT_LENGTHS")]
    pub strict_lengths: bool,
    /// Compares what has arrived with checksums of what was sent before a decode's Success: of one
    /// range in 16 of every component, of every byte, or not at all. A decode asks for it; a prefill
    /// does it for whoever asks, at least as thoroughly as said here. Peers that are none of Ferry's
    /// are served without.
    #[arg(long, value_enum, env = "FERRY_VERIFY", default_value_t = Verify::Off)]
    pub verify: Verify,
    /// Seconds that a room may wait for its other half, and a prefill for its bootstrap server.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
        default_value_t = 300
    )]
    pub bootstrap_timeout: u64,
    /// Seconds that an announced room may wait for its engine or its prefill.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
        default_value_t = 300
    )]
    pub waiting_timeout: u64,
    /// Seconds that a write may go on without an end.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "FERRY_TRANSFER_TIMEOUT",
        default_value_t = 300
    )]
    pub transfer_timeout: u64,
    /// Seconds that open rooms have to finish, at most, when the service is asked to end (SIGTERM,
    /// SIGINT or POST /v1/drain), while it takes no new ones; 0 fails them at once, and a second
    /// signal ends at once.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "FERRY_DRAIN_TIMEOUT",
        default_value_t = 20,
        value_parser = clap::value_parser!(u64).range(..=86_400)
    )]
    pub drain_timeout: u64,
    /// Rooms that a rank holds at most; an engine that opens one more is refused (429).
    #[arg(
        long,
        value_name = "COUNT",
        env = "FERRY_MAX_ROOMS",
        default_value_t = 65_536
    )]
    pub max_rooms: u32,
    /// Rooms that a rank has open with one peer (a decode rank, or a prefill engine) at most; one
    /// more fails at once, with this as its reason.
    #[arg(
        long,
        value_name = "COUNT",
        env = "FERRY_MAX_ROOMS_PER_PEER",
        default_value_t = 65_536
    )]
    pub max_rooms_per_peer: u32,
    /// MiB that a prefill rank has on their way at most, as far as its pages, slots and rows tell;
    /// a chunk that is larger goes alone.
    #[arg(
        long,
        value_name = "MIB",
        env = "FERRY_MAX_IN_FLIGHT_MIB",
        default_value_t = 65_536
    )]
    pub max_in_flight_mib: u32,
    /// The same, to one decode rank.
    #[arg(
        long,
        value_name = "MIB",
        env = "FERRY_MAX_IN_FLIGHT_MIB_PER_PEER",
        default_value_t = 16_384
    )]
    pub max_in_flight_mib_per_peer: u32,
    /// What becomes of a chunk beyond them: it waits, or is refused (429) and may be handed over
    /// again.
    #[arg(long, value_enum, env = "FERRY_WHEN_FULL", default_value_t = WhenFull::Wait)]
    pub when_full: WhenFull,
    /// Chunks of a prefill rank that wait at most, counted for each decode rank that they go to;
    /// one more is refused (429) and may be handed over again.
    #[arg(
        long,
        value_name = "COUNT",
        env = "FERRY_MAX_QUEUED_CHUNKS",
        default_value_t = 65_536
    )]
    pub max_queued_chunks: u32,
    /// The same, for one decode rank.
    #[arg(
        long,
        value_name = "COUNT",
        env = "FERRY_MAX_QUEUED_CHUNKS_PER_PEER",
        default_value_t = 8192
    )]
    pub max_queued_chunks_per_peer: u32,
    /// Seconds between two looks at whether the prefill ranks of a decode's open rooms are there.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
        default_value_t = 5.0,
        value_parser = parse_interval
    )]
    pub heartbeat_interval: f64,
    /// How many looks in a row may find nobody before a prefill rank counts as gone.
    #[arg(
        long,
        value_name = "COUNT",
        env = "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub heartbeat_misses: u32,
    /// Seconds between two reports of a rank to the bootstrap servers that it works with, at most;
    /// 0 sends none.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "FERRY_REPORT_INTERVAL",
        default_value_t = 5,
        value_parser = clap::value_parser!(u64).range(..=86_400)
    )]
    pub report_interval: u64,
    /// Seconds that sending a control message may take.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT",
        default_value_t = 1
    )]
    pub send_timeout: u64,
    /// How logs are written; FERRY_LOG sets their level, for example debug.
    #[arg(long, value_enum, env = "FERRY_LOG_FORMAT", default_value_t = LogFormat::Pretty)]
    pub log_format: LogFormat,
    /// Injects a fault into one write, to test whoever must notice: `KIND:LABEL[:NTH]`.
    #[arg(long, value_name = "SPEC", hide = true)]
    pub inject_fault: Option<FaultSpec>,
}

impl ServeConfig {
    /// The rank's timeouts.
    pub fn timeouts(&self) -> Timeouts {
        Timeouts {
            bootstrap: Duration::from_secs(self.bootstrap_timeout),
            waiting: Duration::from_secs(self.waiting_timeout),
            transfer: Duration::from_secs(self.transfer_timeout),
            heartbeat: Duration::from_secs_f64(self.heartbeat_interval),
            heartbeat_misses: self.heartbeat_misses,
            report: Duration::from_secs(self.report_interval),
            ..Timeouts::default()
        }
    }

    /// How much each rank holds.
    pub fn limits(&self) -> Limits {
        let mib = |count: u32| u64::from(count) << 20;
        Limits {
            rooms: self.max_rooms as usize,
            rooms_per_peer: self.max_rooms_per_peer as usize,
            in_flight_bytes: mib(self.max_in_flight_mib),
            in_flight_bytes_per_peer: mib(self.max_in_flight_mib_per_peer),
            queued_chunks: self.max_queued_chunks as usize,
            queued_chunks_per_peer: self.max_queued_chunks_per_peer as usize,
            when_full: self.when_full,
            ..Limits::default()
        }
    }

    /// How peers are sent to.
    pub fn push_options(&self) -> PushOptions {
        let send_timeout = Duration::from_secs(self.send_timeout);
        let defaults = PushOptions::default();
        // A connection outlives its host for as long as heartbeats take to find a rank gone. No
        // shorter than usual: what is on its way over a link that is down for a moment would be lost.
        let heartbeats = self.heartbeat_interval * f64::from(self.heartbeat_misses);
        let heartbeats = Duration::try_from_secs_f64(heartbeats).unwrap_or(Duration::MAX);
        PushOptions {
            send_timeout,
            connect_timeout: send_timeout,
            silence_timeout: defaults.silence_timeout.max(heartbeats),
            ..defaults
        }
    }
}

/// SGLang's is a float; a day is longer than anybody waits.
fn parse_interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok();
    seconds
        .filter(|seconds| (0.1..=86_400.0).contains(seconds))
        .ok_or_else(|| format!("{text:?} is no number of seconds from 0.1 to 86400"))
}

fn parse_ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let expected = || format!("{text:?} is not FIRST-LAST, two ports from 1 to 65535");
    let (first, last) = text.split_once('-').ok_or_else(expected)?;
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok(first..=last),
        _ => Err(expected()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    /// Or the wheel and the service would bound differently.
    #[test]
    fn the_limits_of_a_plain_command_line_are_the_defaults() {
        let Command::Serve(config) = Cli::parse_from(["transfer-actor", "serve"]).command;
        assert_eq!(config.limits(), Limits::default());
    }

    #[test]
    fn ranges_of_ports_are_read() {
        assert_eq!(parse_ports("20000-20063"), Ok(20000..=20063));
        for bad in ["", "5", "9-5", "0-5", "1-70000", "a-b"] {
            assert!(parse_ports(bad).is_err(), "{bad:?}");
        }
    }
}

//! The command line.

use std::fmt;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use transfer_actor::config::Verify;

use crate::layout::{Component, Side};
use crate::model::ModelName;

/// Moves the state of many requests from prefill engines to decode engines, between real
/// processes, and verifies every byte.
///
/// Starts one bootstrap-server, one `transfer-actor serve` for each side and one engine process
/// for each side with several ranks, and stands in the place of the PD router. Exits with 0 only
/// when every byte that must have arrived has, every other byte is untouched, and the service's
/// metrics agree with the bytes counted here.
#[derive(Debug, Parser)]
#[command(
    name = "ferry-demo",
    version,
    args_conflicts_with_subcommands = true,
    args_override_self = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command_opt: Option<Command>,

    #[command(flatten)]
    pub run: RunArgs,
}

/// Processes that the driver starts for itself.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// One engine: several ranks of one side.
    #[command(hide = true)]
    Engine(EngineArgs),
    /// Becomes another program that ends when the driver does.
    #[command(hide = true)]
    Child(ChildArgs),
}

/// Arguments of the hidden `engine` command.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Which side.
    pub side: Side,
    /// The engine's configuration, in JSON.
    #[arg(long)]
    pub config: String,
}

/// Arguments of the hidden `child` command.
#[derive(Debug, Args)]
pub struct ChildArgs {
    /// The driver's process id.
    #[arg(long)]
    pub parent: i32,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub program: Vec<std::ffi::OsString>,
}

/// How bytes may move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// The service's own order of preference.
    Auto,
    /// Mapped pools on one host.
    Shm,
    /// Cross-process copy on one host.
    Cma,
    /// Network devices; only in builds with the feature `rdma`.
    Rdma,
    /// TCP streams.
    Tcp,
}

/// Where the engines' pools are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum PoolMemory {
    /// Shared memory of the host.
    Host,
    /// Memory of a device of CUDA's, or of HIP's where there is no CUDA.
    Device,
}

/// What a run is to do.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Whose state is moved
    #[arg(long, value_enum, default_value_t = ModelName::Hybrid)]
    pub model: ModelName,

    /// Multiplies the number of layers, the longest prompt and the window; each layer keeps its shape
    #[arg(long, default_value_t = 1.0, value_parser = parse_scale)]
    pub scale: f64,

    /// How bytes move
    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    pub transport: Transport,

    /// Where the engines' pools are; without a driver FERRY_CUDA_LIBRARY can name a stand-in for it
    #[arg(long, value_enum, default_value_t = PoolMemory::Host)]
    pub memory: PoolMemory,

    /// How much of what arrives the services compare with checksums before a Success
    #[arg(long, value_enum, default_value_t = Verify::Off)]
    pub verify: Verify,

    /// How many requests are sent
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: u32,

    /// How many requests are in flight at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub concurrency: u32,

    /// Ranks of the prefill engine
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub prefill_tp: u32,

    /// Ranks of the decode engine
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub decode_tp: u32,

    /// Tokens of one page
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub page_size: u32,

    /// Most tokens that the prefill computes before it sends them (rounded up to whole pages)
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub chunk_tokens: u32,

    /// Makes contents, prompt lengths, room numbers and page orders; drawn at random if absent
    #[arg(long)]
    pub seed: Option<u64>,

    /// Leaves everything running at the end, until Ctrl-C
    #[arg(long)]
    pub keep: bool,

    /// Seconds after which a request that has not finished fails the run
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub request_timeout: u64,

    /// Spoils something, to show that the check finds it: flip-delivered, flip-untouched,
    /// drop-write or misdirect, a colon and a component
    #[arg(long, hide = true, value_name = "KIND:COMPONENT")]
    pub inject: Option<Injection>,
}

fn parse_scale(text: &str) -> Result<f64, String> {
    let scale: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number"))?;
    if scale > 0.0 && scale <= 16.0 {
        Ok(scale)
    } else {
        Err("it must be above 0 and at most 16".to_owned())
    }
}

/// What is spoilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InjectionKind {
    /// The decode engine inverts a byte that has arrived, before it checks the request.
    FlipDelivered,
    /// The decode engine inverts a byte where nothing was placed, before the last check.
    FlipUntouched,
    /// The prefill's io engine leaves out one write and reports that it was done.
    DropWrite,
    /// The prefill's io engine writes to a wrong place once.
    Misdirect,
}

/// A fault on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Injection {
    /// What is done.
    pub kind: InjectionKind,
    /// In which component.
    pub component: Component,
}

const INJECTION_KINDS: [(&str, InjectionKind); 4] = [
    ("flip-delivered", InjectionKind::FlipDelivered),
    ("flip-untouched", InjectionKind::FlipUntouched),
    ("drop-write", InjectionKind::DropWrite),
    ("misdirect", InjectionKind::Misdirect),
];

impl FromStr for Injection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind_name, component) = text.split_once(':').ok_or("a colon is missing")?;
        let known = INJECTION_KINDS
            .into_iter()
            .find(|(name, _)| *name == kind_name);
        let (_, kind) = known.ok_or_else(|| format!("unknown kind {kind_name:?}"))?;
        Ok(Self {
            kind,
            component: component.parse()?,
        })
    }
}

impl fmt::Display for Injection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = INJECTION_KINDS
            .into_iter()
            .find(|(_, kind)| *kind == self.kind);
        write!(
            formatter,
            "{}:{}",
            known.map_or("", |(name, _)| name),
            self.component
        )
    }
}

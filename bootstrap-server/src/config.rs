//! The command line and environment.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8998);
const DEFAULT_DATA_DIR: &str = "ferry-bootstrap-data";
/// SGLang's server forgets after 120 s, while requests wait up to 300 s.
const DEFAULT_ROOM_SECONDS: u64 = 600;
const DEFAULT_MAX_ROOMS: usize = 1_000_000;
const DEFAULT_PROBE_INTERVAL: u64 = 5;
const DEFAULT_PROBE_MISSES: u32 = 3;
const DEFAULT_SETTLE_SECONDS: u64 = 15;

/// Where prefill and decode ranks register and find each other (SGLang's bootstrap protocol).
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub struct Config {
    /// Address that ranks, decodes and operators reach; port 0 takes a free one and prints it.
    #[arg(long, value_name = "ADDR:PORT", env = "FERRY_BOOTSTRAP_LISTEN", default_value_t = DEFAULT_LISTEN)]
    pub listen: SocketAddr,
    /// Folder of the registrations; one server uses it at a time.
    #[arg(long, value_name = "DIR", env = "FERRY_BOOTSTRAP_DATA_DIR", default_value = DEFAULT_DATA_DIR)]
    pub data_dir: PathBuf,
    /// Keeps registrations in memory only: they are gone when the server ends.
    #[arg(long, conflicts_with = "data_dir")]
    pub ephemeral: bool,
    /// Seconds after which a room's dp rank is forgotten.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "FERRY_BOOTSTRAP_ROOM_SECONDS",
        default_value_t = DEFAULT_ROOM_SECONDS
    )]
    pub room_seconds: u64,
    /// Rooms whose dp rank is kept at most; the oldest leave first.
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FERRY_BOOTSTRAP_MAX_ROOMS",
        default_value_t = DEFAULT_MAX_ROOMS
    )]
    pub max_rooms: usize,
    /// Seconds between two probes of each rank's address; 0 turns probing off.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "FERRY_BOOTSTRAP_PROBE_INTERVAL",
        default_value_t = DEFAULT_PROBE_INTERVAL
    )]
    pub probe_interval: u64,
    /// Probes in a row that a rank must miss to count as unreachable.
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FERRY_BOOTSTRAP_PROBE_MISSES",
        default_value_t = DEFAULT_PROBE_MISSES, value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub probe_misses: u32,
    /// Seconds for which /health is 503 after an engine was replaced, so that decodes notice.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "FERRY_BOOTSTRAP_SETTLE_SECONDS",
        default_value_t = DEFAULT_SETTLE_SECONDS
    )]
    pub settle_seconds: u64,
    /// How logs are written, to standard error; FERRY_LOG sets their level, for example debug.
    #[arg(long, value_enum, env = "FERRY_LOG_FORMAT", default_value_t = LogFormat::Pretty)]
    pub log_format: LogFormat,
}

/// How logs are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Pretty,
    /// One JSON object a line.
    Json,
}

impl Config {
    /// How long a room's dp rank is kept.
    pub const fn room_lifetime(&self) -> Duration {
        Duration::from_secs(self.room_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        <Config as clap::CommandFactory>::command().debug_assert();
    }
}

//! The command line and environment.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, ValueEnum};

const DEFAULT_LISTEN: &str = "0.0.0.0:8998";
const DEFAULT_ADMIN_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8997);
const DEFAULT_NAMESPACE: &str = "default";
const MAX_NAMESPACE_BYTES: usize = 128;
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
    /// Address that an engine's ranks and its decodes reach, and the engine's name, for example
    /// [::]:8999=prefill-b; may be given again for each engine. The name is `default` when it is
    /// left out. Port 0 takes a free one and prints it.
    #[arg(
        long,
        value_name = "ADDR:PORT[=NAME]",
        env = "FERRY_BOOTSTRAP_LISTEN",
        value_delimiter = ',',
        default_value = DEFAULT_LISTEN
    )]
    pub listen: Vec<Listen>,
    /// Address that operators reach: the admin API, the page and /metrics of all engines.
    #[arg(
        long,
        value_name = "ADDR:PORT",
        env = "FERRY_BOOTSTRAP_ADMIN_LISTEN",
        default_value_t = DEFAULT_ADMIN_LISTEN
    )]
    pub admin_listen: SocketAddr,
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

/// One listening port: the clients of an engine know nothing but its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Where.
    pub address: SocketAddr,
    /// The engine that registers there.
    pub namespace: String,
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, namespace) = text.split_once('=').unwrap_or((text, DEFAULT_NAMESPACE));
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if namespace.is_empty()
            || namespace.len() > MAX_NAMESPACE_BYTES
            || !namespace.bytes().all(is_plain)
        {
            return Err(format!(
                "the name {namespace:?} must be 1 to {MAX_NAMESPACE_BYTES} letters, digits, dots, dashes or underscores"
            ));
        }
        let address = address.parse().map_err(|_| {
            format!("{address:?} is no address with a port, such as 0.0.0.0:8998 or [::]:8998")
        })?;
        Ok(Self {
            address,
            namespace: namespace.to_owned(),
        })
    }
}

impl Config {
    /// What clap cannot check.
    ///
    /// # Errors
    /// When two ports have the same name or the same address.
    pub fn check(&self) -> Result<(), String> {
        for (at, listen) in self.listen.iter().enumerate() {
            let others = self.listen.iter().skip(at + 1);
            for other in others {
                if other.namespace == listen.namespace {
                    return Err(format!(
                        "--listen {} and --listen {} are both named {}; each engine has one port",
                        listen.address, other.address, listen.namespace
                    ));
                }
                if other.address == listen.address && listen.address.port() != 0 {
                    return Err(format!(
                        "--listen {} is given for both {} and {}; each engine has a port of its own",
                        listen.address, listen.namespace, other.namespace
                    ));
                }
            }
        }
        Ok(())
    }

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

    #[test]
    fn ports_have_names_of_their_own() {
        let parsed = |arguments: &[&str]| {
            let config = Config::parse_from([&["bootstrap-server"], arguments].concat());
            config.check().map(|()| config.listen)
        };
        let listen = |address: &str, namespace: &str| Listen {
            address: address.parse().unwrap(),
            namespace: namespace.to_owned(),
        };
        assert_eq!(parsed(&[]), Ok(vec![listen("0.0.0.0:8998", "default")]));
        let two = parsed(&["--listen", "0.0.0.0:1=a", "--listen", "[::]:2=b"]);
        assert_eq!(
            two,
            Ok(vec![listen("0.0.0.0:1", "a"), listen("[::]:2", "b")])
        );
        assert!(parsed(&["--listen", "0.0.0.0:1", "--listen", "[::]:2"]).is_err());
        assert!(parsed(&["--listen", "0.0.0.0:1=a", "--listen", "0.0.0.0:1=b"]).is_err());
        assert!(parsed(&["--listen", "127.0.0.1:0=a", "--listen", "127.0.0.1:0=b"]).is_ok());
        for bad in ["0.0.0.0:1=", "0.0.0.0:1=a b", "0.0.0.0", "host:1=a"] {
            assert!(Listen::from_str(bad).is_err(), "{bad}");
        }
    }
}

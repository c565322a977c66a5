//! The command line and environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use ipnet::IpNet;

use crate::ctl::Ctl;

const DEFAULT_LISTEN: &str = "0.0.0.0:8998";
const DEFAULT_ADMIN_LISTEN: &str = "127.0.0.1:8997";
const DEFAULT_NAMESPACE: &str = "default";
/// What the line that says ready calls the admin port.
const ADMIN_NAME: &str = "admin";
const MAX_NAMESPACE_BYTES: usize = 128;
const DEFAULT_STORE_LOG_BYTES: u64 = 64 << 20;
const DEFAULT_DATA_DIR: &str = "ferry-bootstrap-data";
/// SGLang's server forgets after 120 s, while requests wait up to 300 s.
const DEFAULT_ROOM_SECONDS: u64 = 600;
const DEFAULT_MAX_CONNECTIONS: usize = 32_768;
/// Half, so that one peer alone cannot keep all others out.
const DEFAULT_MAX_CONNECTIONS_PER_PEER: usize = DEFAULT_MAX_CONNECTIONS / 2;
const DEFAULT_MAX_ROOMS: usize = 1_000_000;
/// Each takes some 100 bytes.
const DEFAULT_MAX_ROOMS_TOTAL: usize = 4_000_000;
const DEFAULT_PROBE_INTERVAL: u64 = 5;
const DEFAULT_PROBE_MISSES: u32 = 3;
const DEFAULT_SETTLE_SECONDS: u64 = 15;

/// Where prefill and decode ranks register and find each other (SGLang's bootstrap protocol).
///
/// Without a command it serves.
#[derive(Clone, Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command_opt: Option<Command>,
    /// How to serve.
    #[command(flatten)]
    pub config: Config,
}

/// What the program does instead of serving.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Asks a running server, or tells it what to do.
    Ctl(Ctl),
}

/// How to serve.
#[derive(Clone, Debug, Parser)]
pub struct Config {
    /// Address that an engine's ranks and its decodes reach, and the engine's name, for example
    /// `[::]:8999=prefill-b`; may be given again for each engine. The name is `default` when it is
    /// left out. Port 0 takes a free one and prints it. With https:// before it the port speaks
    /// TLS, which a stock SGLang does not.
    #[arg(
        long,
        value_name = "[https://]ADDR:PORT[=NAME]",
        env = "FERRY_BOOTSTRAP_LISTEN",
        value_delimiter = ',',
        default_value = DEFAULT_LISTEN
    )]
    pub listen: Vec<Listen>,
    /// Address that operators reach: the admin API, the page and /metrics of all engines.
    /// With https:// before it the port speaks TLS.
    #[arg(
        long,
        value_name = "[https://]ADDR:PORT",
        env = "FERRY_BOOTSTRAP_ADMIN_LISTEN",
        default_value = DEFAULT_ADMIN_LISTEN
    )]
    pub admin_listen: Address,
    /// File with the tokens of which ranks show one to register (Authorization: Bearer TOKEN): one
    /// a line, with a name before it where one is wanted; read again when it changes.
    /// SGLANG_DISAGGREGATION_BOOTSTRAP_AUTH_TOKEN may hold the token itself. What stock decodes
    /// read stays open.
    #[arg(long, value_name = "FILE", env = "FERRY_BOOTSTRAP_AUTH_TOKEN_FILE")]
    pub auth_token_file: Option<PathBuf>,
    /// File with the tokens of which operators show one to the admin API, written and read again
    /// in the same way. Without it the ranks' tokens, if there are any, guard the admin API too.
    #[arg(long, value_name = "FILE", env = "FERRY_BOOTSTRAP_ADMIN_TOKEN_FILE")]
    pub admin_token_file: Option<PathBuf>,
    /// Lets the admin port be reached from other hosts although no token guards it.
    #[arg(long)]
    pub admin_without_token: bool,
    /// Certificate chain (PEM) of the ports that speak TLS; read again when it changes.
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_key",
        env = "FERRY_BOOTSTRAP_TLS_CERT"
    )]
    pub tls_cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_cert",
        env = "FERRY_BOOTSTRAP_TLS_KEY"
    )]
    pub tls_key: Option<PathBuf>,
    /// Authorities (PEM) one of which must have signed the certificate of every TLS client.
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_cert",
        env = "FERRY_BOOTSTRAP_TLS_CLIENT_CA"
    )]
    pub tls_client_ca: Option<PathBuf>,
    /// Requests a second of one peer address (of IPv6: one /64) at most, and as many at once; more
    /// are answered 429. 0 is no limit.
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FERRY_BOOTSTRAP_MAX_REQUESTS_PER_PEER",
        default_value_t = 0
    )]
    pub max_requests_per_peer: u32,
    /// Connections of all engines' ports together at most; more are closed at once. The admin port
    /// has its own.
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FERRY_BOOTSTRAP_MAX_CONNECTIONS",
        default_value_t = DEFAULT_MAX_CONNECTIONS
    )]
    pub max_connections: usize,
    /// Of these, connections of one peer address at most.
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FERRY_BOOTSTRAP_MAX_CONNECTIONS_PER_PEER",
        default_value_t = DEFAULT_MAX_CONNECTIONS_PER_PEER
    )]
    pub max_connections_per_peer: usize,
    /// Folder of the registrations; one server uses it at a time.
    #[arg(long, value_name = "DIR", env = "FERRY_BOOTSTRAP_DATA_DIR", default_value = DEFAULT_DATA_DIR)]
    pub data_dir: PathBuf,
    /// Where registrations are kept. In memory they are gone when the server ends: for tests.
    #[arg(long, value_enum, env = "FERRY_BOOTSTRAP_STORE", default_value_t = StoreKind::Sled)]
    pub store: StoreKind,
    /// Bytes of changes in the store's log after which everything is written anew.
    #[arg(
        long,
        value_name = "BYTES",
        env = "FERRY_BOOTSTRAP_STORE_LOG_BYTES",
        default_value_t = DEFAULT_STORE_LOG_BYTES
    )]
    pub store_log_bytes: u64,
    /// What to do at start when entries of the store that were acknowledged are lost.
    #[arg(
        long,
        value_enum,
        env = "FERRY_BOOTSTRAP_DAMAGED_STORE",
        default_value_t = DamagedStore::Refuse
    )]
    pub damaged_store: DamagedStore,
    /// Seconds after which a room's dp rank is forgotten.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "FERRY_BOOTSTRAP_ROOM_SECONDS",
        default_value_t = DEFAULT_ROOM_SECONDS
    )]
    pub room_seconds: u64,
    /// Rooms of one engine whose dp rank is kept at most; the oldest leave first.
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FERRY_BOOTSTRAP_MAX_ROOMS",
        default_value_t = DEFAULT_MAX_ROOMS
    )]
    pub max_rooms: usize,
    /// Rooms of all engines together at most; the oldest leave first, whosever they are.
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FERRY_BOOTSTRAP_MAX_ROOMS_TOTAL",
        default_value_t = DEFAULT_MAX_ROOMS_TOTAL
    )]
    pub max_rooms_total: usize,
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
    /// Network that rank addresses may lie in to be probed, for example 10.0.0.0/8; may be given
    /// again. Without it: the address that a rank registered from, and private ones.
    #[arg(
        long,
        value_name = "CIDR",
        env = "FERRY_BOOTSTRAP_ALLOW_RANK_CIDR",
        value_delimiter = ','
    )]
    pub allow_rank_cidr: Vec<IpNet>,
    /// What /health says while a rank does not answer probes.
    #[arg(
        long,
        value_enum,
        env = "FERRY_BOOTSTRAP_PROBE_READINESS",
        default_value_t = ProbeReadiness::Fail
    )]
    pub probe_readiness: ProbeReadiness,
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

/// What probing does to `/health`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProbeReadiness {
    /// 503: a stock decode learns of a dead prefill by it alone.
    Fail,
    /// 200: unreachable ranks are only shown.
    Ignore,
}

/// Where registrations are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StoreKind {
    /// On the disk, in --data-dir.
    Sled,
    /// Nowhere else than in memory.
    Memory,
}

/// What to do about a store that has lost something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DamagedStore {
    /// Say what is lost, and do not start.
    Refuse,
    /// Serve what can be read; refuse every change.
    ReadOnly,
    /// Go on without what is lost.
    AcceptLoss,
}

/// How logs are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Pretty,
    /// One JSON object a line.
    Json,
}

/// Where a port is, and whether it speaks TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Where.
    pub address: SocketAddr,
    /// Whether TLS is spoken.
    pub is_tls: bool,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = text.strip_prefix("https://");
        let address = plain.unwrap_or(text).parse().map_err(|_| {
            format!("{text:?} is no address with a port, such as 0.0.0.0:8998 or [::]:8998")
        })?;
        Ok(Self {
            address,
            is_tls: plain.is_some(),
        })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.is_tls { "https://" } else { "" };
        write!(formatter, "{scheme}{}", self.address)
    }
}

/// One listening port: the clients of an engine know nothing but its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Where.
    pub at: Address,
    /// The engine that registers there.
    pub namespace: String,
}

/// Whether a text can name an engine.
pub fn is_namespace(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAMESPACE_BYTES).contains(&text.len()) && text.bytes().all(is_plain)
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, namespace) = text.split_once('=').unwrap_or((text, DEFAULT_NAMESPACE));
        if !is_namespace(namespace) {
            return Err(format!(
                "the name {namespace:?} must be 1 to {MAX_NAMESPACE_BYTES} letters, digits, dots, dashes or underscores"
            ));
        }
        if namespace == ADMIN_NAME {
            return Err(format!(
                "an engine cannot be named {ADMIN_NAME}: that is the admin port's name"
            ));
        }
        Ok(Self {
            at: address.parse()?,
            namespace: namespace.to_owned(),
        })
    }
}

impl Config {
    /// What clap cannot check.
    ///
    /// # Errors
    /// When two ports have the same name or the same address, or TLS has no certificate.
    pub fn check(&self) -> Result<(), String> {
        let ports = self.listen.iter().map(|listen| listen.at);
        let tls_opt = ports.chain([self.admin_listen]).find(|at| at.is_tls);
        if let (Some(at), None) = (tls_opt, &self.tls_cert) {
            return Err(format!(
                "{at} is to speak TLS; give --tls-cert and --tls-key"
            ));
        }
        let is_same =
            |one: Address, other: Address| one.address == other.address && one.address.port() != 0;
        for (at, listen) in self.listen.iter().enumerate() {
            if is_same(listen.at, self.admin_listen) {
                return Err(format!(
                    "--listen {} of {} is also --admin-listen; the admin API has a port of its own",
                    listen.at, listen.namespace
                ));
            }
            let others = self.listen.iter().skip(at + 1);
            for other in others {
                if other.namespace == listen.namespace {
                    return Err(format!(
                        "--listen {} and --listen {} are both named {}; each engine has one port",
                        listen.at, other.at, listen.namespace
                    ));
                }
                if is_same(other.at, listen.at) {
                    return Err(format!(
                        "--listen {} is given for both {} and {}; each engine has a port of its own",
                        listen.at, listen.namespace, other.namespace
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
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn ports_have_names_of_their_own() {
        let parsed = |arguments: &[&str]| {
            let config = Config::parse_from([&["bootstrap-server"], arguments].concat());
            config.check().map(|()| config.listen)
        };
        let listen = |address: &str, namespace: &str| Listen {
            at: address.parse().unwrap(),
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
        let admin = ["--listen", "127.0.0.1:1", "--admin-listen", "127.0.0.1:1"];
        assert!(parsed(&admin).is_err());
        for bad in [
            "0.0.0.0:1=",
            "0.0.0.0:1=a b",
            "0.0.0.0:1=admin",
            "0.0.0.0",
            "host:1=a",
        ] {
            assert!(Listen::from_str(bad).is_err(), "{bad}");
        }
    }
}

//! What the descriptors of a process are: how many sockets to whom, pools, watched processes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// How many descriptors of each kind.
pub type Kinds = BTreeMap<String, usize>;

/// In the kernel's tables: the states of a TCP socket that have a name of their own here.
const ESTABLISHED: &str = "01";
const LISTENING: &str = "0A";

/// What the names of Unix sockets begin with, and that of the end that connects.
const UNIX: &str = "unix ";
const NAMELESS: &str = "unix without a name";

/// The connections of clients to a service's HTTP API among its descriptors, with its listener.
pub fn api_connections(kinds: &Kinds) -> usize {
    let of_api = |(kind, count): (&String, &usize)| {
        let is_api = kind.starts_with(UNIX) && kind.ends_with("/api.sock");
        is_api.then_some(*count)
    };
    kinds.iter().filter_map(of_api).sum()
}

/// The connections that this process, which is the client of all services, holds to them at most.
pub fn held_by_the_load() -> usize {
    let own = of(std::process::id()).unwrap_or_default();
    own.get(NAMELESS).copied().unwrap_or(0)
}

/// The descriptors of a process by kind; `None` when it is gone.
pub fn of(pid: u32) -> Option<Kinds> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    // One that was closed meanwhile is none.
    let links = folder
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let links: Vec<String> = links
        .map(|link| link.to_string_lossy().into_owned())
        .collect();
    let mut sockets = sockets_of(&format!("/proc/{pid}/net"));
    // The accepted end of a Unix socket belongs to the network of who connected: of the load.
    let own = sockets_of("/proc/self/net").into_iter();
    sockets.extend(own.filter(|(_, name)| name.starts_with(UNIX)));
    let mut kinds = Kinds::new();
    for link in links {
        *kinds.entry(kind(&link, &sockets)).or_default() += 1;
    }
    Some(kinds)
}

/// What there is more of, for people, most first.
pub fn more(then: &Kinds, now: &Kinds) -> String {
    let mut more: Vec<_> = now
        .iter()
        .filter_map(|(kind, now)| {
            let then = then.get(kind).copied().unwrap_or(0);
            (*now > then).then_some((now - then, kind, then, now))
        })
        .collect();
    more.sort_by_key(|(by, ..)| std::cmp::Reverse(*by));
    let more: Vec<_> = more
        .into_iter()
        .map(|(_, kind, then, now)| format!("{kind}: {then}, then {now}"))
        .collect();
    more.join("; ")
}

fn kind(link: &str, sockets: &HashMap<String, String>) -> String {
    let inner = |start: &str| link.strip_prefix(start)?.strip_suffix(']');
    if let Some(inode) = inner("socket:[") {
        let named = sockets.get(inode).cloned();
        return named.unwrap_or_else(|| "socket of another kind, or just closed".to_owned());
    }
    if inner("pipe:[").is_some() {
        return "pipe".to_owned();
    }
    if let Some(name) = link.strip_prefix("anon_inode:") {
        return name.trim_matches(['[', ']']).to_owned();
    }
    if let Some(name) = link.strip_prefix("/memfd:") {
        return format!("memfd {}", name.trim_end_matches(" (deleted)"));
    }
    format!("file {link}")
}

/// What each socket is, by its number, from the kernel's tables of one network.
fn sockets_of(folder: &str) -> HashMap<String, String> {
    let table = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).ok();
    let mut sockets = HashMap::new();
    let tcp: Vec<_> = ["tcp", "tcp6"]
        .into_iter()
        .filter_map(table)
        .flat_map(|text| text.lines().filter_map(Tcp::parse).collect::<Vec<_>>())
        .collect();
    let listening = tcp.iter().filter(|tcp| tcp.state == LISTENING);
    let listening: HashSet<u16> = listening.map(|tcp| tcp.local.port()).collect();
    for tcp in tcp {
        let (local, remote) = (tcp.local, tcp.remote);
        let state = match tcp.state.as_str() {
            ESTABLISHED => String::new(),
            state => format!(", state {state}"),
        };
        let name = if tcp.state == LISTENING {
            format!("tcp listening on port {}", local.port())
        } else if listening.contains(&local.port()) {
            format!("tcp from {} on port {}{state}", remote.ip(), local.port())
        } else {
            format!("tcp to {remote}{state}")
        };
        sockets.insert(tcp.inode, name);
    }
    for line in table("unix").unwrap_or_default().lines().skip(1) {
        let mut fields = line.split_whitespace();
        let Some(inode) = fields.nth(6) else { continue };
        // Of an accepted one, its listener's.
        let name = match fields.next() {
            Some(path) => format!("{UNIX}{path}"),
            None => NAMELESS.to_owned(),
        };
        sockets.insert(inode.to_owned(), name);
    }
    sockets
}

struct Tcp {
    local: SocketAddr,
    remote: SocketAddr,
    state: String,
    inode: String,
}

impl Tcp {
    /// A line of /proc/net/tcp or tcp6; the first names the columns.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_whitespace();
        let local = address(fields.nth(1)?)?;
        let remote = address(fields.next()?)?;
        let state = fields.next()?.to_owned();
        let inode = fields.nth(5)?.to_owned();
        Some(Self {
            local,
            remote,
            state,
            inode,
        })
    }
}

/// `0101007F:1F90`: each word of the address in the machine's order, the port as it is said.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words = address.as_bytes().chunks(8).map(|word| {
        let word = std::str::from_utf8(word).ok()?;
        Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
    });
    let bytes: Vec<u8> = words.collect::<Option<Vec<_>>>()?.concat();
    let ip = match bytes.len() {
        4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => return None,
    };
    Some(SocketAddr::new(ip.to_canonical(), port))
}

#[cfg(test)]
mod checks {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn each_descriptor_is_named_by_what_it_is() {
        let before = of(std::process::id()).expect("this process runs");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let dialled = TcpStream::connect(address).expect("it listens");
        let accepted = listener.accept().expect("somebody has connected");
        let dual = TcpListener::bind("[::1]:0").expect("a free port");
        let dual_address = dual.local_addr().expect("it is bound");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("named.sock");
        let unix = UnixListener::bind(&path).expect("a new name");
        let pool = tests::service::memfd(4096);
        let now = of(std::process::id()).expect("this process runs");
        let told = more(&before, &now);
        for (kind, count) in [
            (format!("tcp listening on port {}", address.port()), 1),
            (format!("tcp listening on port {}", dual_address.port()), 1),
            (format!("tcp to {address}"), 1),
            (format!("tcp from 127.0.0.1 on port {}", address.port()), 1),
            (format!("unix {}", path.display()), 1),
        ] {
            assert_eq!(now.get(&kind), Some(&count), "{kind}: {now:?}");
            assert!(told.contains(&format!("{kind}: 0, then {count}")), "{told}");
        }
        assert!(now.keys().any(|kind| kind.starts_with("memfd ")), "{now:?}");
        drop((dialled, accepted, unix, pool));
        let gone = of(std::process::id()).expect("this process runs");
        assert!(!gone.contains_key(&format!("tcp to {address}")), "{gone:?}");
        assert_eq!(more(&now, &now), "");
    }
}

//! A network of its own: a namespace for each process, joined by a bridge, all inside a namespace
//! that this program was started in and that goes with it.

use std::process::Command;

/// How this program names itself inside its own namespace.
pub const INSIDE: &str = "FERRY_CHAOS_INSIDE";

#[derive(Debug)]
pub struct Network(());

fn ip(arguments: &str) -> Result<(), String> {
    let ran = Command::new("ip").args(arguments.split(' ')).output();
    let ran = ran.map_err(|error| format!("ip: {error}"))?;
    if ran.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ran.stderr);
    Err(format!("ip {arguments}: {}", said.trim()))
}

impl Network {
    /// Whether a namespace with a bridge and names of its own can be made here; else why not.
    pub fn probe() -> Result<(), String> {
        let mut command = inside_of_its_own("ip");
        let made = command
            .args(["link", "add", "probe", "type", "bridge"])
            .output();
        let made = made.map_err(|error| format!("unshare: {error}"))?;
        if !made.status.success() {
            return Err(String::from_utf8_lossy(&made.stderr).trim().to_owned());
        }
        Ok(())
    }

    /// Makes the bridge and so many namespaces. It may only be called inside such a namespace.
    pub fn make(hosts: usize) -> Result<Self, String> {
        assert!(
            std::env::var_os(INSIDE).is_some(),
            "not in the host's own network"
        );
        ip("link set lo up")?;
        ip("link add ferry type bridge")?;
        ip("link set ferry up")?;
        let network = Self(());
        for host in 0..hosts {
            let address = network.address(host);
            ip(&format!("netns add h{host}"))?;
            ip(&format!(
                "link add v{host} type veth peer name eth0 netns h{host}"
            ))?;
            ip(&format!("link set v{host} master ferry up"))?;
            ip(&format!("-n h{host} addr add {address}/24 dev eth0"))?;
            ip(&format!("-n h{host} link set eth0 up"))?;
            ip(&format!("-n h{host} link set lo up"))?;
        }
        Ok(network)
    }

    pub fn address(&self, host: usize) -> String {
        format!("10.77.0.{}", host + 1)
    }

    /// The same command, inside a host.
    pub fn inside(&self, host: usize, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside
            .args(["netns", "exec", &format!("h{host}")])
            .arg(command.get_program())
            .args(command.get_args())
            .stdin(std::process::Stdio::null());
        inside
    }

    /// Sets a host's link `up` or `down`, at the bridge.
    pub fn link(&self, host: usize, state: &str) {
        let set = ip(&format!("link set v{host} {state}"));
        set.unwrap_or_else(|error| panic!("{error}"));
    }
}

/// A program in namespaces of its own for network and mounts, where `ip netns` finds a folder that
/// nobody else sees.
pub fn inside_of_its_own(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let script = "mount -t tmpfs none /run && mkdir /run/netns && exec \"$0\" \"$@\"";
    command
        .args(["--net", "--mount", "sh", "-c", script])
        .arg(program)
        .env(INSIDE, "1");
    command
}

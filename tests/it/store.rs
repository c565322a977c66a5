//! The store: older layouts are taken over, damage is named, a failing disk makes the server
//! read-only and a working one makes it writable again, and nothing acknowledged is ever lost.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tests::http::{Reply, Request};
use tests::process::{BootstrapServer, children, program, run_to_end, skip, wait_for};
use tests::registrations::{route_body, route_path, topology_path, with};

const READ_ONLY: &str = "ferry_bootstrap_store_read_only_state";

fn put(server: &BootstrapServer, body: &Value) -> Reply {
    server.send(&Request::put("/route", body))
}

fn start(folder: &Path, arguments: &[&str]) -> BootstrapServer {
    BootstrapServer::start(folder, &[&["--probe-interval", "0"], arguments].concat())
}

/// Copies a folder and those below it.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("the folder exists") {
        let path = entry.expect("an entry").path();
        let target = to.join(path.file_name().expect("a name"));
        match path.is_dir() {
            true => copy(&path, &target),
            false => {
                std::fs::copy(&path, &target).expect("a copy");
            }
        }
    }
}

/// The folder that holds the values now.
fn values(data: &Path) -> PathBuf {
    let schema = std::fs::read(data.join("schema")).expect("the schema");
    let schema: Value = serde_json::from_slice(&schema).expect("json");
    data.join(schema["folder"].as_str().expect("a name"))
}

/// A copy of a data folder that an earlier server wrote.
fn golden(name: &str) -> tempfile::TempDir {
    let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/golden")).join(name);
    let folder = tempfile::tempdir().expect("a temporary folder");
    copy(&golden, folder.path());
    folder
}

/// Flips a bit in the last place where a file has some bytes.
fn damage(file: &Path, needle: &[u8]) {
    let mut bytes = std::fs::read(file).expect("the file");
    let at = bytes
        .windows(needle.len())
        .rposition(|window| window == needle);
    bytes[at.expect("the bytes are in the file")] ^= 0x40;
    std::fs::write(file, bytes).expect("it can be written");
}

/// Cuts some bytes off a file.
fn cut(file: &Path, bytes: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(file);
    let file = file.expect("the file");
    let length = file.metadata().expect("its size").len();
    file.set_len(length - bytes).expect("it can be cut");
}

/// Why a server does not start.
fn refused(data: &Path) -> String {
    let mut command = Command::new(program("bootstrap-server"));
    BootstrapServer::command(&mut command, data, &[]);
    let (status, text) = run_to_end(&mut command);
    assert_eq!(status.code(), Some(1), "{text}");
    text
}

#[test]
fn a_store_of_the_first_layout_is_taken_over() {
    let folder = golden("store-layout-1");
    for _ in 0..2 {
        let server = start(folder.path(), &[]);
        assert_eq!(server.json("/v1/engines/default")["generation"], 2);
        assert_eq!(server.json(&topology_path())["page_size"], 64);
        assert_eq!(server.json(&route_path(0, 0, 1, 0))["rank_port"], 41002);
        let retired = put(&server, &route_body(1, 0, 41000, 32));
        assert_eq!(retired.status, 409, "{}", retired.text());
        server.kill();
    }
    assert!(values(folder.path()).is_dir());
    assert!(!folder.path().join("db").exists(), "the old files are gone");
}

/// One that has lost a rank, been given it again, and lost it again.
#[test]
fn a_store_of_the_second_layout_is_taken_over() {
    let folder = golden("store-layout-2");
    for _ in 0..2 {
        let server = start(folder.path(), &[]);
        let known = server.json("/v1/engines/default");
        assert_eq!(known["generation"], 2);
        let present = &known["ranks_present"];
        assert_eq!(present.as_array().map(Vec::len), Some(1), "{present}");
        assert_eq!(present[0]["instance"], "127.0.0.1:41002");
        let retired = put(&server, &route_body(1, 0, 41000, 32));
        assert_eq!(retired.status, 409, "{}", retired.text());
        server.kill();
    }
    let server = start(folder.path(), &[]);
    assert_eq!(put(&server, &route_body(2, 0, 41005, 64)).status, 200);
    assert_eq!(server.json(&topology_path())["page_size"], 64);
    assert!(values(folder.path()).join("log").is_file());
    assert!(
        !folder.path().join("store-1").exists(),
        "the old files are gone"
    );
}

#[test]
fn a_loss_in_a_store_of_the_second_layout_is_named() {
    let folder = golden("store-layout-2");
    damage(&values(folder.path()).join("db"), b"\"port\":41002");
    let text = refused(folder.path());
    assert!(
        text.contains("\"tp\":0") && text.contains("it was deleted and is back"),
        "{text}"
    );
}

#[test]
fn a_value_of_an_unknown_version_is_refused_at_the_start() {
    // Layout 2 has no sums of values, so that one can be changed.
    let folder = golden("store-layout-2");
    let database = sled::open(values(folder.path())).expect("the store opens");
    let (key, value) = database
        .iter()
        .last()
        .expect("a value")
        .expect("it can be read");
    let mut newer = value.to_vec();
    // The version stands behind the number of the change.
    newer[8] = 200;
    database.insert(key, newer).expect("it can be written");
    database.flush().expect("it is written");
    drop(database);
    let text = refused(folder.path());
    assert!(
        text.contains("version 200") && text.contains("knows version 1"),
        "{text}"
    );
}

/// How many ranks of the engine are there.
fn ranks(server: &BootstrapServer) -> Option<usize> {
    let known = server.json("/v1/engines/default");
    known["ranks_present"].as_array().map(Vec::len)
}

/// A folder whose checkpoint has ranks 0, 1 and 2, and whose log has rank 0 with another address,
/// rank 3 and rank 1 with another address.
fn ranks_in_both() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = start(folder.path(), &[]);
    for rank in 0..3 {
        put(&server, &route_body(5, rank, 41000 + rank as u16, 64));
    }
    server.kill();
    // It writes a checkpoint at its start.
    let server = start(folder.path(), &[]);
    for (rank, port) in [(0, 41010), (3, 41003), (1, 41011)] {
        put(&server, &route_body(5, rank, port, 64));
    }
    server.kill();
    folder
}

/// A start is refused by the names of what is lost, or the rest is served read-only, or the loss
/// is accepted and over.
fn lost_is_named(folder: &Path, names: &[&str], present: usize) {
    for _ in 0..2 {
        let text = refused(folder);
        for part in names.iter().chain(&["accept-loss"]) {
            assert!(text.contains(part), "{part:?} in {text}");
        }
    }
    let server = start(folder, &["--damaged-store", "read-only"]);
    assert_eq!(ranks(&server), Some(present));
    let reply = put(&server, &route_body(5, 4, 41004, 64));
    assert_eq!(reply.status, 503);
    assert!(
        reply.text().starts_with("store_read_only: "),
        "{}",
        reply.text()
    );
    let ready = server.send(&Request::get("/v1/health/ready"));
    assert_eq!(ready.status, 503);
    assert!(ready.text().contains("store_read_only"), "{}", ready.text());
    assert_eq!(server.metric(READ_ONLY), Some(1.0));
    server.kill();
    let server = start(folder, &["--damaged-store", "accept-loss"]);
    assert_eq!(put(&server, &route_body(5, 4, 41004, 64)).status, 200);
    server.kill();
    let server = start(folder, &[]);
    assert_eq!(ranks(&server), Some(present + 1));
}

/// sled takes what stands before a damaged byte for the whole; the server does not.
#[test]
fn a_flipped_byte_of_the_checkpoint_is_a_loss_of_what_did_not_change_since() {
    let folder = ranks_in_both();
    damage(&values(folder.path()).join("db"), b"\"port\":41001");
    lost_is_named(folder.path(), &["\"tp\":2", "it is gone"], 3);
}

#[test]
fn a_flipped_byte_of_the_log_is_a_loss_of_its_commit() {
    let folder = ranks_in_both();
    let log = values(folder.path()).join("log");
    damage(&log, b"\"port\":41010");
    damage(&log, b"\"port\":41003");
    let names = [
        "\"tp\":0",
        "its last change is gone",
        "\"tp\":3",
        "it is gone",
    ];
    lost_is_named(folder.path(), &names, 3);
}

#[test]
fn a_commit_whose_names_are_damaged_is_a_loss_by_its_number() {
    let folder = ranks_in_both();
    damage(&values(folder.path()).join("log"), b"\\\"tp\\\":3");
    lost_is_named(folder.path(), &["commit 2", "cannot be read"], 3);
}

#[test]
fn a_torn_checkpoint_is_noticed() {
    let folder = ranks_in_both();
    let values = values(folder.path());
    cut(&values.join("db"), 20);
    assert!(refused(folder.path()).contains("\"tp\":2"));
    std::fs::write(values.join("db"), b"").expect("it can be written");
    assert!(refused(folder.path()).contains("generation"));
}

/// An append that a kill or a power cut tore was never answered.
#[test]
fn a_torn_end_of_the_log_is_no_loss() {
    let folder = ranks_in_both();
    cut(&values(folder.path()).join("log"), 20);
    let server = start(folder.path(), &[]);
    assert_eq!(ranks(&server), Some(4));
    let shown = server.json("/v1/engines/default/ranks");
    assert!(shown.to_string().contains("127.0.0.1:41001"), "{shown}");
}

#[test]
fn a_newer_layout_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(
        folder.path().join("schema"),
        "{\"schema\": 99, \"folder\": \"x\"}",
    )
    .expect("it can be written");
    assert!(refused(folder.path()).contains("has layout 99"));
}

/// The real program with a real error of `fdatasync`: the second registration's fails.
#[test]
fn a_failing_fdatasync_is_never_a_200_and_new_files_follow() {
    const TEST: &str = "a_failing_fdatasync_is_never_a_200_and_new_files_follow";
    let folder = tempfile::tempdir().expect("a temporary folder");
    let trace = folder.path().join("trace");
    if let Err(reason) = crate::durability::strace_works(&trace) {
        return skip(TEST, &reason);
    }
    let data = folder.path().join("data");
    let mut command = Command::new("strace");
    // strace counts for each thread, and each log has one: this is the second change.
    command
        .args(["-f", "-y", "-e", "trace=fdatasync", "-e"])
        .arg("inject=fdatasync:error=EIO:when=2")
        .arg("-o")
        .arg(&trace)
        .arg(program("bootstrap-server"));
    BootstrapServer::command(&mut command, &data, &["--probe-interval", "0"]);
    let server = BootstrapServer::spawn(&mut command);
    let first = route_body(2, 0, 41000, 64);
    assert_eq!(put(&server, &first).status, 200);
    let reply = put(&server, &route_body(2, 1, 41001, 64));
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert!(
        reply.text().starts_with("store_read_only: "),
        "{}",
        reply.text()
    );
    assert_eq!(server.metric(READ_ONLY), Some(1.0));
    assert_eq!(server.send(&Request::get("/v1/health/ready")).status, 503);
    assert_eq!(put(&server, &first).status, 200, "it is so already");
    let present = || {
        server.json("/v1/engines/default")["ranks_present"]
            .as_array()
            .map(Vec::len)
    };
    assert_eq!(present(), Some(1), "what failed is not seen");
    wait_for("the store works again", || {
        (server.metric(READ_ONLY) == Some(0.0)).then_some(())
    });
    assert_eq!(server.send(&Request::get("/v1/health/ready")).status, 200);
    assert_eq!(put(&server, &route_body(2, 1, 41002, 64)).status, 200);
    let traced = children(server.pid());
    traced
        .iter()
        .for_each(|pid| tests::process::signal(*pid, "KILL"));
    server.wait();
    let text = std::fs::read_to_string(&trace).expect("the trace");
    let synchronised: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("fdatasync("))
        .collect();
    let failed = synchronised.iter().position(|line| line.contains("EIO"));
    let failed = failed.unwrap_or_else(|| panic!("a call failed: {text}"));
    let file = |line: &str| line.split(['<', '>']).nth(1).map(str::to_owned);
    for later in &synchronised[failed + 1..] {
        assert_ne!(
            file(later),
            file(synchronised[failed]),
            "a file that failed: {text}"
        );
    }
    let server = start(&data, &[]);
    assert_eq!(server.json(&route_path(0, 0, 0, 0))["rank_port"], 41000);
    assert_eq!(server.json(&route_path(0, 0, 1, 0))["rank_port"], 41002);
}

/// A small disk of its own: a tmpfs in a mount namespace, which a sleeping process holds.
struct SmallDisk {
    holder: Child,
    folder: PathBuf,
    /// The namespaces that it has of its own, as options of `unshare` and `nsenter`.
    namespaces: &'static [&'static str],
}

impl SmallDisk {
    /// As anybody, where the kernel lets everybody have namespaces, else as root.
    fn new(folder: &Path, mebibytes: u32) -> Result<Self, String> {
        let own_user = Self::mount(folder, mebibytes, &["--user", "--mount"]);
        own_user.or_else(|reason| {
            let as_root = Self::mount(folder, mebibytes, &["--mount"]);
            as_root.map_err(|other| format!("{reason}; {other}"))
        })
    }

    fn mount(
        folder: &Path,
        mebibytes: u32,
        namespaces: &'static [&'static str],
    ) -> Result<Self, String> {
        let script = format!(
            "mount -t tmpfs -o size={mebibytes}m none {0} && touch {0}/mounted && exec sleep 600",
            folder.display()
        );
        let mut command = Command::new("unshare");
        command.args(namespaces);
        if namespaces.contains(&"--user") {
            command.arg("--map-root-user");
        }
        let holder = command
            .args(["sh", "-c", &script])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("unshare cannot be started: {error}"))?;
        let folder = folder.to_owned();
        let mut disk = Self {
            holder,
            folder,
            namespaces,
        };
        let mounted = wait_for("a small tmpfs", || {
            let ended = disk.holder.try_wait().expect("it can be waited for");
            match ended {
                Some(status) => {
                    let reason = format!("no tmpfs with unshare {namespaces:?}: {status}");
                    Some(Err(reason))
                }
                None => disk.path("mounted").exists().then_some(Ok(())),
            }
        });
        mounted.map(|()| disk)
    }

    /// A file of the disk, as seen from outside of its namespace.
    fn path(&self, name: &str) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        let inside = self.folder.strip_prefix("/").expect("an absolute path");
        root.join(inside).join(name)
    }

    /// A command that runs in its namespace.
    fn inside(&self) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.holder.id()))
            .args(self.namespaces)
            .arg("--preserve-credentials");
        command
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.inside();
        command.arg(program("bootstrap-server"));
        BootstrapServer::command(&mut command, &self.folder.join("data"), arguments);
        command
    }

    fn grow(&self, mebibytes: u32) {
        let size = format!("remount,size={mebibytes}m");
        let grown = self
            .inside()
            .args(["mount", "-o", &size])
            .arg(&self.folder)
            .status();
        assert!(grown.expect("nsenter starts").success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Registrations until the disk is full, a kill, room again: what was answered 200 is there.
#[test]
fn a_full_disk_loses_nothing_and_writing_begins_again_by_itself() {
    const TEST: &str = "a_full_disk_loses_nothing_and_writing_begins_again_by_itself";
    let folder = tempfile::tempdir().expect("a temporary folder");
    let disk = match SmallDisk::new(folder.path(), 6) {
        Ok(disk) => disk,
        Err(reason) => return skip(TEST, &reason),
    };
    let start = || BootstrapServer::spawn(&mut disk.command(&["--probe-interval", "0"]));
    // Large registrations fill it soon; one rank more than are registered keeps it incomplete.
    let padding = "x".repeat(20_000);
    let body = |rank: u32| {
        let body = route_body(1001, rank, 1024 + rank as u16, 64);
        with(&body, "of_the_future", Value::from(padding.as_str()))
    };
    let present = |server: &BootstrapServer| -> BTreeMap<u64, String> {
        let engine = server.json("/v1/engines/default");
        let ranks = engine["ranks_present"].as_array().into_iter().flatten();
        ranks
            .map(|rank| {
                let instance = rank["instance"].as_str().unwrap_or_default();
                (rank["tp"].as_u64().unwrap_or(u64::MAX), instance.to_owned())
            })
            .collect()
    };
    let server = start();
    let mut acknowledged = BTreeMap::new();
    let refused = (0..1000).find_map(|rank| {
        let reply = put(&server, &body(rank));
        if reply.status != 200 {
            return Some(reply);
        }
        acknowledged.insert(u64::from(rank), format!("127.0.0.1:{}", 1024 + rank));
        None
    });
    let reply = refused.expect("the disk fills up");
    assert_eq!(reply.status, 503);
    assert!(
        reply.text().starts_with("store_read_only: "),
        "{}",
        reply.text()
    );
    println!("{} registrations fitted", acknowledged.len());
    assert_eq!(
        present(&server),
        acknowledged,
        "reads go on, and nothing more is seen"
    );
    assert_eq!(server.send(&Request::get("/v1/health/ready")).status, 503);
    server.kill();
    for _ in 0..2 {
        let server = start();
        assert_eq!(present(&server), acknowledged, "a start on the full disk");
        assert_eq!(server.metric(READ_ONLY), Some(1.0));
        assert_eq!(put(&server, &body(999)).status, 503);
        server.kill();
    }
    let server = start();
    disk.grow(32);
    wait_for("the store works again", || {
        (server.metric(READ_ONLY) == Some(0.0)).then_some(())
    });
    assert_eq!(put(&server, &body(999)).status, 200);
    acknowledged.insert(999, "127.0.0.1:2023".to_owned());
    server.kill();
    assert_eq!(present(&start()), acknowledged, "with room again");
}

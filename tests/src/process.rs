//! Processes of the programs under test: found beside the test, awaited with a deadline, killed
//! when dropped.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::http::{Reply, Request};

/// Time for a process to be ready, or to end, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A program of the workspace, which cargo puts one folder above a test's own executable, and beside
/// a program's.
///
/// # Panics
/// When it was not built; the message says how to build it.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    let folder = test.parent().expect("it lies in a folder");
    let folder = match folder.parent() {
        Some(above) if folder.ends_with("deps") => above,
        _ => folder,
    };
    let program = folder.join(name);
    assert!(
        program.is_file(),
        "{} is missing: run `cargo build --workspace --bins`",
        program.display()
    );
    program
}

/// Waits until something is there.
///
/// # Panics
/// When it is not there in [`PATIENCE`].
pub fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not in {PATIENCE:?}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// The processes that a process has started and not waited for.
///
/// # Panics
/// When it is gone.
pub fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    // A thread that has just ended has no such file.
    let lists = threads
        .flatten()
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let lists: Vec<_> = lists.collect();
    let ids = lists.iter().flat_map(|list| list.split_whitespace());
    ids.filter_map(|id| id.parse().ok()).collect()
}

/// Sends a signal by its name, for example `TERM`.
///
/// # Panics
/// When the process is gone.
pub fn signal(pid: u32, name: &str) {
    let sent = Command::new("sh")
        .args(["-c", &format!("kill -{name} {pid}")])
        .status();
    assert!(
        sent.expect("sh starts").success(),
        "{pid} takes signal {name}"
    );
}

/// Starts a program that prints `ready ADDRESS` once it serves, or `ready NAME=ADDRESS ...`, and
/// waits for that line.
///
/// # Panics
/// When the line does not come.
pub fn spawn_ready(command: &mut Command) -> (Child, Vec<SocketAddr>) {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let stdout = child.stdout.take().expect("it is piped");
    let (sender, ready) = mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
        let addresses = lines.find_map(|line| {
            let words = line.strip_prefix("ready ")?.split(' ');
            let addresses = words.map(|word| word.rsplit('=').next()?.parse().ok());
            addresses.collect::<Option<Vec<SocketAddr>>>()
        });
        // The receiver may have given up.
        let _ = sender.send(addresses);
        lines.for_each(drop);
    });
    let Some(addresses) = ready.recv_timeout(PATIENCE).ok().flatten() else {
        let _ = child.kill();
        panic!("the program printed no ready line: {:?}", child.wait());
    };
    (child, addresses)
}

/// A running bootstrap server.
#[derive(Debug)]
pub struct BootstrapServer {
    child: Child,
    engines: Vec<SocketAddr>,
    admin: SocketAddr,
}

impl BootstrapServer {
    /// Starts one on a free port and waits until it answers.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start(data_dir: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new(program("bootstrap-server"));
        Self::command(&mut command, data_dir, arguments);
        Self::spawn(&mut command)
    }

    /// As [`start`](Self::start), with the log in a file.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start_logged(data_dir: &Path, arguments: &[&str], log: &Path) -> Self {
        let mut command = Command::new(program("bootstrap-server"));
        Self::command(&mut command, data_dir, arguments);
        Self::log_to(&mut command, log);
        Self::spawn(&mut command)
    }

    /// Sends a command's log to a file.
    ///
    /// # Panics
    /// When the file cannot be made.
    pub fn log_to(command: &mut Command, log: &Path) {
        command.stderr(std::fs::File::create(log).expect("the log file is made"));
    }

    /// Adds the usual arguments to a command that ends in the server's program. A `--listen` of the
    /// caller replaces the usual one.
    pub fn command(command: &mut Command, data_dir: &Path, arguments: &[&str]) {
        if !arguments.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        command
            .args(["--admin-listen", "127.0.0.1:0", "--data-dir"])
            .arg(data_dir)
            .args(arguments)
            .stdin(Stdio::null());
    }

    /// Starts a command and waits until the server answers.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn spawn(command: &mut Command) -> Self {
        let server = Self::spawn_tls(command);
        wait_for("GET /metrics", || {
            server
                .try_send(&Request::get("/metrics"))
                .ok()
                .filter(|reply| reply.status == 200)
        });
        server
    }

    /// Starts a command whose admin port speaks TLS, and waits for its ready line.
    ///
    /// # Panics
    /// When it does not come.
    pub fn spawn_tls(command: &mut Command) -> Self {
        let (child, mut engines) = spawn_ready(command);
        let admin = engines.pop().expect("the admin port is the last");
        Self {
            child,
            engines,
            admin,
        }
    }

    /// Where its first engine's ranks and decodes reach it.
    pub fn address(&self) -> SocketAddr {
        self.engines[0]
    }

    /// Where all its engines' ranks and decodes reach it, in the order of its options.
    pub fn engines(&self) -> &[SocketAddr] {
        &self.engines
    }

    /// Where operators reach it.
    pub const fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends one request: what operators call to the admin port, the rest to the first engine's.
    ///
    /// # Panics
    /// When there is no answer.
    pub fn send(&self, request: &Request) -> Reply {
        self.try_send(request)
            .unwrap_or_else(|error| panic!("{} {}: {error}", request.method, request.path))
    }

    /// As [`send`](Self::send).
    ///
    /// # Errors
    /// When there is no answer.
    pub fn try_send(&self, request: &Request) -> std::io::Result<Reply> {
        let path = request.path.as_str();
        let is_admin = ["/", "/metrics"].contains(&path)
            || ["/page/", "/v1/engines", "/v1/events", "/v1/health"]
                .iter()
                .any(|prefix| path.starts_with(prefix))
            || path.split('?').next() == Some("/v1/reports");
        request.send(if is_admin { self.admin } else { self.address() })
    }

    /// A JSON document, for example of the admin API.
    ///
    /// # Panics
    /// When the answer is not 200 with JSON.
    pub fn json(&self, path: &str) -> serde_json::Value {
        let reply = self.send(&Request::get(path));
        assert_eq!(reply.status, 200, "GET {path}: {}", reply.text());
        serde_json::from_slice(&reply.body).expect("the body is JSON")
    }

    /// The value of one series in `/metrics`, for example `name{label="value"}`.
    pub fn metric(&self, series: &str) -> Option<f64> {
        let text = self.send(&Request::get("/metrics")).text();
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok())
    }

    /// Its resident memory.
    ///
    /// # Panics
    /// When it does not run.
    pub fn resident_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.expect("the kernel tells") / 1024
    }

    /// Ends it the hard way, as a crash would.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(mut self) {
        self.child.kill().expect("it is running");
        self.child.wait().expect("it can be waited for");
    }

    /// Waits for its end, which something else has asked for.
    ///
    /// # Panics
    /// When it does not end in [`PATIENCE`].
    pub fn wait(mut self) -> ExitStatus {
        wait_for("the end of the server", || {
            self.child.try_wait().expect("it can be waited for")
        })
    }

    /// Sends a signal and waits for the end.
    ///
    /// # Panics
    /// When it does not end in [`PATIENCE`].
    pub fn end_with(self, signal_name: &str) -> ExitStatus {
        signal(self.child.id(), signal_name);
        self.wait()
    }
}

impl Drop for BootstrapServer {
    fn drop(&mut self) {
        // It may have ended already; nothing else can be done here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a program that is to fail soon; returns its status and what it wrote to standard error.
///
/// # Panics
/// When it does not end in [`PATIENCE`].
pub fn run_to_end(command: &mut Command) -> (ExitStatus, String) {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stderr = child.stderr.take().expect("it is piped");
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).map(|_| text)
    });
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            break status;
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("the program did not end in {PATIENCE:?}");
        }
        std::thread::park_timeout(Duration::from_millis(10));
    };
    let text = reader
        .join()
        .expect("the reader ends")
        .expect("standard error is text");
    (status, text)
}

/// Says that a test cannot run here, also in the file that `FERRY_SKIP_LOG` names.
pub fn skip(test: &str, reason: &str) {
    use std::io::Write;
    let line = format!("SKIPPED: {test}: {reason}");
    println!("{line}");
    if let Some(path) = std::env::var_os("FERRY_SKIP_LOG") {
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path);
        let written = file.and_then(|mut file| writeln!(file, "{line}"));
        written.expect("the log of skipped tests can be written");
    }
}

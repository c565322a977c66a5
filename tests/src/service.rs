//! A running `transfer-actor serve`, and the attach socket spoken byte by byte.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::Value;

use crate::http::{Reply, Request};
use crate::process::{PATIENCE, program, signal, spawn_ready, wait_for};

/// Most descriptors that one message carries.
const MAX_DESCRIPTORS: usize = 253;

/// A running transfer service, with its sockets in a folder of its own.
#[derive(Debug)]
pub struct TransferService {
    child: Child,
    metrics: SocketAddr,
    folder: tempfile::TempDir,
}

impl TransferService {
    /// Starts one on free ports and waits until it serves.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::start_in(folder, arguments)
    }

    /// As [`start`](Self::start), with sockets in a folder of the caller.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start_in(folder: tempfile::TempDir, arguments: &[&str]) -> Self {
        let mut command = Self::command(folder.path(), arguments);
        Self::spawn(folder, &mut command)
    }

    /// Starts a command whose sockets lie in a folder.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn spawn(folder: tempfile::TempDir, command: &mut Command) -> Self {
        let (child, ready) = spawn_ready(command);
        Self {
            child,
            metrics: ready[0],
            folder,
        }
    }

    /// The command line of a service whose sockets lie in a folder. A flag of the caller replaces
    /// the usual one.
    pub fn command(folder: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("transfer-actor"));
        command.arg("serve").stdin(Stdio::null());
        let mut usual = |flag: &str, value: &std::ffi::OsStr| {
            if !arguments.contains(&flag) {
                command.arg(flag).arg(value);
            }
        };
        usual("--attach-socket", folder.join("attach.sock").as_os_str());
        usual("--api-socket", folder.join("api.sock").as_os_str());
        usual("--metrics-listen", "127.0.0.1:0".as_ref());
        usual("--bind", "127.0.0.1".as_ref());
        usual("--transports", "tcp".as_ref());
        command.args(arguments);
        command
    }

    /// Where engines attach.
    pub fn attach_socket(&self) -> PathBuf {
        self.folder.path().join("attach.sock")
    }

    /// Where rooms are driven.
    pub fn api_socket(&self) -> PathBuf {
        self.folder.path().join("api.sock")
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends one request to the API socket.
    ///
    /// # Panics
    /// When there is no answer.
    pub fn send(&self, request: &Request) -> Reply {
        request
            .send_unix(&self.api_socket())
            .unwrap_or_else(|error| panic!("{} {}: {error}", request.method, request.path))
    }

    /// Sends one request to the metrics port.
    ///
    /// # Panics
    /// When there is no answer.
    pub fn send_to_metrics_port(&self, request: &Request) -> Reply {
        request
            .send(self.metrics)
            .unwrap_or_else(|error| panic!("{} {}: {error}", request.method, request.path))
    }

    /// A JSON document of the API.
    ///
    /// # Panics
    /// When the answer is not 200 with JSON.
    pub fn json(&self, path: &str) -> Value {
        let reply = self.send(&Request::get(path));
        assert_eq!(reply.status, 200, "GET {path}: {}", reply.text());
        serde_json::from_slice(&reply.body).expect("the body is JSON")
    }

    /// Numbers of the ranks that it lists.
    ///
    /// # Panics
    /// When the list is none.
    pub fn ranks(&self) -> Vec<u64> {
        let listed = self.json("/v1/ranks");
        let listed = listed["ranks"].as_array().expect("a list");
        let number = |rank: &Value| rank["rank"].as_u64().expect("a number");
        listed.iter().map(number).collect()
    }

    /// The text of `/metrics`.
    pub fn metrics(&self) -> String {
        self.send_to_metrics_port(&Request::get("/metrics")).text()
    }

    /// The sum of all series of a metric whose labels contain these words.
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        sum_of(&self.metrics(), name, labels)
    }

    /// Threads and open descriptors, by what the kernel says.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn resources(&self) -> (usize, usize) {
        let count = |what: &str| {
            let folder = format!("/proc/{}/{what}", self.pid());
            std::fs::read_dir(folder).expect("it is running").count()
        };
        (count("task"), count("fd"))
    }

    /// Whether the process has ended, and how.
    ///
    /// # Panics
    /// When it cannot be asked.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it can be waited for")
    }

    /// Ends it the hard way, as a crash would.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is running");
        self.child.wait().expect("it can be waited for");
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Waits for its end, which something else has asked for.
    ///
    /// # Panics
    /// When it does not end in [`PATIENCE`].
    pub fn wait(&mut self) -> ExitStatus {
        wait_for("the end of the service", || self.ended())
    }
}

impl Drop for TransferService {
    fn drop(&mut self) {
        // It may have ended already; nothing else can be done here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A memfd of some bytes, all zero, that lets itself be sealed.
///
/// # Panics
/// When the kernel has none.
pub fn memfd(bytes: u64) -> File {
    memfd_with(bytes, MemfdFlags::ALLOW_SEALING)
}

/// As [`memfd`], with other flags.
///
/// # Panics
/// When the kernel has none.
pub fn memfd_with(bytes: u64, flags: MemfdFlags) -> File {
    let made = rustix::fs::memfd_create("pool", flags | MemfdFlags::CLOEXEC);
    let file = File::from(made.expect("a memfd"));
    file.set_len(bytes).expect("it grows");
    file
}

/// Connects to an attach socket, sends bytes, with descriptors beside the first of them.
///
/// # Panics
/// When nobody listens there.
pub fn attach_bytes(path: &Path, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> UnixStream {
    let mut stream = UnixStream::connect(path).expect("the attach socket is served");
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("a timeout can be set");
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let pushed = ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(pushed, "the descriptors fit one message");
    }
    let flags = SendFlags::NOSIGNAL;
    let sent = rustix::net::sendmsg(&stream, &[IoSlice::new(bytes)], &mut ancillary, flags);
    let sent = sent.expect("it is sent");
    // A service that has refused already may read no more; its answer counts.
    let _ = stream.write_all(&bytes[sent..]);
    stream
}

/// A request in the framing of the attach socket.
///
/// # Panics
/// When it is larger than 4 GiB.
pub fn framed(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("a short body");
    [&length.to_le_bytes()[..], body].concat()
}

/// The answer on an attach socket.
///
/// # Panics
/// When none comes.
pub fn attach_reply(stream: &mut UnixStream) -> Value {
    let mut header = [0; 4];
    stream.read_exact(&mut header).expect("an answer comes");
    let mut body = vec![0; u32::from_le_bytes(header) as usize];
    stream
        .read_exact(&mut body)
        .expect("the whole answer comes");
    serde_json::from_slice(&body).expect("the answer is JSON")
}

/// In a text of metrics, the sum of all series of a metric whose labels contain these words.
pub fn sum_of(text: &str, name: &str, labels: &[&str]) -> f64 {
    let values = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let fits = rest.starts_with(['{', ' ']) && labels.iter().all(|word| rest.contains(word));
        rest.rsplit(' ')
            .next()
            .filter(|_| fits)?
            .parse::<f64>()
            .ok()
    });
    values.sum()
}

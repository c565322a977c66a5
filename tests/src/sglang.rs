//! Ranks of SGLang's own classes, each a process of its own: `tests/conformance/peer.py`.
//!
//! Where the environment names a socket of `tests/conformance/fork_server.py`, as `make` does, they
//! are forks of a process that has imported SGLang already; else each is a new interpreter.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};

use crate::process::PATIENCE;

/// Names the socket of the process that forks ranks.
const FORK_SERVER: &str = "FERRY_RANKS";

/// SGLang's release whose classes are run where a test does not say.
pub const NEWEST_RELEASE: &str = "0.5.23";

fn conformance_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance")
}

/// Where the releases are unpacked.
fn releases_folder() -> PathBuf {
    let fallback = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/sglang");
    std::env::var_os("FERRY_SGLANG").map_or_else(fallback, PathBuf::from)
}

/// A running rank. It is killed when dropped.
#[derive(Debug)]
pub struct SglangPeer {
    /// Refers to the process, and never to another that has its number later.
    process: OwnedFd,
    questions: UnixStream,
    answers: Receiver<String>,
    up: Value,
}

impl SglangPeer {
    /// Whether a release and an interpreter for it are here; else why not.
    pub fn is_available(release: &str) -> Result<(), String> {
        let module = releases_folder()
            .join(release)
            .join("sglang/srt/disaggregation/mori/conn.py");
        if !module.is_file() {
            return Err(format!(
                "{} is missing: run `make sglang`",
                module.display()
            ));
        }
        // Found, not imported: that takes as long as a short test.
        let program = "import importlib.util as i; \
             assert all(map(i.find_spec, 'aiohttp msgpack msgspec numpy requests zmq'.split()))";
        match runs(program) {
            true => Ok(()),
            false => Err(format!(
                "{} lacks what SGLang imports: run `make python`, set FERRY_PYTHON",
                python()
            )),
        }
    }

    /// Whether the interpreter finds `mori` in our wheel; else why not.
    pub fn imports_our_module() -> Result<(), String> {
        match runs("import mori.cpp, ferry.mori_compat as ours; assert mori is ours") {
            true => Ok(()),
            false => Err(format!(
                "{} does not find our wheel: run `make wheel`",
                python()
            )),
        }
    }

    /// Starts a rank under these variables and waits until it is up; `peer.py` says what the
    /// configuration holds.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn start(
        release: &str,
        environment: &BTreeMap<String, String>,
        configuration: &Value,
    ) -> Self {
        let mut environment = environment.clone();
        let sglang = releases_folder().join(release).join("sglang");
        environment.insert("SGLCONF_SGLANG".to_owned(), sglang.display().to_string());
        let stream = match connection_opt() {
            Some(stream) => {
                let line = json!({ "env": environment, "configuration": configuration });
                send(&stream, &line).expect("the fork server reads");
                stream
            }
            None => start_process(&environment, configuration),
        };
        let answers = read_answers(&stream);
        let up = next_answer(&answers, "up");
        let pid = up["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.and_then(Pid::from_raw).expect("it says its number");
        Self {
            process: pidfd_open(pid, PidfdFlags::empty()).expect("it runs"),
            questions: stream,
            answers,
            up,
        }
    }

    /// Key of its engine.
    ///
    /// # Panics
    /// When it did not say.
    pub fn engine_key(&self) -> &str {
        self.up["engine_key"].as_str().expect("it says its key")
    }

    /// Port of its control socket.
    ///
    /// # Panics
    /// When it did not say.
    pub fn control_port(&self) -> u16 {
        let port = self.up["control_port"].as_u64();
        port.and_then(|port| port.try_into().ok())
            .expect("it says its port")
    }

    /// Asks something; returns the answer.
    ///
    /// # Panics
    /// When it answers with an error, or not in time.
    pub fn ask(&mut self, op: &str, arguments: Value) -> Value {
        self.begin(op, arguments);
        self.answer(op)
    }

    /// Asks without waiting for the answer, which [`answer`](Self::answer) takes.
    ///
    /// # Panics
    /// When the process has ended.
    pub fn begin(&mut self, op: &str, mut arguments: Value) {
        arguments["op"] = json!(op);
        let sent = send(&self.questions, &arguments);
        sent.unwrap_or_else(|error| panic!("{op}: the peer has ended: {error}"));
    }

    /// The next answer.
    ///
    /// # Panics
    /// When it is an error, or does not come in time.
    pub fn answer(&mut self, op: &str) -> Value {
        next_answer(&self.answers, op)
    }

    /// Ends it the hard way, as a crash would, and waits until it has ended.
    ///
    /// # Panics
    /// When it has not ended in time.
    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
        let patience = Timespec::try_from(PATIENCE).expect("a short time");
        let mut ends = [PollFd::new(&self.process, PollFlags::IN)];
        let ended = poll(&mut ends, Some(&patience)).expect("a process can be waited for");
        assert_eq!(ended, 1, "a process that was killed runs on");
    }
}

impl Drop for SglangPeer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn python() -> String {
    std::env::var("FERRY_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

/// A connection to the process that forks ranks, where there is one.
fn connection_opt() -> Option<UnixStream> {
    let path = PathBuf::from(std::env::var_os(FORK_SERVER)?);
    let stream = UnixStream::connect(&path);
    Some(stream.unwrap_or_else(|error| panic!("{FORK_SERVER}={}: {error}", path.display())))
}

/// Whether a line of Python runs without an error.
fn runs(program: &str) -> bool {
    match connection_opt() {
        Some(stream) => {
            send(&stream, &json!({ "check": program })).expect("the fork server reads");
            let mut line = String::new();
            let read = BufReader::new(stream).read_line(&mut line);
            read.expect("the fork server answers");
            let answer: Value = serde_json::from_str(&line).expect("answers are JSON");
            answer["ok"] == json!(true)
        }
        None => {
            let mut command = Command::new(python());
            let status = command.args(["-c", program]).stderr(Stdio::null()).status();
            status.is_ok_and(|status| status.success())
        }
    }
}

/// Starts an interpreter for one rank; the stream is its standard input and output.
fn start_process(environment: &BTreeMap<String, String>, configuration: &Value) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    let theirs = OwnedFd::from(theirs);
    let mut child = Command::new(python())
        .arg(conformance_folder().join("peer.py"))
        .arg(configuration.to_string())
        .envs(environment)
        // Compiled once, and not beside the unpacked wheel.
        .env(
            "PYTHONPYCACHEPREFIX",
            releases_folder().with_file_name("pycache"),
        )
        .env_remove("PYTHONDONTWRITEBYTECODE")
        .stdin(theirs.try_clone().expect("a descriptor"))
        .stdout(theirs)
        .spawn()
        .expect("the interpreter starts");
    // Whoever kills the rank learns of its end by itself; this buries it.
    std::thread::spawn(move || child.wait());
    ours
}

fn send(mut stream: &UnixStream, line: &Value) -> std::io::Result<()> {
    stream.write_all(format!("{line}\n").as_bytes())
}

/// Reads lines for as long as somebody wants them.
fn read_answers(stream: &UnixStream) -> Receiver<String> {
    let lines = BufReader::new(stream.try_clone().expect("a descriptor")).lines();
    let (sender, answers) = mpsc::channel();
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    answers
}

fn next_answer(answers: &Receiver<String>, op: &str) -> Value {
    let line = answers.recv_timeout(PATIENCE);
    let line = line.unwrap_or_else(|error| panic!("{op}: no answer: {error}"));
    let answer: Value = serde_json::from_str(&line).expect("answers are JSON");
    assert_eq!(answer["ok"], json!(true), "{op}: {}", answer["error"]);
    answer
}

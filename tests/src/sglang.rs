//! Ranks of SGLang's own classes, each a process of its own: `tests/conformance/peer.py`.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};

use serde_json::{Value, json};

use crate::process::PATIENCE;

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
    child: Child,
    questions: ChildStdin,
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
                "{} is missing: run `make sglang`, or `make test-sglang-releases` for old ones",
                module.display()
            ));
        }
        // Found, not imported: that takes as long as a short test.
        let program = "import importlib.util as i; \
             assert all(map(i.find_spec, 'aiohttp msgpack msgspec numpy requests zmq'.split()))";
        let imported = Command::new(python())
            .args(["-c", program])
            .stderr(Stdio::null())
            .status();
        match imported {
            Ok(status) if status.success() => Ok(()),
            _ => Err(format!(
                "{} lacks what SGLang imports: run `make python`, set FERRY_PYTHON",
                python()
            )),
        }
    }

    /// Whether the interpreter finds `mori` in our wheel; else why not.
    pub fn imports_our_module() -> Result<(), String> {
        let program = "import mori.cpp, ferry.mori_compat as ours; assert mori is ours";
        let imported = Command::new(python())
            .args(["-c", program])
            .stderr(Stdio::null())
            .status();
        match imported {
            Ok(status) if status.success() => Ok(()),
            _ => Err(format!(
                "{} does not find our wheel: run `make wheel`",
                python()
            )),
        }
    }

    /// Starts a rank and waits until it is up; `peer.py` says what the configuration holds.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn start(release: &str, configuration: &Value) -> Self {
        let mut child = Command::new(python())
            .arg(conformance_folder().join("peer.py"))
            .arg(configuration.to_string())
            .env(
                "SGLCONF_SGLANG",
                releases_folder().join(release).join("sglang"),
            )
            // Compiled once, and not beside the unpacked wheel.
            .env(
                "PYTHONPYCACHEPREFIX",
                releases_folder().with_file_name("pycache"),
            )
            .env_remove("PYTHONDONTWRITEBYTECODE")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the interpreter starts");
        let questions = child.stdin.take().expect("it is piped");
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut peer = Self {
            child,
            questions,
            answers,
            up: Value::Null,
        };
        peer.up = peer.answer("up");
        peer
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
        let written = writeln!(self.questions, "{arguments}").and_then(|()| self.questions.flush());
        written.unwrap_or_else(|error| panic!("{op}: the peer has ended: {error}"));
    }

    /// The next answer.
    ///
    /// # Panics
    /// When it is an error, or does not come in time.
    pub fn answer(&mut self, op: &str) -> Value {
        let line = self.answers.recv_timeout(PATIENCE);
        let line = line.unwrap_or_else(|error| panic!("{op}: no answer: {error}"));
        let answer: Value = serde_json::from_str(&line).expect("answers are JSON");
        assert_eq!(answer["ok"], json!(true), "{op}: {}", answer["error"]);
        answer
    }

    /// Ends it the hard way, as a crash would.
    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
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

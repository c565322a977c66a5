//! Whether the process of a peer has exited: the proof that it writes no more.

use std::time::Duration;

use common::wire::EngineDesc;
use io_engine::{Engine, EngineProcess, TransportErrorKind};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How long the peer's engine may take to prove its process, at each try.
const PROOF_TIMEOUT: Duration = Duration::from_secs(3);
/// Wait behind the first try that was not answered in time; it doubles.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// How long what a dead process had sent may take to be thrown away.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How a peer's process ended.
#[derive(Debug)]
pub(crate) struct Exit {
    /// For people.
    pub reason: String,
    /// Whether it is proved that nothing of it lands in this engine's memory any more.
    pub is_proved: bool,
}

/// Waits for the exit of the process that has an engine. `None` when it cannot be watched, or is
/// this process.
pub(super) async fn exit_of(own: Engine, peer: EngineDesc) -> Option<Exit> {
    let key = peer.key.clone();
    let process = proved(peer, PROOF_TIMEOUT, FIRST_WAIT).await?;
    if process.pid().unsigned_abs() == std::process::id() {
        return None;
    }
    #[allow(
        deprecated,
        reason = "it is for types that may change their descriptor; this one owns one for good"
    )]
    let registered = AsyncFd::with_interest(process, Interest::READABLE);
    let watched = match registered {
        Ok(watched) => watched,
        Err(error) => {
            tracing::warn!(peer = key, %error, "the process of a peer cannot be watched");
            return None;
        }
    };
    loop {
        let mut readable = watched.readable().await.ok()?;
        if watched.get_ref().has_exited() {
            break;
        }
        readable.clear_ready();
    }
    let process = watched.into_inner();
    let reason = format!("its process {} has exited", process.pid());
    let is_over = tokio::task::spawn_blocking(move || own.is_over(&process, DRAIN_TIMEOUT));
    Some(Exit {
        reason,
        is_proved: is_over.await.unwrap_or(false),
    })
}

/// The process of a peer, tried again for as long as it may yet answer: one that is stopped, or a
/// host without time for it, must not leave the peer unwatched for good. `None` when it is gone or
/// will never be proved.
async fn proved(
    peer: EngineDesc,
    timeout: Duration,
    first_wait: Duration,
) -> Option<EngineProcess> {
    let mut wait = first_wait;
    loop {
        let asked = peer.clone();
        let found = tokio::task::spawn_blocking(move || EngineProcess::of(&asked, timeout));
        let error = match found.await.ok()? {
            Ok(process) => return Some(process),
            Err(error) => error,
        };
        let may_yet_answer = matches!(
            error.kind(),
            TransportErrorKind::Timeout | TransportErrorKind::Io
        );
        let peer = &peer.key;
        tracing::debug!(peer, %error, may_yet_answer, "the process of a peer is not watched");
        if !may_yet_answer {
            return None;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, Command, Stdio};

    use io_engine::{EngineConfig, TransportKind};
    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);
    const MOMENT: Duration = Duration::from_millis(20);

    /// Says its engine's descriptor in hex and stays until its input ends.
    #[test]
    #[ignore = "started by the tests below as a peer process"]
    fn peer_process() {
        let mut config = EngineConfig::new("watched", "127.0.0.1");
        config.tcp_bind = ([127, 0, 0, 1], 0).into();
        config.transports = vec![TransportKind::Shm];
        let engine = Engine::start(config).expect("an engine starts");
        let packed = engine.desc().pack().expect("it is packed");
        println!("said {}", hex::encode(&packed[..]));
        // Its end is the end of the test that started it.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    }

    /// Ended with the test.
    struct Peer(Child);

    impl Peer {
        fn start() -> (Self, EngineDesc) {
            let name = "rank::exits::tests::peer_process";
            let mut child = Command::new(std::env::current_exe().expect("it runs"))
                .args(["--exact", name, "--ignored", "--nocapture"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("this program starts");
            let output = BufReader::new(child.stdout.take().expect("it is a pipe"));
            let peer = Self(child);
            let said = output.lines().map(|line| line.expect("it is text"));
            let mut hex = said.filter_map(|line| Some(line.split_once("said ")?.1.to_owned()));
            let hex = hex.next().expect("it says what it is");
            let bytes = hex::decode(hex).expect("hex");
            let desc = EngineDesc::unpack(&bytes).expect("a descriptor");
            (peer, desc)
        }

        fn signal(&self, signal: Signal) {
            let pid = Pid::from_child(&self.0);
            kill_process(pid, signal).expect("it was not waited for");
        }
    }

    impl Drop for Peer {
        fn drop(&mut self) {
            self.0.kill().expect("it was not waited for");
            self.0.wait().expect("it ends");
        }
    }

    #[tokio::test]
    async fn a_peer_that_does_not_answer_at_first_is_watched_once_it_does() {
        let (peer, desc) = Peer::start();
        peer.signal(Signal::STOP);
        let mut proof = Box::pin(proved(desc, MOMENT, MOMENT));
        let early = tokio::time::timeout(10 * MOMENT, &mut proof).await;
        early.expect_err("it is stopped, and is asked again");
        peer.signal(Signal::CONT);
        let process = tokio::time::timeout(DEADLINE, proof).await;
        let process = process.expect("it answers in time").expect("it is proved");
        assert_eq!(process.pid().unsigned_abs(), peer.0.id());
    }

    #[tokio::test]
    async fn a_peer_that_is_gone_is_not_asked_for_ever() {
        let (peer, desc) = Peer::start();
        drop(peer);
        let proof = tokio::time::timeout(DEADLINE, proved(desc, MOMENT, MOMENT)).await;
        assert!(proof.expect("it gives up").is_none());
    }
}

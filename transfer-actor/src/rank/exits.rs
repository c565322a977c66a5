//! Whether the process of a peer has exited: the proof that it writes no more.

use std::time::Duration;

use common::wire::EngineDesc;
use io_engine::{Engine, EngineProcess};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How long the peer's engine may take to prove its process.
const PROOF_TIMEOUT: Duration = Duration::from_secs(3);
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
    let found = tokio::task::spawn_blocking(move || EngineProcess::of(&peer, PROOF_TIMEOUT));
    let process = match found.await.ok()? {
        Ok(process) => process,
        Err(error) => {
            tracing::debug!(peer = key, %error, "the process of a peer cannot be watched");
            return None;
        }
    };
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

//! Whether another engine's process still lives.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use common::wire::EngineDesc;

use crate::error::TransportError;
use crate::offer::Offer;
use crate::sys;
use crate::transport::same_host;

/// A process of this host that has an engine. It becomes readable when the process has exited: then
/// the kernel has taken its memory, its mappings and its connections, and nothing of it writes any
/// more. One that is only stopped has not exited.
#[derive(Debug)]
pub struct EngineProcess {
    pid: i32,
    pidfd: OwnedFd,
    instance: [u8; 16],
    #[cfg(feature = "rdma")]
    engine_key: String,
}

impl EngineProcess {
    /// Proves which process of this host has the engine, over the engine's own socket. Blocks; call
    /// it from a thread that may.
    ///
    /// # Errors
    /// When the engine is on another host, in another pid namespace, of another user, no engine of
    /// ours, offers no transport of one host, or is gone.
    pub fn of(desc: &EngineDesc, timeout: Duration) -> Result<Self, TransportError> {
        let offer = Offer::of(desc)?.ok_or_else(|| {
            TransportError::quiesced(
                crate::error::TransportErrorKind::Unreachable,
                format!("engine {} is no ferry engine", desc.key),
            )
        })?;
        let (pid, pidfd) = same_host::prove(&offer.unix_name, offer.instance, timeout)?;
        Ok(Self {
            pid,
            pidfd,
            instance: offer.instance,
            #[cfg(feature = "rdma")]
            engine_key: desc.key.clone(),
        })
    }

    /// Its number, as this process sees it.
    pub const fn pid(&self) -> i32 {
        self.pid
    }

    pub(crate) const fn instance(&self) -> &[u8; 16] {
        &self.instance
    }

    #[cfg(feature = "rdma")]
    pub(crate) fn engine_key(&self) -> &str {
        &self.engine_key
    }

    /// Whether it has exited. Asks the kernel.
    pub fn has_exited(&self) -> bool {
        sys::has_exited(self.pidfd.as_fd())
    }
}

impl AsFd for EngineProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl AsRawFd for EngineProcess {
    fn as_raw_fd(&self) -> RawFd {
        self.pidfd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Engine, EngineConfig};
    use crate::transport::TransportKind;

    const TIMEOUT: Duration = Duration::from_secs(5);

    fn engine(transports: &[TransportKind]) -> Engine {
        let mut config = EngineConfig::new("watched", "127.0.0.1");
        config.tcp_bind = ([127, 0, 0, 1], 0).into();
        config.transports = transports.to_vec();
        Engine::start(config).expect("an engine starts")
    }

    #[test]
    fn the_process_behind_an_engine_is_known_by_its_own_socket() {
        let engine = engine(&[TransportKind::Shm, TransportKind::Tcp]);
        let found = EngineProcess::of(&engine.desc(), TIMEOUT).expect("it is this process");
        assert_eq!(found.pid(), std::process::id() as i32);
        assert!(!found.has_exited());
    }

    #[test]
    fn who_cannot_be_proved_is_not_watched() {
        let tcp_only = engine(&[TransportKind::Tcp]);
        EngineProcess::of(&tcp_only.desc(), TIMEOUT).expect_err("it has no such socket");
        let mut other = engine(&[TransportKind::Shm]).desc();
        EngineProcess::of(&other, TIMEOUT).expect_err("it is gone");
        other.extra.clear();
        EngineProcess::of(&other, TIMEOUT).expect_err("it is no engine of ours");
    }
}

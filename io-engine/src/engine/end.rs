//! How an engine ends, and how it ends what a dead peer had begun.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::{ENGINES, Engine, EngineInner};
use crate::error::{TransportError, TransportErrorKind};
use crate::process::EngineProcess;
use crate::status::deadline_after;

/// How often an ended connection is looked at until its thread has left.
const END_POLL: Duration = Duration::from_millis(1);

/// How a connection says which engine writes by it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// By its start, over `tcp`.
    Instance([u8; 16]),
    /// By its key, in MoRI's control messages. The queue pairs that these made are destroyed before
    /// the connection's thread lets go of it.
    #[cfg(feature = "rdma")]
    Key(String),
}

impl Writer {
    fn is_of(&self, process: &EngineProcess) -> bool {
        match self {
            Self::Instance(instance) => instance == process.instance(),
            #[cfg(feature = "rdma")]
            Self::Key(key) => key == process.engine_key(),
        }
    }
}

impl Engine {
    /// Whether nothing that this process had begun can land in this engine's regions any more. Its
    /// exit ends what it copied itself (`shm`, `cma`); what it had sent over `tcp` or `rdma` may
    /// still be on its way, so its connections are ended here, with the queue pairs that they made,
    /// and waited for. Blocks for at most `timeout`. Never true while the process lives.
    pub fn is_over(&self, process: &EngineProcess, timeout: Duration) -> bool {
        process.has_exited() && self.inner().end_writer(process, deadline_after(timeout))
    }

    /// Ends the engine: its listeners, sessions and workers. Batches in flight fail. Peers that
    /// write by `shm` or `cma` are told; what they were told of stays mapped until they have let go.
    pub fn shutdown(&self) {
        self.inner().shutdown();
    }
}

impl EngineInner {
    /// Remembers who writes by a connection, for as long as its thread holds it.
    pub(crate) fn note_writer(&self, stream: &Arc<TcpStream>, writer: Writer) {
        let mut writers = self.writers();
        writers.retain(|(_, stream)| stream.strong_count() > 0);
        writers.push((writer, Arc::downgrade(stream)));
    }

    fn writers(&self) -> MutexGuard<'_, Vec<(Writer, Weak<TcpStream>)>> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connections of an engine, and waits until their threads have let go of the regions.
    fn end_writer(&self, process: &EngineProcess, deadline: Instant) -> bool {
        loop {
            let writers = self.writers();
            let own = writers.iter().filter(|(writer, _)| writer.is_of(process));
            let open: Vec<_> = own.filter_map(|(_, stream)| stream.upgrade()).collect();
            drop(writers);
            if open.is_empty() {
                return true;
            }
            for stream in open {
                // It may have ended already; either way its thread sees the end.
                let _ = stream.shutdown(Shutdown::Both);
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(END_POLL);
        }
    }

    pub(super) fn shutdown(&self) {
        if self.is_shut_down.swap(true, Ordering::AcqRel) {
            return;
        }
        ENGINES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.instance);
        self.copies.close(&TransportError::quiesced(
            TransportErrorKind::Closed,
            "the engine was shut down",
        ));
        self.timer.end();
        for session in taken(&self.sessions) {
            session.close();
        }
        #[cfg(feature = "rdma")]
        if let Ok(rails) = &self.rails {
            // Before peers' connections are closed, whose end tells them that nothing of theirs
            // comes in any more.
            rails.end_accepted();
        }
        for stream in taken(&self.tcp_peers) {
            // The peer may have closed it already; either way its thread ends.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for connection in taken(&self.same_host_peers) {
            connection.end();
        }
        // The listeners' threads block in accept: a connection makes them look at the flag.
        let wake = match self.tcp_address.ip() {
            ip if ip.is_unspecified() && ip.is_ipv6() => {
                SocketAddr::from(([0u16, 0, 0, 0, 0, 0, 0, 1], self.tcp_address.port()))
            }
            ip if ip.is_unspecified() => {
                SocketAddr::from(([127, 0, 0, 1], self.tcp_address.port()))
            }
            _ => self.tcp_address,
        };
        if self.listens()
            && let Err(error) = TcpStream::connect_timeout(&wake, Duration::from_secs(1))
        {
            tracing::debug!(%error, "the tcp listener could not be woken");
        }
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&self.unix_name);
        if self
            .config
            .transports
            .iter()
            .any(|kind| kind.is_same_host())
            && let Err(error) = address.and_then(|address| UnixStream::connect_addr(&address))
        {
            tracing::debug!(%error, "the same-host listener could not be woken");
        }
    }
}

fn taken<T: ?Sized>(list: &Mutex<Vec<Weak<T>>>) -> Vec<Arc<T>> {
    let list = std::mem::take(&mut *list.lock().unwrap_or_else(PoisonError::into_inner));
    list.iter().filter_map(Weak::upgrade).collect()
}

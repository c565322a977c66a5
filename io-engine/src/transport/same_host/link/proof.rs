//! Proof that a process of this host has an engine.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde_bytes::ByteBuf;

use crate::error::{TransportError, TransportErrorKind};
use crate::region::TAG_MAGIC;
use crate::sys;
use crate::transport::cma::explain;
use crate::transport::same_host::{
    MAX_TO_WRITER_BYTES, ToOwner, ToWriter, Way, is_meant, receive, send,
};

/// The process that has an engine's socket, pinned; nothing of it is reached into.
pub(crate) fn prove(
    name: &str,
    instance: [u8; 16],
    timeout: Duration,
) -> Result<(i32, OwnedFd), TransportError> {
    let failed = |what: &str| {
        let what = format!("same-host proof over @{name}: {what}");
        move |error: io::Error| TransportError::io(what, &error)
    };
    let refused = |kind, what: &str| {
        TransportError::quiesced(kind, format!("same-host proof over @{name}: {what}"))
    };
    let stream = connect_within(name, timeout).map_err(failed("connect"))?;
    let credentials = sys::peer_credentials(&stream).map_err(failed("credentials"))?;
    if credentials.pid <= 0 {
        let what = "the peer is in another pid namespace";
        return Err(refused(TransportErrorKind::Unreachable, what));
    }
    let pidfd = sys::pidfd(credentials.pid).map_err(failed("pidfd_open"))?;
    let hello = ToOwner::Hello(TAG_MAGIC.to_owned(), ByteBuf::from(instance), Way::Mapping);
    send(&stream, &hello).map_err(failed("hello"))?;
    // The answer also shows that the process lived after the pidfd was taken.
    let answer = receive(&stream, MAX_TO_WRITER_BYTES).map_err(failed("welcome"))?;
    match answer {
        ToWriter::Welcome(magic, told, ..) if is_meant(&magic, &told, &instance) => {
            Ok((credentials.pid, pidfd))
        }
        _ => Err(refused(
            TransportErrorKind::Protocol,
            "the socket belongs to another engine than the descriptor",
        )),
    }
}

/// Reads the peer's secret in its memory, as proof that its memory can be reached.
pub(super) fn prove_reach(pid: i32, address: u64, secret: &[u8]) -> Result<(), TransportError> {
    let mut seen = [0; 16];
    let read = sys::read_from_process(pid, address, &mut seen)
        .map_err(|error| explain("process_vm_readv from", pid, &error))?;
    if read != seen.len() || *secret != seen {
        return Err(TransportError::quiesced(
            TransportErrorKind::Protocol,
            format!("the memory of process {pid} does not hold what its socket says"),
        ));
    }
    Ok(())
}

/// A Unix socket's connect waits while the listener's backlog is full, so it needs a timeout too.
pub(super) fn connect_within(name: &str, timeout: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(timeout))?;
    rustix::net::connect(&socket, &address)?;
    Ok(UnixStream::from(socket))
}

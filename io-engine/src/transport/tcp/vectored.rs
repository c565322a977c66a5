//! Whole vectored sends and receives over a stream.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Instant;

use crate::sys::{self, IoVec};

/// Sends every range.
///
/// # Safety
/// The ranges must be readable for the length of the call.
pub(crate) unsafe fn send_all(stream: &TcpStream, vectors: &mut [IoVec]) -> io::Result<()> {
    let mut rest = vectors;
    while !rest.is_empty() {
        let batch = rest
            .get(..rest.len().min(sys::MAX_VECTORS))
            .unwrap_or_default();
        // SAFETY: the caller guarantees the ranges; `advance` only takes from their fronts.
        let sent = match unsafe { sys::send_vectored(stream.as_fd(), batch) } {
            Ok(sent) => sent,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        rest = sys::advance(rest, sent);
    }
    Ok(())
}

/// Receives until every range is full; fails when the stream ends, or goes on beyond a deadline.
///
/// # Safety
/// The ranges must be writable for the length of the call, and no reference to them may exist.
pub(crate) unsafe fn receive_all(
    stream: &TcpStream,
    vectors: &mut [IoVec],
    deadline: Instant,
) -> io::Result<()> {
    let mut rest = vectors;
    while !rest.is_empty() {
        let batch = rest
            .get(..rest.len().min(sys::MAX_VECTORS))
            .unwrap_or_default();
        // SAFETY: the caller guarantees the ranges; `advance` only takes from their fronts.
        let received = match unsafe { sys::receive_vectored(stream.as_fd(), batch) } {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        rest = sys::advance(rest, received);
        if !rest.is_empty() && Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

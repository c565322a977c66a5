//! Between any two hosts: several streams to a peer, payload sent straight out of the pool
//! and received straight into it; through pinned buffers where the pool is a device's memory, with
//! copies of some pieces under way while others are on the wire.
//!
//! When one lane dies the session is dead: which bytes have landed is not known, so its batches
//! fail without the proof that writes have stopped, unless the peer's refusal says so.

mod lane;
pub(crate) mod server;
mod vectored;
mod wire;

#[cfg(fuzzing)]
pub use wire::read_any as read_any_framing;

use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;

use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Location, RemoteRegion};
use crate::session::Job;
use crate::status::Status;
use crate::transport::tcp::lane::Lanes;
use crate::transport::tcp::wire::WELCOME_BYTES;
use crate::transport::{Transport, TransportKind};

/// A silent connection is probed after this time.
const PROBE_AFTER_IDLE: Duration = Duration::from_secs(5);
/// Time between two probes that got no answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// Where the kernel takes no limit in time, so many probes without an answer end a connection.
const PROBES_UNTIL_DEAD: u32 = 3;

/// How a session connects.
pub(crate) struct TcpOptions {
    pub lanes: usize,
    pub connect_timeout: Duration,
    /// A peer that takes or answers nothing for this long is stuck.
    pub stall_timeout: Duration,
}

/// A connection to an engine on any host.
pub(crate) struct Tcp {
    lanes: Arc<Lanes>,
}

impl Tcp {
    /// Opens all lanes; blocks at most the connect timeout for each address and lane.
    pub(crate) fn connect(
        host: &str,
        port: u16,
        (instance, own_instance): (&[u8; 16], &[u8; 16]),
        options: &TcpOptions,
    ) -> Result<Self, TransportError> {
        let what = format!("tcp to {host}:{port}");
        let failed = |error: io::Error| TransportError::io(&what, &error);
        let hello = wire::hello(instance, own_instance);
        // Some write an IPv6 address in the brackets that it has in a URL.
        let bare_host = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        let addresses = (bare_host, port).to_socket_addrs().map_err(failed)?;
        let addresses: Vec<SocketAddr> = addresses.collect();
        let mut streams = Vec::with_capacity(options.lanes);
        let mut peer = None;
        for _ in 0..options.lanes.max(1) {
            let (stream, address) = connect_any(&addresses, &hello, options).map_err(failed)?;
            peer = Some(address);
            streams.push(stream);
        }
        let peer = peer.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let lanes = Lanes::start(streams, peer, options.stall_timeout).map_err(failed)?;
        Ok(Self { lanes })
    }
}

fn connect_any(
    addresses: &[SocketAddr],
    hello: &[u8],
    options: &TcpOptions,
) -> io::Result<(TcpStream, SocketAddr)> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses {
        match connect_one(address, hello, options) {
            Ok(stream) => return Ok((stream, *address)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn connect_one(address: &SocketAddr, hello: &[u8], options: &TcpOptions) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(address, options.connect_timeout)?;
    stream.set_nodelay(true)?;
    notice_dead_hosts(&stream, options.stall_timeout)?;
    stream.set_read_timeout(Some(options.connect_timeout))?;
    stream.set_write_timeout(Some(options.stall_timeout))?;
    io::Write::write_all(&mut stream, hello)?;
    let mut welcome = [0; WELCOME_BYTES];
    stream.read_exact(&mut welcome)?;
    wire::check_welcome(&welcome)?;
    stream.set_read_timeout(Some(options.stall_timeout))?;
    Ok(stream)
}

/// Lets the kernel end a connection whose host has acknowledged nothing for so long, whether
/// something was sent to it or not: a host may vanish without a word.
pub(crate) fn notice_dead_hosts(stream: &TcpStream, stall_timeout: Duration) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, PROBES_UNTIL_DEAD)?;
    // The kernel keeps it in an `int`.
    let milliseconds = i32::try_from(stall_timeout.as_millis()).unwrap_or(i32::MAX);
    sockopt::set_tcp_user_timeout(stream, milliseconds.unsigned_abs())?;
    Ok(())
}

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    /// Device memory goes through pinned buffers, on each side for itself.
    fn can_move(&self, _local: Location, _remote: &RemoteRegion) -> bool {
        true
    }

    fn submit(&self, job: Job, status: Arc<Status>) {
        if job.pairs.iter().any(|pair| pair.remote.key_opt.is_none()) {
            return status.fail(TransportError::quiesced(
                TransportErrorKind::BadKey,
                "tcp needs the key of each remote region, and a descriptor holds none",
            ));
        }
        self.lanes.submit(job, status);
    }

    fn is_alive(&self) -> bool {
        self.lanes.queue.closed_reason().is_none() && self.lanes.are_connected()
    }

    fn close(&self) {
        self.lanes.fail(&TransportError::unproved(
            TransportErrorKind::Closed,
            "the session was closed",
        ));
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.close();
    }
}

//! Control messages over TCP, from the side that asks.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use common::wire::rdma_control::{
    ControlTag, ControlType, HEADER_BYTES, framed, parse_header, unpack,
};
use serde::de::DeserializeOwned;
use serde::ser::Serialize;

use crate::error::{TransportError, TransportErrorKind};
use crate::transport::tcp::notice_dead_hosts;
use crate::transport::tcp::server::STALL_TIMEOUT;

/// Where a peer answers.
#[derive(Clone, Debug)]
pub(crate) struct PeerAddress {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// A Ferry engine keeps the connection; MoRI closes it after each reply.
    pub(crate) is_ferry: bool,
    pub(crate) timeout: Duration,
}

/// The connection to a peer's listener.
pub(crate) struct ControlClient {
    peer: PeerAddress,
    stream_opt: Option<Arc<TcpStream>>,
    /// Whether the peer closed the connection.
    is_closed: bool,
}

impl ControlClient {
    pub(crate) fn new(peer: PeerAddress) -> Self {
        Self {
            peer,
            stream_opt: None,
            is_closed: false,
        }
    }

    /// The connection that a Ferry engine keeps.
    pub(crate) fn stream(&self) -> Option<&Arc<TcpStream>> {
        self.stream_opt.as_ref()
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask<T: DeserializeOwned>(
        &mut self,
        kind: ControlType,
        body: &impl Serialize,
    ) -> Result<T, TransportError> {
        let PeerAddress { host, port, .. } = &self.peer;
        let what = format!("rdma control connection to {host}:{port}");
        let failed = |error: io::Error| TransportError::io(&what, &error);
        let said = |error: common::wire::WireError| {
            TransportError::quiesced(TransportErrorKind::Protocol, format!("{what}: {error}"))
        };
        let message = framed(kind, body).map_err(said)?;
        let stream = match self.stream_opt.take() {
            Some(stream) => stream,
            None => Arc::new(self.connect().map_err(failed)?),
        };
        let answer = (&*stream).write_all(&message);
        let answer = answer.and_then(|()| receive(&stream)).map_err(failed);
        self.is_closed = answer
            .as_ref()
            .is_err_and(|error| error.kind() == TransportErrorKind::PeerDead);
        let (answered, body) = answer?.map_err(said)?;
        if answered != kind {
            return Err(TransportError::quiesced(
                TransportErrorKind::Protocol,
                format!("{what}: {kind:?} was answered with {answered:?}"),
            ));
        }
        if self.peer.is_ferry {
            self.stream_opt = Some(stream);
        }
        unpack(&body).map_err(said)
    }

    /// Ends the connection, and waits until a Ferry engine has closed its end: it destroys the
    /// queue pairs of the connection before, and if it was killed, its kernel does. Whether it has
    /// closed it in time.
    pub(crate) fn finish(&mut self) -> bool {
        let Some(stream) = self.stream_opt.take() else {
            return self.is_closed;
        };
        // Fails only when the connection has ended already; the read then says how.
        let _ = stream.shutdown(Shutdown::Write);
        let ended = (&*stream).read(&mut [0]);
        let is_reset = |error: io::Error| error.kind() == io::ErrorKind::ConnectionReset;
        ended.map_or_else(is_reset, |bytes| bytes == 0)
    }

    fn connect(&self) -> io::Result<TcpStream> {
        let host = self.peer.host.trim_start_matches('[').trim_end_matches(']');
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in (host, self.peer.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, self.peer.timeout) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    notice_dead_hosts(&stream, STALL_TIMEOUT)?;
                    stream.set_read_timeout(Some(self.peer.timeout))?;
                    stream.set_write_timeout(Some(self.peer.timeout))?;
                    return Ok(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// A message; the inner error says that it is none.
pub(crate) fn receive(
    mut stream: &TcpStream,
) -> io::Result<Result<(ControlType, Vec<u8>), common::wire::WireError>> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let (kind, length) = match parse_header(header) {
        Ok(parsed) => parsed,
        Err(error) => return Ok(Err(error)),
    };
    // Bounded by the parser.
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok(Ok((kind, body)))
}

/// Kinds of failures that an engine tells a peer of.
const TOLD: [TransportErrorKind; 3] = [
    TransportErrorKind::NotRegistered,
    TransportErrorKind::BadKey,
    TransportErrorKind::PermissionDenied,
];

/// A refusal, for a tag.
pub(crate) fn refusal(error: &TransportError) -> String {
    format!("{}: {error}", error.kind().name())
}

/// Why a Ferry engine refused.
pub(crate) fn check_refusal(tag_opt: Option<&ControlTag>) -> Result<(), TransportError> {
    let Some(tag) = tag_opt.filter(|tag| !tag.refusal.is_empty()) else {
        return Ok(());
    };
    let (word, text) = tag.refusal.split_once(": ").unwrap_or(("", &tag.refusal));
    let kind = TOLD.into_iter().find(|kind| kind.name() == word);
    Err(TransportError::quiesced(
        kind.unwrap_or(TransportErrorKind::Unreachable),
        format!("the peer refused: {text}"),
    ))
}

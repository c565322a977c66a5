//! Between any two hosts: several streams to a peer, payload sent straight out of the pool.
//!
//! Each lane is a connection with a thread. A lane takes pieces from the session's queue, keeps a
//! few of them unanswered, and blocks on the queue when there is nothing to do. When one lane
//! dies the session is dead: which bytes have landed is not known, so its batches fail without
//! the proof that writes have stopped, unless the peer's refusal says so.

pub(crate) mod server;
mod wire;

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;

use crate::error::{TransportError, TransportErrorKind};
use crate::region::RegionKey;
use crate::session::WritePair;
use crate::status::Status;
use crate::sys::{self, IoVec, io_vec};
use crate::transport::queue::Taken;
use crate::transport::tcp::wire::{ANSWER_BYTES, AnswerCode, Group, WELCOME_BYTES, WriteHeader};
use crate::transport::{BatchQueue, Piece, Transport, TransportKind};

/// Pieces that a lane sends before it waits for the oldest one's answer.
const UNANSWERED_PIECES: usize = 4;
/// A silent connection is probed after this time.
const PROBE_AFTER_IDLE: Duration = Duration::from_secs(30);
/// Time between two probes that got no answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// So many probes without an answer end the connection.
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
    shared: Arc<Shared>,
}

struct Shared {
    queue: BatchQueue<()>,
    streams: Vec<Arc<TcpStream>>,
    peer: SocketAddr,
}

impl Tcp {
    /// Opens all lanes; blocks at most the connect timeout for each address and lane.
    pub(crate) fn connect(
        host: &str,
        port: u16,
        instance: &[u8; 16],
        options: &TcpOptions,
    ) -> Result<Self, TransportError> {
        let what = format!("tcp to {host}:{port}");
        let failed = |error: io::Error| TransportError::io(&what, &error);
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
            let (stream, address) = connect_any(&addresses, instance, options).map_err(failed)?;
            peer = Some(address);
            streams.push(Arc::new(stream));
        }
        let peer = peer.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let session = Self {
            shared: Arc::new(Shared {
                queue: BatchQueue::default(),
                streams,
                peer,
            }),
        };
        for stream in &session.shared.streams {
            let lane = Lane {
                stream: Arc::clone(stream),
                shared: Arc::clone(&session.shared),
                unanswered: VecDeque::new(),
                next: 0,
            };
            std::thread::Builder::new()
                .name("ferry-send".to_owned())
                .spawn(move || lane.run())
                .map_err(failed)?;
        }
        Ok(session)
    }
}

fn connect_any(
    addresses: &[SocketAddr],
    instance: &[u8; 16],
    options: &TcpOptions,
) -> io::Result<(TcpStream, SocketAddr)> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses {
        match connect_one(address, instance, options) {
            Ok(stream) => return Ok((stream, *address)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn connect_one(
    address: &SocketAddr,
    instance: &[u8; 16],
    options: &TcpOptions,
) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(address, options.connect_timeout)?;
    stream.set_nodelay(true)?;
    notice_dead_hosts(&stream)?;
    stream.set_read_timeout(Some(options.connect_timeout))?;
    stream.set_write_timeout(Some(options.stall_timeout))?;
    io::Write::write_all(&mut stream, &wire::hello(instance))?;
    let mut welcome = [0; WELCOME_BYTES];
    stream.read_exact(&mut welcome)?;
    wire::check_welcome(&welcome)?;
    stream.set_read_timeout(Some(options.stall_timeout))?;
    Ok(stream)
}

/// Lets the kernel probe an idle connection, so that a host which vanished without a word is
/// noticed although nothing is sent.
fn notice_dead_hosts(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, PROBES_UNTIL_DEAD)?;
    Ok(())
}

impl Shared {
    /// Ends the session for all lanes.
    fn fail(&self, error: &TransportError) {
        self.queue.close(error);
        for stream in &self.streams {
            // Already closed by the peer, perhaps; what matters is that nobody waits on it.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn submit(&self, pairs: Vec<WritePair>, status: Arc<Status>) {
        if pairs.iter().any(|pair| pair.remote.key_opt.is_none()) {
            return status.fail(TransportError::quiesced(
                TransportErrorKind::BadKey,
                "tcp needs the key of each remote region, and a descriptor holds none",
            ));
        }
        self.shared.queue.push(pairs, status, ());
    }

    fn is_alive(&self) -> bool {
        let connected = self
            .shared
            .streams
            .iter()
            .all(|stream| sys::is_connected(stream.as_fd()));
        self.shared.queue.closed_reason().is_none() && connected
    }

    fn close(&self) {
        self.shared.fail(&TransportError::unproved(
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

/// A piece that the peer has not answered.
struct Unanswered {
    id: u64,
    status: Arc<Status>,
    /// Keeps the source regions until the peer has everything.
    _pairs: Arc<[WritePair]>,
}

struct Lane {
    stream: Arc<TcpStream>,
    shared: Arc<Shared>,
    unanswered: VecDeque<Unanswered>,
    next: u64,
}

impl Lane {
    fn run(mut self) {
        let mut piece = Piece::default();
        let mut header = Vec::new();
        loop {
            // With answers owed, an empty queue is left at once to read them.
            let timeout = if self.unanswered.is_empty() {
                None
            } else {
                Some(Duration::ZERO)
            };
            let outcome = match self.shared.queue.take(&mut piece, timeout) {
                Taken::Closed => break,
                Taken::Nothing => self.read_answer(),
                Taken::Piece {
                    pairs,
                    status,
                    work: (),
                } => {
                    let id = self.next;
                    self.next += 1;
                    // Owed from here on, whatever happens while it is sent.
                    self.unanswered.push_back(Unanswered {
                        id,
                        status,
                        _pairs: Arc::clone(&pairs),
                    });
                    match self.send_piece(id, &pairs, &piece, &mut header) {
                        Ok(()) if self.unanswered.len() >= UNANSWERED_PIECES => self.read_answer(),
                        other => other,
                    }
                }
            };
            if let Err(error) = outcome {
                let what = format!("tcp to {}", self.shared.peer);
                self.shared
                    .fail(&TransportError::io(what, &error).without_proof());
                break;
            }
        }
    }

    fn send_piece(
        &self,
        id: u64,
        pairs: &[WritePair],
        piece: &Piece,
        header: &mut Vec<u8>,
    ) -> io::Result<()> {
        let mut vectors: Vec<IoVec> = Vec::with_capacity(piece.ranges.len() + 1);
        vectors.push(io_vec(0, 0));
        let mut groups: Vec<Group> = Vec::new();
        let mut last_pair = None;
        for range in &piece.ranges {
            let Some(pair) = pairs.get(range.pair) else {
                continue;
            };
            let address = pair
                .local
                .address(range.src, range.len)
                .map_err(io::Error::other)?;
            vectors.push(io_vec(address as u64, range.len));
            match groups.last_mut().filter(|_| last_pair == Some(range.pair)) {
                Some(group) => group.ranges += 1,
                None => {
                    // `submit` refused pairs without a key.
                    let key = pair.remote.key_opt.unwrap_or(RegionKey([0; 16]));
                    groups.push(Group {
                        region: pair.remote.id,
                        key,
                        ranges: 1,
                    });
                    last_pair = Some(range.pair);
                }
            }
        }
        header.clear();
        let fixed = WriteHeader {
            piece: id,
            groups: groups.len() as u32,
            ranges: piece.ranges.len() as u32,
            payload: piece.bytes,
        };
        fixed.put(header);
        groups.iter().for_each(|group| group.put(header));
        piece
            .ranges
            .iter()
            .for_each(|range| wire::put_range(header, range.dst, range.len));
        if let Some(first) = vectors.first_mut() {
            *first = io_vec(header.as_ptr() as u64, header.len() as u64);
        }
        self.send_all(&mut vectors)
    }

    fn send_all(&self, vectors: &mut [IoVec]) -> io::Result<()> {
        let mut first = 0;
        while let Some(rest) = vectors.get_mut(first..) {
            if rest.is_empty() {
                break;
            }
            // SAFETY: the first range is the caller's header buffer; the others were made from
            // checked addresses of regions that the caller's pairs keep mapped.
            let sent = unsafe { sys::send_vectored(self.stream.as_fd(), rest) };
            let mut sent = match sent {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            for vector in rest {
                let step = sent.min(vector.iov_len);
                vector.iov_base = vector.iov_base.wrapping_byte_add(step);
                vector.iov_len -= step;
                sent -= step;
                if vector.iov_len > 0 {
                    break;
                }
                first += 1;
            }
        }
        Ok(())
    }

    /// Reads the oldest piece's answer.
    fn read_answer(&mut self) -> io::Result<()> {
        let mut fixed = [0; ANSWER_BYTES];
        (&*self.stream).read_exact(&mut fixed)?;
        let (id, code, text_len) = wire::parse_answer(&fixed)?;
        let mut text = vec![0; text_len];
        (&*self.stream).read_exact(&mut text)?;
        let Some(oldest) = self.unanswered.pop_front() else {
            return Err(io::Error::other("an answer that nothing asked for"));
        };
        let unexpected = oldest.id != id;
        let text = String::from_utf8_lossy(&text);
        let refused = |kind| {
            let message = format!("{} refused a write: {text}", self.shared.peer);
            Err(TransportError::quiesced(kind, message))
        };
        oldest.status.piece_done(match code {
            _ if unexpected => {
                refused(TransportErrorKind::Protocol).map_err(TransportError::without_proof)
            }
            AnswerCode::Done => Ok(()),
            AnswerCode::NotRegistered => refused(TransportErrorKind::NotRegistered),
            AnswerCode::BadKey => refused(TransportErrorKind::BadKey),
            AnswerCode::OutOfBounds => refused(TransportErrorKind::OutOfBounds),
            AnswerCode::Unknown(_) => {
                refused(TransportErrorKind::Protocol).map_err(TransportError::without_proof)
            }
        });
        if unexpected {
            Err(io::Error::other("answers came out of order"))
        } else {
            Ok(())
        }
    }
}

impl Drop for Lane {
    /// Also after a panic: a session without one of its lanes is dead, and what the peer has not
    /// answered may still land.
    fn drop(&mut self) {
        self.shared.fail(&TransportError::unproved(
            TransportErrorKind::Io,
            format!("a lane to {} ended", self.shared.peer),
        ));
        let Some(first_cause) = self.shared.queue.closed_reason() else {
            return;
        };
        let lost = first_cause.without_proof();
        for unanswered in self.unanswered.drain(..) {
            unanswered.status.piece_done(Err(lost.clone()));
        }
    }
}

//! Between any two hosts: several streams to a peer, payload sent straight out of the pool
//! and received straight into it.
//!
//! Each lane is a connection with a thread. A lane takes pieces from the session's queue, keeps a
//! few of them unanswered, and blocks on the queue when there is nothing to do. When one lane
//! dies the session is dead: which bytes have landed is not known, so its batches fail without
//! the proof that writes have stopped, unless the peer's refusal says so.

pub(crate) mod server;
mod vectored;
mod wire;

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use crate::error::{TransportError, TransportErrorKind};
use crate::region::RegionKey;
use crate::session::{Direction, Job};
use crate::status::Status;
use crate::sys::{self, IoVec, io_vec};
use crate::transport::queue::{PieceRange, Taken};
use crate::transport::tcp::vectored::{receive_all, send_all};
use crate::transport::tcp::wire::{ANSWER_BYTES, AnswerCode, Group, RequestHeader, WELCOME_BYTES};
use crate::transport::{BatchQueue, Piece, Transport, TransportKind};

/// Pieces that a lane has asked for before it waits for the oldest one's answer.
const UNANSWERED_PIECES: usize = 64;
/// Their bytes, all but the last piece's.
const UNANSWERED_BYTES: u64 = 1 << 20;
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
                unanswered_bytes: 0,
                next: 0,
                stall_timeout: options.stall_timeout,
                header: Vec::new(),
                vectors: Vectors::default(),
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

    fn submit(&self, job: Job, status: Arc<Status>) {
        if job.pairs.iter().any(|pair| pair.remote.key_opt.is_none()) {
            return status.fail(TransportError::quiesced(
                TransportErrorKind::BadKey,
                "tcp needs the key of each remote region, and a descriptor holds none",
            ));
        }
        self.shared.queue.push(job, status, ());
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
    /// Keeps the local regions until the peer has everything, or this side has.
    job: Arc<Job>,
    bytes: u64,
    /// Of a read: where its payload goes.
    ranges: Vec<PieceRange>,
}

struct Lane {
    stream: Arc<TcpStream>,
    shared: Arc<Shared>,
    unanswered: VecDeque<Unanswered>,
    unanswered_bytes: u64,
    next: u64,
    stall_timeout: Duration,
    // Reused from piece to piece.
    header: Vec<u8>,
    vectors: Vectors,
}

/// Addresses for one call. They are only valid during the call that they were made for.
#[derive(Default)]
struct Vectors(Vec<IoVec>);

// SAFETY: the addresses are never dereferenced except by the call that they were just made for, on
// the same thread; between calls they are numbers in a buffer that is kept for its capacity.
unsafe impl Send for Vectors {}

impl Lane {
    fn run(mut self) {
        let mut piece = Piece::default();
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
                    job,
                    status,
                    work: (),
                } => self.ask(job, status, &piece),
            };
            if let Err(error) = outcome {
                let what = format!("tcp to {}", self.shared.peer);
                self.shared
                    .fail(&TransportError::io(what, &error).without_proof());
                break;
            }
        }
    }

    /// Sends a piece, and waits for answers if too many are owed.
    fn ask(&mut self, job: Arc<Job>, status: Arc<Status>, piece: &Piece) -> io::Result<()> {
        let id = self.next;
        self.next += 1;
        self.unanswered_bytes += piece.bytes;
        // Owed from here on, whatever happens while it is sent.
        self.unanswered.push_back(Unanswered {
            id,
            status,
            job: Arc::clone(&job),
            bytes: piece.bytes,
            ranges: match job.direction {
                Direction::Write => Vec::new(),
                Direction::Read => piece.ranges.clone(),
            },
        });
        self.send_piece(id, &job, piece)?;
        while self.unanswered.len() > UNANSWERED_PIECES || self.unanswered_bytes > UNANSWERED_BYTES
        {
            self.read_answer()?;
        }
        Ok(())
    }

    fn send_piece(&mut self, id: u64, job: &Job, piece: &Piece) -> io::Result<()> {
        let is_write = job.direction == Direction::Write;
        let groups = piece
            .ranges
            .chunk_by(|one, next| one.pair == next.pair)
            .filter_map(|ranges| Some((job.pairs.get(ranges.first()?.pair)?, ranges)));
        let header = &mut self.header;
        header.clear();
        let fixed = RequestHeader {
            direction: job.direction,
            piece: id,
            groups: groups.clone().count() as u32,
            ranges: piece.ranges.len() as u32,
            payload: piece.bytes,
        };
        fixed.put(header);
        for (pair, ranges) in groups.clone() {
            let group = Group {
                region: pair.remote.id,
                // `submit` refused pairs without a key.
                key: pair.remote.key_opt.unwrap_or(RegionKey([0; 16])),
                ranges: ranges.len() as u32,
            };
            group.put(header);
        }
        for range in &piece.ranges {
            let offset = if is_write { range.dst } else { range.src };
            wire::put_range(header, offset, range.len);
        }
        let vectors = &mut self.vectors.0;
        vectors.clear();
        vectors.push(io_vec(header.as_ptr() as u64, header.len() as u64));
        if is_write {
            for (pair, ranges) in groups {
                for range in ranges {
                    let address = pair.local.address(range.src, range.len);
                    let address = address.map_err(io::Error::other)?;
                    vectors.push(io_vec(address as u64, range.len));
                }
            }
        }
        // SAFETY: the first range is the header; the others were just made from checked addresses
        // of regions that the job keeps mapped.
        unsafe { send_all(&self.stream, vectors) }
    }

    /// Reads the oldest piece's answer, and a read's payload.
    fn read_answer(&mut self) -> io::Result<()> {
        let mut fixed = [0; ANSWER_BYTES];
        (&*self.stream).read_exact(&mut fixed)?;
        let (id, code, text_len) = wire::parse_answer(&fixed)?;
        let mut text = vec![0; text_len];
        (&*self.stream).read_exact(&mut text)?;
        let Some(oldest) = self.unanswered.front() else {
            return Err(io::Error::other("an answer that nothing asked for"));
        };
        if oldest.id != id {
            return Err(io::Error::other("answers came out of order"));
        }
        let text = String::from_utf8_lossy(&text);
        let refused = |kind| {
            let message = format!("{} refused a request: {text}", self.shared.peer);
            Err(TransportError::quiesced(kind, message))
        };
        let result = match code {
            AnswerCode::Done => Ok(()),
            AnswerCode::NotRegistered => refused(TransportErrorKind::NotRegistered),
            AnswerCode::BadKey => refused(TransportErrorKind::BadKey),
            AnswerCode::OutOfBounds => refused(TransportErrorKind::OutOfBounds),
            AnswerCode::Unknown(_) => {
                refused(TransportErrorKind::Protocol).map_err(TransportError::without_proof)
            }
        };
        if result.is_ok() && oldest.job.direction == Direction::Read {
            let vectors = &mut self.vectors.0;
            vectors.clear();
            for range in &oldest.ranges {
                let Some(pair) = oldest.job.pairs.get(range.pair) else {
                    continue;
                };
                let address = pair.local.address(range.dst, range.len);
                vectors.push(io_vec(address.map_err(io::Error::other)? as u64, range.len));
            }
            let deadline = Instant::now() + self.stall_timeout;
            // SAFETY: the ranges were just made from checked addresses of regions that the job
            // keeps mapped; no reference to pool memory is ever made.
            unsafe { receive_all(&self.stream, vectors, deadline)? };
        }
        let Some(oldest) = self.unanswered.pop_front() else {
            return Ok(());
        };
        self.unanswered_bytes -= oldest.bytes;
        let Unanswered { status, job, .. } = oldest;
        // What the batch holds is let go before anybody who waits for its end goes on.
        drop(job);
        status.piece_done(result);
        Ok(())
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

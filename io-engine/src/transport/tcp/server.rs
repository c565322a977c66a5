//! The side whose memory it is: checks a piece's header, then reads its payload straight into the
//! regions, or sends it straight out of them.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

#[cfg(feature = "rdma")]
use common::wire::rdma_control::ControlType;

use crate::engine::EngineInner;
use crate::region::RegionGuard;
use crate::session::Direction;
use crate::sys::{self, IoVec, io_vec};
use crate::transport::TransportKind;
#[cfg(feature = "rdma")]
use crate::transport::rdma;
use crate::transport::tcp::notice_dead_hosts;
use crate::transport::tcp::vectored::{receive_all, send_all};
use crate::transport::tcp::wire::{
    self, AnswerCode, GROUP_BYTES, Group, HELLO_BYTES, RANGE_BYTES, REQUEST_BYTES, RequestHeader,
};

/// Connections of one engine at most; a peer needs a few.
const MAX_CONNECTIONS: usize = 4096;
/// A peer that has begun a hello or a piece must go on within this time.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// The payload of a piece must be complete within this time: its regions cannot be deregistered
/// before, and a peer that trickles would hold them.
const PAYLOAD_TIMEOUT: Duration = Duration::from_secs(120);

/// Accepts peers until the engine is gone. Runs on a thread of its own; each connection gets one.
pub(crate) fn serve(listener: &TcpListener, engine: &Weak<EngineInner>) {
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let Some(alive) = engine.upgrade().filter(|engine| !engine.is_shut_down()) else {
            return;
        };
        drop(alive);
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                // Out of descriptors, for example: the peers' connects wait in the backlog.
                tracing::warn!(%error, "a tcp connection could not be accepted");
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        if open.fetch_add(1, Ordering::AcqRel) >= MAX_CONNECTIONS {
            open.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(
                limit = MAX_CONNECTIONS,
                "a tcp connection beyond the limit was closed"
            );
            continue;
        }
        let (engine, counted) = (Weak::clone(engine), Arc::clone(&open));
        let spawned = std::thread::Builder::new()
            .name("ferry-receive".to_owned())
            .spawn(move || {
                let peer = stream.peer_addr();
                if let Err(error) = serve_connection(&Arc::new(stream), &engine) {
                    tracing::info!(peer = ?peer.ok(), %error, "a tcp peer's connection ended");
                }
                counted.fetch_sub(1, Ordering::AcqRel);
            });
        if let Err(error) = spawned {
            open.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%error, "a tcp connection got no thread");
        }
    }
}

fn serve_connection(stream: &Arc<TcpStream>, engine: &Weak<EngineInner>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    notice_dead_hosts(stream)?;
    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
    stream.set_write_timeout(Some(STALL_TIMEOUT))?;
    #[cfg(feature = "rdma")]
    if is_control(stream)? {
        return serve_control(stream, engine);
    }
    let mut hello = [0; HELLO_BYTES];
    (&**stream).read_exact(&mut hello)?;
    let Some(owner) = engine.upgrade() else {
        return Ok(());
    };
    wire::check_hello(&hello, owner.instance())?;
    if !owner.offers(TransportKind::Tcp) {
        return Err(io::Error::other("this engine does not offer tcp"));
    }
    // The engine ends the connections that it is told of when it shuts down.
    owner.adopt_tcp(stream)?;
    drop(owner);
    (&**stream).write_all(&wire::welcome())?;
    stream.set_read_timeout(Some(STALL_TIMEOUT))?;
    let mut receiver = Receiver::new(stream);
    while receiver.wait_for_piece()? {
        let Some(owner) = engine.upgrade() else {
            return Ok(());
        };
        receiver.serve_piece(&owner)?;
    }
    Ok(())
}

/// Whether the peer begins with a message of the rdma transport's control plane, which shares the
/// port: MoRI's descriptors have one.
#[cfg(feature = "rdma")]
fn is_control(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    let is_there = stream.peek(&mut first)? > 0;
    let [number] = first;
    Ok(is_there && ControlType::from_number(number).is_some())
}

#[cfg(feature = "rdma")]
fn serve_control(stream: &Arc<TcpStream>, engine: &Weak<EngineInner>) -> io::Result<()> {
    let Some(owner) = engine.upgrade() else {
        return Ok(());
    };
    owner.adopt_tcp(stream)?;
    drop(owner);
    rdma::server::serve(stream, engine, HELLO_TIMEOUT)
}

/// Bytes that are read ahead of a header: with the header, all of a small write. What they hold of
/// a large payload is copied once more, so they are few.
const READ_AHEAD_BYTES: usize = 4608;

/// The regions of a piece, and its ranges in them.
struct Target {
    guards: Vec<RegionGuard>,
    vectors: Vec<IoVec>,
}

struct Receiver<'a> {
    stream: &'a TcpStream,
    /// What was read and not used: `buffer[start..end]`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl<'a> Receiver<'a> {
    fn new(stream: &'a TcpStream) -> Self {
        Self {
            stream,
            buffer: vec![0; READ_AHEAD_BYTES],
            start: 0,
            end: 0,
        }
    }

    /// Waits, for as long as it takes, for the first byte of a piece. False at the end.
    fn wait_for_piece(&mut self) -> io::Result<bool> {
        while self.start == self.end {
            (self.start, self.end) = (0, 0);
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Ok(false),
                Ok(bytes) => self.end = bytes,
                // A peer may be silent between pieces.
                Err(error) if is_timeout(&error) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Takes the next bytes, reading more if they are not here yet.
    fn take(&mut self, bytes: usize) -> io::Result<&[u8]> {
        if self.end - self.start < bytes {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            if self.buffer.len() < bytes {
                self.buffer.resize(bytes, 0);
            }
            while self.end < bytes {
                let room = self.buffer.get_mut(self.end..).unwrap_or_default();
                match self.stream.read(room) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(read) => self.end += read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        let taken = self.start..self.start + bytes;
        self.start += bytes;
        Ok(self.buffer.get(taken).unwrap_or_default())
    }

    fn serve_piece(&mut self, engine: &EngineInner) -> io::Result<()> {
        let fixed = self.take(REQUEST_BYTES)?.first_chunk().copied();
        let header = RequestHeader::parse(&fixed.ok_or(io::ErrorKind::UnexpectedEof)?)?;
        let groups = header.groups as usize * GROUP_BYTES;
        let tail = self.take(groups + header.ranges as usize * RANGE_BYTES)?;
        let answer = |code, text: &str| wire::answer(header.piece, code, text);
        match check(engine, &header, tail.split_at(groups))? {
            Ok(mut target) => match header.direction {
                Direction::Write => {
                    self.receive_payload(&mut target)?;
                    self.stream.write_all(&answer(AnswerCode::Done, ""))
                }
                Direction::Read => self.send_payload(&answer(AnswerCode::Done, ""), &mut target),
            },
            Err((code, text)) => {
                tracing::warn!(reason = text, "a request was refused");
                if header.direction == Direction::Write {
                    self.discard(header.payload)?;
                }
                self.stream.write_all(&answer(code, &text))
            }
        }
    }

    fn receive_payload(&mut self, target: &mut Target) -> io::Result<()> {
        let deadline = Instant::now() + PAYLOAD_TIMEOUT;
        let ahead = self.buffer.get(self.start..self.end).unwrap_or_default();
        let mut rest = ahead;
        for vector in &target.vectors {
            let step = rest.len().min(vector.iov_len);
            let (now, later) = rest.split_at(step);
            // SAFETY: the range was made from a checked address of a region whose guard `target`
            // holds; no reference to pool memory is ever made, so `now` cannot overlap it.
            unsafe { sys::copy(now.as_ptr(), vector.iov_base.cast(), step) };
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        let copied = ahead.len() - rest.len();
        self.start += copied;
        let left = sys::advance(&mut target.vectors, copied);
        // SAFETY: as above.
        unsafe { receive_all(self.stream, left, deadline) }
    }

    fn send_payload(&mut self, answer: &[u8], target: &mut Target) -> io::Result<()> {
        let mut vectors = Vec::with_capacity(target.vectors.len() + 1);
        vectors.push(io_vec(answer.as_ptr() as u64, answer.len() as u64));
        vectors.append(&mut target.vectors);
        // SAFETY: the first range is `answer`; the others were made from checked addresses of
        // regions whose guards `target` holds.
        unsafe { send_all(self.stream, &mut vectors) }
    }

    fn discard(&mut self, mut bytes: u64) -> io::Result<()> {
        while bytes > 0 {
            let step = bytes.min(READ_AHEAD_BYTES as u64);
            // At most the length of the buffer.
            self.take(step as usize)?;
            bytes -= step;
        }
        Ok(())
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// The outer error ends the connection: the header does not even agree with itself. The inner one
/// refuses the piece.
fn check(
    engine: &EngineInner,
    header: &RequestHeader,
    (groups, ranges): (&[u8], &[u8]),
) -> io::Result<Result<Target, (AnswerCode, String)>> {
    let disagrees = || io::Error::new(io::ErrorKind::InvalidData, "a piece's counts do not add up");
    let (groups, _) = groups.as_chunks::<GROUP_BYTES>();
    let (ranges, _) = ranges.as_chunks::<RANGE_BYTES>();
    let mut target = Target {
        guards: Vec::with_capacity(groups.len()),
        vectors: Vec::with_capacity(ranges.len()),
    };
    let mut ranges = ranges.iter();
    let mut refused = None;
    let mut payload = 0u64;
    for group in groups {
        let group = Group::parse(group)?;
        let guard = enter(engine, &group);
        for _ in 0..group.ranges {
            let (offset, len) = wire::parse_range(ranges.next().ok_or_else(disagrees)?)?;
            payload = payload.checked_add(len).ok_or_else(disagrees)?;
            match &guard {
                Ok(guard) => match guard.region().address(offset, len) {
                    Ok(address) => target.vectors.push(io_vec(address as u64, len)),
                    Err(error) => {
                        refused.get_or_insert((AnswerCode::OutOfBounds, error.to_string()));
                    }
                },
                Err(reason) => {
                    refused.get_or_insert(reason.clone());
                }
            }
        }
        target.guards.extend(guard);
    }
    if ranges.next().is_some() || payload != header.payload {
        return Err(disagrees());
    }
    Ok(refused.map_or(Ok(target), Err))
}

fn enter(engine: &EngineInner, group: &Group) -> Result<RegionGuard, (AnswerCode, String)> {
    let region = engine.region(group.region).ok_or_else(|| {
        (
            AnswerCode::NotRegistered,
            format!("there is no region {}", group.region),
        )
    })?;
    if !region.key().matches(&group.key) {
        return Err((
            AnswerCode::BadKey,
            format!("wrong key for region {}", group.region),
        ));
    }
    region
        .enter()
        .map_err(|error| (AnswerCode::NotRegistered, error.to_string()))
}

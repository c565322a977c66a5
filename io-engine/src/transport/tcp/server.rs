//! The side whose memory it is: checks a piece's header, then reads its payload straight into the
//! regions, or sends it straight out of them.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

#[cfg(feature = "rdma")]
use common::wire::rdma_control::ControlType;

use crate::device::packed::{Packed, any_device};
use crate::device::staging::{DEPTH, Way};
use crate::engine::{EngineInner, Writer};
use crate::error::{TransportError, TransportErrorKind};
use crate::foreign::Place;
use crate::grant::GrantUser;
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
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(30);
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
    notice_dead_hosts(stream, STALL_TIMEOUT)?;
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
    let writer = wire::check_hello(&hello, owner.instance())?;
    if !owner.offers(TransportKind::Tcp) {
        return Err(io::Error::other("this engine does not offer tcp"));
    }
    // The engine ends the connections that it is told of when it shuts down.
    owner.note_writer(stream, Writer::Instance(writer));
    owner.adopt_control(stream)?;
    drop(owner);
    // Whoever connected sends nothing before it has this, so all that can write is known by then.
    (&**stream).write_all(&wire::welcome())?;
    stream.set_read_timeout(Some(STALL_TIMEOUT))?;
    let mut receiver = Receiver::new(stream);
    loop {
        // What is under way goes on while the next piece comes in; a peer that sends nothing more
        // is answered.
        let is_full = receiver.pending.len() >= DEPTH;
        if !receiver.pending.is_empty() && (is_full || !receiver.has_more()?) {
            receiver.finish_oldest()?;
            continue;
        }
        if !receiver.wait_for_piece()? {
            break;
        }
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
    owner.adopt_control(stream)?;
    drop(owner);
    rdma::server::serve(stream, engine, HELLO_TIMEOUT)
}

/// Bytes that are read ahead of a header: with the header, all of a small write. What they hold of
/// a large payload is copied once more, so they are few.
const READ_AHEAD_BYTES: usize = 4608;

/// What is held while a piece is under way: a region, and the grant that it comes under.
struct Guard {
    region: RegionGuard,
    _grant_opt: Option<GrantUser>,
}

/// The regions of a piece, and its ranges in them.
struct Target {
    guards: Vec<Guard>,
    places: Vec<(Place, u64)>,
}

/// A piece of device memory whose copy is under way; its answer is owed.
struct Pending {
    // In front of the guards, so that regions are let go when nothing is under way any more.
    packed: Packed,
    _guards: Vec<Guard>,
    piece: u64,
    /// Bytes that follow the answer of a read.
    payload: u64,
    begun: Result<(), TransportError>,
}

struct Receiver<'a> {
    stream: &'a TcpStream,
    /// The same, for the grants that let its pieces in.
    shared: &'a Arc<TcpStream>,
    /// What was read and not used: `buffer[start..end]`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Oldest first; answers are given in order.
    pending: VecDeque<Pending>,
}

impl<'a> Receiver<'a> {
    fn new(stream: &'a Arc<TcpStream>) -> Self {
        Self {
            stream,
            shared: stream,
            buffer: vec![0; READ_AHEAD_BYTES],
            start: 0,
            end: 0,
            pending: VecDeque::new(),
        }
    }

    /// Whether the peer has sent more already, or has ended.
    fn has_more(&self) -> io::Result<bool> {
        let [is_ready] = sys::wait_readable([self.stream.as_fd()], Some(Duration::ZERO))?;
        Ok(self.start < self.end || is_ready)
    }

    /// Waits for the oldest copy and gives its answer.
    fn finish_oldest(&mut self) -> io::Result<()> {
        let Some(mut pending) = self.pending.pop_front() else {
            return Ok(());
        };
        let waited = pending.packed.wait();
        if let Err(error) = pending.begun.and(waited) {
            tracing::warn!(%error, "a piece was not copied from or to device memory");
            let text = error.to_string();
            let answer = wire::answer(pending.piece, AnswerCode::DeviceFailed, &text);
            return self.stream.write_all(&answer);
        }
        let answer = wire::answer(pending.piece, AnswerCode::Done, "");
        let mut vectors = [
            io_vec(answer.as_ptr() as u64, answer.len() as u64),
            io_vec(pending.packed.address(), pending.payload),
        ];
        // SAFETY: the first range is `answer`, the second a part of a buffer that is filled and
        // kept.
        unsafe { send_all(self.stream, &mut vectors) }
    }

    /// As the pieces in host memory, with the copy left under way.
    fn serve_on_device(&mut self, header: &RequestHeader, target: Target) -> io::Result<()> {
        let way = match header.direction {
            Direction::Write => Way::In,
            Direction::Read => Way::Out,
        };
        let mut packed = loop {
            match Packed::take(&target.places, way, self.pending.is_empty()) {
                Ok(Some(packed)) => break packed,
                Ok(None) => self.finish_oldest()?,
                Err(error) => {
                    tracing::warn!(%error, "a piece of device memory was refused");
                    if header.direction == Direction::Write {
                        self.discard(header.payload)?;
                    }
                    while !self.pending.is_empty() {
                        self.finish_oldest()?;
                    }
                    let code = match error.kind() {
                        TransportErrorKind::OutOfBounds => AnswerCode::OutOfBounds,
                        _ => AnswerCode::DeviceFailed,
                    };
                    let answer = wire::answer(header.piece, code, &error.to_string());
                    return self.stream.write_all(&answer);
                }
            }
        };
        if header.direction == Direction::Write {
            let mut vectors = [io_vec(packed.address(), header.payload)];
            self.receive_payload(&mut vectors)?;
        }
        // SAFETY: the ranges were checked against regions whose guards are kept until the copy is
        // over, and no reference to pool memory is ever made.
        let begun = unsafe {
            match header.direction {
                Direction::Write => packed.scatter(&target.places),
                Direction::Read => packed.gather(&target.places, None),
            }
        };
        self.pending.push_back(Pending {
            packed,
            _guards: target.guards,
            piece: header.piece,
            payload: match header.direction {
                Direction::Write => 0,
                Direction::Read => header.payload,
            },
            begun,
        });
        Ok(())
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
        let stream = self.shared;
        let tail = self.take(groups + header.ranges as usize * RANGE_BYTES)?;
        let answer = |code, text: &str| wire::answer(header.piece, code, text);
        let checked = check(engine, stream, &header, tail.split_at(groups))?;
        if let Ok(target) = &checked
            && any_device(&target.places)
        {
            return checked.map_or(Ok(()), |target| self.serve_on_device(&header, target));
        }
        while !self.pending.is_empty() {
            self.finish_oldest()?;
        }
        match checked {
            Ok(target) => {
                let mut vectors = target.vectors();
                match header.direction {
                    Direction::Write => {
                        self.receive_payload(&mut vectors)?;
                        self.stream.write_all(&answer(AnswerCode::Done, ""))
                    }
                    Direction::Read => {
                        self.send_payload(&answer(AnswerCode::Done, ""), &mut vectors)
                    }
                }
            }
            Err((code, text)) => {
                tracing::warn!(reason = text, "a request was refused");
                if header.direction == Direction::Write {
                    self.discard(header.payload)?;
                }
                self.stream.write_all(&answer(code, &text))
            }
        }
    }

    /// Reads the payload into ranges that the caller has checked and keeps.
    fn receive_payload(&mut self, vectors: &mut [IoVec]) -> io::Result<()> {
        let deadline = Instant::now() + PAYLOAD_TIMEOUT;
        let ahead = self.buffer.get(self.start..self.end).unwrap_or_default();
        let mut rest = ahead;
        for vector in &*vectors {
            let step = rest.len().min(vector.iov_len);
            let (now, later) = rest.split_at(step);
            // SAFETY: the range was made from a checked address of a region whose guard the caller
            // holds, or is a pinned buffer; no reference to either is ever made, so `now` cannot
            // overlap it.
            unsafe { sys::copy(now.as_ptr(), vector.iov_base.cast(), step) };
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        let copied = ahead.len() - rest.len();
        self.start += copied;
        let left = sys::advance(vectors, copied);
        // SAFETY: as above.
        unsafe { receive_all(self.stream, left, deadline) }
    }

    fn send_payload(&mut self, answer: &[u8], payload: &mut Vec<IoVec>) -> io::Result<()> {
        let mut vectors = Vec::with_capacity(payload.len() + 1);
        vectors.push(io_vec(answer.as_ptr() as u64, answer.len() as u64));
        vectors.append(payload);
        // SAFETY: the first range is `answer`; the others were made from checked addresses of
        // regions whose guards the caller holds.
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

impl Target {
    /// The ranges as the kernel takes them, of a piece without device memory.
    fn vectors(&self) -> Vec<IoVec> {
        let vector = |(place, len): &(Place, u64)| io_vec(place.number(), *len);
        self.places.iter().map(vector).collect()
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
    stream: &Arc<TcpStream>,
    header: &RequestHeader,
    (groups, ranges): (&[u8], &[u8]),
) -> io::Result<Result<Target, (AnswerCode, String)>> {
    let disagrees = || io::Error::new(io::ErrorKind::InvalidData, "a piece's counts do not add up");
    let (groups, _) = groups.as_chunks::<GROUP_BYTES>();
    let (ranges, _) = ranges.as_chunks::<RANGE_BYTES>();
    let mut target = Target {
        guards: Vec::with_capacity(groups.len()),
        places: Vec::with_capacity(ranges.len()),
    };
    let mut ranges = ranges.iter();
    let mut refused = None;
    let mut payload = 0u64;
    for group in groups {
        let group = Group::parse(group)?;
        let guard = enter(engine, stream, &group);
        for _ in 0..group.ranges {
            let (offset, len) = wire::parse_range(ranges.next().ok_or_else(disagrees)?)?;
            payload = payload.checked_add(len).ok_or_else(disagrees)?;
            match &guard {
                Ok(guard) => match guard.region.region().place(offset, len) {
                    Ok(place) => target.places.push((place, len)),
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

fn enter(
    engine: &EngineInner,
    stream: &Arc<TcpStream>,
    group: &Group,
) -> Result<Guard, (AnswerCode, String)> {
    let region = engine.region(group.region).ok_or_else(|| {
        (
            AnswerCode::NotRegistered,
            format!("there is no region {}", group.region),
        )
    })?;
    let mut grant_opt = None;
    if !region.key().matches(&group.key) {
        let granted_opt = engine.grants().find(region.key(), &group.key);
        grant_opt = granted_opt.and_then(|granted| granted.enter(stream));
        if grant_opt.is_none() {
            let text = format!(
                "wrong key for region {}, or a permission that was taken back",
                group.region
            );
            return Err((AnswerCode::BadKey, text));
        }
    }
    let region = region
        .enter()
        .map_err(|error| (AnswerCode::NotRegistered, error.to_string()))?;
    Ok(Guard {
        region,
        _grant_opt: grant_opt,
    })
}

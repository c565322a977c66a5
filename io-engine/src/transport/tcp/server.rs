//! The receiving side: checks a piece's header, then reads its payload straight into the regions.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::engine::EngineInner;
use crate::region::WriteGuard;
use crate::sys::{self, IoVec, MAX_VECTORS, io_vec};
use crate::transport::tcp::notice_dead_hosts;
use crate::transport::tcp::wire::{
    self, AnswerCode, GROUP_BYTES, Group, HELLO_BYTES, RANGE_BYTES, WRITE_BYTES, WriteHeader,
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
    let mut hello = [0; HELLO_BYTES];
    (&**stream).read_exact(&mut hello)?;
    let Some(owner) = engine.upgrade() else {
        return Ok(());
    };
    wire::check_hello(&hello, owner.instance())?;
    // The engine ends the connections that it is told of when it shuts down.
    owner.adopt_tcp(stream)?;
    drop(owner);
    (&**stream).write_all(&wire::welcome())?;
    let mut receiver = Receiver {
        stream,
        header: Vec::new(),
        sink: Vec::new(),
    };
    while receiver.wait_for_piece()? {
        let Some(owner) = engine.upgrade() else {
            return Ok(());
        };
        receiver.receive_piece(&owner)?;
    }
    Ok(())
}

/// The ranges of a piece, each with the region that it lies in.
struct Destination {
    guards: Vec<WriteGuard>,
    ranges: Vec<(usize, u64, u64)>,
}

struct Receiver<'a> {
    stream: &'a TcpStream,
    header: Vec<u8>,
    sink: Vec<u8>,
}

impl Receiver<'_> {
    /// Waits, for as long as it takes, for the first byte of a piece. False at the end.
    fn wait_for_piece(&self) -> io::Result<bool> {
        self.stream.set_read_timeout(None)?;
        let arrived = loop {
            match self.stream.peek(&mut [0]) {
                Ok(bytes) => break bytes > 0,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        };
        self.stream.set_read_timeout(Some(STALL_TIMEOUT))?;
        Ok(arrived)
    }

    fn receive_piece(&mut self, engine: &EngineInner) -> io::Result<()> {
        let mut fixed = [0; WRITE_BYTES];
        self.stream.read_exact(&mut fixed)?;
        let header = WriteHeader::parse(&fixed)?;
        let tail = header.groups as usize * GROUP_BYTES + header.ranges as usize * RANGE_BYTES;
        self.header.resize(tail, 0);
        self.stream.read_exact(&mut self.header)?;
        let answer = match self.check(engine, &header)? {
            Ok(destination) => {
                self.receive_payload(&destination)?;
                wire::answer(header.piece, AnswerCode::Done, "")
            }
            Err((code, text)) => {
                tracing::warn!(reason = text, "a write was refused");
                self.discard(header.payload)?;
                wire::answer(header.piece, code, &text)
            }
        };
        self.stream.write_all(&answer)
    }

    /// The outer error ends the connection: the header does not even agree with itself. The inner
    /// one refuses the piece.
    fn check(
        &self,
        engine: &EngineInner,
        header: &WriteHeader,
    ) -> io::Result<Result<Destination, (AnswerCode, String)>> {
        let disagrees =
            || io::Error::new(io::ErrorKind::InvalidData, "a piece's counts do not add up");
        let groups_len = header.groups as usize * GROUP_BYTES;
        let (groups, ranges) = self
            .header
            .split_at_checked(groups_len)
            .ok_or_else(disagrees)?;
        let (groups, _) = groups.as_chunks::<GROUP_BYTES>();
        let (ranges, _) = ranges.as_chunks::<RANGE_BYTES>();
        let mut ranges = ranges.iter();
        let mut destination = Destination {
            guards: Vec::new(),
            ranges: Vec::new(),
        };
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
                        Ok(_) => destination
                            .ranges
                            .push((destination.guards.len(), offset, len)),
                        Err(error) => {
                            refused.get_or_insert((AnswerCode::OutOfBounds, error.to_string()));
                        }
                    },
                    Err(reason) => {
                        refused.get_or_insert(reason.clone());
                    }
                }
            }
            destination.guards.extend(guard);
        }
        if ranges.next().is_some() || payload != header.payload {
            return Err(disagrees());
        }
        Ok(refused.map_or(Ok(destination), Err))
    }

    fn receive_payload(&mut self, destination: &Destination) -> io::Result<()> {
        let deadline = Instant::now() + PAYLOAD_TIMEOUT;
        for ranges in destination.ranges.chunks(MAX_VECTORS) {
            let mut vectors: Vec<IoVec> = Vec::with_capacity(ranges.len());
            for (guard, offset, len) in ranges {
                let Some(guard) = destination.guards.get(*guard) else {
                    continue;
                };
                let address = guard
                    .region()
                    .address(*offset, *len)
                    .map_err(io::Error::other)?;
                vectors.push(io_vec(address as u64, *len));
            }
            receive_all(self.stream, &mut vectors, deadline)?;
        }
        Ok(())
    }

    fn discard(&mut self, mut bytes: u64) -> io::Result<()> {
        self.sink.resize(64 << 10, 0);
        while bytes > 0 {
            let step = usize::try_from(bytes)
                .unwrap_or(usize::MAX)
                .min(self.sink.len());
            let Some(sink) = self.sink.get_mut(..step) else {
                break;
            };
            self.stream.read_exact(sink)?;
            bytes -= step as u64;
        }
        Ok(())
    }
}

fn enter(engine: &EngineInner, group: &Group) -> Result<WriteGuard, (AnswerCode, String)> {
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
        .begin_write()
        .map_err(|error| (AnswerCode::NotRegistered, error.to_string()))
}

fn receive_all(stream: &TcpStream, vectors: &mut [IoVec], deadline: Instant) -> io::Result<()> {
    let mut first = 0;
    while let Some(rest) = vectors.get_mut(first..) {
        if rest.is_empty() {
            break;
        }
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // SAFETY: the addresses were checked against regions whose guards the caller holds, which
        // keep the memory mapped; no reference to pool memory is ever made.
        let received = unsafe { sys::receive_vectored(stream.as_fd(), rest) };
        let mut received = match received {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        for vector in rest {
            let step = received.min(vector.iov_len);
            vector.iov_base = vector.iov_base.wrapping_byte_add(step);
            vector.iov_len -= step;
            received -= step;
            if vector.iov_len > 0 {
                break;
            }
            first += 1;
        }
    }
    Ok(())
}

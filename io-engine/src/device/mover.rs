//! Copies a piece of a batch where at least one side is a device's memory, for the transports that
//! reach both sides from here, and single ranges for whoever owns the memory.

use std::collections::VecDeque;
use std::sync::Arc;

use super::staging::{BUFFER_BYTES, Buffer, DEPTH, Flight, Stage, Way};
use super::{CopyRange, Device, DeviceMemory};
use crate::error::{TransportError, TransportErrorKind};
use crate::foreign::Place;
use crate::{stream, sys};

/// One range, with both of its places.
pub(crate) struct Move {
    pub src: Place,
    pub dst: Place,
    pub len: u64,
}

/// Copies ranges and returns when all bytes are in place and visible.
///
/// # Errors
/// The driver's. Nothing is written any more then.
///
/// # Safety
/// Both places of each range stay what they are for the length of the call, and those in host
/// memory do not overlap.
pub(crate) unsafe fn run(moves: &[Move], after_opt: Option<u64>) -> Result<(), TransportError> {
    let mut between: Vec<(&DeviceMemory, CopyRange)> = Vec::new();
    let (mut from_device, mut to_device) = (Vec::new(), Vec::new());
    for one in moves {
        match (&one.src, &one.dst) {
            (Place::Host(src), Place::Host(dst)) => {
                // SAFETY: the caller's promise.
                unsafe { stream::copy(src.cast_const(), *dst, one.len as usize) };
            }
            (Place::Device(memory, src), Place::Device(other, dst))
                if memory.device().kind() == other.device().kind() =>
            {
                between.push((
                    memory,
                    CopyRange {
                        dst: *dst,
                        src: *src,
                        len: one.len,
                    },
                ));
            }
            (Place::Device(..), Place::Device(..)) => {
                return Err(TransportError::quiesced(
                    TransportErrorKind::NoCommonTransport,
                    "device memory of two makers cannot be copied into each other",
                ));
            }
            (Place::Device(memory, src), Place::Host(dst)) => {
                from_device.push((memory, *src, *dst, one.len));
            }
            (Place::Host(src), Place::Device(memory, dst)) => {
                to_device.push((memory, *dst, *src, one.len));
            }
        }
    }
    let mut flight_opt = None;
    if let Some((memory, _)) = between.first() {
        let ranges: Vec<CopyRange> = between.iter().map(|(_, range)| *range).collect();
        let mut flight = Flight::open(memory.stage(), memory.device())?;
        // SAFETY: device memory, which the caller keeps; drivers find each side's device by its
        // address.
        unsafe { flight.between(&ranges, after_opt)? };
        flight_opt = Some(flight);
    }
    // SAFETY: the caller's promise.
    unsafe {
        staged(&from_device, Way::Out, after_opt)?;
        staged(&to_device, Way::In, None)?;
    }
    flight_opt.map_or(Ok(()), |mut flight| flight.wait())
}

/// A range of device memory and one of host memory.
type Staged<'a> = (&'a DeviceMemory, u64, *mut u8, u64);

/// Ranges that fill one buffer.
struct Chunk {
    // In front of the buffer, so that the buffer goes back when nothing is under way any more.
    flight: Flight,
    buffer: Buffer,
    pieces: Vec<(u64, u64)>,
    host: Vec<(*mut u8, u64)>,
}

impl Chunk {
    /// # Safety
    /// The chunk's host ranges are writable, and its copy is over.
    unsafe fn empty_into_host(&self) {
        let mut reached = std::ptr::with_exposed_provenance::<u8>(self.buffer.address() as usize);
        for (host, len) in &self.host {
            // SAFETY: the caller's range, and a part of the buffer that it was cut for.
            unsafe { stream::copy(reached, *host, *len as usize) };
            reached = reached.wrapping_add(*len as usize);
        }
    }

    /// # Safety
    /// The chunk's host ranges are readable.
    unsafe fn fill_from_host(&self) {
        let buffer = std::ptr::with_exposed_provenance_mut::<u8>(self.buffer.address() as usize);
        let mut reached = buffer;
        for (host, len) in &self.host {
            // SAFETY: the caller's range, and a part of the buffer that it was cut for.
            unsafe { sys::copy(*host, reached, *len as usize) };
            reached = reached.wrapping_add(*len as usize);
        }
    }
}

/// Copies through pinned buffers, several under way at once.
///
/// # Safety
/// As [`run`].
unsafe fn staged(
    ranges: &[Staged<'_>],
    way: Way,
    after_opt: Option<u64>,
) -> Result<(), TransportError> {
    let mut under_way: VecDeque<Chunk> = VecDeque::new();
    for (device, stage, pieces, host) in cut(ranges) {
        let buffer = loop {
            match stage.take(device, way, under_way.is_empty())? {
                Some(buffer) if under_way.len() < DEPTH => break buffer,
                // SAFETY: the caller's promise.
                _ => unsafe { finish_oldest(&mut under_way, way)? },
            }
        };
        let flight = Flight::open(stage, device)?;
        let mut chunk = Chunk {
            pieces,
            host,
            buffer,
            flight,
        };
        // SAFETY: the pieces are device memory that the caller keeps, and were cut to fit the
        // buffer, which the chunk keeps; the host's ranges are the caller's.
        unsafe {
            match way {
                Way::Out => {
                    let address = chunk.buffer.address();
                    chunk.flight.begin_out(&chunk.pieces, address, after_opt)?;
                }
                Way::In => {
                    chunk.fill_from_host();
                    chunk
                        .flight
                        .begin_in(chunk.buffer.address(), &chunk.pieces)?;
                }
            }
        }
        under_way.push_back(chunk);
    }
    while !under_way.is_empty() {
        // SAFETY: the caller's promise.
        unsafe { finish_oldest(&mut under_way, way)? };
    }
    Ok(())
}

/// # Safety
/// As [`run`].
unsafe fn finish_oldest(under_way: &mut VecDeque<Chunk>, way: Way) -> Result<(), TransportError> {
    let Some(mut chunk) = under_way.pop_front() else {
        return Ok(());
    };
    chunk.flight.wait()?;
    if way == Way::Out {
        // SAFETY: the copy is over, and the host's ranges are the caller's.
        unsafe { chunk.empty_into_host() };
    }
    Ok(())
}

type Cut<'a> = (Device, &'a Arc<Stage>, Vec<(u64, u64)>, Vec<(*mut u8, u64)>);

/// Cuts ranges so that each list is of one device and fits a buffer.
fn cut<'a>(ranges: &[Staged<'a>]) -> Vec<Cut<'a>> {
    let mut lists: Vec<Cut<'a>> = Vec::new();
    let mut room = 0;
    for (memory, device_address, host, len) in ranges {
        let mut done = 0;
        while done < *len {
            let last_opt = lists.last();
            let is_same = last_opt.is_some_and(|(device, ..)| *device == memory.device());
            if room == 0 || !is_same {
                lists.push((memory.device(), memory.stage(), Vec::new(), Vec::new()));
                room = BUFFER_BYTES;
            }
            let step = (*len - done).min(room);
            if let Some((_, _, pieces, hosts)) = lists.last_mut() {
                pieces.push((device_address + done, step));
                hosts.push((host.wrapping_add(done as usize), step));
            }
            done += step;
            room -= step;
        }
    }
    lists
}

/// Copies out of device memory.
pub(super) fn read(
    memory: &DeviceMemory,
    offset: u64,
    out: &mut [u8],
) -> Result<(), TransportError> {
    let address = memory.device_address(offset, out.len() as u64)?;
    let range = (memory, address, out.as_mut_ptr(), out.len() as u64);
    // SAFETY: the range was checked and `memory` keeps it; `out` is borrowed for the length of the
    // call.
    unsafe { staged(&[range], Way::Out, None) }
}

/// Copies into device memory.
pub(super) fn write(
    memory: &DeviceMemory,
    offset: u64,
    bytes: &[u8],
) -> Result<(), TransportError> {
    let address = memory.device_address(offset, bytes.len() as u64)?;
    let range = (
        memory,
        address,
        bytes.as_ptr().cast_mut(),
        bytes.len() as u64,
    );
    // SAFETY: the range was checked and `memory` keeps it; `bytes` are borrowed for the length of
    // the call, and only read.
    unsafe { staged(&[range], Way::In, None) }
}

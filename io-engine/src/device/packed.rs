//! A piece of a batch on its way between devices and a stream: its ranges one behind the other in
//! one pinned buffer.

use std::collections::VecDeque;

use super::staging::{BUFFER_BYTES, Buffer, Flight, Way};
use crate::error::{TransportError, TransportErrorKind};
use crate::foreign::Place;
use crate::sys;

/// A buffer and what is under way with it.
pub(crate) struct Packed {
    // In front of the buffer, so that the buffer goes back when nothing is under way any more.
    flights: VecDeque<Flight>,
    buffer: Buffer,
}

/// Whether any of these ranges is a device's memory.
pub(crate) fn any_device(ranges: &[(Place, u64)]) -> bool {
    ranges
        .iter()
        .any(|(place, _)| matches!(place, Place::Device(..)))
}

/// Ranges behind each other that are of one device, or of the host.
fn is_alike(one: &Place, other: &Place) -> bool {
    match (one, other) {
        (Place::Host(_), Place::Host(_)) => true,
        (Place::Device(one, _), Place::Device(other, _)) => one.device() == other.device(),
        _ => false,
    }
}

impl Packed {
    /// Takes a buffer for ranges of which at least one is a device's; as `Stage::take` otherwise.
    ///
    /// # Errors
    /// The driver's, or that the ranges do not fit.
    pub(crate) fn take(
        ranges: &[(Place, u64)],
        way: Way,
        may_wait: bool,
    ) -> Result<Option<Self>, TransportError> {
        let bytes = ranges
            .iter()
            .fold(0u64, |sum, (_, len)| sum.saturating_add(*len));
        let memory = ranges.iter().find_map(|(place, _)| match place {
            Place::Device(memory, _) => Some(memory),
            Place::Host(_) => None,
        });
        let Some(memory) = memory.filter(|_| bytes <= BUFFER_BYTES) else {
            return Err(TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!(
                    "a piece of {bytes} bytes of device memory; at most {BUFFER_BYTES} are taken at once"
                ),
            ));
        };
        let taken = memory.stage().take(memory.device(), way, may_wait)?;
        Ok(taken.map(|buffer| Self {
            flights: VecDeque::new(),
            buffer,
        }))
    }

    /// Where the bytes are, or are to be put.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.address()
    }

    /// Begins to copy the ranges into the buffer, once an event has passed.
    ///
    /// # Safety
    /// The ranges are those that the buffer was taken for, and stay readable until
    /// [`Packed::wait`] has returned.
    pub(crate) unsafe fn gather(
        &mut self,
        ranges: &[(Place, u64)],
        after_opt: Option<u64>,
    ) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.each(ranges, Way::Out, after_opt) }
    }

    /// Begins to copy the buffer into the ranges.
    ///
    /// # Safety
    /// The ranges are those that the buffer was taken for, and stay writable until
    /// [`Packed::wait`] has returned; nobody has a reference to them.
    pub(crate) unsafe fn scatter(&mut self, ranges: &[(Place, u64)]) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.each(ranges, Way::In, None) }
    }

    /// # Safety
    /// As [`Packed::gather`] or [`Packed::scatter`].
    unsafe fn each(
        &mut self,
        ranges: &[(Place, u64)],
        way: Way,
        after_opt: Option<u64>,
    ) -> Result<(), TransportError> {
        let mut reached = self.buffer.address();
        for alike in ranges.chunk_by(|(one, _), (other, _)| is_alike(one, other)) {
            let bytes: u64 = alike.iter().map(|(_, len)| len).sum();
            match alike.first() {
                Some((Place::Device(memory, _), _)) => {
                    let pieces: Vec<(u64, u64)> = alike
                        .iter()
                        .map(|(place, len)| (place.number(), *len))
                        .collect();
                    let mut flight = Flight::open(memory.stage(), memory.device())?;
                    // SAFETY: the caller's ranges, and a part of the buffer that is theirs.
                    let begun = unsafe {
                        match way {
                            Way::Out => flight.begin_out(&pieces, reached, after_opt),
                            Way::In => flight.begin_in(reached, &pieces),
                        }
                    };
                    begun?;
                    self.flights.push_back(flight);
                }
                // SAFETY: as above.
                _ => unsafe { copy_host(alike, reached, way) },
            }
            reached += bytes;
        }
        Ok(())
    }

    /// Waits until what was begun is over: the bytes are in the buffer, or in their places and
    /// visible.
    ///
    /// # Errors
    /// The driver's. Nothing more is written then.
    pub(crate) fn wait(&mut self) -> Result<(), TransportError> {
        let mut result = Ok(());
        for flight in &mut self.flights {
            result = result.and(flight.wait());
        }
        self.flights.clear();
        result
    }
}

/// # Safety
/// The ranges are memory of this process, and `buffer` has room for them.
unsafe fn copy_host(ranges: &[(Place, u64)], buffer: u64, way: Way) {
    let mut reached = std::ptr::with_exposed_provenance_mut::<u8>(buffer as usize);
    for (place, len) in ranges {
        if let Place::Host(host) = place {
            // SAFETY: the caller's promise.
            unsafe {
                match way {
                    Way::Out => sys::copy(*host, reached, *len as usize),
                    Way::In => sys::copy(reached, *host, *len as usize),
                }
            }
        }
        reached = reached.wrapping_add(*len as usize);
    }
}

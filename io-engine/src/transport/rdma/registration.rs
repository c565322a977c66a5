//! A region as one network device knows it: one registration, or several with keys of their own,
//! where device memory lies in several allocations or a limit asks for slices.

use std::sync::Arc;

use common::wire::rdma_control::{MemoryKeys, MemoryPart};

use crate::device::nic::{self, NicChunk};
use crate::error::{TransportError, TransportErrorKind};
use crate::rdma_options::RdmaOptions;
use crate::region::Region;
use crate::transport::rdma::verbs::{MemoryRegion, ProtectionDomain};

/// One piece of a region, behind the pieces before it.
#[derive(Debug)]
struct Part {
    start: u64,
    end: u64,
    memory: Arc<MemoryRegion>,
}

/// A region's registrations, in order and without gaps; there is at least one.
#[derive(Debug)]
pub(crate) struct Registration {
    parts: Vec<Part>,
    /// Whether a peer's writes are only sure to be seen by the device after a read.
    reads_back: bool,
}

impl Registration {
    /// Registers a region with a network device.
    ///
    /// # Errors
    /// With what to change, when a limit was reached; with why for each way into device memory,
    /// when there is none.
    pub(crate) fn new(
        domain: &Arc<ProtectionDomain>,
        region: &Region,
        options: &RdmaOptions,
    ) -> Result<Self, TransportError> {
        let Some(memory) = region.memory().device() else {
            let device_most = domain.device().limits().max_region_bytes;
            let most = options.most_region_bytes.min(device_most).max(1);
            let slices = slices(region.len().get(), most).map(|(offset, length)| {
                let memory = MemoryRegion::of_host_slice(domain, region, offset, length)?;
                Ok((length, memory))
            });
            let slices = slices.collect::<Result<Vec<_>, TransportError>>()?;
            return Ok(Self::joined(slices, false));
        };
        let range = (common::ids::ByteOffset(region.offset()), region.len());
        let order = &options.device_memory;
        let register = |chunk: NicChunk, dma_buf_opt: Option<nic::DmaBuf<'_>>, access| {
            MemoryRegion::of_device_chunk(domain, region, chunk, dma_buf_opt, access)
        };
        let parts = nic::register(memory, range, order, register)?;
        let parts = parts.into_iter().map(|(chunk, made)| (chunk.len, made));
        Ok(Self::joined(parts, memory.needs_read_back()))
    }

    fn joined(parts: impl IntoIterator<Item = (u64, MemoryRegion)>, reads_back: bool) -> Self {
        let mut reached = 0;
        let parts = parts.into_iter().map(|(len, memory)| {
            let start = reached;
            reached += len;
            Part {
                start,
                end: reached,
                memory: Arc::new(memory),
            }
        });
        Self {
            parts: parts.collect(),
            reads_back,
        }
    }

    /// Where each piece but the last one ends.
    pub(crate) fn seams(&self) -> impl Iterator<Item = u64> {
        let inner = self.parts.len().saturating_sub(1);
        self.parts.iter().take(inner).map(|part| part.end)
    }

    /// The registration in which a range lies, and where in it.
    pub(crate) fn at(
        &self,
        offset: u64,
        bytes: u64,
    ) -> Result<(&Arc<MemoryRegion>, u64), TransportError> {
        let mut parts = self.parts.iter();
        let part = match self.parts.as_slice() {
            [only] => Some(only),
            _ => parts.find(|part| (part.start..part.end).contains(&offset)),
        };
        let part = part.filter(|part| {
            let end = offset.checked_add(bytes);
            end.is_some_and(|end| end <= part.end)
        });
        let part = part.ok_or_else(|| {
            TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!("{bytes} bytes at {offset} leave their registration"),
            )
        })?;
        Ok((&part.memory, offset - part.start))
    }

    /// What a peer is told: where it is and how long, with the key of the only piece, or of the
    /// first.
    pub(crate) fn keys(&self) -> MemoryKeys {
        let bytes = self.parts.last().map_or(0, |last| last.end);
        self.parts
            .first()
            .map_or_else(MemoryKeys::default, |first| MemoryKeys {
                address: first.memory.address(),
                local_key: first.memory.local_key(),
                remote_key: first.memory.remote_key(),
                length: bytes,
            })
    }

    /// The pieces, where there are several.
    pub(crate) fn told_parts(&self) -> Vec<MemoryPart> {
        if self.parts.len() < 2 {
            return Vec::new();
        }
        let told = |part: &Part| MemoryPart {
            bytes: part.end - part.start,
            remote_key: part.memory.remote_key(),
        };
        self.parts.iter().map(told).collect()
    }

    /// Whether a peer is to read after it wrote.
    pub(crate) fn reads_back(&self) -> bool {
        self.reads_back
    }

    /// Ends the device's access; what comes back is still named by posted work.
    pub(crate) fn end(self: Arc<Self>) -> Result<(), Arc<Self>> {
        let is_posted = |part: &Part| Arc::strong_count(&part.memory) > 1;
        if Arc::strong_count(&self) > 1 || self.parts.iter().any(is_posted) {
            return Err(self);
        }
        drop(self);
        Ok(())
    }
}

/// Where each slice of at most so many bytes begins, and its length; one of an empty region.
fn slices(length: u64, most: u64) -> impl Iterator<Item = (u64, u64)> {
    let count = length.div_ceil(most).max(1);
    (0..count).map(move |slice| {
        let offset = slice * most;
        (offset, most.min(length - offset))
    })
}

#[cfg(test)]
mod tests {
    use super::slices;

    #[test]
    fn slices_cover_a_region_once() {
        for (length, most, wanted) in [
            (10, 4, &[(0, 4), (4, 4), (8, 2)][..]),
            (8, 4, &[(0, 4), (4, 4)]),
            (4, 4, &[(0, 4)]),
            (3, u64::MAX, &[(0, 3)]),
            (0, 4, &[(0, 0)]),
        ] {
            assert_eq!(slices(length, most).collect::<Vec<_>>(), wanted);
        }
    }
}

//! Registered memory, here and at the peer.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use common::ids::{ByteLen, ByteOffset};
use common::wire::{MemoryDesc, MemoryLocation};
use subtle::ConstantTimeEq;

use crate::error::{TransportError, TransportErrorKind};
use crate::memory::Memory;

/// First element of the tags that a Ferry engine appends to descriptors.
pub(crate) const TAG_MAGIC: &str = "FRY1";

/// Where a region is. Every check and descriptor carries it; host memory is what exists today.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// Host memory.
    Host,
    /// Memory of a device.
    Device {
        /// Number of the device in its runtime.
        device: u32,
    },
}

/// 128 random bits, made at each registration: who has them was told of the region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionKey(pub [u8; 16]);

impl RegionKey {
    /// Compares in constant time.
    pub(crate) fn matches(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

/// A registered part of a pool. Clones share the registration.
#[derive(Clone, Debug)]
pub struct Region(Arc<Registered>);

#[derive(Debug)]
struct Registered {
    memory: Memory,
    offset: u64,
    len: u64,
    id: u32,
    key: RegionKey,
    label: Arc<str>,
    engine_key: Arc<str>,
    owner_instance: [u8; 16],
    gate: Mutex<Gate>,
    drained: Condvar,
}

/// Who writes into a region now, and whether anybody may begin to.
#[derive(Debug, Default)]
struct Gate {
    closed: bool,
    writers: usize,
}

impl Region {
    pub(crate) fn new(
        memory: &Memory,
        (offset, len): (ByteOffset, ByteLen),
        id: u32,
        key: RegionKey,
        label: &str,
        (engine_key, owner_instance): (&Arc<str>, [u8; 16]),
    ) -> Result<Self, TransportError> {
        memory.address(offset.get(), len.get())?;
        Ok(Self(Arc::new(Registered {
            memory: memory.clone(),
            offset: offset.get(),
            len: len.get(),
            id,
            key,
            label: label.into(),
            engine_key: Arc::clone(engine_key),
            owner_instance,
            gate: Mutex::default(),
            drained: Condvar::new(),
        })))
    }

    /// Number of the region within its engine.
    pub fn id(&self) -> u32 {
        self.0.id
    }

    /// Bytes of the region.
    pub fn len(&self) -> ByteLen {
        ByteLen(self.0.len)
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// What the owner called it.
    pub fn label(&self) -> &str {
        &self.0.label
    }

    /// Where it is.
    pub fn location(&self) -> Location {
        Location::Host
    }

    pub(crate) fn key(&self) -> &RegionKey {
        &self.0.key
    }

    /// What peers are told: MoRI's elements, and a tag with the region's key behind them.
    pub fn desc(&self) -> MemoryDesc {
        let tag = rmpv::Value::Array(vec![
            TAG_MAGIC.into(),
            rmpv::Value::Binary(self.0.key.0.to_vec()),
        ]);
        MemoryDesc {
            engine_key: self.0.engine_key.to_string(),
            id: self.0.id,
            data: self.address(0, 0).map_or(0, |address| address as u64),
            size: self.0.len,
            location: MemoryLocation::Host,
            numa_node: 0,
            extra: vec![tag],
            ..MemoryDesc::default()
        }
    }

    /// Copies bytes out of the region.
    ///
    /// # Errors
    /// [`TransportErrorKind::OutOfBounds`].
    pub fn read(&self, offset: ByteOffset, out: &mut [u8]) -> Result<(), TransportError> {
        let at = self.checked_offset(offset.get(), out.len() as u64)?;
        self.0.memory.read(ByteOffset(at), out)
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// [`TransportErrorKind::OutOfBounds`], or [`TransportErrorKind::NotRegistered`] when it was
    /// deregistered.
    pub fn write(&self, offset: ByteOffset, bytes: &[u8]) -> Result<(), TransportError> {
        let at = self.checked_offset(offset.get(), bytes.len() as u64)?;
        let _writer = self.begin_write()?;
        self.0.memory.write(ByteOffset(at), bytes)
    }

    /// The address of a range; valid while `self` or a clone lives.
    pub(crate) fn address(&self, offset: u64, len: u64) -> Result<*mut u8, TransportError> {
        let at = self.checked_offset(offset, len)?;
        self.0.memory.address(at, len)
    }

    fn checked_offset(&self, offset: u64, len: u64) -> Result<u64, TransportError> {
        let end = offset.checked_add(len).filter(|end| *end <= self.0.len);
        end.and_then(|_| self.0.offset.checked_add(offset))
            .ok_or_else(|| {
                TransportError::quiesced(
                    TransportErrorKind::OutOfBounds,
                    format!(
                        "{len} bytes at offset {offset} leave region {} ({}) of {} bytes",
                        self.0.id, self.0.label, self.0.len
                    ),
                )
            })
    }

    /// Enters as a writer; the guard keeps the region's memory and is waited for by
    /// [`Region::close`].
    pub(crate) fn begin_write(&self) -> Result<WriteGuard, TransportError> {
        let mut gate = self.0.gate.lock().unwrap_or_else(PoisonError::into_inner);
        if gate.closed {
            return Err(TransportError::quiesced(
                TransportErrorKind::NotRegistered,
                format!("region {} ({}) was deregistered", self.0.id, self.0.label),
            ));
        }
        gate.writers += 1;
        Ok(WriteGuard(self.clone()))
    }

    /// The start of the engine that registered it; region numbers are unique within one.
    pub(crate) fn owner_instance(&self) -> &[u8; 16] {
        &self.0.owner_instance
    }

    /// Lets no new writer in and waits for those inside. Whether all have left.
    pub(crate) fn close(&self, deadline: Instant) -> bool {
        let mut gate = self.0.gate.lock().unwrap_or_else(PoisonError::into_inner);
        gate.closed = true;
        while gate.writers > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.0.drained.wait_timeout(gate, left);
            gate = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// A writer inside a region.
#[derive(Debug)]
pub(crate) struct WriteGuard(Region);

impl WriteGuard {
    pub(crate) fn region(&self) -> &Region {
        &self.0
    }
}

impl Drop for WriteGuard {
    fn drop(&mut self) {
        let registered = &self.0.0;
        let mut gate = registered
            .gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        gate.writers -= 1;
        if gate.writers == 0 {
            registered.drained.notify_all();
        }
    }
}

/// A region of a peer, as its descriptor tells.
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    pub(crate) id: u32,
    pub(crate) len: u64,
    /// Virtual address in the owner's process; believed only if the engine is told to.
    pub(crate) claimed_address: u64,
    /// `None` when the peer is no Ferry engine.
    pub(crate) key_opt: Option<RegionKey>,
    pub(crate) location: Location,
}

impl RemoteRegion {
    /// Reads a peer's descriptor.
    ///
    /// # Errors
    /// [`TransportErrorKind::Protocol`] when the location is unknown, or a tag of ours is broken.
    pub fn from_desc(desc: &MemoryDesc) -> Result<Self, TransportError> {
        let refused =
            |message: String| TransportError::quiesced(TransportErrorKind::Protocol, message);
        let location = match desc.location {
            MemoryLocation::Host => Location::Host,
            MemoryLocation::Device => Location::Device {
                device: u32::try_from(desc.device_id)
                    .map_err(|_| refused(format!("device number {}", desc.device_id)))?,
            },
            MemoryLocation::Unknown(number) => {
                return Err(refused(format!("memory location {number} is unknown")));
            }
        };
        let tag = desc
            .extra
            .iter()
            .filter_map(rmpv::Value::as_array)
            .find(|elements| elements.first().and_then(rmpv::Value::as_str) == Some(TAG_MAGIC));
        let key_opt = match tag {
            None => None,
            Some(elements) => {
                let key = elements.get(1).and_then(rmpv::Value::as_slice);
                let key = key.and_then(|key| <[u8; 16]>::try_from(key).ok());
                Some(RegionKey(key.ok_or_else(|| {
                    refused(format!(
                        "the tag of region {} holds no key of 16 bytes",
                        desc.id
                    ))
                })?))
            }
        };
        Ok(Self {
            id: desc.id,
            len: desc.size,
            claimed_address: desc.data,
            key_opt,
            location,
        })
    }

    /// Bytes of the region, as its owner claims.
    pub const fn len(&self) -> ByteLen {
        ByteLen(self.len)
    }

    /// Whether the region has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it is.
    pub const fn location(&self) -> Location {
        self.location
    }
}

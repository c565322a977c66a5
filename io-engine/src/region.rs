//! Registered memory, here and at the peer.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Instant;

use common::ids::{ByteLen, ByteOffset};
use common::wire::{MemoryDesc, MemoryLocation};
use subtle::ConstantTimeEq;

use crate::error::{TransportError, TransportErrorKind};
use crate::foreign::{AnyMemory, CALLERS_OWN, Place};
use crate::grant::GRANT_BYTES;
use crate::sync::{Condvar, Mutex};

/// First element of the tags that a Ferry engine appends to descriptors.
pub(crate) const TAG_MAGIC: &str = "FRY1";

/// In the place of a tag's runtime: host memory, whatever the descriptor's elements say.
const HOST_TAG: &str = "host";

/// Where a region is. Pools, checks, descriptors and transports carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// Host memory.
    Host,
    /// Memory of a device.
    Device {
        /// Whose driver manages it.
        runtime: DeviceRuntime,
        /// Number of the device in its runtime.
        number: u32,
    },
}

/// A device's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceRuntime {
    /// NVIDIA's.
    Cuda,
    /// AMD's.
    Hip,
    /// The peer's descriptor does not say; MoRI's has no such element.
    Unnamed,
}

impl DeviceRuntime {
    /// What it is called in descriptors and options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Hip => "hip",
            Self::Unnamed => "",
        }
    }

    /// The runtime with a name; [`Self::Unnamed`] for every other.
    pub fn from_name(name: Option<&str>) -> Self {
        match name {
            Some("cuda") => Self::Cuda,
            Some("hip") => Self::Hip,
            _ => Self::Unnamed,
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => formatter.write_str("host memory"),
            Self::Device { runtime, number } => {
                write!(formatter, "memory of {} device {number}", runtime.name())
            }
        }
    }
}

/// 128 random bits, made at each registration: who has them was told of the region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionKey(pub [u8; 16]);

impl RegionKey {
    /// Compares in constant time.
    pub(crate) fn matches(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }

    /// Mixed with another key; doing so twice gives this one again.
    pub(crate) fn mixed(&self, other: &[u8; 16]) -> Self {
        let mut mixed = self.0;
        mixed
            .iter_mut()
            .zip(other)
            .for_each(|(own, other)| *own ^= other);
        Self(mixed)
    }
}

/// A registered part of a pool. Clones share the registration.
#[derive(Clone, Debug)]
pub struct Region(Arc<Registered>);

#[derive(Debug)]
struct Registered {
    memory: AnyMemory,
    offset: u64,
    len: u64,
    id: u32,
    key: RegionKey,
    label: Arc<str>,
    engine_key: Arc<str>,
    owner_instance: [u8; 16],
    /// Why network devices do not reach it.
    unreachable: OnceLock<String>,
    gate: Mutex<Gate>,
    drained: Condvar,
}

/// Who reads or writes a region now, and whether anybody may begin to.
#[derive(Debug, Default)]
struct Gate {
    closed: bool,
    users: usize,
}

impl Region {
    pub(crate) fn new(
        memory: AnyMemory,
        (offset, len): (ByteOffset, ByteLen),
        id: u32,
        key: RegionKey,
        label: &str,
        (engine_key, owner_instance): (&Arc<str>, [u8; 16]),
    ) -> Result<Self, TransportError> {
        memory.place(offset.get(), len.get())?;
        Ok(Self(Arc::new(Registered {
            memory,
            offset: offset.get(),
            len: len.get(),
            id,
            key,
            label: label.into(),
            engine_key: Arc::clone(engine_key),
            owner_instance,
            unreachable: OnceLock::new(),
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
        self.0.memory.location()
    }

    pub(crate) fn memory(&self) -> &AnyMemory {
        &self.0.memory
    }

    /// Where the region begins in its pool.
    pub(crate) fn offset(&self) -> u64 {
        self.0.offset
    }

    pub(crate) fn key(&self) -> &RegionKey {
        &self.0.key
    }

    /// What peers are told: MoRI's elements, and a tag with the region's key behind them.
    pub fn desc(&self) -> MemoryDesc {
        let (location, device_id) = match self.location() {
            Location::Host => (MemoryLocation::Host, MemoryDesc::default().device_id),
            Location::Device { number, .. } => (
                MemoryLocation::Device,
                i32::try_from(number).unwrap_or(i32::MAX),
            ),
        };
        MemoryDesc {
            engine_key: self.0.engine_key.to_string(),
            id: self.0.id,
            data: self.place(0, 0).map_or(0, |place| place.number()),
            size: self.0.len,
            location,
            device_id,
            numa_node: 0,
            extra: vec![self.tag(false)],
            ..MemoryDesc::default()
        }
    }

    /// `["FRY1", key, place, why no other process can map it, why network devices do not reach it]`,
    /// without what goes without saying.
    fn tag(&self, names_host: bool) -> rmpv::Value {
        let key = rmpv::Value::Binary(self.0.key.0.to_vec());
        let mut tag = vec![TAG_MAGIC.into(), key];
        let unshared_opt = self.0.memory.unshared();
        match self.location() {
            // A host's is always reached by its network devices.
            Location::Host if !names_host && unshared_opt.is_none() => {}
            Location::Host => tag.push(HOST_TAG.into()),
            Location::Device { runtime, .. } => tag.push(runtime.name().into()),
        }
        let unreachable_opt = self.unreachable();
        if unshared_opt.is_some() || unreachable_opt.is_some() {
            tag.push(unshared_opt.unwrap_or_default().into());
        }
        tag.extend(unreachable_opt.map(rmpv::Value::from));
        rmpv::Value::Array(tag)
    }

    /// As [`Region::desc`], with the place that the owner says it is in. Engines of other makes
    /// register host memory as a device's; peers of theirs look at these elements, Ferry's at the
    /// tag, which says what is true.
    pub fn desc_as(&self, location: MemoryLocation, device_id: i32) -> MemoryDesc {
        let mut desc = self.desc();
        if self.location() == Location::Host && location != MemoryLocation::Host {
            desc.extra = vec![self.tag(true)];
            // MoRI knows it for host memory only.
            desc.numa_node = MemoryDesc::default().numa_node;
        }
        MemoryDesc {
            location,
            device_id,
            ..desc
        }
    }

    /// Why network devices do not reach it; `None` when they do, or nobody has tried.
    pub(crate) fn unreachable(&self) -> Option<&str> {
        self.0.unreachable.get().map(String::as_str)
    }

    /// Notes it; the first reason stays.
    #[cfg(feature = "rdma")]
    pub(crate) fn note_unreachable(&self, why: String) {
        // Nobody tries twice.
        let _ = self.0.unreachable.set(why);
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
        let _guard = self.enter()?;
        self.0.memory.write(ByteOffset(at), bytes)
    }

    /// The address of a range in this process; a device's memory has none. Valid while `self` or a clone lives.
    pub(crate) fn address(&self, offset: u64, len: u64) -> Result<*mut u8, TransportError> {
        let at = self.checked_offset(offset, len)?;
        self.0.memory.address(at, len)
    }

    /// Where a range is; valid while `self` or a clone lives.
    pub(crate) fn place(&self, offset: u64, len: u64) -> Result<Place, TransportError> {
        let at = self.checked_offset(offset, len)?;
        self.0.memory.place(at, len)
    }

    /// Whether it is a device's memory.
    pub(crate) fn is_on_device(&self) -> bool {
        self.0.memory.device().is_some()
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

    /// Enters to read or write; the guard keeps the region's memory and is waited for by
    /// [`Region::close`].
    pub(crate) fn enter(&self) -> Result<RegionGuard, TransportError> {
        let mut gate = self.0.gate.lock().unwrap_or_else(PoisonError::into_inner);
        if gate.closed {
            return Err(TransportError::quiesced(
                TransportErrorKind::NotRegistered,
                format!("region {} ({}) was deregistered", self.0.id, self.0.label),
            ));
        }
        gate.users += 1;
        Ok(RegionGuard(self.clone()))
    }

    /// The start of the engine that registered it; region numbers are unique within one.
    pub(crate) fn owner_instance(&self) -> &[u8; 16] {
        &self.0.owner_instance
    }

    /// Lets nobody in any more and waits for those inside. Whether all have left.
    pub(crate) fn close(&self, deadline: Instant) -> bool {
        let mut gate = self.0.gate.lock().unwrap_or_else(PoisonError::into_inner);
        gate.closed = true;
        while gate.users > 0 {
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

/// A reader or writer inside a region.
#[derive(Debug)]
pub(crate) struct RegionGuard(Region);

impl RegionGuard {
    pub(crate) fn region(&self) -> &Region {
        &self.0
    }
}

impl Drop for RegionGuard {
    fn drop(&mut self) {
        let registered = &self.0.0;
        let mut gate = registered
            .gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        gate.users -= 1;
        // Only a closing region is waited for; waking nobody would cost a system call each time.
        if gate.users == 0 && gate.closed {
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
    /// Why it cannot be mapped here, as its owner says.
    pub(crate) unshared_opt: Option<Cow<'static, str>>,
    /// Why its owner's network devices do not reach it, as that says.
    pub(crate) unreachable_opt: Option<Cow<'static, str>>,
    /// The key of a grant, under which `tcp` writes to it.
    pub(crate) grant_opt: Option<[u8; GRANT_BYTES]>,
}

/// What a descriptor's tag says of where memory is.
pub(crate) struct ToldPlace<'a> {
    tag_opt: Option<&'a [rmpv::Value]>,
    name_opt: Option<&'a str>,
    /// A device's memory of an engine of ours. What engines of other makes call that may be
    /// anything.
    pub(crate) is_on_device: bool,
    unshared_opt: Option<&'a str>,
    unreachable_opt: Option<&'a str>,
}

impl ToldPlace<'_> {
    /// Why it cannot be mapped by another process.
    pub(crate) fn unshared(&self) -> Option<Cow<'static, str>> {
        let why = self.unshared_opt?;
        // Of the usual reason no copy is made for every region of every batch.
        Some(match why == CALLERS_OWN {
            true => Cow::Borrowed(CALLERS_OWN),
            false => Cow::Owned(why.to_owned()),
        })
    }

    /// Why its owner's network devices do not reach it.
    pub(crate) fn unreachable(&self) -> Option<Cow<'static, str>> {
        self.unreachable_opt.map(|why| Cow::Owned(why.to_owned()))
    }
}

/// Reads it; cheap.
pub(crate) fn told_place(desc: &MemoryDesc) -> ToldPlace<'_> {
    let mut arrays = desc.extra.iter().filter_map(rmpv::Value::as_array);
    let tag_opt =
        arrays.find(|elements| elements.first().and_then(rmpv::Value::as_str) == Some(TAG_MAGIC));
    let text = |place: usize| tag_opt.and_then(|elements| elements.get(place)?.as_str());
    let name_opt = text(2);
    let is_called_a_devices = desc.location == MemoryLocation::Device;
    ToldPlace {
        tag_opt: tag_opt.map(Vec::as_slice),
        name_opt,
        is_on_device: tag_opt.is_some() && is_called_a_devices && name_opt != Some(HOST_TAG),
        unshared_opt: text(3).filter(|why| !why.is_empty()),
        unreachable_opt: text(4).filter(|why| !why.is_empty()),
    }
}

impl RemoteRegion {
    /// Reads a peer's descriptor.
    ///
    /// # Errors
    /// [`TransportErrorKind::Protocol`] when the location is unknown, or a tag of ours is broken.
    pub fn from_desc(desc: &MemoryDesc) -> Result<Self, TransportError> {
        let refused =
            |message: String| TransportError::quiesced(TransportErrorKind::Protocol, message);
        let place = told_place(desc);
        let location = match desc.location {
            _ if place.name_opt == Some(HOST_TAG) => Location::Host,
            MemoryLocation::Host => Location::Host,
            MemoryLocation::Device => Location::Device {
                runtime: DeviceRuntime::from_name(place.name_opt),
                number: u32::try_from(desc.device_id)
                    .map_err(|_| refused(format!("device number {}", desc.device_id)))?,
            },
            MemoryLocation::Unknown(number) => {
                return Err(refused(format!("memory location {number} is unknown")));
            }
        };
        let key_opt = match place.tag_opt {
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
            unshared_opt: place.unshared(),
            unreachable_opt: place.unreachable(),
            grant_opt: None,
        })
    }

    /// The same, to be written to under a grant of the owner's where bytes pass its hands (`tcp`).
    #[must_use]
    pub fn under_grant(mut self, key: [u8; GRANT_BYTES]) -> Self {
        self.grant_opt = Some(key);
        self
    }

    /// What the owner is shown over `tcp`.
    pub(crate) fn shown_key(&self) -> Option<RegionKey> {
        let key = self.key_opt?;
        Some(self.grant_opt.map_or(key, |grant| key.mixed(&grant)))
    }

    /// Whether it is a device's memory; what engines of other makes call that may be anything.
    pub(crate) fn is_known_on_device(&self) -> bool {
        self.key_opt.is_some() && self.location != Location::Host
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

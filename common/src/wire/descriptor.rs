//! MoRI's packed descriptors (`spec/mori-io.md`, section 2): msgpack arrays, never maps.
//!
//! Integers take the shortest form, handles are `bin`. Readers are as lenient as MoRI's: missing
//! trailing elements take their defaults, extra elements are kept apart, `str` and `bin` are
//! interchangeable, bytes behind the array are ignored. Maps, integers out of range and handles
//! over 64 bytes are errors.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeSeq, Serializer};

use crate::check::CheckMode;
use crate::wire::error::{WireError, msgpack_error};
use crate::wire::frame::Frame;

/// Bytes of a device's IPC handle and of a fabric handle.
pub const HANDLE_BYTES: usize = 64;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryLocation {
    /// Host memory (1).
    Host,
    /// Memory of the device `device_id` (2).
    Device,
    /// Any other number, kept as it came.
    Unknown(u32),
}

impl MemoryLocation {
    /// MoRI's number.
    pub const fn number(self) -> u32 {
        match self {
            Self::Host => 1,
            Self::Device => 2,
            Self::Unknown(number) => number,
        }
    }

    /// The location of MoRI's number.
    pub const fn from_number(number: u32) -> Self {
        match number {
            1 => Self::Host,
            2 => Self::Device,
            other => Self::Unknown(other),
        }
    }
}

/// A rank's io engine: `[key, nodeId, hostname, host, port, pid]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineDesc {
    /// Unique name of the engine.
    pub key: String,
    /// The host's boot id, or what the operator configured.
    pub node_id: String,
    /// The host's name.
    pub hostname: String,
    /// Address of the engine's listener.
    pub host: String,
    /// Port of the engine's listener; 1 is MoRI's sentinel for "no RDMA here".
    pub port: u16,
    /// Process id, as the owner sees it.
    pub pid: i64,
    /// Elements behind the sixth, kept apart; a Ferry engine puts its capability tag there.
    pub extra: Vec<rmpv::Value>,
}

/// One registered buffer: MoRI's 15 elements.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryDesc {
    /// Key of the engine that registered it.
    pub engine_key: String,
    /// Number within that engine.
    pub id: u32,
    /// Device number; -1 for host memory.
    pub device_id: i32,
    /// PCI address of the device; empty for host memory.
    pub device_bus_id: String,
    /// Virtual address in the owner's process.
    pub data: u64,
    /// Bytes.
    pub size: u64,
    /// Host or device.
    pub location: MemoryLocation,
    /// At most 64 bytes of a device's IPC handle; zeros for host memory.
    pub ipc_handle: Vec<u8>,
    /// NUMA node of host memory; -1 for device memory.
    pub numa_node: i32,
    /// Offset into the allocation behind the IPC handle.
    pub ipc_offset: u64,
    /// At most 64 bytes of a fabric handle.
    pub fabric_handle: Vec<u8>,
    /// vPOD number; -1 for none.
    pub vpod_id: i32,
    /// vPOD peer name.
    pub vpod_ppod_id: String,
    /// Offset into the fabric allocation.
    pub fabric_offset: u64,
    /// Bytes of the fabric allocation.
    pub fabric_alloc_size: u64,
    /// Elements behind the fifteenth, kept apart; a Ferry engine puts the region key there.
    pub extra: Vec<rmpv::Value>,
}

impl Default for MemoryDesc {
    /// MoRI's defaults of the elements that an older peer leaves out.
    fn default() -> Self {
        Self {
            engine_key: String::new(),
            id: 0,
            device_id: -1,
            device_bus_id: String::new(),
            data: 0,
            size: 0,
            location: MemoryLocation::Unknown(0),
            ipc_handle: vec![0; HANDLE_BYTES],
            numa_node: -1,
            ipc_offset: 0,
            fabric_handle: vec![0; HANDLE_BYTES],
            vpod_id: -1,
            vpod_ppod_id: String::new(),
            fabric_offset: 0,
            fabric_alloc_size: 0,
            extra: Vec::new(),
        }
    }
}

/// First element of the tag that marks the descriptor in a Ferry rank's REGISTER.
const RANK_TAG: &str = "FRYR";

impl EngineDesc {
    /// The same, marked as that of a rank that speaks Ferry's own messages, with the number of its
    /// REGISTER, which the answer repeats, and the checksums that it asks for. An engine of Ferry's
    /// below another control plane has no such mark; stock peers skip elements that they do not
    /// know.
    #[must_use]
    pub fn with_rank_tag(mut self, number: u64, checks_opt: Option<CheckMode>) -> Self {
        let mut tag = vec![RANK_TAG.into(), number.into()];
        tag.extend(checks_opt.map(|mode| rmpv::Value::from(mode.name())));
        self.extra.push(rmpv::Value::Array(tag));
        self
    }

    /// The number of the REGISTER, if the rank behind it speaks Ferry's own messages.
    pub fn rank_tag(&self) -> Option<u64> {
        self.tag()?.get(1)?.as_u64()
    }

    /// Whether the rank behind it asks for checksums of what is written to it, and of how much.
    pub fn asked_checks(&self) -> Option<CheckMode> {
        let mode = self.tag()?.get(2)?.as_str();
        mode.and_then(CheckMode::from_name)
    }

    fn tag(&self) -> Option<&[rmpv::Value]> {
        let mut tags = self.extra.iter().filter_map(rmpv::Value::as_array);
        let is_ours =
            |tag: &&Vec<rmpv::Value>| tag.first().and_then(rmpv::Value::as_str) == Some(RANK_TAG);
        tags.find(is_ours).map(Vec::as_slice)
    }

    /// The packed form.
    ///
    /// # Errors
    /// [`WireError::Msgpack`] when an extra element cannot be written.
    pub fn pack(&self) -> Result<Frame, WireError> {
        pack(self, "engine descriptor")
    }

    /// Reads the packed form; bytes behind it are ignored, as MoRI does.
    ///
    /// # Errors
    /// [`WireError::Msgpack`] when it is no array of the known elements, or has no key.
    pub fn unpack(bytes: &[u8]) -> Result<Self, WireError> {
        let desc: Self = unpack(bytes, "engine descriptor")?;
        if desc.key.is_empty() {
            return Err(WireError::Msgpack {
                what: "engine descriptor",
                detail: "it has no key".to_owned(),
            });
        }
        Ok(desc)
    }
}

impl MemoryDesc {
    /// The packed form.
    ///
    /// # Errors
    /// [`WireError::Msgpack`] when an extra element cannot be written.
    pub fn pack(&self) -> Result<Frame, WireError> {
        pack(self, "memory descriptor")
    }

    /// Reads the packed form; bytes behind it are ignored, as MoRI does.
    ///
    /// # Errors
    /// [`WireError::Msgpack`] when it is no array of the known elements.
    pub fn unpack(bytes: &[u8]) -> Result<Self, WireError> {
        unpack(bytes, "memory descriptor")
    }
}

fn pack<T: Serialize>(value: &T, what: &'static str) -> Result<Frame, WireError> {
    rmp_serde::to_vec(value).map_err(|error| msgpack_error(what, error))
}

fn unpack<'de, T: Deserialize<'de>>(bytes: &'de [u8], what: &'static str) -> Result<T, WireError> {
    rmp_serde::from_slice(bytes).map_err(|error| msgpack_error(what, error))
}

impl Serialize for EngineDesc {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut elements = serializer.serialize_seq(Some(6 + self.extra.len()))?;
        elements.serialize_element(&self.key)?;
        elements.serialize_element(&self.node_id)?;
        elements.serialize_element(&self.hostname)?;
        elements.serialize_element(&self.host)?;
        elements.serialize_element(&self.port)?;
        elements.serialize_element(&self.pid)?;
        for element in &self.extra {
            elements.serialize_element(element)?;
        }
        elements.end()
    }
}

impl<'de> Deserialize<'de> for EngineDesc {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements;
        impl<'de> Visitor<'de> for Elements {
            type Value = EngineDesc;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an array [key, node id, hostname, host, port, pid]")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<EngineDesc, A::Error> {
                Ok(EngineDesc {
                    key: text(&mut elements)?.unwrap_or_default(),
                    node_id: text(&mut elements)?.unwrap_or_default(),
                    hostname: text(&mut elements)?.unwrap_or_default(),
                    host: text(&mut elements)?.unwrap_or_default(),
                    port: elements.next_element()?.unwrap_or_default(),
                    pid: elements.next_element()?.unwrap_or_default(),
                    extra: rest(&mut elements)?,
                })
            }
        }
        deserializer.deserialize_seq(Elements)
    }
}

impl Serialize for MemoryDesc {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut elements = serializer.serialize_seq(Some(15 + self.extra.len()))?;
        elements.serialize_element(&self.engine_key)?;
        elements.serialize_element(&self.id)?;
        elements.serialize_element(&self.device_id)?;
        elements.serialize_element(&self.device_bus_id)?;
        elements.serialize_element(&self.data)?;
        elements.serialize_element(&self.size)?;
        elements.serialize_element(&self.location.number())?;
        elements.serialize_element(serde_bytes::Bytes::new(&self.ipc_handle))?;
        elements.serialize_element(&self.numa_node)?;
        elements.serialize_element(&self.ipc_offset)?;
        elements.serialize_element(serde_bytes::Bytes::new(&self.fabric_handle))?;
        elements.serialize_element(&self.vpod_id)?;
        elements.serialize_element(&self.vpod_ppod_id)?;
        elements.serialize_element(&self.fabric_offset)?;
        elements.serialize_element(&self.fabric_alloc_size)?;
        for element in &self.extra {
            elements.serialize_element(element)?;
        }
        elements.end()
    }
}

impl<'de> Deserialize<'de> for MemoryDesc {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements;
        impl<'de> Visitor<'de> for Elements {
            type Value = MemoryDesc;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an array [engine key, id, device id, ...]")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<MemoryDesc, A::Error> {
                let default = MemoryDesc::default();
                Ok(MemoryDesc {
                    engine_key: text(&mut elements)?.unwrap_or_default(),
                    id: elements.next_element()?.unwrap_or(default.id),
                    device_id: elements.next_element()?.unwrap_or(default.device_id),
                    device_bus_id: text(&mut elements)?.unwrap_or_default(),
                    data: elements.next_element()?.unwrap_or(default.data),
                    size: elements.next_element()?.unwrap_or(default.size),
                    location: elements
                        .next_element()?
                        .map_or(default.location, MemoryLocation::from_number),
                    ipc_handle: handle(&mut elements)?.unwrap_or(default.ipc_handle),
                    numa_node: elements.next_element()?.unwrap_or(default.numa_node),
                    ipc_offset: elements.next_element()?.unwrap_or(default.ipc_offset),
                    fabric_handle: handle(&mut elements)?.unwrap_or(default.fabric_handle),
                    vpod_id: elements.next_element()?.unwrap_or(default.vpod_id),
                    vpod_ppod_id: text(&mut elements)?.unwrap_or_default(),
                    fabric_offset: elements.next_element()?.unwrap_or(default.fabric_offset),
                    fabric_alloc_size: elements
                        .next_element()?
                        .unwrap_or(default.fabric_alloc_size),
                    extra: rest(&mut elements)?,
                })
            }
        }
        deserializer.deserialize_seq(Elements)
    }
}

/// `str` or `bin`; the bytes.
struct StrOrBin(Vec<u8>);

impl<'de> Deserialize<'de> for StrOrBin {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl Visitor<'_> for Either {
            type Value = StrOrBin;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or binary")
            }
            fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<StrOrBin, E> {
                Ok(StrOrBin(value.as_bytes().to_vec()))
            }
            fn visit_bytes<E: serde::de::Error>(self, value: &[u8]) -> Result<StrOrBin, E> {
                Ok(StrOrBin(value.to_vec()))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

pub(super) fn text<'de, A: SeqAccess<'de>>(elements: &mut A) -> Result<Option<String>, A::Error> {
    let element = elements.next_element::<StrOrBin>()?;
    element
        .map(|StrOrBin(bytes)| String::from_utf8(bytes).map_err(|_| A::Error::custom("not utf-8")))
        .transpose()
}

fn handle<'de, A: SeqAccess<'de>>(elements: &mut A) -> Result<Option<Vec<u8>>, A::Error> {
    let element = elements.next_element::<StrOrBin>()?;
    element
        .map(|StrOrBin(bytes)| {
            if bytes.len() > HANDLE_BYTES {
                return Err(A::Error::custom(format_args!(
                    "a handle of {} bytes, at most {HANDLE_BYTES} are possible",
                    bytes.len()
                )));
            }
            Ok(bytes)
        })
        .transpose()
}

pub(super) fn rest<'de, A: SeqAccess<'de>>(elements: &mut A) -> Result<Vec<rmpv::Value>, A::Error> {
    let mut extra = Vec::new();
    while let Some(element) = elements.next_element()? {
        extra.push(element);
    }
    Ok(extra)
}

/// Packs a list of descriptors: an array of `bin`; an empty list is an empty frame.
pub(crate) fn pack_list(descs: &[MemoryDesc], what: &'static str) -> Result<Frame, WireError> {
    if descs.is_empty() {
        return Ok(Frame::new());
    }
    let blobs = descs
        .iter()
        .map(packed_blob)
        .collect::<Result<Vec<_>, _>>()?;
    pack(&blobs, what)
}

/// Packs one list for each component; `nil` stands for an elided buffer.
pub(crate) fn pack_nested(
    components: &[Vec<Option<MemoryDesc>>],
    what: &'static str,
) -> Result<Frame, WireError> {
    if components.is_empty() {
        return Ok(Frame::new());
    }
    let blob = |desc: &Option<MemoryDesc>| desc.as_ref().map(packed_blob).transpose();
    let nested = components
        .iter()
        .map(|component| component.iter().map(blob).collect::<Result<Vec<_>, _>>())
        .collect::<Result<Vec<_>, _>>()?;
    pack(&nested, what)
}

fn packed_blob(desc: &MemoryDesc) -> Result<serde_bytes::ByteBuf, WireError> {
    desc.pack().map(serde_bytes::ByteBuf::from)
}

/// Reads a list of descriptors.
pub(crate) fn unpack_list(bytes: &[u8], what: &'static str) -> Result<Vec<MemoryDesc>, WireError> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let blobs: Vec<serde_bytes::ByteBuf> = unpack_whole(bytes, what)?;
    blobs.iter().map(|blob| MemoryDesc::unpack(blob)).collect()
}

/// Reads one list for each component, and tells the flat form of older releases from it.
pub(crate) fn unpack_nested(
    bytes: &[u8],
    what: &'static str,
) -> Result<Vec<Vec<Option<MemoryDesc>>>, WireError> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    type Nested = Vec<Vec<Option<serde_bytes::ByteBuf>>>;
    let nested: Nested = match unpack_whole(bytes, what) {
        Ok(nested) => nested,
        Err(nested_error) => {
            let flat: Result<Vec<Option<serde_bytes::ByteBuf>>, _> = unpack_whole(bytes, what);
            return Err(match flat {
                Ok(flat) => WireError::FlatState {
                    descriptors: flat.len(),
                },
                Err(_) => nested_error,
            });
        }
    };
    let unpack_blob = |blob: &Option<serde_bytes::ByteBuf>| {
        blob.as_ref()
            .map(|blob| MemoryDesc::unpack(blob))
            .transpose()
    };
    nested
        .iter()
        .map(|component| component.iter().map(unpack_blob).collect())
        .collect()
}

/// Reads a value that must fill the frame.
fn unpack_whole<'de, T: Deserialize<'de>>(
    bytes: &'de [u8],
    what: &'static str,
) -> Result<T, WireError> {
    let mut reader = rmp_serde::Deserializer::new(std::io::Cursor::new(bytes));
    let value = T::deserialize(&mut reader).map_err(|error| msgpack_error(what, error))?;
    let end = usize::try_from(reader.into_inner().position()).unwrap_or(bytes.len());
    match bytes.len() - end.min(bytes.len()) {
        0 => Ok(value),
        extra => Err(WireError::TrailingBytes {
            what,
            offset: end,
            extra,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> EngineDesc {
        EngineDesc {
            key: "eng-A".into(),
            node_id: "n0".into(),
            hostname: "h0".into(),
            host: "10.0.0.1".into(),
            port: 41234,
            pid: 4242,
            extra: Vec::new(),
        }
    }

    #[test]
    fn the_engine_descriptor_has_moris_bytes() {
        let bytes =
            hex::decode("96a5656e672d41a26e30a26830a831302e302e302e31cda112cd1092").unwrap();
        assert_eq!(engine().pack(), Ok(bytes.clone()));
        assert_eq!(EngineDesc::unpack(&bytes), Ok(engine()));
    }

    #[test]
    fn the_memory_descriptors_have_moris_bytes() {
        let host = MemoryDesc {
            engine_key: "eng-A".into(),
            id: 7,
            data: 0x007f_0000_1234_0000,
            size: 1 << 20,
            location: MemoryLocation::Host,
            numa_node: 0,
            ..MemoryDesc::default()
        };
        let zeros = "00".repeat(HANDLE_BYTES);
        let bytes = hex::decode(format!(
            "9fa5656e672d4107ffa0cf007f000012340000ce0010000001c440{zeros}0000c440{zeros}ffa00000"
        ))
        .unwrap();
        assert_eq!(host.pack(), Ok(bytes.clone()));
        assert_eq!(MemoryDesc::unpack(&bytes), Ok(host));

        let handle: Vec<u8> = (0..64).collect();
        let device = MemoryDesc {
            engine_key: "eng-A".into(),
            id: 300,
            device_id: 3,
            device_bus_id: "0000:c1:00.0".into(),
            data: 0x007f_0000_1234_0000,
            size: 8 << 30,
            location: MemoryLocation::Device,
            ipc_handle: handle.clone(),
            ipc_offset: 4096,
            ..MemoryDesc::default()
        };
        let bytes = hex::decode(format!(
            "9fa5656e672d41cd012c03ac303030303a63313a30302e30cf007f000012340000cf000000020000000002\
             c440{}ffcd1000c440{zeros}ffa00000",
            hex::encode(handle)
        ))
        .unwrap();
        assert_eq!(device.pack(), Ok(bytes.clone()));
        assert_eq!(MemoryDesc::unpack(&bytes), Ok(device));
    }

    #[test]
    fn shorter_and_longer_arrays_are_read() {
        let short = rmp_serde::to_vec(&("e", 5u32)).unwrap();
        let desc = MemoryDesc::unpack(&short).unwrap();
        assert_eq!(
            (
                desc.engine_key.as_str(),
                desc.id,
                desc.device_id,
                desc.vpod_id
            ),
            ("e", 5, -1, -1)
        );

        let mut longer = engine();
        longer.extra = vec![
            rmpv::Value::from("FRY1"),
            rmpv::Value::Binary(vec![1, 2, 3]),
        ];
        let mut bytes = longer.pack().unwrap();
        assert_eq!(bytes[0], 0x98);
        bytes.extend([0xc1, 0xff]);
        assert_eq!(
            EngineDesc::unpack(&bytes),
            Ok(longer),
            "extras are kept, trailing bytes ignored"
        );
    }

    #[test]
    fn what_is_no_descriptor_is_an_error() {
        let map =
            rmp_serde::to_vec_named(&std::collections::BTreeMap::from([("key", "e")])).unwrap();
        let bomb = vec![0x91; 200_000];
        let long_handle = rmp_serde::to_vec(&(
            "e",
            0u32,
            -1i32,
            "",
            0u64,
            0u64,
            1u32,
            serde_bytes::Bytes::new(&[0; 65]),
        ))
        .unwrap();
        let huge_array = [0xdd, 0xff, 0xff, 0xff, 0xff];
        let out_of_range = rmp_serde::to_vec(&("e", u64::MAX)).unwrap();
        for bytes in [
            &map[..],
            &bomb,
            &long_handle,
            &huge_array,
            &out_of_range,
            b"",
            &[0xc1],
            &[0xc0],
        ] {
            assert!(
                MemoryDesc::unpack(bytes).is_err(),
                "{}",
                crate::wire::error::shown(bytes)
            );
        }
        assert!(
            EngineDesc::unpack(&[0x90]).is_err(),
            "an engine without a key"
        );
    }
}

//! MoRI's RDMA control plane (`spec/mori-io.md`, section 3): what two engines tell each other over
//! TCP before one writes into the other's memory.
//!
//! ```text
//! u8 type | u32 body bytes, big-endian | body: a msgpack array
//! 0 RegEndpoint      [engine key, [local topo, remote topo], device, endpoint, nic rank, rail]
//! 1 AskMemoryRegion  [engine key, device, region id, [address, lkey, rkey, bytes]]
//! 2 Retire           [queue pair number, device]; between Ferry engines only
//! ```
//! A reply has the form of its request. Readers are as lenient as MoRI's: older releases end
//! earlier (four or five elements of RegEndpoint, two of a topo), extra elements are kept apart. A
//! Ferry engine appends one, the [`ControlTag`]; who sends it may go on using the connection,
//! which MoRI closes after one reply.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeSeq, Serializer};
use serde_bytes::{ByteArray, Bytes};

use crate::wire::descriptor::{MemoryLocation, rest, text};
use crate::wire::error::{WireError, msgpack_error};

/// Bytes before a body.
pub const HEADER_BYTES: usize = 5;
/// A longer body is refused before it is read; MoRI's limit.
pub const MAX_BODY_BYTES: usize = 1 << 20;
/// Bytes of a GID.
pub const GID_BYTES: usize = 16;
/// First element of a [`ControlTag`].
const TAG_MAGIC: &str = "FRY1";

/// What a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ControlType {
    /// Makes a queue pair at the peer and joins it with one here.
    RegEndpoint,
    /// Asks where a region is and for its rkey.
    AskMemoryRegion,
    /// Ends a queue pair of the peer; its reply proves that the peer accepts nothing over it.
    Retire,
}

impl ControlType {
    const ALL: [Self; 3] = [Self::RegEndpoint, Self::AskMemoryRegion, Self::Retire];

    /// The first byte of a message; no message of the tcp transport begins with it.
    pub const fn number(self) -> u8 {
        match self {
            Self::RegEndpoint => 0,
            Self::AskMemoryRegion => 1,
            Self::Retire => 2,
        }
    }

    /// The type of a first byte.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }
}

/// A message with its header.
///
/// # Errors
/// [`WireError::Msgpack`] when the body cannot be written or is over [`MAX_BODY_BYTES`].
pub fn framed(kind: ControlType, body: &impl Serialize) -> Result<Vec<u8>, WireError> {
    let body = rmp_serde::to_vec(body).map_err(|error| msgpack_error(WHAT, error))?;
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    if body.len() > MAX_BODY_BYTES {
        return Err(too_long(body.len()));
    }
    let mut bytes = vec![kind.number()];
    bytes.extend(length.to_be_bytes());
    bytes.extend(body);
    Ok(bytes)
}

/// Reads a header: the type, and the bytes of the body that follows.
///
/// # Errors
/// [`WireError::UnknownMessage`], or [`WireError::Msgpack`] when the body is too long.
pub fn parse_header(bytes: [u8; HEADER_BYTES]) -> Result<(ControlType, usize), WireError> {
    let [number, length @ ..] = bytes;
    let kind = ControlType::from_number(number).ok_or_else(|| WireError::UnknownMessage {
        seen: format!("control type {number}"),
    })?;
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_BODY_BYTES {
        return Err(too_long(length));
    }
    Ok((kind, length))
}

/// Reads a body; bytes behind the array are ignored, as MoRI does.
///
/// # Errors
/// [`WireError::Msgpack`].
pub fn unpack<'de, T: Deserialize<'de>>(bytes: &'de [u8]) -> Result<T, WireError> {
    rmp_serde::from_slice(bytes).map_err(|error| msgpack_error(WHAT, error))
}

const WHAT: &str = "rdma control message";

fn too_long(bytes: usize) -> WireError {
    WireError::Msgpack {
        what: WHAT,
        detail: format!("a body of {bytes} bytes, at most {MAX_BODY_BYTES} are possible"),
    }
}

/// Where one side's memory is: `[device id, location, numa node]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TopoKey {
    /// Device number; -1 for host memory.
    pub device_id: i32,
    /// Host or device.
    pub location: MemoryLocation,
    /// NUMA node of host memory; -1 when unknown.
    pub numa_node: i32,
}

impl Default for TopoKey {
    fn default() -> Self {
        Self {
            device_id: -1,
            location: MemoryLocation::Host,
            numa_node: -1,
        }
    }
}

/// How a queue pair is reached: `[psn, number, port, [lid], [gid, mac]]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointHandle {
    /// First packet number; MoRI's is always 0.
    pub packet_number: u32,
    /// Number of the queue pair.
    pub queue_pair: u32,
    /// Port of the device, from 1.
    pub port: u32,
    /// Address on InfiniBand; 0 on Ethernet.
    pub lid: u32,
    /// Address on Ethernet.
    pub gid: [u8; GID_BYTES],
    /// Uninitialised in MoRI's verbs path: never used.
    pub mac: [u8; 6],
}

/// Request and reply that join two queue pairs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RegEndpoint {
    /// Key of the engine that sends this.
    pub engine_key: String,
    /// Where the requester's memory is.
    pub local: TopoKey,
    /// Where the answerer's memory is.
    pub remote: TopoKey,
    /// Number of the sender's network device.
    pub device: i32,
    /// The sender's queue pair.
    pub endpoint: EndpointHandle,
    /// Position among several network devices of one transfer.
    pub nic_rank: i32,
    /// Which of its devices the answerer should take; -1 for any.
    pub rail: i32,
    /// Set by Ferry engines.
    pub tag_opt: Option<ControlTag>,
}

/// Where a region is, to the network device: `[address, lkey, rkey, bytes]`. All zeros: there is
/// none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryKeys {
    /// First virtual address.
    pub address: u64,
    /// Of no use to a peer.
    pub local_key: u32,
    /// What a peer's work requests carry.
    pub remote_key: u32,
    /// Bytes.
    pub length: u64,
}

/// Request and reply for a region's keys.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AskMemoryRegion {
    /// Key of the engine that has the region, in both directions.
    pub engine_key: String,
    /// The device that the peer answered RegEndpoint with.
    pub device: i32,
    /// Number of the region.
    pub id: u32,
    /// Zeros in the request.
    pub keys: MemoryKeys,
    /// Set by Ferry engines.
    pub tag_opt: Option<ControlTag>,
}

/// Request and reply that end a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retire {
    /// Number of the queue pair at who is asked. Each device counts for itself.
    pub queue_pair: u32,
    /// Its device, as the answer to [`RegEndpoint`] said.
    pub device: i32,
}

/// A piece of a region that has a key of its own; it follows those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPart {
    /// Bytes.
    pub bytes: u64,
    /// What a peer's work requests carry.
    pub remote_key: u32,
}

/// What a Ferry engine adds: `["FRY1", token, region key, mtu, refusal, instance]`, and of a
/// region in device memory also `[[bytes, rkey], ...]` and whether to read after writing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlTag {
    /// The operator's secret; empty for none.
    pub token: Vec<u8>,
    /// The key of the region that is asked for; empty for none.
    pub region_key: Vec<u8>,
    /// The sender's path MTU as verbs number it (1: 256 bytes to 5: 4096); in a reply the one that
    /// both sides use. 0: not said.
    pub path_mtu: u8,
    /// In a reply, why the request was refused: a fixed word, a colon, and text. Empty when it was
    /// not.
    pub refusal: String,
    /// In a request, which start of the engine is meant; empty for any.
    pub instance: Vec<u8>,
    /// In a reply, the pieces of a region, if there are several.
    pub parts: Vec<MemoryPart>,
    /// In a reply, whether what is written there is only sure to be seen after a read.
    pub reads_back: bool,
}

impl ControlTag {
    fn to_value(&self) -> rmpv::Value {
        let mut elements = vec![
            TAG_MAGIC.into(),
            rmpv::Value::Binary(self.token.clone()),
            rmpv::Value::Binary(self.region_key.clone()),
            self.path_mtu.into(),
            self.refusal.as_str().into(),
            rmpv::Value::Binary(self.instance.clone()),
        ];
        if !self.parts.is_empty() || self.reads_back {
            let parts = self
                .parts
                .iter()
                .map(|part| rmpv::Value::Array(vec![part.bytes.into(), part.remote_key.into()]));
            elements.push(rmpv::Value::Array(parts.collect()));
            elements.push(self.reads_back.into());
        }
        rmpv::Value::Array(elements)
    }

    /// The tag among the extra elements; an error when it is broken.
    fn find<E: serde::de::Error>(extra: &[rmpv::Value]) -> Result<Option<Self>, E> {
        let tag = extra
            .iter()
            .filter_map(rmpv::Value::as_array)
            .find(|elements| elements.first().and_then(rmpv::Value::as_str) == Some(TAG_MAGIC));
        let Some(elements) = tag else { return Ok(None) };
        let part = |part: &rmpv::Value| match part.as_array()?.as_slice() {
            [bytes, key] => Some(MemoryPart {
                bytes: bytes.as_u64()?,
                remote_key: u32::try_from(key.as_u64()?).ok()?,
            }),
            _ => None,
        };
        let parse = || {
            let parts = match elements.get(6) {
                Some(parts) => parts.as_array()?.iter().map(part).collect::<Option<_>>()?,
                None => Vec::new(),
            };
            Some(Self {
                parts,
                reads_back: match elements.get(7) {
                    Some(reads_back) => reads_back.as_bool()?,
                    None => false,
                },
                token: elements.get(1)?.as_slice()?.to_vec(),
                region_key: elements.get(2)?.as_slice()?.to_vec(),
                path_mtu: u8::try_from(elements.get(3)?.as_u64()?).ok()?,
                refusal: elements.get(4)?.as_str()?.to_owned(),
                instance: elements.get(5)?.as_slice()?.to_vec(),
            })
        };
        parse()
            .map(Some)
            .ok_or_else(|| E::custom("a ferry tag that cannot be read"))
    }
}

impl Serialize for TopoKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.device_id, self.location.number(), self.numa_node).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for TopoKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements;
        impl<'de> Visitor<'de> for Elements {
            type Value = TopoKey;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an array [device id, location, numa node]")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<TopoKey, A::Error> {
                let default = TopoKey::default();
                let topo = TopoKey {
                    device_id: elements.next_element()?.unwrap_or(default.device_id),
                    location: elements
                        .next_element()?
                        .map_or(default.location, MemoryLocation::from_number),
                    numa_node: elements.next_element()?.unwrap_or(default.numa_node),
                };
                skip_rest(&mut elements)?;
                Ok(topo)
            }
        }
        deserializer.deserialize_seq(Elements)
    }
}

impl Serialize for EndpointHandle {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut elements = serializer.serialize_seq(Some(5))?;
        elements.serialize_element(&self.packet_number)?;
        elements.serialize_element(&self.queue_pair)?;
        elements.serialize_element(&self.port)?;
        elements.serialize_element(&[self.lid])?;
        elements.serialize_element(&(Bytes::new(&self.gid), Bytes::new(&self.mac)))?;
        elements.end()
    }
}

impl<'de> Deserialize<'de> for EndpointHandle {
    /// As MoRI's hand-written readers: exact counts.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        type Ethernet = (ByteArray<GID_BYTES>, ByteArray<6>);
        let (packet_number, queue_pair, port, [lid], (gid, mac)) =
            <(u32, u32, u32, [u32; 1], Ethernet)>::deserialize(deserializer)?;
        Ok(Self {
            packet_number,
            queue_pair,
            port,
            lid,
            gid: gid.into_array(),
            mac: mac.into_array(),
        })
    }
}

impl Serialize for RegEndpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut elements = serializer.serialize_seq(Some(6 + self.tag_opt.iter().len()))?;
        elements.serialize_element(&self.engine_key)?;
        elements.serialize_element(&(self.local, self.remote))?;
        elements.serialize_element(&self.device)?;
        elements.serialize_element(&self.endpoint)?;
        elements.serialize_element(&self.nic_rank)?;
        elements.serialize_element(&self.rail)?;
        if let Some(tag) = &self.tag_opt {
            elements.serialize_element(&tag.to_value())?;
        }
        elements.end()
    }
}

impl<'de> Deserialize<'de> for RegEndpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements;
        impl<'de> Visitor<'de> for Elements {
            type Value = RegEndpoint;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an array [engine key, topos, device, endpoint, ...]")
            }
            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut elements: A,
            ) -> Result<RegEndpoint, A::Error> {
                let engine_key = text(&mut elements)?.ok_or_else(|| missing("engine key"))?;
                let topos = elements.next_element()?;
                let (local, remote) = topos.ok_or_else(|| missing("topos"))?;
                let device = elements.next_element()?;
                let endpoint = elements.next_element()?;
                Ok(RegEndpoint {
                    engine_key,
                    local,
                    remote,
                    device: device.ok_or_else(|| missing("device"))?,
                    endpoint: endpoint.ok_or_else(|| missing("endpoint"))?,
                    // The fifth came with 1.2.0, the sixth with 1.2.1.
                    nic_rank: elements.next_element()?.unwrap_or(0),
                    rail: elements.next_element()?.unwrap_or(-1),
                    tag_opt: ControlTag::find(&rest(&mut elements)?)?,
                })
            }
        }
        deserializer.deserialize_seq(Elements)
    }
}

impl Serialize for MemoryKeys {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let keys = (self.address, self.local_key, self.remote_key, self.length);
        keys.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for MemoryKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (address, local_key, remote_key, length) = Deserialize::deserialize(deserializer)?;
        Ok(Self {
            address,
            local_key,
            remote_key,
            length,
        })
    }
}

impl Serialize for AskMemoryRegion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut elements = serializer.serialize_seq(Some(4 + self.tag_opt.iter().len()))?;
        elements.serialize_element(&self.engine_key)?;
        elements.serialize_element(&self.device)?;
        elements.serialize_element(&self.id)?;
        elements.serialize_element(&self.keys)?;
        if let Some(tag) = &self.tag_opt {
            elements.serialize_element(&tag.to_value())?;
        }
        elements.end()
    }
}

impl<'de> Deserialize<'de> for AskMemoryRegion {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements;
        impl<'de> Visitor<'de> for Elements {
            type Value = AskMemoryRegion;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an array [engine key, device, region id, keys]")
            }
            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut elements: A,
            ) -> Result<AskMemoryRegion, A::Error> {
                let engine_key = text(&mut elements)?.ok_or_else(|| missing("engine key"))?;
                let device = elements.next_element()?;
                let id = elements.next_element()?;
                Ok(AskMemoryRegion {
                    engine_key,
                    device: device.ok_or_else(|| missing("device"))?,
                    id: id.ok_or_else(|| missing("region id"))?,
                    keys: elements.next_element()?.unwrap_or_default(),
                    tag_opt: ControlTag::find(&rest(&mut elements)?)?,
                })
            }
        }
        deserializer.deserialize_seq(Elements)
    }
}

impl Serialize for Retire {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.queue_pair, self.device).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Retire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (queue_pair, device) = Deserialize::deserialize(deserializer)?;
        Ok(Self { queue_pair, device })
    }
}

fn missing<E: serde::de::Error>(element: &str) -> E {
    E::custom(format_args!("the {element} is missing"))
}

fn skip_rest<'de, A: SeqAccess<'de>>(elements: &mut A) -> Result<(), A::Error> {
    while elements.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

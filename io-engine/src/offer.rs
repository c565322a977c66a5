//! The capability tag: what an engine's descriptor says beside MoRI's elements.

use common::wire::EngineDesc;

use crate::error::{TransportError, TransportErrorKind};
use crate::region::TAG_MAGIC;
use crate::transport::TransportKind;

/// What a Ferry engine offers. Packed as `["FRY1", [transport, ...], tcp port, name of the
/// abstract Unix socket, instance]`, and of an engine with regions in device memory also why `shm` cannot
/// share it, or `""`, and why its network devices do not reach it, or `""`; more elements may follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub transports: Vec<String>,
    pub tcp_port: u16,
    pub unix_name: String,
    /// Random; it tells this start of the engine from every other.
    pub instance: [u8; 16],
    /// Set when regions are in device memory.
    pub device_opt: Option<DeviceOffer>,
}

/// Why an engine's device memory cannot be reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceOffer {
    /// By other processes of the host; empty: it can.
    pub unshared: String,
    /// By its network devices; empty: it can, or it has none.
    pub unreachable: String,
}

impl Offer {
    /// The element to append to a descriptor.
    pub(crate) fn pack(&self) -> rmpv::Value {
        let transports = self.transports.iter().map(|name| name.as_str().into());
        let mut elements = vec![
            TAG_MAGIC.into(),
            rmpv::Value::Array(transports.collect()),
            self.tcp_port.into(),
            self.unix_name.as_str().into(),
            rmpv::Value::Binary(self.instance.to_vec()),
        ];
        if let Some(device) = &self.device_opt {
            elements.push(device.unshared.as_str().into());
            elements.push(device.unreachable.as_str().into());
        }
        rmpv::Value::Array(elements)
    }

    /// `None` when the peer is no Ferry engine.
    ///
    /// # Errors
    /// [`TransportErrorKind::Protocol`] when it says that it is, in a tag that cannot be read.
    pub(crate) fn of(desc: &EngineDesc) -> Result<Option<Self>, TransportError> {
        let tag = desc
            .extra
            .iter()
            .filter_map(rmpv::Value::as_array)
            .find(|elements| elements.first().and_then(rmpv::Value::as_str) == Some(TAG_MAGIC));
        let Some(elements) = tag else { return Ok(None) };
        Self::parse(elements).map(Some).ok_or_else(|| {
            TransportError::quiesced(
                TransportErrorKind::Protocol,
                format!("the capability tag of engine {} cannot be read", desc.key),
            )
        })
    }

    fn parse(elements: &[rmpv::Value]) -> Option<Self> {
        let transports = elements.get(1)?.as_array()?.iter();
        let text = |place: usize| Some(elements.get(place)?.as_str()?.to_owned());
        Some(Self {
            transports: transports
                .filter_map(|kind| kind.as_str().map(str::to_owned))
                .collect(),
            tcp_port: u16::try_from(elements.get(2)?.as_u64()?).ok()?,
            unix_name: elements.get(3)?.as_str()?.to_owned(),
            instance: elements.get(4)?.as_slice()?.try_into().ok()?,
            device_opt: text(5).map(|unshared| DeviceOffer {
                unshared,
                unreachable: text(6).unwrap_or_default(),
            }),
        })
    }

    /// Whether the peer has this transport.
    pub(crate) fn has(&self, kind: TransportKind) -> bool {
        self.transports.iter().any(|name| name == kind.name())
    }
}

/// Whether all that a peer may write to this engine comes by `tcp` and so through its own hands: both
/// offer it, and nothing else that both offer reaches from one to the other. Between different boots
/// of a kernel, which are different hosts, no memory is shared.
pub fn is_reached_by_tcp_only(own: &EngineDesc, peer: &EngineDesc) -> bool {
    let (Ok(Some(own_offer)), Ok(Some(peer_offer))) = (Offer::of(own), Offer::of(peer)) else {
        return false;
    };
    let is_elsewhere =
        !own.node_id.is_empty() && !peer.node_id.is_empty() && own.node_id != peer.node_id;
    let has_way = |kind: TransportKind| {
        let is_of_one_host = matches!(
            kind,
            TransportKind::Local | TransportKind::Shm | TransportKind::Cma
        );
        own_offer.has(kind) && peer_offer.has(kind) && !(is_of_one_host && is_elsewhere)
    };
    let others = TransportKind::ALL.into_iter();
    let mut others = others.filter(|kind| *kind != TransportKind::Tcp);
    has_way(TransportKind::Tcp) && !others.any(has_way)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        Offer {
            transports: vec!["cma".to_owned(), "a later one".to_owned()],
            tcp_port: 65_535,
            unix_name: "ferry-io-0".to_owned(),
            instance: [9; 16],
            device_opt: None,
        }
    }

    fn desc(extra: Vec<rmpv::Value>) -> EngineDesc {
        let desc = EngineDesc {
            key: "engine".to_owned(),
            extra,
            ..EngineDesc::default()
        };
        EngineDesc::unpack(&desc.pack().unwrap()).unwrap()
    }

    #[test]
    fn an_offer_survives_the_wire_beside_elements_of_others() {
        let foreign = rmpv::Value::Array(vec!["other".into(), 7.into()]);
        let packed = desc(vec![1.into(), foreign, offer().pack()]);
        assert_eq!(Offer::of(&packed), Ok(Some(offer())));
        let on_device = Offer {
            device_opt: Some(DeviceOffer {
                unshared: "the driver refused".to_owned(),
                unreachable: "so did the network device".to_owned(),
            }),
            ..offer()
        };
        let packed = desc(vec![on_device.pack()]);
        assert_eq!(Offer::of(&packed), Ok(Some(on_device)));
        assert_eq!(Offer::of(&desc(vec![])), Ok(None));
        assert!(offer().has(TransportKind::Cma) && !offer().has(TransportKind::Tcp));
    }

    #[test]
    fn a_broken_tag_is_an_error() {
        let rmpv::Value::Array(good) = offer().pack() else {
            panic!("a tag is an array");
        };
        for cut in 1..good.len() {
            let tag = rmpv::Value::Array(good.iter().take(cut).cloned().collect());
            assert!(Offer::of(&desc(vec![tag])).is_err(), "{cut} elements");
        }
        let breakages = [
            (2, rmpv::Value::from(65_536)),
            (4, rmpv::Value::Binary(vec![0; 15])),
        ];
        for (place, value) in breakages {
            let mut elements = good.clone();
            elements[place] = value;
            assert!(Offer::of(&desc(vec![rmpv::Value::Array(elements)])).is_err());
        }
    }
}

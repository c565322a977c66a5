//! Addresses of ports: GIDs, which of them to use, path MTUs.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::Path;

use rdma_sys::ibv_mtu;

use crate::error::{TransportError, TransportErrorKind};

/// Where the kernel lists devices.
const DEVICES: &str = "/sys/class/infiniband";

/// The address of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    fn as_ipv6(self) -> Ipv6Addr {
        Ipv6Addr::from(self.0)
    }

    fn is_link_local(self) -> bool {
        self.as_ipv6().is_unicast_link_local()
    }

    fn is_ipv4(self) -> bool {
        self.as_ipv6().to_ipv4_mapped().is_some()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_ipv6().fmt(formatter)
    }
}

/// How packets to a GID look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet, not routable.
    RoceV1,
    /// UDP.
    RoceV2,
}

/// One entry of a port's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place, which packets' sender is chosen by.
    pub index: u8,
    /// The address.
    pub gid: Gid,
    /// How packets look.
    pub kind: GidKind,
}

impl GidEntry {
    /// MoRI's score: the kind first, then how far the address reaches, then the place.
    fn score(&self) -> i32 {
        let kind = match self.kind {
            GidKind::RoceV2 => 1000,
            GidKind::RoceV1 => 500,
            GidKind::InfiniBand => 100,
        };
        let reach = match self.gid {
            gid if gid.is_ipv4() => 200,
            gid if gid.is_link_local() => 0,
            _ => 100,
        };
        kind + reach - i32::from(self.index)
    }
}

/// The used entries of a port's table, as the kernel lists them.
///
/// # Errors
/// When there is no such device or port.
pub fn gid_table(device: &str, port: u8) -> Result<Vec<GidEntry>, TransportError> {
    let folder = Path::new(DEVICES)
        .join(device)
        .join("ports")
        .join(port.to_string());
    read_table(&folder)
}

fn read_table(port: &Path) -> Result<Vec<GidEntry>, TransportError> {
    let gids = port.join("gids");
    let failed = |error| TransportError::io(format!("reading {}", gids.display()), &error);
    let mut entries = Vec::new();
    for file in std::fs::read_dir(&gids).map_err(failed)? {
        let file = file.map_err(failed)?;
        let index = file.file_name().to_str().and_then(|name| name.parse().ok());
        let gid = std::fs::read_to_string(file.path()).ok();
        let gid = gid.and_then(|text| text.trim().parse::<Ipv6Addr>().ok());
        let (Some(index), Some(gid)) = (index, gid) else {
            continue;
        };
        if gid.is_unspecified() {
            continue;
        }
        // An unused entry has no type: reading it is an error.
        let kind = std::fs::read_to_string(port.join("gid_attrs/types").join(file.file_name()));
        let kind = match kind.as_deref().map(str::trim) {
            Ok("RoCE v2") => GidKind::RoceV2,
            Ok("IB/RoCE v1") if is_ethernet(port) => GidKind::RoceV1,
            Ok("IB/RoCE v1") => GidKind::InfiniBand,
            _ => continue,
        };
        entries.push(GidEntry {
            index,
            gid: Gid(gid.octets()),
            kind,
        });
    }
    entries.sort_by_key(|entry| entry.index);
    Ok(entries)
}

fn is_ethernet(port: &Path) -> bool {
    let layer = std::fs::read_to_string(port.join("link_layer"));
    layer.is_ok_and(|layer| layer.trim() == "Ethernet")
}

/// The entry to use: the one at `index_opt` if that is given, else the one with the best score.
///
/// # Errors
/// When the table has none.
pub fn best_gid(
    device: &str,
    table: &[GidEntry],
    index_opt: Option<u8>,
) -> Result<GidEntry, TransportError> {
    let missing = |what: String| {
        TransportError::quiesced(
            TransportErrorKind::Unreachable,
            format!(
                "{device} has no {what} in its table of {} GIDs",
                table.len()
            ),
        )
    };
    match index_opt {
        Some(index) => table
            .iter()
            .find(|entry| entry.index == index)
            .copied()
            .ok_or_else(|| missing(format!("GID with index {index}"))),
        None => table
            .iter()
            .max_by_key(|entry| entry.score())
            .copied()
            .ok_or_else(|| missing("usable GID".to_owned())),
    }
}

/// What a port is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// Packets carry GIDs.
    Ethernet,
    /// Packets carry local ids.
    InfiniBand,
    /// Any other, by verbs's number.
    Other(u8),
}

impl LinkLayer {
    /// The header's `IBV_LINK_LAYER_*`, which the binding lacks; 0 stands for InfiniBand.
    pub(super) const fn from_number(number: u8) -> Self {
        match number {
            0 | 1 => Self::InfiniBand,
            2 => Self::Ethernet,
            other => Self::Other(other),
        }
    }
}

/// Largest packet of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256,
    /// 512 bytes.
    Bytes512,
    /// 1,024 bytes.
    Bytes1024,
    /// 2,048 bytes.
    Bytes2048,
    /// 4,096 bytes.
    Bytes4096,
}

impl Mtu {
    const ALL: [Self; 5] = [
        Self::Bytes256,
        Self::Bytes512,
        Self::Bytes1024,
        Self::Bytes2048,
        Self::Bytes4096,
    ];

    /// Verbs's number; an unknown one is taken for the nearest known.
    pub const fn from_code(code: u32) -> Self {
        match code {
            0 | ibv_mtu::IBV_MTU_256 => Self::Bytes256,
            ibv_mtu::IBV_MTU_512 => Self::Bytes512,
            ibv_mtu::IBV_MTU_1024 => Self::Bytes1024,
            ibv_mtu::IBV_MTU_2048 => Self::Bytes2048,
            _ => Self::Bytes4096,
        }
    }

    /// Verbs's number.
    pub const fn code(self) -> u8 {
        match self {
            Self::Bytes256 => 1,
            Self::Bytes512 => 2,
            Self::Bytes1024 => 3,
            Self::Bytes2048 => 4,
            Self::Bytes4096 => 5,
        }
    }

    /// Bytes.
    pub const fn bytes(self) -> u32 {
        128 << self.code()
    }

    /// The one with so many bytes.
    pub fn of_bytes(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A port's folder as the kernel makes it; unused entries are zero and have no type.
    fn port(link_layer: &str, gids: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{text}\n")).unwrap();
        };
        write("link_layer", link_layer);
        for (index, (gid, kind)) in gids.iter().enumerate() {
            write(&format!("gids/{index}"), gid);
            if !kind.is_empty() {
                write(&format!("gid_attrs/types/{index}"), kind);
            }
        }
        write("gids/200", "0000:0000:0000:0000:0000:0000:0000:0000");
        folder
    }

    fn chosen(link_layer: &str, gids: &[(&str, &str)]) -> Option<(u8, GidKind)> {
        let folder = port(link_layer, gids);
        let table = read_table(folder.path()).unwrap();
        let best = best_gid("mlx5_0", &table, None).ok()?;
        Some((best.index, best.kind))
    }

    const LINK_LOCAL: &str = "fe80:0000:0000:0000:ee0d:9aff:fe2f:6f5b";
    const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a09:0001";
    const IPV6: &str = "2001:0db8:0000:0000:0000:0000:0000:0001";
    const V1: &str = "IB/RoCE v1";
    const V2: &str = "RoCE v2";

    #[test]
    fn the_best_score_is_chosen() {
        // A usual table: each address once as v1 and once as v2.
        let usual = [(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV4, V1), (IPV4, V2)];
        assert_eq!(chosen("Ethernet", &usual), Some((3, GidKind::RoceV2)));
        // Only v1: not routable, but IPv4 before link-local.
        let old = [(LINK_LOCAL, V1), (IPV4, V1)];
        assert_eq!(chosen("Ethernet", &old), Some((1, GidKind::RoceV1)));
        // IPv6 only: the global address before the link-local one.
        let six = [(LINK_LOCAL, V2), (IPV6, V2)];
        assert_eq!(chosen("Ethernet", &six), Some((1, GidKind::RoceV2)));
        // Both families: IPv4 wins.
        let both = [(IPV6, V2), (IPV4, V2)];
        assert_eq!(chosen("Ethernet", &both), Some((1, GidKind::RoceV2)));
        // Nothing but link-local: better than nothing.
        assert_eq!(
            chosen("Ethernet", &[(LINK_LOCAL, V2)]),
            Some((0, GidKind::RoceV2))
        );
        // Of two alike the first.
        let alike = [(IPV4, V2), ("0000:0000:0000:0000:0000:ffff:0a09:0002", V2)];
        assert_eq!(chosen("Ethernet", &alike), Some((0, GidKind::RoceV2)));
        let fabric = [("fe80:0000:0000:0000:0002:c903:00f1:2345", V1)];
        assert_eq!(
            chosen("InfiniBand", &fabric),
            Some((0, GidKind::InfiniBand))
        );
        // An entry that is not used any more has an address but no type.
        assert_eq!(chosen("Ethernet", &[(IPV4, "")]), None);
        assert_eq!(chosen("Ethernet", &[]), None);
    }

    #[test]
    fn an_index_overrides_the_score() {
        let folder = port("Ethernet", &[(LINK_LOCAL, V2), (IPV4, V2)]);
        let table = read_table(folder.path()).unwrap();
        assert_eq!(best_gid("rxe0", &table, Some(0)).unwrap().index, 0);
        let error = best_gid("rxe0", &table, Some(7)).unwrap_err();
        assert!(error.to_string().contains("index 7"), "{error}");
        assert_eq!(
            best_gid("rxe0", &table, None).unwrap().gid.to_string(),
            "::ffff:10.9.0.1"
        );
    }

    #[test]
    fn mtus_are_verbs_numbers() {
        for mtu in Mtu::ALL {
            assert_eq!(Mtu::from_code(u32::from(mtu.code())), mtu);
            assert_eq!(Mtu::of_bytes(mtu.bytes()), Some(mtu));
        }
        assert_eq!(Mtu::Bytes4096.bytes(), 4096);
        assert_eq!(Mtu::of_bytes(1500), None);
    }
}

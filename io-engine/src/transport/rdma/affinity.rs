//! Which rails are near to the memory of an engine.

use std::fs;
use std::sync::{PoisonError, RwLock};

use crate::nic_map::NicMap;
use crate::region::Location;

/// The rails that an engine's memory goes by, while one of them is up. Memory of devices decides:
/// beside it that of the host is little.
#[derive(Debug, Default)]
pub(super) struct Affinity {
    near: RwLock<Near>,
}

#[derive(Debug, Default)]
struct Near {
    device: Vec<usize>,
    host: Vec<usize>,
}

impl Affinity {
    /// Memory was registered. `rails` are the names and NUMA nodes of the network devices.
    pub(super) fn note(
        &self,
        map: &NicMap,
        location: Location,
        rails: &[(String, Option<u32>)],
        own_node_opt: Option<u32>,
    ) {
        let named = map.devices(location, own_node_opt);
        let is_host = location == Location::Host;
        let is_near = |(name, node_opt): &(String, Option<u32>)| {
            if named.is_empty() {
                is_host && node_opt.is_some() && *node_opt == own_node_opt
            } else {
                named.contains(name)
            }
        };
        let mut near = self.near.write().unwrap_or_else(PoisonError::into_inner);
        let places = match is_host {
            true => &mut near.host,
            false => &mut near.device,
        };
        for (place, rail) in rails.iter().enumerate() {
            if is_near(rail) && !places.contains(&place) {
                places.push(place);
            }
        }
    }

    /// Whether a rail is near, or nothing is known.
    pub(super) fn is_near(&self, place: usize) -> bool {
        let near = self.near.read().unwrap_or_else(PoisonError::into_inner);
        let places = match near.device.is_empty() {
            true => &near.host,
            false => &near.device,
        };
        places.is_empty() || places.contains(&place)
    }
}

/// The NUMA node of a network device; `None` on hosts with one node, and where it is not known.
pub(super) fn node_of(device: &str) -> Option<u32> {
    let path = format!("/sys/class/infiniband/{device}/device/numa_node");
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The NUMA node that all memory of this process comes from, if it is bound to one.
pub(super) fn own_node() -> Option<u32> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    single_node(&status)
}

fn single_node(status: &str) -> Option<u32> {
    let mut lines = status.lines();
    let nodes = lines.find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
    nodes.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::DeviceRuntime;

    fn near(affinity: &Affinity) -> Vec<usize> {
        (0..3).filter(|place| affinity.is_near(*place)).collect()
    }

    #[test]
    fn mapped_devices_come_before_the_hosts_node_and_that_before_all() {
        let rails = [("a", Some(0)), ("b", Some(1)), ("c", None)];
        let rails = rails.map(|(name, node_opt)| (name.to_owned(), node_opt));
        let map: NicMap = "cuda:0=c,cuda:1=a+b".parse().unwrap();
        let affinity = Affinity::default();
        assert_eq!(near(&affinity), [0, 1, 2]);
        affinity.note(&map, Location::Host, &rails, None);
        assert_eq!(near(&affinity), [0, 1, 2], "no node is known");
        affinity.note(&map, Location::Host, &rails, Some(1));
        assert_eq!(near(&affinity), [1]);
        let cuda = |number| Location::Device {
            runtime: DeviceRuntime::Cuda,
            number,
        };
        affinity.note(&map, cuda(7), &rails, Some(1));
        assert_eq!(near(&affinity), [1], "nothing is said of it");
        affinity.note(&map, cuda(0), &rails, Some(1));
        assert_eq!(near(&affinity), [2]);
        affinity.note(&map, cuda(1), &rails, Some(1));
        assert_eq!(near(&affinity), [0, 1, 2]);
    }

    #[test]
    fn a_process_that_is_bound_to_one_node_has_it() {
        assert_eq!(single_node("Name:\tx\nMems_allowed_list:\t1\n"), Some(1));
        assert_eq!(single_node("Mems_allowed_list:\t0-1\n"), None);
        assert_eq!(single_node(""), None);
    }
}

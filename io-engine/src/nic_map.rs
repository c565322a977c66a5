//! Which network devices move the bytes of which memory.

use std::fmt;
use std::str::FromStr;

use crate::region::Location;

/// Network devices by where memory is: `cuda:0=mlx5_0,cuda:1=mlx5_1+mlx5_2,numa:0=mlx5_0,host=mlx5_3`.
/// Memory in a place without an entry goes by the devices of its NUMA node, if that is known, and
/// else by all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NicMap(Vec<(String, Vec<String>)>);

impl NicMap {
    /// The devices for memory in a place; none: nothing was said of it. `node_opt` is the NUMA node
    /// of memory of the host.
    pub fn devices(&self, location: Location, node_opt: Option<u32>) -> &[String] {
        let of = |place: String| {
            let mut entries = self.0.iter();
            entries
                .find(|(name, _)| *name == place)
                .map(|(_, devices)| devices.as_slice())
        };
        let found_opt = match location {
            Location::Device { runtime, number } => of(format!("{}:{number}", runtime.name())),
            Location::Host => node_opt
                .and_then(|node| of(format!("numa:{node}")))
                .or_else(|| of("host".to_owned())),
        };
        found_opt.unwrap_or_default()
    }
}

impl FromStr for NicMap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut entries: Vec<(String, Vec<String>)> = Vec::new();
        for entry in text.split(',').map(str::trim).filter(|it| !it.is_empty()) {
            let refused = |why| {
                Err(format!(
                    "{entry:?}: {why}; for example cuda:0=mlx5_0+mlx5_1"
                ))
            };
            let Some((place, devices)) = entry.split_once('=') else {
                return refused("there is no =");
            };
            let is_known = match place.split_once(':') {
                Some(("cuda" | "hip" | "numa", number)) => number.parse::<u32>().is_ok(),
                _ => place == "host",
            };
            if !is_known {
                return refused("the place is none of host, numa:N, cuda:N and hip:N");
            }
            let devices: Vec<_> = devices.split('+').map(str::to_owned).collect();
            if devices.iter().any(String::is_empty) {
                return refused("a network device has no name");
            }
            if entries.iter().any(|(known, _)| known == place) {
                return refused("the place has an entry already");
            }
            entries.push((place.to_owned(), devices));
        }
        Ok(Self(entries))
    }
}

impl fmt::Display for NicMap {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (place, devices)) in self.0.iter().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(formatter, "{comma}{place}={}", devices.join("+"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::DeviceRuntime;

    #[test]
    fn memory_goes_by_the_entry_of_its_place() {
        let text = "cuda:0=mlx5_0,cuda:1=mlx5_1+mlx5_2,numa:1=mlx5_4,host=mlx5_3";
        let map: NicMap = text.parse().unwrap();
        assert_eq!(map.to_string(), text);
        let device = |runtime, number| map.devices(Location::Device { runtime, number }, None);
        assert_eq!(device(DeviceRuntime::Cuda, 1), ["mlx5_1", "mlx5_2"]);
        assert!(device(DeviceRuntime::Cuda, 2).is_empty());
        assert!(device(DeviceRuntime::Hip, 0).is_empty());
        assert_eq!(map.devices(Location::Host, Some(1)), ["mlx5_4"]);
        assert_eq!(map.devices(Location::Host, Some(0)), ["mlx5_3"]);
        assert_eq!(map.devices(Location::Host, None), ["mlx5_3"]);
        assert_eq!("".parse(), Ok(NicMap::default()));
    }

    #[test]
    fn what_is_no_map_is_refused_with_its_entry() {
        for entry in [
            "mlx5_0",
            "cuda=mlx5_0",
            "cuda:x=mlx5_0",
            "xpu:0=mlx5_0",
            "host=",
            "host=a+",
        ] {
            let error = entry.parse::<NicMap>().unwrap_err();
            assert!(error.starts_with(&format!("{entry:?}: ")), "{error}");
        }
        assert!("host=a,host=b".parse::<NicMap>().is_err());
    }
}

//! How the `rdma` transport is set up. The variables are MoRI's where MoRI has one.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::device::NicPath;
use crate::error::{TransportError, TransportErrorKind};
use crate::nic_map::NicMap;

/// How the `rdma` transport is set up.
#[derive(Clone, PartialEq, Eq)]
pub struct RdmaOptions {
    /// Which network devices are used, in this order.
    pub devices: DeviceChoice,
    /// Which of them move the bytes of which memory.
    pub nic_map: NicMap,
    /// In which ways a network device is let into device memory, in this order; empty: the order of
    /// the device's vendor.
    pub device_memory: Vec<NicPath>,
    /// Port of each device, from 1.
    pub port: u8,
    /// Place in the port's table of GIDs; otherwise the best is chosen.
    pub gid_index_opt: Option<u8>,
    /// Bytes of a packet; otherwise the port's. Ferry engines agree on the smaller of both sides'.
    pub path_mtu_opt: Option<u32>,
    /// Queue pairs of a session; they are spread over the devices.
    pub queue_pairs: usize,
    /// Work requests of a queue pair that may be under way.
    pub send_depth: u32,
    /// Local ranges of a work request.
    pub ranges_per_request: u32,
    /// Writes of at most so many bytes are sent out of the work request itself.
    pub inline_bytes: u32,
    /// Verbs's number for how long an acknowledgement may take: 4.096 us doubled so many times.
    pub timeout: u8,
    /// Tries after the first; 7 is for ever on some devices.
    pub retries: u8,
    /// Tries while a peer has no receive posted; 7 is for ever.
    pub receiver_not_ready_retries: u8,
    /// Traffic class of packets.
    pub traffic_class: u8,
    /// Service level of packets.
    pub service_level: u8,
    /// Threads of each device that handle completions.
    pub completion_threads: usize,
    /// How long a peer may take to answer a control message.
    pub control_timeout: Duration,
    /// Secret that peers must have too; empty: whoever knows a region's number may write into it,
    /// as with MoRI. Peers that are no Ferry engines have none.
    pub token: String,
    /// Whether memory is registered with the devices when it is registered with the engine, and
    /// not at its first use.
    pub registers_eagerly: bool,
    /// Bytes of host memory that one registration covers at most; a longer region is registered in
    /// slices. What the device takes at most holds besides.
    pub most_region_bytes: u64,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self {
            devices: DeviceChoice::default(),
            nic_map: NicMap::default(),
            device_memory: Vec::new(),
            port: 1,
            gid_index_opt: None,
            path_mtu_opt: None,
            queue_pairs: 2,
            send_depth: 1024,
            ranges_per_request: 4,
            inline_bytes: 64,
            timeout: 14,
            // MoRI's 7 never ends on soft-RoCE.
            retries: 6,
            receiver_not_ready_retries: 7,
            traffic_class: 0,
            service_level: 0,
            completion_threads: 1,
            control_timeout: Duration::from_secs(5),
            token: String::new(),
            registers_eagerly: false,
            most_region_bytes: u64::MAX,
        }
    }
}

impl fmt::Debug for RdmaOptions {
    /// Without the token.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RdmaOptions")
            .field("devices", &self.devices.to_string())
            .field("queue_pairs", &self.queue_pairs)
            .field("has_token", &!self.token.is_empty())
            .finish_non_exhaustive()
    }
}

impl RdmaOptions {
    /// The defaults, changed by the environment.
    ///
    /// # Errors
    /// Names the variable whose value cannot be used, and what can.
    pub fn from_environment() -> Result<Self, String> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let mut options = Self::default();
        if let Some(devices) = variable("MORI_RDMA_DEVICES") {
            options.devices = devices.parse().unwrap_or_default();
        }
        if let Some(map) = variable("FERRY_NIC_MAP") {
            let parsed = map.parse();
            options.nic_map = parsed.map_err(|error| format!("FERRY_NIC_MAP: {error}"))?;
        }
        if let Some(paths) = variable("FERRY_RDMA_DEVICE_MEMORY") {
            let paths = paths.split(',').map(|path| path.trim().parse());
            let paths = paths.collect::<Result<_, String>>();
            options.device_memory =
                paths.map_err(|error| format!("FERRY_RDMA_DEVICE_MEMORY: {error}"))?;
        }
        options.gid_index_opt = number(&variable, &["MORI_IB_GID_INDEX"], 0, 255)?;
        if let Some(bytes) = number(&variable, &["MORI_IB_PATH_MTU"], 256, 4096)? {
            if !u32::is_power_of_two(bytes) {
                return Err(format!(
                    "MORI_IB_PATH_MTU={bytes} is none of 256, 512, 1024, 2048 and 4096"
                ));
            }
            options.path_mtu_opt = Some(bytes);
        }
        let set = |place: &mut u32, names: &[&str], least, most| {
            number(&variable, names, least, most).map(|found| *place = found.unwrap_or(*place))
        };
        let set_small = |place: &mut u8, names: &[&str], most| {
            number(&variable, names, 0, most).map(|found| *place = found.unwrap_or(*place))
        };
        set(
            &mut options.send_depth,
            &["MORI_IO_QP_MAX_SEND_WR"],
            2,
            65_536,
        )?;
        let ranges = ["MORI_IO_QP_MAX_MSG_SGE", "MORI_IO_QP_MAX_SGE"];
        set(&mut options.ranges_per_request, &ranges, 1, 64)?;
        set(
            &mut options.inline_bytes,
            &["MORI_IO_QP_MAX_INLINE_DATA"],
            0,
            1024,
        )?;
        if let Some(queue_pairs) = number::<u32>(&variable, &["MORI_IO_QP_PER_TRANSFER"], 1, 64)? {
            options.queue_pairs = queue_pairs as usize;
        }
        set_small(&mut options.timeout, &["MORI_IB_TIMEOUT"], 31)?;
        set_small(&mut options.retries, &["MORI_IB_RETRY_CNT"], 7)?;
        let not_ready = ["MORI_IB_RNR_RETRY"];
        set_small(&mut options.receiver_not_ready_retries, &not_ready, 7)?;
        set_small(
            &mut options.service_level,
            &["MORI_IO_SL", "MORI_RDMA_SL"],
            15,
        )?;
        if variable("MORI_IO_TC_DISABLE").as_deref() != Some("1") {
            set_small(
                &mut options.traffic_class,
                &["MORI_IO_TC", "MORI_RDMA_TC"],
                255,
            )?;
        }
        if let Some(ms) = number::<u32>(&variable, &["MORI_IO_CP_TIMEOUT_MS"], 1, 3_600_000)? {
            options.control_timeout = Duration::from_millis(u64::from(ms));
        }
        if let Some(mib) = number::<u64>(&variable, &["FERRY_RDMA_REGION_MIB"], 1, u32::MAX)? {
            options.most_region_bytes = mib << 20;
        }
        let threads = ["FERRY_RDMA_COMPLETION_THREADS"];
        if let Some(threads) = number::<u32>(&variable, &threads, 1, 64)? {
            options.completion_threads = threads as usize;
        }
        let eager = number::<u32>(&variable, &["FERRY_RDMA_REGISTER_EAGERLY"], 0, 1)?;
        options.registers_eagerly = eager == Some(1);
        options.token = variable("FERRY_RDMA_TOKEN").unwrap_or_default();
        Ok(options)
    }
}

/// The first of the variables that is set, between two bounds.
fn number<T: TryFrom<u32>>(
    variable: &impl Fn(&str) -> Option<String>,
    names: &[&str],
    least: u32,
    most: u32,
) -> Result<Option<T>, String> {
    let found = names
        .iter()
        .find_map(|name| variable(name).map(|value| (name, value)));
    let Some((name, value)) = found else {
        return Ok(None);
    };
    let number = value.parse().ok().filter(|it| (least..=most).contains(it));
    number
        .and_then(|number| T::try_from(number).ok())
        .map(Some)
        .ok_or_else(|| format!("{name}={value} is no number from {least} to {most}"))
}

/// Which devices are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// These, in this order.
    Only(Vec<String>),
    /// All others, in the system's order.
    AllBut(Vec<String>),
}

impl Default for DeviceChoice {
    fn default() -> Self {
        Self::AllBut(Vec::new())
    }
}

impl FromStr for DeviceChoice {
    type Err = std::convert::Infallible;

    /// Reads `a,b`, or `^a,b` for all others, or nothing for all.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let (is_exclusion, list) = match text.strip_prefix('^') {
            Some(list) => (true, list),
            None => (text.is_empty(), text),
        };
        let names = list.split(',').map(str::trim);
        let names = names.filter(|name| !name.is_empty()).map(str::to_owned);
        Ok(match is_exclusion {
            true => Self::AllBut(names.collect()),
            false => Self::Only(names.collect()),
        })
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Only(names) => formatter.write_str(&names.join(",")),
            Self::AllBut(names) if names.is_empty() => Ok(()),
            Self::AllBut(names) => write!(formatter, "^{}", names.join(",")),
        }
    }
}

impl DeviceChoice {
    /// Those of `present` that are used, in the order of use.
    pub fn among(&self, present: &[String]) -> Vec<String> {
        match self {
            Self::Only(names) => {
                let is_present = |name: &&String| present.contains(name);
                names.iter().filter(is_present).cloned().collect()
            }
            Self::AllBut(names) => {
                let is_used = |name: &&String| !names.contains(name);
                present.iter().filter(is_used).cloned().collect()
            }
        }
    }
}

/// What a network device of the `rdma` transport has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailReport {
    /// The device.
    pub device: String,
    /// Whether it can be used.
    pub is_up: bool,
    /// Bytes that this side wrote or read over it.
    pub bytes: u64,
    /// Queue pairs that failed.
    pub failures: u64,
    /// Queue pairs that were on it, failed, and were made again on another.
    pub left: u64,
}

/// Names of the network devices that this host has for `rdma`. Opens libibverbs.
///
/// # Errors
/// Why it has none: no feature `rdma` in this build, no libibverbs, or no device.
pub fn rdma_devices() -> Result<Vec<String>, TransportError> {
    let none = |why| TransportError::quiesced(TransportErrorKind::NoCommonTransport, why);
    #[cfg(not(feature = "rdma"))]
    return Err(none("this build has no rdma"));
    #[cfg(feature = "rdma")]
    match crate::verbs::device_names()? {
        names if names.is_empty() => Err(none("this host has no rdma device")),
        names => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_chosen_by_list_or_exclusion() {
        let present = ["mlx5_0", "mlx5_1", "mlx5_2"].map(str::to_owned);
        for (text, used) in [
            ("", "mlx5_0 mlx5_1 mlx5_2"),
            ("mlx5_2, mlx5_0", "mlx5_2 mlx5_0"),
            ("^mlx5_1", "mlx5_0 mlx5_2"),
            ("^mlx5_1,mlx5_0", "mlx5_2"),
            ("absent", ""),
        ] {
            let choice: DeviceChoice = text.parse().unwrap();
            assert_eq!(choice.among(&present).join(" "), used, "{text:?}");
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
    }

    #[test]
    fn variables_change_the_defaults_and_bad_ones_are_named() {
        let read = |pairs: &[(&str, &str)]| {
            RdmaOptions::from_variables(|name| {
                let pair = pairs.iter().find(|(key, _)| *key == name);
                pair.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(read(&[]), Ok(RdmaOptions::default()));
        let options = read(&[
            ("MORI_RDMA_DEVICES", "^rxe0"),
            ("MORI_IB_GID_INDEX", "3"),
            ("MORI_IB_PATH_MTU", "2048"),
            ("MORI_IO_QP_PER_TRANSFER", "4"),
            ("MORI_IB_RETRY_CNT", "7"),
            ("MORI_RDMA_TC", "104"),
            ("MORI_IO_TC", "96"),
            ("MORI_RDMA_SL", "3"),
            ("MORI_IO_CP_TIMEOUT_MS", "250"),
            ("MORI_IO_QP_MAX_SGE", ""),
            ("FERRY_RDMA_DEVICE_MEMORY", "peer-memory, dma-buf"),
            ("FERRY_RDMA_REGION_MIB", "4096"),
            ("FERRY_RDMA_COMPLETION_THREADS", "3"),
            ("FERRY_RDMA_REGISTER_EAGERLY", "1"),
        ])
        .unwrap();
        let paths = [NicPath::PeerMemory, NicPath::DmaBuf];
        assert_eq!(options.device_memory, paths);
        assert_eq!(options.devices.to_string(), "^rxe0");
        assert_eq!(options.gid_index_opt, Some(3));
        assert_eq!(options.path_mtu_opt, Some(2048));
        assert_eq!((options.queue_pairs, options.retries), (4, 7));
        assert_eq!(options.most_region_bytes, 4 << 30);
        assert_eq!(
            (options.completion_threads, options.registers_eagerly),
            (3, true)
        );
        assert_eq!((options.traffic_class, options.service_level), (96, 3));
        assert_eq!(options.control_timeout, Duration::from_millis(250));
        let silenced = read(&[("MORI_IO_TC", "96"), ("MORI_IO_TC_DISABLE", "1")]).unwrap();
        assert_eq!(silenced.traffic_class, 0);
        for (name, value) in [
            ("MORI_IB_GID_INDEX", "256"),
            ("MORI_IB_PATH_MTU", "1500"),
            ("MORI_IB_PATH_MTU", "jumbo"),
            ("MORI_IO_QP_PER_TRANSFER", "0"),
            ("MORI_IB_RETRY_CNT", "8"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert!(error.starts_with(&format!("{name}={value}")), "{error}");
        }
        let error = read(&[("FERRY_RDMA_DEVICE_MEMORY", "dma_buf")]).unwrap_err();
        assert!(
            error.starts_with("FERRY_RDMA_DEVICE_MEMORY: \"dma_buf\""),
            "{error}"
        );
    }
}

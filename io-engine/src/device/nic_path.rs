//! In which ways a network device can be let into a device's memory.

use std::fmt;
use std::str::FromStr;

use crate::region::DeviceRuntime;

/// A way into a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicPath {
    /// The driver exports the range as a dma-buf.
    DmaBuf,
    /// The network device's driver asks a module of the device's for the address.
    PeerMemory,
}

impl NicPath {
    /// Both.
    pub const ALL: [Self; 2] = [Self::DmaBuf, Self::PeerMemory];

    /// What it is called in options and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DmaBuf => "dma-buf",
            Self::PeerMemory => "peer-memory",
        }
    }

    /// The order in which they are tried where nobody says. NVIDIA's drivers export dma-bufs, and
    /// their module for addresses has to be loaded beside them. AMD's kernel driver takes part in
    /// every registration by address where the network stack asks it to, and its export of ranges
    /// is the newer of both.
    pub const fn order(runtime: DeviceRuntime) -> [Self; 2] {
        match runtime {
            DeviceRuntime::Cuda | DeviceRuntime::Unnamed => [Self::DmaBuf, Self::PeerMemory],
            DeviceRuntime::Hip => [Self::PeerMemory, Self::DmaBuf],
        }
    }
}

impl fmt::Display for NicPath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for NicPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|path| path.name() == text);
        found.ok_or_else(|| format!("{text:?} is neither dma-buf nor peer-memory"))
    }
}

//! Newtypes for every id and unit that crosses a function.

use std::fmt;

macro_rules! number_newtype {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl $name {
            /// The bare number.
            pub const fn get(self) -> $inner {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(formatter)
            }
        }
    };
}

number_newtype!(
    /// An offset in bytes from the start of a buffer or region.
    ByteOffset(u64)
);
number_newtype!(
    /// A length in bytes.
    ByteLen(u64)
);
number_newtype!(
    /// How often a room number has been used on this rank; local to the rank, never on a stock wire.
    Generation(u64)
);
number_newtype!(
    /// A prefill rank's number across its TP, CP and PP groups (`spec: prefill unique rank`).
    UniqueRank(u32)
);

/// The router's `bootstrap_room`: names one request on both sides, 0 to 2^63-1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Room(u64);

impl Room {
    /// The largest room number that the protocol carries.
    pub const MAX: u64 = i64::MAX as u64;

    /// `None` when the number does not fit the protocol's signed 64-bit field.
    pub const fn new(number: u64) -> Option<Self> {
        if number <= Self::MAX {
            Some(Self(number))
        } else {
            None
        }
    }

    /// The bare number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Room {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// Where a rank's control socket listens: a host as it travels on the wire (IPv6 without
/// brackets) and a port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// Dotted quad, bare IPv6 address or host name.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl Endpoint {
    /// Joins a host and a port.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
        }
    }
}

impl fmt::Display for Endpoint {
    /// `host:port`, with brackets around an IPv6 address.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(formatter, "[{}]:{}", self.host, self.port)
        } else {
            write!(formatter, "{}:{}", self.host, self.port)
        }
    }
}

/// One part of a request's state: the paged KV cache, one of the hybrid components (by its
/// position in the registration) or the auxiliary rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ComponentId {
    /// The paged KV cache.
    Kv,
    /// The state component at this position.
    State(u16),
    /// The auxiliary rows.
    Aux,
}

impl ComponentId {
    /// Its number in messages: 0 kv, 1 aux, 2 + n the n-th state.
    pub const fn number(self) -> u32 {
        match self {
            Self::Kv => 0,
            Self::Aux => 1,
            Self::State(index) => 2 + index as u32,
        }
    }

    /// The component with this [`Self::number`]; `None` beyond the last possible state.
    pub fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Kv),
            1 => Some(Self::Aux),
            state => u16::try_from(state - 2).ok().map(Self::State),
        }
    }
}

//! MoRI's packed descriptors (`spec/mori-io.md`, section 2): msgpack arrays, never maps.

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

/// A rank's io engine: `[key, nodeId, hostname, host, port, pid]`.
#[derive(Clone, Debug, PartialEq)]
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
    /// 64 bytes of a device's IPC handle; zeros for host memory.
    pub ipc_handle: Vec<u8>,
    /// NUMA node of host memory; -1 for device memory.
    pub numa_node: i32,
    /// Offset into the allocation behind the IPC handle.
    pub ipc_offset: u64,
    /// 64 bytes of a fabric handle.
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

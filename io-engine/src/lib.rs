//! Registered memory, sessions, and batched one-sided writes between processes.
//!
//! What it does: an [`Engine`] registers [`Memory`] as [`Region`]s, tells peers of them in
//! descriptors, and opens a [`Session`] to a peer's engine over one [`TransportKind`], chosen once.
//! A [`WriteBatch`] names pairs of regions and the runs between them; its [`TransferHandle`] can be
//! awaited from any executor or waited for by a thread.
//!
//! What is absent on purpose: rooms, components, SGLang. A region has a label, which is text.
//!
//! Invariants:
//! * completion means that the bytes are in the remote memory;
//! * a write is checked against the registration (region, key, offset, length) before it moves a
//!   byte: by the receiver (`tcp`), or against a table that came over a proven socket (`cma`);
//! * an error says whether it is proved that the batch writes no more
//!   ([`TransportError::is_quiesced`]);
//! * a batch in flight owns the memory it reads and, in the same process, the memory it writes;
//!   a mapping that a peer was told of stays mapped until that peer has let go of it or is gone;
//! * after a [`Grant`] was taken back and [`Grant::is_over`], nothing comes in under it any more;
//! * after [`Engine::deregister`] has said true, nobody writes into the region any more;
//! * a session that has failed, or was closed, stays so; threads and descriptors end with the last
//!   handles;
//! * no slice or reference is ever made over pool memory, because other processes write there:
//!   bytes are copied between raw pointers, or by the kernel.
//!
//! This is the only crate with unsafe code but for the edge of `python`; the system calls are in
//! `sys`, the copy routine in `stream`, the drivers of devices in `device`, libibverbs (feature `rdma`) in `transport::rdma::verbs`.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

mod device;
mod engine;
mod error;
mod fault;
mod foreign;
mod grant;
mod memory;
#[cfg(all(test, ferry_loom))]
mod models;
mod nic_map;
mod offer;
mod process;
mod rdma_options;
mod reach;
mod region;
mod session;
mod status;
mod stream;
mod sync;
mod sys;
mod timer;
mod transport;

// In the signatures below, so that a caller needs no other crate for them.
pub use common::ids::{ByteLen, ByteOffset};
pub use device::{
    DeviceHandles, DeviceMemory, DeviceReport, NicPath, device_count, device_drivers,
    device_report, set_device_library,
};
pub use engine::{Engine, EngineConfig};
pub use error::{TransportError, TransportErrorKind};
pub use fault::{FaultKind, FaultSpec};
pub use foreign::{AnyMemory, ForeignMemory};
pub use grant::{GRANT_BYTES, Grant};
pub use memory::Memory;
pub use nic_map::NicMap;
pub use offer::is_reached_by_tcp_only;
pub use process::EngineProcess;
pub use rdma_options::{DeviceChoice, RailReport, RdmaOptions, rdma_devices};
pub use reach::{PeerSessions, Reach};
pub use region::{DeviceRuntime, Location, Region, RemoteRegion};
pub use session::{Direction, Session, WriteBatch, WritePair};
pub use status::{TransferHandle, TransferResult, Transferred};
pub use transport::TransportKind;
#[cfg(feature = "rdma")]
pub use transport::rdma::verbs;

/// The way in for fuzz targets.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub use crate::transport::same_host::read_any_message as same_host_message;
    pub use crate::transport::tcp::read_any_framing as tcp_framing;
}

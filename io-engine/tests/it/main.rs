//! Every transport moves exactly the bytes it is told to, checks where they land, and says what
//! happened when it cannot.

mod devices;
mod exactness;
mod foreign;
mod grants;
mod lifetimes;
mod peers;
#[cfg(feature = "rdma")]
mod rdma;
#[cfg(feature = "rdma")]
mod rdma_devices;
#[cfg(feature = "rdma")]
mod rdma_faults;
#[cfg(feature = "rdma")]
mod rdma_handshake;
#[cfg(feature = "rdma")]
mod rdma_hosts;
#[cfg(feature = "rdma")]
mod rdma_rails;
mod refusals;
mod support;

//! RDMA verbs, safely. One file for each object; nothing outside this module touches the binding.
//!
//! An object owns what it was made from, so that destruction follows the types: a queue pair holds
//! its completion queue, that its channel, a memory region its protection domain, all of them the
//! device. What is posted holds the memory that it names until its completion was seen or the
//! queue pair is destroyed. Codes that the binding does not know are values, never panics.

mod address;
mod completion_queue;
mod device;
mod library;
mod memory_region;
mod protection_domain;
mod queue_pair;

use std::io;

use crate::error::{TransportError, TransportErrorKind};

pub use address::{Gid, GidEntry, GidKind, LinkLayer, Mtu, best_gid, gid_table};
pub use completion_queue::{
    Completion, CompletionChannel, CompletionQueue, CompletionStatus, WorkId,
};
pub use device::{AsyncEvent, Device, DeviceLimits, PortState, device_names};
pub use memory_region::MemoryRegion;
pub use protection_domain::ProtectionDomain;
pub use queue_pair::{
    Depths, Finished, Link, PostGuard, QueuePair, RemoteRange, RetryPolicy, Verb,
};

#[cfg(doctest)]
#[doc = include_str!("misuse.md")]
struct Misuse;

/// The error that the last verbs call left in `errno`.
fn last_error(what: impl std::fmt::Display) -> TransportError {
    failed(what, &io::Error::last_os_error())
}

/// The error of a verbs call that returns its code.
fn coded_error(what: impl std::fmt::Display, code: i32) -> TransportError {
    failed(what, &io::Error::from_raw_os_error(code))
}

fn failed(what: impl std::fmt::Display, error: &io::Error) -> TransportError {
    let kind = match error.kind() {
        io::ErrorKind::OutOfMemory => TransportErrorKind::Memory,
        io::ErrorKind::PermissionDenied => TransportErrorKind::PermissionDenied,
        _ => TransportErrorKind::Io,
    };
    TransportError::quiesced(kind, format!("{what}: {error}"))
}

//! The bytes, the layouts and the arithmetic that every other part of Ferry shares.
//!
//! What it does: encodes and decodes the control messages and descriptors ([`wire`]), describes a
//! rank's buffers ([`schema`]) and its place in the parallel groups ([`topology`]), turns indices
//! into byte ranges ([`plan`]), says how a room's status may change ([`room`]) and holds the
//! names of all metrics ([`metrics`]).
//!
//! What is absent on purpose: sockets, files, clocks, threads, async and unsafe code. Everything
//! here is a function of its arguments, so it runs under property tests, fuzzers and Miri.
//!
//! Invariants:
//! * nothing from the wire is trusted: lengths are checked before they are used or allocated;
//! * all arithmetic on offsets and lengths is checked 64-bit arithmetic;
//! * wire structs ([`wire`]) are never domain types ([`schema`]); `TryFrom` stands between them.

#![forbid(unsafe_code)]

pub mod check;
pub mod ids;
pub mod metrics;
pub mod plan;
pub mod room;
pub mod schema;
pub mod topology;
pub mod wire;

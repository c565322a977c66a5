//! The bootstrap server: where ranks register and find each other.
//!
//! What it does: speaks SGLang's bootstrap protocol ([`sglang`]), keeps registrations in a
//! [`store`], and shows them over an admin API, a page and metrics.
//!
//! What is absent on purpose: anything about transfers. The rules ([`registry`]) are pure; only
//! the store touches the disk, and only the prober dials ranks.
//!
//! Invariants:
//! * a change is on the disk before it is acknowledged or seen by any reader;
//! * a command changes everything it should or nothing;
//! * the topology JSON has only keys that the release which registered knows.

#![forbid(unsafe_code)]

pub mod admin;
mod answers;
pub mod api;
pub mod config;
pub mod ctl;
pub mod error;
pub mod events;
pub mod fields;
pub mod fleet;
pub mod guard;
pub mod health;
pub mod listener;
pub mod metrics;
pub mod page;
pub mod probe;
pub mod registry;
pub mod reports;
pub mod rooms;
pub mod routes;
pub mod server;
pub mod sglang;
pub mod store;
pub mod writer;

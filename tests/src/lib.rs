//! The harness that the tests share: processes, a small HTTP client, and a model of
//! the bootstrap server's rules.

#![forbid(unsafe_code)]

pub mod bootstrap_model;
pub mod http;
pub mod process;
pub mod random;
pub mod registrations;
pub mod service;
pub mod sglang;

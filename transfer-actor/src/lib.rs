//! The transfer actors: one rank actor for each local rank, one component actor for each part of
//! a request's state, and the service that hosts them for engines in any language.

#![forbid(unsafe_code)]

pub mod api;
pub mod bootstrap_access;
pub mod bootstrap_client;
mod checksums;
pub mod client;
pub mod component;
pub mod config;
pub mod control;
pub mod error;
pub mod messages;
pub mod metrics;
pub mod rank;
pub mod service;
pub mod shutdown;

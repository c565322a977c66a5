//! One binary for all integration tests; a module for each behaviour.

mod bootstrap_admin;
mod bootstrap_bad_input;
mod bootstrap_ctl;
mod bootstrap_generated;
mod bootstrap_guard;
mod bootstrap_http;
mod bootstrap_membership;
mod bootstrap_namespaces;
mod bootstrap_server;
mod certificates;
mod conformance;
mod crash;
mod dashboards;
mod demo;
mod durability;
mod hostile;
mod libraries;
mod scale;
mod service;
mod store;

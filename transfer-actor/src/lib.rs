//! Placeholder
pub mod api;

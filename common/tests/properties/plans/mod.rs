//! Plans write every byte that they should, once, from where the same logical byte lies, and stay
//! inside their regions.
//!
//! A [`case::Case`] is a request between two engines. [`image`] paints what each byte of a rank's
//! buffers means (layer, token, head, channel), [`state_image`] does so for state components;
//! neither uses the planner's arithmetic. [`coverage`] then carries out the plans of all prefill
//! ranks that feed one decode rank and compares meanings. [`junk`] plans over layouts that mostly
//! make no sense, where only the limits must hold.

mod case;
mod coverage;
mod image;
mod junk;
mod shares;
mod state_image;

//! The wire by SGLang release, as a table (`spec/control-plane.md`, last section).

/// A row of the table: releases that share one form of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Release {
    /// 0.5.12 and before: one flat list of state descriptors. Recognised and refused.
    Flat0512,
    /// 0.5.13: nested by component; TRANSFER_INFO has 9 frames.
    Nested0513,
    /// 0.5.15 to 0.5.18: TRANSFER_INFO has `decode_prefix_len`.
    Prefix0515,
    /// 0.5.19 to 0.5.21: ABORT is answered.
    Ack0519,
    /// 0.5.22 and 0.5.23: REGISTER has 18 frames; ABORT carries a generation.
    Dcp0522,
}

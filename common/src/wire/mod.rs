//! The bytes of the control plane (SGLang's MoRI flavour, `spec/control-plane.md`).
//!
//! Sans-IO: every decoder takes frames that were already received and returns a value or a
//! [`WireError`] that says where it stopped. Wire structs here mirror the frames; domain types
//! are made from them in [`crate::schema`].

pub mod checks;
pub mod descriptor;
pub mod directory;
pub mod error;
pub mod frame;
pub mod int_lists;
pub mod message;
pub mod rdma_control;
pub mod register;
pub mod release;
pub mod route;
pub mod status;
pub mod transfer_info;

pub use checks::{CheckGroup, Checked, Checks, MOST_CHECK_BYTES, MOST_CHECK_GROUPS};
pub use descriptor::{EngineDesc, MemoryDesc, MemoryLocation};
pub use directory::EngineEntry;
pub use error::WireError;
pub use frame::Frame;
pub use message::{
    Abort, AbortAck, AuxData, Bootstrap, ControlMessage, FerryTrailer, Hello, Incoming,
    UnreadableSender, decode_message, guess_kind, unique_rank, unreadable_sender,
};
pub use register::Register;
pub use release::{Release, ReleaseForm};
pub use status::{KvPoll, Status};
pub use transfer_info::{Grant, TransferInfo};

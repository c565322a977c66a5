//! Where registrations survive: sled on the disk, or memory.
//!
//! A store is read once, at start; from then on the registry is served from memory and the store
//! is only written to. Before the first change everything is written anew ([`Store::rewrite`]),
//! which is also how a store of an older layout is migrated, how space is given back, and how
//! writing begins again after the disk failed.

mod encoding;
mod folder;
mod journal;
mod memory;
mod sled;
mod values;

use crate::error::StoreError;

pub use self::encoding::{changes_of, entries_of, shown_key, state_of};
pub use self::journal::named;
pub use self::memory::MemoryStore;
pub use self::sled::SledStore;

/// One change of one value; `None` removes it.
pub type Change = (Vec<u8>, Option<Vec<u8>>);

/// A stored value with its key.
pub type Entry = (Vec<u8>, Vec<u8>);

/// What a store has.
#[derive(Debug, Default)]
pub struct Loaded {
    /// What can be read.
    pub entries: Vec<Entry>,
    /// What was acknowledged once and is not there, or cannot be read.
    pub lost: Vec<Lost>,
}

/// A value that is not as it was acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Its key.
    pub key: Vec<u8>,
    /// What is wrong with it, in words.
    pub what: String,
}

/// A place for values.
pub trait Store: Send {
    /// Everything, at start.
    ///
    /// # Errors
    /// When nothing can be said about what it holds.
    fn load(&mut self) -> Result<Loaded, StoreError>;

    /// Replaces everything, all or nothing, on files that no failed write has touched. Only then
    /// can changes be made.
    ///
    /// # Errors
    /// [`StoreError::Commit`]; what was there before is untouched.
    fn rewrite(&mut self, entries: &[Entry]) -> Result<(), StoreError>;

    /// Makes changes, all or none, and returns when they are durable.
    ///
    /// # Errors
    /// [`StoreError::Commit`]; nothing may be acknowledged then, and no further change is made
    /// before a [`rewrite`](Self::rewrite).
    fn commit(&mut self, changes: &[Change]) -> Result<(), StoreError>;
}

//! Where registrations survive: sled on the disk, or memory.
//!
//! A store is read once, at start; from then on the registry is served from memory and the store
//! is only written to. Before the first change everything is written anew ([`Store::rewrite`]),
//! which is also how a store of an older layout is migrated, and how writing begins again after
//! the disk failed.

mod appender;
mod checkpoint;
mod encoding;
mod folder;
mod layout_2;
mod log;
mod memory;
mod sled;

use std::sync::Arc;

use crate::error::StoreError;
use crate::registry::State;

use self::encoding::entries_of;
pub use self::encoding::{changes_of, shown_key, state_of};
#[cfg(fuzzing)]
pub use self::log::read_any as read_any_log;
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

/// Called when a commit is durable, or has failed.
pub type Done = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

/// Called when [`Store::tend`] has more to do.
pub type Wake = Box<dyn FnOnce() + Send>;

/// A place for values.
pub trait Store: Send {
    /// Everything, at start.
    ///
    /// # Errors
    /// When nothing can be said about what it holds.
    fn load(&mut self) -> Result<Loaded, StoreError>;

    /// Replaces everything by what a state has, all or nothing, on files that no failed write has
    /// touched. Only then can changes be made. Nothing may be under way.
    ///
    /// # Errors
    /// [`StoreError::Commit`]; what was there before is untouched.
    fn rewrite(&mut self, state: &Arc<State>) -> Result<(), StoreError>;

    /// Begins to make changes, all or none, and calls `done` when they are durable, or with
    /// [`StoreError::Commit`]: nothing may be acknowledged then, and no further change is made
    /// before a [`rewrite`](Self::rewrite). One commit is under way at a time. `done` may be called
    /// on any thread, also before this returns; a disk that hangs never calls it.
    fn commit(&mut self, changes: &[Change], done: Done);

    /// Does what is due beside commits, such as giving space back. `state` is what all commits
    /// made; none may be under way. `wake` may be called when there is more to do.
    ///
    /// # Errors
    /// [`StoreError::Commit`] when no further change can be made before a
    /// [`rewrite`](Self::rewrite); all that was made stands.
    fn tend(&mut self, state: &Arc<State>, wake: Wake) -> Result<(), StoreError>;
}

/// Names what is lost, at most so many of them.
pub fn named(lost: &[Lost], limit: usize) -> String {
    let names = lost.iter().take(limit);
    let names = names.map(|lost| format!("{} ({})", shown_key(&lost.key), lost.what));
    let names = names.collect::<Vec<_>>().join(", ");
    match lost.len().saturating_sub(limit) {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}

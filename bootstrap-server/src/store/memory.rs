//! Values in memory: for tests, and for a server that is to forget everything when it ends.

use super::{Change, Entry, Loaded, Store};
use crate::error::StoreError;

/// A store that keeps nothing: what a server serves is in its memory anyway.
#[derive(Debug)]
pub struct MemoryStore;

impl Store for MemoryStore {
    fn load(&mut self) -> Result<Loaded, StoreError> {
        Ok(Loaded::default())
    }

    fn rewrite(&mut self, _entries: &[Entry]) -> Result<(), StoreError> {
        Ok(())
    }

    fn commit(&mut self, _changes: &[Change]) -> Result<(), StoreError> {
        Ok(())
    }
}

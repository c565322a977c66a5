//! Values in memory: for tests, and for a server that is to forget everything when it ends.

use std::sync::Arc;

use super::{Change, Done, Loaded, Store, Wake};
use crate::error::StoreError;
use crate::registry::State;

/// A store that keeps nothing: what a server serves is in its memory anyway.
#[derive(Debug)]
pub struct MemoryStore;

impl Store for MemoryStore {
    fn load(&mut self) -> Result<Loaded, StoreError> {
        Ok(Loaded::default())
    }

    fn rewrite(&mut self, _state: &Arc<State>) -> Result<(), StoreError> {
        Ok(())
    }

    fn commit(&mut self, _changes: &[Change], done: Done) {
        done(Ok(()));
    }

    fn tend(&mut self, _state: &Arc<State>, _wake: Wake) -> Result<(), StoreError> {
        Ok(())
    }
}

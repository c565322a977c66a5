//! Which way leads from a local to a remote memory, as it was found last time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::wire::MemoryDesc;

use crate::mori::transfer::Route;

/// More are not kept.
const MOST: usize = 1 << 16;

/// The descriptors of a pair by their places in memory, which stay theirs while they are held here.
type Pair = (usize, usize);
type Known = (Arc<MemoryDesc>, Arc<MemoryDesc>, Arc<Route>);

/// Ways that were found since something was registered or deregistered.
#[derive(Default)]
pub(crate) struct Ways(Mutex<State>);

#[derive(Default)]
struct State {
    known: HashMap<Pair, Known>,
    /// Counts the times that everything was forgotten.
    epoch: u64,
}

impl Ways {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way that is known, or the one that is found now.
    ///
    /// # Errors
    /// Why none was found.
    pub(crate) fn get<E>(
        &self,
        local: &Arc<MemoryDesc>,
        far: &Arc<MemoryDesc>,
        find: impl FnOnce() -> Result<Route, E>,
    ) -> Result<Arc<Route>, E> {
        let pair = (Arc::as_ptr(local).addr(), Arc::as_ptr(far).addr());
        let state = self.lock();
        if let Some((_, _, route)) = state.known.get(&pair) {
            return Ok(Arc::clone(route));
        }
        let epoch = state.epoch;
        drop(state);
        let route = Arc::new(find()?);
        let mut state = self.lock();
        if state.epoch == epoch && state.known.len() < MOST {
            let known = (Arc::clone(local), Arc::clone(far), Arc::clone(&route));
            state.known.insert(pair, known);
        }
        Ok(route)
    }

    /// Something is registered, or no more: everything is found anew.
    pub(crate) fn forget(&self) {
        let mut state = self.lock();
        state.epoch += 1;
        let known = std::mem::take(&mut state.known);
        drop(state);
        drop(known);
    }
}

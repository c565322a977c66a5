//! Values in memory: for tests, and for a server that is to forget everything when it ends.

use std::collections::BTreeMap;

use super::{Change, Entry, Store};
use crate::error::StoreError;

/// A store without a disk.
#[derive(Debug, Default)]
pub struct MemoryStore {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Store for MemoryStore {
    fn load(&self) -> Result<Vec<Entry>, StoreError> {
        Ok(self
            .values
            .iter()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect())
    }

    fn commit(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        for (key, value_opt) in changes {
            match value_opt {
                Some(value) => self.values.insert(key.clone(), value.clone()),
                None => self.values.remove(key),
            };
        }
        Ok(())
    }
}

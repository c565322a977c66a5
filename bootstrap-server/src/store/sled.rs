//! Values in sled, synchronised by ourselves.
//!
//! sled 0.34's `flush` writes and calls `sync_file_range`, which gives no promise about a power
//! cut; an `fdatasync` of its file follows, so that an acknowledged change is on the disk.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::{Change, Entry, Store};
use crate::error::StoreError;

/// Registrations are small; sled's default of 1 GiB would be waste.
const CACHE_BYTES: u64 = 64 << 20;
/// sled's file inside its folder.
const FILE_NAME: &str = "db";

/// A store in a folder of its own. One process a folder.
#[derive(Debug)]
pub struct SledStore {
    database: sled::Db,
    file: File,
    folder: PathBuf,
}

impl SledStore {
    /// Opens or makes the folder.
    ///
    /// # Errors
    /// [`StoreError::Open`] that names it, also when another process holds it.
    pub fn open(folder: &Path) -> Result<Self, StoreError> {
        let failed = |reason: String| StoreError::Open {
            folder: folder.display().to_string(),
            reason,
        };
        let database = sled::Config::new()
            .path(folder)
            .cache_capacity(CACHE_BYTES)
            // Every change is flushed by `commit`; a timer would only add writes.
            .flush_every_ms(None)
            .open()
            .map_err(|error| failed(error.to_string()))?;
        let file = File::open(folder.join(FILE_NAME)).map_err(|error| failed(error.to_string()))?;
        Ok(Self {
            database,
            file,
            folder: folder.to_owned(),
        })
    }
}

impl Store for SledStore {
    fn load(&self) -> Result<Vec<Entry>, StoreError> {
        let values = self.database.iter().map(|entry| {
            let (key, value) = entry.map_err(|error| StoreError::Corrupt {
                key: self.folder.display().to_string(),
                reason: error.to_string(),
            })?;
            Ok((key.to_vec(), value.to_vec()))
        });
        values.collect()
    }

    fn commit(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        let mut batch = sled::Batch::default();
        for (key, value_opt) in changes {
            match value_opt {
                Some(value) => batch.insert(key.as_slice(), value.as_slice()),
                None => batch.remove(key.as_slice()),
            }
        }
        let failed = |error: &dyn std::fmt::Display| {
            StoreError::Commit(format!("{error} (in {})", self.folder.display()))
        };
        self.database
            .apply_batch(batch)
            .map_err(|error| failed(&error))?;
        self.database.flush().map_err(|error| failed(&error))?;
        self.file.sync_data().map_err(|error| failed(&error))
    }
}

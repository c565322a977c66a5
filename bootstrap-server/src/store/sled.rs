//! The store on the disk: folders of values in sled ([`values`](super::values)), one after another.
//!
//! **After a failed write or synchronisation the files are given up.** The kernel reports a failed
//! write-back once and marks its pages clean, so that a second `fdatasync` says yes although the
//! disk has nothing. So no file is ever synchronised again after it failed once: the only way on
//! is to write everything from memory into files of a new folder. For the same reason a start
//! never adds to the files of an earlier process.
//!
//! **Space.** sled uses the segments of its file again: a million changes of 600 values keep it
//! below 3 MiB. The journal grows with each change. When file and journal have grown to
//! [`GROWTH`] times what they began with, and to [`GROWTH_BYTES`], everything is written into a new
//! folder, and so it is at each start.

use std::panic::catch_unwind;
use std::path::Path;

use super::folder::{Current, DataFolder, remove_folder};
use super::journal::{self, Found, Journal};
use super::values::{JOURNAL_NAME, LAST_KEY, NUMBER_BYTES, ValuesThread, open_sled};
use super::{Change, Entry, Loaded, Lost, Store};
use crate::error::StoreError;

/// Everything is written anew when it has grown so many times ...
const GROWTH: u64 = 4;
/// ... and to so many bytes.
const GROWTH_BYTES: u64 = 32 << 20;

/// A store in a folder of its own. One process a folder.
#[derive(Debug)]
pub struct SledStore {
    folder: DataFolder,
    /// The folder of values that changes go to. Nothing in it has failed yet.
    values_opt: Option<ValuesThread>,
    /// The size at which everything is written anew.
    rewrite_at: u64,
}

impl SledStore {
    /// Makes the folder if it is not there, and takes it.
    ///
    /// # Errors
    /// [`StoreError::Open`] that names it, also when another process holds it.
    pub fn open(folder: &Path) -> Result<Self, StoreError> {
        Ok(Self {
            folder: DataFolder::open(folder)?,
            values_opt: None,
            rewrite_at: u64::MAX,
        })
    }

    fn failed(&self, error: &dyn std::fmt::Display) -> StoreError {
        StoreError::Commit(format!("{error} (in {})", self.folder.path().display()))
    }

    /// Writes everything anew when that gives much space back. What is there still counts if that
    /// fails, so it is no error.
    fn give_space_back(&mut self, size: u64) {
        let Some(values) = self.values_opt.as_ref().filter(|_| size >= self.rewrite_at) else {
            return;
        };
        self.rewrite_at = size.saturating_mul(2);
        let entries = values.entries().map_err(|error| self.failed(&error));
        match entries.and_then(|entries| self.rewrite(&entries)) {
            Ok(()) => tracing::info!(bytes = size, "the store was written anew to save space"),
            Err(error) => tracing::warn!(%error, "the store has grown and cannot be written anew"),
        }
    }
}

impl Store for SledStore {
    fn load(&mut self) -> Result<Loaded, StoreError> {
        self.folder.use_reserve();
        match self.folder.current()? {
            Current::Nothing => Ok(Loaded::default()),
            Current::FirstLayout(path) => {
                tracing::info!(folder = %path.display(), "the store has layout 1 and is migrated");
                let entries = read(&path)?.ok_or_else(|| unreadable(&path))?;
                Ok(Loaded {
                    entries,
                    lost: Vec::new(),
                })
            }
            Current::Folder(path) => load_folder(&path),
        }
    }

    fn rewrite(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        let next = self.folder.next().map_err(|error| self.failed(&error))?;
        let written = ValuesThread::write(&next, entries.to_vec());
        let switched = written.and_then(|(values, size)| {
            self.folder.switch(&next)?;
            Ok((values, size))
        });
        match switched {
            Ok((values, size)) => {
                self.values_opt = Some(values);
                self.rewrite_at = size.saturating_mul(GROWTH).max(GROWTH_BYTES);
                let tidied = self.folder.remove_others(&next);
                if let Err(error) = tidied.and_then(|()| self.folder.reserve()) {
                    tracing::warn!(%error, "the store's folder cannot be tidied");
                }
                Ok(())
            }
            Err(error) => {
                // A switch that failed behind its rename may count at the next start. What is there
                // is complete, but nothing may be added to the folder before it any more.
                if self.folder.current().ok() == Some(Current::Folder(next.clone())) {
                    self.values_opt = None;
                } else {
                    let _ = remove_folder(&next);
                }
                Err(self.failed(&error))
            }
        }
    }

    fn commit(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        let Some(values) = &self.values_opt else {
            return Err(self.failed(&"it was not written anew since a write failed"));
        };
        match values.commit(changes.to_vec()) {
            Ok(size) => {
                self.give_space_back(size);
                Ok(())
            }
            Err(error) => {
                self.values_opt = None;
                Err(self.failed(&error))
            }
        }
    }
}

/// What sled has in a folder, or nothing when its files are too damaged to be opened.
fn read(path: &Path) -> Result<Option<Vec<Entry>>, StoreError> {
    // sled panics on some damage.
    let opened = catch_unwind(|| {
        let database = open_sled(path)?;
        let entries = database.iter().map(|entry| {
            let (key, value) = entry?;
            Ok((key.to_vec(), value.to_vec()))
        });
        entries.collect::<sled::Result<Vec<Entry>>>()
    });
    match opened {
        Ok(Ok(entries)) => Ok(Some(entries)),
        Ok(Err(sled::Error::Io(error))) => Err(StoreError::Open {
            folder: path.display().to_string(),
            reason: error.to_string(),
        }),
        Ok(Err(error)) => {
            tracing::error!(folder = %path.display(), %error, "the store is damaged");
            Ok(None)
        }
        Err(_) => Ok(None),
    }
}

fn unreadable(path: &Path) -> StoreError {
    StoreError::Open {
        folder: path.display().to_string(),
        reason: "its files are damaged".to_owned(),
    }
}

fn load_folder(path: &Path) -> Result<Loaded, StoreError> {
    let (acknowledged, damaged) =
        Journal::read(&path.join(JOURNAL_NAME)).map_err(|error| StoreError::Open {
            folder: path.display().to_string(),
            reason: format!("{JOURNAL_NAME}: {error}"),
        })?;
    if damaged > 0 {
        tracing::warn!(
            lines = damaged,
            "the journal of acknowledged changes is damaged; losses may go unnoticed"
        );
    }
    let stored = read(path)?.unwrap_or_default();
    let mut found = Found::default();
    let mut last = 0;
    let mut lost = Vec::new();
    for (key, numbered) in &stored {
        match numbered.first_chunk::<NUMBER_BYTES>() {
            Some(number) if key == LAST_KEY => last = u64::from_be_bytes(*number),
            Some(number) => {
                found.insert(key, u64::from_be_bytes(*number));
            }
            None => lost.push(Lost {
                key: key.clone(),
                what: "it has no number".to_owned(),
            }),
        }
    }
    lost.extend(journal::lost(&acknowledged, &found, last));
    let numbered = stored
        .into_iter()
        .filter(|(key, numbered)| key != LAST_KEY && numbered.len() >= NUMBER_BYTES);
    let entries = numbered.map(|(key, mut value)| {
        value.drain(..NUMBER_BYTES);
        (key, value)
    });
    Ok(Loaded {
        entries: entries.collect(),
        lost,
    })
}

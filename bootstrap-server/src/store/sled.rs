//! Values in sled, synchronised by ourselves.
//!
//! sled 0.34's `flush` writes and calls `sync_file_range`, which gives no promise about a power
//! cut; an `fdatasync` of its file follows, so that an acknowledged change is on the disk. Values
//! over 128 KiB are files of their own, which sled does not synchronise either.
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

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use super::folder::{Current, DataFolder};
use super::journal::{self, Journal};
use super::{Change, Entry, Loaded, Lost, Store};
use crate::error::StoreError;

/// Registrations are small; sled's default of 1 GiB would be waste.
const CACHE_BYTES: u64 = 64 << 20;
/// sled's file inside its folder.
const FILE_NAME: &str = "db";
/// sled's folder of large values, likewise.
const BLOBS_NAME: &str = "blobs";
const JOURNAL_NAME: &str = "acknowledged";
/// Everything is written anew when it has grown so many times ...
const GROWTH: u64 = 4;
/// ... and to so many bytes.
const GROWTH_BYTES: u64 = 32 << 20;
/// Values of one batch when everything is written.
const BATCH: usize = 1024;
/// Each value stands behind the number of its last change.
const NUMBER_BYTES: usize = size_of::<u64>();

/// A store in a folder of its own. One process a folder.
#[derive(Debug)]
pub struct SledStore {
    folder: DataFolder,
    open_opt: Option<Values>,
}

/// One folder of values. Nothing in it has failed yet.
#[derive(Debug)]
struct Values {
    database: sled::Db,
    file: File,
    journal: Journal,
    path: PathBuf,
    blobs: BTreeSet<OsString>,
    next_commit: u64,
    /// Its size at which everything is written anew.
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
            open_opt: None,
        })
    }

    fn failed(&self, error: &dyn std::fmt::Display) -> StoreError {
        StoreError::Commit(format!("{error} (in {})", self.folder.path().display()))
    }

    /// Writes everything anew when that gives much space back. What is there still counts if that
    /// fails, so it is no error.
    fn give_space_back(&mut self) {
        let Some(values) = &mut self.open_opt else {
            return;
        };
        let size = values.size();
        if size < values.rewrite_at {
            return;
        }
        values.rewrite_at = size.saturating_mul(2);
        let rewritten = values
            .entries()
            .map_err(|error| self.failed(&error))
            .and_then(|entries| self.rewrite(&entries));
        match rewritten {
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
        // sled may panic where a disk fails.
        let written = catch_unwind(AssertUnwindSafe(|| Values::write(&next, entries)));
        let written = written.unwrap_or_else(|_| Err(io::Error::other("sled panicked")));
        let switched = written.and_then(|values| {
            self.folder.switch(&next)?;
            Ok(values)
        });
        match switched {
            Ok(values) => {
                self.open_opt = Some(values);
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
                    self.open_opt = None;
                } else {
                    let _ = fs::remove_dir_all(&next);
                }
                Err(self.failed(&error))
            }
        }
    }

    fn commit(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        let Some(values) = &mut self.open_opt else {
            return Err(self.failed(&"it was not written anew since a write failed"));
        };
        let committed = catch_unwind(AssertUnwindSafe(|| values.commit(changes)));
        let committed = committed.unwrap_or_else(|_| Err(io::Error::other("sled panicked")));
        if let Err(error) = committed {
            let given_up = self.open_opt.take();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(given_up)));
            return Err(self.failed(&error));
        }
        self.give_space_back();
        Ok(())
    }
}

impl Values {
    fn write(path: &Path, entries: &[Entry]) -> io::Result<Self> {
        let database = open_sled(path)?;
        let mut values = Self {
            file: File::open(path.join(FILE_NAME))?,
            journal: Journal::create(&path.join(JOURNAL_NAME))?,
            database,
            path: path.to_owned(),
            blobs: BTreeSet::new(),
            next_commit: 1,
            rewrite_at: 0,
        };
        for batch in entries.chunks(BATCH) {
            let changes: Vec<Change> = batch
                .iter()
                .map(|(key, value)| (key.clone(), Some(value.clone())))
                .collect();
            values.apply(&changes)?;
            values.acknowledge(&changes)?;
        }
        values.database.flush()?;
        values.synchronise_blobs()?;
        values.file.sync_data()?;
        values.rewrite_at = (values.size() * GROWTH).max(GROWTH_BYTES);
        Ok(values)
    }

    fn commit(&mut self, changes: &[Change]) -> io::Result<()> {
        self.apply(changes)?;
        self.database.flush()?;
        self.synchronise_blobs()?;
        self.file.sync_data()?;
        self.acknowledge(changes)
    }

    fn apply(&self, changes: &[Change]) -> io::Result<()> {
        let mut batch = sled::Batch::default();
        for (key, value_opt) in changes {
            match value_opt {
                Some(value) => {
                    let mut numbered = self.next_commit.to_be_bytes().to_vec();
                    numbered.extend(value);
                    batch.insert(key.as_slice(), numbered);
                }
                None => batch.remove(key.as_slice()),
            }
        }
        Ok(self.database.apply_batch(batch)?)
    }

    fn acknowledge(&mut self, changes: &[Change]) -> io::Result<()> {
        let keys = changes
            .iter()
            .map(|(key, value_opt)| (key.as_slice(), value_opt.is_some()));
        self.journal.append(self.next_commit, keys)?;
        self.next_commit += 1;
        Ok(())
    }

    fn synchronise_blobs(&mut self) -> io::Result<()> {
        let folder = self.path.join(BLOBS_NAME);
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(&folder)? {
            found.insert(entry?.file_name());
        }
        if found == self.blobs {
            return Ok(());
        }
        for name in found.difference(&self.blobs) {
            File::open(folder.join(name))?.sync_all()?;
        }
        File::open(&folder)?.sync_all()?;
        self.blobs = found;
        Ok(())
    }

    fn entries(&self) -> sled::Result<Vec<Entry>> {
        let entries = self.database.iter().map(|entry| {
            let (key, value) = entry?;
            let value = value.get(NUMBER_BYTES..).unwrap_or_default();
            Ok((key.to_vec(), value.to_vec()))
        });
        entries.collect()
    }

    fn size(&self) -> u64 {
        let file = self.file.metadata().map_or(0, |metadata| metadata.len());
        file + self.journal.bytes()
    }
}

fn open_sled(path: &Path) -> sled::Result<sled::Db> {
    sled::Config::new()
        .path(path)
        .cache_capacity(CACHE_BYTES)
        // Every change is flushed by `commit`; a timer would only add writes.
        .flush_every_ms(None)
        .open()
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
    let mut found: HashMap<&[u8], u64> = HashMap::new();
    let mut lost = Vec::new();
    let mut entries = Vec::new();
    for (key, numbered) in &stored {
        match numbered.split_first_chunk::<NUMBER_BYTES>() {
            Some((number, value)) => {
                found.insert(key, u64::from_be_bytes(*number));
                entries.push((key.clone(), value.to_vec()));
            }
            None => lost.push(Lost {
                key: key.clone(),
                what: "it has no number".to_owned(),
            }),
        }
    }
    lost.extend(journal::lost(&acknowledged, &found));
    Ok(Loaded { entries, lost })
}

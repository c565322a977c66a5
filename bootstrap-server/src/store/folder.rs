//! The data folder: who uses it, which layout it has, and which of its folders holds the values.
//!
//! | file | what it is |
//! |---|---|
//! | `lock` | locked by the server that uses the folder |
//! | `schema` | JSON: the layout's version, and the name of the folder of values; replaced by a rename |
//! | `reserve` | room that a start on a full disk needs: sled writes a little to open its files |
//! | `store-N/` | a checkpoint of all values in sled, and `log`: every commit since |
//!
//! Version 1, before there was a `schema`, had sled's files in the data folder itself. Version 2 had
//! all values in sled, and `acknowledged`, a journal of their keys.

use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::checkpoint::too_late;
use crate::error::StoreError;

/// The layout that this server writes.
const SCHEMA: u32 = 3;
/// The layout without a log.
const SECOND: u32 = 2;
const SCHEMA_FILE: &str = "schema";
const LOCK_FILE: &str = "lock";
const RESERVE_FILE: &str = "reserve";
const RESERVE_BYTES: usize = 1 << 20;
const PREFIX: &str = "store-";
/// sled's files of version 1, beside its snapshots.
const FIRST_LAYOUT: [&str; 3] = ["db", "conf", "blobs"];
/// A snapshot's name is this and a number in hexadecimal digits.
const FIRST_LAYOUT_SNAPSHOT: &str = "snap.";

#[derive(Debug, Serialize, Deserialize)]
struct Schema {
    schema: u32,
    folder: String,
}

/// Where the values are.
#[derive(Debug, PartialEq, Eq)]
pub enum Current {
    /// Nothing was stored yet.
    Nothing,
    /// In the data folder itself.
    FirstLayout(PathBuf),
    /// In a folder of their own, of layout 2.
    SecondLayout(PathBuf),
    /// In a folder of their own.
    Folder(PathBuf),
}

/// A data folder that is ours until this is dropped.
#[derive(Debug)]
pub struct DataFolder {
    path: PathBuf,
    last_number: u64,
    /// Held while another folder is made the one that counts.
    switching: Arc<Mutex<()>>,
    _lock: File,
}

impl DataFolder {
    /// Makes the folder if it is not there, and locks it.
    ///
    /// # Errors
    /// [`StoreError::Open`], also when another process has it.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |reason: String| StoreError::Open {
            folder: path.display().to_string(),
            reason,
        };
        let locked = fs::create_dir_all(path).and_then(|()| File::create(path.join(LOCK_FILE)));
        let lock = locked.map_err(|error| failed(error.to_string()))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self {
                path: path.to_owned(),
                last_number: 0,
                switching: Arc::default(),
                _lock: lock,
            }),
            Err(TryLockError::WouldBlock) => {
                Err(failed("another bootstrap server uses it".to_owned()))
            }
            Err(TryLockError::Error(error)) => Err(failed(error.to_string())),
        }
    }

    /// What a test holds to have a disk that hangs before a folder counts.
    #[cfg(test)]
    pub(super) fn switching(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.switching)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the values are now.
    ///
    /// # Errors
    /// [`StoreError::Schema`] for the layout of a newer server, [`StoreError::Open`] when what
    /// `schema` says cannot be read or is not there.
    pub fn current(&self) -> Result<Current, StoreError> {
        let failed = |reason: String| StoreError::Open {
            folder: self.path.display().to_string(),
            reason,
        };
        let text = match fs::read(self.path.join(SCHEMA_FILE)) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let first = self.path.join(FIRST_LAYOUT[0]).exists();
                return Ok(match first {
                    true => Current::FirstLayout(self.path.clone()),
                    false => Current::Nothing,
                });
            }
            Err(error) => return Err(failed(format!("{SCHEMA_FILE}: {error}"))),
        };
        let version = serde_json::from_slice(&text)
            .ok()
            .and_then(|value: serde_json::Value| value["schema"].as_u64());
        if version.is_some_and(|version| version > u64::from(SCHEMA)) {
            return Err(StoreError::Schema {
                folder: self.path.display().to_string(),
                found: version.unwrap_or_default(),
                known: SCHEMA,
            });
        }
        let schema: Schema = serde_json::from_slice(&text).map_err(|error| {
            failed(format!(
                "its file {SCHEMA_FILE} cannot be read ({error}): restore the folder, or write \
                 {{\"schema\": {SCHEMA}, \"folder\": \"{PREFIX}N\"}} into it, with the highest N \
                 that is there"
            ))
        })?;
        let folder = self.path.join(&schema.folder);
        if !folder.is_dir() {
            return Err(failed(format!(
                "{} is missing: restore it",
                folder.display()
            )));
        }
        match schema.schema {
            SECOND => Ok(Current::SecondLayout(folder)),
            _ => Ok(Current::Folder(folder)),
        }
    }

    /// Gives the reserve up; it is there again after a [`switch`](Self::switch).
    pub fn use_reserve(&self) {
        // Without one there may be room all the same; if not, the next step says so.
        let _ = fs::remove_file(self.path.join(RESERVE_FILE));
    }

    /// An empty folder for the next values; it does not count before [`switch`](Self::switch).
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn next(&mut self) -> io::Result<PathBuf> {
        // A number is never used twice: a write that hung may still go on in its folder.
        let highest = self.numbers()?.into_iter().chain([self.last_number]).max();
        self.last_number = highest.unwrap_or_default() + 1;
        let next = self.path.join(format!("{PREFIX}{}", self.last_number));
        fs::create_dir(&next)?;
        Ok(next)
    }

    fn numbers(&self) -> io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            numbers.extend(number(&entry?.file_name()));
        }
        Ok(numbers)
    }

    /// Makes a folder the one that counts, after its `log` is on the disk; all else in it has to be
    /// already. What counted before is removed then.
    ///
    /// It is done on a thread of its own, since a disk may hang. A switch that was given up does not
    /// happen later: neither behind one that begins after it, nor, unless it was about to be
    /// renamed, at all.
    ///
    /// # Errors
    /// When it cannot be; the folder that counted before still does then, unless
    /// [`current`](Self::current) says otherwise. [`TimedOut`](io::ErrorKind::TimedOut) when it was
    /// not done by the deadline: either may count then.
    pub fn switch(&self, folder: &Path, log: File, deadline: Instant) -> io::Result<()> {
        let (answer, switched) = mpsc::channel();
        let is_given_up = Arc::new(AtomicBool::new(false));
        let (home, folder) = (self.path.clone(), folder.to_owned());
        let (switching, given_up) = (Arc::clone(&self.switching), Arc::clone(&is_given_up));
        let switch = move || {
            let _switching = switching.lock().unwrap_or_else(PoisonError::into_inner);
            let switched = log.sync_data().and_then(|()| {
                if given_up.load(Ordering::SeqCst) {
                    return Err(too_late());
                }
                switch(&home, &folder)
            });
            // Whoever has given up waiting is not there any more.
            let _ = answer.send(switched);
        };
        std::thread::Builder::new()
            .name("switch".to_owned())
            .spawn(switch)?;
        let left = deadline.saturating_duration_since(Instant::now());
        switched.recv_timeout(left).unwrap_or_else(|_| {
            is_given_up.store(true, Ordering::SeqCst);
            Err(too_late())
        })
    }
}

/// The number of a folder of values.
fn number(name: &OsStr) -> Option<u64> {
    let number = name.to_str()?.strip_prefix(PREFIX)?.parse().ok()?;
    // `parse` takes signs and zeros before it, which no name of ours has.
    (*name == *format!("{PREFIX}{number}")).then_some(number)
}

/// Whether a file is one of version 1.
fn is_of_first_layout(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    let snapshot_opt = name.strip_prefix(FIRST_LAYOUT_SNAPSHOT);
    let is_number =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    FIRST_LAYOUT.contains(&name) || snapshot_opt.is_some_and(is_number)
}

/// Lets a folder of a data folder count, and removes what counted before.
fn switch(home: &Path, folder: &Path) -> io::Result<()> {
    let schema_path = home.join(SCHEMA_FILE);
    let was_first_layout = !schema_path.exists();
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let schema = Schema {
        schema: SCHEMA,
        folder: name.into_owned(),
    };
    let new = home.join(format!("{SCHEMA_FILE}.new"));
    let mut file = File::create(&new)?;
    serde_json::to_writer(&mut file, &schema)?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    fs::rename(&new, schema_path)?;
    File::open(home)?.sync_all()?;
    let tidied = remove_before(home, folder, was_first_layout);
    let reserve = || fs::write(home.join(RESERVE_FILE), vec![0; RESERVE_BYTES]);
    if let Err(error) = tidied.and_then(|()| reserve()) {
        tracing::warn!(%error, "the store's folder cannot be tidied");
    }
    Ok(())
}

/// Removes the folders of values before one, and, when it is the first of them, the files of version
/// 1. Nothing else that stands there is ours; a copy that somebody made, for example, is theirs.
fn remove_before(home: &Path, kept: &Path, was_first_layout: bool) -> io::Result<()> {
    let kept = kept.file_name().and_then(number);
    for entry in fs::read_dir(home)? {
        let entry = entry?;
        let name = entry.file_name();
        // Behind it may be one that is being written.
        let is_before = number(&name).is_some_and(|number| Some(number) < kept);
        let is_migrated = was_first_layout && is_of_first_layout(&name);
        if !is_before && !is_migrated {
            continue;
        }
        if entry.file_type()?.is_dir() {
            remove_folder(&entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Removes a folder of values, and its space although a write that hung may hold its files.
///
/// # Errors
/// When it cannot be removed.
pub(super) fn remove_folder(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            // If it cannot be cut, removing it is all that can be done.
            let _ = fs::write(entry.path(), b"");
        }
    }
    fs::remove_dir_all(path)
}

/// Synchronises a folder, and every file and folder in it.
///
/// # Errors
/// When one of them cannot be.
pub(super) fn synchronise(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            synchronise(&entry.path())?;
        } else {
            File::open(entry.path())?.sync_all()?;
        }
    }
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_folder_counts_from_the_switch_on_and_the_others_go() {
        let home = tempfile::tempdir().unwrap();
        let mut data = DataFolder::open(home.path()).unwrap();
        assert!(matches!(
            DataFolder::open(home.path()),
            Err(StoreError::Open { .. })
        ));
        assert_eq!(data.current().unwrap(), Current::Nothing);
        fs::write(home.path().join("db"), b"").unwrap();
        let first = Current::FirstLayout(home.path().to_owned());
        assert_eq!(data.current().unwrap(), first);
        let next = data.next().unwrap();
        assert_eq!(data.current().unwrap(), first);
        let theirs = [
            "store-1.bak",
            "store-01",
            "store-",
            "config",
            "db.old",
            "snap.x",
        ];
        for theirs in theirs {
            fs::write(home.path().join(theirs), b"").unwrap();
        }
        fs::write(home.path().join("snap.00ab"), b"").unwrap();
        switch_to(&data, &next).unwrap();
        assert_eq!(data.current().unwrap(), Current::Folder(next.clone()));
        let is_there = |name: &str| home.path().join(name).exists();
        assert!(!is_there("db") && !is_there("snap.00ab") && next.is_dir());
        assert_eq!(data.next().unwrap(), home.path().join("store-2"));
        fs::remove_dir(home.path().join("store-2")).unwrap();
        fs::write(home.path().join("conf"), b"").unwrap();
        let third = data.next().unwrap();
        assert_eq!(third, home.path().join("store-3"));
        switch_to(&data, &third).unwrap();
        assert!(!next.exists() && is_there("reserve") && is_there("conf"));
        assert!(theirs.into_iter().all(is_there));
    }

    /// Gives a folder a log, and lets it count.
    fn switch_to(data: &DataFolder, folder: &Path) -> io::Result<()> {
        let log = File::create(folder.join("log")).unwrap();
        data.switch(folder, log, Instant::now() + Duration::from_secs(30))
    }

    /// Else what was acknowledged since, in the folder that counts, would be gone.
    #[test]
    fn a_switch_that_was_given_up_does_not_happen_later() {
        let home = tempfile::tempdir().unwrap();
        let mut data = DataFolder::open(home.path()).unwrap();
        let first = data.next().unwrap();
        switch_to(&data, &first).unwrap();
        let late = data.next().unwrap();
        let switching = data.switching();
        let hung = switching.lock().unwrap();
        let log = File::create(late.join("log")).unwrap();
        let given_up = data.switch(&late, log, Instant::now()).unwrap_err();
        assert_eq!(given_up.kind(), io::ErrorKind::TimedOut);
        assert_eq!(data.current().unwrap(), Current::Folder(first.clone()));
        drop(hung);
        // Its thread holds the lock's other handle until it has ended.
        while Arc::strong_count(&data.switching) > 2 {
            std::thread::yield_now();
        }
        assert_eq!(data.current().unwrap(), Current::Folder(first));
        let next = data.next().unwrap();
        switch_to(&data, &next).unwrap();
        assert_eq!(data.current().unwrap(), Current::Folder(next));
        assert!(!late.exists());
    }

    #[test]
    fn a_newer_layout_and_a_damaged_schema_are_refused() {
        let home = tempfile::tempdir().unwrap();
        let data = DataFolder::open(home.path()).unwrap();
        let refused = |text: &str| {
            fs::write(home.path().join(SCHEMA_FILE), text).unwrap();
            data.current().unwrap_err().to_string()
        };
        assert!(refused("{\"schema\": 4}").contains("newer server"));
        assert!(refused("{\"sch").contains("cannot be read"));
        let missing = refused("{\"schema\": 3, \"folder\": \"store-9\"}");
        assert!(missing.contains("store-9 is missing"));
    }
}

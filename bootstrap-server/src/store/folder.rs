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

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

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
/// sled's files of version 1: all begin with one of these.
const FIRST_LAYOUT: [&str; 4] = ["db", "conf", "blobs", "snap."];

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
                _lock: lock,
            }),
            Err(TryLockError::WouldBlock) => {
                Err(failed("another bootstrap server uses it".to_owned()))
            }
            Err(TryLockError::Error(error)) => Err(failed(error.to_string())),
        }
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

    /// Gives the reserve up; it is there again after [`reserve`](Self::reserve).
    pub fn use_reserve(&self) {
        // Without one there may be room all the same; if not, the next step says so.
        let _ = fs::remove_file(self.path.join(RESERVE_FILE));
    }

    /// Takes room for the next start.
    ///
    /// # Errors
    /// When there is none.
    pub fn reserve(&self) -> io::Result<()> {
        fs::write(self.path.join(RESERVE_FILE), vec![0; RESERVE_BYTES])
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
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
            numbers.extend(number.and_then(|number| number.parse::<u64>().ok()));
        }
        Ok(numbers)
    }

    /// Makes a folder the one that counts, after all in it is on the disk.
    ///
    /// # Errors
    /// When it cannot be; the folder that counted before still does then.
    pub fn switch(&self, folder: &Path) -> io::Result<()> {
        synchronise(folder)?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let schema = Schema {
            schema: SCHEMA,
            folder: name.into_owned(),
        };
        let new = self.path.join(format!("{SCHEMA_FILE}.new"));
        let mut file = File::create(&new)?;
        serde_json::to_writer(&mut file, &schema)?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        fs::rename(&new, self.path.join(SCHEMA_FILE))?;
        File::open(&self.path)?.sync_all()
    }

    /// Removes what no longer counts: folders of values but one, and the files of version 1.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove_others(&self, kept: &Path) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let ours = name.starts_with(PREFIX)
                || FIRST_LAYOUT.iter().any(|first| name.starts_with(first));
            if !ours || entry.path() == kept {
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

/// Synchronises every file and folder below one, and the folder that it stands in.
fn synchronise(folder: &Path) -> io::Result<()> {
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
        data.switch(&next).unwrap();
        assert_eq!(data.current().unwrap(), Current::Folder(next.clone()));
        data.remove_others(&next).unwrap();
        assert!(!home.path().join("db").exists() && next.is_dir());
        assert_eq!(data.next().unwrap(), home.path().join("store-2"));
        fs::remove_dir(home.path().join("store-2")).unwrap();
        assert_eq!(data.next().unwrap(), home.path().join("store-3"));
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

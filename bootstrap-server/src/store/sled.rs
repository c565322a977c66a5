//! The store on the disk: a checkpoint of everything in sled, and a log of every commit since.
//!
//! **After a failed write or synchronisation the files are given up.** The kernel reports a failed
//! write-back once and marks its pages clean, so that a second `fdatasync` says yes although the
//! disk has nothing. So no file is ever synchronised again after it failed once: the only way on
//! is to write everything from memory into files of a new folder. For the same reason a start
//! never adds to the files of an earlier process.
//!
//! **Why a log.** A commit costs one append and one `fdatasync`. A transaction of sled costs
//! several times the processor time, a flush of its own files, and then the `fdatasync` all the
//! same, because sled does not synchronise.
//!
//! **Space.** When the commits of a log take so many bytes, everything is written into a new
//! folder, while changes go on: what was committed meanwhile is copied from the one log to the
//! other before the new folder counts. The same happens at each start.

use std::fs::File;
use std::io;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::appender::Appender;
use super::checkpoint::{Checkpoint, DEADLINE, LOG_NAME, open_sled};
use super::folder::{Current, DataFolder, remove_folder};
use super::{Change, Done, Entry, Loaded, Store, Wake, layout_2, log};
use crate::error::StoreError;
use crate::registry::State;

/// A store in a folder of its own. One process a folder.
#[derive(Debug)]
pub struct SledStore {
    folder: DataFolder,
    /// The commits of a log take so many bytes at most, and those that come while everything is
    /// written into a new folder.
    log_bytes: u64,
    /// The log that changes go to. Nothing in it has failed yet.
    log_opt: Option<Appender>,
    /// The number of the last commit.
    number: u64,
    /// What is being written while changes go on, and the log's length when it began.
    checkpoint_opt: Option<(Checkpoint, u64)>,
    /// The log's length at which the next checkpoint begins.
    checkpoint_at: u64,
    /// Time for letting a new folder count.
    timeout: Duration,
}

impl SledStore {
    /// Makes the folder if it is not there, and takes it. Everything is written anew when a log
    /// has `log_bytes` of commits.
    ///
    /// # Errors
    /// [`StoreError::Open`] that names it, also when another process holds it.
    pub fn open(folder: &Path, log_bytes: u64) -> Result<Self, StoreError> {
        Ok(Self {
            folder: DataFolder::open(folder)?,
            log_bytes,
            log_opt: None,
            number: 0,
            checkpoint_opt: None,
            checkpoint_at: u64::MAX,
            timeout: DEADLINE,
        })
    }

    fn begin(&mut self, state: &Arc<State>, wake: Wake) -> io::Result<Checkpoint> {
        let next = self.folder.next()?;
        Checkpoint::begin(&next, self.number, Arc::clone(state), wake)
    }

    /// Lets a folder count whose log is complete. Without a log afterwards, no change can be made.
    fn switch(&mut self, folder: &Path, log: File, deadline: Instant) -> io::Result<()> {
        let length = log.metadata()?.len();
        let switched = log
            .try_clone()
            .and_then(|log| self.folder.switch(folder, log, deadline));
        if let Err(error) = switched.and_then(|()| {
            self.log_opt = Some(Appender::start(log)?);
            Ok(())
        }) {
            // A switch that failed behind its rename may count at the next start. What is there
            // is complete, but nothing may be added to the folder before it any more.
            if is_late(&error) || !self.is_not_current(folder) {
                self.log_opt = None;
            }
            return Err(error);
        }
        self.checkpoint_at = length.saturating_add(self.log_bytes);
        Ok(())
    }

    /// Goes on in the folder of a checkpoint, with the commits since it began.
    fn go_on_in(&mut self, folder: &Path, log: File, from: u64) -> io::Result<()> {
        // One for both: whoever wants to change something waits for them.
        let deadline = Instant::now() + self.timeout;
        if let Some(before) = &self.log_opt {
            before.copy(from, log.try_clone()?, deadline)?;
        }
        self.switch(folder, log, deadline)
    }

    /// Whether a folder certainly does not count.
    fn is_not_current(&self, folder: &Path) -> bool {
        let current = self.folder.current();
        current.is_ok_and(|current| current != Current::Folder(folder.to_owned()))
    }

    /// Gives the space of a checkpoint back that came to nothing.
    fn give_up(&self, folder: &Path, error: &io::Error) {
        // While a thread may still be at it, it can neither be waited for nor be removed from under
        // it. It takes room and nothing else; the next switch removes it.
        if !is_late(error) && self.is_not_current(folder) {
            let _ = remove_folder(folder);
        }
    }
}

/// Whether a step was given up before it ended, and may still end.
fn is_late(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut
}

fn failed(folder: &Path, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::Commit(format!("{error} (in {})", folder.display()))
}

impl Store for SledStore {
    fn load(&mut self) -> Result<Loaded, StoreError> {
        self.folder.use_reserve();
        match self.folder.current()? {
            Current::Nothing => Ok(Loaded::default()),
            Current::FirstLayout(path) => {
                tracing::info!(folder = %path.display(), "the store has layout 1 and is migrated");
                let entries = read_sled(&path)?.ok_or_else(|| {
                    let reason = "its files are damaged";
                    cannot_open(&path, &reason)
                })?;
                Ok(Loaded {
                    entries,
                    lost: Vec::new(),
                })
            }
            Current::SecondLayout(path) => {
                tracing::info!(folder = %path.display(), "the store has layout 2 and is migrated");
                let stored = read_sled(&path)?.unwrap_or_default();
                layout_2::load(&path, stored).map_err(|error| cannot_open(&path, &error))
            }
            Current::Folder(path) => load_folder(&path),
        }
    }

    fn rewrite(&mut self, state: &Arc<State>) -> Result<(), StoreError> {
        self.checkpoint_opt = None;
        self.log_opt = None;
        let rewritten = self.begin(state, Box::new(|| {})).and_then(|checkpoint| {
            let switched = checkpoint.wait().and_then(|log| {
                self.switch(&checkpoint.folder, log, Instant::now() + self.timeout)
            });
            if let Err(error) = &switched {
                self.give_up(&checkpoint.folder, error);
            }
            switched
        });
        rewritten.map_err(|error| failed(self.folder.path(), &error))
    }

    fn commit(&mut self, changes: &[Change], done: Done) {
        let folder: PathBuf = self.folder.path().to_owned();
        let Some(log) = &mut self.log_opt else {
            let reason = "it was not written anew since a write failed";
            return done(Err(failed(&folder, &reason)));
        };
        match log::commit(self.number + 1, changes) {
            Err(error) => done(Err(failed(&folder, &error))),
            Ok(line) => {
                self.number += 1;
                let appended = move |result: io::Result<()>| {
                    done(result.map_err(|error| failed(&folder, &error)))
                };
                log.append(line, Box::new(appended));
            }
        }
    }

    fn tend(&mut self, state: &Arc<State>, wake: Wake) -> Result<(), StoreError> {
        let Some(length) = self.log_opt.as_ref().map(|log| log.bytes) else {
            return Ok(());
        };
        let ended = match self.checkpoint_opt.take() {
            None if length < self.checkpoint_at => return Ok(()),
            None => match self.begin(state, wake) {
                Ok(checkpoint) => {
                    self.checkpoint_opt = Some((checkpoint, length));
                    return Ok(());
                }
                Err(error) => Err(error),
            },
            Some((checkpoint, from)) => match checkpoint.poll() {
                None => {
                    self.checkpoint_opt = Some((checkpoint, from));
                    return Ok(());
                }
                Some(written) => {
                    let moved =
                        written.and_then(|log| self.go_on_in(&checkpoint.folder, log, from));
                    if let Err(error) = &moved {
                        self.give_up(&checkpoint.folder, error);
                    }
                    moved
                }
            },
        };
        match ended {
            Ok(()) => tracing::info!(bytes = length, "the store was written anew to save space"),
            Err(error) if self.log_opt.is_none() => {
                return Err(failed(self.folder.path(), &error));
            }
            Err(error) => {
                // What is there still counts.
                self.checkpoint_at = length.saturating_add(self.log_bytes);
                tracing::warn!(%error, "the store has grown and cannot be written anew");
            }
        }
        Ok(())
    }
}

/// What sled has in a folder, or nothing when its files are too damaged to be opened.
fn read_sled(path: &Path) -> Result<Option<Vec<Entry>>, StoreError> {
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
        Ok(Err(sled::Error::Io(error))) => Err(cannot_open(path, &error)),
        Ok(Err(error)) => {
            tracing::error!(folder = %path.display(), %error, "the store is damaged");
            Ok(None)
        }
        Err(_) => Ok(None),
    }
}

fn cannot_open(path: &Path, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::Open {
        folder: path.display().to_string(),
        reason: error.to_string(),
    }
}

fn load_folder(path: &Path) -> Result<Loaded, StoreError> {
    let bytes = std::fs::read(path.join(LOG_NAME))
        .map_err(|error| cannot_open(path, &format!("{LOG_NAME}: {error}")))?;
    let log = log::read(&bytes);
    if log.damaged_base > 0 {
        tracing::warn!(
            lines = log.damaged_base,
            "the list of the checkpoint's values is damaged; losses there may go unnoticed"
        );
    }
    let stored = read_sled(path)?.unwrap_or_default();
    Ok(log::overlay(stored, log))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::super::{changes_of, state_of};
    use super::*;
    use crate::registry::tests::registration;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn register(state: &mut State, rank: u32, port: u16) -> Vec<Change> {
        let applied = state.apply("e", &registration(9, rank, port, 64), 7);
        changes_of(state, "e", &applied.unwrap().changed).unwrap()
    }

    fn commit(store: &mut SledStore, changes: &[Change]) -> Result<(), StoreError> {
        let (answer, done) = mpsc::channel();
        store.commit(
            changes,
            Box::new(move |result| answer.send(result).unwrap()),
        );
        done.recv_timeout(PATIENCE).unwrap()
    }

    fn loaded(folder: &Path) -> State {
        let mut store = SledStore::open(folder, u64::MAX).unwrap();
        let loaded = store.load().unwrap();
        assert_eq!(loaded.lost, []);
        state_of(&loaded.entries).unwrap().0
    }

    #[test]
    fn everything_is_written_anew_while_changes_go_on() {
        const LOG_BYTES: u64 = 2000;
        let home = tempfile::tempdir().unwrap();
        let mut store = SledStore::open(home.path(), LOG_BYTES).unwrap();
        let mut state = State::default();
        store.load().unwrap();
        store.rewrite(&Arc::new(state.clone())).unwrap();
        let mut folders = 0;
        let mut port = 1024;
        while folders < 6 {
            let (waking, woken) = mpsc::channel();
            let changes = register(&mut state, u32::from(port % 8), port);
            commit(&mut store, &changes).unwrap();
            port += 1;
            let tend = |store: &mut SledStore, state: &State| {
                let waking = waking.clone();
                let wake = move || waking.send(()).unwrap();
                store
                    .tend(&Arc::new(state.clone()), Box::new(wake))
                    .unwrap();
            };
            tend(&mut store, &state);
            if store.checkpoint_opt.is_none() {
                continue;
            }
            // Half of the checkpoints see no change, half of them several.
            let before = store.folder.current().unwrap();
            let copied = if folders % 2 == 0 { 0 } else { 3 };
            for _ in 0..copied {
                let changes = register(&mut state, u32::from(port % 8), port);
                commit(&mut store, &changes).unwrap();
                port += 1;
            }
            woken.recv_timeout(PATIENCE).unwrap();
            assert_eq!(store.folder.current().unwrap(), before);
            tend(&mut store, &state);
            assert_ne!(store.folder.current().unwrap(), before);
            folders += 1;
            if folders == 3 {
                drop(store);
                assert_eq!(loaded(home.path()), state, "half of the way");
                store = SledStore::open(home.path(), LOG_BYTES).unwrap();
                store.load().unwrap();
                store.rewrite(&Arc::new(state.clone())).unwrap();
            }
        }
        drop(store);
        assert_eq!(loaded(home.path()), state);
    }

    #[test]
    fn a_checkpoint_that_fails_changes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let mut store = SledStore::open(home.path(), 1).unwrap();
        let mut state = State::default();
        store.load().unwrap();
        store.rewrite(&Arc::new(state.clone())).unwrap();
        let changes = register(&mut state, 0, 1024);
        commit(&mut store, &changes).unwrap();
        // A file stands where sled wants a folder.
        let next = home.path().join("store-2");
        let (waking, woken) = mpsc::channel();
        let checkpoint = {
            std::fs::create_dir(&next).unwrap();
            std::fs::create_dir(next.join("room")).unwrap();
            let wake = Box::new(move || waking.send(()).unwrap());
            Checkpoint::begin(&next, store.number, Arc::new(state.clone()), wake).unwrap()
        };
        store.checkpoint_opt = Some((checkpoint, 0));
        woken.recv_timeout(PATIENCE).unwrap();
        let tended = store.tend(&Arc::new(state.clone()), Box::new(|| {}));
        tended.unwrap();
        assert!(store.checkpoint_opt.is_none() && !next.exists());
        let changes = register(&mut state, 1, 1025);
        commit(&mut store, &changes).unwrap();
        drop(store);
        assert_eq!(loaded(home.path()), state);
    }

    /// Either folder may count at the next start, so that nothing may be added to one of them.
    #[test]
    fn a_switch_that_hangs_fails_the_store_until_everything_is_written_anew() {
        let home = tempfile::tempdir().unwrap();
        let mut store = SledStore::open(home.path(), 1).unwrap();
        let mut state = State::default();
        store.load().unwrap();
        store.rewrite(&Arc::new(state.clone())).unwrap();
        let changes = register(&mut state, 0, 1024);
        commit(&mut store, &changes).unwrap();
        let (waking, woken) = mpsc::channel();
        let wake = move || waking.send(()).unwrap();
        store
            .tend(&Arc::new(state.clone()), Box::new(wake))
            .unwrap();
        woken.recv_timeout(PATIENCE).unwrap();
        let switching = store.folder.switching();
        let hung = switching.lock().unwrap();
        store.timeout = Duration::from_secs(1);
        let tended = store.tend(&Arc::new(state.clone()), Box::new(|| {}));
        assert!(matches!(tended, Err(StoreError::Commit(_))), "{tended:?}");
        let mut refused = state.clone();
        let changes = register(&mut refused, 1, 1025);
        commit(&mut store, &changes).unwrap_err();
        drop(hung);
        store.timeout = DEADLINE;
        store.rewrite(&Arc::new(state.clone())).unwrap();
        let changes = register(&mut state, 2, 1026);
        commit(&mut store, &changes).unwrap();
        drop(store);
        assert_eq!(loaded(home.path()), state);
    }
}

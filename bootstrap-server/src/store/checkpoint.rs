//! Writes everything into an empty folder: the values into sled, and the head of its log.
//!
//! sled has a folder only while it is written or read; whatever changes later is in the log. sled
//! 0.34's `flush` calls `sync_file_range`, which gives no promise about a power cut, and values
//! over 128 KiB are files of their own that it does not synchronise: every file of the folder is
//! synchronised at the end.
//!
//! Where a disk fails, sled may panic, or wait for ever for a write that one of its threads gave
//! up. So it runs on a thread of its own that nobody waits for longer than a deadline.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::folder::synchronise;
use super::{Entry, Wake, entries_of, log};
use crate::registry::State;

/// Time for one step of the disk, less than a client waits: then it counts as failed.
pub(super) const DEADLINE: Duration = Duration::from_secs(20);
/// How long sled's lock is waited for, and how often it is tried.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(10);
/// Registrations are small; sled's default of 1 GiB would be waste.
const CACHE_BYTES: u64 = 64 << 20;
pub(super) const LOG_NAME: &str = "log";
/// A file that only tries whether there is room.
const ROOM_NAME: &str = "room";
/// A new folder has up to so many times the bytes of its keys and values (the log included) ...
const SIZE_FACTOR: u64 = 4;
/// ... and so many more.
const SIZE_BYTES: u64 = 1 << 20;
/// Values of one batch.
const BATCH: usize = 1024;

/// A checkpoint that is being written.
#[derive(Debug)]
pub(super) struct Checkpoint {
    pub(super) folder: PathBuf,
    written: mpsc::Receiver<io::Result<File>>,
    deadline: Instant,
}

impl Checkpoint {
    /// Begins one in an empty folder. `wake` is called when it is written, or has failed.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn begin(
        folder: &Path,
        number: u64,
        state: Arc<State>,
        wake: Wake,
    ) -> io::Result<Self> {
        let (answer, written) = mpsc::channel();
        let path = folder.to_owned();
        let write = move || {
            let answer_with = |result| {
                // Whoever has given up waiting is not there any more.
                let _ = answer.send(result);
            };
            let mut database_opt = None;
            answer_with(write(&path, number, &state, &mut database_opt));
            wake();
            // Last: after an error sled may wait for ever where it is dropped.
            drop(database_opt);
        };
        std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(write)?;
        Ok(Self {
            folder: folder.to_owned(),
            written,
            deadline: Instant::now() + DEADLINE,
        })
    }

    /// Waits until it is on the disk. Its log is open, and ends behind the checkpoint.
    ///
    /// # Errors
    /// When it cannot be written, or not in time.
    pub(super) fn wait(&self) -> io::Result<File> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let written = self.written.recv_timeout(left);
        written.unwrap_or_else(|error| match error {
            RecvTimeoutError::Disconnected => Err(io::Error::other("sled panicked")),
            RecvTimeoutError::Timeout => Err(too_late()),
        })
    }

    /// As [`wait`](Self::wait), or nothing while it is being written.
    pub(super) fn poll(&self) -> Option<io::Result<File>> {
        match self.written.try_recv() {
            Err(mpsc::TryRecvError::Empty) if Instant::now() < self.deadline => None,
            Err(mpsc::TryRecvError::Empty) => Some(Err(too_late())),
            Err(mpsc::TryRecvError::Disconnected) => Some(Err(io::Error::other("sled panicked"))),
            Ok(written) => Some(written),
        }
    }
}

pub(super) fn too_late() -> io::Error {
    let reason = format!("it was not written in {DEADLINE:?}");
    io::Error::new(io::ErrorKind::TimedOut, reason)
}

/// Leaves sled open in `database_opt` when it fails.
fn write(
    folder: &Path,
    number: u64,
    state: &State,
    database_opt: &mut Option<sled::Db>,
) -> io::Result<File> {
    let entries = entries_of(state).map_err(io::Error::other)?;
    has_room(folder, &entries)?;
    let database = database_opt.insert(open_sled(folder)?);
    for entries in entries.chunks(BATCH) {
        let mut batch = sled::Batch::default();
        for (key, value) in entries {
            batch.insert(key.as_slice(), value.as_slice());
        }
        database.apply_batch(batch)?;
    }
    database.flush()?;
    // What sled writes at its end is to be synchronised with the rest.
    drop(database_opt.take());
    let mut file = OpenOptions::new()
        .read(true)
        .append(true)
        .create_new(true)
        .open(folder.join(LOG_NAME))?;
    file.write_all(&log::base(number, &entries)?)?;
    synchronise(folder)?;
    Ok(file)
}

/// Whether everything can be written. sled does not take a full disk well: its threads may hang, and
/// attempts are made again and again.
fn has_room(folder: &Path, entries: &[Entry]) -> io::Result<()> {
    let bytes = entries.iter().map(|(key, value)| key.len() + value.len());
    let needed = bytes.sum::<usize>() as u64 * SIZE_FACTOR + SIZE_BYTES;
    let path = folder.join(ROOM_NAME);
    let file = File::create(&path)?;
    let taken = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, needed);
    let removed = fs::remove_file(&path);
    match taken {
        // Not every file system can take room ahead.
        Err(rustix::io::Errno::OPNOTSUPP) => removed,
        taken => taken.map_err(io::Error::from).and(removed),
    }
}

/// Opens sled's files. The folder's own lock is held, so whoever holds sled's is a server of this
/// process that has ended: sled lets go of its files some time after its last handle is gone.
pub(super) fn open_sled(path: &Path) -> sled::Result<sled::Db> {
    let config = sled::Config::new()
        .path(path)
        .cache_capacity(CACHE_BYTES)
        // Every change is flushed at once; a timer would only add writes.
        .flush_every_ms(None);
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match config.open() {
            Err(sled::Error::Io(error)) if is_locked(&error) && Instant::now() < deadline => {
                std::thread::sleep(LOCK_PAUSE);
            }
            opened => return opened,
        }
    }
}

/// sled keeps only the text of what the system said.
fn is_locked(error: &std::io::Error) -> bool {
    error.to_string().contains("could not acquire lock")
}

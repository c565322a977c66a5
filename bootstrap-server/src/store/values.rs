//! One folder of values in sled, synchronised by ourselves, on a thread of its own.
//!
//! sled 0.34's `flush` writes and calls `sync_file_range`, which gives no promise about a power
//! cut; an `fdatasync` of its file follows, so that an acknowledged change is on the disk. Values
//! over 128 KiB are files of their own, which sled does not synchronise either.
//!
//! Where a disk fails, sled may panic, or wait for ever for a write that one of its threads gave
//! up. So it runs on a thread that nobody waits for longer than a deadline.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::journal::Journal;
use super::{Change, Entry};

/// How long sled's lock is waited for, and how often it is tried.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Time for one step, less than a client waits: then the disk counts as failed.
const DEADLINE: Duration = Duration::from_secs(20);
/// Registrations are small; sled's default of 1 GiB would be waste.
const CACHE_BYTES: u64 = 64 << 20;
/// sled's file inside its folder.
const FILE_NAME: &str = "db";
/// sled's folder of large values, likewise.
const BLOBS_NAME: &str = "blobs";
pub(super) const JOURNAL_NAME: &str = "acknowledged";
/// A file that only tries whether there is room.
const ROOM_NAME: &str = "room";
/// A new folder has up to so many times the bytes of its keys and values (the journal included) ...
const SLED_FACTOR: u64 = 4;
/// ... and so many more.
const SLED_BYTES: u64 = 1 << 20;
/// Values of one batch when everything is written.
const BATCH: usize = 1024;
/// Has the number of the last change and nothing else. No namespace is empty, so no other key
/// begins with the separator.
pub(super) const LAST_KEY: &[u8] = b"\x1flast";
/// Each value stands behind the number of its last change.
pub(super) const NUMBER_BYTES: usize = size_of::<u64>();

enum Step {
    Commit(Vec<Change>),
    Entries,
}

enum Done {
    /// The size on the disk afterwards.
    Durable(u64),
    Entries(Vec<Entry>),
}

/// The thread of one folder of values. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct ValuesThread {
    steps: mpsc::Sender<Step>,
    done: mpsc::Receiver<io::Result<Done>>,
}

impl ValuesThread {
    /// Writes values into an empty folder; returns when they are durable, with their size.
    ///
    /// # Errors
    /// When they cannot be written, or not in time.
    pub(super) fn write(path: &Path, entries: Vec<Entry>) -> io::Result<(Self, u64)> {
        let (steps, waiting) = mpsc::channel();
        let (answer, done) = mpsc::channel();
        let path = path.to_owned();
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || {
                let opened = has_room(&path, &entries).and_then(|()| Values::open(&path));
                let mut values = match opened {
                    Ok(values) => values,
                    Err(error) => {
                        let _ = answer.send(Err(error));
                        return;
                    }
                };
                let written = values.write(&entries);
                drop(entries);
                // Answered first: after an error sled may wait for ever where it is dropped.
                let mut sent = answer.send(written.map(|()| Done::Durable(values.size())));
                // Whoever has given up waiting is not there any more.
                while sent.is_ok()
                    && let Ok(step) = waiting.recv()
                {
                    sent = answer.send(values.take(step));
                }
            })?;
        let thread = Self { steps, done };
        let size = thread.durable()?;
        Ok((thread, size))
    }

    /// Makes changes, all or none; returns when they are durable, with the size of everything.
    ///
    /// # Errors
    /// When they cannot be written, or not in time. The folder may have them all the same.
    pub(super) fn commit(&self, changes: Vec<Change>) -> io::Result<u64> {
        self.begin(Step::Commit(changes))?;
        self.durable()
    }

    /// Everything.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(super) fn entries(&self) -> io::Result<Vec<Entry>> {
        self.begin(Step::Entries)?;
        match self.wait()? {
            Done::Entries(entries) => Ok(entries),
            Done::Durable(_) => Err(gone()),
        }
    }

    fn begin(&self, step: Step) -> io::Result<()> {
        self.steps.send(step).map_err(|_| gone())
    }

    fn durable(&self) -> io::Result<u64> {
        match self.wait()? {
            Done::Durable(size) => Ok(size),
            Done::Entries(_) => Err(gone()),
        }
    }

    fn wait(&self) -> io::Result<Done> {
        let done = self.done.recv_timeout(DEADLINE);
        done.unwrap_or_else(|error| match error {
            RecvTimeoutError::Disconnected => Err(gone()),
            RecvTimeoutError::Timeout => {
                let reason = format!("it was not written in {DEADLINE:?}");
                Err(io::Error::new(io::ErrorKind::TimedOut, reason))
            }
        })
    }
}

/// Whether everything can be written. sled does not take a full disk well: its threads may hang, and
/// attempts are made again and again.
fn has_room(folder: &Path, entries: &[Entry]) -> io::Result<()> {
    let bytes = entries.iter().map(|(key, value)| key.len() + value.len());
    let needed = bytes.sum::<usize>() as u64 * SLED_FACTOR + SLED_BYTES;
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

fn gone() -> io::Error {
    io::Error::other("sled panicked")
}

/// One folder of values.
#[derive(Debug)]
struct Values {
    database: sled::Db,
    file: File,
    journal: Journal,
    path: PathBuf,
    blobs: BTreeSet<OsString>,
    next_commit: u64,
}

impl Values {
    fn open(path: &Path) -> io::Result<Self> {
        let database = open_sled(path)?;
        Ok(Self {
            file: File::open(path.join(FILE_NAME))?,
            journal: Journal::create(&path.join(JOURNAL_NAME))?,
            database,
            path: path.to_owned(),
            blobs: BTreeSet::new(),
            next_commit: 1,
        })
    }

    fn write(&mut self, entries: &[Entry]) -> io::Result<()> {
        for batch in entries.chunks(BATCH) {
            let batch = batch.iter().map(|(key, value)| (key, Some(value)));
            self.apply(batch.clone())?;
            self.acknowledge(batch)?;
        }
        self.database.flush()?;
        self.synchronise_blobs()?;
        self.file.sync_data()
    }

    fn take(&mut self, step: Step) -> io::Result<Done> {
        match step {
            Step::Commit(changes) => {
                self.commit(&changes)?;
                Ok(Done::Durable(self.size()))
            }
            Step::Entries => Ok(Done::Entries(self.entries()?)),
        }
    }

    fn commit(&mut self, changes: &[Change]) -> io::Result<()> {
        let changes = changes.iter().map(|(key, value)| (key, value.as_ref()));
        self.apply(changes.clone())?;
        self.database.flush()?;
        self.synchronise_blobs()?;
        self.file.sync_data()?;
        self.acknowledge(changes)
    }

    fn apply<'a>(
        &self,
        changes: impl Iterator<Item = (&'a Vec<u8>, Option<&'a Vec<u8>>)>,
    ) -> io::Result<()> {
        let mut batch = sled::Batch::default();
        let number = self.next_commit.to_be_bytes();
        batch.insert(LAST_KEY, &number);
        for (key, value_opt) in changes {
            match value_opt {
                Some(value) => {
                    let mut numbered = number.to_vec();
                    numbered.extend(value);
                    batch.insert(key.as_slice(), numbered);
                }
                None => batch.remove(key.as_slice()),
            }
        }
        Ok(self.database.apply_batch(batch)?)
    }

    fn acknowledge<'a>(
        &mut self,
        changes: impl Iterator<Item = (&'a Vec<u8>, Option<&'a Vec<u8>>)>,
    ) -> io::Result<()> {
        let keys = changes.map(|(key, value_opt)| (key.as_slice(), value_opt.is_some()));
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
        let entries = self.database.iter().filter(|entry| {
            let is_last = |entry: &(sled::IVec, sled::IVec)| entry.0 == LAST_KEY;
            !entry.as_ref().is_ok_and(is_last)
        });
        let entries = entries.map(|entry| {
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

/// Opens sled's files. The folder's own lock is held, so whoever holds sled's is a server of this
/// process that has ended: sled lets go of its files some time after its last handle is gone.
pub(super) fn open_sled(path: &Path) -> sled::Result<sled::Db> {
    let config = sled::Config::new()
        .path(path)
        .cache_capacity(CACHE_BYTES)
        // Every change is flushed by `commit`; a timer would only add writes.
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

//! Appends to a log and synchronises it, on a thread of its own: a disk may hang.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::Instant;

use super::checkpoint::too_late;

/// Bytes that are copied at once.
const COPY_BYTES: usize = 1 << 20;

/// Called with how a step ended, on the thread of the log.
pub(super) type Appended = Box<dyn FnOnce(io::Result<()>) + Send>;

enum Step {
    Append(Vec<u8>, Appended),
    Copy(u64, File, Appended),
}

/// A log that is appended to. The thread ends when this is dropped, or when a line cannot be
/// written: no file is synchronised again after that failed once.
#[derive(Debug)]
pub(super) struct Appender {
    steps: mpsc::Sender<Step>,
    /// The log's length after all that was begun.
    pub(super) bytes: u64,
}

impl Appender {
    /// Starts the thread of a log.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn start(mut log: File) -> io::Result<Self> {
        let bytes = log.metadata()?.len();
        let (steps, waiting) = mpsc::channel();
        std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || {
                while let Ok(step) = waiting.recv() {
                    match step {
                        Step::Append(line, appended) => {
                            let written = log.write_all(&line);
                            let result = written.and_then(|()| log.sync_data());
                            let has_failed = result.is_err();
                            appended(result);
                            if has_failed {
                                return;
                            }
                        }
                        Step::Copy(from, into, appended) => appended(copy(&log, from, into)),
                    }
                }
            })?;
        Ok(Self { steps, bytes })
    }

    /// Appends a line; `appended` is called when it is on the disk, or when it has failed.
    pub(super) fn append(&mut self, line: Vec<u8>, appended: Appended) {
        self.bytes += line.len() as u64;
        self.send(Step::Append(line, appended));
    }

    /// Copies what stands behind `from` to the end of another file. Nothing may be under way.
    ///
    /// # Errors
    /// When it cannot be, or not by the deadline.
    pub(super) fn copy(&self, from: u64, into: File, deadline: Instant) -> io::Result<()> {
        let (answer, copied) = mpsc::channel();
        let appended = move |result| {
            // Whoever has given up waiting is not there any more.
            let _ = answer.send(result);
        };
        self.send(Step::Copy(from, into, Box::new(appended)));
        let left = deadline.saturating_duration_since(Instant::now());
        let copied = copied.recv_timeout(left);
        copied.unwrap_or_else(|_| Err(too_late()))
    }

    fn send(&self, step: Step) {
        if let Err(mpsc::SendError(step)) = self.steps.send(step) {
            let (Step::Append(_, appended) | Step::Copy(_, _, appended)) = step;
            appended(Err(io::Error::other("an earlier write failed")));
        }
    }
}

fn copy(log: &File, mut from: u64, mut into: File) -> io::Result<()> {
    let mut bytes = vec![0; COPY_BYTES];
    loop {
        let read = log.read_at(&mut bytes, from)?;
        if read == 0 {
            return Ok(());
        }
        into.write_all(&bytes[..read])?;
        from += read as u64;
    }
}

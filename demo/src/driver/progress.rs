//! Shows how far a run is: one line that changes on a terminal, a line every few seconds elsewhere.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use super::plan::human_bytes;

/// Time between two lines where they pile up.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Time between two updates of a line that changes.
const UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// The state of the display.
pub struct Progress {
    total: usize,
    started: Instant,
    shown: Instant,
    is_terminal: bool,
}

impl Progress {
    /// Starts the clock.
    pub fn new(total: usize) -> Self {
        let now = Instant::now();
        Self {
            total,
            started: now,
            shown: now,
            is_terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Takes note of the state; shows it when it is time, and always at the end.
    pub fn update(&mut self, done: usize, verified_bytes: u64) {
        let interval = if self.is_terminal {
            UPDATE_INTERVAL
        } else {
            LINE_INTERVAL
        };
        let is_last = done == self.total;
        if self.shown.elapsed() < interval && !is_last {
            return;
        }
        self.shown = Instant::now();
        let seconds = self.started.elapsed().as_secs_f64();
        let line = format!(
            "{done}/{} requests verified, {} in {seconds:.1} s",
            self.total,
            human_bytes(verified_bytes)
        );
        let mut stderr = std::io::stderr().lock();
        // Progress that cannot be shown is no reason to fail.
        let _ = if self.is_terminal {
            let end = if is_last { "\n" } else { "" };
            write!(stderr, "\r\x1b[2K{line}{end}").and_then(|()| stderr.flush())
        } else {
            writeln!(stderr, "{line}")
        };
    }

    /// Leaves the changing line before something else is written.
    pub fn interrupt(&self) {
        if self.is_terminal {
            eprintln!();
        }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

//! Keeps a peer that sends nonsense from filling the log.

use std::time::{Duration, Instant};

const PERIOD: Duration = Duration::from_secs(1);
const LINES: u32 = 10;

/// Lets a few lines through in each second.
#[derive(Debug, Default)]
pub(super) struct LogLimit {
    since_opt: Option<Instant>,
    said: u32,
    unsaid: u64,
}

impl LogLimit {
    /// Whether a line may be written now, and how many were not since the last one.
    pub(super) fn may_say(&mut self, now: Instant) -> Option<u64> {
        let is_new = |since: Instant| now.duration_since(since) >= PERIOD;
        if self.since_opt.is_none_or(is_new) {
            self.since_opt = Some(now);
            self.said = 0;
        }
        if self.said >= LINES {
            self.unsaid += 1;
            return None;
        }
        self.said += 1;
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_leaves_a_few_lines_and_their_number() {
        let (begin, mut log) = (Instant::now(), LogLimit::default());
        let said = (0..1000).filter(|_| log.may_say(begin).is_some()).count();
        assert_eq!(said, LINES as usize);
        assert_eq!(log.may_say(begin + PERIOD), Some(1000 - u64::from(LINES)));
        assert_eq!(log.may_say(begin + PERIOD), Some(0));
    }
}

//! The log of one folder of values, as bytes: what its checkpoint has, then every commit since.
//!
//! A commit is one line, so that it is there whole or not at all: it is appended, synchronised and
//! then acknowledged. Commits are numbered without a gap.
//!
//! | line | what it says |
//! |---|---|
//! | `SUM base NUMBER SUM [KEY]⇥HEX` | the checkpoint has a value of this key, with this CRC-32 |
//! | `SUM base NUMBER SUM []⇥` | that was all of the checkpoint, which is as after this commit |
//! | `SUM commit NUMBER SUM [KEY, ...]⇥VALUE⇥...` | a commit; an empty value removes its key |
//!
//! The first sum is that of the rest before the first tabulator, the second that of all behind it,
//! so that a damaged value still has a name. Keys are JSON. Values are as the store has them:
//! a byte for their version and JSON, which has no control characters but as escapes.
//!
//! sled reads its file up to the first damaged byte and takes what stands before it for the whole;
//! the sums of the checkpoint's values show what is missing or wrong.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io;
use std::ops::RangeInclusive;

use foldhash::fast::RandomState;

use super::{Change, Entry, Loaded, Lost};

const BASE: &str = "base";
const COMMIT: &str = "commit";
const TAB: u8 = b'\t';

/// What a log says of a key since its checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Value(Vec<u8>),
    Removed,
    /// It was changed, and what to cannot be read.
    Damaged,
}

/// The content of a log.
#[derive(Debug, Default)]
pub struct Log {
    /// Of each key of the checkpoint the sum of its value.
    base: HashMap<Vec<u8>, u32, RandomState>,
    /// Lines about the checkpoint that cannot be read: a loss there may go unnoticed.
    pub damaged_base: u64,
    /// Of each key that changed since the last change.
    keys: HashMap<Vec<u8>, Said, RandomState>,
    /// Commits that were acknowledged and of which nothing can be read.
    unreadable: Vec<RangeInclusive<u64>>,
}

enum Line {
    Base(u64, Vec<(Vec<u8>, u32)>),
    Commit(u64, Vec<(Vec<u8>, Said)>),
}

/// The lines about a checkpoint, which is as after commit `number`.
///
/// # Errors
/// When a key is not text.
pub fn base(number: u64, entries: &[Entry]) -> io::Result<Vec<u8>> {
    let mut lines = Vec::new();
    for (key, value) in entries {
        let sum = format!("{:08x}", crc32fast::hash(value));
        append_line(&mut lines, BASE, number, &[(key, sum.as_bytes())])?;
    }
    append_line(&mut lines, BASE, number, &[])?;
    Ok(lines)
}

/// The line of a commit.
///
/// # Errors
/// When a key is not text, or a value is not one.
pub fn commit(number: u64, changes: &[Change]) -> io::Result<Vec<u8>> {
    let fields = changes.iter().map(|(key, value_opt)| {
        let value = value_opt.as_deref().unwrap_or_default();
        let is_plain = !value.iter().any(|byte| matches!(byte, 0 | b'\t' | b'\n'));
        if !is_plain || value_opt.is_some() == value.is_empty() {
            return Err(io::Error::other("a value that cannot be logged"));
        }
        Ok((key, value))
    });
    let fields = fields.collect::<io::Result<Vec<_>>>()?;
    let mut line = Vec::new();
    append_line(&mut line, COMMIT, number, &fields)?;
    Ok(line)
}

fn append_line(
    lines: &mut Vec<u8>,
    kind: &str,
    number: u64,
    fields: &[(&Vec<u8>, &[u8])],
) -> io::Result<()> {
    let mut values = vec![TAB];
    for (at, (_, value)) in fields.iter().enumerate() {
        values.extend((at > 0).then_some(TAB));
        values.extend_from_slice(value);
    }
    let keys = fields.iter().map(|(key, _)| std::str::from_utf8(key));
    let keys = keys.collect::<Result<Vec<&str>, _>>();
    let keys = serde_json::to_string(&keys.map_err(io::Error::other)?)?;
    let sum = crc32fast::hash(&values[1..]);
    let head = format!("{kind} {number} {sum:08x} {keys}");
    lines.extend_from_slice(format!("{:08x} ", crc32fast::hash(head.as_bytes())).as_bytes());
    lines.extend_from_slice(head.as_bytes());
    lines.append(&mut values);
    lines.push(b'\n');
    Ok(())
}

/// Reads a log. What is torn at its end was never acknowledged.
pub fn read(bytes: &[u8]) -> Log {
    let mut log = Log::default();
    let mut highest = 0;
    // Damaged lines since the last one that can be read.
    let mut damaged = 0;
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let is_torn = is_torn(line);
        match parse(line, is_torn) {
            Some(Line::Base(number, sums)) => {
                log.damaged_base += std::mem::take(&mut damaged);
                log.base.extend(sums);
                highest = number;
            }
            Some(Line::Commit(number, said)) => {
                log.unreadable.extend(between(highest, number));
                log.keys.extend(said);
                (highest, damaged) = (number, 0);
            }
            None => damaged += u64::from(!is_torn),
        }
    }
    let at_the_end = between(highest, highest.saturating_add(damaged).saturating_add(1));
    log.unreadable.extend(at_the_end);
    log
}

/// Whether a line was being written at a power cut, rather than damaged later. A hole that was left
/// reads as zeros, which no line has; a damaged bit makes no more than one.
fn is_torn(line: &[u8]) -> bool {
    !line.ends_with(b"\n") || line.starts_with(&[0]) || line.windows(2).any(|two| two == [0, 0])
}

/// The commits between two.
fn between(before: u64, behind: u64) -> Option<RangeInclusive<u64>> {
    let (first, last) = (before.checked_add(1)?, behind.checked_sub(1)?);
    (first <= last).then_some(first..=last)
}

fn parse(line: &[u8], is_torn: bool) -> Option<Line> {
    let tab = line.iter().position(|byte| *byte == TAB)?;
    let (head, values) = (&line[..tab], &line[tab + 1..]);
    let (sum, head) = std::str::from_utf8(head).ok()?.split_once(' ')?;
    if parsed_sum(sum.as_bytes())? != crc32fast::hash(head.as_bytes()) {
        return None;
    }
    let mut words = head.splitn(4, ' ');
    let kind = words.next()?;
    let number: u64 = words.next()?.parse().ok()?;
    let values_sum = parsed_sum(words.next()?.as_bytes())?;
    let keys: Vec<String> = serde_json::from_str(words.next()?).ok()?;
    let keys = keys.into_iter().map(String::into_bytes);
    let values = values.strip_suffix(b"\n").unwrap_or(values);
    let is_whole = crc32fast::hash(values) == values_sum;
    let fields = values.split(|byte| *byte == TAB);
    match kind {
        BASE if is_whole => {
            let sums = keys.zip(fields);
            let sums = sums.map(|(key, sum)| Some((key, parsed_sum(sum)?)));
            Some(Line::Base(number, sums.collect::<Option<_>>()?))
        }
        COMMIT if is_torn || number == 0 => None,
        COMMIT if is_whole => {
            let said = keys.zip(fields).map(|(key, value)| match value {
                b"" => (key, Said::Removed),
                value => (key, Said::Value(value.to_vec())),
            });
            Some(Line::Commit(number, said.collect()))
        }
        COMMIT => {
            let said = keys.map(|key| (key, Said::Damaged));
            Some(Line::Commit(number, said.collect()))
        }
        _ => None,
    }
}

fn parsed_sum(hex: &[u8]) -> Option<u32> {
    let hex = std::str::from_utf8(hex).ok()?;
    u32::from_str_radix(hex, 16).ok()
}

/// Lays what a log says over its checkpoint, and names what is lost.
pub fn overlay(checkpoint: Vec<Entry>, log: Log) -> Loaded {
    let mut values: BTreeMap<Vec<u8>, Vec<u8>> = checkpoint.into_iter().collect();
    let mut lost: BTreeMap<Vec<u8>, &str> = BTreeMap::new();
    for (key, sum) in log.base {
        match values.get(&key) {
            None => {
                lost.insert(key, "it is gone");
            }
            Some(value) if crc32fast::hash(value) != sum => {
                values.remove(&key);
                lost.insert(key, "it is damaged");
            }
            Some(_) => {}
        }
    }
    for (key, said) in log.keys {
        match said {
            Said::Value(value) => {
                lost.remove(&key);
                values.insert(key, value);
            }
            Said::Removed => {
                lost.remove(&key);
                values.remove(&key);
            }
            Said::Damaged => {
                let is_there = values.contains_key(&key);
                let what = if is_there {
                    "its last change is gone"
                } else {
                    "it is gone"
                };
                lost.insert(key, what);
            }
        }
    }
    let named = lost.into_iter().map(|(key, what)| Lost {
        key,
        what: what.to_owned(),
    });
    let unnamed = log.unreadable.into_iter().map(|commits| {
        let mut key = format!("commit {}", commits.start());
        if commits.start() < commits.end() {
            let _ = write!(key, " to {}", commits.end());
        }
        Lost {
            key: key.into_bytes(),
            what: "it cannot be read in the log".to_owned(),
        }
    });
    Loaded {
        lost: named.chain(unnamed).collect(),
        entries: values.into_iter().collect(),
    }
}

/// Reads any bytes as a log, and then with the sums that its lines should have.
#[cfg(fuzzing)]
pub fn read_any(bytes: &[u8]) {
    let _ = overlay(Vec::new(), read(bytes));
    let mut lines = Vec::new();
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let Some(tab) = line.iter().position(|byte| *byte == TAB) else {
            lines.extend_from_slice(line);
            continue;
        };
        let (head, values) = (&line[..tab], &line[tab + 1..]);
        let words = head.splitn(5, |byte| *byte == b' ').collect::<Vec<_>>();
        let [_, kind, number, _, keys] = words[..] else {
            lines.extend_from_slice(line);
            continue;
        };
        let sum = crc32fast::hash(values.strip_suffix(b"\n").unwrap_or(values));
        let head = [kind, number, format!("{sum:08x}").as_bytes(), keys].join(&b' ');
        lines.extend_from_slice(format!("{:08x} ", crc32fast::hash(&head)).as_bytes());
        lines.extend_from_slice(&head);
        lines.extend_from_slice(&line[tab..]);
    }
    let loaded = overlay(Vec::new(), read(&lines));
    if let Ok((state, _)) = super::state_of(&loaded.entries) {
        // What was read can be written, and is then read as the same.
        let entries = super::entries_of(&state).expect("a state can be written");
        let (again, lost) = super::state_of(&entries).expect("our own version");
        assert_eq!((again, lost), (state, Vec::new()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str, value: &str) -> Change {
        (key.into(), Some(value.into()))
    }

    fn entries(of: &[(&str, &str)]) -> Vec<Entry> {
        let entries = of.iter();
        entries
            .map(|(key, value)| ((*key).into(), (*value).into()))
            .collect()
    }

    fn lost(loaded: &Loaded) -> Vec<String> {
        let lost = loaded.lost.iter();
        lost.map(|lost| format!("{}: {}", String::from_utf8_lossy(&lost.key), lost.what))
            .collect()
    }

    fn log_of(checkpoint: &[Entry], commits: &[&[Change]]) -> Vec<Vec<u8>> {
        let numbered = (8..).zip(commits);
        let commits = numbered.map(|(number, changes)| commit(number, changes).unwrap());
        let mut lines = vec![base(7, checkpoint).unwrap()];
        lines.extend(commits);
        lines
    }

    #[test]
    fn commits_lie_over_the_checkpoint_and_none_is_half_there() {
        let checkpoint = entries(&[("a", "\u{1}{\"x\": 1}"), ("b\n\t\u{1f}", "1")]);
        let lines = log_of(
            &checkpoint,
            &[
                &[set("c", "1"), ("a".into(), None)],
                &[set("b\n\t\u{1f}", "2"), set("d", "1"), ("c".into(), None)],
            ],
        );
        let all = lines.concat();
        let first = entries(&[("b\n\t\u{1f}", "1"), ("c", "1")]);
        let second = entries(&[("b\n\t\u{1f}", "2"), ("d", "1")]);
        let whole = overlay(checkpoint.clone(), read(&all));
        assert_eq!((whole.entries, whole.lost), (second, vec![]));
        // Cut anywhere in its last line, or a hole in it, and that commit was never acknowledged.
        let begin = all.len() - lines[2].len();
        for at in begin..all.len() {
            let cut = overlay(checkpoint.clone(), read(&all[..at]));
            assert_eq!((cut.entries, cut.lost), (first.clone(), vec![]), "{at}");
            for end in [all.len(), (at + 2).min(all.len())] {
                let mut holed = all.clone();
                holed[at..end].fill(0);
                let holed = overlay(checkpoint.clone(), read(&holed));
                assert_eq!((holed.entries, holed.lost), (first.clone(), vec![]), "{at}");
            }
        }
    }

    #[test]
    fn every_flipped_bit_of_a_log_is_noticed_or_changes_nothing() {
        let checkpoint = entries(&[("a", "1"), ("b", "1")]);
        let lines = log_of(
            &checkpoint,
            &[&[set("c", "value")], &[set("d", "1")], &[set("e", "1")]],
        );
        let base_bytes = lines[0].len();
        let all = lines.concat();
        let whole = overlay(checkpoint.clone(), read(&all)).entries;
        for bit in 0..all.len() * 8 {
            let mut damaged = all.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let log = read(&damaged);
            let is_noticed = log.damaged_base > 0;
            let loaded = overlay(checkpoint.clone(), log);
            // The end of the last line tells a commit that was acknowledged from one that was not.
            let is_end = bit / 8 == all.len() - 1;
            let is_whole = loaded.entries == whole;
            let is_lost = !loaded.lost.is_empty();
            assert!(
                is_noticed || is_lost || is_end || is_whole,
                "bit {bit}: {damaged:?}"
            );
            // What ends the last line of the base begins the first commit.
            assert!(is_whole || bit / 8 >= base_bytes - 1, "bit {bit}");
        }
    }

    #[test]
    fn what_is_lost_is_named_unless_it_changed_later() {
        let checkpoint = entries(&[("a", "1"), ("b", "1"), ("c", "1")]);
        let mut lines = log_of(
            &checkpoint,
            &[
                &[set("a", "2"), set("d", "value")],
                &[set("e", "2")],
                &[set("f", "value")],
                &[set("f", "2"), set("c", "2")],
            ],
        );
        let end = lines[1].len() - 2;
        lines[1][end] ^= 1;
        lines[2][3] ^= 1;
        let end = lines[3].len() - 2;
        lines[3][end] ^= 1;
        let sled = entries(&[("a", "1"), ("b", "9")]);
        let loaded = overlay(sled, read(&lines.concat()));
        assert_eq!(
            lost(&loaded),
            [
                "a: its last change is gone",
                "b: it is damaged",
                "d: it is gone",
                "commit 9: it cannot be read in the log"
            ]
        );
        assert_eq!(
            loaded.entries,
            entries(&[("a", "1"), ("c", "2"), ("f", "2")])
        );
    }

    #[test]
    fn a_value_that_would_break_a_line_is_refused() {
        for value in ["", "a\tb", "a\nb", "\0"] {
            assert!(commit(1, &[set("a", value)]).is_err(), "{value:?}");
        }
    }
}

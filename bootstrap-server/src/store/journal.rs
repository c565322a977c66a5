//! The keys that were acknowledged, beside the values, so that a loss is noticed and named.
//!
//! sled reads its log up to the first damaged byte and takes what stands before it for the whole:
//! one flipped bit silently undoes every change behind it. So each acknowledged change leaves a
//! line here with its number, and each value carries the number of its change.
//!
//! Lines are written after their change is durable and are not synchronised: after a power cut the
//! journal may be behind the values, which is no loss, but never ahead of what was durable.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use foldhash::fast::RandomState;

use super::{Lost, shown_key};

/// The journal of one folder of values.
#[derive(Debug)]
pub struct Journal {
    file: File,
    bytes: u64,
}

/// What was acknowledged of each key: the number of its last change, and whether it has a value.
pub type Acknowledged = HashMap<Vec<u8>, (u64, bool), RandomState>;

/// The number of each value's last change.
pub type Found<'key> = HashMap<&'key [u8], u64, RandomState>;

impl Journal {
    /// Begins one.
    ///
    /// # Errors
    /// When the file exists or cannot be made.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new()
            .append(true)
            .create_new(true)
            .open(path)?;
        Ok(Self { file, bytes: 0 })
    }

    /// Adds a line for each change.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn append<'a>(
        &mut self,
        commit: u64,
        changes: impl Iterator<Item = (&'a [u8], bool)>,
    ) -> io::Result<()> {
        let mut lines = String::new();
        for (key, is_kept) in changes {
            let sign = if is_kept { '+' } else { '-' };
            let key = serde_json::to_string(&String::from_utf8_lossy(key))?;
            let line = format!("{commit} {sign} {key}");
            let sum = crc32fast::hash(line.as_bytes());
            lines.push_str(&format!("{sum:08x} {line}\n"));
        }
        self.file.write_all(lines.as_bytes())?;
        self.bytes += lines.len() as u64;
        Ok(())
    }

    /// Its size.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads one, and says how many of its lines are damaged; the last may be torn.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read(path: &Path) -> io::Result<(Acknowledged, usize)> {
        let bytes = std::fs::read(path)?;
        let mut acknowledged = Acknowledged::default();
        let mut damaged = 0;
        for line in bytes.split(|byte| *byte == b'\n') {
            match parse(line) {
                Some((key, commit, is_kept)) => {
                    acknowledged.insert(key, (commit, is_kept));
                }
                None => damaged += usize::from(!line.is_empty()),
            }
        }
        Ok((acknowledged, damaged))
    }
}

fn parse(line: &[u8]) -> Option<(Vec<u8>, u64, bool)> {
    let line = std::str::from_utf8(line).ok()?;
    let (sum, line) = line.split_once(' ')?;
    if u32::from_str_radix(sum, 16).ok()? != crc32fast::hash(line.as_bytes()) {
        return None;
    }
    let mut words = line.splitn(3, ' ');
    let commit = words.next()?.parse().ok()?;
    let is_kept = words.next()? == "+";
    let key: String = serde_json::from_str(words.next()?).ok()?;
    Some((key.into_bytes(), commit, is_kept))
}

/// What is not as it was acknowledged. `found` has the number of each value's last change, and
/// `last` is the number of the last change among the values. If that is not in the journal yet,
/// what is missing may have been deleted by it.
pub fn lost(acknowledged: &Acknowledged, found: &Found<'_>, last: u64) -> Vec<Lost> {
    let known = acknowledged.values().map(|(commit, _)| *commit).max();
    let is_behind = known.is_none_or(|known| known < last);
    let mut lost: Vec<Lost> = acknowledged
        .iter()
        .filter_map(|(key, (commit, is_kept))| {
            let what = match (found.get(key.as_slice()), is_kept) {
                (None, true) if !is_behind => "it is gone",
                (Some(found), true) if found < commit => "its last change is gone",
                (Some(found), false) if found < commit => "it was deleted and is back",
                _ => return None,
            };
            let (key, what) = (key.clone(), what.to_owned());
            Some(Lost { key, what })
        })
        .collect();
    lost.sort_by(|left, right| left.key.cmp(&right.key));
    lost
}

/// Names what is lost, at most so many of them.
pub fn named(lost: &[Lost], limit: usize) -> String {
    let names = lost.iter().take(limit);
    let names = names.map(|lost| format!("{} ({})", shown_key(&lost.key), lost.what));
    let names = names.collect::<Vec<_>>().join(", ");
    match lost.len().saturating_sub(limit) {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_loss_is_named_and_a_damaged_line_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let mut journal = Journal::create(&path).unwrap();
        let all: [(&[u8], bool); 4] = [
            (b"kept", true),
            (b"gone", true),
            (b"old", true),
            (b"back", true),
        ];
        journal.append(1, all.into_iter()).unwrap();
        let later: [(&[u8], bool); 2] = [(b"old", true), (b"back", false)];
        journal.append(2, later.into_iter()).unwrap();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"00000000 3 + 00\n1234 torn").unwrap();
        let (acknowledged, damaged) = Journal::read(&path).unwrap();
        assert_eq!((acknowledged.len(), damaged), (4, 2));
        let keys: [&[u8]; 3] = [b"kept", b"old", b"back"];
        let found = keys.map(|key| (key, 1)).into_iter().collect();
        assert_eq!(
            named(&lost(&acknowledged, &found, 1), 2),
            "back (it was deleted and is back), gone (it is gone) and 1 more"
        );
        let behind = lost(&acknowledged, &found, 3);
        assert_eq!(
            named(&behind, 9),
            "back (it was deleted and is back), old (its last change is gone)",
            "a change that the journal does not know may have deleted what is not there"
        );
    }
}

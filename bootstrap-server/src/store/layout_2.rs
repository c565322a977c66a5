//! Reads folders of layout 2: values in sled behind the number of their last change, and a journal
//! with a line for each key and change that was acknowledged, `SUM NUMBER +|- KEY`.

use std::collections::HashMap;
use std::path::Path;

use foldhash::fast::RandomState;

use super::{Entry, Loaded, Lost};

pub(super) const JOURNAL_NAME: &str = "acknowledged";
/// Has the number of the last change and nothing else.
const LAST_KEY: &[u8] = b"\x1flast";
const NUMBER_BYTES: usize = size_of::<u64>();

/// What was acknowledged of each key: the number of its last change, and whether it has a value.
type Acknowledged = HashMap<Vec<u8>, (u64, bool), RandomState>;

/// What the journal says. The last line may be torn.
fn acknowledged(journal: &[u8]) -> Acknowledged {
    let mut acknowledged = Acknowledged::default();
    let mut damaged = 0;
    for line in journal.split(|byte| *byte == b'\n') {
        match parse(line) {
            Some((key, commit, is_kept)) => {
                acknowledged.insert(key, (commit, is_kept));
            }
            None => damaged += usize::from(!line.is_empty()),
        }
    }
    if damaged > 0 {
        tracing::warn!(
            lines = damaged,
            "the journal of acknowledged changes is damaged; losses may go unnoticed"
        );
    }
    acknowledged
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

/// What a folder has, and what of it is not as it was acknowledged.
///
/// # Errors
/// When the journal cannot be read.
pub(super) fn load(folder: &Path, stored: Vec<Entry>) -> std::io::Result<Loaded> {
    let journal = std::fs::read(folder.join(JOURNAL_NAME))?;
    Ok(compare(&acknowledged(&journal), stored))
}

fn compare(acknowledged: &Acknowledged, stored: Vec<Entry>) -> Loaded {
    let mut loaded = Loaded::default();
    let mut found: HashMap<Vec<u8>, u64, RandomState> = HashMap::default();
    let mut last = 0;
    for (key, mut value) in stored {
        match value.first_chunk::<NUMBER_BYTES>() {
            Some(number) if key == LAST_KEY => last = u64::from_be_bytes(*number),
            Some(number) => {
                found.insert(key.clone(), u64::from_be_bytes(*number));
                value.drain(..NUMBER_BYTES);
                loaded.entries.push((key, value));
            }
            None => loaded.lost.push(Lost {
                key,
                what: "it has no number".to_owned(),
            }),
        }
    }
    // If the last change is not in the journal yet, it may have deleted what is missing.
    let known = acknowledged.values().map(|(commit, _)| *commit).max();
    let is_behind = known.is_none_or(|known| known < last);
    let mut lost: Vec<Lost> = acknowledged
        .iter()
        .filter_map(|(key, (commit, is_kept))| {
            let what = match (found.get(key), is_kept) {
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
    loaded.lost.append(&mut lost);
    loaded
}

#[cfg(test)]
mod tests {
    use super::super::named;
    use super::*;

    #[test]
    fn each_kind_of_loss_is_named_and_a_damaged_line_is_skipped() {
        let line = |text: &str| format!("{:08x} {text}\n", crc32fast::hash(text.as_bytes()));
        let journal = [
            line("1 + \"kept\""),
            line("1 + \"gone\""),
            line("1 + \"old\""),
            line("1 + \"back\""),
            line("2 + \"old\""),
            line("2 - \"back\""),
            "00000000 3 + 00\n1234 torn".to_owned(),
        ];
        let acknowledged = acknowledged(journal.concat().as_bytes());
        assert_eq!(acknowledged.len(), 4);
        let stored = |last: u64| {
            let keys: [&[u8]; 3] = [b"kept", b"old", b"back"];
            let values = keys.map(|key| (key.to_vec(), [&1u64.to_be_bytes()[..], b"x"].concat()));
            let last = (LAST_KEY.to_vec(), last.to_be_bytes().to_vec());
            values.into_iter().chain([last]).collect()
        };
        let loaded = compare(&acknowledged, stored(1));
        assert_eq!(
            named(&loaded.lost, 2),
            "back (it was deleted and is back), gone (it is gone) and 1 more"
        );
        assert_eq!(loaded.entries[0], (b"kept".to_vec(), b"x".to_vec()));
        let behind = compare(&acknowledged, stored(3));
        assert_eq!(
            named(&behind.lost, 9),
            "back (it was deleted and is back), old (its last change is gone)",
            "a change that the journal does not know may have deleted what is not there"
        );
    }
}

//! How a list of ranges becomes calls of a driver.

use super::{CopyRange, Rows};

/// So many ranges of one length in equal distances are worth a call of their own.
const LEAST_ROWS: usize = 4;
/// A longer range is well off by itself.
const LONGEST_ROW: u64 = 64 << 10;
/// What drivers take for a distance between rows.
const LARGEST_PITCH: u64 = (1 << 31) - 1;

/// Sorts ranges into rows and single ones; keeps every byte.
pub(crate) fn sorted(
    ranges: &[CopyRange],
    (dst_is_host, src_is_host): (bool, bool),
) -> (Vec<Rows>, Vec<CopyRange>) {
    let (mut rows, mut single) = (Vec::new(), Vec::new());
    let mut rest = ranges;
    while let Some(first) = rest.first() {
        let height = rows_at_front(rest);
        let (front, behind) = rest.split_at(height.max(1));
        match front {
            [first, second, ..] if height >= LEAST_ROWS => rows.push(Rows {
                dst: first.dst,
                src: first.src,
                width: first.len,
                height: height as u64,
                dst_pitch: second.dst - first.dst,
                src_pitch: second.src - first.src,
                dst_is_host,
                src_is_host,
            }),
            _ => {
                // What follows may begin rows of its own.
                single.push(*first);
                rest = rest.get(1..).unwrap_or_default();
                continue;
            }
        }
        rest = behind;
    }
    (rows, single)
}

/// How many ranges at the front are of one length in equal distances that fit a call.
fn rows_at_front(ranges: &[CopyRange]) -> usize {
    let [first, second, ..] = ranges else {
        return ranges.len();
    };
    let distances = |one: &CopyRange, next: &CopyRange| {
        let pitches = (
            next.dst.checked_sub(one.dst)?,
            next.src.checked_sub(one.src)?,
        );
        let fits = |pitch: u64| pitch >= one.len && pitch <= LARGEST_PITCH;
        let is_row = one.len == next.len && one.len > 0 && one.len <= LONGEST_ROW;
        (is_row && fits(pitches.0) && fits(pitches.1)).then_some(pitches)
    };
    let Some(pitches) = distances(first, second) else {
        return 1;
    };
    let continued = ranges
        .windows(2)
        .take_while(|pair| matches!(pair, [one, next] if distances(one, next) == Some(pitches)));
    continued.count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(dst: u64, src: u64, len: u64) -> CopyRange {
        CopyRange { dst, src, len }
    }

    #[test]
    fn equal_distances_become_rows_and_nothing_is_lost() {
        let mut ranges = vec![range(0, 5000, 7)];
        ranges.extend((0..10).map(|row| range(100 + row * 8, 9000 + row * 64, 8)));
        ranges.push(range(180, 20, 8));
        ranges.extend((0..3).map(|row| range(300 + row * 8, 30_000 + row * 8, 8)));
        let (rows, single) = sorted(&ranges, (false, false));
        assert_eq!(rows.len(), 1, "{rows:?}");
        assert_eq!(
            (rows[0].height, rows[0].dst_pitch, rows[0].src_pitch),
            (10, 8, 64)
        );
        assert_eq!(single.len(), 5, "{single:?}");
        let mut bytes: Vec<CopyRange> = single;
        for rows in rows {
            bytes.extend((0..rows.height).map(|row| {
                range(
                    rows.dst + row * rows.dst_pitch,
                    rows.src + row * rows.src_pitch,
                    rows.width,
                )
            }));
        }
        bytes.sort_by_key(|range| range.dst);
        ranges.sort_by_key(|range| range.dst);
        assert_eq!(bytes, ranges);
    }

    #[test]
    fn what_no_call_takes_stays_single() {
        let far = LARGEST_PITCH + 1;
        for ranges in [
            (0..8)
                .map(|row| range(row * 8, row * far, 8))
                .collect::<Vec<_>>(),
            (0..8).map(|row| range(row * 4, row * 100, 8)).collect(),
            (0..8)
                .map(|row| range(1000 - row * 8, row * 8, 8))
                .collect(),
            (0..8)
                .map(|row| range(row << 20, row << 20, LONGEST_ROW + 1))
                .collect(),
            vec![],
        ] {
            let (rows, single) = sorted(&ranges, (false, true));
            assert_eq!((rows.len(), single), (0, ranges));
        }
    }
}

//! Pages and rows: pairs of indices to runs, and the filters of CP and sharded prefills.

use std::ops::Range;

use crate::ids::{ByteLen, ByteOffset};
use crate::plan::{PlanError, RunList, StridedRun};

/// `count` items that follow each other on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexRun {
    /// First source item.
    pub src: u64,
    /// First destination item.
    pub dst: u64,
    /// How many.
    pub count: u64,
}

/// Splits a pairwise list where either side stops being consecutive (SGLang's
/// `group_concurrent_contiguous`). Either side empty: nothing to transfer.
///
/// # Errors
/// [`PlanError::Argument`] when both sides have indices but not the same number, or an index is
/// negative.
pub fn index_runs<I: Copy + Into<i64>>(src: &[I], dst: &[I]) -> Result<Vec<IndexRun>, PlanError> {
    if src.is_empty() || dst.is_empty() {
        return Ok(Vec::new());
    }
    if src.len() != dst.len() {
        return Err(PlanError::Argument {
            what: "index lists",
            detail: format!("{} source and {} destination indices", src.len(), dst.len()),
        });
    }
    let mut runs: Vec<IndexRun> = Vec::new();
    for (src, dst) in src.iter().zip(dst) {
        let (src, dst): (i64, i64) = ((*src).into(), (*dst).into());
        let (Ok(src), Ok(dst)) = (u64::try_from(src), u64::try_from(dst)) else {
            return Err(PlanError::Argument {
                what: "index lists",
                detail: format!("index {} is negative", src.min(dst)),
            });
        };
        match runs.last_mut() {
            Some(last) if last.src + last.count == src && last.dst + last.count == dst => {
                last.count += 1;
            }
            _ => runs.push(IndexRun { src, dst, count: 1 }),
        }
    }
    Ok(runs)
}

/// Each index run as one range of `count * item_len` bytes at `start * item_len`.
///
/// # Errors
/// [`PlanError::Overflow`] when an offset does not fit 64 bits.
pub fn item_run_list(runs: &[IndexRun], item_len: u64) -> Result<RunList, PlanError> {
    let overflow = PlanError::Overflow {
        what: "offset of a page",
    };
    let scaled = |items: u64| items.checked_mul(item_len).ok_or_else(|| overflow.clone());
    let strided = runs.iter().map(|run| {
        Ok(StridedRun::contiguous(
            ByteOffset(scaled(run.src)?),
            ByteOffset(scaled(run.dst)?),
            ByteLen(scaled(run.count)?),
        ))
    });
    RunList::new(strided.collect::<Result<_, PlanError>>()?)
}

/// The pages of a chunk that this context-parallel rank sends, and their positions in the request.
/// The request's pages are split evenly; the first ranks take one more where it does not divide.
pub fn pages_of_cp_rank(
    pages: &[i32],
    positions: Range<usize>,
    total_pages: Option<usize>,
    cp_rank: usize,
    cp_size: usize,
) -> (Vec<i32>, Range<usize>) {
    if cp_size <= 1 {
        return (pages.to_vec(), positions);
    }
    let total = total_pages.unwrap_or(pages.len());
    let (base, longer) = (total / cp_size, total % cp_size);
    let own_start = cp_rank * base + cp_rank.min(longer);
    let own_end = own_start + base + usize::from(cp_rank < longer);
    let first = own_start.max(positions.start);
    let end = own_end.min(positions.end);
    let chosen = first
        .checked_sub(positions.start)
        .zip(end.checked_sub(positions.start))
        .and_then(|(first, end)| pages.get(first..end))
        .filter(|chosen| !chosen.is_empty());
    match chosen {
        Some(chosen) => (chosen.to_vec(), first..end),
        None => (Vec::new(), positions.start..positions.start),
    }
}

/// The pages of a chunk that this rank owns when pages are sharded over ranks: logical page `p`
/// lives on rank `p % size` as its page `p / size`. Returns its pages and their positions.
pub fn pages_of_shard_rank(
    pages: &[i32],
    first_position: usize,
    shard_rank: i32,
    shard_size: i32,
) -> (Vec<i32>, Vec<usize>) {
    let owned = pages
        .iter()
        .enumerate()
        .filter(|(_, page)| shard_size > 0 && page.rem_euclid(shard_size) == shard_rank);
    owned
        .map(|(at, page)| (page.div_euclid(shard_size), first_position + at))
        .unzip()
}

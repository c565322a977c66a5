//! Which checksums two Ferry ranks compare for a room: both sides work out the same list of units
//! from the ranges that were written, so that only the sums have to travel.
//!
//! A range of a plan is cut into pieces of at most [`PIECE_BYTES`]. A unit is one piece, or, where a
//! group of tensors would have more than [`MOST_SUMS`] units, several that follow each other.
//! [`CheckMode::Full`] has a sum for every unit, [`CheckMode::Sampled`] for one of
//! [`SAMPLED_SHARE`] that follow each other, at a place that differs from room to room.

use crate::ids::{ByteLen, ByteOffset, ComponentId, Room};
use crate::plan::{RunList, StridedRun};

/// Longest piece that has a sum of its own, so that a mismatch has a place.
pub const PIECE_BYTES: u64 = 1 << 20;
/// Most sums of one group, but for one of each tensor: 256 KiB of a message, which has a group for each
/// chunk and component.
pub const MOST_SUMS: u64 = 1 << 15;
/// Of how many units in a row a sample has one.
pub const SAMPLED_SHARE: u64 = 16;

/// How much is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CheckMode {
    /// One unit of every [`SAMPLED_SHARE`], and at least one of each group of tensors.
    Sampled,
    /// Every byte.
    Full,
}

impl CheckMode {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Sampled, Self::Full];

    /// The word in messages, options and the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sampled => "sampled",
            Self::Full => "full",
        }
    }

    /// The mode of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }

    const fn share(self) -> u64 {
        match self {
            Self::Sampled => SAMPLED_SHARE,
            Self::Full => 1,
        }
    }
}

/// `count` ranges of `len` bytes, one every `stride` bytes from `offset`, in one tensor of either
/// side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckRun {
    /// Start of the first range.
    pub offset: ByteOffset,
    /// Bytes of each range.
    pub len: ByteLen,
    /// Bytes from one range to the next.
    pub stride: u64,
    /// How many ranges.
    pub count: u32,
}

impl CheckRun {
    fn new(run: &StridedRun, offset: ByteOffset, stride: u64) -> Self {
        Self {
            offset,
            len: run.len,
            stride,
            count: run.count,
        }
    }

    /// Where the runs of a plan are read.
    pub fn sources(runs: &RunList) -> Vec<Self> {
        let runs = runs.runs().iter();
        runs.map(|run| Self::new(run, run.src, run.src_stride))
            .collect()
    }

    /// Where the runs of a plan are written.
    pub fn destinations(runs: &RunList) -> Vec<Self> {
        let runs = runs.runs().iter();
        runs.map(|run| Self::new(run, run.dst, run.dst_stride))
            .collect()
    }

    /// First offset behind every range; `None` when it does not fit 64 bits.
    pub fn end(&self) -> Option<u64> {
        let Some(steps) = self.count.checked_sub(1) else {
            return Some(self.offset.get());
        };
        let last = u64::from(steps).checked_mul(self.stride)?;
        last.checked_add(self.offset.get())?
            .checked_add(self.len.get())
    }

    /// Bytes of all ranges; `None` when they do not fit 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        self.len.get().checked_mul(u64::from(self.count))
    }

    fn pieces(&self) -> Option<u64> {
        let of_each = self.len.get().div_ceil(PIECE_BYTES);
        of_each.checked_mul(u64::from(self.count))
    }
}

/// The pieces of some runs, in order. Runs whose [`CheckRun::end`] fits have no piece beyond it.
pub fn pieces(runs: &[CheckRun]) -> impl Iterator<Item = (ByteOffset, ByteLen)> + '_ {
    let ranges = runs.iter().flat_map(|run| {
        let starts = (0..u64::from(run.count)).map(|step| {
            let distance = step.wrapping_mul(run.stride);
            run.offset.get().wrapping_add(distance)
        });
        starts.map(|start| (start, run.len.get()))
    });
    ranges.flat_map(|(start, len)| {
        (0..len.div_ceil(PIECE_BYTES)).map(move |piece| {
            let before = piece * PIECE_BYTES;
            let length = (len - before).min(PIECE_BYTES);
            (ByteOffset(start.wrapping_add(before)), ByteLen(length))
        })
    })
}

/// Which units of one group of tensors have a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    /// Pieces of a unit, but for the last one of a tensor.
    fold: u64,
    pieces: u64,
    of_each_tensor: u64,
    count: u64,
    share: u64,
    seed: u64,
}

impl Units {
    /// The units of some tensors that were all written in these places. `None` when they cannot be
    /// counted in 64 bits.
    pub fn new(
        mode: CheckMode,
        room: Room,
        component: ComponentId,
        destinations: &[CheckRun],
        tensors: usize,
    ) -> Option<Self> {
        let tensors = u64::try_from(tensors).ok()?;
        let of_each = destinations
            .iter()
            .try_fold(0u64, |sum, run| sum.checked_add(run.pieces()?))?;
        let fold = of_each.checked_mul(tensors)?.div_ceil(MOST_SUMS).max(1);
        let of_each_tensor = of_each.div_ceil(fold);
        let first = destinations.first().map_or(0, |run| run.offset.get());
        Some(Self {
            fold,
            pieces: of_each,
            of_each_tensor,
            count: of_each_tensor.checked_mul(tensors)?,
            share: mode.share(),
            seed: mixed(mixed(room.get() ^ mixed(component.number().into())) ^ first),
        })
    }

    /// How many sums there are, over all tensors.
    pub const fn sums(&self) -> u64 {
        self.count.div_ceil(self.share)
    }

    /// Pieces of a unit, but for the last one of a tensor.
    pub const fn fold(&self) -> u64 {
        self.fold
    }

    /// Whether a unit ends with this piece.
    pub const fn is_end(&self, piece: u64) -> bool {
        (piece + 1).is_multiple_of(self.fold) || piece + 1 == self.pieces
    }

    /// Whether the unit that this piece of the tensor at this position belongs to has a sum.
    pub fn has_sum(&self, tensor: usize, piece: u64) -> bool {
        let unit = tensor as u64 * self.of_each_tensor + piece / self.fold;
        let block = unit / self.share;
        let in_block = (self.count - (block * self.share).min(self.count)).min(self.share);
        in_block > 0 && unit % self.share == mixed(self.seed ^ block) % in_block
    }
}

/// Spreads a number's bits over all places (splitmix64).
const fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(offset: u64, len: u64, stride: u64, count: u32) -> CheckRun {
        CheckRun {
            offset: ByteOffset(offset),
            len: ByteLen(len),
            stride,
            count,
        }
    }

    fn room(number: u64) -> Room {
        Room::new(number).expect("a room")
    }

    /// The units that have a sum, by counting.
    fn chosen(units: &Units, runs: &[CheckRun], tensors: usize) -> Vec<(usize, u64)> {
        let pieces = pieces(runs).count() as u64;
        let firsts = (0..tensors).flat_map(|tensor| {
            (0..pieces)
                .step_by(units.fold() as usize)
                .map(move |piece| (tensor, piece))
        });
        firsts
            .filter(|(tensor, piece)| units.has_sum(*tensor, *piece))
            .collect()
    }

    #[test]
    fn ranges_are_cut_into_pieces_and_no_byte_is_left_out() {
        let runs = [run(64, 32, 128, 3), run(4096, 2 * PIECE_BYTES + 5, 0, 1)];
        let found: Vec<(u64, u64)> = pieces(&runs)
            .map(|(offset, len)| (offset.get(), len.get()))
            .collect();
        let expected = [
            (64, 32),
            (192, 32),
            (320, 32),
            (4096, PIECE_BYTES),
            (4096 + PIECE_BYTES, PIECE_BYTES),
            (4096 + 2 * PIECE_BYTES, 5),
        ];
        assert_eq!(found, expected);
        assert_eq!(run(8, 4, 16, 3).end(), Some(8 + 32 + 4));
        assert_eq!(run(8, u64::MAX, 16, 3).end(), None);
    }

    #[test]
    fn a_sample_has_one_unit_of_every_sixteen_and_full_has_all() {
        let runs = [run(0, 100, 200, 37)];
        for number in 0..50 {
            for tensors in [1, 2, 3, 40] {
                let all = 37 * tensors as u64;
                for (mode, sums) in [
                    (CheckMode::Full, all),
                    (CheckMode::Sampled, all.div_ceil(SAMPLED_SHARE)),
                ] {
                    let units =
                        Units::new(mode, room(number), ComponentId::Kv, &runs, tensors).unwrap();
                    assert_eq!(units.sums(), sums, "{mode:?}");
                    let chosen = chosen(&units, &runs, tensors);
                    assert_eq!(chosen.len() as u64, sums, "{mode:?}, {tensors} tensors");
                    let mut blocks: Vec<u64> = chosen
                        .iter()
                        .map(|(tensor, unit)| (*tensor as u64 * 37 + unit) / mode.share())
                        .collect();
                    blocks.dedup();
                    assert_eq!(blocks.len() as u64, sums, "one of each block");
                }
            }
        }
    }

    #[test]
    fn rooms_have_samples_of_their_own() {
        let runs = [run(0, 100, 200, 16)];
        let sample = |number| {
            let units =
                Units::new(CheckMode::Sampled, room(number), ComponentId::Kv, &runs, 1).unwrap();
            chosen(&units, &runs, 1)
        };
        let samples: std::collections::HashSet<_> = (0..200).map(sample).collect();
        assert_eq!(samples.len(), 16, "every unit has its turn");
        assert_eq!(sample(7), sample(7));
    }

    #[test]
    fn a_group_of_very_many_ranges_has_a_bounded_number_of_sums() {
        let runs = [run(0, 1, 2, 1 << 20)];
        let units = Units::new(CheckMode::Full, room(1), ComponentId::Aux, &runs, 3).unwrap();
        assert!(units.sums() <= MOST_SUMS + 3 && units.sums() > MOST_SUMS / 2);
        assert_eq!(chosen(&units, &runs, 3).len() as u64, units.sums());
        let endless = [run(0, u64::MAX, 0, u32::MAX)];
        assert_eq!(
            Units::new(
                CheckMode::Full,
                room(1),
                ComponentId::Kv,
                &endless,
                usize::MAX
            ),
            None
        );
    }
}

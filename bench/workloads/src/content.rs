//! What every byte must be, from logical coordinates alone: request, component, tensor, and token
//! or slot. No pool, page number or rank is a coordinate, and nothing here knows of plans.

/// 2^64 divided by the golden ratio.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// Spreads every input bit over all output bits (the finaliser of splitmix64).
const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The hash of a list of coordinates.
#[derive(Clone, Copy, Debug)]
pub struct Coordinates(u64);

impl Coordinates {
    /// The empty list under a seed.
    pub const fn new(seed: u64) -> Self {
        Self(mix(seed ^ GOLDEN_RATIO))
    }

    /// The list with one more at its end.
    pub const fn with(self, coordinate: u64) -> Self {
        let salted = coordinate.wrapping_mul(GOLDEN_RATIO);
        Self(mix(self.0.rotate_left(17) ^ salted))
    }

    /// Writes the bytes of the row with these coordinates.
    pub fn fill(self, row: &mut [u8]) {
        let mut state = self.0;
        let mut words = row.chunks_exact_mut(8);
        for word in &mut words {
            state = state.wrapping_add(GOLDEN_RATIO);
            word.copy_from_slice(&mix(state).to_le_bytes());
        }
        let tail = words.into_remainder();
        let last = mix(state.wrapping_add(GOLDEN_RATIO)).to_le_bytes();
        tail.iter_mut()
            .zip(last)
            .for_each(|(byte, value)| *byte = value);
    }
}

/// A seeded generator; the same seed gives the same run.
#[derive(Clone, Debug)]
pub struct Generator(u64);

impl Generator {
    /// A generator for one purpose, told apart by `stream`.
    pub const fn new(seed: u64, stream: u64) -> Self {
        Self(mix(seed ^ mix(stream ^ GOLDEN_RATIO)))
    }

    /// A number below `bound`, or 0 when the bound is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(GOLDEN_RATIO);
        ((u128::from(mix(self.0)) * bound as u128) >> 64) as usize
    }
}

/// The free numbers of one component of one side, handed out in random order.
#[derive(Debug)]
pub struct FreeList {
    free: Vec<i32>,
    generator: Generator,
}

impl FreeList {
    /// All numbers below `items`.
    pub fn new(items: u32, generator: Generator) -> Self {
        Self {
            free: (0..i32::try_from(items).unwrap_or(i32::MAX)).collect(),
            generator,
        }
    }

    /// Takes `count` numbers; none when there are too few.
    pub fn take(&mut self, count: usize) -> Option<Vec<i32>> {
        if count > self.free.len() {
            return None;
        }
        let take_one = |_| {
            let at = self.generator.below(self.free.len());
            self.free.swap_remove(at)
        };
        Some((0..count).map(take_one).collect())
    }

    /// Takes numbers back.
    pub fn give_back(&mut self, numbers: &[i32]) {
        self.free.extend_from_slice(numbers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_differ_by_every_coordinate_and_by_their_order() {
        let row = |coordinates: Coordinates| {
            let mut row = [0; 19];
            coordinates.fill(&mut row);
            row
        };
        let base = Coordinates::new(1);
        let rows = [
            row(base),
            row(base.with(0)),
            row(base.with(1).with(2)),
            row(base.with(2).with(1)),
            row(Coordinates::new(2)),
        ];
        for (at, one) in rows.iter().enumerate() {
            assert!(rows.iter().skip(at + 1).all(|other| other != one));
        }
    }

    #[test]
    fn numbers_are_handed_out_once() {
        let mut list = FreeList::new(20, Generator::new(1, 1));
        let mut taken = list.take(20).unwrap();
        assert!(list.take(1).is_none() && !taken.is_sorted());
        taken.sort_unstable();
        assert_eq!(taken, (0..20).collect::<Vec<_>>());
    }
}

//! What every byte must be, from logical coordinates alone.
//!
//! A *row* is the smallest part of the state that lies in one piece on every rank whatever the TP
//! size: one head of one token, one convolution channel, one row of a recurrent matrix. A row's key
//! is a hash of its coordinates; its bytes are a cheap hash of the key for each 8 bytes. Neither a
//! pool, a page nor a rank is a coordinate, so both engines compute the same bytes for the same
//! logical place, each in its own layout.

/// The multiplier of Weyl sequences: 2^64 divided by the golden ratio.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// Tells the background's hash apart from that of contents.
const BACKGROUND_DOMAIN: u64 = 0x6261_636b_6772_6e64;

/// Spreads every input bit over all output bits (the finaliser of splitmix64).
#[inline]
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The hash of a list of coordinates, taken in one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates(u64);

impl Coordinates {
    /// The empty list under a seed.
    pub const fn new(seed: u64) -> Self {
        Self(mix(seed ^ GOLDEN_RATIO))
    }

    /// The list with one more coordinate at its end.
    #[inline]
    pub const fn with(self, coordinate: u64) -> Self {
        Self(mix(
            self.0.rotate_left(17) ^ coordinate.wrapping_mul(GOLDEN_RATIO)
        ))
    }

    /// The 8 bytes of the row at word `index`.
    #[inline]
    pub const fn word(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_mul(GOLDEN_RATIO)))
    }

    /// Writes the bytes of the row with these coordinates.
    #[inline]
    pub fn fill(self, row: &mut [u8]) {
        let mut words = row.chunks_exact_mut(8);
        let mut index = 0;
        for word in &mut words {
            word.copy_from_slice(&self.word(index).to_le_bytes());
            index += 1;
        }
        let tail = words.into_remainder();
        let tail_len = tail.len();
        if tail_len > 0 {
            tail.copy_from_slice(&self.word(index).to_le_bytes()[..tail_len]);
        }
    }
}

/// What a pool holds before anything is written to it: a function of the seed, the rank that owns
/// the pool and the offset in the pool.
#[derive(Clone, Copy, Debug)]
pub struct Background(Coordinates);

impl Background {
    /// The background of one pool. `owner` differs between the two sides.
    pub const fn new(seed: u64, owner: u64, tp_rank: u32, pool: usize) -> Self {
        Self(
            Coordinates::new(seed)
                .with(BACKGROUND_DOMAIN)
                .with(owner)
                .with(tp_rank as u64)
                .with(pool as u64),
        )
    }

    /// Writes the background of `[offset, offset + out.len())` of the pool, whatever its alignment.
    pub fn fill(self, offset: u64, out: &mut [u8]) {
        let (head_len, mut index) = match (offset % 8) as usize {
            0 => (0, offset / 8),
            inside => {
                let head_len = out.len().min(8 - inside);
                let word = self.0.word(offset / 8).to_le_bytes();
                out[..head_len].copy_from_slice(&word[inside..inside + head_len]);
                (head_len, offset / 8 + 1)
            }
        };
        let mut words = out[head_len..].chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.0.word(index).to_le_bytes());
            index += 1;
        }
        let tail = words.into_remainder();
        let tail_len = tail.len();
        if tail_len > 0 {
            tail.copy_from_slice(&self.0.word(index).to_le_bytes()[..tail_len]);
        }
    }
}

/// A small seeded generator for lengths, rooms and shuffles; the same seed gives the same run.
#[derive(Clone, Debug)]
pub struct Generator(u64);

impl Generator {
    /// A generator for one purpose, told apart by `stream`.
    pub const fn new(seed: u64, stream: u64) -> Self {
        Self(mix(seed ^ mix(stream ^ GOLDEN_RATIO)))
    }

    /// The next 64 random bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN_RATIO);
        mix(self.0)
    }

    /// A number below `bound`, or 0 when the bound is 0.
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.next_u64() as u128 * bound as u128) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_in_another_order_or_number_give_another_row() {
        let base = Coordinates::new(1);
        assert_ne!(base.with(1).with(2), base.with(2).with(1));
        assert_ne!(base.with(0), base);
        assert_ne!(base.with(0).with(0), base.with(0));
        assert_ne!(Coordinates::new(2).with(1), base.with(1));
    }

    #[test]
    fn a_short_row_is_a_prefix_of_a_long_one() {
        let key = Coordinates::new(7).with(3);
        let mut long = [0_u8; 32];
        key.fill(&mut long);
        for len in 0..32 {
            let mut short = vec![0_u8; len];
            key.fill(&mut short);
            assert_eq!(short, long[..len]);
        }
    }

    #[test]
    fn the_background_does_not_depend_on_where_a_read_begins() {
        let background = Background::new(5, 1, 2, 3);
        let mut whole = [0_u8; 64];
        background.fill(0, &mut whole);
        for start in 0..40 {
            for len in 0..24 {
                let mut part = vec![0_u8; len];
                background.fill(start as u64, &mut part);
                assert_eq!(part, whole[start..start + len], "start {start} len {len}");
            }
        }
        let mut other_rank = [0_u8; 64];
        Background::new(5, 1, 3, 3).fill(0, &mut other_rank);
        assert_ne!(whole, other_rank);
    }
}

//! Random numbers of a seed that is printed and can be given again.

/// SplitMix64.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// From `FERRY_SEED`, or from the clock. The seed is printed.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let fresh = now.map_or(1, |since| since.as_nanos() as u64);
        let given = std::env::var("FERRY_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let seed = given.unwrap_or(fresh);
        println!("FERRY_SEED={seed}");
        Self(seed)
    }

    /// From a number, for a second sequence beside the first.
    pub const fn from_seed(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number of 64 bits.
    pub const fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.word() % bound as u64) as usize
    }

    /// So many random bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.below(256) as u8).collect()
    }
}

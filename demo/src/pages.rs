//! Which pages, slots and rows are free. Numbers are handed out in random order and come back for
//! later requests, so that a request's pages are scattered over the pool.

use crate::content::Generator;

/// The free numbers of one component of one rank.
#[derive(Debug)]
pub struct FreeList {
    free: Vec<i32>,
    generator: Generator,
}

impl FreeList {
    /// All numbers below `items` except the multiples of `canary_stride`, which stay untouched
    /// for the whole run.
    pub fn new(items: u32, canary_stride: u32, generator: Generator) -> Self {
        let numbers = (0..items).filter(|item| !item.is_multiple_of(canary_stride));
        Self {
            free: numbers
                .filter_map(|item| i32::try_from(item).ok())
                .collect(),
            generator,
        }
    }

    /// Takes `count` numbers in random order; none is taken when there are too few.
    pub fn take(&mut self, count: usize) -> Option<Vec<i32>> {
        if self.free.len() < count {
            return None;
        }
        let mut taken = Vec::with_capacity(count);
        for _ in 0..count {
            let position = self.generator.below(self.free.len() as u64) as usize;
            taken.push(self.free.swap_remove(position));
        }
        Some(taken)
    }

    /// Takes numbers back. Whoever held them knows that nobody writes or reads there any more.
    pub fn give_back(&mut self, numbers: &[i32]) {
        self.free.extend_from_slice(numbers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_handed_out_once_until_it_comes_back() {
        let mut list = FreeList::new(33, 16, Generator::new(1, 1));
        let mut all = list.take(30).expect("33 less 3 canaries");
        assert!(list.take(1).is_none());
        assert!(!all.is_sorted(), "they come in random order");
        all.sort_unstable();
        assert_eq!(
            all,
            (1..33).filter(|item| item % 16 != 0).collect::<Vec<_>>()
        );
        list.give_back(&all[..4]);
        let mut again = list.take(4).expect("four came back");
        again.sort_unstable();
        assert_eq!(again, all[..4]);
    }
}

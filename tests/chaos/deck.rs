//! What is done to whom, in an order of chance.

use std::time::Duration;

use tests::random::Random;

use crate::fleet::{RANKS, Strike, Target};
use crate::load::TIMEOUT_S;

/// One thing that is done, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blow {
    pub target: Target,
    pub strike: Strike,
    /// Until it is put right.
    pub outage: Duration,
}

/// Every strike on every target once, in an order of chance, before any comes again.
#[derive(Debug)]
pub struct Deck {
    strikes: &'static [Strike],
    left: Vec<Blow>,
}

impl Deck {
    /// Cut links only, or kill and stop only.
    pub const fn new(uses_links: bool) -> Self {
        let strikes: &[Strike] = if uses_links {
            &[Strike::Cut]
        } else {
            &[Strike::Kill, Strike::Stop]
        };
        Self {
            strikes,
            left: Vec::new(),
        }
    }

    pub fn deal(&mut self, random: &mut Random) -> Blow {
        if self.left.is_empty() {
            self.left = self.shuffled(random);
        }
        self.left.pop().expect("a fresh deck is not empty")
    }

    /// Beside the short ones, a prefill and a decode that are stopped for longer than every timeout
    /// of a room, so that their peers have to end rooms by themselves. One of these comes soon, so
    /// that a short run has it. Links are not cut for so long: the kernel sends again only as late
    /// after the repair as the link was cut, which is more than the rate may take to come back.
    fn shuffled(&self, random: &mut Random) -> Vec<Blow> {
        let targets = (0..2 * RANKS).map(Target::Rank).chain([Target::Bootstrap]);
        let mut blows = Vec::new();
        for target in targets {
            for strike in self.strikes.iter().copied() {
                let least_ms = if strike == Strike::Kill { 200 } else { 700 };
                let outage = Duration::from_millis((least_ms + random.below(1000)) as u64);
                blows.push(Blow {
                    target,
                    strike,
                    outage,
                });
            }
        }
        for last in (1..blows.len()).rev() {
            blows.swap(last, random.below(last + 1));
        }
        if !self.strikes.contains(&Strike::Stop) {
            return blows;
        }
        let roles = [0, RANKS].map(|first| Target::Rank(first + random.below(RANKS)));
        let first_role = random.below(2);
        for (target, place) in [
            (roles[first_role], blows.len() - 1),
            (roles[1 - first_role], blows.len() / 2),
        ] {
            let outage = Duration::from_secs(TIMEOUT_S + 1)
                + Duration::from_millis(random.below(1000) as u64);
            let blow = Blow {
                target,
                strike: Strike::Stop,
                outage,
            };
            blows.insert(place, blow);
        }
        blows
    }
}

#[cfg(test)]
mod checks {
    use super::*;

    #[test]
    fn every_strike_meets_every_target_before_any_comes_again() {
        let mut random = Random::new();
        for (uses_links, long) in [(false, 2), (true, 0)] {
            let mut deck = Deck::new(uses_links);
            let short = (2 * RANKS + 1) * deck.strikes.len();
            let dealt: Vec<_> = (0..short + long).map(|_| deck.deal(&mut random)).collect();
            assert!(deck.left.is_empty());
            let is_long = |blow: &&Blow| blow.outage > Duration::from_secs(TIMEOUT_S);
            assert_eq!(dealt.iter().filter(is_long).count(), long, "{dealt:?}");
            assert!(long == 0 || is_long(&&dealt[1]), "{dealt:?}");
            let mut pairs: Vec<_> = dealt
                .iter()
                .filter(|blow| !is_long(blow))
                .map(|blow| format!("{:?} {}", blow.strike, blow.target.name()))
                .collect();
            pairs.sort();
            pairs.dedup();
            assert_eq!(pairs.len(), short, "{dealt:?}");
        }
    }
}

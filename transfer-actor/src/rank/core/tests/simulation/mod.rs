//! Several ranks of both roles on a clock and a network of a seed's making. Every promise is
//! checked after every event; a seed that breaks one is run again with a trace.
//!
//! `FERRY_SIM_SEEDS` says how many seeds are run, `FERRY_SIM_SEED` runs one and prints its trace,
//! with `FERRY_SIM_ROUGH` in the weather in which rules are left out.
//! `make test-sim` runs many, optimised, and every rule's absence.

mod coverage;
mod engines;
mod io;
mod memory;
mod network;
mod random;
mod world;

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use self::coverage::{DECODE_STATES, IMPOSSIBLE, KINDS, PREFILL_STATES, Pair};
use self::random::Random;
use self::world::{Tightness, Weather, World};
use crate::rank::core::rules::{ALL, Rule, break_rule};

const DEFAULT_SEEDS: u64 = 200;
/// From so many seeds on, every pair of state and event has to be met.
const COVERING_SEEDS: u64 = 10_000;
/// A broken rule must be noticed within so many seeds.
const MUTATION_SEEDS: u64 = 20_000;
const CALM_SEEDS: u64 = 20;
/// How much of a failing seed's trace is printed, in lines.
const TRACE_LINES: usize = 600;
/// After so many violations no further seed is run.
const MOST_VIOLATIONS: usize = 12;

/// What all runs together have seen.
#[derive(Debug, Default)]
struct Seen {
    covered: HashSet<Pair>,
    events: usize,
    least_events: usize,
    successes: usize,
    failures: usize,
}

fn weather_of(seed: u64) -> Weather {
    let mut random = Random::new(seed ^ 0x5eed);
    let is_ferry = random.percent(70);
    let fault = |random: &mut Random, most: usize| match random.percent(60) {
        true => 1 + random.below(most),
        false => 0,
    };
    let weather = Weather {
        is_ferry,
        is_chaotic: is_ferry && random.percent(50),
        loss: fault(&mut random, 8),
        delays: fault(&mut random, 10),
        io_faults: fault(&mut random, 10),
        has_outages: random.percent(50),
        engine_faults: fault(&mut random, 8),
        limits: match random.below(4) {
            0 => Tightness::Waiting,
            1 => Tightness::Refusing,
            _ => Tightness::Loose,
        },
        verifies: false,
        spoilt: 0,
    };
    let verifies = is_ferry && random.percent(40);
    Weather {
        verifies,
        spoilt: if verifies { fault(&mut random, 6) } else { 0 },
        ..weather
    }
}

fn calm_weather(seed: u64) -> Weather {
    Weather {
        is_ferry: seed.is_multiple_of(2),
        verifies: seed.is_multiple_of(4),
        limits: match seed % 4 {
            0 | 1 => Tightness::Waiting,
            _ => Tightness::Loose,
        },
        ..Weather::default()
    }
}

/// Everything goes wrong often, so that a broken rule shows soon.
fn rough_weather(seed: u64) -> Weather {
    let is_ferry = !seed.is_multiple_of(3);
    Weather {
        is_ferry,
        is_chaotic: is_ferry && seed.is_multiple_of(2),
        loss: 5,
        delays: 12,
        io_faults: 8,
        has_outages: (seed / 6).is_multiple_of(2),
        engine_faults: 6,
        verifies: is_ferry && (seed / 12).is_multiple_of(2),
        spoilt: if is_ferry && (seed / 12).is_multiple_of(2) {
            3
        } else {
            0
        },
        limits: match seed % 5 {
            0 => Tightness::Waiting,
            1 => Tightness::Refusing,
            _ => Tightness::Loose,
        },
    }
}

fn run(seed: u64, weather: Weather, is_traced: bool) -> (World, Result<(), String>) {
    let mut world = World::new(seed, weather, is_traced);
    let result = world.run();
    (world, result)
}

/// Runs a failing seed again and shows what led to the violation.
fn replay(seed: u64, weather: Weather, violation: &str) -> ! {
    let (world, _) = run(seed, weather, true);
    let trace = world.trace_opt.unwrap_or_default();
    for line in trace.iter().skip(trace.len().saturating_sub(TRACE_LINES)) {
        println!("{line}");
    }
    panic!("seed {seed}, {weather:?}: {violation}\nFERRY_SIM_SEED={seed} runs it again");
}

fn number_from(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs seeds on all processors until one fails.
fn run_all(seeds: u64, weather_of: impl Fn(u64) -> Weather + Sync) -> Seen {
    let next = AtomicU64::new(1);
    let seen = Mutex::new(Seen {
        least_events: usize::MAX,
        ..Seen::default()
    });
    let violations = Mutex::new(BTreeMap::new());
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed > seeds || violations.lock().expect("no panic").len() >= MOST_VIOLATIONS
                    {
                        return;
                    }
                    let (world, result) = run(seed, weather_of(seed), false);
                    let mut seen = seen.lock().expect("no panic");
                    seen.covered.extend(&world.covered);
                    seen.events += world.events;
                    seen.least_events = seen.least_events.min(world.events);
                    seen.successes += world.successes;
                    seen.failures += world.failures;
                    if let Err(reason) = result {
                        violations.lock().expect("no panic").insert(seed, reason);
                    }
                }
            });
        }
    });
    let violations = violations.into_inner().expect("no panic");
    for (seed, reason) in &violations {
        println!("seed {seed}: {reason}");
    }
    if let Some((seed, reason)) = violations.first_key_value() {
        replay(*seed, weather_of(*seed), reason);
    }
    seen.into_inner().expect("no panic")
}

#[test]
fn simulation_keeps_every_promise_and_meets_every_pair() {
    if let Some(seed) = number_from("FERRY_SIM_SEED") {
        let weather = match std::env::var_os("FERRY_SIM_ROUGH") {
            Some(_) => rough_weather(seed),
            None => weather_of(seed),
        };
        let (_, result) = run(seed, weather, false);
        replay(seed, weather, &format!("{result:?}"));
    }
    let seeds = number_from("FERRY_SIM_SEEDS").unwrap_or(DEFAULT_SEEDS);
    let seen = run_all(seeds, weather_of);
    println!(
        "{seeds} seeds: {} events, at least {} each; rooms: {} succeeded, {} failed",
        seen.events, seen.least_events, seen.successes, seen.failures
    );
    assert!(seen.least_events >= 200);
    assert!(seen.successes > 0 && seen.failures > 0);
    if seeds < COVERING_SEEDS {
        return;
    }
    let states = PREFILL_STATES.map(|state| (true, state)).into_iter();
    let states = states.chain(DECODE_STATES.map(|state| (false, state)));
    let mut wrong = Vec::new();
    for (is_prefill, state) in states {
        for kind in KINDS {
            let pair = (is_prefill, state, kind);
            let impossible = IMPOSSIBLE.iter().find(|(other, _)| *other == pair);
            match (seen.covered.contains(&pair), impossible) {
                (true, Some(_)) => wrong.push(format!("{pair:?} is said to be impossible")),
                (false, None) => wrong.push(format!("{pair:?} was not met")),
                _ => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{}\n{wrong:#?}", wrong.len());
}

#[test]
fn simulation_without_faults_lets_every_room_succeed() {
    let seen = run_all(100, calm_weather);
    assert!(seen.successes > 100);
    assert_eq!(seen.failures, 0);
}

#[test]
#[ignore = "thousands of seeds; `make test-sim` runs it, optimised"]
fn simulation_notices_every_broken_rule() {
    let next = AtomicU64::new(0);
    let unnoticed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed) as usize;
                    let Some(rule) = ALL.get(index) else { return };
                    match first_violation(*rule) {
                        Some((seed, reason)) => println!("{rule:?}: seed {seed}: {reason}"),
                        None => unnoticed.lock().expect("no panic").push(*rule),
                    }
                }
            });
        }
    });
    let unnoticed = unnoticed.into_inner().expect("no panic");
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}

/// The first seed in which leaving a rule out breaks a promise.
fn first_violation(rule: Rule) -> Option<(u64, String)> {
    break_rule(Some(rule));
    let calm = (1..=CALM_SEEDS).find_map(|seed| {
        let (world, result) = run(seed, calm_weather(seed), false);
        let violation = match result {
            Ok(()) if world.failures == 0 => return None,
            Ok(()) => "a room fails though nothing goes wrong".to_owned(),
            Err(violation) => violation,
        };
        Some((seed, violation))
    });
    // Some need a long row of things that go right; those come in better weather.
    let in_weather = |weather: fn(u64) -> Weather| {
        (1..=MUTATION_SEEDS).find_map(|seed| {
            let (_, result) = run(seed, weather(seed), false);
            Some((seed, result.err()?))
        })
    };
    let found = calm
        .or_else(|| in_weather(rough_weather))
        .or_else(|| in_weather(weather_of));
    break_rule(None);
    if let Some((seed, reason)) = &found {
        for weather in [calm_weather(*seed), rough_weather(*seed), weather_of(*seed)] {
            let (_, result) = run(*seed, weather, false);
            assert_eq!(
                result,
                Ok(()),
                "seed {seed}, with {rule:?} whole; broken: {reason}"
            );
        }
    }
    found
}

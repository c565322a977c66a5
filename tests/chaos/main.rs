//! Breaks real processes under load: a bootstrap server, four prefill and four decode ranks, each
//! in a process of its own, one of which is killed or stopped every five seconds, or has its link
//! cut, and is put right again.
//!
//! `ferry-chaos` (`make test-chaos`) kills and stops; `ferry-chaos --links` (`make test-links`)
//! gives each process a network namespace and cuts links; `--help` lists the options. The tests of
//! this program show of each thing that it looks for that it is noticed.

mod deck;
mod descriptors;
mod engine;
mod fleet;
mod load;
mod network;
mod watch;

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use clap::Parser;
use tests::process::children;
use tests::random::Random;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use transfer_actor::shutdown::Shutdown;

use deck::{Blow, Deck};
use engine::{REQUEST_BYTES, lock};
use fleet::{Fleet, RANKS, Target};
use load::Load;
use network::Network;
use watch::Resources;

/// From one strike to the next.
const PERIOD: Duration = Duration::from_secs(5);
/// Until when after a repair the rate is back.
const RECOVERY: Duration = Duration::from_secs(2);
/// The part of the usual rate that counts as back, in all and of the rank that was struck, and the
/// part that goes on during a strike. Below one, as a window is short and the machine has other work.
const BACK: f64 = 0.75;
const OWN_BACK: f64 = 0.5;
const GOING_ON: f64 = 0.25;
/// How long a connection to a host that vanished may last, and a little more: what a process uses
/// more of is judged only when that has passed after the last strike.
const SILENCE: Duration = Duration::from_secs(35);

/// Shortest run with a strike in it, and the longest that anybody waits for.
const SECONDS: std::ops::RangeInclusive<u64> = 20..=86_400;

const EXIT_HELP: &str = "\
It exits with 0 when nothing was wrong, 1 when a promise was broken (the logs of all processes are
kept and their folder is named), 2 for options that make no sense, 130 when it was interrupted.
With --links it needs network namespaces (root, or user namespaces). Where they are not permitted it
says SKIPPED, also in the file that FERRY_SKIP_LOG names, and exits with 0.";

/// Breaks real processes under load and looks at what becomes of every request.
///
/// A bootstrap server, four prefill and four decode ranks run in processes of their own; one of them
/// is struck every five seconds and put right again. It is wrong if a room hangs past its timeouts,
/// if one that succeeded holds a wrong byte, if a request fails whose ranks took no harm, if the
/// rate of requests is not back two seconds after a repair, or if a process that lives on uses more
/// memory, threads or descriptors than when it was warm.
#[derive(Debug, Parser)]
#[command(name = "ferry-chaos", version, after_help = EXIT_HELP)]
struct Cli {
    /// Gives each process a network namespace and cuts its link, over tcp, instead of killing and
    /// stopping processes over shm, cma and tcp.
    #[arg(long)]
    links: bool,
    /// How long the load goes on, in seconds, from 20 to 86400; a strike takes at least 6.
    #[arg(long, value_name = "SECONDS", env = "CHAOS_S", default_value_t = 120, value_parser = parse_seconds)]
    seconds: u64,
    /// Repeats the choices of a run that printed this seed: who is struck, when and how.
    #[arg(long, value_name = "NUMBER", env = "FERRY_SEED")]
    seed: Option<u64>,
}

fn parse_seconds(text: &str) -> Result<u64, String> {
    let seconds = text.parse().ok();
    seconds
        .filter(|seconds| SECONDS.contains(seconds))
        .ok_or_else(|| {
            format!(
                "a number of seconds from {} to {} is expected, in --seconds or CHAOS_S",
                SECONDS.start(),
                SECONDS.end()
            )
        })
}

/// What a program that a signal has ended says to a shell.
const INTERRUPTED: u8 = 130;

/// Waits for a signal to end, or for the terminal to go away.
async fn interrupted() {
    let mut shutdown = Shutdown::listen().expect("signals can be listened to");
    let mut hang_up = signal(SignalKind::hangup()).expect("signals can be listened to");
    tokio::select! {
        _ = shutdown.requested() => {}
        _ = hang_up.recv() => {}
    }
}

/// An interrupt ends the run early.
#[derive(Default)]
struct Interrupt {
    has_come: Mutex<bool>,
    changed: Condvar,
}

impl Interrupt {
    /// Waits until an instant; false when an interrupt came.
    fn pause_until(&self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.has_come), left, |has_come| !*has_come);
        !*waited.unwrap_or_else(std::sync::PoisonError::into_inner).0
    }

    fn come(&self) {
        *lock(&self.has_come) = true;
        self.changed.notify_all();
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.links && std::env::var_os(network::INSIDE).is_none() {
        if let Err(reason) = Network::probe() {
            tests::process::skip("links are cut between network namespaces", &reason);
            return ExitCode::SUCCESS;
        }
        use std::os::unix::process::CommandExt;
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = network::inside_of_its_own(program);
        let error = command.args(std::env::args_os().skip(1)).exec();
        eprintln!(
            "error: the run cannot be started in namespaces of its own: unshare: {error}; install util-linux"
        );
        return ExitCode::FAILURE;
    }
    let random = match cli.seed {
        Some(seed) => {
            println!("FERRY_SEED={seed}");
            Random::from_seed(seed)
        }
        None => Random::new(),
    };
    run(Duration::from_secs(cli.seconds), cli.links, random)
}

fn run(duration: Duration, uses_links: bool, mut random: Random) -> ExitCode {
    let folder = tempfile::Builder::new()
        .prefix("ferry-chaos")
        .tempdir()
        .expect("a folder");
    let network_opt = uses_links.then(|| Network::make(2 * RANKS + 1).expect("a network"));
    let transports: &[&str] = if uses_links {
        &["tcp"]
    } else {
        &["shm", "cma", "tcp"]
    };
    let transports: Vec<_> = transports.iter().map(|name| (*name).to_owned()).collect();

    let interrupt = Arc::new(Interrupt::default());
    let (handles, handle) = std::sync::mpsc::channel();
    let (end_load, load_ended) = tokio::sync::oneshot::channel::<()>();
    let to_interrupt = Arc::clone(&interrupt);
    // The load has a thread for itself; this one strikes and repairs, and may block.
    let loading = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.expect("a runtime");
        handles
            .send(runtime.handle().clone())
            .expect("somebody waits");
        runtime.spawn(async move {
            interrupted().await;
            println!("interrupted: ending");
            to_interrupt.come();
        });
        // Its sender is dropped at the end.
        let _ = runtime.block_on(load_ended);
    });
    let runtime = handle.recv().expect("the runtime starts");

    let ranks: Vec<_> = (0..2 * RANKS).collect();
    let fleet = Fleet::start(folder.path(), network_opt, &transports, &ranks);
    let load_random = Random::from_seed(random.word());
    let first_room = random.below(1 << 40) as u64;
    let load = Arc::new(Load::new(
        RANKS,
        fleet.bootstrap_addresses(),
        load_random,
        first_room,
    ));
    for rank in ranks {
        fleet
            .attach(&runtime, &load, rank)
            .unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
    {
        let _inside = runtime.enter();
        load.start();
    }

    let mut run = Run {
        fleet,
        load: Arc::clone(&load),
        runtime,
        interrupt: Arc::clone(&interrupt),
        random,
        resources: Resources::default(),
    };
    let strikes = run.strike_for(duration, uses_links);
    let Run {
        mut fleet,
        resources,
        ..
    } = run;

    load.is_ending.store(true, Ordering::Release);
    let patience = Instant::now() + Duration::from_secs(60);
    while load.under_way.load(Ordering::Acquire) > 0 && Instant::now() < patience {
        std::thread::park_timeout(Duration::from_millis(50));
    }
    let left = load.under_way.load(Ordering::Acquire);
    if left > 0 {
        load.violation(format!("{left} requests did not end"));
    }
    for wrong in fleet.ended() {
        load.violation(wrong);
    }
    for wrong in fleet.end() {
        load.violation(wrong);
    }
    drop(end_load);
    loading.join().expect("the load's thread ends");
    let left = children(std::process::id());
    if !left.is_empty() {
        load.violation(format!("children are left: {left:?}"));
    }
    let (grown, judged) = resources.grown();
    for what in grown {
        load.violation(what);
    }
    report(&load, strikes, judged);
    let violations = lock(&load.violations).len();
    if violations == 0 {
        return match *lock(&interrupt.has_come) {
            true => ExitCode::from(INTERRUPTED),
            false => ExitCode::SUCCESS,
        };
    }
    println!(
        "FAILED: {violations} violations; the logs are in {}",
        folder.keep().display()
    );
    ExitCode::FAILURE
}

/// What strikes and repairs.
struct Run {
    fleet: Fleet,
    load: Arc<Load>,
    /// The load's.
    runtime: Handle,
    interrupt: Arc<Interrupt>,
    random: Random,
    resources: Resources,
}

impl Run {
    /// Strikes, repairs and judges until the time is over or an interrupt comes; how often it
    /// struck.
    fn strike_for(&mut self, duration: Duration, uses_links: bool) -> usize {
        let load = &*self.load;
        let begun = Instant::now();
        let mut deck = Deck::new(uses_links);
        let mut strikes = 0;
        // The first period is calm: what the load does by itself.
        let mut calm_from = begun + Duration::from_secs(1);
        let mut next = begun + PERIOD;
        let mut usual = 0.0;
        while self.interrupt.pause_until(next) {
            let now = Instant::now();
            let done = lock(&load.done).clone();
            let calm = watch::usual_rate(&done, calm_from, now);
            usual = if strikes == 0 {
                calm
            } else {
                0.8 * usual + 0.2 * calm
            };
            for (name, pid) in self.fleet.pids() {
                self.resources.look(&name, pid, now);
            }
            for wrong in self.fleet.ended() {
                load.violation(wrong);
            }
            let blow = deck.deal(&mut self.random);
            let Blow {
                target,
                strike,
                outage,
            } = blow;
            if now + outage + PERIOD > begun + duration {
                break;
            }
            strikes += 1;
            let struck = Instant::now();
            self.fleet.strike(load, target, strike);
            let goes_on = self.interrupt.pause_until(struck + outage);
            if let Err(error) = self.fleet.repair(&self.runtime, load, target, strike) {
                load.violation(format!(
                    "{} could not be attached again: {error}",
                    target.name()
                ));
                break;
            }
            let repaired = Instant::now();
            next = repaired + PERIOD - outage.min(Duration::from_secs(2));
            let recovered = goes_on
                && self
                    .interrupt
                    .pause_until(repaired + RECOVERY + Duration::from_millis(600));
            if !recovered {
                break;
            }
            judge(load, blow, usual, struck, repaired);
            calm_from = repaired + RECOVERY;
        }
        self.settle();
        strikes
    }

    /// Waits, while the load goes on, until no process uses more than when it was warm, or all that
    /// may be left of the strikes is over.
    fn settle(&mut self) {
        let until = Instant::now() + SILENCE;
        let mut is_said = false;
        while self
            .interrupt
            .pause_until(Instant::now() + Duration::from_secs(1))
        {
            let now = Instant::now();
            for (name, pid) in self.fleet.pids() {
                self.resources.look(&name, pid, now);
            }
            let (mut grown, _) = self.resources.grown();
            let left_opt = self.resources.left_by_engines(&self.fleet.pids());
            grown.extend(left_opt.clone());
            if grown.is_empty() {
                break;
            }
            if now >= until {
                // What has grown is told when everything has ended.
                if let Some(left) = left_opt {
                    self.load.violation(left);
                }
                break;
            }
            if !is_said {
                println!(
                    "waiting for up to {SILENCE:?} for what the strikes left behind: {}",
                    grown.join("; ")
                );
                is_said = true;
            }
        }
    }
}

/// Whether the others went on, and whether the rate, and the rank itself, came back.
fn judge(load: &Load, blow: Blow, usual: f64, struck: Instant, repaired: Instant) {
    let Blow { target, strike, .. } = blow;
    let done = lock(&load.done).clone();
    let until = repaired + RECOVERY + Duration::from_millis(500);
    let back = watch::reached(&done, usual * BACK, repaired, until);
    let during = watch::usual_rate(&done, struck, repaired);
    let own: Vec<_> = done
        .iter()
        .copied()
        .filter(|done| match target {
            Target::Rank(rank) if rank < RANKS => done.prefill == rank,
            Target::Rank(rank) => done.decode == rank - RANKS,
            Target::Bootstrap => true,
        })
        .collect();
    let share = if target == Target::Bootstrap {
        1.0
    } else {
        RANKS as f64
    };
    let own_back = watch::reached(&own, usual * OWN_BACK / share, repaired, until);
    let seconds = |time: Option<Duration>| {
        time.map_or("not".to_owned(), |time| {
            format!("{:.1} s", time.as_secs_f64())
        })
    };
    println!(
        "{strike:?} {}: for {:.1} s; {usual:.0} requests/s before, {during:.0} during; back after {}, \
         its own after {}; {} under way, {} quarantined, {} done, {} failed",
        target.name(),
        (repaired - struck).as_secs_f64(),
        seconds(back),
        seconds(own_back),
        load.under_way.load(Ordering::Acquire),
        load.quarantined.load(Ordering::Acquire),
        done.len(),
        lock(&load.failures).values().sum::<usize>(),
    );
    let name = target.name();
    if repaired - struck > Duration::from_millis(600) && during < usual * GOING_ON {
        load.violation(format!(
            "{name}: while it was away others did {during:.0} of {usual:.0} requests/s"
        ));
    }
    if back.is_none_or(|back| back > RECOVERY) {
        load.violation(format!(
            "{name}: the rate was not back {RECOVERY:?} after the repair"
        ));
    }
    if own_back.is_none_or(|back| back > RECOVERY) {
        load.violation(format!(
            "{name}: its own rate was not back {RECOVERY:?} after the repair"
        ));
    }
}

fn report(load: &Load, strikes: usize, judged: usize) {
    let done = lock(&load.done).len();
    println!(
        "{strikes} strikes; {done} requests succeeded, {:.1} GB compared; resources of {judged} \
         processes judged; {} requests' places could not be proved safe",
        (done * REQUEST_BYTES) as f64 / 1e9,
        load.lost.load(Ordering::Acquire),
    );
    let mut failures: Vec<_> = lock(&load.failures).clone().into_iter().collect();
    failures.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    for (reason, count) in failures {
        println!("{count:6} failed: {reason}");
    }
    if done == 0 {
        load.violation("no request succeeded".to_owned());
    }
}

#[cfg(test)]
mod checks {
    use super::*;
    use fleet::Strike;
    use load::Done;

    /// What is said of a strike on decode 2 from the third to the fourth second, when each rank did
    /// so many requests in every tenth of a second; `rates` is asked with the time in seconds.
    fn judged(rates: impl Fn(f64, usize) -> usize) -> Vec<String> {
        let load = Load::new(RANKS, Vec::new(), Random::from_seed(1), 1);
        let begun = Instant::now();
        let at = |seconds: f64| begun + Duration::from_secs_f64(seconds);
        for tenth in 0..70 {
            let seconds = f64::from(tenth) / 10.0;
            for decode in 0..RANKS {
                let done = Done {
                    at: at(seconds),
                    prefill: 0,
                    decode,
                };
                let count = rates(seconds, decode);
                lock(&load.done).extend(std::iter::repeat_n(done, count));
            }
        }
        let blow = Blow {
            target: Target::Rank(RANKS + 2),
            strike: Strike::Stop,
            outage: Duration::from_secs(1),
        };
        judge(&load, blow, 400.0, at(3.0), at(4.0));
        lock(&load.violations).clone()
    }

    #[test]
    fn the_command_line_is_sound_and_refuses_what_it_does_not_know() {
        <Cli as clap::CommandFactory>::command().debug_assert();
        let parse = |arguments: &[&str]| {
            let name = std::iter::once("ferry-chaos");
            Cli::try_parse_from(name.chain(arguments.iter().copied()))
        };
        let cli = parse(&["--links", "--seconds", "60", "--seed", "7"]).expect("it is sound");
        assert_eq!((cli.links, cli.seconds, cli.seed), (true, 60, Some(7)));
        for bad in [
            &["--seconds", "soon"][..],
            &["--seconds", "19"],
            &["--seconds", "-60"],
            &["--seconds", "86401"],
            &["--seed", "x"],
            &["--link"],
            &["links"],
        ] {
            let error = parse(bad).expect_err("it is refused");
            assert_eq!(error.exit_code(), 2, "{bad:?}: {error}");
        }
    }

    #[test]
    fn a_rate_that_does_not_come_back_in_time_is_told() {
        let is_away = |seconds: f64, decode: usize, until: f64| {
            decode == 2 && (3.0..until).contains(&seconds)
        };
        let rate = |until: f64| {
            judged(move |seconds, decode| {
                if is_away(seconds, decode, until) {
                    0
                } else {
                    10
                }
            })
        };
        assert_eq!(rate(4.0), [""; 0]);
        assert_eq!(rate(5.5), [""; 0]);
        let late = "decode 2: its own rate was not back 2s after the repair";
        assert_eq!(rate(6.4), [late]);
        let slow = judged(|seconds, _| if seconds < 4.0 { 10 } else { 6 });
        assert_eq!(
            slow,
            ["decode 2: the rate was not back 2s after the repair"]
        );
        let all = judged(|seconds, _| if (3.0..4.0).contains(&seconds) { 1 } else { 10 });
        let others = "decode 2: while it was away others did 40 of 400 requests/s";
        assert_eq!(all, [others]);
    }
}

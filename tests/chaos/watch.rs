//! What the processes use, and how fast requests are done.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::descriptors::{self, Kinds};
use crate::load::Done;

/// A process's use of what must not grow.
#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Private memory, KiB.
    anonymous_kib: usize,
    threads: usize,
    descriptors: usize,
    /// Mappings of pools, its own and peers'.
    pools: usize,
}

/// What a process may use more of at its end than when it was warm.
const SLACK: Usage = Usage {
    anonymous_kib: 24 << 10,
    threads: 6,
    descriptors: 12,
    pools: 2,
};

#[derive(Clone, Debug)]
struct Sample {
    at: Instant,
    usage: Usage,
    descriptors: Kinds,
}

/// Samples of every process, by name and pid.
#[derive(Debug, Default)]
pub struct Resources(BTreeMap<(String, u32), Vec<Sample>>);

/// How long a process runs before what it uses counts as its measure.
const WARM: Duration = Duration::from_secs(8);

const DESCRIPTORS: &str = "descriptors";

impl Resources {
    /// Looks at a process; one that has gone is not noted.
    pub fn look(&mut self, name: &str, pid: u32, at: Instant) {
        let folder = |what: &str| {
            let read = std::fs::read_dir(format!("/proc/{pid}/{what}"));
            read.ok().map(Iterator::count)
        };
        let text = |what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).ok();
        let sample = || {
            let status = text("status")?;
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("RssAnon:"))?;
            let maps = text("maps")?;
            let descriptors = descriptors::of(pid)?;
            let usage = Usage {
                anonymous_kib: line.split_whitespace().next()?.parse().ok()?,
                threads: folder("task")?,
                // How many connections its engine keeps to it is its engine's doing.
                descriptors: descriptors.values().sum::<usize>()
                    - descriptors::api_connections(&descriptors),
                pools: maps.lines().filter(|line| line.contains("memfd:")).count(),
            };
            Some(Sample {
                at,
                usage,
                descriptors,
            })
        };
        if let Some(sample) = sample() {
            self.0
                .entry((name.to_owned(), pid))
                .or_default()
                .push(sample);
        }
    }

    /// What grew in processes that lived long enough to tell; and how many were looked at.
    pub fn grown(&self) -> (Vec<String>, usize) {
        let mut grown = Vec::new();
        let mut judged = 0;
        for ((name, pid), samples) in &self.0 {
            let Some(first) = samples.first() else {
                continue;
            };
            let warm: Vec<_> = samples
                .iter()
                .filter(|sample| sample.at - first.at >= WARM)
                .collect();
            let &[one, two, .., before, last] = &warm[..] else {
                continue;
            };
            judged += 1;
            type Part = fn(&Usage) -> usize;
            let parts: [(&str, Part); 4] = [
                ("KiB of memory", |of| of.anonymous_kib),
                ("threads", |of| of.threads),
                (DESCRIPTORS, |of| of.descriptors),
                ("mapped pools", |of| of.pools),
            ];
            for (what, part) in parts {
                let of = |sample: &Sample| part(&sample.usage);
                let (then, now) = (of(one).max(of(two)), of(before).min(of(last)));
                if now > then + part(&SLACK) {
                    let mut told =
                        format!("{name} ({pid}): {then} {what} when warm, {now} at its end");
                    let more = descriptors::more(&two.descriptors, &last.descriptors);
                    if what == DESCRIPTORS && !more.is_empty() {
                        told = format!("{told} ({more})");
                    }
                    grown.push(told);
                }
            }
        }
        (grown, judged)
    }

    /// Connections to services that run which no engine has any more, with what a closing one takes.
    pub fn left_by_engines(&self, pids: &[(String, u32)]) -> Option<String> {
        let last = pids.iter().filter_map(|of| self.0.get(of)?.last());
        let served: usize = last
            .map(|sample| descriptors::api_connections(&sample.descriptors))
            .sum();
        let held = descriptors::held_by_the_load();
        (served > held + pids.len() + SLACK.descriptors).then(|| {
            format!("services have {served} connections to their API, and the load holds {held}")
        })
    }
}

/// Requests per second over the windows of half a second that begin between two instants.
const WINDOW: Duration = Duration::from_millis(500);
const STEP: Duration = Duration::from_millis(100);

fn rate_at(done: &[Done], from: Instant) -> f64 {
    let begin = done.partition_point(|done| done.at < from);
    let end = done.partition_point(|done| done.at < from + WINDOW);
    (end.saturating_sub(begin)) as f64 / WINDOW.as_secs_f64()
}

/// The middle of the rates between two instants.
pub fn usual_rate(done: &[Done], from: Instant, to: Instant) -> f64 {
    let mut rates = Vec::new();
    let mut at = from;
    while at + WINDOW <= to {
        rates.push(rate_at(done, at));
        at += STEP;
    }
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
}

/// When after an instant a rate was reached first, and kept for one window.
pub fn reached(done: &[Done], rate: f64, from: Instant, to: Instant) -> Option<Duration> {
    let mut at = from;
    while at + WINDOW <= to {
        if rate_at(done, at) >= rate {
            return Some(at - from);
        }
        at += STEP;
    }
    None
}

#[cfg(test)]
mod checks {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    use tests::process::children;

    use super::*;

    /// Looks at a shell that runs these lines, before and after them as if for twenty seconds each.
    fn grown(script: &str) -> Vec<String> {
        let mut shell = Command::new("bash")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell starts");
        let begun = Instant::now();
        let mut resources = Resources::default();
        let pid = shell.id();
        let mut look = |seconds| {
            resources.look("shell", pid, begun + Duration::from_secs(seconds));
        };
        let mut input = shell.stdin.take().expect("it is piped");
        let mut output = BufReader::new(shell.stdout.take().expect("it is piped"));
        let mut run = |script: &str| {
            writeln!(input, "{script}\necho done").expect("it reads");
            let mut said = String::new();
            output.read_line(&mut said).expect("it writes");
            assert_eq!(said, "done\n");
        };
        run("true");
        (0..20).for_each(&mut look);
        run(script);
        (20..40).for_each(&mut look);
        assert!(children(std::process::id()).contains(&pid));
        drop((input, output));
        shell.wait().expect("it ends with its input");
        let (grown, judged) = resources.grown();
        assert_eq!(judged, 1);
        grown
    }

    #[test]
    fn what_a_process_leaks_is_told() {
        assert_eq!(grown("true"), [""; 0]);
        let script: String = (0..20)
            .map(|number| format!("exec {{leaked{number}}}</dev/null\n"))
            .collect();
        let told = grown(&script);
        assert!(
            told.len() == 1
                && told[0].contains("descriptors when warm")
                && told[0].contains("(file /dev/null: "),
            "{told:?}"
        );
        let told = grown("kept=$(head -c 40000000 /dev/zero | tr '\\0' a)");
        assert!(
            told.len() == 1 && told[0].contains("KiB of memory"),
            "{told:?}"
        );
    }

    #[test]
    fn connections_of_engines_are_not_growth_unless_no_engine_has_them() {
        let begun = Instant::now();
        let of = ("decode 1".to_owned(), 77);
        let left = |connections: usize| {
            let usage = Usage {
                anonymous_kib: 9000,
                threads: 10,
                descriptors: 40,
                pools: 8,
            };
            let kind = "unix /tmp/x/api.sock".to_owned();
            let sample = Sample {
                at: begun,
                usage,
                descriptors: Kinds::from([(kind, connections)]),
            };
            Resources(BTreeMap::from([(of.clone(), vec![sample])]))
                .left_by_engines(std::slice::from_ref(&of))
        };
        assert_eq!(left(3), None);
        let told = left(500).unwrap_or_default();
        assert!(told.starts_with("services have 500 connections"), "{told}");
    }

    #[test]
    fn threads_and_pools_that_stay_are_told() {
        let begun = Instant::now();
        let sample = |seconds: u64, more: usize| Sample {
            at: begun + Duration::from_secs(seconds),
            usage: Usage {
                anonymous_kib: 9000,
                threads: 10 + more,
                descriptors: 40,
                pools: 8 + more,
            },
            descriptors: Kinds::new(),
        };
        let told = |more: usize| {
            let samples = (0..40).map(|second| sample(second, if second < 20 { 0 } else { more }));
            let of = ("decode 1".to_owned(), 77);
            Resources(BTreeMap::from([(of, samples.collect())]))
                .grown()
                .0
        };
        assert_eq!(told(0), [""; 0]);
        let threads = "decode 1 (77): 10 threads when warm, 30 at its end";
        let pools = "decode 1 (77): 8 mapped pools when warm, 28 at its end";
        assert_eq!(told(20), [threads, pools]);
    }

    #[test]
    fn the_usual_rate_is_a_middle_and_a_rate_must_be_kept_for_a_window() {
        let begun = Instant::now();
        let at = |ms: u64| begun + Duration::from_millis(ms);
        let done: Vec<_> = (0..100)
            .map(|number| Done {
                at: at(1000 + 10 * number),
                prefill: 0,
                decode: 0,
            })
            .collect();
        assert!((usual_rate(&done, at(1000), at(2000)) - 100.0).abs() < 1e-6);
        assert_eq!(
            reached(&done, 100.0, at(0), at(3000)),
            Some(Duration::from_secs(1))
        );
        assert_eq!(reached(&done, 110.0, at(0), at(3000)), None);
        assert_eq!(reached(&done, 100.0, at(1600), at(3000)), None);
    }
}

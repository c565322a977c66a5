//! Registrations at full speed and `kill -9` at random moments: every registration that was
//! answered 200 is there after the restart, none is half there.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::http::Request;
use tests::process::{BootstrapServer, program, wait_for};
use tests::random::Random;
use tests::registrations::route_body;

/// Of each of the two tests.
const ROUNDS: usize = 100;
/// Engines whose ranks register at once, so that commits have several changes.
const ENGINES: [&str; 4] = ["a", "b", "c", "d"];
const RANKS: u64 = 4;

/// The registration of one step. Each engine registers its ranks one after another, and begins a
/// generation with another page size when all are there: one change of many values.
fn step_body(step: u64) -> Value {
    let port = 2000 + step % 60_000;
    let page_size = 1 + (step / RANKS) % 4000;
    route_body(
        RANKS as u32,
        (step % RANKS) as u32,
        port as u16,
        page_size as u32,
    )
}

/// What the admin API shows of an engine after so many steps.
fn expected(steps: u64) -> Value {
    let Some(last) = steps.checked_sub(1) else {
        return json!({ "generation": null, "page_size": null, "ranks": [] });
    };
    let first = last - last % RANKS;
    let ranks = (first..steps).map(|step| {
        json!({ "tp": step % RANKS, "instance": format!("127.0.0.1:{}", 2000 + step % 60_000) })
    });
    json!({
        "generation": 1 + last / RANKS,
        "page_size": 1 + (last / RANKS) % 4000,
        "ranks": ranks.collect::<Vec<_>>(),
    })
}

fn shown(server: &BootstrapServer, engine: &str) -> Value {
    let engine = server.json(&format!("/v1/engines/{engine}"));
    let ranks = engine["ranks_present"].as_array().into_iter().flatten();
    let ranks = ranks.map(|rank| json!({ "tp": rank["tp"], "instance": rank["instance"] }));
    json!({
        "generation": engine["generation"],
        "page_size": engine["topology"]["page_size"],
        "ranks": ranks.collect::<Vec<_>>(),
    })
}

/// Registers step after step until the server is gone; returns how many were answered 200.
fn register(address: SocketAddr, first: u64, is_killed: &AtomicBool) -> u64 {
    let mut step = first;
    loop {
        let request = Request::put("/route", &step_body(step));
        match request.send(address) {
            Ok(reply) => assert_eq!(reply.status, 200, "step {step}: {}", reply.text()),
            Err(error) => {
                assert!(is_killed.load(Ordering::Acquire), "step {step}: {error}");
                return step;
            }
        }
        step += 1;
    }
}

fn command(data: &Path, has_small_log: bool) -> Command {
    let mut command = Command::new(program("bootstrap-server"));
    let listens: Vec<String> = ENGINES
        .iter()
        .map(|name| format!("127.0.0.1:0={name}"))
        .collect();
    let mut arguments = vec!["--probe-interval", "0"];
    for listen in &listens {
        arguments.extend(["--listen", listen]);
    }
    if has_small_log {
        // Some dozens of registrations.
        arguments.extend(["--store-log-bytes", "20000"]);
    }
    BootstrapServer::command(&mut command, data, &arguments);
    // Its lines of each round are only in the way, unless it does not start.
    command.env("FERRY_LOG", "error");
    command
}

/// Kills a server at some moment of its start, while it writes everything anew.
fn kill_while_it_starts(data: &Path, after: Duration) {
    let mut child = command(data, true)
        .stdout(Stdio::null())
        .spawn()
        .expect("the program starts");
    std::thread::park_timeout(after);
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
}

#[test]
fn kills_while_ranks_register_lose_nothing() {
    rounds(false);
}

#[test]
fn kills_while_it_writes_everything_anew_lose_nothing() {
    rounds(true);
}

/// With `writes_anew` the server does so again and again beside the registrations, and is killed
/// while it starts, too, when it does so always.
fn rounds(writes_anew: bool) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut random = Random::new();
    // Steps that were acknowledged for each engine.
    let mut acknowledged = [0; ENGINES.len()];
    let begun = Instant::now();
    for round in 0..ROUNDS {
        if writes_anew {
            let after = Duration::from_millis(random.below(60) as u64);
            kill_while_it_starts(folder.path(), after);
        }
        let server = BootstrapServer::spawn(&mut command(folder.path(), writes_anew));
        for (steps, name) in acknowledged.iter_mut().zip(ENGINES) {
            let found = shown(&server, name);
            // The last one may have been durable when the kill took its answer.
            let matching = [*steps, *steps + 1]
                .into_iter()
                .find(|steps| expected(*steps) == found);
            *steps = matching.unwrap_or_else(|| {
                panic!(
                    "round {round}, engine {name}: {steps} steps were acknowledged, found {found}"
                )
            });
        }
        let is_killed = AtomicBool::new(false);
        let after = Duration::from_micros(random.below(100_000) as u64);
        std::thread::scope(|scope| {
            let addresses = server.engines().to_vec();
            let is_killed = &is_killed;
            let registering: Vec<_> = addresses
                .into_iter()
                .zip(acknowledged)
                .map(|(address, first)| scope.spawn(move || register(address, first, is_killed)))
                .collect();
            std::thread::park_timeout(after);
            is_killed.store(true, Ordering::Release);
            server.kill();
            for (steps, thread) in acknowledged.iter_mut().zip(registering) {
                *steps = thread.join().expect("it ends");
            }
        });
    }
    let total: u64 = acknowledged.iter().sum();
    println!(
        "{ROUNDS} kills, {total} registrations, {:?}",
        begun.elapsed()
    );
    assert!(
        total > ROUNDS as u64,
        "{total} registrations are too few to tell"
    );
    let server = BootstrapServer::spawn(&mut command(folder.path(), writes_anew));
    wait_for("the last state", || {
        ENGINES
            .iter()
            .zip(acknowledged)
            .all(|(name, steps)| {
                let found = shown(&server, name);
                found == expected(steps) || found == expected(steps + 1)
            })
            .then_some(())
    });
}

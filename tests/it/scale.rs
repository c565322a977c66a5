//! A large fleet: 1,000 engines of 64 ranks stored, 100 of them served.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bootstrap_server::registry::{Command as Change, Registration, State};
use bootstrap_server::store::{SledStore, Store};
use tests::http::Request;
use tests::process::{BootstrapServer, program};
use tests::registrations::{route_body, route_path};

const ENGINES: usize = 1000;
const SERVED: usize = 100;
const RANKS: u32 = 64;
const MAX_RESIDENT_MIB: u64 = 300;
/// The goal is 3 s for the optimised program; this is one with all checks, beside other tests.
const MAX_START: Duration = Duration::from_secs(10);
const LOOKUPS: usize = 500;
/// As fast as with one engine, but for the noise of a busy machine.
const MAX_LOOKUP_RATIO: f64 = 1.5;

fn name(at: usize) -> String {
    format!("engine-{at:04}")
}

/// Stores engines as the server itself does.
fn store(data: &Path, engines: usize) {
    let mut state = State::default();
    for engine in 0..engines {
        for rank in 0..RANKS {
            let body = route_body(RANKS, rank, 10_000 + rank as u16, 64);
            let body = body.as_object().expect("an object");
            let registration = Registration::parse(body, false, 1).expect("a good body");
            let change = Change::PutRank(Box::new(registration));
            state
                .apply(&name(engine), &change, 1)
                .expect("a first registration");
        }
    }
    let mut store = SledStore::open(data, u64::MAX).expect("the folder is free");
    store.load().expect("it is empty");
    store.rewrite(&Arc::new(state)).expect("there is room");
}

fn start(data: &Path, served: usize) -> BootstrapServer {
    let mut command = Command::new(program("bootstrap-server"));
    let listens: Vec<String> = (0..served)
        .map(|at| format!("127.0.0.1:0={}", name(at)))
        .collect();
    let mut arguments = vec!["--probe-interval", "0"];
    for listen in &listens {
        arguments.extend(["--listen", listen]);
    }
    BootstrapServer::command(&mut command, data, &arguments);
    BootstrapServer::spawn(&mut command)
}

/// How long a lookup at the last port takes.
fn lookup(server: &BootstrapServer, rank: i64) -> Duration {
    let address = *server.engines().last().expect("a port");
    let request = Request::get(&route_path(0, 0, rank, 0));
    let begun = Instant::now();
    let reply = request.send(address).expect("an answer");
    let took = begun.elapsed();
    assert_eq!(reply.status, 200);
    assert!(reply.text().ends_with(&format!("{}}}", 10_000 + rank)));
    took
}

#[test]
fn a_thousand_engines_start_soon_take_little_memory_and_are_found_as_fast_as_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (many, one) = (folder.path().join("many"), folder.path().join("one"));
    store(&many, ENGINES);
    store(&one, 1);
    let begun = Instant::now();
    let many = start(&many, SERVED);
    lookup(&many, 0);
    let started = begun.elapsed();
    let one = start(&one, 1);
    let listed = many.json("/v1/engines")["engines"].as_array().map(Vec::len);
    // The admin API may give a page at a time.
    assert!(listed.is_some_and(|listed| listed > 0), "{listed:?}");
    let mut times = [Vec::new(), Vec::new()];
    for at in 0..LOOKUPS {
        let rank = (at % RANKS as usize) as i64;
        times[0].push(lookup(&many, rank));
        times[1].push(lookup(&one, rank));
    }
    let [many_took, one_took] = times.map(|mut times| {
        times.sort();
        times[times.len() / 2]
    });
    let resident = many.resident_mib();
    let ratio = many_took.as_secs_f64() / one_took.as_secs_f64();
    println!(
        "{ENGINES} engines of {RANKS} ranks, {SERVED} served: started in {started:?}, {resident} MiB, \
         a lookup {many_took:?}, with one engine {one_took:?}: {ratio:.2}"
    );
    assert!(started <= MAX_START, "{started:?}");
    assert!(resident <= MAX_RESIDENT_MIB, "{resident} MiB");
    assert!(ratio <= MAX_LOOKUP_RATIO, "{many_took:?} and {one_took:?}");
}

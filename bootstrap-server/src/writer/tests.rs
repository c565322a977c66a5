//! The order of drafts, the disk and answers, with a disk that ends when a test says so.

use std::sync::Mutex;

use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::registry::tests::registration;
use crate::store::{Done, Loaded, Wake};

const PATIENCE: Duration = Duration::from_secs(30);

/// A disk whose commits, and whose later writing of everything, end when the test says so.
struct SlowStore {
    begins: Arc<Mutex<mpsc::Sender<Done>>>,
    rewrites: mpsc::Sender<mpsc::Sender<()>>,
    was_rewritten: bool,
}

impl Store for SlowStore {
    fn load(&mut self) -> Result<Loaded, StoreError> {
        Ok(Loaded::default())
    }

    fn rewrite(&mut self, _state: &Arc<State>) -> Result<(), StoreError> {
        if std::mem::replace(&mut self.was_rewritten, true) {
            let (end, ended) = mpsc::channel();
            self.rewrites.send(end).unwrap();
            ended.recv_timeout(PATIENCE).unwrap();
        }
        Ok(())
    }

    fn commit(&mut self, _changes: &[Change], done: Done) {
        self.begins.lock().unwrap().send(done).unwrap();
    }

    fn tend(&mut self, _state: &Arc<State>, _wake: Wake) -> Result<(), StoreError> {
        Ok(())
    }
}

struct Bench {
    registrations: Registrations,
    begun: mpsc::Receiver<Done>,
    rewrites: mpsc::Receiver<mpsc::Sender<()>>,
    runtime: Runtime,
}

type Answer = tokio::task::JoinHandle<Result<(), WriteError>>;

impl Bench {
    fn new() -> Self {
        let (begins, begun) = mpsc::channel();
        let (rewriting, rewrites) = mpsc::channel();
        let store = SlowStore {
            begins: Arc::new(Mutex::new(begins)),
            rewrites: rewriting,
            was_rewritten: false,
        };
        let registrations = Registrations::start(
            Box::new(store),
            DamagedStore::Refuse,
            Metrics::new().unwrap(),
            Arc::new(Events::for_tests()),
        );
        Self {
            registrations: registrations.unwrap(),
            begun,
            rewrites,
            runtime: Builder::new_current_thread().enable_time().build().unwrap(),
        }
    }

    /// Hands a registration in; it is before those that are handed in later.
    fn register(&self, rank: u32, port: u16) -> Answer {
        let command = registration(9, rank, port, 64);
        let registrations = self.registrations.clone();
        let answer = self
            .runtime
            .spawn(async move { registrations.change("e", command, &Who::default()).await });
        self.runtime.block_on(tokio::task::yield_now());
        answer
    }

    fn begun(&self) -> Done {
        self.begun.recv_timeout(PATIENCE).unwrap()
    }

    fn answer(&self, answer: Answer) -> Result<(), WriteError> {
        let answer = async { tokio::time::timeout(PATIENCE, answer).await };
        self.runtime.block_on(answer).unwrap().unwrap()
    }

    fn ranks(&self) -> usize {
        let state = self.registrations.state();
        state.get("e").map_or(0, |space| space.ranks.len())
    }
}

#[test]
fn what_comes_while_the_disk_is_busy_is_stored_together() {
    let bench = Bench::new();
    let first = bench.register(0, 1024);
    let done = bench.begun();
    let rest = [
        bench.register(1, 1025),
        bench.register(2, 1026),
        bench.register(0, 1024),
    ];
    assert!(bench.begun.try_recv().is_err(), "one commit at a time");
    assert!(!first.is_finished() && bench.ranks() == 0);
    done(Ok(()));
    bench.answer(first).unwrap();
    bench.begun()(Ok(()));
    for answer in rest {
        bench.answer(answer).unwrap();
    }
    assert_eq!(bench.ranks(), 3);
}

/// Also what changed nothing beside a change that fails.
#[test]
fn what_was_drafted_on_a_failed_commit_is_refused() {
    let bench = Bench::new();
    let first = bench.register(0, 1024);
    let done = bench.begun();
    let same = bench.register(0, 1024);
    let other = bench.register(1, 1025);
    done(Err(StoreError::Commit("broken".to_owned())));
    for answer in [first, same, other] {
        let answer = bench.answer(answer);
        assert!(matches!(answer, Err(WriteError::ReadOnly(_))), "{answer:?}");
    }
    assert_eq!(bench.ranks(), 0);
    assert!(bench.registrations.trouble().is_some());
    let later = bench.register(2, 1026);
    let later = bench.answer(later);
    assert!(matches!(later, Err(WriteError::ReadOnly(_))), "{later:?}");
    assert!(bench.begun.try_recv().is_err(), "the disk is left alone");
}

#[test]
fn changes_are_refused_at_once_while_everything_is_written_anew() {
    let bench = Bench::new();
    let first = bench.register(0, 1024);
    bench.begun()(Err(StoreError::Commit("broken".to_owned())));
    bench.answer(first).unwrap_err();
    let end = bench.rewrites.recv_timeout(PATIENCE).unwrap();
    let during = bench.answer(bench.register(1, 1025));
    assert!(matches!(during, Err(WriteError::ReadOnly(_))), "{during:?}");
    end.send(()).unwrap();
    let until = Instant::now() + PATIENCE;
    while bench.registrations.trouble().is_some() {
        assert!(Instant::now() < until, "changes are not taken again");
        std::thread::yield_now();
    }
    let later = bench.register(2, 1026);
    bench.begun()(Ok(()));
    bench.answer(later).unwrap();
    assert_eq!(bench.ranks(), 1);
}

/// What is so already in a draft is answered when that is durable, not before.
#[test]
fn a_repeated_registration_waits_for_the_first() {
    let bench = Bench::new();
    let first = bench.register(0, 1024);
    let done = bench.begun();
    let same = bench.register(0, 1024);
    // What is answered at once is answered behind what waited before it.
    let refused = bench.registrations.clone();
    let unknown = bench.runtime.spawn(async move {
        refused
            .change("f", Command::DeleteEngine, &Who::default())
            .await
    });
    bench.runtime.block_on(tokio::task::yield_now());
    assert!(!first.is_finished() && !same.is_finished() && !unknown.is_finished());
    done(Ok(()));
    for answer in [first, same] {
        bench.answer(answer).unwrap();
    }
    let unknown = bench.answer(unknown);
    assert!(
        matches!(unknown, Err(WriteError::Refused(_))),
        "{unknown:?}"
    );
    assert!(bench.begun.try_recv().is_err(), "nothing changed");
}

#[test]
fn an_end_waits_for_the_disk() {
    let bench = Bench::new();
    let ended = bench.registrations.ended();
    let first = bench.register(0, 1024);
    let done = bench.begun();
    let Bench {
        registrations,
        runtime,
        ..
    } = bench;
    drop(registrations);
    done(Ok(()));
    runtime.block_on(async {
        tokio::time::timeout(PATIENCE, first)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        tokio::time::timeout(PATIENCE, ended).await.unwrap();
    });
}

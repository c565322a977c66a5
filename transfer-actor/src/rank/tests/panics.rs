//! A component actor that panics takes its room with it, and nothing else.

use actix::fut::wrap_future;
use actix::prelude::*;
use common::ids::{ComponentId, Room};
use futures::FutureExt;

use super::*;
use crate::component::ComponentActor;
use crate::messages::Handle;
use crate::rank::RankActor;
use crate::rank::core::{ChunkCommand, Event};

/// A component actor panics when it gets this.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
struct Panic;

impl Handler<Panic> for ComponentActor {
    type Result = ();

    fn handle(&mut self, _: Panic, _: &mut Context<Self>) {
        panic!("a test wants this actor to panic");
    }
}

/// A rank does this, and lets its actors of a component panic before they have done anything of it.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct PanicAfter(Event, ComponentId);

impl Handler<PanicAfter> for RankActor {
    type Result = ();

    fn handle(&mut self, PanicAfter(event, component): PanicAfter, context: &mut Context<Self>) {
        Handler::handle(self, Handle(event, None), context).expect("it is accepted");
        let components = self.components.iter();
        for (_, address) in components.filter(|(key, _)| key.component == component) {
            context.spawn(wrap_future(address.send(Panic).map(|_| ())));
        }
    }
}

/// A rank's actor panics when it gets this.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
struct PanicNow;

impl Handler<PanicNow> for RankActor {
    type Result = ();

    fn handle(&mut self, _: PanicNow, _: &mut Context<Self>) {
        panic!("a test wants this actor to panic");
    }
}

/// A rank does this and panics, so that nothing of what it asks of others is delivered.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct PanicWith(Event);

impl Handler<PanicWith> for RankActor {
    type Result = ();

    fn handle(&mut self, PanicWith(event): PanicWith, context: &mut Context<Self>) {
        Handler::handle(self, Handle(event, None), context).expect("it is accepted");
        panic!("a test wants this actor to panic");
    }
}

/// How many writes are under way.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "usize")]
struct CountWrites;

impl Handler<CountWrites> for ComponentActor {
    type Result = usize;

    fn handle(&mut self, _: CountWrites, _: &mut Context<Self>) -> usize {
        self.writes_under_way()
    }
}

impl Handler<CountWrites> for RankActor {
    type Result = ResponseFuture<usize>;

    fn handle(&mut self, _: CountWrites, _: &mut Context<Self>) -> Self::Result {
        let asked = self
            .components
            .values()
            .map(|address| address.send(CountWrites));
        let asked = futures::future::join_all(asked);
        Box::pin(asked.map(|counts| counts.into_iter().flatten().sum()))
    }
}

async fn panic(rank: &TestRank) {
    panic_by(rank, PanicNow).await;
}

async fn panic_by<M>(rank: &TestRank, message: M)
where
    M: Message<Result = ()> + Send + 'static,
    RankActor: Handler<M>,
{
    let fallen = rank.rank.address.next().await.expect("it runs");
    let sent = fallen.send(message).await;
    sent.expect_err("nobody answers");
    let again = rank.rank.address.after(Some(&fallen)).await;
    again.expect("it is restarted");
}

fn rank_panics(rank: &TestRank) -> u64 {
    let role = rank.rank.role().name();
    rank.metrics.rank_panics.with_label_values(&[role]).get()
}

fn rank_count(rank: &TestRank) -> i64 {
    let role = rank.rank.role().name();
    rank.metrics.ranks.with_label_values(&[role]).get()
}

async fn cross(prefill: &TestRank, decode: &TestRank, room: u64, bootstrap: &str) {
    meet(prefill, decode, room, bootstrap).await;
    prefill.send(room, false).await;
    prefill.send(room, true).await;
    decode.reach(room, RoomStatus::Success).await;
    prefill.reach(room, RoomStatus::Success).await;
}

/// Either rank's actor panics while a room is open: both engines hear why, nothing is registered
/// anew by hand, and the next room works.
async fn panics_of(role: Role) {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    let decode = start(Role::Decode, (1, 0), &bootstrap, None).await;
    cross(&prefill, &decode, 1, &bootstrap).await;
    meet(&prefill, &decode, 7, &bootstrap).await;
    let (fallen, other) = match role {
        Role::Prefill => (&prefill, &decode),
        Role::Decode => (&decode, &prefill),
    };
    let control = fallen.rank.control().to_owned();
    // Whoever waits while it panics is answered by the successor.
    let waiting = {
        let rank = fallen.rank.clone();
        actix_rt::spawn(async move { rank.wait(7, Some(RoomStatus::Success), DEADLINE).await })
    };
    tokio::task::yield_now().await;
    fallen.rank.observe().await.expect("it runs");
    let began = Instant::now();
    panic(fallen).await;
    let view = waiting.await.expect("no panic").expect("it is known");
    assert_eq!(view.status, RoomStatus::Failed);
    assert!(
        view.reason.clone().expect("a reason").contains("panicked"),
        "{view:?}"
    );
    let view = other.wait(7, RoomStatus::Success).await;
    assert_eq!(view.status, RoomStatus::Failed);
    // An ABORT carries no reason.
    let told = match role {
        Role::Prefill => "panicked",
        Role::Decode => "gave the room up",
    };
    assert!(
        view.reason.clone().expect("a reason").contains(told),
        "{view:?}"
    );
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    assert_eq!((rank_panics(fallen), rank_count(fallen)), (1, 1));
    assert!(fallen.rank.is_alive() && !fallen.rank.is_deaf());
    let snapshot = fallen.rank.observe().await.expect("it runs");
    assert_eq!(snapshot.control, control);
    assert_eq!(snapshot.peers.len(), usize::from(role == Role::Prefill));
    // The decode's ABORT has arrived then, and cannot be taken for one of the next use.
    for rank in [&prefill, &decode] {
        eventually_safe(rank, 7).await;
    }
    for room in [1, 7] {
        prefill.rank.clear(room).await.expect("it is known");
        decode.rank.clear(room).await.expect("it is known");
    }
    cross(&prefill, &decode, 7, &bootstrap).await;
    let snapshot = prefill.rank.observe().await.expect("it runs");
    assert_eq!(snapshot.sessions.len(), 1);
}

#[actix_rt::test]
async fn a_prefill_rank_that_panics_is_restarted_and_tells_its_peers() {
    panics_of(Role::Prefill).await;
}

#[actix_rt::test]
async fn a_decode_rank_that_panics_is_restarted_and_tells_its_peers() {
    panics_of(Role::Decode).await;
}

#[actix_rt::test]
async fn a_write_that_outlives_its_ranks_actor_is_given_up_and_reported_to_the_next() {
    let bootstrap = bootstrap_server();
    let slow = "stall:kv".parse().expect("a fault");
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, Some(slow)).await;
    let decode = start(Role::Decode, (1, 0), &bootstrap, None).await;
    meet(&prefill, &decode, 7, &bootstrap).await;
    prefill.send(7, false).await;
    let deadline = Instant::now() + DEADLINE;
    while prefill
        .rank
        .address
        .send(CountWrites)
        .await
        .expect("it runs")
        == 0
    {
        assert!(Instant::now() < deadline, "no write begins");
    }
    panic(&prefill).await;
    prefill.wait(7, RoomStatus::Success).await;
    eventually_safe(&prefill, 7).await;
    eventually_safe(&decode, 7).await;
}

/// An actor does not take a message whose sender has gone, so work may be lost that the rules
/// count: nothing but asking its actor tells that it was never begun.
#[actix_rt::test]
async fn work_that_a_panic_kept_from_its_actor_holds_nothing() {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    let decode = start(Role::Decode, (1, 0), &bootstrap, None).await;
    meet(&prefill, &decode, 7, &bootstrap).await;
    let chunk = Event::Chunk {
        room: Room::new(7).expect("a room"),
        chunk: ChunkCommand {
            kv_indices: vec![0, 1],
            ..ChunkCommand::default()
        },
    };
    panic_by(&prefill, PanicWith(chunk)).await;
    eventually_safe(&prefill, 7).await;
    eventually_safe(&decode, 7).await;
    for rank in [&prefill, &decode] {
        rank.rank.clear(7).await.expect("it is known");
    }
    let before = decode.pool.contents();
    assert!(
        before[0].iter().all(|byte| *byte == before[0][0]),
        "no byte was written"
    );
    cross(&prefill, &decode, 7, &bootstrap).await;
}

/// Waits until the rank says that a failed room's memory is safe.
async fn eventually_safe(rank: &TestRank, room: u64) {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let view = rank.rank.wait(room, None, Duration::ZERO).await;
        if view.expect("it is known").release_safe {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "nothing proves that the write has stopped"
        );
    }
}

#[actix_rt::test]
async fn a_rank_that_panics_again_and_again_ends_and_says_so() {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    for _ in 0..5 {
        panic(&prefill).await;
    }
    let sent = prefill.rank.address.send(PanicNow).await;
    sent.expect_err("nobody answers");
    let over = tokio::time::timeout(DEADLINE, prefill.rank.over()).await;
    over.expect("it is over");
    assert!(!prefill.rank.is_alive());
    let error = prefill.rank.observe().await.expect_err("it is over");
    assert_eq!(error.code, "rank_gone");
    assert_eq!((rank_panics(&prefill), rank_count(&prefill)), (6, 0));
    // Its peers notice by its control socket.
    let address: SocketAddr = prefill.rank.control().parse().expect("an address");
    let deadline = Instant::now() + DEADLINE;
    while std::net::TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < deadline, "its control socket is open");
        tokio::task::yield_now().await;
    }
}

fn panics(rank: &TestRank, component: &str) -> u64 {
    let counter = rank
        .metrics
        .component_panics
        .with_label_values(&[component]);
    counter.get()
}

/// Opens and announces a room on both sides.
async fn meet(prefill: &TestRank, decode: &TestRank, room: u64, bootstrap: &str) {
    prefill.open(room, bootstrap).await;
    decode.open(room, bootstrap).await;
    decode.announce(room).await;
    prefill.reach(room, RoomStatus::WaitingForInput).await;
}

#[actix_rt::test]
async fn a_panic_fails_the_room_with_its_reason_and_the_next_room_works() {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    let decode = start(Role::Decode, (1, 0), &bootstrap, None).await;
    meet(&prefill, &decode, 7, &bootstrap).await;
    let chunk = Event::Chunk {
        room: Room::new(7).expect("a room"),
        chunk: ChunkCommand {
            kv_indices: vec![0, 1],
            ..ChunkCommand::default()
        },
    };
    let panic = PanicAfter(chunk, ComponentId::Kv);
    prefill.rank.address.send(panic).await.expect("it runs");
    let view = prefill.wait(7, RoomStatus::Success).await;
    let reason = view.reason.clone().expect("a reason");
    assert!(
        reason.contains("kv") && reason.contains("panicked"),
        "{reason}"
    );
    assert!(
        !view.release_safe,
        "nobody has proved that its write has stopped"
    );
    assert_eq!(panics(&prefill, "kv"), 1);
    let view = decode.wait(7, RoomStatus::Success).await;
    assert_eq!(view.status, RoomStatus::Failed);
    assert!(view.reason.expect("a reason").contains("panicked"));

    // An idle actor's death shows when there is work for it.
    meet(&prefill, &decode, 8, &bootstrap).await;
    let panic = PanicAfter(Event::Tick, ComponentId::State(0));
    prefill.rank.address.send(panic).await.expect("it runs");
    eventually(&prefill, "both of its actors panic", |rank| {
        panics(rank, "dsa") == 2
    })
    .await;
    prefill.send(8, false).await;
    prefill.send(8, true).await;
    let view = prefill.wait(8, RoomStatus::Success).await;
    let reason = view.reason.expect("a reason");
    assert!(reason.contains("dsa"), "{reason}");

    meet(&prefill, &decode, 9, &bootstrap).await;
    prefill.send(9, false).await;
    prefill.send(9, true).await;
    decode.reach(9, RoomStatus::Success).await;
    let (sent, landed) = (prefill.pool.contents(), decode.pool.contents());
    let page = PAGE as usize;
    assert_eq!(landed[0][6 * page..7 * page], sent[0][..page]);
    for room in [7, 8, 9] {
        prefill.rank.clear(room).await.expect("it is known");
    }
    let snapshot = prefill.rank.observe().await.expect("it runs");
    assert_eq!(snapshot.components, 0);
}

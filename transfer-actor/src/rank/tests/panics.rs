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

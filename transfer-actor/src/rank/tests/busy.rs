//! A peer that is too busy to take a message for longer than a message waits.

use std::net::TcpListener;

use common::wire::{ControlMessage, KvPoll};
use zmtp::{PullSocket, PushPeer};

use super::malformed::RawDecode;
use super::*;

/// The kernel connects for a busy decode rank, which does not come to shaking hands. It would learn
/// of the end of its room from nobody else.
#[actix_rt::test]
async fn how_a_room_ended_is_said_again_to_a_peer_that_was_busy() {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    prefill.open(7, &bootstrap).await;
    let mut decode = RawDecode::new();
    let peer = PushPeer::new(prefill.rank.control(), PushOptions::default());
    for frames in [decode.register(), decode.info(7)] {
        peer.send(&frames).await.expect("it leaves");
    }
    prefill.reach(7, RoomStatus::WaitingForInput).await;

    let address = decode.inbox.local_addr();
    let elsewhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    decode.inbox = PullSocket::bind(elsewhere, zmtp::Limits::default()).expect("a port");
    let busy = once_free(|| TcpListener::bind(address)).await;
    prefill.send(7, false).await;
    prefill.send(7, true).await;
    let failures = |rank: &TestRank| {
        let failures = rank.metrics.send_failures.clone();
        failures.with_label_values(&["prefill", "connect"]).get()
    };
    eventually(&prefill, "it is not taken", |rank| failures(rank) >= 2).await;
    drop(busy);
    decode.inbox = once_free(|| PullSocket::bind(address, zmtp::Limits::default())).await;
    let ControlMessage::Status(status) = decode.receive().await else {
        panic!("a status");
    };
    assert_eq!((status.room.get(), status.poll), (7, KvPoll::Success));
}

/// Binds as soon as whoever had the port has let it go.
async fn once_free<T>(bind: impl Fn() -> std::io::Result<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        match bind() {
            Ok(bound) => return bound,
            Err(error) if Instant::now() >= deadline => panic!("{error}"),
            Err(_) => actix_rt::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

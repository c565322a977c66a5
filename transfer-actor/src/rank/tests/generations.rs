//! Ferry ranks tell uses of a room's number apart, over their sockets.

use common::ids::{Endpoint, Room};
use common::wire::{ControlMessage, FerryTrailer, KvPoll, Release, Status, TransferInfo};
use zmtp::PushPeer;

use super::*;

const ROOM: u64 = 7;

/// Takes the room through one use, from both sides.
async fn use_once(prefill: &TestRank, decode: &TestRank, bootstrap: &str) {
    begin(prefill, decode, bootstrap).await;
    finish(prefill, decode).await;
    for rank in [prefill, decode] {
        rank.rank.clear(ROOM).await.expect("it is known");
    }
}

async fn begin(prefill: &TestRank, decode: &TestRank, bootstrap: &str) {
    prefill.open(ROOM, bootstrap).await;
    decode.open(ROOM, bootstrap).await;
    decode.announce(ROOM).await;
    prefill.reach(ROOM, RoomStatus::WaitingForInput).await;
}

async fn finish(prefill: &TestRank, decode: &TestRank) {
    prefill.send(ROOM, false).await;
    prefill.send(ROOM, true).await;
    for rank in [prefill, decode] {
        rank.reach(ROOM, RoomStatus::Success).await;
    }
}

async fn send_of(to: &TestRank, message: &ControlMessage, generation: u64) {
    let trailer = FerryTrailer {
        generation: Some(generation),
        ..FerryTrailer::default()
    };
    let frames = message.encode_with_trailer(Release::NEWEST, &trailer);
    let peer = PushPeer::new(to.rank.control(), PushOptions::default());
    peer.send(&frames.expect("it can be written"))
        .await
        .expect("it is sent");
}

fn late(rank: &TestRank, kind: &str) -> u64 {
    let labels = [rank.rank.role().name(), kind];
    rank.metrics.late_messages.with_label_values(&labels).get()
}

#[actix_rt::test]
async fn late_messages_of_an_older_use_are_dropped_and_counted() {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    let decode = start(Role::Decode, (1, 0), &bootstrap, None).await;
    // By its end they have met.
    use_once(&prefill, &decode, &bootstrap).await;
    begin(&prefill, &decode, &bootstrap).await;
    let view = decode.wait(ROOM, RoomStatus::WaitingForInput).await;
    let older = view.generation - 1;
    let room = Room::new(ROOM).expect("a room");
    let (host, port) = decode.rank.control().rsplit_once(':').expect("an address");
    let other_places = ControlMessage::TransferInfo(TransferInfo {
        room,
        endpoint: Endpoint::new(host, port.parse().expect("a port")),
        engine_key: decode.rank.engine_key().to_owned(),
        kv_indices: vec![0, 1, 2, 7],
        aux_index: Some(0),
        state_indices: vec![vec![0]],
        required_dst_info_num: 1,
        decode_prefix_len: None,
        grant_opt: None,
    });
    let infos = late(&prefill, "transfer_info");
    send_of(&prefill, &other_places, older).await;
    eventually(&prefill, "the older announcement is counted", |rank| {
        late(rank, "transfer_info") == infos + 1
    })
    .await;
    let statuses = late(&decode, "status");
    for poll in [KvPoll::Success, KvPoll::Failed] {
        let status = ControlMessage::Status(Status {
            room,
            poll,
            prefill_rank: 0,
            reason: None,
        });
        send_of(&decode, &status, older).await;
    }
    eventually(&decode, "the older statuses are counted", |rank| {
        late(rank, "status") == statuses + 2
    })
    .await;
    let view = decode.wait(ROOM, RoomStatus::WaitingForInput).await;
    assert_eq!(view.status, RoomStatus::WaitingForInput, "{view:?}");
    finish(&prefill, &decode).await;
}

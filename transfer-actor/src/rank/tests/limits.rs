//! A rank under what strangers can send: it stays small, and its own rooms go on.
//!
//! `make test-limits` runs these with their full figures, optimised.

use common::ids::Endpoint;
use common::ids::Room;
use common::wire::{Bootstrap, ControlMessage, Frame, Release};
use zmtp::{PullSocket, PushPeer};

use super::*;

/// How many messages a flood has, unless `FERRY_FLOOD` says otherwise.
const FLOOD: u64 = 20_000;
/// How many peers are connected, unless `FERRY_PEERS` says otherwise.
const PEERS: u64 = 100;
/// What a rank may grow by under a flood, in bytes; far less than what is sent.
const GROWTH: u64 = 128 * 1024 * 1024;
/// How many messages are on their way at once.
const WINDOW: usize = 256;

fn figure(variable: &str, otherwise: u64) -> u64 {
    let given = std::env::var(variable).ok();
    given.map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Memory of this process that is in use, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("proc");
    let pages: u64 = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("a number");
    pages * 4096
}

/// Sends a flood while one room after another is served; how many were, and the slowest.
async fn flood(
    messages: impl Fn(u64) -> Vec<Frame>,
    bootstrap: &str,
    prefill: &TestRank,
    decode: &TestRank,
) -> (u64, Duration) {
    let count = figure("FERRY_FLOOD", FLOOD);
    // Whoever floods a rank may be held back for long.
    let options = PushOptions {
        send_timeout: DEADLINE,
        ..PushOptions::default()
    };
    let peer = PushPeer::new(prefill.rank.control(), options);
    let is_over = std::cell::Cell::new(false);
    let sending = async {
        let mut waiting = std::collections::VecDeque::new();
        for number in 0..count {
            let frames = messages(number);
            waiting.push_back(peer.enqueue(&frames).expect("there is space"));
            if waiting.len() >= WINDOW {
                let sent = waiting.pop_front().expect("it is not empty");
                sent.await.expect("an answer").expect("it leaves");
            }
        }
        for sent in waiting {
            sent.await.expect("an answer").expect("it leaves");
        }
        is_over.set(true);
    };
    let serving = async {
        let (mut served, mut slowest) = (0, Duration::ZERO);
        while !is_over.get() {
            let begun = Instant::now();
            serve(1 << 40 | served, bootstrap, prefill, decode).await;
            slowest = slowest.max(begun.elapsed());
            served += 1;
        }
        (served, slowest)
    };
    futures::join!(sending, serving).1
}

/// One whole request.
async fn serve(room: u64, bootstrap: &str, prefill: &TestRank, decode: &TestRank) {
    prefill.open(room, bootstrap).await;
    decode.open(room, bootstrap).await;
    decode.announce(room).await;
    prefill.reach(room, RoomStatus::WaitingForInput).await;
    prefill.send(room, false).await;
    prefill.send(room, true).await;
    decode.reach(room, RoomStatus::Success).await;
    for rank in [prefill, decode] {
        rank.rank.clear(room).await.expect("it is known");
    }
}

async fn pair() -> (String, TestRank, TestRank) {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    let decode = start(Role::Decode, (1, 0), &bootstrap, None).await;
    serve(1 << 41, &bootstrap, &prefill, &decode).await;
    (bootstrap, prefill, decode)
}

fn check(what: &str, before: u64, (served, slowest): (u64, Duration)) {
    let count = figure("FERRY_FLOOD", FLOOD);
    let grown = resident().saturating_sub(before);
    println!(
        "{count} {what}: {} KiB more, {served} rooms served meanwhile, the slowest in {slowest:?}",
        grown / 1024
    );
    assert!(grown < GROWTH, "{grown} bytes");
    assert!(served > 0 && slowest < Duration::from_secs(5));
}

#[actix_rt::test]
async fn rooms_that_nobody_opens_are_bounded_and_those_of_the_engine_are_served() {
    let (bootstrap, prefill, decode) = pair().await;
    let before = resident();
    let stranger = Endpoint::new("127.0.0.1", 1);
    let orphan = |number: u64| {
        let bootstrap = Bootstrap {
            room: Room::new(number).expect("a room"),
            reply_to: stranger.clone(),
        };
        let message = match number % 2 {
            0 => ControlMessage::Bootstrap(bootstrap),
            _ => ControlMessage::TransferInfo(common::wire::TransferInfo {
                room: bootstrap.room,
                endpoint: bootstrap.reply_to,
                engine_key: "nobody".to_owned(),
                kv_indices: (0..64).collect(),
                aux_index: Some(3),
                state_indices: vec![vec![2]],
                required_dst_info_num: 1,
                decode_prefix_len: None,
                grant_opt: None,
            }),
        };
        message.encode(Release::NEWEST).expect("it fits")
    };
    let served = flood(orphan, &bootstrap, &prefill, &decode).await;
    check("orphan rooms", before, served);
    let snapshot = prefill.rank.observe().await.expect("it runs");
    assert!(snapshot.rooms.early <= Limits::default().early_rooms);
    let count = figure("FERRY_FLOOD", FLOOD);
    let dropped = prefill.metrics.orphaned.with_label_values(&["prefill"]);
    let expected = count.saturating_sub(Limits::default().early_rooms as u64);
    eventually(&prefill, "orphans are counted", |_| {
        dropped.get() >= expected
    })
    .await;
}

#[actix_rt::test]
async fn malformed_messages_are_counted_and_the_engines_rooms_are_served() {
    let (bootstrap, prefill, decode) = pair().await;
    let before = resident();
    let kinds: Vec<Vec<Frame>> = [
        vec!["hello"],
        vec![""],
        vec!["MoriMsgGuard"],
        vec!["MoriMsgGuard", "7", "4", "zero"],
        vec!["MoriMsgGuard", "18446744073709551615", "9", "0"],
        vec!["ABORT", "seven"],
        vec!["BOOTSTRAP", "7", "127.0.0.1", "port"],
        vec!["AUX_DATA", "7", "0", "1", "abc", "data"],
    ]
    .into_iter()
    .map(|texts| {
        texts
            .into_iter()
            .map(|text| text.as_bytes().to_vec())
            .collect()
    })
    .collect();
    let nonsense = |number: u64| kinds[(number % kinds.len() as u64) as usize].clone();
    let served = flood(nonsense, &bootstrap, &prefill, &decode).await;
    check("malformed messages", before, served);
    let count = figure("FERRY_FLOOD", FLOOD);
    let of_kind = |kind: &str| {
        prefill
            .metrics
            .malformed
            .with_label_values(&["prefill", kind])
            .get()
    };
    let all = || {
        ["unknown", "status", "abort", "bootstrap", "aux_data"]
            .map(of_kind)
            .iter()
            .sum::<u64>()
    };
    eventually(&prefill, "all are counted", |_| all() >= count).await;
    assert_eq!(all(), count);
}

#[actix_rt::test]
async fn many_peers_are_connected_to_one_rank_and_each_is_answered() {
    let (bootstrap, prefill, decode) = pair().await;
    let (before, count) = (resident(), figure("FERRY_PEERS", PEERS));
    let begun = Instant::now();
    let mut peers = Vec::new();
    for number in 0..count {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let inbox = PullSocket::bind(address, zmtp::Limits::default()).expect("a port");
        let push = PushPeer::new(prefill.rank.control(), PushOptions::default());
        // Nobody serves it, so that each is told that its room has failed.
        let info = ControlMessage::TransferInfo(common::wire::TransferInfo {
            room: Room::new(number).expect("a room"),
            endpoint: Endpoint::new("127.0.0.1", inbox.local_addr().port()),
            engine_key: format!("peer {number}"),
            kv_indices: vec![1],
            aux_index: Some(1),
            state_indices: vec![vec![1]],
            required_dst_info_num: 1,
            decode_prefix_len: None,
            grant_opt: None,
        });
        push.send(&info.encode(Release::NEWEST).expect("it fits"))
            .await
            .expect("it leaves");
        peers.push((inbox, push));
    }
    serve(1 << 42, &bootstrap, &prefill, &decode).await;
    for number in 0..count {
        prefill.open(number, &bootstrap).await;
    }
    for (number, (inbox, _)) in peers.iter_mut().enumerate() {
        let received = tokio::time::timeout(DEADLINE, inbox.recv()).await;
        let received = received.expect("in time").expect("the socket lives");
        let message = common::wire::decode_message(&received.frames).expect("a message");
        let room = message.message.room().map(Room::get);
        assert_eq!(room, Some(number as u64), "{:?}", message.message);
    }
    serve(1 << 43, &bootstrap, &prefill, &decode).await;
    println!(
        "{count} peers: connected and answered in {:?}, {} KiB more for both ends of their sockets",
        begun.elapsed(),
        resident().saturating_sub(before) / 1024
    );
}

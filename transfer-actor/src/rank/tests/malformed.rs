//! What is no message of the protocol is counted and changes nothing.

use common::ids::{Endpoint, Room};
use common::wire::{
    ControlMessage, Frame, KvPoll, Register, Release, TransferInfo, decode_message,
};
use zmtp::{PullSocket, PushPeer};

use super::*;

/// A decode rank made by hand.
pub(super) struct RawDecode {
    engine: Engine,
    pool: Pool,
    pub(super) inbox: PullSocket,
}

impl RawDecode {
    pub(super) fn new() -> Self {
        let engine = engine("raw", None);
        let pool = Pool::new(&engine, 1);
        pool.fill(|_| UNTOUCHED);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let inbox = PullSocket::bind(address, zmtp::Limits::default()).expect("a port");
        Self {
            engine,
            pool,
            inbox,
        }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::new("127.0.0.1", self.inbox.local_addr().port())
    }

    pub(super) fn register(&self) -> Vec<Frame> {
        let buffers = &self.pool.buffers;
        let descs =
            |regions: &[Option<Region>]| regions.iter().flatten().map(Region::desc).collect();
        let states = buffers.states[0]
            .iter()
            .map(|region| region.as_ref().map(Region::desc));
        let register = Register {
            endpoint: self.endpoint(),
            engine: self.engine.desc(),
            kv: descs(&buffers.kv),
            aux: descs(&buffers.aux),
            states: vec![states.collect()],
            gpu_id: -1,
            tp_size: 1,
            engine_rank: 0,
            kv_item_len: PAGE,
            state_item_lens: vec![vec![STATE_ROW as u32]],
            state_dims: vec![Vec::new()],
            dcp_size: 1,
            dcp_rank: 0,
            state_layer_ids: vec![Vec::new()],
            kv_layer_ids: Vec::new(),
            release: Release::NEWEST,
        };
        let message = ControlMessage::Register(Box::new(register));
        message.encode(Release::NEWEST).expect("it fits")
    }

    pub(super) fn info(&self, room: u64) -> Vec<Frame> {
        let message = ControlMessage::TransferInfo(TransferInfo {
            room: Room::new(room).expect("a room"),
            endpoint: self.endpoint(),
            engine_key: "raw".to_owned(),
            kv_indices: vec![6, 5, 4, 3],
            aux_index: Some(3),
            state_indices: vec![vec![2]],
            required_dst_info_num: 1,
            decode_prefix_len: None,
            grant_opt: None,
        });
        message.encode(Release::NEWEST).expect("it fits")
    }

    pub(super) async fn receive(&mut self) -> ControlMessage {
        let received = tokio::time::timeout(DEADLINE, self.inbox.recv()).await;
        let received = received.expect("in time").expect("the socket lives");
        decode_message(&received.frames).expect("a message").message
    }
}

/// A message with one frame exchanged.
fn with(mut frames: Vec<Frame>, position: usize, frame: &[u8]) -> Vec<Frame> {
    frames[position] = frame.to_vec();
    frames
}

fn frames(texts: &[&str]) -> Vec<Frame> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// Each with the kind that it is counted as.
fn malformed(decode: &RawDecode) -> Vec<(&'static str, Vec<Frame>)> {
    let (register, info) = (decode.register(), decode.info(7));
    let guard = "MoriMsgGuard";
    let not_msgpack = [0xC1, 0xFF, 0x00];
    vec![
        ("unknown", frames(&["hello"])),
        ("unknown", frames(&[""])),
        ("unknown", vec![vec![0xFF; 4096]]),
        ("status", frames(&[guard])),
        ("status", frames(&[guard, "7", "9", "0"])),
        ("status", frames(&[guard, "7", "4", "zero"])),
        ("register", with(register.clone(), 3, b"70000")),
        ("register", with(register.clone(), 4, &not_msgpack)),
        ("register", with(register.clone(), 5, &not_msgpack)),
        ("register", with(register.clone(), 9, b"-1")),
        ("register", with(register.clone(), 11, b"1_000")),
        ("register", with(register, 12, b"abc")),
        ("transfer_info", with(info.clone(), 1, b"seven")),
        (
            "transfer_info",
            with(info.clone(), 1, b"18446744073709551615"),
        ),
        ("transfer_info", with(info.clone(), 1, b"+7")),
        ("transfer_info", with(info.clone(), 5, b"12345")),
        ("transfer_info", with(info.clone(), 7, b"\xFF\xFF\xFF\xFF")),
        ("transfer_info", with(info, 8, b" 1")),
        ("abort", frames(&["ABORT"])),
        ("abort", frames(&["ABORT", "seven"])),
        ("bootstrap", frames(&["BOOTSTRAP", "7", "127.0.0.1"])),
        (
            "bootstrap",
            frames(&["BOOTSTRAP", "7", "127.0.0.1", "port"]),
        ),
        (
            "aux_data",
            frames(&["AUX_DATA", "7", "0", "1", "abc", "data"]),
        ),
        ("abort_ack", frames(&["ABORT_ACK", "7", "rank"])),
    ]
}

#[actix_rt::test]
async fn a_malformed_message_changes_nothing_and_a_valid_one_behind_it_is_served() {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    prefill.open(7, &bootstrap).await;
    let before = prefill.rank.observe().await.expect("it runs");
    let mut decode = RawDecode::new();
    let peer = PushPeer::new(prefill.rank.control(), PushOptions::default());

    let bad = malformed(&decode);
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for (kind, frames) in &bad {
        *counts.entry(kind).or_default() += 1;
        peer.send(frames).await.expect("it leaves");
    }
    let count = |rank: &TestRank, kind: &str| {
        let counter = rank.metrics.malformed.with_label_values(&["prefill", kind]);
        counter.get()
    };
    for (kind, expected) in &counts {
        eventually(&prefill, kind, |rank| count(rank, kind) >= *expected).await;
    }
    for (kind, expected) in &counts {
        assert_eq!(count(&prefill, kind), *expected, "{kind}");
    }
    assert_eq!(
        prefill.rank.observe().await,
        Ok(before),
        "nothing has changed"
    );

    for frames in [decode.register(), decode.info(7)] {
        peer.send(&frames).await.expect("it leaves");
    }
    prefill.reach(7, RoomStatus::WaitingForInput).await;
    prefill.send(7, false).await;
    prefill.send(7, true).await;
    let ControlMessage::Status(status) = decode.receive().await else {
        panic!("a status");
    };
    assert_eq!(
        (status.room.get(), status.poll),
        (7, KvPoll::Success),
        "{status:?}"
    );
    let [k, _, state, aux] = decode.pool.contents();
    let [source_k, _, source_state, source_aux] = prefill.pool.contents();
    let page = PAGE as usize;
    assert_eq!(k[6 * page..7 * page], source_k[..page]);
    let row = STATE_ROW as usize;
    assert_eq!(state[2 * row..3 * row], source_state[row..2 * row]);
    let row = AUX_ROW as usize;
    assert_eq!(aux[3 * row..], source_aux[row..2 * row]);
}

/// A decode rank of a release that is not known waits for no timeout: each of its rooms fails at
/// once, with what was seen, until it comes back with a shape that is known.
#[actix_rt::test]
async fn a_decode_rank_of_an_unknown_shape_is_told_at_once_and_may_come_back() {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    let mut decode = RawDecode::new();
    let peer = PushPeer::new(prefill.rank.control(), PushOptions::default());
    let shapes = [
        (decode.register()[..11].to_vec(), "11 frames"),
        (
            with(decode.register(), 7, &[0xC1, 0xFF]),
            "state descriptors",
        ),
    ];
    for (room, (register, seen)) in (7..).zip(shapes) {
        prefill.open(room, &bootstrap).await;
        let begun = Instant::now();
        for frames in [register, decode.info(room)] {
            peer.send(&frames).await.expect("it leaves");
        }
        let ControlMessage::Status(status) = decode.receive().await else {
            panic!("a status");
        };
        assert!(begun.elapsed() < Duration::from_secs(1));
        assert_eq!((status.room.get(), status.poll), (room, KvPoll::Failed));
        let reason = status.reason.expect("a reason");
        assert!(reason.contains(seen), "{reason}");
        let view = prefill.wait(room, RoomStatus::Success).await;
        assert_eq!(view.reason.as_deref(), Some(reason.as_str()));
    }
    prefill.open(9, &bootstrap).await;
    for frames in [decode.register(), decode.info(9)] {
        peer.send(&frames).await.expect("it leaves");
    }
    prefill.reach(9, RoomStatus::WaitingForInput).await;
}

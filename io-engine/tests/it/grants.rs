//! Permissions to write that are taken back: from then on nothing lands under them, whatever the
//! peer does.

use std::io::{Read, Write};
use std::net::TcpStream;

use io_engine::{
    Direction, Engine, EngineConfig, Grant, Region, RemoteRegion, TransportErrorKind,
    TransportKind, WriteBatch, WritePair, is_reached_by_tcp_only,
};

use crate::support::{
    BYTES, DEADLINE, Pair, config, contents, eventually, one_run, pair, remote_of,
    through_the_wire, write,
};

const UNTOUCHED: u8 = 0xEE;

fn granted(pair: &Pair, grant: &Grant) -> RemoteRegion {
    remote_of(&pair.remote.desc()).under_grant(grant.key())
}

#[test]
fn what_comes_under_a_permission_that_was_taken_back_is_refused_and_the_session_goes_on() {
    let pair = pair(TransportKind::Tcp);
    let grant = pair.target.grant().unwrap();
    let other = pair.target.grant().unwrap();
    let to = granted(&pair, &grant);
    write(&pair.session, &pair.local, to.clone(), one_run(0, 0, 4096)).unwrap();
    assert_eq!(
        contents(&pair.target_memory)[..4096],
        contents(&pair.source_memory)[..4096]
    );
    assert!(!grant.is_over());
    grant.take_back();
    assert!(grant.is_over(), "nothing is under way");
    let before = contents(&pair.target_memory);
    for len in [64, 4096, BYTES] {
        for direction in [Direction::Write, Direction::Read] {
            let batch = WriteBatch {
                pairs: vec![WritePair {
                    local: pair.local.clone(),
                    remote: to.clone(),
                    runs: one_run(0, 0, len),
                }],
            };
            let error = pair
                .session
                .transfer(direction, batch, DEADLINE)
                .unwrap_err();
            assert_eq!(error.kind(), TransportErrorKind::BadKey, "{error}");
            assert!(error.is_quiesced(), "{error}");
        }
    }
    drop(grant);
    let error = write(&pair.session, &pair.local, to, one_run(0, 0, 64)).unwrap_err();
    assert_eq!(error, TransportErrorKind::BadKey);
    let made_up = remote_of(&pair.remote.desc()).under_grant([7; 16]);
    let error = write(&pair.session, &pair.local, made_up, one_run(0, 0, 64)).unwrap_err();
    assert_eq!(error, TransportErrorKind::BadKey);
    assert!(
        contents(&pair.target_memory) == before,
        "nothing of them landed"
    );
    // Others are as they were: another permission, the region's own key, the session itself.
    let to = granted(&pair, &other);
    write(&pair.session, &pair.local, to, one_run(0, 0, BYTES)).unwrap();
    let to = remote_of(&pair.remote.desc());
    write(&pair.session, &pair.local, to, one_run(0, 0, BYTES)).unwrap();
    assert!(pair.session.is_alive());
    assert!(contents(&pair.target_memory) == contents(&pair.source_memory));
}

#[test]
fn a_permission_is_of_the_engine_that_gave_it() {
    let (one, other) = (pair(TransportKind::Tcp), pair(TransportKind::Tcp));
    let grant = one.target.grant().unwrap();
    let error = write(
        &other.session,
        &other.local,
        granted(&other, &grant),
        one_run(0, 0, 64),
    );
    assert_eq!(error.unwrap_err(), TransportErrorKind::BadKey);
}

/// A writer that does what it is told to, byte by byte.
struct SlowWriter {
    stream: TcpStream,
    payload: usize,
    sent: usize,
}

impl SlowWriter {
    /// Connects as an engine of its own and begins to write `payload` threes to the region's front.
    fn begin(target: &Engine, region: &Region, grant: &Grant, payload: usize) -> Self {
        let tag = |extra: &[rmpv::Value], place: usize| -> [u8; 16] {
            let elements = extra[0].as_array().unwrap();
            elements[place].as_slice().unwrap().try_into().unwrap()
        };
        let instance = tag(&target.desc().extra, 4);
        let mut stream = TcpStream::connect(target.tcp_address()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let hello = [&b"FRYT"[..], &2u16.to_le_bytes(), &instance, &[9; 16]].concat();
        stream.write_all(&hello).unwrap();
        stream.read_exact(&mut [0; 6]).unwrap();
        let mut key = tag(&region.desc().extra, 1);
        key.iter_mut()
            .zip(grant.key())
            .for_each(|(byte, other)| *byte ^= other);
        let request = [
            &[1][..],
            &7u64.to_le_bytes(),
            &1u32.to_le_bytes(),
            &1u32.to_le_bytes(),
            &(payload as u64).to_le_bytes(),
            &region.id().to_le_bytes(),
            &key,
            &1u32.to_le_bytes(),
            &0u64.to_le_bytes(),
            &(payload as u64).to_le_bytes(),
        ];
        stream.write_all(&request.concat()).unwrap();
        Self {
            stream,
            payload,
            sent: 0,
        }
    }

    /// Sends so many bytes more; whether the connection took them.
    fn send(&mut self, bytes: usize) -> bool {
        let bytes = bytes.min(self.payload - self.sent);
        let is_taken = self.stream.write_all(&vec![3; bytes]).is_ok();
        self.sent += bytes;
        is_taken
    }
}

/// A target whose first half of a page has come in, and its slow writer.
fn half_way() -> (Pair, Grant, SlowWriter) {
    let pair = pair(TransportKind::Tcp);
    let grant = pair.target.grant().unwrap();
    let mut writer = SlowWriter::begin(&pair.target, &pair.remote, &grant, 64 << 10);
    writer.send(32 << 10);
    eventually("the first half is there", || {
        contents(&pair.target_memory)[(32 << 10) - 1] == 3
    });
    grant.take_back();
    assert!(!grant.is_over(), "the rest may come at any time");
    (pair, grant, writer)
}

#[test]
fn a_piece_that_was_let_in_is_waited_for() {
    let (pair, grant, mut writer) = half_way();
    assert!(writer.send(32 << 10));
    let mut answer = [0; 11];
    writer.stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[8], 0, "it is done");
    eventually("it is over", || grant.is_over());
    assert_eq!(contents(&pair.target_memory)[(64 << 10) - 1], 3);
}

#[test]
fn a_piece_that_does_not_come_to_its_end_is_ended_with_its_connection() {
    let (pair, grant, mut writer) = half_way();
    grant.end_connections();
    eventually("it is over", || grant.is_over());
    let before = contents(&pair.target_memory);
    // The writer goes on, and then begins anew by another connection: nothing of it lands.
    while writer.sent < writer.payload && writer.send(1 << 10) {}
    let mut again = SlowWriter::begin(&pair.target, &pair.remote, &grant, 64 << 10);
    assert!(again.send(64 << 10));
    let mut answer = [0; 11];
    again.stream.read_exact(&mut answer).unwrap();
    assert_ne!(answer[8], 0, "it is refused");
    assert!(contents(&pair.target_memory) == before);
    assert_eq!(before[64 << 10], UNTOUCHED);
}

#[test]
fn only_tcp_passes_the_owners_hands() {
    let desc = |transports: &[TransportKind]| {
        let mut config: EngineConfig = config("engine", TransportKind::Tcp);
        config.transports = transports.to_vec();
        through_the_wire(&Engine::start(config).unwrap().desc())
    };
    let all = desc(&[
        TransportKind::Local,
        TransportKind::Shm,
        TransportKind::Cma,
        TransportKind::Tcp,
    ]);
    let tcp = desc(&[TransportKind::Tcp]);
    let shm = desc(&[TransportKind::Shm]);
    assert!(is_reached_by_tcp_only(&all, &tcp) && is_reached_by_tcp_only(&tcp, &all));
    assert!(!is_reached_by_tcp_only(&all, &all), "they share a host");
    assert!(!is_reached_by_tcp_only(&shm, &tcp), "nothing reaches it");
    let mut elsewhere = all.clone();
    elsewhere.node_id = "another boot".to_owned();
    assert!(is_reached_by_tcp_only(&all, &elsewhere));
    elsewhere.node_id = String::new();
    assert!(!is_reached_by_tcp_only(&all, &elsewhere), "nobody knows");
    let mut foreign = tcp.clone();
    foreign.extra.clear();
    assert!(
        !is_reached_by_tcp_only(&all, &foreign),
        "it is no engine of ours"
    );
}

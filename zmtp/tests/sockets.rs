//! The sockets against each other and against libzmq, in good and in bad weather.

use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::time::timeout;
use zmtp::{Limits, PullSocket, PushOptions, PushPeer, SendError};

const DEADLINE: Duration = Duration::from_secs(30);

fn pull() -> PullSocket {
    PullSocket::bind(
        SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        Limits::default(),
    )
    .unwrap()
}

fn push(endpoint: impl ToString) -> PushPeer {
    PushPeer::new(&endpoint.to_string(), PushOptions::default())
}

async fn next(socket: &mut PullSocket) -> Vec<Vec<u8>> {
    timeout(DEADLINE, socket.recv())
        .await
        .expect("a message comes")
        .expect("the socket lives")
        .frames
}

/// The interpreter with pyzmq; says loudly when there is none.
fn python() -> Option<String> {
    let python = std::env::var("FERRY_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let found = std::process::Command::new(&python)
        .args(["-c", "import zmq"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if found {
        return Some(python);
    }
    let reason =
        format!("SKIPPED: {python} has no pyzmq (set FERRY_PYTHON to an interpreter that has)");
    println!("{reason}");
    if let Some(log) = std::env::var_os("FERRY_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .unwrap();
        writeln!(log, "{reason}").unwrap();
    }
    None
}

struct Peer {
    child: Child,
    lines: tokio::io::Lines<BufReader<tokio::process::ChildStdout>>,
}

impl Peer {
    fn start(python: &str, orders: &[&str]) -> Self {
        let mut child = Command::new(python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/peer.py"))
            .args(orders)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    async fn says(&mut self, word: &str) -> String {
        let line = timeout(DEADLINE, self.lines.next_line())
            .await
            .expect("the peer speaks");
        let line = line.unwrap().expect("the peer lives");
        line.strip_prefix(word)
            .unwrap_or_else(|| panic!("{line:?}"))
            .trim()
            .to_owned()
    }
}

#[tokio::test]
async fn libzmq_pushes_to_us() {
    let Some(python) = python() else { return };
    let mut socket = pull();
    let endpoint = format!("tcp://{}", socket.local_addr());
    let mut peer = Peer::start(&python, &["push", &endpoint, "shapes"]);
    assert_eq!(next(&mut socket).await, [b"one".to_vec()]);
    assert_eq!(
        next(&mut socket).await,
        [b"".to_vec(), b"two".to_vec(), b"".to_vec()]
    );
    let large = next(&mut socket).await;
    assert_eq!(
        large.iter().map(Vec::len).collect::<Vec<_>>(),
        [300, 1 << 20, 0]
    );
    peer.says("sent").await;
    let mut many = Peer::start(&python, &["push", &endpoint, "numbers"]);
    for number in 0..5000 {
        assert_eq!(
            next(&mut socket).await,
            [b"n".to_vec(), number.to_string().into_bytes()]
        );
    }
    many.says("sent").await;
    assert_eq!(socket.stats().rejected(), 0);
}

#[tokio::test]
async fn we_push_to_libzmq() {
    let Some(python) = python() else { return };
    let mut peer = Peer::start(&python, &["pull", "3001"]);
    let port = peer.says("port").await;
    let socket = push(format!("127.0.0.1:{port}"));
    let patient = PushOptions {
        send_timeout: DEADLINE,
        ..PushOptions::default()
    };
    let patient = if port.is_empty() {
        socket
    } else {
        PushPeer::new(&format!("127.0.0.1:{port}"), patient)
    };
    for number in 0..3000u32 {
        patient
            .send(&[b"n".to_vec(), number.to_string().into_bytes()])
            .await
            .unwrap();
    }
    patient
        .send(&[b"".to_vec(), vec![7; 3 << 20], b"".to_vec()])
        .await
        .unwrap();
    let digits: usize = (0..3000u32).map(|number| number.to_string().len()).sum();
    let expected = format!("{} {}", 6000 + 3, 3000 + digits + (3 << 20));
    assert_eq!(peer.says("pulled").await, expected);
    peer.child.kill().await.unwrap();
}

#[tokio::test]
async fn more_peers_than_libzmq_has_sockets_by_default() {
    let Some(python) = python() else { return };
    let mut socket = pull();
    let endpoint = format!("tcp://{}", socket.local_addr());
    let mut peer = Peer::start(&python, &["crowd", &endpoint, "1100"]);
    let mut seen = vec![false; 1100];
    for _ in 0..1100 {
        let frames = next(&mut socket).await;
        let number: usize = std::str::from_utf8(&frames[1]).unwrap().parse().unwrap();
        assert!(!std::mem::replace(&mut seen[number], true), "each once");
    }
    peer.says("sent").await;
}

#[tokio::test]
async fn messages_keep_their_order_and_shape() {
    let mut socket = pull();
    let peer = push(socket.local_addr());
    for number in 0..1000u32 {
        let frames = [
            number.to_le_bytes().to_vec(),
            vec![],
            vec![1; number as usize],
        ];
        peer.send(&frames).await.unwrap();
        assert_eq!(next(&mut socket).await, frames);
    }
}

#[tokio::test]
async fn ipv6_works() {
    let mut socket = PullSocket::bind(
        SocketAddr::from((Ipv6Addr::LOCALHOST, 0)),
        Limits::default(),
    )
    .unwrap();
    push(socket.local_addr())
        .send(&[b"six".to_vec()])
        .await
        .unwrap();
    assert_eq!(next(&mut socket).await, [b"six".to_vec()]);
}

#[tokio::test]
async fn a_range_of_ports_is_searched() {
    let taken = pull();
    let port = taken.local_addr().port();
    let localhost = Ipv4Addr::LOCALHOST.into();
    let none = PullSocket::bind_range(localhost, port..=port, Limits::default());
    assert!(none.is_err(), "the only port is taken");
    let end = port.saturating_add(50);
    let next = PullSocket::bind_range(localhost, port..=end, Limits::default()).unwrap();
    assert_ne!(next.local_addr().port(), port);
}

#[tokio::test]
async fn an_absent_peer_fails_in_time_and_comes_back() {
    let address = pull().local_addr();
    let peer = push(address);
    let error = timeout(Duration::from_secs(5), peer.send(&[b"x".to_vec()]))
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(error.kind(), "connect");
    let mut socket = PullSocket::bind(address, Limits::default()).unwrap();
    peer.send(&[b"again".to_vec()]).await.unwrap();
    assert_eq!(next(&mut socket).await, [b"again".to_vec()]);
}

#[tokio::test]
async fn a_peer_that_restarts_is_used_again() {
    let mut socket = pull();
    let address = socket.local_addr();
    let peer = push(address);
    peer.send(&[b"one".to_vec()]).await.unwrap();
    next(&mut socket).await;
    drop(socket);
    let mut socket = loop {
        match PullSocket::bind(address, Limits::default()) {
            Ok(socket) => break socket,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    // A message that leaves before the end of the old connection has come is lost with it, as it
    // is with libzmq; the next one gets through.
    let received = async {
        loop {
            let _ = peer.send(&[b"two".to_vec()]).await;
            if let Ok(message) = timeout(Duration::from_millis(200), socket.recv()).await {
                break message.unwrap().frames;
            }
        }
    };
    assert_eq!(
        timeout(DEADLINE, received).await.unwrap(),
        [b"two".to_vec()]
    );
}

/// A PULL that shakes hands and then reads nothing.
async fn stuck_peer() -> (SocketAddr, tokio::task::JoinHandle<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let handle = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut greeting = [0; 64];
        stream.read_exact(&mut greeting).await.unwrap();
        stream.write_all(&greeting).await.unwrap();
        let ready =
            b"\x04\x27\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL\x08Identity\x00\x00\x00\x00";
        stream.write_all(ready).await.unwrap();
        stream
    });
    (address, handle)
}

#[tokio::test]
async fn a_peer_that_stops_reading_fails_sends_in_time() {
    let (address, stuck) = stuck_peer().await;
    let options = PushOptions {
        send_timeout: Duration::from_millis(300),
        ..PushOptions::default()
    };
    let peer = PushPeer::new(&address.to_string(), options);
    let big = vec![0; 8 << 20];
    let begun = std::time::Instant::now();
    let error = loop {
        if let Err(error) = peer.send(std::slice::from_ref(&big)).await {
            break error;
        }
    };
    assert_eq!(error.kind(), "broken", "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    drop(stuck);
}

#[tokio::test]
async fn a_full_outbox_says_so() {
    let (address, stuck) = stuck_peer().await;
    let options = PushOptions {
        send_timeout: DEADLINE,
        outbox_messages: 4,
        outbox_bytes: 32 << 20,
        ..PushOptions::default()
    };
    let peer = PushPeer::new(&address.to_string(), options);
    let big = vec![0; 12 << 20];
    let mut waiting = Vec::new();
    let full = loop {
        match peer.enqueue(std::slice::from_ref(&big)) {
            Ok(result) => waiting.push(result),
            Err(error) => break error,
        }
        assert!(waiting.len() < 100);
    };
    assert!(matches!(full, SendError::Full { .. }), "{full}");
    drop(stuck);
}

#[tokio::test]
async fn bad_peers_end_only_themselves() {
    let limits = Limits {
        max_frame_bytes: 1 << 20,
        handshake_timeout: Duration::from_millis(200),
        ..Limits::default()
    };
    let mut socket = PullSocket::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), limits).unwrap();
    let address = socket.local_addr();
    let mut greeting = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1];
    greeting.extend(b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    greeting.resize(64, 0);
    let ready = b"\x04\x27\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH\x08Identity\x00\x00\x00\x00";
    let dealer =
        b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00";
    let hello = [&greeting[..], ready].concat();
    let oversize = [&hello[..], &[2], &u64::MAX.to_be_bytes()].concat();
    let hostile: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        vec![0xff; 64],
        [&greeting[..], dealer].concat(),
        [&hello[..], &[0xf8, 1, 1]].concat(),
        oversize,
        greeting[..20].to_vec(),
    ];
    let expected = hostile.len() as u64;
    let mut connections = Vec::new();
    for bytes in hostile {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        // The socket closes by itself, also where the peer just stays.
        let mut answer = Vec::new();
        let _ = timeout(DEADLINE, stream.read_to_end(&mut answer))
            .await
            .expect("it is closed");
        connections.push(stream);
    }
    let counted = async {
        while socket.stats().rejected() < expected {
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, counted).await.unwrap();
    push(address).send(&[b"good".to_vec()]).await.unwrap();
    assert_eq!(next(&mut socket).await, [b"good".to_vec()]);
}

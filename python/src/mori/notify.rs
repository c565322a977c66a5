//! Telling the other side that a transfer has ended there: `(initiator's key, transfer's number)`.
//!
//! An engine with notifications receives over a ZeroMQ PULL socket, whose port and a random token
//! stand behind its descriptor's other elements. A peer sends `[token, key, number]` once the bytes
//! are in the target's memory; the token shows that it was given the descriptor.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use common::wire::EngineDesc;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::sync::mpsc;
use zmtp::{Limits, PullSocket, PushOptions, PushPeer};

/// First element of the tag in a descriptor.
const TAG_MAGIC: &str = "FRYN";
const TOKEN_BYTES: usize = 16;
/// Transfers that ended here and were not asked for; the oldest are forgotten.
const MAX_REMEMBERED: usize = 1 << 20;

/// Where a peer wants to be told.
#[derive(Clone, Debug)]
pub(crate) struct NotifyAddress {
    endpoint: String,
    token: [u8; TOKEN_BYTES],
}

impl NotifyAddress {
    /// `None` when the peer receives none.
    pub(crate) fn of(desc: &EngineDesc) -> Option<Self> {
        let tags = desc.extra.iter().filter_map(rmpv::Value::as_array);
        let tag = tags
            .into_iter()
            .find(|elements| elements.first().and_then(rmpv::Value::as_str) == Some(TAG_MAGIC))?;
        let port = u16::try_from(tag.get(1)?.as_u64()?).ok()?;
        let token = tag.get(2)?.as_slice()?.try_into().ok()?;
        let bare = desc.host.trim_start_matches('[').trim_end_matches(']');
        let endpoint = match bare.contains(':') {
            true => format!("[{bare}]:{port}"),
            false => format!("{bare}:{port}"),
        };
        Some(Self { endpoint, token })
    }
}

/// Something to tell.
struct Outgoing {
    address: NotifyAddress,
    frames: Vec<Vec<u8>>,
}

/// Transfers of peers that have ended here. As in the original, asking does not remove one.
#[derive(Default)]
struct Inbox {
    ended: HashMap<(String, u64), u64>,
    next: u64,
}

impl Inbox {
    fn put(&mut self, key: String, number: u64) {
        if self.ended.len() == MAX_REMEMBERED {
            let half = self.next - MAX_REMEMBERED as u64 / 2;
            self.ended.retain(|_, order| *order >= half);
        }
        self.ended.insert((key, number), self.next);
        self.next += 1;
    }
}

/// An engine's notifications: a thread that sends and receives them. It ends with this.
pub(crate) struct Notifier {
    outgoing: mpsc::UnboundedSender<Outgoing>,
    inbox: Arc<Mutex<Inbox>>,
    tag: rmpv::Value,
    own_key: String,
}

impl Notifier {
    /// Binds the socket and starts the thread.
    pub(crate) fn start(own_key: &str, bind: IpAddr) -> PyResult<Self> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            PyRuntimeError::new_err(format!(
                "notifications of engine {own_key}: {what}: {error}"
            ))
        };
        let mut token = [0; TOKEN_BYTES];
        getrandom::fill(&mut token).map_err(|error| failed("no random bytes", &error))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| failed("starting", &error))?;
        let limits = Limits {
            max_frame_bytes: 4096,
            max_message_bytes: 16 << 10,
            max_frames: 8,
            ..Limits::default()
        };
        let entered = runtime.enter();
        let socket = PullSocket::bind(SocketAddr::new(bind, 0), limits)
            .map_err(|error| failed("binding", &error))?;
        drop(entered);
        let tag = rmpv::Value::Array(vec![
            TAG_MAGIC.into(),
            socket.local_addr().port().into(),
            rmpv::Value::Binary(token.to_vec()),
        ]);
        let inbox = Arc::new(Mutex::new(Inbox::default()));
        let (outgoing, to_send) = mpsc::unbounded_channel();
        let received = Arc::clone(&inbox);
        std::thread::Builder::new()
            .name("ferry-notify".to_owned())
            .spawn(move || runtime.block_on(run(socket, token, received, to_send)))
            .map_err(|error| failed("starting a thread", &error))?;
        Ok(Self {
            outgoing,
            inbox,
            tag,
            own_key: own_key.to_owned(),
        })
    }

    /// The element to append to the engine's descriptor.
    pub(crate) fn tag(&self) -> rmpv::Value {
        self.tag.clone()
    }

    /// Tells a peer that a transfer has ended in its memory. Returns at once.
    pub(crate) fn tell(&self, address: &NotifyAddress, number: u64) {
        let outgoing = Outgoing {
            address: address.clone(),
            frames: vec![
                address.token.to_vec(),
                self.own_key.clone().into_bytes(),
                number.to_le_bytes().to_vec(),
            ],
        };
        if self.outgoing.send(outgoing).is_err() {
            tracing::warn!("a notification could not be sent because its thread has ended");
        }
    }

    /// Whether a peer has told of this transfer.
    pub(crate) fn has_ended(&self, remote_key: String, number: u64) -> bool {
        let inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        inbox.ended.contains_key(&(remote_key, number))
    }
}

async fn run(
    mut socket: PullSocket,
    token: [u8; TOKEN_BYTES],
    inbox: Arc<Mutex<Inbox>>,
    mut to_send: mpsc::UnboundedReceiver<Outgoing>,
) {
    let mut peers: HashMap<String, PushPeer> = HashMap::new();
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                Some(message) => take(&message.frames, &token, &inbox),
                None => return,
            },
            outgoing = to_send.recv() => match outgoing {
                Some(outgoing) => send(&mut peers, outgoing),
                None => return,
            },
        }
    }
}

fn take(frames: &[Vec<u8>], token: &[u8; TOKEN_BYTES], inbox: &Mutex<Inbox>) {
    let [told, key, number] = frames else {
        return tracing::warn!(frames = frames.len(), "a notification has a wrong form");
    };
    let number = <[u8; 8]>::try_from(number.as_slice()).map(u64::from_le_bytes);
    let key = String::from_utf8(key.clone());
    match (is_same(told, token), key, number) {
        (true, Ok(key), Ok(number)) => inbox
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .put(key, number),
        _ => tracing::warn!("a notification has a wrong token or form"),
    }
}

/// Compares without telling by its time how much is right.
fn is_same(told: &[u8], token: &[u8; TOKEN_BYTES]) -> bool {
    let differences = told.iter().zip(token).map(|(one, other)| one ^ other);
    told.len() == token.len() && differences.fold(0, |all, difference| all | difference) == 0
}

fn send(peers: &mut HashMap<String, PushPeer>, outgoing: Outgoing) {
    let endpoint = &outgoing.address.endpoint;
    let peer = peers
        .entry(endpoint.clone())
        .or_insert_with(|| PushPeer::new(endpoint, PushOptions::default()));
    match peer.enqueue(&outgoing.frames) {
        Ok(sent) => {
            tokio::spawn(async move {
                if let Ok(Err(error)) = sent.await {
                    tracing::warn!(%error, "a notification was not sent");
                }
            });
        }
        Err(error) => tracing::warn!(%error, "a notification was not sent"),
    }
}

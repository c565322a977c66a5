//! ZeroMQ frames in and out: the only caller of the decoder.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::ids::{Endpoint, Generation, Room};
use common::wire::{ControlMessage, Frame, decode_message, guess_kind, unreadable_sender};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use zmtp::{PullSocket, PushOptions, PushPeer, SendError};

use crate::messages::{Handle, Inbound, Malformed, PeerEnded};
use crate::rank::RankAddress;
use crate::rank::core::Event;

/// Peers whose sockets are kept; the least recently used is closed beyond that.
const MAX_OPEN_PEERS: usize = 16_384;

/// Receives for as long as the rank lives, whatever a message does to those who read it. If the
/// socket ends before the rank, the rank is deaf, and its health says so.
pub(crate) async fn serve(mut socket: PullSocket, rank: RankAddress, is_deaf: Arc<AtomicBool>) {
    loop {
        let received = AssertUnwindSafe(receive(&mut socket, &rank)).catch_unwind();
        if received.await.is_ok() {
            break;
        }
        tracing::error!("reading a control message panicked; it is dropped");
    }
    if !rank.is_over() {
        tracing::error!("a rank's control socket has ended; the rank hears nobody");
        is_deaf.store(true, Ordering::Release);
    }
}

/// Tells a rank of peers that ended their connection, for as long as it lives.
pub(crate) async fn endings(mut endings: mpsc::UnboundedReceiver<Endpoint>, rank: RankAddress) {
    while let Some(endpoint) = endings.recv().await {
        let Some(rank) = rank.next().await else {
            return;
        };
        // Of a rank that panics meanwhile the heartbeats will notice.
        let _ = rank.send(PeerEnded(endpoint)).await;
    }
}

/// A bad message is handed on with its reason and ends nothing.
async fn receive(socket: &mut PullSocket, rank: &RankAddress) {
    while let Some(received) = socket.recv().await {
        let Some(address) = rank.next().await else {
            return;
        };
        // Waiting for the mailbox is what holds the peers back when the rank is busy.
        let delivered = match decode_message(&received.frames) {
            Ok(incoming) => {
                let (mut message, ignored_frames) = (incoming.message, incoming.ignored_frames);
                let mut trailer_opt = incoming.trailer;
                if let (ControlMessage::TransferInfo(info), Some(trailer)) =
                    (&mut message, &mut trailer_opt)
                {
                    info.grant_opt = trailer.grant.take();
                }
                let generation_opt = trailer_opt.and_then(|trailer| trailer.generation);
                let generation_opt = generation_opt.map(Generation);
                let announcer_opt = announcer_of(&message);
                let delivered = address.send(Inbound {
                    message,
                    generation_opt,
                    ignored_frames,
                });
                let delivered = delivered.await;
                if delivered.is_err()
                    && let Some((room, endpoint)) = announcer_opt
                {
                    lost(rank, room, endpoint, generation_opt).await;
                }
                delivered
            }
            Err(error) => {
                let kind = guess_kind(&received.frames);
                let malformed = Malformed {
                    kind,
                    error,
                    peer: received.peer,
                    sender_opt: unreadable_sender(&received.frames),
                };
                address.send(malformed).await
            }
        };
        if delivered.is_err() {
            tracing::debug!("a control message came to a rank that was ending");
        }
    }
}

/// Who would wait in vain, if a message were lost, until a timeout.
pub(crate) fn announcer_of(message: &ControlMessage) -> Option<(Room, Endpoint)> {
    match message {
        ControlMessage::TransferInfo(info) => Some((info.room, info.endpoint.clone())),
        ControlMessage::Bootstrap(bootstrap) => Some((bootstrap.room, bootstrap.reply_to.clone())),
        _ => None,
    }
}

/// The actor panicked with an announcement, or before it came to it. It is not handed over again:
/// it may be what the actor does not survive.
async fn lost(
    rank: &RankAddress,
    room: Room,
    endpoint: Endpoint,
    generation_opt: Option<Generation>,
) {
    let Some(address) = rank.next().await else {
        return;
    };
    let event = Event::Lost {
        room,
        endpoint,
        generation_opt,
    };
    if address.send(Handle(event, None)).await.is_err() {
        tracing::debug!(%room, "nobody is left to be told that an announcement was lost");
    }
}

/// One bounded outbox for each peer.
pub(crate) struct Outboxes {
    options: PushOptions,
    /// Told of peers that ended their connection.
    ended: mpsc::UnboundedSender<Endpoint>,
    peers: HashMap<Endpoint, (u64, PushPeer)>,
    uses: u64,
}

impl Outboxes {
    /// Empty, and where the peers come out that end their connection.
    pub(crate) fn new(options: PushOptions) -> (Self, mpsc::UnboundedReceiver<Endpoint>) {
        // Bounded by the connections: each ends once.
        let (ended, endings) = mpsc::unbounded_channel();
        let outboxes = Self {
            options,
            ended,
            peers: HashMap::new(),
            uses: 0,
        };
        (outboxes, endings)
    }

    /// Puts a message into a peer's outbox, in the order of calls; the future tells how it went.
    pub(crate) fn send(
        &mut self,
        to: &Endpoint,
        frames: &[Frame],
    ) -> BoxFuture<'static, Result<(), SendError>> {
        self.uses += 1;
        if self.peers.len() >= MAX_OPEN_PEERS && !self.peers.contains_key(to) {
            let oldest = self.peers.iter().min_by_key(|(_, (used, _))| *used);
            if let Some(oldest) = oldest.map(|(endpoint, _)| endpoint.clone()) {
                self.peers.remove(&oldest);
            }
        }
        let (uses, options) = (self.uses, self.options);
        let ended = &self.ended;
        let peer = self.peers.entry(to.clone()).or_insert_with(|| {
            let (ended, endpoint) = (ended.clone(), to.clone());
            let on_end = move || {
                // A rank that is gone needs to know nothing.
                let _ = ended.send(endpoint.clone());
            };
            (uses, PushPeer::watched(&to.to_string(), options, on_end))
        });
        peer.0 = uses;
        let (endpoint, queued) = (to.to_string(), peer.1.enqueue(frames));
        Box::pin(async move {
            let closed = |_| SendError::Broken {
                endpoint,
                reason: "the socket was closed".to_owned(),
            };
            queued?.await.map_err(closed)?
        })
    }

    /// Closes a peer's socket.
    pub(crate) fn close(&mut self, to: &Endpoint) {
        self.peers.remove(to);
    }
}

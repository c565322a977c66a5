//! ZeroMQ frames in and out: the only caller of the decoder.

use std::collections::HashMap;

use actix::Addr;
use common::ids::{Endpoint, Generation};
use common::wire::{Frame, decode_message, guess_kind, unreadable_sender};
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use zmtp::{PullSocket, PushOptions, PushPeer, SendError};

use crate::messages::{Inbound, Malformed};
use crate::rank::RankActor;

/// Peers whose sockets are kept; the least recently used is closed beyond that.
const MAX_OPEN_PEERS: usize = 16_384;

/// Receives for as long as the rank lives. A bad message is handed on with its reason and ends
/// nothing.
pub(crate) async fn receive(mut socket: PullSocket, rank: Addr<RankActor>) {
    while let Some(received) = socket.recv().await {
        // Waiting for the mailbox is what holds the peers back when the rank is busy.
        let delivered = match decode_message(&received.frames) {
            Ok(incoming) => {
                let (message, ignored_frames) = (incoming.message, incoming.ignored_frames);
                let trailer_opt = incoming.trailer;
                rank.send(Inbound {
                    message,
                    generation_opt: trailer_opt
                        .and_then(|trailer| trailer.generation)
                        .map(Generation),
                    ignored_frames,
                })
                .await
            }
            Err(error) => {
                let kind = guess_kind(&received.frames);
                rank.send(Malformed {
                    kind,
                    error,
                    peer: received.peer,
                    sender_opt: unreadable_sender(&received.frames),
                })
                .await
            }
        };
        if delivered.is_err() {
            return;
        }
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

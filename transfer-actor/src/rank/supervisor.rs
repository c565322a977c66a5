//! A rank outlives a panic of its actor: the actor's drop hands over what it had, and a successor
//! goes on with the same peers, sessions, component actors and control socket. Rooms that were open
//! end, on both sides, because nobody can say what was done of the event that panicked.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::dev::ToEnvelope;
use actix::prelude::*;
use tokio::sync::{mpsc, watch};

use crate::messages::Handle;
use crate::rank::RankActor;
use crate::rank::core::Event;

/// More restarts than that within [`WINDOW`] are no accident: the rank ends, and says so.
const MOST_RESTARTS: usize = 5;
const WINDOW: Duration = Duration::from_secs(60);
/// First pause before a restart; it doubles with each within the window.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// Why rooms end.
const REASON: &str = "the rank's actor panicked and was restarted";

/// Where a rank's actor is at present. Holders of an address of its own would lose the rank at the
/// first panic.
#[derive(Clone, Debug)]
pub(crate) struct RankAddress(watch::Receiver<Option<Addr<RankActor>>>);

impl RankAddress {
    /// The actor that runs now, if one does.
    pub(crate) fn current(&self) -> Option<Addr<RankActor>> {
        let address_opt = self.0.borrow().clone();
        address_opt.filter(Addr::connected)
    }

    /// The actor that runs now, or the next one. `None` when the rank is over.
    pub(crate) async fn next(&self) -> Option<Addr<RankActor>> {
        self.after(None).await
    }

    /// The same, and another than one that did not answer, though it may look as if it ran: what
    /// is sent to an actor is lost before its mailbox closes.
    pub(crate) async fn after(
        &self,
        silent_opt: Option<&Addr<RankActor>>,
    ) -> Option<Addr<RankActor>> {
        let mut addresses = self.0.clone();
        let is_up = |address_opt: &Option<Addr<RankActor>>| {
            let address_opt = address_opt.as_ref().filter(|address| address.connected());
            address_opt.is_some() && address_opt != silent_opt
        };
        let found = addresses.wait_for(is_up).await;
        found.ok().and_then(|address| address.clone())
    }

    /// Sends to the actor that runs now, or the next one.
    pub(crate) async fn send<M>(&self, message: M) -> Result<M::Result, MailboxError>
    where
        M: Message + Send + 'static,
        M::Result: Send,
        RankActor: Handler<M>,
        Context<RankActor>: ToEnvelope<RankActor, M>,
    {
        match self.next().await {
            Some(address) => address.send(message).await,
            None => Err(MailboxError::Closed),
        }
    }

    /// Whether the rank is over.
    pub(crate) fn is_over(&self) -> bool {
        self.0.has_changed().is_err()
    }

    /// Returns when the rank is over: it was stopped, or panicked too often.
    pub(crate) async fn over(&self) {
        let mut addresses = self.0.clone();
        while addresses.changed().await.is_ok() {}
    }
}

/// The other end of a [`RankAddress`], before there is an actor.
pub(super) struct Supervisor {
    addresses: watch::Sender<Option<Addr<RankActor>>>,
    fallen: mpsc::UnboundedReceiver<RankActor>,
}

impl Supervisor {
    /// Also where the actor is to be found, and where it is to send its successor.
    pub(super) fn new() -> (Self, RankAddress, mpsc::UnboundedSender<RankActor>) {
        let (addresses, address) = watch::channel(None);
        // Bounded by its use: each actor sends one successor at most.
        let (successors, fallen) = mpsc::unbounded_channel();
        let supervisor = Self { addresses, fallen };
        (supervisor, RankAddress(address), successors)
    }

    /// Starts the actor and goes on watching it, on the thread of the caller.
    pub(super) fn start(self, actor: RankActor) {
        self.addresses.send_replace(Some(actor.start()));
        actix::spawn(self.watch());
    }

    async fn watch(mut self) {
        let mut restarts: VecDeque<Instant> = VecDeque::new();
        while let Some(successor) = self.fallen.recv().await {
            let metrics = Arc::clone(&successor.metrics);
            let role = successor.config.role.name();
            metrics.rank_panics.with_label_values(&[role]).inc();
            let now = Instant::now();
            restarts.retain(|restart| now.duration_since(*restart) < WINDOW);
            if restarts.len() >= MOST_RESTARTS {
                tracing::error!(
                    role,
                    restarts = restarts.len(),
                    "a rank's actor panics again and again; the rank ends"
                );
                drop(successor);
                // With the thread go the control socket, so that peers notice, and the addresses.
                Arbiter::current().stop();
                return;
            }
            tracing::error!(role, "a rank's actor panicked; it is restarted");
            let pause = FIRST_PAUSE * (1 << restarts.len());
            restarts.push_back(now);
            tokio::time::sleep(pause).await;
            let address = successor.start();
            let reason = REASON.to_owned();
            // Before anybody else can reach it.
            let restarted = address.send(Handle(Event::Restarted { reason }, None));
            if restarted.await.is_ok() {
                self.addresses.send_replace(Some(address));
            }
        }
    }
}

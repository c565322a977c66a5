//! What other actors, sockets and engines ask of a rank.

use std::time::Instant;

use actix::prelude::*;
use common::wire::UnreadableSender;
use futures::FutureExt;

use crate::api::RoomView;
use crate::error::ApiError;
use crate::messages::{
    DrainRank, Handle, Inbound, Malformed, Observe, PeerEnded, ProcessExited, Report, StopRank,
    WaitFor,
};
use crate::rank::actor::{DRAIN_TIMEOUT, RankActor, Waiter, is_reached};
use crate::rank::core::{ComponentOutcome, Event, RankCore, unknown_room};
use crate::rank::{Exit, RankSnapshot};

impl Handler<Handle> for RankActor {
    type Result = Result<Option<RoomView>, ApiError>;

    fn handle(
        &mut self,
        Handle(event, about_opt): Handle,
        context: &mut Context<Self>,
    ) -> Self::Result {
        self.apply(event, context)?;
        Ok(about_opt.and_then(|room| self.core.view(room)))
    }
}

impl Handler<Inbound> for RankActor {
    type Result = ();

    fn handle(&mut self, inbound: Inbound, context: &mut Context<Self>) {
        let labels = [self.role(), inbound.message.kind(), "received"];
        self.metrics
            .control_messages
            .with_label_values(&labels)
            .inc();
        if inbound.ignored_frames > 0 {
            let ignored = self
                .metrics
                .ignored_frames
                .with_label_values(&[self.role()]);
            ignored.inc_by(inbound.ignored_frames as u64);
        }
        self.apply_quietly(
            Event::Message(inbound.message, inbound.generation_opt),
            context,
        );
    }
}

impl Handler<Malformed> for RankActor {
    type Result = ();

    fn handle(&mut self, malformed: Malformed, context: &mut Context<Self>) {
        let Malformed {
            kind,
            error,
            peer,
            sender_opt,
        } = malformed;
        self.metrics
            .malformed
            .with_label_values(&[self.role(), kind])
            .inc();
        if let Some(unsaid) = self.malformed_log.may_say(Instant::now()) {
            tracing::warn!(%peer, kind, reason = error.kind(), %error, unsaid, "a control message was dropped");
        }
        // A REGISTER with one bad field is a fault; one of another shape is another protocol.
        let is_answered =
            |sender: &UnreadableSender| sender.room_opt.is_some() || error.is_unknown_shape();
        if let Some(sender) = sender_opt.filter(is_answered) {
            let reason = error.to_string();
            self.apply_quietly(Event::Unreadable { sender, reason }, context);
        }
    }
}

impl Handler<PeerEnded> for RankActor {
    type Result = ();

    fn handle(&mut self, PeerEnded(endpoint): PeerEnded, context: &mut Context<Self>) {
        self.look_for(endpoint, context);
    }
}

impl Handler<ProcessExited> for RankActor {
    type Result = ();

    fn handle(&mut self, exited: ProcessExited, context: &mut Context<Self>) {
        let ProcessExited {
            endpoint,
            life,
            exit_opt,
        } = exited;
        self.watched_processes = self.watched_processes.saturating_sub(1);
        let Some(Exit { reason, is_proved }) = exit_opt else {
            return;
        };
        tracing::info!(%endpoint, reason, is_proved, "a peer is gone");
        let event = match is_proved {
            true => Event::PeerExited {
                endpoint,
                life,
                reason,
            },
            false => Event::PeerLost { endpoint, reason },
        };
        self.apply_quietly(event, context);
    }
}

impl Handler<WaitFor> for RankActor {
    type Result = ResponseFuture<Result<RoomView, ApiError>>;

    fn handle(&mut self, wait: WaitFor, _: &mut Context<Self>) -> Self::Result {
        let Some(view) = self.core.view(wait.room) else {
            return Box::pin(std::future::ready(Err(unknown_room(wait.room))));
        };
        let wanted = wait.wanted_opt.unwrap_or(view.status);
        if is_reached(&view, wanted) {
            return Box::pin(std::future::ready(Ok(view)));
        }
        let (answer, answered) = tokio::sync::oneshot::channel();
        let deadline = Instant::now() + wait.timeout;
        self.waiters.entry(wait.room).or_default().push(Waiter {
            wanted,
            deadline,
            answer,
        });
        let room = wait.room;
        Box::pin(async move { answered.await.unwrap_or_else(|_| Err(unknown_room(room))) })
    }
}

impl Handler<Observe> for RankActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Context<Self>) -> Self::Result {
        let (peers, registered_with) = match &self.core {
            RankCore::Prefill(core) => (core.peers(), Vec::new()),
            RankCore::Decode(core) => (Vec::new(), core.registered()),
        };
        MessageResult(RankSnapshot {
            role: self.config.role,
            engine_key: self.engine.desc().key,
            control: self.control.to_string(),
            rooms: self.core.census(),
            peers,
            registered_with,
            sessions: self.sessions.list(),
            components: self.components.len(),
            draining: self.core.is_draining(),
        })
    }
}

impl Handler<Report> for RankActor {
    type Result = ();

    fn handle(&mut self, Report(report): Report, context: &mut Context<Self>) {
        if let ComponentOutcome::Died { panicked } = report.outcome {
            if panicked {
                let component = self.buffers.layout.component_label(report.key.component);
                self.metrics
                    .component_panics
                    .with_label_values(&[component])
                    .inc();
                tracing::error!(room = %report.key.room, component, "a component actor panicked");
            }
            return self.component_died(report.key, panicked, context);
        }
        self.count_component(&report);
        self.apply_quietly(Event::Component(report), context);
    }
}

impl Handler<DrainRank> for RankActor {
    type Result = ResponseFuture<usize>;

    fn handle(&mut self, drain: DrainRank, context: &mut Context<Self>) -> Self::Result {
        let DrainRank { reason, deadline } = drain;
        self.apply_quietly(Event::Drain { reason }, context);
        let (done, is_done) = tokio::sync::oneshot::channel();
        self.finish(deadline, None, done, context);
        // Of an actor that ends meanwhile nothing is open.
        Box::pin(is_done.map(Result::unwrap_or_default))
    }
}

impl Handler<StopRank> for RankActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, StopRank(reason): StopRank, context: &mut Context<Self>) -> Self::Result {
        self.apply_quietly(Event::Shutdown { reason }, context);
        let (done, is_done) = tokio::sync::oneshot::channel();
        self.drain(Instant::now() + DRAIN_TIMEOUT, done, context);
        Box::pin(is_done.map(|_| ()))
    }
}

//! The shell around the core: mailbox, clock, sockets, sessions and children.

mod compare;
mod count;
mod handlers;
mod log_limit;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::fut::wrap_future;
use actix::prelude::*;
use common::ids::{ByteOffset, Endpoint, Generation, Room};
use common::wire::{
    ControlMessage, EngineDesc, FerryTrailer, Frame, Grant, KvPoll, Register, Release,
};
use futures::FutureExt;
use io_engine::{Engine, RailReport, TransportKind};
use tokio::sync::mpsc;

use crate::api::{RoomStatus, RoomView};
use crate::bootstrap_client::jittered;
use crate::component::{self, ComponentActor, Destination};
use crate::control::Outboxes;
use crate::error::ApiError;
use crate::messages::{CancelWork, DoWork, ProcessExited, Report, RetireComponent, StopComponent};
use crate::metrics::TransferMetrics;
use crate::rank::actor::log_limit::LogLimit;
use crate::rank::core::{
    ComponentKey, ComponentOutcome, ComponentReport, Effect, Event, Life, PeerLink, RankCore,
    unknown_room,
};
use crate::rank::exits::exit_of;
use crate::rank::grants::{Grants, over};
use crate::rank::heartbeats::{Heartbeats, probe};
use crate::rank::reports::{FIRST_REPORT, Tally, Targets};
use crate::rank::sessions::Sessions;
use crate::rank::start::{Resolver, publish_registration};
use crate::rank::{RankAddress, RankBuffers, RankConfig};

/// How often timeouts are looked at.
const TICK: Duration = Duration::from_millis(250);
/// How long a stopping rank waits for its last writes and messages.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an engine has to learn how a room ended and to clear it, once none is open, before a
/// rank that drains ends.
const CLEARED_WITHIN: Duration = Duration::from_secs(2);
/// How often it looks whether they are over.
const DRAIN_POLL: Duration = Duration::from_millis(5);

/// How a room ended is said once, and its receiver asks nobody: without it a decode that was too
/// busy for a second to take it would wait until its own timeout. What else is not sent fails its
/// room, or is asked for again.
const RESENT_FOR: Duration = Duration::from_secs(60);
/// First wait before that; it doubles.
const FIRST_RESEND: Duration = Duration::from_millis(100);
const LONGEST_RESEND: Duration = Duration::from_secs(5);

/// What a peer said before it ended is to be heard first: it may hold the cause.
const LAST_WORDS: Duration = Duration::from_millis(50);

/// The status of what is refused for a limit.
const TOO_MANY: u16 = 429;

/// How often a peer that ended its connection is looked for, with such pauses between.
const LOOKS: usize = 8;

/// Somebody who waits for a room.
struct Waiter {
    wanted: RoomStatus,
    deadline: Instant,
    answer: tokio::sync::oneshot::Sender<Result<RoomView, ApiError>>,
}

/// A message on its way.
struct Outgoing {
    to: Endpoint,
    kind: &'static str,
    register_opt: Option<u64>,
    frames: Vec<Frame>,
    /// The use of a room that it is about.
    about_opt: Option<(Room, Generation)>,
    /// Until when it is sent again if it could not be sent.
    resent_until_opt: Option<Instant>,
    /// Before it is sent again.
    wait: Duration,
}

pub(crate) struct RankActor {
    pub(super) config: Arc<RankConfig>,
    pub(super) core: RankCore,
    pub(super) engine: Engine,
    pub(super) buffers: Arc<RankBuffers>,
    pub(super) metrics: Arc<TransferMetrics>,
    pub(super) outboxes: Outboxes,
    /// Where others find this actor, or the one after it.
    own: RankAddress,
    /// Where it goes when it panics.
    successors: mpsc::UnboundedSender<Self>,
    /// Processes of peers that are watched.
    watched_processes: usize,
    pub(super) resolver: Resolver,
    pub(super) register_opt: Option<Register>,
    pub(super) control: Endpoint,
    sessions: Sessions,
    heartbeats: Heartbeats,
    grants: Grants,
    pub(super) tally: Tally,
    reports: Targets,
    pub(super) components: HashMap<ComponentKey, Addr<ComponentActor>>,
    pub(super) published: HashSet<String>,
    pub(super) last_census: [usize; 5],
    /// Bytes on their way, and chunks that wait, as they were last published.
    pub(super) last_in_flight: (i64, i64),
    waiters: HashMap<Room, Vec<Waiter>>,
    last_sessions: [i64; TransportKind::ALL.len()],
    last_rails: Vec<RailReport>,
    /// Messages on their way to the kernel.
    sending: usize,
    malformed_log: LogLimit,
    /// Peers of which it was said that their bytes are not compared.
    uncompared: HashSet<Endpoint>,
}

impl RankActor {
    #[allow(
        clippy::too_many_arguments,
        reason = "every part is named, and only `start` calls this"
    )]
    pub(super) fn new(
        config: Arc<RankConfig>,
        core: RankCore,
        engine: Engine,
        buffers: Arc<RankBuffers>,
        metrics: Arc<TransferMetrics>,
        resolver: Resolver,
        register_opt: Option<Register>,
        control: Endpoint,
        outboxes: Outboxes,
        (own, successors): (RankAddress, mpsc::UnboundedSender<Self>),
    ) -> Self {
        Self {
            config,
            core,
            engine,
            buffers,
            metrics,
            outboxes,
            own,
            successors,
            watched_processes: 0,
            resolver,
            register_opt,
            control,
            sessions: Sessions::default(),
            heartbeats: Heartbeats::default(),
            grants: Grants::default(),
            tally: Tally::default(),
            reports: Targets::default(),
            components: HashMap::new(),
            published: HashSet::new(),
            last_census: [0; 5],
            last_in_flight: (0, 0),
            waiters: HashMap::new(),
            last_sessions: [0; TransportKind::ALL.len()],
            last_rails: Vec::new(),
            sending: 0,
            malformed_log: LogLimit::default(),
            uncompared: HashSet::new(),
        }
    }

    fn role(&self) -> &'static str {
        self.config.role.name()
    }

    /// Lets the core decide and does what it wants. All events come through here.
    fn apply(&mut self, event: Event, context: &mut Context<Self>) -> Result<(), ApiError> {
        let reaction = self.core.handle(event, Instant::now());
        for effect in reaction.effects {
            self.perform(effect, context);
        }
        let Some(error) = reaction.error_opt else {
            return Ok(());
        };
        if error.status == TOO_MANY {
            let labels = [self.role(), error.code];
            self.metrics.limit_refusals.with_label_values(&labels).inc();
        }
        Err(error)
    }

    fn apply_quietly(&mut self, event: Event, context: &mut Context<Self>) {
        if let Err(error) = self.apply(event, context) {
            tracing::debug!(%error, "an event was refused");
        }
    }

    fn perform(&mut self, effect: Effect, context: &mut Context<Self>) {
        match effect {
            Effect::Send {
                to,
                message,
                generation_opt,
                about_opt,
            } => self.send(&to, &message, generation_opt, about_opt, context),
            Effect::Start {
                key,
                link,
                grant_opt,
            } => self.start_component(key, link, grant_opt),
            Effect::Work { key, work } => self.work(key, work, context),
            Effect::Cancel { key } => self.tell(&key, CancelWork, context),
            Effect::Retire { key } => self.retire(key),
            Effect::Stop { key } => {
                self.tell(&key, StopComponent, context);
                self.components.remove(&key);
            }
            Effect::Resolve {
                room,
                generation,
                bootstrap,
                dp_rank_opt,
            } => {
                let resolved = self.resolver.resolve(room, bootstrap, dp_rank_opt);
                let applied =
                    wrap_future(resolved).map(move |result, actor: &mut Self, context| {
                        if let Ok(prefill) = &result {
                            actor.publish(&prefill.bootstrap, context);
                        }
                        actor.apply_quietly(
                            Event::Resolved {
                                room,
                                generation,
                                result,
                            },
                            context,
                        );
                    });
                context.spawn(applied);
            }
            Effect::Met {
                endpoint,
                life,
                engine,
            } => self.watch_process(endpoint, life, *engine),
            Effect::Compare {
                generation,
                announcement,
                checks,
            } => self.compare(generation, announcement, *checks, context),
            Effect::WriteAux {
                room,
                buffer_index,
                row,
                data,
            } => {
                self.write_aux(room, buffer_index, row, &data);
            }
            Effect::TakeBack {
                room,
                generation,
                endpoint,
                is_lost,
            } => self.take_back(room, generation, endpoint, is_lost, context),
            Effect::Changed { room } => {
                self.wake(room);
                if self.grants.has(room) && self.core.view(room).is_none() {
                    self.grants.forget(room);
                }
            }
            Effect::Count(counted) => self.count(&counted),
        }
    }

    fn send(
        &mut self,
        to: &Endpoint,
        message: &ControlMessage,
        generation_opt: Option<Generation>,
        about_opt: Option<(Room, Generation)>,
        context: &mut Context<Self>,
    ) {
        let kind = message.kind();
        let is_said_once = matches!(
            message,
            ControlMessage::Status(_)
                | ControlMessage::AbortAck(_)
                | ControlMessage::Hello(_)
                | ControlMessage::Checks(_)
                | ControlMessage::Checked(_)
        );
        let encoded = match generation_opt {
            Some(generation) => {
                let trailer = FerryTrailer {
                    generation: Some(generation.get()),
                    checksums: Vec::new(),
                    grant: self.grants.given(&self.engine, to, message, generation),
                };
                message.encode_with_trailer(Release::NEWEST, &trailer)
            }
            None => message.encode(Release::NEWEST),
        };
        let frames = match encoded {
            Ok(frames) => frames,
            Err(error) => {
                tracing::error!(%to, kind, %error, "a message of ours cannot be written");
                return;
            }
        };
        let (role, to) = (self.role(), to.clone());
        let labels = [role, kind, "sent"];
        self.metrics
            .control_messages
            .with_label_values(&labels)
            .inc();
        let outgoing = Outgoing {
            to,
            kind,
            register_opt: message.register_number(),
            frames,
            about_opt,
            resent_until_opt: is_said_once.then(|| Instant::now() + RESENT_FOR),
            wait: FIRST_RESEND,
        };
        self.post(outgoing, context);
    }

    fn post(&mut self, outgoing: Outgoing, context: &mut Context<Self>) {
        let sent = self.outboxes.send(&outgoing.to, &outgoing.frames);
        self.sending += 1;
        let watched = wrap_future(sent).map(move |result, actor: &mut Self, context| {
            actor.sending -= 1;
            if let Err(error) = result {
                actor.not_sent(outgoing, &error, context);
            }
        });
        context.spawn(watched);
    }

    fn not_sent(
        &mut self,
        mut outgoing: Outgoing,
        error: &zmtp::SendError,
        context: &mut Context<Self>,
    ) {
        let (to, kind) = (outgoing.to.clone(), outgoing.kind);
        self.metrics
            .send_failures
            .with_label_values(&[self.role(), error.kind()])
            .inc();
        self.outboxes.close(&to);
        self.look_for(to.clone(), context);
        let is_sent_again = outgoing
            .resent_until_opt
            .is_some_and(|until| Instant::now() < until);
        tracing::info!(%to, kind, %error, is_sent_again, "a control message could not be sent");
        if is_sent_again {
            let wait = outgoing.wait;
            outgoing.wait = (wait * 2).min(LONGEST_RESEND);
            context.run_later(wait, move |actor, context| {
                if !actor.is_another_use(outgoing.about_opt) {
                    actor.post(outgoing, context);
                }
            });
            return;
        }
        self.apply_quietly(
            Event::SendFailed {
                to: outgoing.to,
                about_opt: outgoing.about_opt,
                kind,
                register_opt: outgoing.register_opt,
                reason: error.to_string(),
            },
            context,
        );
    }

    /// Whether a room's number was taken anew since; a peer without generations would take a
    /// message about the former use for one about this.
    fn is_another_use(&self, about_opt: Option<(Room, Generation)>) -> bool {
        about_opt.is_some_and(|(room, generation)| {
            let view_opt = self.core.view(room);
            view_opt.is_some_and(|view| view.generation != generation.get())
        })
    }

    fn start_component(
        &mut self,
        key: ComponentKey,
        link: Arc<PeerLink>,
        grant_opt: Option<Grant>,
    ) {
        let reach = component::reach(&self.buffers, &link, key.component);
        let now = Instant::now();
        let session = self.sessions.to(&self.engine, &link.engine, &reach, now);
        let buffers = Arc::clone(&self.buffers);
        let to = Destination { link, grant_opt };
        let actor = ComponentActor::new(key.clone(), to, buffers, session, self.own.clone());
        // Children run on this rank's own arbiter, beside it.
        self.components.insert(key, actor.start());
    }

    fn work(
        &mut self,
        key: ComponentKey,
        work: crate::rank::core::Work,
        context: &mut Context<Self>,
    ) {
        let Some(address) = self.components.get(&key) else {
            return self.component_died(key, false, context);
        };
        let sent = wrap_future(address.send(DoWork(work)));
        context.spawn(sent.map(move |result, actor: &mut Self, context| {
            if result.is_err() {
                actor.component_died(key, false, context);
            }
        }));
    }

    fn tell<M>(&mut self, key: &ComponentKey, message: M, context: &mut Context<Self>)
    where
        M: Message<Result = ()> + Send + 'static,
        ComponentActor: Handler<M>,
    {
        if let Some(address) = self.components.get(key) {
            // One that is gone needs no orders.
            context.spawn(wrap_future(address.send(message).map(|_| ())));
        }
    }

    /// Asks beside this actor, because a message of one that has panicked is not delivered.
    fn retire(&self, key: ComponentKey) {
        let (own, address_opt) = (self.own.clone(), self.components.get(&key).cloned());
        actix::spawn(async move {
            let is_told = match address_opt {
                Some(address) => address.send(RetireComponent).await.is_ok(),
                None => false,
            };
            if is_told {
                return;
            }
            // Nobody is left to say what it had begun. Of a rank that panics again this is asked
            // again.
            let outcome = ComponentOutcome::Died { panicked: false };
            let _ = own.send(Report(ComponentReport { key, outcome })).await;
        });
    }

    fn component_died(&mut self, key: ComponentKey, panicked: bool, context: &mut Context<Self>) {
        self.components.remove(&key);
        let outcome = ComponentOutcome::Died { panicked };
        self.apply_quietly(Event::Component(ComponentReport { key, outcome }), context);
    }

    /// Watches a peer's process for as long as both live, beside this actor and its successors.
    fn watch_process(&mut self, endpoint: Endpoint, life: Life, engine: EngineDesc) {
        if self.watched_processes >= self.config.limits.peers {
            return tracing::warn!(%endpoint, "a peer's process is not watched: too many are");
        }
        self.watched_processes += 1;
        let (own_engine, own) = (self.engine.clone(), self.own.clone());
        actix::spawn(async move {
            let exit_opt = exit_of(own_engine, engine).await;
            tokio::time::sleep(LAST_WORDS).await;
            let Some(rank) = own.next().await else {
                return;
            };
            let exited = ProcessExited {
                endpoint,
                life,
                exit_opt,
            };
            // Of a rank that panics meanwhile the heartbeats will notice.
            let _ = rank.send(exited).await;
        });
    }

    /// Takes a permission back; the core hears when nothing comes in under it any more.
    fn take_back(
        &mut self,
        room: Room,
        generation: Generation,
        endpoint: Endpoint,
        is_lost: bool,
        context: &mut Context<Self>,
    ) {
        let Some(grant) = self.grants.taken(room, &endpoint) else {
            return;
        };
        let over = wrap_future(over(grant, is_lost));
        context.spawn(over.map(move |(), actor: &mut Self, context| {
            tracing::info!(%room, %endpoint, is_lost, "a permission to write was taken back");
            let event = Event::TakenBack {
                room,
                generation,
                endpoint,
            };
            actor.apply_quietly(event, context);
        }));
    }

    /// A peer ended its connection: looks whether it is gone, if an open room needs it.
    pub(super) fn look_for(&mut self, endpoint: Endpoint, context: &mut Context<Self>) {
        if !self.core.watched().contains(&endpoint) {
            return;
        }
        let of_whom = endpoint.clone();
        let probed = async move {
            // A process that is being killed closes one socket after the other.
            let mut found = probe(of_whom.clone()).await;
            for _ in 1..LOOKS {
                tokio::time::sleep(LAST_WORDS).await;
                if found.as_ref().is_err_and(|absence| absence.is_certain) {
                    break;
                }
                found = probe(of_whom.clone()).await;
            }
            found
        };
        context.spawn(
            wrap_future(probed).map(move |found, actor: &mut Self, context| {
                // Anything but a clear answer is for the heartbeats to judge.
                if let Err(absence) = found
                    && absence.is_certain
                {
                    let reason = absence.reason;
                    tracing::info!(%endpoint, reason, "a peer is gone");
                    actor.apply_quietly(Event::PeerLost { endpoint, reason }, context);
                }
            }),
        );
    }

    /// Looks for the peers whose end must be noticed.
    fn look_for_peers(&mut self, context: &mut Context<Self>) {
        let core = &self.core;
        let interval = self.config.timeouts.heartbeat;
        let due = self
            .heartbeats
            .due(interval, Instant::now(), || core.watched());
        for endpoint in due {
            let probed = wrap_future(probe(endpoint.clone()));
            context.spawn(probed.map(move |found, actor: &mut Self, context| {
                let misses = actor.config.timeouts.heartbeat_misses;
                let Some(reason) = actor.heartbeats.seen(&endpoint, found, misses) else {
                    return;
                };
                tracing::info!(%endpoint, reason, "a peer is gone");
                actor.apply_quietly(Event::PeerLost { endpoint, reason }, context);
            }));
        }
    }

    /// Tells the bootstrap servers how this rank fares, and does so again after a while. One that
    /// is slow to answer misses a report; nothing here waits for it.
    fn report(&mut self, context: &mut Context<Self>) {
        if let Some(own) = &self.config.bootstrap_opt {
            self.reports.add(own);
        }
        let due = self.reports.due();
        if !due.is_empty() {
            let report = Arc::new(self.tally.report(
                &self.config,
                self.control.to_string(),
                self.core.census(),
                self.sessions.list(),
            ));
            let key = self.engine.desc().key;
            for (bootstrap, client) in due {
                let (key, report) = (key.clone(), Arc::clone(&report));
                let sent = async move { client.put_report(&key, &report).await };
                context.spawn(wrap_future(sent).map(move |sent, actor: &mut Self, _| {
                    actor.reports.sent(&bootstrap, sent);
                }));
            }
        }
        let pause = jittered(self.config.timeouts.report);
        context.run_later(pause, Self::report);
    }

    fn write_aux(&mut self, room: Room, buffer_index: u32, row: u32, data: &[u8]) {
        let index = buffer_index as usize;
        let layout = self.buffers.layout.aux.get(index);
        let region = self.buffers.aux.get(index).and_then(Option::as_ref);
        let (Some(layout), Some(region)) = (layout, region) else {
            return tracing::warn!(%room, buffer_index, "aux data for a buffer that this rank has not");
        };
        let fits = data.len() as u64 <= layout.item_len.get();
        let offset = u64::from(row).checked_mul(layout.item_len.get());
        let (Some(offset), true) = (offset, fits) else {
            return tracing::warn!(%room, buffer_index, row, bytes = data.len(), "aux data beyond its row");
        };
        if let Err(error) = region.write(ByteOffset(offset), data) {
            tracing::warn!(%room, buffer_index, row, %error, "aux data cannot be put into its buffer");
        }
    }

    /// Tells a prefill's bootstrap server of this decode rank, once. Nothing depends on it: a
    /// server of SGLang's own answers 404.
    fn publish(&mut self, bootstrap: &str, context: &mut Context<Self>) {
        let Some(register) = &self.register_opt else {
            return;
        };
        self.reports.add(bootstrap);
        if !self.published.insert(bootstrap.to_owned()) {
            return;
        }
        let layout = &self.buffers.layout;
        let published = publish_registration(bootstrap.to_owned(), register, layout);
        context.spawn(wrap_future(published));
    }

    fn wake(&mut self, room: Room) {
        let Some(waiters) = self.waiters.remove(&room) else {
            return;
        };
        let view_opt = self.core.view(room);
        let now = Instant::now();
        let mut waiting = Vec::new();
        for waiter in waiters {
            match &view_opt {
                Some(view) if is_reached(view, waiter.wanted) || waiter.deadline <= now => {
                    // A waiter that has gone is told nothing.
                    let _ = waiter.answer.send(Ok(view.clone()));
                }
                Some(_) => waiting.push(waiter),
                None => {
                    let _ = waiter.answer.send(Err(unknown_room(room)));
                }
            }
        }
        if !waiting.is_empty() {
            self.waiters.insert(room, waiting);
        }
    }
}

fn is_reached(view: &RoomView, wanted: RoomStatus) -> bool {
    view.status == RoomStatus::Failed || view.status >= wanted
}

impl Actor for RankActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Context<Self>) {
        context.set_mailbox_capacity(1024);
        self.metrics.ranks.with_label_values(&[self.role()]).inc();
        context.run_interval(TICK, |actor, context| {
            actor.apply_quietly(Event::Tick, context);
            actor.look_for_peers(context);
            actor.update_gauges();
            let now = Instant::now();
            let overdue = actor
                .waiters
                .iter()
                .filter(|(_, waiters)| waiters.iter().any(|waiter| waiter.deadline <= now));
            let overdue: Vec<Room> = overdue.map(|(room, _)| *room).collect();
            overdue.into_iter().for_each(|room| actor.wake(room));
        });
        let interval = self.config.timeouts.report;
        if !interval.is_zero() {
            context.run_later(jittered(interval.min(FIRST_REPORT)), Self::report);
        }
    }

    fn stopped(&mut self, _: &mut Context<Self>) {
        if std::thread::panicking() {
            // Called on the way out of a panic, too; the drop behind it hands everything on.
            return;
        }
        let role = self.role();
        self.metrics.ranks.with_label_values(&[role]).dec();
        for (poll, before) in KvPoll::ALL.into_iter().zip(self.last_census) {
            self.metrics
                .rooms
                .with_label_values(&[role, poll.name()])
                .sub(before as i64);
        }
        self.publish_in_flight(0, 0);
        self.publish_sessions([0; TransportKind::ALL.len()]);
        self.publish_rails(true);
        // The thread is this rank's own; its control socket closes with it, so that peers notice.
        Arbiter::current().stop();
    }
}

impl Drop for RankActor {
    /// After a panic everything that outlives an actor goes to its successor.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        self.metrics.ranks.with_label_values(&[self.role()]).dec();
        let (unused, _) = Outboxes::new(self.config.push);
        let successor = Self {
            config: Arc::clone(&self.config),
            core: self.core.take(),
            engine: self.engine.clone(),
            buffers: Arc::clone(&self.buffers),
            metrics: Arc::clone(&self.metrics),
            outboxes: std::mem::replace(&mut self.outboxes, unused),
            own: self.own.clone(),
            successors: self.successors.clone(),
            watched_processes: self.watched_processes,
            resolver: self.resolver.clone(),
            register_opt: self.register_opt.clone(),
            control: self.control.clone(),
            sessions: std::mem::take(&mut self.sessions),
            heartbeats: Heartbeats::default(),
            grants: std::mem::take(&mut self.grants),
            tally: std::mem::take(&mut self.tally),
            reports: std::mem::take(&mut self.reports),
            components: std::mem::take(&mut self.components),
            published: std::mem::take(&mut self.published),
            last_census: self.last_census,
            last_in_flight: self.last_in_flight,
            waiters: std::mem::take(&mut self.waiters),
            last_sessions: self.last_sessions,
            last_rails: std::mem::take(&mut self.last_rails),
            sending: 0,
            malformed_log: LogLimit::default(),
            uncompared: std::mem::take(&mut self.uncompared),
        };
        // Nobody is left to take it when the rank's thread ends.
        let _ = self.successors.send(successor);
    }
}

impl RankActor {
    /// Answers once every room has ended and the engine has heard of it, or time is up.
    pub(super) fn finish(
        &mut self,
        deadline: Instant,
        ended_opt: Option<Instant>,
        done: tokio::sync::oneshot::Sender<usize>,
        context: &mut Context<Self>,
    ) {
        let (census, now) = (self.core.census(), Instant::now());
        let is_over = census.open() == 0 && self.core.pending_work() == 0;
        let ended_opt = is_over.then(|| ended_opt.unwrap_or(now));
        let has_waited = |ended: Instant| now.duration_since(ended) >= CLEARED_WITHIN;
        let is_cleared = census.ended() == 0 || ended_opt.is_some_and(has_waited);
        if (is_over && is_cleared) || now >= deadline {
            // Whoever asked may have given up.
            let _ = done.send(census.open());
            return;
        }
        context.run_later(DRAIN_POLL, move |actor, context| {
            actor.finish(deadline, ended_opt, done, context);
        });
    }

    /// Ends the actor once nothing is being written and nothing is being sent, or time is up.
    pub(super) fn drain(
        &mut self,
        deadline: Instant,
        done: tokio::sync::oneshot::Sender<()>,
        context: &mut Context<Self>,
    ) {
        let is_drained = self.core.pending_work() == 0 && self.sending == 0;
        if !is_drained && Instant::now() < deadline {
            context.run_later(DRAIN_POLL, move |actor, context| {
                actor.drain(deadline, done, context)
            });
            return;
        }
        if !is_drained {
            tracing::warn!(
                pending = self.core.pending_work(),
                "a rank ended before its writes had drained"
            );
        }
        for waiter in std::mem::take(&mut self.waiters).into_values().flatten() {
            // A waiter that has gone is told nothing.
            let _ = waiter.answer.send(Err(crate::rank::rank_gone()));
        }
        self.update_gauges();
        let _ = done.send(());
        context.stop();
    }
}

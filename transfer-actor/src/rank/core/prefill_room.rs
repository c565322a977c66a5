//! One opened room of a prefill rank.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::ids::{ComponentId, Endpoint, Generation, Room};
use common::plan::{KvChunk, PlanError};
use common::room::{DeferredBootstrap, advance};
use common::wire::{ControlMessage, KvPoll, Status, TransferInfo};

use crate::rank::core::event::{
    ChunkCommand, ComponentKey, ComponentOutcome, Counted, Effect, PeerLink, Work,
};
use crate::rank::core::rules::{Rule, holds};

/// A decode rank that this room feeds.
#[derive(Debug)]
pub(super) struct Target {
    pub info: TransferInfo,
    /// The decode rank's own generation of the room, if it is a Ferry rank.
    pub generation_opt: Option<Generation>,
    pub dst_pages: Arc<[i32]>,
    /// `None` for a dummy, which gets nothing.
    pub link_opt: Option<Arc<PeerLink>>,
}

/// How a message's use of the room stands to the one that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Age {
    Older,
    /// Or nobody can tell.
    Same,
    Newer,
}

/// What one component has moved to one decode rank.
#[derive(Clone, Debug)]
pub(super) struct Moved {
    pub bytes: u64,
    pub ranges: u64,
    pub elapsed: Duration,
    pub transport: &'static str,
    pub pending: usize,
    pub outcome_opt: Option<&'static str>,
}

/// One use of a room.
#[derive(Debug)]
pub(super) struct PrefillRoom {
    pub room: Room,
    pub generation: Generation,
    pub aux_index_opt: Option<u32>,
    pub poll: KvPoll,
    pub reason_opt: Option<String>,
    pub opened: Instant,
    /// Last progress: what a timeout counts from.
    pub touched: Instant,
    pub required_opt: Option<u32>,
    pub targets: Vec<Target>,
    pub deferred: DeferredBootstrap,
    /// The generation that came with BOOTSTRAP.
    pub deferred_generation_opt: Option<Generation>,
    /// Pages that were handed over.
    pub position: usize,
    pub is_last_sent: bool,
    /// Pieces of work without a report.
    pub pending: usize,
    pub moved: BTreeMap<(Endpoint, ComponentId), Moved>,
    /// Who waits for an acknowledgement of its ABORT.
    pub abort_askers: Vec<(Endpoint, i64)>,
    /// A write failed without proof that it has stopped: no acknowledgement, ever.
    pub is_poisoned: bool,
    /// A write failed without proof that its source is not read any more.
    pub is_source_held: bool,
    /// The same of an older use of the number: only who announced this use may be acknowledged.
    pub was_poisoned: bool,
    /// Cleared by the engine while work was pending.
    pub is_cleared: bool,
}

impl PrefillRoom {
    pub fn new(
        room: Room,
        generation: Generation,
        aux_index_opt: Option<u32>,
        now: Instant,
    ) -> Self {
        Self {
            room,
            generation,
            aux_index_opt,
            poll: KvPoll::Bootstrapping,
            reason_opt: None,
            opened: now,
            touched: now,
            required_opt: None,
            targets: Vec::new(),
            deferred: DeferredBootstrap::default(),
            deferred_generation_opt: None,
            position: 0,
            is_last_sent: false,
            pending: 0,
            moved: BTreeMap::new(),
            abort_askers: Vec::new(),
            is_poisoned: false,
            is_source_held: false,
            was_poisoned: false,
            is_cleared: false,
        }
    }

    pub fn is_announced(&self) -> bool {
        let is_enough = |required: u32| match holds(Rule::EveryDecodeAnnounces) {
            true => self.targets.len() >= required as usize,
            false => !self.targets.is_empty(),
        };
        self.required_opt.is_some_and(is_enough)
    }

    /// The decode rank's own generation of the room, as far as its messages told.
    pub fn generation_of(&self, endpoint: &Endpoint) -> Option<Generation> {
        let mut targets = self.targets.iter();
        let target = targets.find(|target| target.info.endpoint == *endpoint);
        match target {
            Some(target) => target.generation_opt,
            None => self
                .deferred_generation_opt
                .filter(|_| self.deferred.endpoint() == Some(endpoint)),
        }
    }

    /// Whether its state ends by time.
    pub fn is_timed(&self) -> bool {
        match self.poll {
            KvPoll::Bootstrapping => holds(Rule::BootstrapTimeout),
            KvPoll::Transferring => holds(Rule::TransferTimeout),
            _ => true,
        }
    }

    /// Whether a message of this generation is about the use that the decode rank has announced.
    pub fn age_of(&self, endpoint: &Endpoint, generation_opt: Option<Generation>) -> Age {
        match (self.generation_of(endpoint), generation_opt) {
            (Some(known), Some(new)) if new < known => Age::Older,
            (Some(known), Some(new)) if new > known => Age::Newer,
            _ => Age::Same,
        }
    }

    /// Whether an ABORT of this generation may be told that nothing is written for it any more.
    pub fn may_acknowledge(&self, endpoint: &Endpoint, generation: i64) -> bool {
        let is_of_this_use = || {
            let announced = self.generation_of(endpoint);
            announced.and_then(|own| i64::try_from(own.get()).ok()) == Some(generation)
        };
        let is_drained = self.pending == 0 || !holds(Rule::AckAfterDrain);
        let is_proved = !self.is_poisoned || !holds(Rule::NoAckWhenPoisoned);
        is_drained && is_proved && (!self.was_poisoned || is_of_this_use())
    }

    pub fn key(&self, endpoint: &Endpoint, component: ComponentId) -> ComponentKey {
        ComponentKey {
            room: self.room,
            generation: self.generation,
            endpoint: endpoint.clone(),
            component,
        }
    }

    /// Whether nothing reads what the room was sent from any more.
    pub fn is_release_safe(&self) -> bool {
        let is_free = !self.is_source_held || !holds(Rule::HeldSource);
        self.poll.is_terminal() && self.pending == 0 && is_free
    }

    /// Moves the status on; it never goes back.
    pub fn advance(&mut self, poll: KvPoll, effects: &mut Vec<Effect>) {
        let next = advance(Some(self.poll), poll).unwrap_or(self.poll);
        if next != self.poll {
            self.poll = next;
            effects.push(Effect::Changed { room: self.room });
        }
    }

    /// Ends the room and counts it.
    pub fn finish(&mut self, poll: KvPoll, now: Instant, effects: &mut Vec<Effect>) {
        self.advance(poll, effects);
        self.touched = now;
        effects.push(Effect::Count(Counted::RoomFinished {
            room: self.room,
            poll,
            reason_opt: self.reason_opt.clone(),
            elapsed: now.duration_since(self.opened),
        }));
    }

    pub fn status_message(&self, rank: i64) -> ControlMessage {
        ControlMessage::Status(Status {
            room: self.room,
            poll: self.poll,
            prefill_rank: rank,
            reason: self.reason_opt.clone(),
        })
    }

    pub fn send_status(
        &self,
        to: &Endpoint,
        generation_opt: Option<Generation>,
        rank: i64,
    ) -> Effect {
        Effect::Send {
            to: to.clone(),
            message: self.status_message(rank),
            generation_opt,
            about_opt: Some((self.room, self.generation)),
        }
    }

    /// Tells every decode rank that the room feeds.
    pub fn send_status_to_all(&self, rank: i64) -> impl Iterator<Item = Effect> {
        let fed = self
            .targets
            .iter()
            .filter(|target| target.link_opt.is_some());
        fed.map(move |target| self.send_status(&target.info.endpoint, target.generation_opt, rank))
    }

    /// The decode side is complete: one component actor for each endpoint and component.
    pub fn announced(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        self.touched = now;
        for target in &self.targets {
            let Some(link) = &target.link_opt else {
                continue;
            };
            let states =
                (0..link.planner.state_count()).filter_map(|index| u16::try_from(index).ok());
            let components = [ComponentId::Kv]
                .into_iter()
                .chain(states.map(ComponentId::State))
                .chain([ComponentId::Aux]);
            for component in components {
                let key = self.key(&target.info.endpoint, component);
                effects.push(Effect::Start {
                    key,
                    link: Arc::clone(link),
                    grant_opt: target.info.grant_opt.clone(),
                });
            }
        }
        self.advance(KvPoll::WaitingForInput, effects);
    }

    /// Turns a chunk into work, after everything of it was checked for every decode rank.
    pub fn plan_chunk(
        &self,
        chunk: &ChunkCommand,
    ) -> Result<Vec<(ComponentKey, Work)>, ChunkError> {
        let mut works = Vec::new();
        for target in &self.targets {
            let Some(link) = &target.link_opt else {
                continue;
            };
            let endpoint = &target.info.endpoint;
            let decode_prefix_len = target.info.decode_prefix_len.unwrap_or_default();
            if !chunk.kv_indices.is_empty() {
                link.planner.check_kv_chunk(&KvChunk {
                    src_pages: &chunk.kv_indices,
                    position: self.position,
                    dst_pages: &target.dst_pages,
                    decode_prefix_len,
                    num_kv_tokens: chunk.num_kv_tokens_opt,
                })?;
                let work = Work::Kv {
                    src_pages: chunk.kv_indices.clone(),
                    position: self.position,
                    dst_pages: Arc::clone(&target.dst_pages),
                    decode_prefix_len,
                    num_kv_tokens_opt: chunk.num_kv_tokens_opt,
                };
                works.push((self.key(endpoint, ComponentId::Kv), work));
            }
            if chunk.is_last {
                self.plan_last(target, link, chunk, &mut works)?;
            }
        }
        Ok(works)
    }

    /// Components and aux go with the last chunk.
    fn plan_last(
        &self,
        target: &Target,
        link: &PeerLink,
        chunk: &ChunkCommand,
        works: &mut Vec<(ComponentKey, Work)>,
    ) -> Result<(), ChunkError> {
        let endpoint = &target.info.endpoint;
        let (sent, announced) = (
            self.position + chunk.kv_indices.len(),
            target.dst_pages.len(),
        );
        if sent < announced {
            return Err(ChunkError::PagesMissing { sent, announced });
        }
        for position in 0..link.planner.state_count() {
            let Ok(index) = u16::try_from(position) else {
                break;
            };
            let src = chunk
                .state_indices
                .get(position)
                .map_or(&[][..], Vec::as_slice);
            let dst = target
                .info
                .state_indices
                .get(position)
                .map_or(&[][..], Vec::as_slice);
            if dst.is_empty() {
                continue;
            }
            if src.is_empty() {
                return Err(ChunkError::NotSent {
                    component: link.planner.state_label(index),
                });
            }
            link.planner.check_state(index, src, dst)?;
            let work = Work::State {
                src: src.to_vec(),
                dst: dst.to_vec(),
            };
            works.push((self.key(endpoint, ComponentId::State(index)), work));
        }
        let Some(dst_row) = target.info.aux_index.filter(|_| link.planner.sends_aux()) else {
            return Ok(());
        };
        let src_row_opt = chunk.aux_index_opt.or(self.aux_index_opt);
        let src_row = src_row_opt.ok_or(ChunkError::NotSent {
            component: common::metrics::COMPONENT_AUX,
        })?;
        link.planner.check_aux(src_row)?;
        works.push((
            self.key(endpoint, ComponentId::Aux),
            Work::Aux { src_row, dst_row },
        ));
        Ok(())
    }

    /// Accepts a planned chunk.
    pub fn begin_chunk(
        &mut self,
        chunk: &ChunkCommand,
        works: Vec<(ComponentKey, Work)>,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) {
        if self.poll < KvPoll::Transferring {
            let elapsed = now.duration_since(self.opened);
            effects.push(Effect::Count(Counted::RoomBegan { elapsed }));
        }
        self.touched = now;
        self.position += chunk.kv_indices.len();
        self.is_last_sent = chunk.is_last;
        self.advance(KvPoll::Transferring, effects);
        for (key, work) in works {
            self.pending += 1;
            let moved = self
                .moved
                .entry((key.endpoint.clone(), key.component))
                .or_insert(Moved {
                    bytes: 0,
                    ranges: 0,
                    elapsed: Duration::ZERO,
                    transport: "none",
                    pending: 0,
                    outcome_opt: None,
                });
            moved.pending += 1;
            effects.push(Effect::Work { key, work });
        }
    }

    /// Takes a component's report; the failure that it tells of, if it does.
    pub fn report(
        &mut self,
        key: &ComponentKey,
        outcome: &ComponentOutcome,
        now: Instant,
    ) -> Option<String> {
        let moved = self.moved.get_mut(&(key.endpoint.clone(), key.component))?;
        if moved.pending == 0 {
            return None;
        }
        self.touched = now;
        match outcome {
            ComponentOutcome::Moved {
                bytes,
                ranges,
                elapsed,
                transport,
                ..
            } => {
                moved.pending -= 1;
                self.pending -= 1;
                moved.bytes += bytes;
                moved.ranges += ranges;
                moved.elapsed += *elapsed;
                moved.transport = transport;
                moved.outcome_opt.get_or_insert("success");
                None
            }
            ComponentOutcome::Failed {
                reason,
                is_quiesced,
                is_source_free,
                transport,
                ..
            } => {
                moved.pending -= 1;
                self.pending -= 1;
                moved.transport = transport;
                moved.outcome_opt = Some(if self.poll == KvPoll::Failed {
                    "aborted"
                } else {
                    "failed"
                });
                self.is_poisoned |= !is_quiesced;
                self.is_source_held |= !is_source_free;
                Some(reason.clone())
            }
            ComponentOutcome::Retired { is_quiesced } => {
                self.pending -= moved.pending;
                moved.pending = 0;
                moved.outcome_opt = Some("aborted");
                self.is_poisoned |= !is_quiesced;
                self.is_source_held |= !is_quiesced;
                Some("its actor was retired".to_owned())
            }
            ComponentOutcome::Died { panicked } => {
                // What it had begun may still be written: nobody is left to say that it is not.
                self.pending -= moved.pending;
                moved.pending = 0;
                moved.outcome_opt = Some("failed");
                self.is_poisoned = true;
                self.is_source_held = true;
                let how = if *panicked { "panicked" } else { "ended" };
                Some(format!("its actor {how} before it had reported"))
            }
        }
    }

    /// Stops what runs and ends what waits.
    pub fn cancel(&self, effects: &mut Vec<Effect>) {
        let running = self.moved.iter().filter(|(_, moved)| moved.pending > 0);
        effects.extend(running.map(|((endpoint, component), _)| Effect::Cancel {
            key: self.key(endpoint, *component),
        }));
    }

    /// Asks every component actor that has work for the end of all of it.
    pub fn retire(&self, effects: &mut Vec<Effect>) {
        let running = self.moved.iter().filter(|(_, moved)| moved.pending > 0);
        effects.extend(running.map(|((endpoint, component), _)| Effect::Retire {
            key: self.key(endpoint, *component),
        }));
    }

    /// Ends every component actor of the room.
    pub fn stop(&self, effects: &mut Vec<Effect>) {
        for target in &self.targets {
            let Some(link) = &target.link_opt else {
                continue;
            };
            let states =
                (0..link.planner.state_count()).filter_map(|index| u16::try_from(index).ok());
            let components = [ComponentId::Kv, ComponentId::Aux]
                .into_iter()
                .chain(states.map(ComponentId::State));
            effects.extend(components.map(|component| Effect::Stop {
                key: self.key(&target.info.endpoint, component),
            }));
        }
    }
}

/// Why a chunk cannot be sent. The room fails with it, before any byte of the chunk moves.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ChunkError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("{component}: the decode side announced it, and the last chunk does not send it")]
    NotSent { component: &'static str },
    #[error("kv: the last chunk ends after {sent} pages, the decode side announced {announced}")]
    PagesMissing { sent: usize, announced: usize },
}

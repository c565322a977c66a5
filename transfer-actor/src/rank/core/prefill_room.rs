//! One opened room of a prefill rank.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::ids::{ComponentId, Endpoint, Generation, Room};
use common::plan::{KvChunk, PlanError};
use common::room::{DeferredBootstrap, advance};
use common::schema::{RankLayout, TensorLayout};
use common::wire::{ControlMessage, KvPoll, Status, TransferInfo};

use crate::rank::core::event::{
    ChunkCommand, ComponentKey, ComponentOutcome, Counted, Effect, PeerLink, Work,
};
use crate::rank::core::flight::Portion;
use crate::rank::core::prefill::Comparison;
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
    /// Bytes of each of them that has begun, ascending.
    pub under_way: Vec<u64>,
    pub outcome_opt: Option<&'static str>,
}

/// What one item of each component takes on this rank: no less than is read for it.
#[derive(Clone, Debug, Default)]
pub(super) struct ItemBytes {
    page: u64,
    states: Vec<u64>,
    row: u64,
}

impl ItemBytes {
    pub fn of(layout: &RankLayout) -> Self {
        let sum = |tensors: &[TensorLayout]| {
            let items = tensors.iter().map(|tensor| tensor.item_len.get());
            items.fold(0, u64::saturating_add)
        };
        Self {
            page: sum(&layout.kv.tensors),
            states: layout
                .states
                .iter()
                .map(|state| sum(&state.tensors))
                .collect(),
            row: sum(&layout.aux),
        }
    }

    /// About how many bytes a piece of work moves.
    fn of_work(&self, component: ComponentId, work: &Work) -> u64 {
        let (item, count) = match (work, component) {
            (Work::Kv { src_pages, .. }, _) => (self.page, src_pages.len()),
            (Work::State { src, .. }, ComponentId::State(index)) => {
                let item = self.states.get(usize::from(index)).copied();
                (item.unwrap_or_default(), src.len())
            }
            (Work::State { .. } | Work::Aux { .. }, _) => (self.row, 1),
        };
        item.saturating_mul(count as u64)
    }
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
    /// Parts of chunks whose work has not begun, for want of space.
    pub waiting: usize,
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
    /// What is compared before it succeeds.
    pub comparison: Comparison,
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
            waiting: 0,
            moved: BTreeMap::new(),
            abort_askers: Vec::new(),
            is_poisoned: false,
            is_source_held: false,
            was_poisoned: false,
            is_cleared: false,
            comparison: Comparison::default(),
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
        self.comparison.forget();
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
        item_bytes: &ItemBytes,
    ) -> Result<Vec<Portion>, ChunkError> {
        let mut portions = Vec::new();
        for target in &self.targets {
            let Some(link) = &target.link_opt else {
                continue;
            };
            let mut works = Vec::new();
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
            if works.is_empty() {
                continue;
            }
            let works = works.into_iter().map(|(key, work)| {
                let bytes = item_bytes.of_work(key.component, &work);
                (key, work, bytes)
            });
            portions.push(Portion {
                room: self.room,
                generation: self.generation,
                endpoint: endpoint.clone(),
                works: works.collect(),
            });
        }
        Ok(portions)
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

    /// Accepts a planned chunk, of which nothing has begun.
    pub fn accept_chunk(
        &mut self,
        chunk: &ChunkCommand,
        portions: &[Portion],
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
        for (key, ..) in portions.iter().flat_map(|portion| &portion.works) {
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
                    under_way: Vec::new(),
                    outcome_opt: None,
                });
            moved.pending += 1;
        }
    }

    /// Begins what of an accepted chunk goes to one decode rank.
    pub fn begin(&mut self, portion: Portion, now: Instant, effects: &mut Vec<Effect>) {
        self.touched = now;
        for (key, work, bytes) in portion.works {
            if let Some(moved) = self.moved_of(&key) {
                let place = moved.under_way.partition_point(|other| *other < bytes);
                moved.under_way.insert(place, bytes);
            }
            effects.push(Effect::Work { key, work });
        }
    }

    /// What was accepted and has not begun never will.
    pub fn give_up(&mut self, portion: &Portion) {
        self.waiting -= 1;
        for (key, ..) in &portion.works {
            self.pending -= 1;
            if let Some(moved) = self.moved_of(key) {
                moved.pending -= 1;
                moved.outcome_opt.get_or_insert("aborted");
            }
        }
    }

    fn moved_of(&mut self, key: &ComponentKey) -> Option<&mut Moved> {
        self.moved.get_mut(&(key.endpoint.clone(), key.component))
    }

    /// Whether some work has begun and has not been reported.
    pub fn has_begun(&self) -> bool {
        self.moved.values().any(|moved| !moved.under_way.is_empty())
    }

    /// Takes a component's report: the bytes that are not on their way any more, and the failure
    /// that it tells of, if it does.
    pub fn report(
        &mut self,
        key: &ComponentKey,
        outcome: &ComponentOutcome,
        now: Instant,
    ) -> (u64, Option<String>) {
        let moved_opt = self.moved.get_mut(&(key.endpoint.clone(), key.component));
        let Some(moved) = moved_opt.filter(|moved| moved.pending > 0) else {
            return (0, None);
        };
        // What waits for space has not begun, and is no actor's to report.
        let ended = match outcome {
            ComponentOutcome::Retired { .. } | ComponentOutcome::Died { .. } => {
                moved.under_way.len()
            }
            ComponentOutcome::Moved { .. } | ComponentOutcome::Failed { .. } => {
                if moved.under_way.is_empty() {
                    return (0, None);
                }
                1
            }
        };
        self.touched = now;
        // Reports do not say which piece they are about: to take the smallest off leaves the count
        // never below what is there.
        let ended_bytes = moved.under_way.drain(..ended).sum();
        moved.pending -= ended;
        self.pending -= ended;
        let failure_opt = match outcome {
            ComponentOutcome::Moved {
                bytes,
                ranges,
                elapsed,
                transport,
                checks,
                ..
            } => {
                moved.bytes += bytes;
                moved.ranges += ranges;
                moved.elapsed += *elapsed;
                moved.transport = transport;
                moved.outcome_opt.get_or_insert("success");
                // One that has failed tells nothing any more.
                let added = match self.poll.is_terminal() {
                    true => Ok(()),
                    false => self.comparison.add(&key.endpoint, checks),
                };
                added.err()
            }
            ComponentOutcome::Failed {
                reason,
                is_quiesced,
                is_source_free,
                transport,
                ..
            } => {
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
                moved.outcome_opt = Some("aborted");
                self.is_poisoned |= !is_quiesced;
                self.is_source_held |= !is_quiesced;
                Some("its actor was retired".to_owned())
            }
            ComponentOutcome::Died { panicked } => {
                // What it had begun may still be written: nobody is left to say that it is not.
                moved.outcome_opt = Some("failed");
                self.is_poisoned |= ended > 0;
                self.is_source_held |= ended > 0;
                let how = if *panicked { "panicked" } else { "ended" };
                Some(format!("its actor {how} before it had reported"))
            }
        };
        (ended_bytes, failure_opt)
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

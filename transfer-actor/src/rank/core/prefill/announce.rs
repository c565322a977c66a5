//! What decode ranks say before anything is sent: who they are, and where a room must land.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use common::ids::{Endpoint, Generation, Room};
use common::plan::PeerPlanner;
use common::schema::PeerLayout;
use common::wire::{
    Bootstrap, ControlMessage, Hello, KvPoll, Register, Status, TransferInfo, UnreadableSender,
};

use crate::rank::core::event::{Counted, Effect, Life, PeerLink};
use crate::rank::core::prefill::{
    Peer, PrefillCore, deferred_status, deferred_status_of, late, orphaned,
};
use crate::rank::core::prefill_room::{Age, PrefillRoom, Target};
use crate::rank::core::rules::{Rule, holds};
use crate::rank::core::too_many_with_peer;

impl PrefillCore {
    /// A REGISTER has no answer: what cannot work is kept and told to each of the peer's rooms.
    pub(super) fn register(&mut self, register: &Register, now: Instant) -> Vec<Effect> {
        let key = register.engine.key.clone();
        let mut effects = Vec::new();
        self.end_former_life(&register.endpoint, &key, now, &mut effects);
        if !self.peers.contains_key(&key) && self.peers.len() >= self.limits.peers {
            tracing::warn!(
                limit = self.limits.peers,
                peer = key,
                "a peer beyond the limit was refused"
            );
            return effects;
        }
        let identity = &self.identity;
        let layout = PeerLayout::from(register);
        let planner = PeerPlanner::new(
            &identity.layout,
            &identity.parallel,
            &layout,
            identity.planner,
        );
        let link = match planner {
            Ok(planner) => Ok(Arc::new(PeerLink {
                engine: register.engine.clone(),
                kv: register.kv.clone(),
                aux: register.aux.clone(),
                states: register.states.clone(),
                planner,
                checks_opt: self.checks_for(register),
            })),
            Err(error) => {
                tracing::warn!(peer = key, endpoint = %register.endpoint, %error, "a decode rank cannot be served");
                Err(format!(
                    "decode rank {} cannot be served: {error}",
                    register.endpoint
                ))
            }
        };
        if self.identity.checks_opt.is_some()
            && register.engine.asked_checks().is_none()
            && !self.peers.contains_key(&key)
        {
            let peer = register.endpoint.clone();
            effects.push(Effect::Count(Counted::Uncompared { peer }));
        }
        let release = register.release.name();
        self.refused.remove(&register.endpoint);
        let life_opt = self.greet(register, &mut effects);
        self.peers.insert(
            key,
            Peer {
                endpoint: register.endpoint.clone(),
                release,
                link,
                life_opt,
            },
        );
        effects
    }

    /// Answers a Ferry decode rank, so that it sends trailers and knows which process writes. How
    /// its own process is called from now on.
    fn greet(&mut self, register: &Register, effects: &mut Vec<Effect>) -> Option<Life> {
        let number = register.engine.rank_tag()?;
        let endpoint = &register.endpoint;
        let (own_endpoint, engine) = self.identity.contact.clone();
        let hello = Hello {
            endpoint: own_endpoint,
            engine,
            register: number,
            checks: self.checks_for(register),
        };
        effects.push(Effect::Send {
            to: endpoint.clone(),
            message: ControlMessage::Hello(Box::new(hello)),
            generation_opt: None,
            about_opt: None,
        });
        let known = self.peers.get(&register.engine.key);
        let same = known.filter(|peer| peer.endpoint == *endpoint);
        if let Some(life) = same.and_then(|peer| peer.life_opt) {
            return Some(life);
        }
        self.last_life += 1;
        let life = Life(self.last_life);
        effects.push(Effect::Met {
            endpoint: endpoint.clone(),
            life,
            engine: Box::new(register.engine.clone()),
        });
        Some(life)
    }

    /// A decode rank with another engine at the same address was started anew: what it announced
    /// before is void, its former engine forgotten, and its open rooms end here. It is not told,
    /// for it may use the same numbers by now.
    fn end_former_life(
        &mut self,
        endpoint: &Endpoint,
        key: &str,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) {
        let is_same = |peer: &Peer| peer.endpoint == *endpoint;
        if self.peers.get(key).is_some_and(is_same) {
            return;
        }
        let known = self.peers.len();
        self.peers
            .retain(|other, peer| peer.endpoint != *endpoint || other == key);
        let is_known_anew = self.peers.len() < known;
        self.early.change_all(|early| {
            early
                .infos
                .retain(|(info, _)| info.endpoint != *endpoint || info.engine_key == key);
            early
                .bootstrap_opt
                .take_if(|(bootstrap, _)| is_known_anew && bootstrap.reply_to == *endpoint);
        });
        let is_former =
            |target: &Target| target.info.endpoint == *endpoint && target.info.engine_key != key;
        let rooms = self.rooms.values();
        let rooms = rooms.filter(|state| state.targets.iter().any(is_former));
        let rooms: Vec<Room> = rooms.map(|state| state.room).collect();
        let reason = format!("decode rank {endpoint} was started anew");
        for room in rooms {
            self.fail(room, &reason, Some(endpoint), now, effects);
            self.settle(room, now, effects);
        }
    }

    /// A decode rank of a shape that no known release has is told so for each of its rooms, at
    /// once; without an answer it would wait until its timeout. A message that cannot be read from
    /// a rank whose REGISTER could be changes nothing.
    pub(super) fn unreadable(
        &mut self,
        sender: UnreadableSender,
        reason: &str,
        now: Instant,
    ) -> Vec<Effect> {
        let endpoint = sender.endpoint;
        if let Some(room) = sender.room_opt {
            return match self.refused.get(&endpoint).cloned() {
                Some(reason) => self.refuse_room(room, endpoint, None, &reason, now),
                None => Vec::new(),
            };
        }
        if self.refused.len() < self.limits.peers || self.refused.contains_key(&endpoint) {
            let reason = format!("decode rank {endpoint} cannot be served: {reason}");
            self.refused.insert(endpoint, reason);
        }
        Vec::new()
    }

    /// An announcement is gone; who waits for its answer would do so until its timeout.
    pub(super) fn lost(
        &mut self,
        room: Room,
        endpoint: Endpoint,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        let reason = format!("what decode rank {endpoint} announced was lost in a restart");
        self.turn_away(room, endpoint, generation_opt, &reason, now)
    }

    /// No room is opened any more, so whoever has announced one is told, and whoever will.
    pub(super) fn drain(&mut self, reason: String, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        for (room, endpoint, generation_opt) in self.early.take_all() {
            effects.extend(self.turn_away(room, endpoint, generation_opt, &reason, now));
        }
        self.draining_opt = Some(reason);
        effects
    }

    /// Tells a decode rank that nothing will be sent for what it announced.
    fn turn_away(
        &mut self,
        room: Room,
        endpoint: Endpoint,
        generation_opt: Option<Generation>,
        reason: &str,
        now: Instant,
    ) -> Vec<Effect> {
        // Without a generation it may be a late one of a use that succeeded, and a failure would
        // contradict that; who announced the next use so soon waits until its timeout.
        let has_succeeded = |state: &PrefillRoom| state.poll == KvPoll::Success;
        let may_be_late = generation_opt.is_none()
            && (self.tombstones.get(&room).is_some()
                || self.rooms.get(&room).is_some_and(has_succeeded));
        let is_late = may_be_late || self.is_over(room, &endpoint, generation_opt);
        if is_late && holds(Rule::LostMayBeLate) {
            return vec![late("announcement")];
        }
        let effects = self.refuse_room(room, endpoint.clone(), generation_opt, reason, now);
        if let Some(generation) = generation_opt {
            // It was told so, and may give its places to somebody else.
            self.end_use(room, &endpoint, generation.get(), now);
        }
        effects
    }

    fn refuse_room(
        &mut self,
        room: Room,
        endpoint: Endpoint,
        generation_opt: Option<Generation>,
        reason: &str,
        now: Instant,
    ) -> Vec<Effect> {
        let rank = self.identity.unique_rank;
        let mut effects = vec![refusal(
            rank,
            room,
            endpoint.clone(),
            generation_opt,
            reason,
        )];
        let is_open = |state: &PrefillRoom| !state.is_cleared && !state.poll.is_terminal();
        if self.rooms.get(&room).is_some_and(is_open) {
            self.fail(room, reason, None, now, &mut effects);
        } else if self.draining_opt.is_none() {
            let dropped = self.early.change(room, now, &self.limits, |early| {
                early.refused_opt = Some((endpoint, reason.to_owned()));
            });
            effects.extend(orphaned(dropped));
        }
        effects
    }

    pub(super) fn transfer_info(
        &mut self,
        info: TransferInfo,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        let room = info.room;
        if let Some(reason) = self.refused.get(&info.endpoint).cloned() {
            return self.refuse_room(room, info.endpoint, None, &reason, now);
        }
        if self.is_over(room, &info.endpoint, generation_opt) {
            return vec![late("transfer_info")];
        }
        let own_engine = &self.identity.contact.1.key;
        let grant_opt = info.grant_opt.as_ref();
        if grant_opt.is_some_and(|grant| grant.engine != *own_engine)
            && holds(Rule::AnnouncedToThisProcess)
        {
            let rank = self.identity.unique_rank;
            let reason =
                "the room was announced to another process, whose place this one has taken";
            return vec![refusal(rank, room, info.endpoint, generation_opt, reason)];
        }
        match self.rooms.get(&room) {
            Some(state) if state.poll == KvPoll::Failed && !state.is_announced() => {
                // This decode rank does not know yet that the room has failed.
                vec![state.send_status(&info.endpoint, generation_opt, self.identity.unique_rank)]
            }
            Some(state) if state.poll.is_terminal() => self.keep_early(info, generation_opt, now),
            Some(_) => {
                let mut effects = Vec::new();
                self.add_info(info, generation_opt, now, &mut effects);
                effects
            }
            None => self.keep_early(info, generation_opt, now),
        }
    }

    /// Whether this use of the room is over: the decode rank has given it up, and may have been
    /// promised that nothing is written for it, or it has ended.
    fn is_over(&self, room: Room, endpoint: &Endpoint, generation_opt: Option<Generation>) -> bool {
        let Some(generation) = generation_opt else {
            return false;
        };
        let ended = self
            .rooms
            .get(&room)
            .filter(|state| state.poll.is_terminal());
        let ended_opt = ended.and_then(|state| state.generation_of(endpoint));
        let known_opt = self.over.get(&(room, endpoint.clone()));
        let newest_opt = known_opt.max(ended_opt.map(Generation::get));
        newest_opt.is_some_and(|newest| generation.get() <= newest) && holds(Rule::OverIsOver)
    }

    /// A use of the room is over for a decode rank.
    pub(super) fn end_use(
        &mut self,
        room: Room,
        endpoint: &Endpoint,
        generation: u64,
        now: Instant,
    ) {
        let key = (room, endpoint.clone());
        let newest = self.over.lift(&key).unwrap_or(generation);
        self.over.lay(key, newest.max(generation), now);
    }

    fn keep_early(
        &mut self,
        info: TransferInfo,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        let room = info.room;
        if let Some(reason) = self.draining_opt.clone() {
            return self.turn_away(room, info.endpoint, generation_opt, &reason, now);
        }
        let mut effects = Vec::new();
        if self.tombstones.get(&room).is_some() {
            // Early metadata of the next use cannot be told from late metadata of the last.
            effects.push(late("transfer_info"));
        }
        let mut is_taken = false;
        let dropped = self.early.change(room, now, &self.limits, |early| {
            is_taken = early.announce(info, generation_opt);
        });
        effects.extend((!is_taken).then(|| late("transfer_info")));
        effects.extend(orphaned(dropped));
        effects
    }

    /// Other open rooms that a decode rank has announced, where they may be too many.
    fn open_with(&self, endpoint: &Endpoint, room: Room) -> usize {
        if self.rooms.len() <= self.limits.rooms_per_peer {
            return 0;
        }
        let open = self.rooms.values().filter(|state| state.room != room);
        let open = open.filter(|state| {
            let mut targets = state.targets.iter();
            !state.poll.is_terminal() && targets.any(|target| target.info.endpoint == *endpoint)
        });
        open.count()
    }

    /// One more decode rank says where the room must land.
    pub(super) fn add_info(
        &mut self,
        info: TransferInfo,
        generation_opt: Option<Generation>,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) {
        let room = info.room;
        let rank = self.identity.unique_rank;
        let open_with = self.open_with(&info.endpoint, room);
        let Some(state) = self.rooms.get_mut(&room) else {
            return;
        };
        if state.poll.is_terminal() {
            effects.push(state.send_status(&info.endpoint, generation_opt, rank));
            return;
        }
        match state.age_of(&info.endpoint, generation_opt) {
            Age::Older => return effects.push(late("transfer_info")),
            Age::Newer => {
                let endpoint = &info.endpoint;
                let reason = format!("decode rank {endpoint} uses the room's number again");
                self.fail(room, &reason, Some(endpoint), now, effects);
                return effects.extend(self.keep_early(info, generation_opt, now));
            }
            Age::Same => {}
        }
        if let Some(known) = state
            .targets
            .iter()
            .find(|target| target.info.endpoint == info.endpoint)
        {
            if known.info == info {
                effects.push(late("transfer_info"));
                return;
            }
            let reason = format!(
                "decode rank {} announced the room twice, differently",
                info.endpoint
            );
            return self.fail(room, &reason, None, now, effects);
        }
        if state.is_announced() {
            // Bytes may have moved already; what it is told of the others' Success would not be
            // true for it.
            let reason = format!(
                "room {room} was announced by all of its decode ranks before {} did",
                info.endpoint
            );
            tracing::warn!(%room, endpoint = %info.endpoint, "a decode rank too many was refused");
            let refused = refusal(rank, room, info.endpoint, generation_opt, &reason);
            return effects.push(refused);
        }
        let limit = self.limits.rooms_per_peer;
        if open_with >= limit && holds(Rule::RoomsPerPeer) {
            let reason = too_many_with_peer(&format!("decode rank {}", info.endpoint), limit);
            let refused = refusal(rank, room, info.endpoint, generation_opt, &reason);
            effects.push(refused);
            return self.fail(room, &reason, None, now, effects);
        }
        let required = *state.required_opt.get_or_insert(info.required_dst_info_num);
        let endpoint = info.endpoint.clone();
        let accepted = accept_info(&self.peers, &info, required);
        let dst_pages: Arc<[i32]> = info.kv_indices.clone().into();
        let reason = match accepted {
            Ok(link_opt) => {
                state.targets.push(Target {
                    info,
                    generation_opt,
                    dst_pages,
                    link_opt,
                });
                None
            }
            Err(reason) => {
                // It is to be told like the others.
                state.targets.push(Target {
                    info,
                    generation_opt,
                    dst_pages,
                    link_opt: None,
                });
                Some(reason)
            }
        };
        if let Some(reason) = reason {
            tracing::warn!(%room, %endpoint, reason, "a room cannot be served");
            return self.fail(room, &reason, None, now, effects);
        }
        if state.is_announced() {
            state.announced(now, effects);
        }
    }

    pub(super) fn deferred_bootstrap(
        &mut self,
        bootstrap: Bootstrap,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        let (room, rank) = (bootstrap.room, self.identity.unique_rank);
        if self.is_over(room, &bootstrap.reply_to, generation_opt) {
            return vec![late("bootstrap")];
        }
        // After Success the decode can only mean the next use of the number.
        let current = self
            .rooms
            .get_mut(&room)
            .filter(|state| !state.is_cleared && state.poll != KvPoll::Success);
        let Some(state) = current else {
            return self.keep_early_bootstrap(bootstrap, generation_opt, now);
        };
        match state.age_of(&bootstrap.reply_to, generation_opt) {
            Age::Older => return vec![late("bootstrap")],
            Age::Newer => {
                let endpoint = &bootstrap.reply_to;
                let reason = format!("decode rank {endpoint} uses the room's number again");
                let mut effects = Vec::new();
                self.fail(room, &reason, Some(endpoint), now, &mut effects);
                effects.extend(self.keep_early_bootstrap(bootstrap, generation_opt, now));
                return effects;
            }
            Age::Same => {}
        }
        let is_first = state.deferred.endpoint().is_none();
        if is_first {
            state.deferred_generation_opt = generation_opt;
        }
        let is_known = is_first || state.deferred.endpoint() == Some(&bootstrap.reply_to);
        let notice_opt = state.deferred.register(bootstrap.reply_to);
        notice_opt
            .map(|notice| match is_known {
                true => deferred_status(state, &notice, rank),
                // A second decode rank is told of its own use.
                false => deferred_status_of(state, &notice, generation_opt, rank),
            })
            .into_iter()
            .collect()
    }

    fn keep_early_bootstrap(
        &mut self,
        bootstrap: Bootstrap,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        if let Some(reason) = self.draining_opt.clone() {
            let Bootstrap { room, reply_to } = bootstrap;
            return self.turn_away(room, reply_to, generation_opt, &reason, now);
        }
        let mut is_taken = false;
        let dropped = self
            .early
            .change(bootstrap.room, now, &self.limits, |early| {
                is_taken = early.bootstrap(bootstrap, generation_opt);
            });
        let refused = (!is_taken).then(|| late("bootstrap"));
        refused.into_iter().chain(orphaned(dropped)).collect()
    }
}

/// Tells a decode rank that its announcement of a room is not taken. It is about no use of the room
/// here.
fn refusal(
    prefill_rank: i64,
    room: Room,
    to: Endpoint,
    generation_opt: Option<Generation>,
    reason: &str,
) -> Effect {
    Effect::Send {
        to,
        message: ControlMessage::Status(Status {
            room,
            poll: KvPoll::Failed,
            prefill_rank,
            reason: Some(reason.to_owned()),
        }),
        generation_opt,
        about_opt: None,
    }
}

/// Whom an announcement lets this rank write to; `None` for a dummy.
fn accept_info(
    peers: &HashMap<String, Peer>,
    info: &TransferInfo,
    required: u32,
) -> Result<Option<Arc<PeerLink>>, String> {
    if info.required_dst_info_num != required {
        return Err(format!(
            "decode rank {} says that {} ranks announce the room, another said {required}",
            info.endpoint, info.required_dst_info_num
        ));
    }
    if info.is_dummy() {
        return Ok(None);
    }
    let peer = peers.get(&info.engine_key).ok_or_else(|| {
        format!(
            "engine {} of decode rank {} is not registered here; this prefill may have restarted",
            info.engine_key, info.endpoint
        )
    })?;
    let link = peer.link.clone()?;
    link.planner
        .check_announcement(&info.kv_indices, info.aux_index, &info.state_indices)
        .map_err(|error| format!("decode rank {}: {error}", info.endpoint))?;
    Ok(Some(link))
}

//! What decode ranks say before anything is sent: who they are, and where a room must land.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use common::ids::{Endpoint, Room};
use common::plan::PeerPlanner;
use common::schema::PeerLayout;
use common::wire::{
    Bootstrap, ControlMessage, KvPoll, Register, Status, TransferInfo, UnreadableSender,
};

use crate::rank::core::event::{Effect, PeerLink};
use crate::rank::core::prefill::{Early, Peer, PrefillCore, deferred_status, late};
use crate::rank::core::prefill_room::{PrefillRoom, Target};

impl PrefillCore {
    /// A REGISTER has no answer: what cannot work is kept and told to each of the peer's rooms.
    pub(super) fn register(&mut self, register: &Register) -> Vec<Effect> {
        let key = register.engine.key.clone();
        if !self.peers.contains_key(&key) && self.peers.len() >= self.limits.peers {
            tracing::warn!(
                limit = self.limits.peers,
                peer = key,
                "a peer beyond the limit was refused"
            );
            return Vec::new();
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
            })),
            Err(error) => {
                tracing::warn!(peer = key, endpoint = %register.endpoint, %error, "a decode rank cannot be served");
                Err(format!(
                    "decode rank {} cannot be served: {error}",
                    register.endpoint
                ))
            }
        };
        let release = register.release.name();
        self.refused.remove(&register.endpoint);
        self.peers.insert(
            key,
            Peer {
                endpoint: register.endpoint.clone(),
                release,
                link,
            },
        );
        Vec::new()
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
                Some(reason) => self.refuse_room(room, endpoint, &reason, now),
                None => Vec::new(),
            };
        }
        if self.refused.len() < self.limits.peers || self.refused.contains_key(&endpoint) {
            let reason = format!("decode rank {endpoint} cannot be served: {reason}");
            self.refused.insert(endpoint, reason);
        }
        Vec::new()
    }

    fn refuse_room(
        &mut self,
        room: Room,
        endpoint: Endpoint,
        reason: &str,
        now: Instant,
    ) -> Vec<Effect> {
        let mut effects = vec![Effect::Send {
            to: endpoint,
            message: ControlMessage::Status(Status {
                room,
                poll: KvPoll::Failed,
                prefill_rank: self.identity.unique_rank,
                reason: Some(reason.to_owned()),
            }),
            about_opt: None,
        }];
        let is_open = |state: &PrefillRoom| !state.is_cleared && !state.poll.is_terminal();
        if self.rooms.get(&room).is_some_and(is_open) {
            self.fail(room, reason, None, now, &mut effects);
        } else {
            self.early_entry(room, now).refused_opt = Some(reason.to_owned());
        }
        effects
    }

    pub(super) fn transfer_info(&mut self, info: TransferInfo, now: Instant) -> Vec<Effect> {
        let room = info.room;
        if let Some(reason) = self.refused.get(&info.endpoint).cloned() {
            return self.refuse_room(room, info.endpoint, &reason, now);
        }
        match self.rooms.get(&room) {
            Some(state) if state.poll == KvPoll::Failed && !state.is_announced() => {
                // This decode rank does not know yet that the room has failed.
                vec![state.send_status(&info.endpoint, self.identity.unique_rank)]
            }
            Some(state) if state.poll.is_terminal() => self.keep_early(info, now),
            Some(_) => {
                let mut effects = Vec::new();
                self.add_info(info, now, &mut effects);
                effects
            }
            None => self.keep_early(info, now),
        }
    }

    fn keep_early(&mut self, info: TransferInfo, now: Instant) -> Vec<Effect> {
        let room = info.room;
        let mut effects = Vec::new();
        if self.tombstones.get(room).is_some() {
            // Early metadata of the next use cannot be told from late metadata of the last.
            effects.push(late("transfer_info"));
        }
        let early = self.early_entry(room, now);
        early
            .given_up
            .retain(|who| who.as_ref().is_some_and(|who| *who != info.endpoint));
        match early
            .infos
            .iter_mut()
            .find(|known| known.endpoint == info.endpoint)
        {
            Some(known) => *known = info,
            None => early.infos.push(info),
        }
        effects
    }

    fn early_entry(&mut self, room: Room, now: Instant) -> &mut Early {
        if !self.early.contains_key(&room) && self.early.len() >= self.limits.early_rooms {
            let oldest = self
                .early
                .iter()
                .min_by_key(|(_, early)| early.since)
                .map(|(room, _)| *room);
            if let Some(oldest) = oldest {
                tracing::warn!(room = %oldest, "an announced room that nobody opened was dropped, there are too many");
                self.early.remove(&oldest);
            }
        }
        self.early.entry(room).or_insert(Early {
            since: now,
            infos: Vec::new(),
            bootstrap_opt: None,
            given_up: Vec::new(),
            refused_opt: None,
        })
    }

    /// One more decode rank says where the room must land.
    pub(super) fn add_info(&mut self, info: TransferInfo, now: Instant, effects: &mut Vec<Effect>) {
        let room = info.room;
        let Some(state) = self.rooms.get_mut(&room) else {
            return;
        };
        if state.poll.is_terminal() {
            effects.push(state.send_status(&info.endpoint, self.identity.unique_rank));
            return;
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
            effects.push(Effect::Send {
                to: info.endpoint,
                message: ControlMessage::Status(Status {
                    room,
                    poll: KvPoll::Failed,
                    prefill_rank: self.identity.unique_rank,
                    reason: Some(reason),
                }),
                about_opt: None,
            });
            return;
        }
        let required = *state.required_opt.get_or_insert(info.required_dst_info_num);
        let endpoint = info.endpoint.clone();
        let accepted = accept_info(&self.peers, &info, required);
        let dst_pages: Arc<[i32]> = info.kv_indices.clone().into();
        let reason = match accepted {
            Ok(link_opt) => {
                state.targets.push(Target {
                    info,
                    dst_pages,
                    link_opt,
                });
                None
            }
            Err(reason) => {
                // It is to be told like the others.
                state.targets.push(Target {
                    info,
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

    pub(super) fn bootstrap(&mut self, bootstrap: Bootstrap, now: Instant) -> Vec<Effect> {
        let (room, rank) = (bootstrap.room, self.identity.unique_rank);
        // After Success the decode can only mean the next use of the number.
        let current = self
            .rooms
            .get_mut(&room)
            .filter(|state| !state.is_cleared && state.poll != KvPoll::Success);
        let Some(state) = current else {
            let early = self.early_entry(room, now);
            early
                .given_up
                .retain(|who| who.as_ref().is_some_and(|who| *who != bootstrap.reply_to));
            early.bootstrap_opt = Some(bootstrap);
            return Vec::new();
        };
        let notice_opt = state.deferred.register(bootstrap.reply_to);
        let generation = state.generation;
        notice_opt
            .map(|notice| deferred_status(room, generation, &notice, rank))
            .into_iter()
            .collect()
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

//! Comparing what prefill ranks say of their bytes with what is here.

use std::sync::Arc;

use actix::fut::wrap_future;
use actix::prelude::*;
use common::ids::{Endpoint, Generation};
use common::metrics::COMPONENT_UNKNOWN;
use common::wire::Checks;

use crate::api::RoomStatus;
use crate::checksums;
use crate::rank::actor::RankActor;
use crate::rank::core::{Announcement, Event, Mismatch};

impl RankActor {
    /// Compares on a thread of its own, and tells the core.
    pub(super) fn compare(
        &mut self,
        generation: Generation,
        announcement: Arc<Announcement>,
        checks: Checks,
        context: &mut Context<Self>,
    ) {
        let (room, prefill_rank) = (checks.room, checks.prefill_rank);
        let buffers = Arc::clone(&self.buffers);
        let turn = wrap_future(checksums::turn());
        let compared = turn.then(move |turn, actor: &mut Self, _| {
            // Of a room that ended meanwhile nothing is read.
            let is_open = actor.core.view(room).is_some_and(|view| {
                let is_over = matches!(view.status, RoomStatus::Failed | RoomStatus::Success);
                view.generation == generation.get() && !is_over
            });
            let pass = move || checksums::compare(&buffers, &announcement, &checks);
            let compared = async move {
                match is_open {
                    true => turn.make(pass).await,
                    false => Err("the room has ended".to_owned()),
                }
            };
            wrap_future(compared)
        });
        let told = compared.map(move |compared, actor: &mut Self, context| {
            let result = compared.unwrap_or_else(|reason| {
                Err(Mismatch {
                    component: COMPONENT_UNKNOWN,
                    reason,
                })
            });
            if let Ok(bytes) = &result {
                for (component, bytes) in bytes {
                    let component = actor.buffers.layout.component_label(*component);
                    let counter = &actor.metrics.verified_bytes;
                    counter.with_label_values(&[component]).inc_by(*bytes);
                }
            }
            let event = Event::Compared {
                room,
                generation,
                prefill_rank,
                result: result.map(|_| ()),
            };
            actor.apply_quietly(event, context);
        });
        context.spawn(told);
    }

    /// Says once of a peer that its bytes are not compared.
    pub(super) fn note_uncompared(&mut self, peer: &Endpoint) {
        let role = self.role();
        let counter = &self.metrics.verify_unavailable;
        counter.with_label_values(&[role]).inc();
        if self.uncompared.len() < self.config.limits.peers && self.uncompared.insert(peer.clone())
        {
            tracing::warn!(
                %peer,
                role,
                "this peer cannot compare checksums, or does not ask for it: it is served without"
            );
        }
    }
}

//! The permissions to write that a decode rank has given, and their end.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use common::ids::{Endpoint, Generation, Room};
use common::wire::{self, ControlMessage};
use io_engine::{Engine, Grant};

/// How often a permission that was taken back is looked at, at first and at most; it doubles.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(500);

/// By room and prefill rank. Dropping one takes it back.
#[derive(Default)]
pub(super) struct Grants(HashMap<Room, Given>);

struct Given {
    generation: Generation,
    by_rank: HashMap<Endpoint, Arc<Grant>>,
}

impl Grants {
    /// What goes out beside a message, if it is an announcement; the core has said to whom, and
    /// whether with permission.
    pub(super) fn given(
        &mut self,
        engine: &Engine,
        to: &Endpoint,
        message: &ControlMessage,
        generation: Generation,
    ) -> Option<wire::Grant> {
        let ControlMessage::TransferInfo(info) = message else {
            return None;
        };
        let mut asked = info.grant_opt.clone()?;
        if asked.key.take().is_none() {
            return Some(asked);
        }
        let grant = match engine.grant() {
            Ok(grant) => Arc::new(grant),
            Err(error) => {
                // Without one the rank writes by the regions' own keys, and only its answer counts.
                tracing::warn!(room = %info.room, %to, %error, "no permission to write can be made");
                return Some(asked);
            }
        };
        asked.key = Some(grant.key());
        let given = self.0.entry(info.room).or_insert_with(|| Given {
            generation,
            by_rank: HashMap::new(),
        });
        if given.generation != generation {
            given.generation = generation;
            given.by_rank.clear();
        }
        given.by_rank.insert(to.clone(), grant);
        Some(asked)
    }

    /// Takes one back. `None` when none was given.
    pub(super) fn taken(&self, room: Room, to: &Endpoint) -> Option<Weak<Grant>> {
        let grant = self.0.get(&room)?.by_rank.get(to)?;
        grant.take_back();
        Some(Arc::downgrade(grant))
    }

    /// Whether any was given for a room.
    pub(super) fn has(&self, room: Room) -> bool {
        self.0.contains_key(&room)
    }

    /// The room is forgotten; what was given for it holds no more.
    pub(super) fn forget(&mut self, room: Room) {
        self.0.remove(&room);
    }
}

/// Waits until nothing comes in any more under a permission that was taken back, or its room is
/// forgotten. Of a rank that is lost, the connections by which something is coming in are ended.
pub(super) async fn over(grant: Weak<Grant>, is_lost: bool) {
    let mut pause = FIRST_LOOK;
    while let Some(grant) = grant.upgrade() {
        if grant.is_over() {
            return;
        }
        if is_lost {
            grant.end_connections();
        }
        drop(grant);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_LOOK);
    }
}

//! A rank: its configuration, its handle for engines, and the actor behind it.
//!
//! [`RankHandle::start`] is the way in for engines in Rust; [`PrefillRank`] and [`DecodeRank`] show
//! only what their role can do. All rules are in [`core`], all doing is in [`actor`](self).

mod actor;
pub mod core;
mod exits;
mod grants;
mod heartbeats;
mod reports;
mod sessions;
mod start;
mod supervisor;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use actix::ArbiterHandle;
use common::check::CheckMode;
use common::ids::{ComponentId, Room};
use common::plan::PlannerOptions;
use common::schema::RankLayout;
use common::topology::ParallelConfig;
use io_engine::Region;
use serde::Serialize;
use zmtp::PushOptions;

use crate::api::{Announce, Chunk, EngineSpec, OpenRoom, Role, RoomStatus, RoomView};
use crate::error::ApiError;
use crate::messages::{DrainRank, Handle, Observe, StopRank, WaitFor};
use crate::rank::core::{Announcement, Census, ChunkCommand, Event, OpenCommand, PeerSummary};

pub use crate::rank::core::{Limits, Timeouts, WhenFull};
pub(crate) use actor::RankActor;
pub(crate) use exits::Exit;
pub(crate) use supervisor::RankAddress;

/// How a rank is made.
#[derive(Clone, Debug)]
pub struct RankConfig {
    /// Prefill or decode.
    pub role: Role,
    /// Its place in the parallel groups.
    pub parallel: ParallelConfig,
    /// What the engine publishes and compares.
    pub engine: EngineSpec,
    /// A prefill's own bootstrap server, `host:port`.
    pub bootstrap_opt: Option<String>,
    /// Address that peers are told for the control socket.
    pub advertise_host: String,
    /// Where the control socket listens.
    pub control_bind: IpAddr,
    /// Ports for it; any free one if absent.
    pub control_ports_opt: Option<RangeInclusive<u16>>,
    /// How long a room may stay in each state.
    pub timeouts: Timeouts,
    /// How much the rank holds.
    pub limits: Limits,
    /// How strict plans are.
    pub planner: PlannerOptions,
    /// How peers are sent to.
    pub push: PushOptions,
    /// Whether bytes are compared by checksums before a Success, and how many.
    pub verify_opt: Option<CheckMode>,
}

/// A rank's registered buffers, parallel to its layout; `None` where a buffer is elided. The label
/// of each region is its component's.
#[derive(Clone, Debug)]
pub struct RankBuffers {
    /// Sizes.
    pub layout: RankLayout,
    /// KV tensors.
    pub kv: Vec<Option<Region>>,
    /// Auxiliary buffers.
    pub aux: Vec<Option<Region>>,
    /// State components.
    pub states: Vec<Vec<Option<Region>>>,
}

impl RankBuffers {
    /// The buffer of one tensor; `None` where it is elided, or there is none.
    pub(crate) fn region(&self, component: ComponentId, tensor: usize) -> Option<&Region> {
        let tensors = match component {
            ComponentId::Kv => &self.kv,
            ComponentId::Aux => &self.aux,
            ComponentId::State(index) => self.states.get(usize::from(index))?,
        };
        tensors.get(tensor)?.as_ref()
    }
}

/// A rank as it is now, for people and tests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankSnapshot {
    /// Prefill or decode.
    pub role: Role,
    /// Key of its io engine.
    pub engine_key: String,
    /// Its control socket.
    pub control: String,
    /// Rooms by status.
    pub rooms: Census,
    /// Registered decode ranks (prefill).
    pub peers: Vec<PeerSummary>,
    /// Prefill ranks that it registered with (decode).
    pub registered_with: Vec<String>,
    /// Open sessions: peer's engine key and transport.
    pub sessions: Vec<SessionSummary>,
    /// Component actors that run.
    pub components: usize,
    /// Whether it takes no new rooms, because it is about to end.
    pub draining: bool,
}

/// An open session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SessionSummary {
    /// Key of the peer's engine.
    pub peer: String,
    /// How bytes move.
    pub transport: String,
    /// Transports before it in the order of choice, each with why it was not taken.
    pub passed_over: Vec<String>,
}

/// A running rank. Clones share it; it ends with [`RankHandle::stop`].
#[derive(Clone, Debug)]
pub struct RankHandle {
    address: RankAddress,
    /// Whether its control socket is read no more.
    is_deaf: Arc<AtomicBool>,
    arbiter: ArbiterHandle,
    role: Role,
    engine_key: String,
    control: String,
}

fn parse_room(number: u64) -> Result<Room, ApiError> {
    Room::new(number).ok_or_else(|| {
        ApiError::new(
            400,
            "bad_room",
            format!("room {number} is not within 0 to 2^63-1"),
        )
    })
}

impl RankHandle {
    /// Prefill or decode.
    pub const fn role(&self) -> Role {
        self.role
    }

    /// Key of the rank's io engine.
    pub fn engine_key(&self) -> &str {
        &self.engine_key
    }

    /// The rank's control socket, `host:port`.
    pub fn control(&self) -> &str {
        &self.control
    }

    /// Runs an engine's own asynchronous code on the rank's thread, so that no call between the
    /// two has to wake a thread. It must not block: the rank stands still meanwhile. It is dropped
    /// when the rank ends. False when the rank has ended already.
    pub fn spawn(&self, engine: impl Future<Output = ()> + Send + 'static) -> bool {
        self.arbiter.spawn(engine)
    }

    /// Whether the rank's actor runs. One that panicked does not until its successor is up.
    pub fn is_alive(&self) -> bool {
        self.address.current().is_some()
    }

    /// Whether the rank's thread gets round to a question in this time. One that does not is held up
    /// by something, and so are all of its rooms.
    pub async fn answers_within(&self, time: Duration) -> bool {
        let answered = tokio::time::timeout(time, self.address.send(Observe)).await;
        answered.is_ok_and(|answer| answer.is_ok())
    }

    /// Whether the rank lives and hears its peers no more.
    pub fn is_deaf(&self) -> bool {
        self.is_deaf.load(Ordering::Acquire)
    }

    /// Returns when the rank is over: it was stopped, or its actor panicked too often.
    pub async fn over(&self) {
        self.address.over().await;
    }

    /// Opens a room.
    ///
    /// # Errors
    /// `room_exists`, `too_many_rooms`, `bad_room`, `bootstrap_missing`, `rank_gone`.
    pub async fn open(&self, open: OpenRoom) -> Result<RoomView, ApiError> {
        let room = parse_room(open.room)?;
        let command = OpenCommand {
            room,
            bootstrap_opt: open.bootstrap,
            prefill_dp_rank_opt: open.prefill_dp_rank,
            aux_index_opt: open.aux_index,
        };
        self.command(Event::Open(command), room).await
    }

    /// Says where a room's state must land (decode).
    ///
    /// # Errors
    /// `unknown_room`, `room_failed`, `room_announced`, `bad_indices`, `wrong_role`, `rank_gone`.
    pub async fn announce(&self, room: u64, announce: Announce) -> Result<RoomView, ApiError> {
        let room = parse_room(room)?;
        let states = announce.state_indices.into_iter();
        let announcement = Announcement {
            kv_indices: announce.kv_indices.0,
            aux_index_opt: announce.aux_index,
            state_indices: states
                .map(|indices| indices.unwrap_or_default().0)
                .collect(),
            decode_prefix_len_opt: announce.decode_prefix_len,
        };
        self.command(Event::Announce { room, announcement }, room)
            .await
    }

    /// Says that the prefill of a room is complete (policy `prefill_complete`).
    ///
    /// # Errors
    /// `unknown_room`, `wrong_role`, `rank_gone`.
    pub async fn prefill_complete(&self, room: u64) -> Result<RoomView, ApiError> {
        let room = parse_room(room)?;
        self.command(Event::PrefillComplete { room }, room).await
    }

    /// Hands over the next pages of a room (prefill). Returns when they are accepted; their pages
    /// may be used for something else when the room has ended.
    ///
    /// # Errors
    /// `unknown_room`, `not_ready`, `room_failed`, `room_complete`, `bad_indices` (which fails the
    /// room), `wrong_role`, `rank_gone`.
    pub async fn send_chunk(&self, room: u64, chunk: Chunk) -> Result<RoomView, ApiError> {
        let room = parse_room(room)?;
        let states = chunk.state_indices.into_iter();
        let chunk = ChunkCommand {
            kv_indices: chunk.kv_indices.0,
            state_indices: states
                .map(|indices| indices.unwrap_or_default().0)
                .collect(),
            num_kv_tokens_opt: chunk.num_kv_tokens,
            aux_index_opt: chunk.aux_index,
            is_last: chunk.last,
        };
        self.command(Event::Chunk { room, chunk }, room).await
    }

    /// Waits until a room's status is at least this one, or it has ended; returns it as it is when
    /// the time is over.
    ///
    /// # Errors
    /// `unknown_room`, `rank_gone`.
    pub async fn wait(
        &self,
        room: u64,
        wanted_opt: Option<RoomStatus>,
        timeout: Duration,
    ) -> Result<RoomView, ApiError> {
        let room = parse_room(room)?;
        let wait = || WaitFor {
            room,
            wanted_opt,
            timeout,
        };
        // It changes nothing, so the successor of an actor that panicked may be asked the same.
        let address = self.address.next().await.ok_or_else(rank_gone)?;
        if let Ok(waited) = address.send(wait()).await {
            return waited;
        }
        let next = self.address.after(Some(&address)).await;
        let next = next.ok_or_else(rank_gone)?;
        next.send(wait()).await.map_err(|_| self.gone())?
    }

    /// Gives a room up.
    ///
    /// # Errors
    /// `unknown_room`, `rank_gone`.
    pub async fn abort(&self, room: u64, reason_opt: Option<String>) -> Result<RoomView, ApiError> {
        let room = parse_room(room)?;
        let reason = reason_opt.unwrap_or_else(|| "aborted by the engine".to_owned());
        self.command(Event::Abort { room, reason }, room).await
    }

    /// Forgets a room; one that has not ended fails first.
    ///
    /// # Errors
    /// `unknown_room`, `rank_gone`.
    pub async fn clear(&self, room: u64) -> Result<(), ApiError> {
        let room = parse_room(room)?;
        let handled = self.address.send(Handle(Event::Clear { room }, None)).await;
        handled.map_err(|_| self.gone())?.map(|_| ())
    }

    /// The rank as it is now.
    ///
    /// # Errors
    /// `rank_gone`.
    pub async fn observe(&self) -> Result<RankSnapshot, ApiError> {
        self.address.send(Observe).await.map_err(|_| self.gone())
    }

    /// Takes no new rooms from now on; whoever announces one is told this reason. Returns when the
    /// open ones have ended and were cleared, or time is up: how many had not ended.
    pub async fn drain(&self, reason: &str, timeout: Duration) -> usize {
        let drain = DrainRank {
            reason: reason.to_owned(),
            deadline: Instant::now() + timeout,
        };
        let mut silent_opt = None;
        // The successor of an actor that panics meanwhile is asked again.
        while let Some(address) = self.address.after(silent_opt.as_ref()).await {
            if let Ok(open) = address.send(drain.clone()).await {
                return open;
            }
            silent_opt = Some(address);
        }
        0
    }

    /// Ends the rank: every open room fails with this reason, and its peers are told.
    pub async fn stop(&self, reason: &str) {
        if let Err(error) = self.address.send(StopRank(reason.to_owned())).await {
            tracing::debug!(%error, "the rank had ended already");
        }
    }

    async fn command(&self, event: Event, room: Room) -> Result<RoomView, ApiError> {
        let handled = self.address.send(Handle(event, Some(room))).await;
        let view_opt = handled.map_err(|_| self.gone())??;
        view_opt.ok_or_else(|| core::unknown_room(room))
    }

    /// Why a rank's actor did not answer.
    fn gone(&self) -> ApiError {
        match self.address.is_over() {
            true => rank_gone(),
            false => ApiError::new(
                503,
                "rank_restarted",
                "the rank's actor panicked and is restarted; its open rooms have failed",
            ),
        }
    }
}

fn rank_gone() -> ApiError {
    ApiError::new(503, "rank_gone", "the rank has ended; attach again")
}

/// The rank API of a prefill engine in Rust.
#[derive(Clone, Debug)]
pub struct PrefillRank(RankHandle);

/// The rank API of a decode engine in Rust.
#[derive(Clone, Debug)]
pub struct DecodeRank(RankHandle);

macro_rules! role_of {
    ($rank:ident, $role:expr) => {
        impl TryFrom<RankHandle> for $rank {
            type Error = ApiError;

            /// # Errors
            /// `wrong_role`.
            fn try_from(handle: RankHandle) -> Result<Self, ApiError> {
                if handle.role != $role {
                    return Err(core::wrong_role(stringify!($rank), $role.name()));
                }
                Ok(Self(handle))
            }
        }

        impl $rank {
            /// Opens a room; see [`RankHandle::open`].
            ///
            /// # Errors
            /// As there.
            pub async fn open(&self, open: OpenRoom) -> Result<RoomView, ApiError> {
                self.0.open(open).await
            }

            /// Waits for a status; see [`RankHandle::wait`].
            ///
            /// # Errors
            /// As there.
            pub async fn wait(
                &self,
                room: u64,
                wanted_opt: Option<RoomStatus>,
                timeout: Duration,
            ) -> Result<RoomView, ApiError> {
                self.0.wait(room, wanted_opt, timeout).await
            }

            /// Gives a room up; see [`RankHandle::abort`].
            ///
            /// # Errors
            /// As there.
            pub async fn abort(
                &self,
                room: u64,
                reason_opt: Option<String>,
            ) -> Result<RoomView, ApiError> {
                self.0.abort(room, reason_opt).await
            }

            /// Forgets a room; see [`RankHandle::clear`].
            ///
            /// # Errors
            /// As there.
            pub async fn clear(&self, room: u64) -> Result<(), ApiError> {
                self.0.clear(room).await
            }

            /// The rank behind it.
            pub const fn handle(&self) -> &RankHandle {
                &self.0
            }
        }
    };
}

role_of!(PrefillRank, Role::Prefill);
role_of!(DecodeRank, Role::Decode);

impl PrefillRank {
    /// Hands over the next pages; see [`RankHandle::send_chunk`].
    ///
    /// # Errors
    /// As there.
    pub async fn send_chunk(&self, room: u64, chunk: Chunk) -> Result<RoomView, ApiError> {
        self.0.send_chunk(room, chunk).await
    }

    /// The prefill is complete; see [`RankHandle::prefill_complete`].
    ///
    /// # Errors
    /// As there.
    pub async fn prefill_complete(&self, room: u64) -> Result<RoomView, ApiError> {
        self.0.prefill_complete(room).await
    }
}

impl DecodeRank {
    /// Says where the state must land; see [`RankHandle::announce`].
    ///
    /// # Errors
    /// As there.
    pub async fn announce(&self, room: u64, announce: Announce) -> Result<RoomView, ApiError> {
        self.0.announce(room, announce).await
    }
}

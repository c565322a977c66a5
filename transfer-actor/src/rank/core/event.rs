//! What happens to a rank, and what it wants done.

use std::sync::Arc;
use std::time::Duration;

use common::check::CheckMode;
use common::ids::{ComponentId, Endpoint, Generation, Room};
use common::plan::PeerPlanner;
use common::topology::RankMapping;
use common::wire::{
    CheckGroup, Checks, ControlMessage, EngineDesc, Grant, KvPoll, MemoryDesc, UnreadableSender,
};

/// Everything that can happen to a rank, in one queue.
#[derive(Clone, Debug)]
pub enum Event {
    /// A peer's message, decoded, and the decode rank's generation of the room that its trailer
    /// names; only Ferry ranks send one.
    Message(ControlMessage, Option<Generation>),
    /// A decode rank's REGISTER or TRANSFER_INFO could not be decoded.
    Unreadable {
        /// Who sent it.
        sender: UnreadableSender,
        /// What was seen.
        reason: String,
    },
    /// The engine opens a room.
    Open(OpenCommand),
    /// The engine says where a room's state must land (decode).
    Announce {
        /// The room.
        room: Room,
        /// Where.
        announcement: Announcement,
    },
    /// The engine's prefill is complete (policy `prefill_complete`).
    PrefillComplete {
        /// The room.
        room: Room,
    },
    /// The engine hands over the next pages (prefill).
    Chunk {
        /// The room.
        room: Room,
        /// The pages.
        chunk: ChunkCommand,
    },
    /// The engine gives a room up.
    Abort {
        /// The room.
        room: Room,
        /// Why.
        reason: String,
    },
    /// The engine forgets a room.
    Clear {
        /// The room.
        room: Room,
    },
    /// A component actor ended one piece of work, or died.
    Component(ComponentReport),
    /// What a prefill rank says of its bytes was compared with what is here (decode).
    Compared {
        /// The room.
        room: Room,
        /// Its generation then.
        generation: Generation,
        /// The prefill rank.
        prefill_rank: i64,
        /// What differs.
        result: Result<(), Mismatch>,
    },
    /// The bootstrap server answered (decode).
    Resolved {
        /// The room that asked.
        room: Room,
        /// Its generation then.
        generation: Generation,
        /// The prefill engine, or why it cannot be used.
        result: Result<ResolvedPrefill, String>,
    },
    /// A message could not be sent.
    SendFailed {
        /// To whom.
        to: Endpoint,
        /// The room that it was about, with its generation.
        about_opt: Option<(Room, Generation)>,
        /// The message's kind.
        kind: &'static str,
        /// The number of a REGISTER, which has reached nobody.
        register_opt: Option<u64>,
        /// Why.
        reason: String,
    },
    /// A peer is not there any more.
    PeerLost {
        /// Its control socket.
        endpoint: Endpoint,
        /// What a look at it found.
        reason: String,
    },
    /// The process behind a peer has exited: its memory, mappings and connections are gone.
    PeerExited {
        /// Its control socket.
        endpoint: Endpoint,
        /// Which of the processes that were met there.
        life: Life,
        /// What the kernel said.
        reason: String,
    },
    /// An announcement did not come through to the rules.
    Lost {
        /// The room.
        room: Room,
        /// Who announced it.
        endpoint: Endpoint,
        /// Its generation, from a trailer.
        generation_opt: Option<Generation>,
    },
    /// The rank's actor panicked: whatever was under way is not known to have been done.
    Restarted {
        /// What the rooms that were open are told.
        reason: String,
    },
    /// The rank is about to end and takes no new rooms; those that it has go on.
    Drain {
        /// What those are told that come now.
        reason: String,
    },
    /// A prefill rank's permission to write for a room was taken back, and what had come in under it
    /// is over: nothing more lands under it (decode).
    TakenBack {
        /// The room.
        room: Room,
        /// Its generation.
        generation: Generation,
        /// The prefill rank's control socket.
        endpoint: Endpoint,
    },
    /// Time has passed.
    Tick,
    /// The rank is about to end; every open room fails with this reason.
    Shutdown {
        /// Why.
        reason: String,
    },
}

/// Bytes here that are not those that a prefill rank has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The component's label.
    pub component: &'static str,
    /// Which tensor and range, and both checksums.
    pub reason: String,
}

/// One process behind a control socket, by the order in which they were met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Life(pub u64);

/// A room as its engine opens it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenCommand {
    /// The room.
    pub room: Room,
    /// Decode: the prefill's bootstrap server.
    pub bootstrap_opt: Option<String>,
    /// Decode: which data-parallel rank of the prefill, if the engine knows.
    pub prefill_dp_rank_opt: Option<u32>,
    /// Prefill: row of the aux buffers to send from.
    pub aux_index_opt: Option<u32>,
}

/// Where a room's state must land.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Announcement {
    /// Destination pages in the order of the prompt.
    pub kv_indices: Vec<i32>,
    /// Destination row of the aux buffers.
    pub aux_index_opt: Option<u32>,
    /// Destination indices by component; empty where a component has none.
    pub state_indices: Vec<Vec<i32>>,
    /// Tokens that this decode already holds.
    pub decode_prefix_len_opt: Option<u64>,
}

/// The next pages of a room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkCommand {
    /// Source pages; they follow those of the chunk before.
    pub kv_indices: Vec<i32>,
    /// Source indices by component; used with the last chunk.
    pub state_indices: Vec<Vec<i32>>,
    /// Tokens in this chunk; needed when pages are re-split by token.
    pub num_kv_tokens_opt: Option<u64>,
    /// Row of the aux buffers, if it is not the one that the room was opened with.
    pub aux_index_opt: Option<u32>,
    /// Whether this is the last chunk.
    pub is_last: bool,
}

/// Names one component actor: a part of one use of a room on its way to one decode rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ComponentKey {
    /// The room.
    pub room: Room,
    /// Which use of its number.
    pub generation: Generation,
    /// The decode rank's control socket.
    pub endpoint: Endpoint,
    /// The part.
    pub component: ComponentId,
}

/// What a component actor says.
#[derive(Clone, Debug)]
pub struct ComponentReport {
    /// Who it is.
    pub key: ComponentKey,
    /// How it went.
    pub outcome: ComponentOutcome,
}

/// How a piece of work of a component actor ended.
#[derive(Clone, Debug)]
pub enum ComponentOutcome {
    /// Its bytes are in the decode's memory.
    Moved {
        /// Bytes.
        bytes: u64,
        /// Contiguous ranges.
        ranges: u64,
        /// Items beyond the common prefix of the two index lists.
        truncated_items: u64,
        /// From submission to completion.
        elapsed: Duration,
        /// The transport's name.
        transport: &'static str,
        /// Checksums of its source, if the decode rank asks for them.
        checks: Vec<CheckGroup>,
    },
    /// It failed, or was cancelled.
    Failed {
        /// A short fixed word.
        kind: &'static str,
        /// What happened.
        reason: String,
        /// Whether it is proved that nothing is written any more.
        is_quiesced: bool,
        /// Whether it is proved that nothing is read any more.
        is_source_free: bool,
        /// The transport's name, if one was chosen.
        transport: &'static str,
    },
    /// It was retired: all of its work is over, reported or not.
    Retired {
        /// Whether it is proved that nothing is written any more.
        is_quiesced: bool,
    },
    /// The actor is gone. Work that it had not reported is lost.
    Died {
        /// Whether it panicked.
        panicked: bool,
    },
}

/// A prefill engine, as the bootstrap server knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedPrefill {
    /// Its bootstrap server.
    pub bootstrap: String,
    /// The data-parallel rank that serves the room.
    pub dp_rank: u32,
    /// Whether the engine has no other data-parallel rank.
    pub is_only_dp_rank: bool,
    /// How many ranks answer.
    pub mapping: RankMapping,
    /// The ranks to talk to.
    pub targets: Vec<PrefillTarget>,
    /// `early` or `prefill_complete`.
    pub decode_allocation_policy: String,
}

impl ResolvedPrefill {
    /// Whether one of its ranks has this control socket.
    pub(crate) fn has_rank_at(&self, endpoint: &Endpoint) -> bool {
        self.targets
            .iter()
            .any(|target| target.endpoint == *endpoint)
    }
}

/// One rank of a prefill engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillTarget {
    /// Its control socket.
    pub endpoint: Endpoint,
    /// Whether it has nothing to deliver.
    pub is_dummy: bool,
    /// Its number, as its STATUS messages carry it.
    pub unique_rank: i64,
    /// Whether it is a Ferry rank, which reads and sends trailers.
    pub is_ferry: bool,
}

/// The decode side of a room, for the component actors of a prefill.
#[derive(Clone, Debug)]
pub struct PeerLink {
    /// The decode's io engine.
    pub engine: EngineDesc,
    /// Its buffers.
    pub kv: Vec<MemoryDesc>,
    /// Its aux buffers.
    pub aux: Vec<MemoryDesc>,
    /// Its state components.
    pub states: Vec<Vec<Option<MemoryDesc>>>,
    /// Joins the two sides' layouts.
    pub planner: PeerPlanner,
    /// Whether it compares checksums before it believes a Success, and of how much.
    pub checks_opt: Option<CheckMode>,
}

/// One piece of work for a component actor. It was checked; the actor plans it again and writes.
#[derive(Clone, Debug)]
pub enum Work {
    /// Pages of one chunk.
    Kv {
        /// Source pages.
        src_pages: Vec<i32>,
        /// Pages of the request before the chunk.
        position: usize,
        /// All destination pages.
        dst_pages: Arc<[i32]>,
        /// Tokens that the decode already holds.
        decode_prefix_len: u64,
        /// Tokens in the chunk.
        num_kv_tokens_opt: Option<u64>,
    },
    /// The items of a state component.
    State {
        /// Source indices.
        src: Vec<i32>,
        /// Destination indices.
        dst: Vec<i32>,
    },
    /// One row of each aux buffer.
    Aux {
        /// Source row.
        src_row: u32,
        /// Destination row.
        dst_row: u32,
    },
}

/// What the core wants done. The shell does it in this order.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Send a message.
    Send {
        /// To whom.
        to: Endpoint,
        /// What.
        message: ControlMessage,
        /// The decode rank's generation of the room, for a trailer; `None`: no trailer.
        generation_opt: Option<Generation>,
        /// The room that it is about, with its generation.
        about_opt: Option<(Room, Generation)>,
    },
    /// Start a component actor.
    Start {
        /// Who it is.
        key: ComponentKey,
        /// Whom it writes to.
        link: Arc<PeerLink>,
        /// Under what, where bytes pass the decode's own hands.
        grant_opt: Option<Grant>,
    },
    /// Give a component actor a piece of work; exactly one report (or its death) answers it.
    Work {
        /// Who does it.
        key: ComponentKey,
        /// What.
        work: Work,
    },
    /// Begin no more writes; the report of each piece of work still comes.
    Cancel {
        /// Whose.
        key: ComponentKey,
    },
    /// Begin no more writes and give all of them up; one report of the end of all comes.
    Retire {
        /// Whose.
        key: ComponentKey,
    },
    /// End a component actor that has nothing to do.
    Stop {
        /// Which.
        key: ComponentKey,
    },
    /// Ask the bootstrap server for a prefill engine (decode).
    Resolve {
        /// For which room.
        room: Room,
        /// Its generation.
        generation: Generation,
        /// The bootstrap server.
        bootstrap: String,
        /// The data-parallel rank, if known.
        dp_rank_opt: Option<u32>,
    },
    /// Put a row into an aux buffer (decode).
    WriteAux {
        /// The room that it is for.
        room: Room,
        /// Which buffer.
        buffer_index: u32,
        /// Which row.
        row: u32,
        /// The bytes.
        data: Vec<u8>,
    },
    /// Compare what a prefill rank says of its bytes with what is here (decode); one
    /// [`Event::Compared`] answers it.
    Compare {
        /// The room's generation.
        generation: Generation,
        /// Where the room's bytes are.
        announcement: Arc<Announcement>,
        /// The checksums.
        checks: Box<Checks>,
    },
    /// A peer has said which engine it has: watch its process.
    Met {
        /// Its control socket.
        endpoint: Endpoint,
        /// What to call this process when it has exited.
        life: Life,
        /// Its engine.
        engine: Box<EngineDesc>,
    },
    /// Take a prefill rank's permission to write for a room back; the answer is
    /// [`Event::TakenBack`], once nothing is under way under it (decode).
    TakeBack {
        /// The room.
        room: Room,
        /// Its generation.
        generation: Generation,
        /// The prefill rank's control socket.
        endpoint: Endpoint,
        /// The rank is gone: the connections by which something is coming in are ended.
        is_lost: bool,
    },
    /// A room's view has changed: whoever waits for it is to be told.
    Changed {
        /// Which.
        room: Room,
    },
    /// Count something.
    Count(Counted),
}

/// Something to count.
#[derive(Clone, Debug, PartialEq)]
pub enum Counted {
    /// A room came to its end.
    RoomFinished {
        /// The room.
        room: Room,
        /// `success` or `failed`.
        poll: KvPoll,
        /// The first cause, when it failed.
        reason_opt: Option<String>,
        /// From its opening.
        elapsed: Duration,
    },
    /// A room's first byte moves.
    RoomBegan {
        /// From its opening.
        elapsed: Duration,
    },
    /// A message for a room that is gone, or a result of an older use of it.
    Late {
        /// The message's kind.
        kind: &'static str,
    },
    /// A chunk waits for bytes on their way to arrive.
    Waiting {
        /// For how many decode ranks.
        portions: usize,
    },
    /// Bytes that a decode rank found are not those that were sent to it.
    Mismatched {
        /// The component's label.
        component: &'static str,
    },
    /// A room's bytes from this peer are not compared, though this rank asks for it.
    Uncompared {
        /// The peer.
        peer: Endpoint,
    },
    /// Rooms that a peer announced were dropped before the engine opened them.
    Orphaned {
        /// How many.
        rooms: usize,
    },
}

//! Which events meet which states, and which of them cannot.

use crate::rank::core::tests::*;

/// Role (whether a prefill), state of a room, kind of an event.
pub type Pair = (bool, &'static str, &'static str);

pub const PREFILL_STATES: [&str; 12] = [
    "unknown",
    "early",
    "cleared",
    "given_up",
    "poisoned",
    "bootstrapping",
    "waiting",
    "transferring",
    "held_up",
    "success",
    "failed",
    "draining",
];
pub const DECODE_STATES: [&str; 9] = [
    "unknown",
    "cleared",
    "unsettled",
    "bootstrapping",
    "unpublished",
    "published",
    "transferring",
    "success",
    "failed",
];
pub const KINDS: [&str; 40] = [
    "register",
    "transfer_info",
    "abort",
    "abort_ack",
    "aux_data",
    "bootstrap",
    "status_failed",
    "status_bootstrapping",
    "status_waiting",
    "status_transferring",
    "status_success",
    "unreadable",
    "open",
    "announce",
    "prefill_complete",
    "chunk",
    "last_chunk",
    "engine_abort",
    "clear",
    "moved",
    "failed_quiesced",
    "failed_unproved",
    "retired",
    "died",
    "resolved",
    "unresolved",
    "send_failed",
    "peer_lost",
    "peer_exited",
    "hello",
    "taken_back",
    "checks",
    "checked",
    "compared_equal",
    "compared_different",
    "tick",
    "shutdown",
    "restarted",
    "drain",
    "lost",
];

pub fn state_of(core: &RankCore, room: Room) -> &'static str {
    match core {
        RankCore::Prefill(core) => core.state_name(room),
        RankCore::Decode(core) => core.state_name(room),
    }
}

pub fn kind_of(event: &Event) -> &'static str {
    match event {
        Event::Message(ControlMessage::Status(status), _) => match status.poll {
            KvPoll::Failed => "status_failed",
            KvPoll::Bootstrapping => "status_bootstrapping",
            KvPoll::WaitingForInput => "status_waiting",
            KvPoll::Transferring => "status_transferring",
            KvPoll::Success => "status_success",
        },
        Event::Message(message, _) => message.kind(),
        Event::Compared { result: Ok(()), .. } => "compared_equal",
        Event::Compared { .. } => "compared_different",
        Event::Unreadable { .. } => "unreadable",
        Event::Open(_) => "open",
        Event::Announce { .. } => "announce",
        Event::PrefillComplete { .. } => "prefill_complete",
        Event::Chunk { chunk, .. } if chunk.is_last => "last_chunk",
        Event::Chunk { .. } => "chunk",
        Event::Abort { .. } => "engine_abort",
        Event::Clear { .. } => "clear",
        Event::Component(report) => match report.outcome {
            ComponentOutcome::Moved { .. } => "moved",
            ComponentOutcome::Failed {
                is_quiesced: true, ..
            } => "failed_quiesced",
            ComponentOutcome::Failed { .. } => "failed_unproved",
            ComponentOutcome::Retired { .. } => "retired",
            ComponentOutcome::Died { .. } => "died",
        },
        Event::Resolved { result: Ok(_), .. } => "resolved",
        Event::Resolved { .. } => "unresolved",
        Event::SendFailed { .. } => "send_failed",
        Event::PeerLost { .. } => "peer_lost",
        Event::PeerExited { .. } => "peer_exited",
        Event::TakenBack { .. } => "taken_back",
        Event::Tick => "tick",
        Event::Shutdown { .. } => "shutdown",
        Event::Restarted { .. } => "restarted",
        Event::Drain { .. } => "drain",
        Event::Lost { .. } => "lost",
    }
}

/// Whether an event meets the room; those about no room meet all of them.
pub fn is_about(event: &Event, room: Room) -> bool {
    let about_opt = match event {
        Event::Message(message, _) => message.room(),
        Event::Unreadable { sender, .. } => sender.room_opt,
        Event::Open(command) => Some(command.room),
        Event::Announce { room, .. }
        | Event::PrefillComplete { room }
        | Event::Chunk { room, .. }
        | Event::Abort { room, .. }
        | Event::Clear { room }
        | Event::Lost { room, .. }
        | Event::Resolved { room, .. }
        | Event::TakenBack { room, .. }
        | Event::Compared { room, .. } => Some(*room),
        Event::Component(report) => Some(report.key.room),
        Event::SendFailed { about_opt, .. } => about_opt.map(|(room, _)| room),
        Event::PeerLost { .. }
        | Event::PeerExited { .. }
        | Event::Tick
        | Event::Restarted { .. }
        | Event::Drain { .. }
        | Event::Shutdown { .. } => None,
    };
    about_opt.is_none_or(|about| about == room)
}

/// Pairs that no run can reach, and why. There are none: a rank may be sent anything in any state.
pub const IMPOSSIBLE: [(Pair, &str); 0] = [];

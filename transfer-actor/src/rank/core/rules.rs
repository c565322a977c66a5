//! The rules that the promises of this module rest on, by name. Outside tests every rule holds and
//! nothing is asked; the simulator leaves one out at a time and has to notice.

/// A rule that can be left out in a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// An abort is acknowledged only when no write of the room is unreported.
    AckAfterDrain,
    /// A room with a write that nobody can vouch for is never acknowledged.
    NoAckWhenPoisoned,
    /// No write begins for a room that has failed.
    NoWriteAfterFailure,
    /// Success is said only when every write has been reported.
    SuccessAfterReports,
    /// Success is said only after the last chunk.
    SuccessAfterLastChunk,
    /// A failed write fails its room.
    FailedWriteFails,
    /// Nothing is written before all decode ranks of a room have announced it.
    EveryDecodeAnnounces,
    /// Results of an older use of a room are ignored.
    ReportGeneration,
    /// A cleared room stays until its last write is reported.
    ClearedRoomDrains,
    /// What belongs to a use that is over is refused, however late it comes.
    OverIsOver,
    /// A decode believes a STATUS of its own use of the room only.
    StatusGeneration,
    /// A decode believes an ABORT_ACK of its own use of the room only.
    AckGeneration,
    /// A Success without a generation proves nothing while messages of an older use may come.
    AmbiguousSuccess,
    /// A room's status never leaves Failed or Success.
    EndIsFinal,
    /// Success needs every rank that has something to deliver.
    EveryPrefillSucceeds,
    /// A rank with nothing to deliver cannot report Success.
    DummyProvesNothing,
    /// Places are free only when every writer has proved that it stopped.
    EveryWriterStops,
    /// A write that does not end fails its room in time.
    TransferTimeout,
    /// A room that is not announced fails in time.
    BootstrapTimeout,
    /// A prefill that does not finish fails the decode's room in time.
    WaitingTimeout,
    /// The rooms of a prefill rank that is gone fail at once.
    PeerLossFails,
    /// The exit of a process proves nothing of another behind the same address.
    ExitOfThisLife,
    /// What came in under a permission that was taken back is waited for.
    TakenBackWhenOver,
    /// A permission that was taken back proves nothing of a rank that has other ways in.
    OnlyWayIn,
    /// What was announced to a process is not taken by the one in its place.
    AnnouncedToThisProcess,
    /// What is read, perhaps, is not given back to the prefill's engine.
    HeldSource,
    /// The bootstrap server's answer to an older question is ignored.
    ResolvedGeneration,
    /// After a panic every component actor with work is asked for the end of all of it.
    RestartAsksAgain,
    /// Who announced a room is told that this was lost only if it cannot be of a use that is over.
    LostMayBeLate,
    /// A rank that drains takes no new rooms.
    DrainTakesNoRooms,
    /// No more bytes are on their way than may be.
    InFlightIsBounded,
    /// What waits begins when there is space.
    WaitingBegins,
    /// No more rooms are open with one peer than may be.
    RoomsPerPeer,
    /// A decode that asks for checksums believes a Success only once they are equal.
    SuccessAfterComparison,
    /// A prefill that is asked for checksums says Success only once they are found equal.
    SuccessAfterAnswer,
    /// Places are not free while a comparison reads them.
    ReadBeforeRelease,
}

#[cfg(not(test))]
pub(super) const fn holds(_: Rule) -> bool {
    true
}

#[cfg(test)]
pub(super) use broken::holds;
#[cfg(test)]
pub(crate) use broken::{ALL, break_rule};

#[cfg(test)]
mod broken {
    use std::cell::Cell;

    use super::Rule;

    thread_local! {
        /// The rule that does not hold on this thread.
        static BROKEN: Cell<Option<Rule>> = const { Cell::new(None) };
    }

    pub(in crate::rank::core) fn holds(rule: Rule) -> bool {
        BROKEN.get() != Some(rule)
    }

    /// Every rule.
    pub(crate) const ALL: [Rule; 36] = [
        Rule::AckAfterDrain,
        Rule::NoAckWhenPoisoned,
        Rule::NoWriteAfterFailure,
        Rule::SuccessAfterReports,
        Rule::SuccessAfterLastChunk,
        Rule::FailedWriteFails,
        Rule::EveryDecodeAnnounces,
        Rule::ReportGeneration,
        Rule::ClearedRoomDrains,
        Rule::OverIsOver,
        Rule::StatusGeneration,
        Rule::AckGeneration,
        Rule::AmbiguousSuccess,
        Rule::EndIsFinal,
        Rule::EveryPrefillSucceeds,
        Rule::DummyProvesNothing,
        Rule::EveryWriterStops,
        Rule::TransferTimeout,
        Rule::BootstrapTimeout,
        Rule::WaitingTimeout,
        Rule::PeerLossFails,
        Rule::ExitOfThisLife,
        Rule::TakenBackWhenOver,
        Rule::OnlyWayIn,
        Rule::AnnouncedToThisProcess,
        Rule::HeldSource,
        Rule::ResolvedGeneration,
        Rule::RestartAsksAgain,
        Rule::LostMayBeLate,
        Rule::DrainTakesNoRooms,
        Rule::InFlightIsBounded,
        Rule::WaitingBegins,
        Rule::RoomsPerPeer,
        Rule::SuccessAfterComparison,
        Rule::SuccessAfterAnswer,
        Rule::ReadBeforeRelease,
    ];

    /// Leaves a rule out on this thread, or none.
    pub(crate) fn break_rule(rule_opt: Option<Rule>) {
        BROKEN.set(rule_opt);
    }
}

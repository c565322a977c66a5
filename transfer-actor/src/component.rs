//! One actor for one part of one room on its way to one decode rank.
//!
//! It plans, submits, awaits and reports. If it panics or is killed, its drop tells the rank, so
//! the room fails with that reason and nothing hangs.

use std::collections::HashMap;
use std::sync::Arc;

use actix::prelude::*;
use common::ids::ComponentId;
use common::plan::{ComponentPlan, KvChunk, PlanError};
use common::wire::{CheckGroup, Grant};
use futures::FutureExt;
use futures::future::{BoxFuture, OptionFuture, Shared};
use io_engine::{
    Reach, RemoteRegion, Session, TransferHandle, TransferResult, TransportError,
    TransportErrorKind, WriteBatch, WritePair,
};

use crate::checksums;
use crate::messages::{CancelWork, DoWork, Report, RetireComponent, StopComponent};
use crate::rank::core::{ComponentKey, ComponentOutcome, ComponentReport, PeerLink, Work};
use crate::rank::{RankAddress, RankBuffers};

/// A session that is being opened, or was; all components of a peer share it.
pub(crate) type SharedSession = Shared<BoxFuture<'static, Result<Session, TransportError>>>;

/// The label of a transfer for which no transport was chosen.
const NO_TRANSPORT: &str = "none";

/// Whom a component is sent to.
pub(crate) struct Destination {
    pub link: Arc<PeerLink>,
    /// Under what, where bytes pass the decode's own hands.
    pub grant_opt: Option<Grant>,
}

/// The actor. One piece of work after another is submitted as it comes; they may overlap.
pub(crate) struct ComponentActor {
    key: ComponentKey,
    to: Destination,
    buffers: Arc<RankBuffers>,
    session: SharedSession,
    rank: RankAddress,
    in_flight: HashMap<u64, TransferHandle>,
    next_work: u64,
    is_cancelled: bool,
    /// Pieces of work that were taken and are not over.
    open_works: usize,
    /// Nothing proves that one of its writes has stopped, whoever was told of it.
    is_unproved: bool,
    is_retired: bool,
}

impl ComponentActor {
    pub(crate) fn new(
        key: ComponentKey,
        to: Destination,
        buffers: Arc<RankBuffers>,
        session: SharedSession,
        rank: RankAddress,
    ) -> Self {
        Self {
            key,
            to,
            buffers,
            session,
            rank,
            in_flight: HashMap::new(),
            next_work: 0,
            is_cancelled: false,
            open_works: 0,
            is_unproved: false,
            is_retired: false,
        }
    }

    fn report(&self, outcome: ComponentOutcome) -> impl Future<Output = ()> + use<> {
        let (rank, key) = (self.rank.clone(), self.key.clone());
        async move {
            // An actor that panics before it has taken the report has a successor, which asks
            // anew: see `RetireComponent`. If the rank is gone, nobody waits for it.
            let _ = rank.send(Report(ComponentReport { key, outcome })).await;
        }
    }

    #[cfg(test)]
    pub(crate) fn writes_under_way(&self) -> usize {
        self.in_flight.len()
    }

    /// One piece of work is over; whether its own report is still wanted.
    fn end_work(&mut self, number: u64, outcome: &ComponentOutcome) -> Option<ComponentOutcome> {
        self.in_flight.remove(&number);
        self.open_works -= 1;
        self.is_unproved |= matches!(
            outcome,
            ComponentOutcome::Failed {
                is_quiesced: false,
                ..
            }
        );
        match self.is_retired {
            true => self.retired(),
            false => Some(outcome.clone()),
        }
    }

    /// The one report of an actor that was retired, once nothing of its work is left.
    fn retired(&self) -> Option<ComponentOutcome> {
        (self.open_works == 0).then_some(ComponentOutcome::Retired {
            is_quiesced: !self.is_unproved,
        })
    }

    fn submit(
        &mut self,
        session: Result<Session, TransportError>,
        work: &Work,
    ) -> Result<(Session, ComponentPlan, TransferHandle), ComponentOutcome> {
        let session = session.map_err(|error| failed(NO_TRANSPORT, &error))?;
        let transport = session.transport().name();
        if self.is_cancelled {
            let error =
                TransportError::quiesced(TransportErrorKind::Cancelled, "the room has failed");
            return Err(failed(transport, &error));
        }
        let planned = plan(&self.to.link, self.key.component, work).map_err(|error| {
            ComponentOutcome::Failed {
                kind: error.kind(),
                reason: error.to_string(),
                is_quiesced: true,
                is_source_free: true,
                transport,
            }
        })?;
        let batch =
            batch(&self.buffers, &self.to, &planned).map_err(|error| failed(transport, &error))?;
        let handle = session.write(batch);
        Ok((session, planned, handle))
    }
}

fn ended(
    transport: &'static str,
    truncated_items: u64,
    moved: TransferResult,
    sums: Result<Vec<CheckGroup>, String>,
) -> ComponentOutcome {
    match (moved, sums) {
        (Err(error), _) => failed(transport, &error),
        (Ok(_), Err(reason)) => ComponentOutcome::Failed {
            kind: "checksums",
            reason,
            is_quiesced: true,
            is_source_free: true,
            transport,
        },
        (Ok(moved), Ok(checks)) => ComponentOutcome::Moved {
            bytes: moved.bytes,
            ranges: moved.ranges,
            truncated_items,
            elapsed: moved.elapsed,
            transport,
            checks,
        },
    }
}

fn failed(transport: &'static str, error: &TransportError) -> ComponentOutcome {
    ComponentOutcome::Failed {
        kind: error.kind().name(),
        reason: error.to_string(),
        is_quiesced: error.is_quiesced(),
        is_source_free: error.is_source_free(),
        transport,
    }
}

pub(crate) fn plan(
    link: &PeerLink,
    component: ComponentId,
    work: &Work,
) -> Result<ComponentPlan, PlanError> {
    match (component, work) {
        (
            ComponentId::Kv,
            Work::Kv {
                src_pages,
                position,
                dst_pages,
                decode_prefix_len,
                num_kv_tokens_opt,
            },
        ) => link.planner.plan_kv(&KvChunk {
            src_pages,
            position: *position,
            dst_pages,
            decode_prefix_len: *decode_prefix_len,
            num_kv_tokens: *num_kv_tokens_opt,
        }),
        (ComponentId::State(index), Work::State { src, dst }) => {
            link.planner.plan_state(index, src, dst)
        }
        (ComponentId::Aux, Work::Aux { src_row, dst_row }) => {
            link.planner.plan_aux(*src_row, *dst_row)
        }
        (component, _) => Err(PlanError::Argument {
            what: "work",
            detail: format!("it is not for {component:?}"),
        }),
    }
}

/// Between which memories a component's bytes move.
pub(crate) fn reach(buffers: &RankBuffers, link: &PeerLink, component: ComponentId) -> Reach {
    match component {
        ComponentId::Kv => Reach::between(buffers.kv.iter().flatten(), &link.kv),
        ComponentId::Aux => Reach::between(buffers.aux.iter().flatten(), &link.aux),
        ComponentId::State(index) => {
            let index = usize::from(index);
            let own = buffers.states.get(index).into_iter().flatten().flatten();
            let theirs = link.states.get(index).into_iter().flatten().flatten();
            Reach::between(own, theirs)
        }
    }
}

/// Joins planned tensors with registered regions. O(pairs); runs are shared.
fn batch(
    buffers: &RankBuffers,
    Destination { link, grant_opt }: &Destination,
    plan: &ComponentPlan,
) -> Result<WriteBatch, TransportError> {
    let missing = |side: &str, tensor: usize| {
        TransportError::quiesced(
            TransportErrorKind::NotRegistered,
            format!("tensor {tensor} of the {side} side has no buffer"),
        )
    };
    let remote = |tensor: usize| match plan.component {
        ComponentId::Kv => link.kv.get(tensor),
        ComponentId::Aux => link.aux.get(tensor),
        ComponentId::State(index) => link.states.get(usize::from(index))?.get(tensor)?.as_ref(),
    };
    let pairs = plan.pairs().map(|pair| {
        let remote = remote(pair.dst).ok_or_else(|| missing("decode", pair.dst))?;
        let remote = RemoteRegion::from_desc(remote)?;
        let remote = match grant_opt.as_ref().and_then(|grant| grant.key) {
            Some(key) => remote.under_grant(key),
            None => remote,
        };
        Ok(WritePair {
            local: buffers
                .region(plan.component, pair.src)
                .ok_or_else(|| missing("prefill", pair.src))?
                .clone(),
            remote,
            runs: pair.runs.clone(),
        })
    });
    Ok(WriteBatch {
        pairs: pairs.collect::<Result<_, TransportError>>()?,
    })
}

impl Actor for ComponentActor {
    type Context = Context<Self>;
}

impl Drop for ComponentActor {
    fn drop(&mut self) {
        for handle in self.in_flight.values() {
            handle.cancel();
        }
        let outcome = ComponentOutcome::Died {
            panicked: std::thread::panicking(),
        };
        let report = Report(ComponentReport {
            key: self.key.clone(),
            outcome,
        });
        #[allow(
            clippy::disallowed_methods,
            reason = "a lifecycle notice, sent once, and a drop cannot wait"
        )]
        if let Some(rank) = self.rank.current() {
            rank.do_send(report);
        }
    }
}

impl Handler<DoWork> for ComponentActor {
    type Result = ();

    fn handle(&mut self, DoWork(work): DoWork, context: &mut Context<Self>) {
        let number = self.next_work;
        self.next_work += 1;
        self.open_works += 1;
        let opened = self.session.clone().into_actor(self);
        let done = opened.then(move |session, actor, _| {
            let submitted = actor.submit(session, &work);
            if let Ok((_, _, handle)) = &submitted {
                actor.in_flight.insert(number, handle.clone());
            }
            let (buffers, room) = (Arc::clone(&actor.buffers), actor.key.room);
            let mode_opt = actor.to.link.checks_opt;
            async move {
                match submitted {
                    Err(outcome) => outcome,
                    Ok((session, plan, handle)) => {
                        let transport = session.transport().name();
                        let truncated_items = plan.truncated_items;
                        // Beside the copy, and over before its end is reported.
                        let sums = async move {
                            let Some(mode) = mode_opt else {
                                return Ok(Vec::new());
                            };
                            let sums = move || checksums::of_sources(&buffers, &plan, (mode, room));
                            checksums::turn().await.make(sums).await?
                        };
                        let (moved, sums) = futures::join!(handle, sums);
                        ended(transport, truncated_items, moved, sums)
                    }
                }
            }
            .into_actor(actor)
        });
        let reported = done.then(move |outcome, actor, _| {
            let reported_opt = actor.end_work(number, &outcome);
            let reported_opt = reported_opt.map(|outcome| actor.report(outcome));
            OptionFuture::from(reported_opt)
                .map(|_| ())
                .into_actor(actor)
        });
        context.spawn(reported);
    }
}

impl Handler<CancelWork> for ComponentActor {
    type Result = ();

    fn handle(&mut self, _: CancelWork, _: &mut Context<Self>) {
        self.is_cancelled = true;
        for handle in self.in_flight.values() {
            handle.cancel();
        }
    }
}

impl Handler<RetireComponent> for ComponentActor {
    type Result = ();

    /// Asked again, it answers again: the rank that asked may not have taken the answer.
    fn handle(&mut self, _: RetireComponent, context: &mut Context<Self>) {
        self.is_retired = true;
        self.is_cancelled = true;
        for handle in self.in_flight.values() {
            handle.cancel();
        }
        if let Some(outcome) = self.retired() {
            let reported = self.report(outcome).into_actor(self);
            context.spawn(reported);
        }
    }
}

impl Handler<StopComponent> for ComponentActor {
    type Result = ();

    fn handle(&mut self, _: StopComponent, context: &mut Context<Self>) {
        context.stop();
    }
}

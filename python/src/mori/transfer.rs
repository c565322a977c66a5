//! From transfers that were asked for to a batch in flight to their statuses.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use common::plan::RunList;
use io_engine::{
    Direction, Engine, Reach, Region, RemoteRegion, Session, TransferHandle, TransferResult,
    TransportError, TransportKind, WriteBatch, WritePair,
};
use transfer_actor::api::Role;
use transfer_actor::metrics::TransferLabels;

use crate::mori::notify::Notifier;
use crate::mori::outbox::{Asked, Outbox};
use crate::mori::remote::Remote;
use crate::mori::status::{code, code_of};

/// Where a transfer goes, and who is told of its end.
pub(crate) struct Route {
    pub(crate) local: Region,
    pub(crate) far: RemoteRegion,
    pub(crate) reach: Reach,
    pub(crate) remote: Arc<Remote>,
    pub(crate) notifier_opt: Option<Arc<Notifier>>,
}

impl Route {
    /// The session that serves it; blocks while one is opened.
    pub(crate) fn session(&self, engine: &Engine) -> Result<Session, TransportError> {
        self.remote.session(engine, &self.reach)
    }

    /// Whether there is one already, as far as is known.
    pub(crate) fn has_session(&self) -> bool {
        self.remote.has_session(&self.reach)
    }
}

/// Begins transfers to one peer as one batch. Everything that happens to them, now or later, goes
/// into their statuses; if the batch fails, they are tried one by one, so that each has its own end.
pub(crate) fn begin(session: &Session, asked: Vec<Asked>, outbox: &Arc<Outbox>) {
    let Some(direction) = asked.first().map(|first| first.direction) else {
        return;
    };
    let pairs = asked.iter().map(|asked| WritePair {
        local: asked.route.local.clone(),
        remote: asked.route.far.clone(),
        runs: asked.runs.clone(),
    });
    let pairs = pairs.collect();
    let handle = session.submit(direction, WriteBatch { pairs }, None);
    let in_flight = Arc::new(InFlight {
        batch: Mutex::new(Some((handle, asked))),
        transport: session.transport(),
        outbox: Arc::downgrade(outbox),
    });
    in_flight.settle();
}

/// Transfers whose end sets their statuses, on the thread that ends them. Nothing of Python is
/// touched there.
struct InFlight {
    batch: Mutex<Option<(TransferHandle, Vec<Asked>)>>,
    transport: TransportKind,
    outbox: Weak<Outbox>,
}

impl InFlight {
    /// Takes the result if there is one; otherwise it is called again when there is.
    fn settle(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        let mut batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((handle, _)) = batch.as_mut() else {
            return;
        };
        if let Poll::Ready(result) = Pin::new(handle).poll(&mut Context::from_waker(&waker)) {
            let asked = batch.take().map(|(_, asked)| asked);
            drop(batch);
            self.conclude(asked.unwrap_or_default(), &result);
        }
    }

    fn conclude(&self, asked: Vec<Asked>, result: &TransferResult) {
        let may_repeat = result.as_ref().is_err_and(TransportError::is_quiesced);
        let outbox_opt = self.outbox.upgrade();
        match outbox_opt {
            Some(outbox) if may_repeat && asked.len() > 1 => return outbox.push_alone(asked),
            Some(outbox) => self.count(&outbox, &asked, result),
            None => {}
        }
        asked.iter().for_each(|asked| asked.conclude(result));
    }

    /// Counts the transfers of each component as one.
    fn count(&self, outbox: &Outbox, asked: &[Asked], result: &TransferResult) {
        let is_same =
            |one: &Asked, other: &Asked| one.route.local.label() == other.route.local.label();
        for of_one in asked.chunk_by(is_same) {
            let Some(first) = of_one.first() else {
                continue;
            };
            let labels = TransferLabels {
                component: first.route.local.label(),
                transport: self.transport.name(),
                // Engines write what they have prefilled.
                role: match first.direction {
                    Direction::Write => Role::Prefill.name(),
                    Direction::Read => Role::Decode.name(),
                },
            };
            let total = |of: fn(&RunList) -> u64| {
                let numbers = of_one.iter().map(|asked| of(&asked.runs));
                numbers.fold(0, u64::saturating_add)
            };
            let sizes = (total(|runs| runs.bytes().get()), total(RunList::ranges));
            outbox.metrics().ended(labels, sizes, result);
        }
    }
}

impl Asked {
    fn conclude(&self, result: &TransferResult) {
        let remote = &self.route.remote;
        match result {
            Ok(_) => {
                if let (Some(notifier), Some(address)) =
                    (&self.route.notifier_opt, &remote.notify_opt)
                {
                    notifier.tell(address, self.number);
                }
                self.status.update(code::SUCCESS, "success");
            }
            Err(error) => {
                let code = code_of(error.kind());
                let message = match code {
                    code::ERR_INVALID_ARGS => format!("length out of range: {error}"),
                    _ => error.to_string(),
                };
                self.status.update(code, message);
                remote.transfer_failed(error);
            }
        }
    }
}

impl Wake for InFlight {
    fn wake(self: Arc<Self>) {
        self.settle();
    }
}

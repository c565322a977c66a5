//! One transfer: from lists of offsets to a batch in flight to a status.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use common::plan::{RunList, StridedRun};
use io_engine::{
    ByteLen, ByteOffset, Direction, Region, RemoteRegion, Session, TransferHandle, TransferResult,
    WriteBatch, WritePair,
};

use crate::mori::notify::Notifier;
use crate::mori::remote::Remote;
use crate::mori::status::{StatusCell, code, code_of};

/// What one transfer moves: ranges of one local and one remote memory.
pub(crate) struct Ranges {
    pub(crate) local_offsets: Vec<u64>,
    pub(crate) remote_offsets: Vec<u64>,
    pub(crate) sizes: Vec<u64>,
}

impl Ranges {
    /// The runs of a batch; an error has MoRI's code and text.
    fn runs(&self, direction: Direction) -> Result<RunList, (u32, String)> {
        let count = self.sizes.len();
        if self.local_offsets.len() != count || self.remote_offsets.len() != count {
            return Err((
                code::ERR_INVALID_ARGS,
                "lengths of local offsets, remote offsets or sizes mismatch".to_owned(),
            ));
        }
        let offsets = self.local_offsets.iter().zip(&self.remote_offsets);
        let runs = offsets.zip(&self.sizes).filter(|(_, size)| **size > 0);
        let runs = runs.map(|((local, remote), size)| {
            let (src, dst) = match direction {
                Direction::Write => (*local, *remote),
                Direction::Read => (*remote, *local),
            };
            StridedRun::contiguous(ByteOffset(src), ByteOffset(dst), ByteLen(*size))
        });
        RunList::new(runs.collect()).map_err(|error| {
            let text = format!("length out of range: {error}");
            (code::ERR_INVALID_ARGS, text)
        })
    }
}

/// Where a transfer goes, and who is told of its end.
#[derive(Clone)]
pub(crate) struct Route {
    pub(crate) local: Region,
    pub(crate) far: RemoteRegion,
    pub(crate) remote: Arc<Remote>,
    pub(crate) notifier_opt: Option<Arc<Notifier>>,
}

/// Begins a transfer; everything that happens to it, now or later, goes into its status.
pub(crate) fn begin(
    session: &Session,
    route: &Route,
    direction: Direction,
    ranges: &Ranges,
    number: u64,
    status: &Arc<StatusCell>,
) {
    let runs = match ranges.runs(direction) {
        Ok(runs) => runs,
        Err((code, message)) => return status.update(code, &message),
    };
    if runs.ranges() == 0 {
        return status.update(code::SUCCESS, "success");
    }
    status.set_code(code::IN_PROGRESS);
    let pair = WritePair {
        local: route.local.clone(),
        remote: route.far.clone(),
        runs,
    };
    let handle = session.submit(direction, WriteBatch { pairs: vec![pair] }, None);
    let in_flight = Arc::new(InFlight {
        handle: Mutex::new(Some(handle)),
        status: Arc::clone(status),
        remote: Arc::clone(&route.remote),
        notifier_opt: route.notifier_opt.clone(),
        number,
    });
    in_flight.settle();
}

/// A transfer whose end sets its status, on the thread that ends it. Nothing of Python is touched
/// there.
struct InFlight {
    handle: Mutex<Option<TransferHandle>>,
    status: Arc<StatusCell>,
    remote: Arc<Remote>,
    notifier_opt: Option<Arc<Notifier>>,
    number: u64,
}

impl InFlight {
    /// Takes the result if there is one; otherwise it is called again when there is.
    fn settle(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        let mut handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waiting) = handle.as_mut() else {
            return;
        };
        if let Poll::Ready(result) = Pin::new(waiting).poll(&mut Context::from_waker(&waker)) {
            *handle = None;
            drop(handle);
            self.conclude(result);
        }
    }

    fn conclude(&self, result: TransferResult) {
        match result {
            Ok(_) => {
                if let (Some(notifier), Some(address)) =
                    (&self.notifier_opt, &self.remote.notify_opt)
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
                self.status.update(code, &message);
                self.remote.transfer_failed(&error);
            }
        }
    }
}

impl Wake for InFlight {
    fn wake(self: Arc<Self>) {
        self.settle();
    }
}

//! Faults on demand: a transport around another, for tests of whoever must notice.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::ids::{ByteLen, ByteOffset};
use common::plan::{RunList, StridedRun};

use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Location, RemoteRegion};
use crate::session::{Job, WritePair};
use crate::status::Status;
use crate::transport::{Transport, TransportKind};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// One pair of regions is not written, and success is reported.
    DropWrite,
    /// One pair of regions is written beside its place, and success is reported.
    Misdirect,
    /// One byte of one pair of regions arrives as another, and success is reported.
    Flip,
    /// The batch fails at once.
    Fail,
    /// The batch never ends unless it is cancelled.
    Stall,
}

/// Which batch goes wrong: the `nth` (from 0) that has a pair whose local region has this label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultSpec {
    /// What goes wrong.
    pub kind: FaultKind,
    /// Label of the local region.
    pub label: String,
    /// How many matching batches pass first.
    pub nth: u64,
}

impl FromStr for FaultSpec {
    type Err = String;

    /// Reads `KIND:LABEL` or `KIND:LABEL:NTH`, with KIND one of `drop-write`, `misdirect`, `flip`,
    /// `fail` and `stall`.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "{text:?} is not KIND:LABEL[:NTH] with KIND drop-write, misdirect, flip, fail or stall"
            )
        };
        let mut parts = text.split(':');
        let kind = match parts.next() {
            Some("drop-write") => FaultKind::DropWrite,
            Some("misdirect") => FaultKind::Misdirect,
            Some("flip") => FaultKind::Flip,
            Some("fail") => FaultKind::Fail,
            Some("stall") => FaultKind::Stall,
            _ => return Err(expected()),
        };
        let label = parts
            .next()
            .filter(|label| !label.is_empty())
            .ok_or_else(expected)?
            .to_owned();
        let nth = parts
            .next()
            .map_or(Ok(0), |nth| nth.parse().map_err(|_| expected()))?;
        if parts.next().is_some() {
            return Err(expected());
        }
        Ok(Self { kind, label, nth })
    }
}

/// A transport with a fault in one batch.
pub(crate) struct Faulty {
    inner: Arc<dyn Transport>,
    spec: FaultSpec,
    matching: Arc<AtomicU64>,
}

impl Faulty {
    /// `matching` counts over all sessions of an engine.
    pub(crate) fn new(
        inner: Arc<dyn Transport>,
        spec: FaultSpec,
        matching: Arc<AtomicU64>,
    ) -> Self {
        Self {
            inner,
            spec,
            matching,
        }
    }
}

impl Transport for Faulty {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn can_move(&self, local: Location, remote: &RemoteRegion) -> bool {
        self.inner.can_move(local, remote)
    }

    fn submit(&self, mut job: Job, status: Arc<Status>) {
        let place = job
            .pairs
            .iter()
            .position(|pair| pair.local.label() == self.spec.label && pair.runs.ranges() > 0);
        let Some(place) = place else {
            return self.inner.submit(job, status);
        };
        if self.matching.fetch_add(1, Ordering::Relaxed) != self.spec.nth {
            return self.inner.submit(job, status);
        }
        tracing::warn!(kind = ?self.spec.kind, label = self.spec.label, "injecting a fault");
        match self.spec.kind {
            FaultKind::DropWrite => {
                job.pairs.remove(place);
                self.inner.submit(job, status);
            }
            FaultKind::Misdirect => {
                if let Some(pair) = job.pairs.get_mut(place) {
                    misdirect(pair);
                }
                self.inner.submit(job, status);
            }
            FaultKind::Flip => {
                if let Some(pair) = job.pairs.get_mut(place) {
                    flip(pair);
                }
                self.inner.submit(job, status);
            }
            FaultKind::Fail => status.fail(TransportError::quiesced(
                TransportErrorKind::Injected,
                format!("an injected fault failed a write of {}", self.spec.label),
            )),
            // Held by nobody: only a cancellation or its timeout ends it.
            FaultKind::Stall => {}
        }
    }

    fn notify(&self, number: u64, status: Arc<Status>) {
        self.inner.notify(number, status);
    }

    fn is_alive(&self) -> bool {
        self.inner.is_alive()
    }

    fn grace(&self) -> Duration {
        self.inner.grace()
    }

    fn close(&self) {
        self.inner.close();
    }
}

/// Moves the first run of a pair by its own length, to whichever side stays in the region.
fn misdirect(pair: &mut WritePair) {
    let mut runs = pair.runs.runs().to_vec();
    let room = pair.remote.len - pair.runs.dst_end().get();
    if let Some(run) = runs.first_mut() {
        let len = run.len.get();
        run.dst = if room >= len {
            ByteOffset(run.dst.get() + len)
        } else {
            ByteOffset(run.dst.get().saturating_sub(len))
        };
    }
    if let Ok(runs) = RunList::new(runs) {
        pair.runs = runs;
    }
}

/// Takes the first byte of a pair from a place of the source that holds another.
fn flip(pair: &mut WritePair) {
    let mut runs = pair.runs.runs().to_vec();
    let Some(first) = runs.first_mut() else {
        return;
    };
    let read = |offset: u64| {
        let mut byte = [0];
        let read = pair.local.read(ByteOffset(offset), &mut byte);
        read.ok().map(|()| byte)
    };
    let (own, place) = (read(first.src.get()), *first);
    let mut others = 0..pair.local.len().get();
    let Some(other) = others.find(|offset| read(*offset) != own) else {
        return tracing::warn!("every byte of the source is the same: none can be flipped");
    };
    let one = StridedRun::contiguous(ByteOffset(other), place.dst, ByteLen(1));
    // What is left of the first range, and the others of its run.
    let behind = |offset: ByteOffset| ByteOffset(offset.get() + 1);
    let rest = StridedRun::contiguous(
        behind(place.src),
        behind(place.dst),
        ByteLen(place.len.get() - 1),
    );
    first.src = ByteOffset(place.src.get().wrapping_add(place.src_stride));
    first.dst = ByteOffset(place.dst.get().wrapping_add(place.dst_stride));
    first.count -= 1;
    if first.count == 0 {
        runs.remove(0);
    }
    runs.insert(0, one);
    if rest.len.get() > 0 {
        runs.insert(1, rest);
    }
    if let Ok(runs) = RunList::new(runs) {
        pair.runs = runs;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_are_read() {
        let spec = FaultSpec {
            kind: FaultKind::DropWrite,
            label: "kv".to_owned(),
            nth: 3,
        };
        assert_eq!("drop-write:kv:3".parse(), Ok(spec));
        for bad in [
            "",
            "drop-write",
            "drop-write:",
            "explode:kv",
            "fail:kv:x",
            "fail:kv:1:2",
        ] {
            assert!(bad.parse::<FaultSpec>().is_err(), "{bad:?}");
        }
    }
}

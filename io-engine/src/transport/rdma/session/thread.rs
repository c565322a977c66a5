//! The thread that talks to the peer of a session.

use std::io::Read;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Session, lock};
use crate::error::{TransportError, TransportErrorKind};
use crate::sys::{self, Interest};
use crate::transport::queue::PIECE_BYTES;
use crate::transport::rdma::control::ControlClient;
use crate::transport::rdma::endpoint::Ended;

/// A queue pair has ended within this time after it was stopped.
const ENDED_WITHIN: Duration = Duration::from_secs(5);

impl Session {
    pub(super) fn run(self: Arc<Self>, mut client: ControlClient) {
        while self.failure().is_none() {
            if let Err(error) = self.turn(&mut client) {
                self.end(&error);
            }
        }
        self.finish(&mut client);
        *lock(&self.stream_opt) = None;
    }

    /// Does what there is to do, then waits.
    pub(super) fn turn(self: &Arc<Self>, client: &mut ControlClient) -> Result<(), TransportError> {
        self.retire(client)?;
        let mut next_due: Option<Instant> = None;
        for place in 0..self.slots.len() {
            next_due = match (self.mend(client, place)?, next_due) {
                (Some(due), Some(other)) => Some(due.min(other)),
                (due, other) => due.or(other),
            };
        }
        if !self.lanes().is_empty() {
            loop {
                let Some((job, status)) = lock(&self.waiting).pop_front() else {
                    break;
                };
                if status.is_concluded() {
                    continue;
                }
                match self.prepare(client, &job) {
                    Ok(Ok(())) => {
                        self.queue.push(job, status, (), PIECE_BYTES);
                        self.pump();
                    }
                    Ok(Err(error)) => {
                        drop(job);
                        status.fail(error);
                    }
                    Err(error) => {
                        drop(job);
                        status.fail(error.clone().with_proof());
                        return Err(error);
                    }
                }
            }
        }
        self.sleep(client, next_due)
    }

    /// Waits for the end of the queue pairs here and at the peer, and tells what was under way.
    pub(super) fn finish(&self, client: &mut ControlClient) {
        // One that was just being made when the session ended goes on by itself.
        if let Some(error) = self.failure() {
            let endpoints = self.endpoints();
            endpoints.iter().for_each(|endpoint| endpoint.fail(&error));
        }
        let deadline = Instant::now() + ENDED_WITHIN;
        while !self.lanes().is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!(peer = self.names.peer_key, "a queue pair does not end");
                break;
            }
            // A wake-up that fails is noticed by the deadline.
            if let Ok([true]) = sys::wait_for([(self.wake.as_fd(), Interest::Readable)], Some(left))
            {
                self.take_wake_ups();
            }
        }
        let slots = self.slots.iter();
        let ended: Vec<_> = slots
            .flat_map(|slot| std::mem::take(&mut lock(slot).ended))
            .collect();
        let is_owed = ended.iter().any(|ended| !ended.owed.is_empty());
        let is_proved = is_owed && self.is_ferry && client.finish();
        // A peer that dies loses its memory before its queue pairs: a refusal was of that.
        let death = self.failure();
        let death_opt = death.filter(|error| error.kind() == TransportErrorKind::PeerDead);
        let told = |mut it: Ended| {
            it.owed
                .iter_mut()
                .for_each(|owed| owed.explain_by(death_opt.as_ref()));
            it.tell(is_proved)
        };
        let pairs: Vec<_> = ended.into_iter().map(told).collect();
        drop(pairs);
    }

    pub(super) fn sleep(
        &self,
        client: &ControlClient,
        due_opt: Option<Instant>,
    ) -> Result<(), TransportError> {
        let timeout_opt = due_opt.map(|due| due.saturating_duration_since(Instant::now()));
        let wake = (self.wake.as_fd(), Interest::Readable);
        let waited = match client.stream() {
            Some(stream) => sys::wait_for([wake, (stream.as_fd(), Interest::Ended)], timeout_opt),
            None => sys::wait_for([wake], timeout_opt).map(|[is_woken]| [is_woken, false]),
        };
        let [is_woken, has_ended] =
            waited.map_err(|error| TransportError::io("waiting for a peer", &error))?;
        if has_ended {
            return Err(TransportError::quiesced(
                TransportErrorKind::PeerDead,
                format!("engine {} closed its connection", self.names.peer_key),
            ));
        }
        if is_woken {
            self.take_wake_ups();
        }
        Ok(())
    }

    pub(super) fn take_wake_ups(&self) {
        // Takes the count back to zero; what it was does not matter.
        let _ = (&self.wake).read(&mut [0; 8]);
    }
}

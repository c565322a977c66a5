//! Permission to write that can be taken back, whatever becomes of the peer that has it.
//!
//! A region's key is told to every peer and lasts as long as the region. A grant is made for one
//! purpose of the owner's and told to one peer, which then writes over `tcp` under the region's key
//! mixed with the grant's. The receiver looks both up before it takes a byte of a piece, so once the
//! grant has been taken back and the pieces that were let in before have left, nothing comes under
//! it any more, over this connection or a later one. A mapping (`shm`, `cma`) and the keys of
//! network devices pass the owner by, so they know no grants:
//! [`is_reached_by_tcp_only`](crate::is_reached_by_tcp_only) says which peers have nothing else.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use crate::region::RegionKey;

/// Bytes of a grant's key.
pub const GRANT_BYTES: usize = 16;

/// Permission for one peer to write to the regions of the engine that made it. Dropping it takes it
/// back.
#[derive(Debug)]
pub struct Grant {
    granted: Arc<Granted>,
    all: Arc<Grants>,
}

#[derive(Debug)]
pub(crate) struct Granted {
    key: [u8; GRANT_BYTES],
    gate: Mutex<Gate>,
}

/// Whether anybody may begin, and the connections of those who have.
#[derive(Debug, Default)]
struct Gate {
    is_closed: bool,
    next: u64,
    inside: HashMap<u64, Weak<TcpStream>>,
}

/// The grants of an engine by their keys. Keys are random and the table's hash is keyed, so that
/// how long a look takes tells nothing of them.
#[derive(Debug, Default)]
pub(crate) struct Grants(RwLock<HashMap<[u8; GRANT_BYTES], Weak<Granted>>>);

impl Grants {
    pub(crate) fn make(self: &Arc<Self>, key: [u8; GRANT_BYTES]) -> Grant {
        let granted = Arc::new(Granted {
            key,
            gate: Mutex::default(),
        });
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(key, Arc::downgrade(&granted));
        drop(all);
        Grant {
            granted,
            all: Arc::clone(self),
        }
    }

    /// The grant that was mixed into a region's key, if there is one.
    pub(crate) fn find(&self, region: &RegionKey, told: &RegionKey) -> Option<Arc<Granted>> {
        let key = region.mixed(&told.0).0;
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        all.get(&key).and_then(Weak::upgrade)
    }
}

impl Grant {
    /// What the peer is told.
    pub fn key(&self) -> [u8; GRANT_BYTES] {
        self.granted.key
    }

    /// Lets no further piece in.
    pub fn take_back(&self) {
        self.granted.gate().is_closed = true;
    }

    /// Whether it was taken back and nothing that was let in before is under way any more: nothing
    /// lands under it from now on.
    pub fn is_over(&self) -> bool {
        let gate = self.granted.gate();
        gate.is_closed && gate.inside.is_empty()
    }

    /// Ends the connections by which pieces under it are coming in now. What else was on its way by
    /// them fails at the peer.
    pub fn end_connections(&self) {
        let inside: Vec<_> = self.granted.gate().inside.values().cloned().collect();
        for stream in inside.iter().filter_map(Weak::upgrade) {
            // It may have ended already; either way its thread sees the end.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.take_back();
        let mut all = self.all.0.write().unwrap_or_else(PoisonError::into_inner);
        all.remove(&self.granted.key);
    }
}

impl Granted {
    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a piece in that comes by this connection; `None` when the grant was taken back.
    pub(crate) fn enter(self: &Arc<Self>, stream: &Arc<TcpStream>) -> Option<GrantUser> {
        let mut gate = self.gate();
        if gate.is_closed {
            return None;
        }
        gate.next += 1;
        let number = gate.next;
        gate.inside.insert(number, Arc::downgrade(stream));
        drop(gate);
        Some(GrantUser {
            granted: Arc::clone(self),
            number,
        })
    }
}

/// A piece that was let in; it leaves when this is dropped.
#[derive(Debug)]
pub(crate) struct GrantUser {
    granted: Arc<Granted>,
    number: u64,
}

impl Drop for GrantUser {
    fn drop(&mut self) {
        self.granted.gate().inside.remove(&self.number);
    }
}

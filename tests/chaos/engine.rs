//! An engine's part: a pool of pages and slots, a rank at a service, and what was done to it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;
use tests::random::Random;
use tests::service::{TransferService, memfd};
use tokio::sync::watch;
use transfer_actor::api::{Chunk, Indices};
use transfer_actor::client::{ClientError, RankClient};

/// Bytes of a page and of a slot; of an aux row.
const ITEM: usize = 4096;
const ROW: usize = 256;
/// Pages, and slots and rows, of a pool.
const PAGES: usize = 4096;
const SLOTS: usize = 512;
/// K and V of two layers.
const KV_TENSORS: usize = 4;
/// Pages of one request; they go in two chunks.
const REQUEST_PAGES: usize = 8;

const MAMBA: usize = KV_TENSORS * PAGES * ITEM;
const AUX: usize = MAMBA + SLOTS * ITEM;
const POOL_BYTES: usize = AUX + SLOTS * ROW;

/// Bytes that a request moves.
pub const REQUEST_BYTES: usize = KV_TENSORS * REQUEST_PAGES * ITEM + ITEM + ROW;

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where one request's state lies in a pool.
#[derive(Debug)]
pub struct Place {
    pages: Vec<i32>,
    slot: i32,
}

impl Place {
    /// All pages, in order.
    pub fn pages(&self) -> Indices {
        Indices(self.pages.clone())
    }

    /// The slot, for the component that there is.
    pub fn states(&self) -> Vec<Option<Indices>> {
        vec![Some(Indices(vec![self.slot]))]
    }

    /// The row of the aux buffer.
    pub fn row(&self) -> u32 {
        self.slot.unsigned_abs()
    }

    /// What is sent: half of the pages first, then the rest with the state.
    pub fn chunks(&self) -> [Chunk; 2] {
        let (first, rest) = self.pages.split_at(REQUEST_PAGES / 2);
        let chunk = |pages: &[i32], last| Chunk {
            kv_indices: Indices(pages.to_vec()),
            state_indices: if last { self.states() } else { Vec::new() },
            num_kv_tokens: None,
            aux_index: None,
            last,
        };
        [chunk(first, false), chunk(rest, true)]
    }

    /// Each part of the request: what it is, its offset in the pool and its length.
    fn parts(&self) -> Vec<(String, usize, usize)> {
        let mut parts = Vec::new();
        for tensor in 0..KV_TENSORS {
            for (position, page) in self.pages.iter().enumerate() {
                let offset = (tensor * PAGES + *page as usize) * ITEM;
                parts.push((format!("kv tensor {tensor} page {position}"), offset, ITEM));
            }
        }
        let slot = self.slot as usize;
        parts.push(("mamba".to_owned(), MAMBA + slot * ITEM, ITEM));
        parts.push(("aux".to_owned(), AUX + slot * ROW, ROW));
        parts
    }
}

/// What part `part` of a room holds: never the same in two rooms or parts.
fn content(room: u64, part: usize, length: usize) -> Vec<u8> {
    let mut random = Random::from_seed(Random::from_seed(room).word() ^ ((part as u64 + 1) << 48));
    let words = (0..length.div_ceil(8)).flat_map(|_| random.word().to_le_bytes());
    words.take(length).collect()
}

#[derive(Debug)]
struct Free {
    pages: Vec<i32>,
    slots: Vec<i32>,
}

/// What was done to an engine, so that a failure can be told from one without a cause.
#[derive(Debug, Default)]
struct Strikes {
    begun: Option<Instant>,
    ended: Option<Instant>,
    /// Time of strikes that are over.
    total: Duration,
}

/// One rank with its pool. A rank that is killed is followed by another engine with a fresh pool.
#[derive(Debug)]
pub struct Engine {
    pub name: String,
    pub client: RankClient,
    pool: File,
    free: Mutex<Free>,
    strikes: Mutex<Strikes>,
    /// Whether the router should leave it out, as it is struck.
    is_struck: watch::Sender<bool>,
    /// Whether it was killed.
    is_gone: std::sync::atomic::AtomicBool,
}

impl Engine {
    /// Attaches a rank with a fresh pool; a prefill with where its engine registers.
    pub async fn attach(
        service: &TransferService,
        role: &str,
        index: usize,
        bootstrap_opt: Option<&String>,
    ) -> Result<Self, ClientError> {
        let tensor = |offset: usize, count: usize, item: usize| json!({ "pool": 0, "offset": offset, "bytes": count * item, "item_len": item });
        let kv = (0..KV_TENSORS).map(|index| tensor(index * PAGES * ITEM, PAGES, ITEM));
        let request = json!({
            "role": role,
            "bootstrap": bootstrap_opt,
            "parallel": {},
            "engine": { "kv_cache_dtype": "auto" },
            "pools": [POOL_BYTES],
            "layout": {
                "page_size": 16,
                "kv": {
                    "tensors": kv.collect::<Vec<_>>(),
                    "attention": "mha", "head_num": 1, "total_head_num": 1,
                },
                "aux": [tensor(AUX, SLOTS, ROW)],
                "states": [{
                    "type": "mamba", "tensors": [tensor(MAMBA, SLOTS, ITEM)], "dims": [4],
                }],
            },
        });
        let request = serde_json::from_value(request).expect("the request is well-formed");
        let pool = memfd(POOL_BYTES as u64);
        let client = RankClient::attach(
            &service.attach_socket(),
            &service.api_socket(),
            &request,
            std::slice::from_ref(&pool),
        )
        .await?;
        Ok(Self {
            name: format!("{role} {index}"),
            client,
            pool,
            free: Mutex::new(Free {
                pages: (0..PAGES as i32).collect(),
                slots: (0..SLOTS as i32).collect(),
            }),
            strikes: Mutex::default(),
            is_struck: watch::Sender::new(false),
            is_gone: false.into(),
        })
    }

    /// A place for a request. What was given back last is used first, so that a write that comes
    /// late meets another request's bytes.
    pub fn take(&self) -> Option<Place> {
        let mut free = lock(&self.free);
        if free.pages.len() < REQUEST_PAGES {
            return None;
        }
        let slot = free.slots.pop()?;
        let left = free.pages.len() - REQUEST_PAGES;
        let pages = free.pages.split_off(left);
        Some(Place { pages, slot })
    }

    /// Gives a place back, once nobody reads or writes it any more.
    pub fn give_back(&self, place: Place) {
        let mut free = lock(&self.free);
        free.pages.extend(place.pages);
        free.slots.push(place.slot);
    }

    /// Writes a room's content where it is sent from.
    pub fn fill(&self, place: &Place, room: u64) {
        for (part, (_, offset, length)) in place.parts().into_iter().enumerate() {
            let bytes = content(room, part, length);
            let written = self.pool.write_all_at(&bytes, offset as u64);
            written.expect("the pool can be written");
        }
    }

    /// The first part of a room that does not hold what was sent.
    pub fn wrong_part(&self, place: &Place, room: u64) -> Option<String> {
        let mut found = vec![0; ITEM];
        for (part, (name, offset, length)) in place.parts().into_iter().enumerate() {
            let found = &mut found[..length];
            let read = self.pool.read_exact_at(found, offset as u64);
            read.expect("the pool can be read");
            let expected = content(room, part, length);
            if let Some(byte) = (0..length).find(|byte| found[*byte] != expected[*byte]) {
                return Some(format!("{name}, byte {byte} of {length}"));
            }
        }
        None
    }

    /// Changes one byte of a part.
    #[cfg(test)]
    pub fn spoil(&self, place: &Place, part: usize) {
        let (_, offset, length) = place.parts().swap_remove(part);
        let last = (offset + length - 1) as u64;
        let mut byte = [0];
        self.pool
            .read_exact_at(&mut byte, last)
            .and_then(|()| self.pool.write_all_at(&[byte[0] ^ 1], last))
            .expect("the pool can be read and written");
    }

    /// Something is done to it now; `is_gone`: for ever.
    pub fn strike(&self, is_gone: bool) {
        lock(&self.strikes).begun = Some(Instant::now());
        self.is_gone
            .store(is_gone, std::sync::atomic::Ordering::Release);
        self.is_struck.send_replace(true);
    }

    /// What was done to it is over.
    pub fn repaired(&self) {
        let mut strikes = lock(&self.strikes);
        let now = Instant::now();
        if let Some(begun) = strikes.begun.take() {
            strikes.total += now - begun;
        }
        strikes.ended = Some(now);
        drop(strikes);
        self.is_struck.send_replace(false);
    }

    pub fn is_gone(&self) -> bool {
        self.is_gone.load(std::sync::atomic::Ordering::Acquire)
    }

    pub fn is_struck(&self) -> bool {
        *self.is_struck.borrow()
    }

    /// Waits until it is struck.
    pub async fn until_struck(&self) {
        let mut watched = self.is_struck.subscribe();
        // The sender lives as long as this engine.
        let _ = watched.wait_for(|is_struck| *is_struck).await;
    }

    /// For how long it was struck so far.
    pub fn struck_for(&self) -> Duration {
        let strikes = lock(&self.strikes);
        strikes.total
            + strikes
                .begun
                .map_or(Duration::ZERO, |begun| begun.elapsed())
    }

    /// Since when nothing has been done to it, or it is dead; `None` while it is struck. An engine
    /// that was never struck says the instant that it is given.
    pub fn settled(&self, never: Instant) -> Option<Instant> {
        let strikes = lock(&self.strikes);
        match strikes.begun {
            None => Some(strikes.ended.unwrap_or(never)),
            begun => begun.filter(|_| self.is_gone()),
        }
    }

    /// Whether it was struck after an instant, or is.
    pub fn was_struck_since(&self, then: Instant) -> bool {
        let strikes = lock(&self.strikes);
        strikes.begun.is_some() || strikes.ended.is_some_and(|ended| ended >= then)
    }
}

//! Requests without a pause between random pairs of ranks, each looked after until both of its
//! rooms have ended, and every byte of those that succeed.

#[cfg(test)]
mod checks;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tests::random::Random;
use transfer_actor::api::{Announce, OpenRoom, RoomStatus, RoomView};
use transfer_actor::client::ClientError;

use crate::engine::{Engine, Place, lock};

/// Each of a service's timeouts, in seconds: bootstrap, waiting, transfer.
pub const TIMEOUT_S: u64 = 5;
/// All three one after the other, and what a busy machine adds: how long a room of a rank that runs
/// may take, whatever is done to its peer.
pub const LIMIT: Duration = Duration::from_secs(3 * TIMEOUT_S + 5);
/// Until when after a repair a failure may still come from what was repaired.
const AFTERMATH: Duration = Duration::from_secs(2);
/// How long after a room's end, and after what was done to its ranks is over, its places are safe.
const SAFE_WITHIN: Duration = Duration::from_secs(3);
/// How long places without a proof are kept before they count as lost to their pool.
const QUARANTINE: Duration = Duration::from_secs(30);
/// Requests at a time.
const WORKERS: usize = 32;

/// A request that succeeded: when, and between which ranks.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    pub at: Instant,
    pub prefill: usize,
    pub decode: usize,
}

/// What is wrong, and what went on.
#[derive(Debug)]
pub struct Load {
    pub prefills: Vec<Mutex<Option<Arc<Engine>>>>,
    pub decodes: Vec<Mutex<Option<Arc<Engine>>>>,
    /// Where each prefill is found.
    pub bootstraps: Vec<String>,
    /// The bootstrap server was out of reach until then; in the future while it is.
    pub bootstrap_down_until: Mutex<Option<Instant>>,
    pub done: Mutex<Vec<Done>>,
    pub failures: Mutex<BTreeMap<String, usize>>,
    pub violations: Mutex<Vec<String>>,
    pub under_way: AtomicUsize,
    pub quarantined: AtomicUsize,
    pub lost: AtomicUsize,
    pub is_ending: AtomicBool,
    /// [`LIMIT`], but for tests of this.
    pub limit: Duration,
    random: Mutex<Random>,
    next_room: AtomicU64,
    begun: Instant,
}

impl Load {
    pub fn new(ranks: usize, bootstraps: Vec<String>, random: Random, first_room: u64) -> Self {
        let none = || (0..ranks).map(|_| Mutex::new(None)).collect();
        Self {
            prefills: none(),
            decodes: none(),
            bootstraps,
            bootstrap_down_until: Mutex::default(),
            done: Mutex::default(),
            failures: Mutex::default(),
            violations: Mutex::default(),
            under_way: AtomicUsize::new(0),
            quarantined: AtomicUsize::new(0),
            lost: AtomicUsize::new(0),
            is_ending: AtomicBool::new(false),
            limit: LIMIT,
            random: Mutex::new(random),
            next_room: AtomicU64::new(first_room),
            begun: Instant::now(),
        }
    }

    /// Notes that a promise was broken.
    pub fn violation(&self, what: String) {
        println!(
            "VIOLATION at {:.1} s: {what}",
            self.begun.elapsed().as_secs_f64()
        );
        lock(&self.violations).push(what);
    }

    /// Starts the workers on the current runtime.
    pub fn start(self: &Arc<Self>) {
        for _ in 0..WORKERS {
            let load = Arc::clone(self);
            tokio::spawn(async move {
                while !load.is_ending.load(Ordering::Acquire) {
                    load.one().await;
                }
            });
        }
    }

    fn pick(&self, of: &[Mutex<Option<Arc<Engine>>>]) -> Option<(usize, Arc<Engine>)> {
        let usable: Vec<_> = of
            .iter()
            .enumerate()
            .filter_map(|(index, engine)| Some((index, Arc::clone(lock(engine).as_ref()?))))
            .filter(|(_, engine)| !engine.is_struck())
            .collect();
        let chosen = lock(&self.random).below(usable.len().max(1));
        usable.into_iter().nth(chosen)
    }

    fn request(
        self: &Arc<Self>,
        (prefill_index, prefill): (usize, Arc<Engine>),
        decode: Arc<Engine>,
    ) -> Request {
        Request {
            load: Arc::clone(self),
            room: self.next_room.fetch_add(1, Ordering::Relaxed),
            begun: Instant::now(),
            struck_before: [prefill.struck_for(), decode.struck_for()],
            bootstrap: self.bootstraps[prefill_index].clone(),
            prefill,
            decode,
        }
    }

    /// One request, as long as its ranks are well; the rest of one whose rank is struck goes on
    /// beside the next.
    async fn one(self: &Arc<Self>) {
        let (Some(prefill), Some(decode)) = (self.pick(&self.prefills), self.pick(&self.decodes))
        else {
            return tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let done = (prefill.0, decode.0);
        let request = self.request(prefill, decode.1);
        let room = request.room;
        let engines = [Arc::clone(&request.prefill), Arc::clone(&request.decode)];
        self.under_way.fetch_add(1, Ordering::AcqRel);
        let load = Arc::clone(self);
        let task = tokio::spawn(async move {
            if request.run().await {
                let (prefill, decode) = done;
                lock(&load.done).push(Done {
                    at: Instant::now(),
                    prefill,
                    decode,
                });
            }
            load.under_way.fetch_sub(1, Ordering::AcqRel);
        });
        tokio::select! {
            ended = task => if let Err(error) = ended {
                self.violation(format!("room {room}: the test itself: {error}"));
            },
            () = engines[0].until_struck() => {}
            () = engines[1].until_struck() => {}
        }
    }
}

struct Request {
    load: Arc<Load>,
    bootstrap: String,
    room: u64,
    begun: Instant,
    /// For how long the two had been struck when it began.
    struck_before: [Duration; 2],
    prefill: Arc<Engine>,
    decode: Arc<Engine>,
}

/// How one of the two rooms ended.
enum End {
    Seen(RoomView),
    /// The rank does not know the room, or is gone.
    Unknown,
}

impl Request {
    /// True: it succeeded, and every byte is right.
    async fn run(&self) -> bool {
        let (Some(src), Some(dst)) = (self.prefill.take(), self.decode.take()) else {
            self.wrong("no place is free: what was quarantined has not come back");
            tokio::time::sleep(Duration::from_secs(1)).await;
            return false;
        };
        self.prefill.fill(&src, self.room);
        let driven = self.drive(&src, &dst).await;
        if let Err((engine, what, error)) = driven {
            self.judge_error(engine, what, &error);
            // Every other router does not tell the other side.
            if self.room.is_multiple_of(2) {
                for engine in [&self.prefill, &self.decode] {
                    // It may be the one that is gone; its end is looked at below.
                    let _ = engine
                        .client
                        .abort(self.room, Some("the other side failed".into()))
                        .await;
                }
            }
        }
        let (sent, got) = tokio::join!(self.end_of(&self.prefill), self.end_of(&self.decode));
        let is_success = self.judge(&sent, &got, &dst);
        tokio::join!(
            self.release(&self.prefill, &sent, src),
            self.release(&self.decode, &got, dst),
        );
        is_success
    }

    async fn drive(
        &self,
        src: &Place,
        dst: &Place,
    ) -> Result<(), (&Engine, &'static str, ClientError)> {
        let (prefill, decode) = (&*self.prefill, &*self.decode);
        let open = OpenRoom {
            room: self.room,
            bootstrap: Some(self.bootstrap.clone()),
            prefill_dp_rank: None,
            aux_index: None,
        };
        decode
            .client
            .open(open)
            .await
            .map_err(|error| (decode, "open", error))?;
        let open = OpenRoom {
            room: self.room,
            bootstrap: None,
            prefill_dp_rank: None,
            aux_index: Some(src.row()),
        };
        prefill
            .client
            .open(open)
            .await
            .map_err(|error| (prefill, "open", error))?;
        let announce = Announce {
            kv_indices: dst.pages(),
            aux_index: Some(dst.row()),
            state_indices: dst.states(),
            decode_prefix_len: None,
        };
        let announced = decode.client.announce(self.room, announce).await;
        announced.map_err(|error| (decode, "announce", error))?;
        let ready = prefill
            .client
            .wait(self.room, Some(RoomStatus::WaitingForInput), LIMIT)
            .await;
        let ready = ready.map_err(|error| (prefill, "wait", error))?;
        if ready.status < RoomStatus::WaitingForInput {
            return Ok(());
        }
        for chunk in src.chunks() {
            let sent = prefill.client.send_chunk(self.room, chunk).await;
            sent.map_err(|error| (prefill, "send", error))?;
        }
        Ok(())
    }

    fn wrong(&self, what: &str) {
        let (room, prefill, decode) = (self.room, &self.prefill.name, &self.decode.name);
        self.load.violation(format!(
            "room {room} from {prefill} to {decode}, {:.1} s old: {what}",
            self.begun.elapsed().as_secs_f64()
        ));
    }

    /// A call may fail because the room has ended, or the rank; a service that runs must answer.
    fn judge_error(&self, engine: &Engine, what: &str, error: &ClientError) {
        let is_answer = matches!(error, ClientError::Api { .. });
        if !is_answer && !engine.was_struck_since(self.begun) {
            self.wrong(&format!("{}: {what}: {error}", engine.name));
        }
    }

    /// Longest time that a room of this request may take at a rank: time that this one was struck
    /// for counts for nothing.
    fn limit(&self, engine: &Engine) -> Duration {
        let is_prefill = std::ptr::eq(engine, &raw const *self.prefill);
        let before = self.struck_before[usize::from(!is_prefill)];
        self.load.limit + engine.struck_for().saturating_sub(before)
    }

    async fn end_of(&self, engine: &Engine) -> End {
        loop {
            if engine.is_gone() {
                return End::Unknown;
            }
            let wait =
                engine
                    .client
                    .wait(self.room, Some(RoomStatus::Success), Duration::from_secs(1));
            match wait.await {
                Ok(view) if [RoomStatus::Success, RoomStatus::Failed].contains(&view.status) => {
                    return End::Seen(view);
                }
                Ok(view) if self.begun.elapsed() > self.limit(engine) => {
                    self.wrong(&format!("{}: the room hangs: {view:?}", engine.name));
                    return End::Seen(view);
                }
                Ok(_) => {}
                Err(error) if error.code() == Some("unknown_room") => return End::Unknown,
                Err(_) if engine.is_gone() => return End::Unknown,
                Err(error) => {
                    self.judge_error(engine, "wait", &error);
                    if self.begun.elapsed() > self.limit(engine) {
                        self.wrong(&format!("{}: no answer in time: {error}", engine.name));
                        return End::Unknown;
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn judge(&self, sent: &End, got: &End, dst: &Place) -> bool {
        let is_success =
            |end: &End| matches!(end, End::Seen(view) if view.status == RoomStatus::Success);
        if is_success(got) {
            if let Some(part) = self.decode.wrong_part(dst, self.room) {
                self.wrong(&format!("success with a wrong byte in {part}"));
                return false;
            }
            if let End::Seen(view) = sent
                && view.status != RoomStatus::Success
            {
                self.wrong(&format!(
                    "the decode succeeded and the prefill did not: {view:?}"
                ));
            }
            return true;
        }
        let reason = [got, sent].into_iter().find_map(|end| match end {
            End::Seen(view) => view.reason.clone(),
            End::Unknown => None,
        });
        let reason = reason.unwrap_or_else(|| "neither rank knows the room".to_owned());
        let words = reason.split_whitespace().map(|word| {
            let is_number = word.contains(|letter: char| letter.is_ascii_digit());
            if is_number { "N" } else { word }
        });
        let kind = words.collect::<Vec<_>>().join(" ");
        *lock(&self.load.failures).entry(kind).or_default() += 1;
        let since = self.begun.checked_sub(AFTERMATH).unwrap_or(self.begun);
        let has_cause = [&self.prefill, &self.decode]
            .into_iter()
            .any(|engine| engine.was_struck_since(since))
            || lock(&self.load.bootstrap_down_until).is_some_and(|until| until >= since);
        if !has_cause {
            self.wrong(&format!(
                "failed though nothing was done to its ranks: {reason}"
            ));
        }
        false
    }

    /// Whether a rank should have said by now that the places of its room are safe, which ended then.
    fn is_overdue(&self, ended: Instant) -> bool {
        let settled = [&self.prefill, &self.decode].map(|engine| engine.settled(ended));
        match settled {
            [Some(one), Some(two)] => ended.max(one).max(two).elapsed() > SAFE_WITHIN,
            _ => false,
        }
    }

    /// Keeps the places of a room until the rank says that they are safe, and forgets the room.
    async fn release(&self, engine: &Engine, end: &End, place: Place) {
        let is_success = matches!(end, End::Seen(view) if view.status == RoomStatus::Success);
        let begun = Instant::now();
        let mut is_safe = is_success;
        let mut is_counted = false;
        let mut is_told = false;
        while !is_safe && !engine.is_gone() && begun.elapsed() < QUARANTINE {
            match engine.client.wait(self.room, None, Duration::ZERO).await {
                Ok(view) => is_safe = view.release_safe,
                // Nothing was opened, so nothing was told to anybody.
                Err(error) if error.code() == Some("unknown_room") => is_safe = true,
                Err(_) => {}
            }
            if !is_safe {
                if !is_told && self.is_overdue(begun) {
                    self.wrong(&format!(
                        "{}: its places are not safe {SAFE_WITHIN:?} after all was over",
                        engine.name
                    ));
                    is_told = true;
                }
                if !is_counted {
                    self.load.quarantined.fetch_add(1, Ordering::AcqRel);
                    is_counted = true;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
        if is_counted {
            self.load.quarantined.fetch_sub(1, Ordering::AcqRel);
        }
        if engine.is_gone() {
            return;
        }
        if is_safe {
            engine.give_back(place);
        } else {
            self.load.lost.fetch_add(1, Ordering::AcqRel);
        }
        // A rank that is killed meanwhile forgets it anyhow.
        let _ = engine.client.clear(self.room).await;
    }
}

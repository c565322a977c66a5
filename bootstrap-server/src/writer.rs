//! The one thread that changes registrations.
//!
//! Commands that wait are applied one after another to a draft; the draft becomes durable with one
//! synchronisation and is then published for readers. When that fails, the draft is dropped and
//! every command of it is told so: nothing changed for readers.
//!
//! From then on the server is **read-only**: it serves what it has in memory and refuses changes
//! without touching the disk, until everything in memory could be written into new files, which is
//! tried every `RETRY`. A change that was refused may have reached the old files; only a server
//! that ends before the new ones are complete would read it, as one whose acknowledgement was lost.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use crate::config::DamagedStore;
use crate::error::StoreError;
use crate::guard::Who;
use crate::metrics::Metrics;
use crate::registry::{Applied, Command, Refused, State};
use crate::store::{Change, Store, changes_of, entries_of, named, state_of};

/// Commands that wait at most; more are refused, so that a dead disk does not fill memory.
const MAX_WAITING: usize = 1024;
/// Commands of one synchronisation at most.
const MAX_GROUP: usize = 256;
/// Time between two attempts to write everything anew after the disk failed.
const RETRY: Duration = Duration::from_secs(5);
/// Lost entries that a message names.
const MAX_NAMED: usize = 20;

/// Why a command did not change anything.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The rules say no.
    #[error(transparent)]
    Refused(Refused),
    /// The store failed, and changes are refused until it works again.
    #[error("{STORE_READ_ONLY}: {0}")]
    ReadOnly(String),
    /// Too many commands wait for the disk.
    #[error("{STORE_BUSY}: too many changes wait for the disk, try again")]
    Busy,
}

/// The code of [`WriteError::ReadOnly`].
pub const STORE_READ_ONLY: &str = "store_read_only";
/// The code of [`WriteError::Busy`].
pub const STORE_BUSY: &str = "store_busy";

struct Job {
    namespace: String,
    command: Command,
    who: String,
    answer: oneshot::Sender<Result<Applied, WriteError>>,
}

/// Reads registrations from memory, and hands changes to the writer's thread.
#[derive(Clone, Debug)]
pub struct Registrations {
    published: Arc<RwLock<Arc<State>>>,
    trouble: Arc<RwLock<Option<String>>>,
    jobs: mpsc::SyncSender<Job>,
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

impl Registrations {
    /// Loads a store and starts its thread. A damaged store is treated as `damaged` says.
    ///
    /// # Errors
    /// When the store cannot be read, or the thread cannot be started.
    pub fn start(
        mut store: Box<dyn Store>,
        damaged: DamagedStore,
        metrics: Metrics,
    ) -> Result<Self, StoreError> {
        let loaded = store.load()?;
        let (state, unreadable) = state_of(&loaded.entries)?;
        let mut lost = loaded.lost;
        lost.extend(unreadable);
        let mut read_only_opt = None;
        if !lost.is_empty() {
            let error = StoreError::Damaged {
                number: lost.len(),
                names: named(&lost, MAX_NAMED),
            };
            match damaged {
                DamagedStore::Refuse => return Err(error),
                DamagedStore::ReadOnly => read_only_opt = Some(error.to_string()),
                DamagedStore::AcceptLoss => {
                    let names = named(&lost, usize::MAX);
                    tracing::warn!(number = lost.len(), names, "entries are lost, as accepted");
                }
            }
        }
        let published = Arc::new(RwLock::new(Arc::new(state)));
        let trouble = Arc::new(RwLock::new(None));
        let (jobs, waiting) = mpsc::sync_channel(MAX_WAITING);
        let mut writer = Writer {
            store,
            metrics,
            published: Arc::clone(&published),
            trouble: Arc::clone(&trouble),
            retry_at_opt: None,
        };
        match read_only_opt {
            Some(reason) => writer.fail(&reason),
            None => writer.rewrite(),
        }
        std::thread::Builder::new()
            .name("registrations".to_owned())
            .spawn(move || writer.run(&waiting))
            .map_err(|error| StoreError::Commit(error.to_string()))?;
        Ok(Self {
            published,
            trouble,
            jobs,
        })
    }

    /// The registrations as they are durable now.
    pub fn state(&self) -> Arc<State> {
        Arc::clone(
            &self
                .published
                .read()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }

    /// Why changes are refused, while they are: the server is read-only then.
    pub fn trouble(&self) -> Option<String> {
        let trouble = self.trouble.read();
        trouble.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes something; returns when it is durable. `who` asks for it goes into the audit log.
    ///
    /// # Errors
    /// [`WriteError`]; nothing changed.
    pub async fn change(
        &self,
        namespace: &str,
        command: Command,
        who: &Who,
    ) -> Result<Applied, WriteError> {
        let (answer, answered) = oneshot::channel();
        let job = Job {
            namespace: namespace.to_owned(),
            command,
            who: who.to_string(),
            answer,
        };
        let ended = || WriteError::ReadOnly("the writer has ended, see the log".to_owned());
        self.jobs.try_send(job).map_err(|error| match error {
            mpsc::TrySendError::Full(_) => WriteError::Busy,
            mpsc::TrySendError::Disconnected(_) => ended(),
        })?;
        answered.await.unwrap_or_else(|_| Err(ended()))
    }
}

struct Writer {
    store: Box<dyn Store>,
    metrics: Metrics,
    published: Arc<RwLock<Arc<State>>>,
    /// Why changes are refused.
    trouble: Arc<RwLock<Option<String>>>,
    /// When everything is to be written anew, if it is.
    retry_at_opt: Option<Instant>,
}

impl Writer {
    fn run(mut self, waiting: &mpsc::Receiver<Job>) {
        loop {
            let received = match self.retry_at_opt {
                Some(at) => waiting.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => waiting.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match received {
                Ok(first) => {
                    let mut group = vec![first];
                    group.extend(waiting.try_iter().take(MAX_GROUP - 1));
                    self.commit(group);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.retry_at_opt.is_some_and(|at| at <= Instant::now()) {
                self.rewrite();
            }
        }
    }

    fn current(&self) -> Arc<State> {
        Arc::clone(
            &self
                .published
                .read()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }

    fn trouble(&self) -> Option<String> {
        let trouble = self.trouble.read();
        trouble.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn commit(&mut self, group: Vec<Job>) {
        let mut draft = State::clone(&self.current());
        let mut changes: Vec<Change> = Vec::new();
        let mut outcomes = Vec::with_capacity(group.len());
        for job in group {
            let before = draft.namespaces.get(&job.namespace).cloned();
            let applied = draft.apply(&job.namespace, &job.command, now());
            let outcome = match applied {
                Err(refused) => Err(WriteError::Refused(refused)),
                Ok(applied) => match changes_of(&draft, &job.namespace, &applied.changed) {
                    Ok(changed) => {
                        changes.extend(changed);
                        Ok(applied)
                    }
                    Err(error) => {
                        let namespace = job.namespace.clone();
                        draft
                            .namespaces
                            .insert(namespace, before.unwrap_or_default());
                        Err(WriteError::ReadOnly(error.to_string()))
                    }
                },
            };
            outcomes.push((job, outcome));
        }
        let refused_opt = if changes.is_empty() {
            None
        } else {
            self.make_durable(&changes, draft)
        };
        for (job, outcome) in outcomes {
            let outcome = match (&refused_opt, outcome) {
                // What is so already is as durable as it was.
                (Some(reason), Ok(applied)) if !applied.changed.is_empty() => {
                    Err(WriteError::ReadOnly(reason.clone()))
                }
                (_, outcome) => outcome,
            };
            if let Ok(applied) = &outcome {
                audit(&job, applied);
                self.count(&job, applied);
            }
            // A client that has gone is told nothing; its change stands.
            let _ = job.answer.send(outcome);
        }
    }

    /// Stores changes and publishes what they made, or says why not.
    fn make_durable(&mut self, changes: &[Change], draft: State) -> Option<String> {
        if let Some(reason) = self.trouble() {
            return Some(reason);
        }
        let begun = Instant::now();
        let committed = self.store.commit(changes);
        let seconds = begun.elapsed().as_secs_f64();
        self.metrics.store_seconds.observe(seconds);
        if let Err(error) = committed {
            self.fail_for_now(&error);
            return Some(error.to_string());
        }
        *self
            .published
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Arc::new(draft);
        None
    }

    /// Writes everything into new files: at start, and when the disk failed.
    fn rewrite(&mut self) {
        let entries = entries_of(&self.current());
        match entries.and_then(|entries| self.store.rewrite(&entries)) {
            Err(error) => self.fail_for_now(&error),
            Ok(()) => {
                self.retry_at_opt = None;
                self.metrics.store_read_only.set(0);
                let trouble = self.trouble.write();
                let before = trouble.unwrap_or_else(PoisonError::into_inner).take();
                if before.is_some() {
                    tracing::info!("the store works again: changes are taken");
                }
            }
        }
    }

    fn fail_for_now(&mut self, error: &StoreError) {
        self.retry_at_opt = Some(Instant::now() + RETRY);
        self.fail(&error.to_string());
    }

    /// Changes are refused from now on.
    fn fail(&self, reason: &str) {
        self.metrics.store_failures.inc();
        self.metrics.store_read_only.set(1);
        let trouble = self.trouble.write();
        let before = trouble
            .unwrap_or_else(PoisonError::into_inner)
            .replace(reason.to_owned());
        // Each attempt fails alike; the first line is enough.
        if before.is_none() {
            tracing::error!(
                reason,
                "the store fails: changes are refused until it works again"
            );
        }
    }

    fn count(&self, job: &Job, applied: &Applied) {
        if applied.began_generation {
            self.metrics
                .generations
                .with_label_values(&[&job.namespace])
                .inc();
        }
        if applied.evicted > 0 {
            tracing::warn!(
                namespace = job.namespace,
                evicted = applied.evicted,
                "the oldest registrations left to make room"
            );
        }
        if let Command::PutRank(registration) = &job.command {
            let unknown = registration.rank.unknown_fields.len() as u64;
            self.metrics
                .unknown_fields
                .with_label_values(&[&job.namespace])
                .inc_by(unknown);
        }
    }
}

/// The line of a change that is made; what is refused is told where it is answered.
fn audit(job: &Job, applied: &Applied) {
    let (namespace, who, subject) = (&job.namespace, &job.who, job.command.subject());
    let Applied {
        what,
        before,
        after,
        ..
    } = applied;
    tracing::info!(target: "audit", who, namespace, subject, what, before, after);
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::registry::EngineRegistration;
    use crate::store::{Entry, Loaded};

    /// A disk whose next writes fail, and what was written to it.
    #[derive(Clone, Default)]
    struct Disk(Arc<Mutex<(usize, Vec<&'static str>)>>);

    impl Disk {
        fn write(&self, what: &'static str) -> Result<(), StoreError> {
            let mut disk = self.0.lock().unwrap();
            if disk.0 > 0 {
                disk.0 -= 1;
                return Err(StoreError::Commit("no room".to_owned()));
            }
            disk.1.push(what);
            Ok(())
        }
    }

    impl Store for Disk {
        fn load(&mut self) -> Result<Loaded, StoreError> {
            Ok(Loaded::default())
        }

        fn rewrite(&mut self, _entries: &[Entry]) -> Result<(), StoreError> {
            self.write("everything")
        }

        fn commit(&mut self, _changes: &[Change]) -> Result<(), StoreError> {
            self.write("a change")
        }
    }

    fn registration(key: &str) -> Command {
        let body = serde_json::json!({ "role": "decode", "rank": 0, "instance": "a:1",
            "register_frames": [], "component_types": [] });
        let registration = EngineRegistration {
            body: serde_json::from_value(body).unwrap(),
            may_probe: false,
            registered_at: 1,
        };
        Command::PutRegistration(key.to_owned(), Arc::new(registration))
    }

    #[actix_web::test]
    async fn a_failed_write_is_refused_and_everything_is_written_before_the_next_change() {
        let disk = Disk::default();
        let metrics = Metrics::new().unwrap();
        let damaged = DamagedStore::Refuse;
        let registrations =
            Registrations::start(Box::new(disk.clone()), damaged, metrics.clone()).unwrap();
        let who = Who::default();
        let put = |key: &'static str| registrations.change("e", registration(key), &who);
        put("first").await.unwrap();
        disk.0.lock().unwrap().0 = 1;
        assert!(matches!(put("second").await, Err(WriteError::ReadOnly(_))));
        // The disk would work again, but nothing in memory is known to be on it.
        assert!(matches!(put("third").await, Err(WriteError::ReadOnly(_))));
        put("first").await.unwrap();
        let known = registrations.state().namespaces["e"].registrations.len();
        assert_eq!((known, metrics.store_read_only.get()), (1, 1));
        let begun = Instant::now();
        while registrations.trouble().is_some() {
            assert!(begun.elapsed() < RETRY * 4, "it recovers by itself");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        put("second").await.unwrap();
        let written = ["everything", "a change", "everything", "a change"];
        assert_eq!(disk.0.lock().unwrap().1, written);
        assert_eq!(metrics.store_read_only.get(), 0);
    }
}

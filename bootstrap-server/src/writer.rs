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

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{oneshot, watch};

use crate::api::EventKind;
use crate::config::DamagedStore;
use crate::error::StoreError;
use crate::events::Events;
use crate::guard::Who;
use crate::metrics::Metrics;
use crate::registry::{Applied, Command, NOTHING, Namespace, Refused, State};
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

/// Commands that are done together or not at all, each in its namespace.
struct Job {
    commands: Vec<(String, Command)>,
    who: String,
    answer: oneshot::Sender<Result<Vec<Applied>, WriteError>>,
}

/// Reads registrations from memory, and hands changes to the writer's thread.
#[derive(Clone, Debug)]
pub struct Registrations {
    published: Arc<RwLock<Arc<State>>>,
    trouble: Arc<RwLock<Option<String>>>,
    jobs: mpsc::SyncSender<Job>,
    /// Closed when the writer has let the store go.
    has_ended: watch::Receiver<()>,
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
        events: Arc<Events>,
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
            events,
            retry_at_opt: None,
        };
        match read_only_opt {
            Some(reason) => writer.fail(&reason),
            None => writer.rewrite(),
        }
        let (ended, has_ended) = watch::channel(());
        std::thread::Builder::new()
            .name("registrations".to_owned())
            .spawn(move || {
                writer.run(&waiting);
                drop(ended);
            })
            .map_err(|error| StoreError::Commit(error.to_string()))?;
        Ok(Self {
            published,
            trouble,
            jobs,
            has_ended,
        })
    }

    /// Completes when the writer has ended and its folder is free: some time after the last clone
    /// is gone.
    pub fn ended(&self) -> impl Future<Output = ()> + use<> {
        let mut has_ended = self.has_ended.clone();
        // Nothing is ever sent, so this waits until the writer drops its end.
        async move { while has_ended.changed().await.is_ok() {} }
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
    ) -> Result<(), WriteError> {
        let commands = vec![(namespace.to_owned(), command)];
        self.change_all(commands, who).await.map(|_| ())
    }

    /// Changes several things, all or none of them, each in its namespace.
    ///
    /// # Errors
    /// [`WriteError`]; nothing changed.
    pub async fn change_all(
        &self,
        commands: Vec<(String, Command)>,
        who: &Who,
    ) -> Result<Vec<Applied>, WriteError> {
        let (answer, answered) = oneshot::channel();
        let job = Job {
            commands,
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
    events: Arc<Events>,
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
            let outcome = draft_job(&mut draft, &job).map(|(applied, changed)| {
                changes.extend(changed);
                applied
            });
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
                (Some(reason), Ok(applied)) if changes_anything(&applied) => {
                    Err(WriteError::ReadOnly(reason.clone()))
                }
                (_, outcome) => outcome,
            };
            if let Ok(applied) = &outcome {
                self.tell(&job, applied);
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
                    let message = "the store works again: changes are taken";
                    tracing::info!("{message}");
                    self.events
                        .record(EventKind::Store, None, message.to_owned());
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
            let message = format!("the store fails, changes are refused: {reason}");
            self.events.record(EventKind::Store, None, message);
        }
    }

    /// What was done goes into the audit log, the events and the metrics.
    fn tell(&self, job: &Job, applied: &[Applied]) {
        for ((namespace, command), applied) in job.commands.iter().zip(applied) {
            let subject = command.subject();
            let Applied {
                what,
                before,
                after,
                ..
            } = applied;
            tracing::info!(target: "audit", who = job.who, namespace, subject, what, before, after);
            if !applied.changed.is_empty() {
                let message = told(&subject, what, before, after);
                let kind = match command {
                    _ if applied.began_generation => EventKind::Generation,
                    Command::PutRank(_) | Command::PutRegistration(..) => EventKind::Registration,
                    _ => EventKind::Operator,
                };
                self.events.record(kind, Some(namespace), message);
            }
            self.count(namespace, command, applied);
        }
    }

    fn count(&self, namespace: &str, command: &Command, applied: &Applied) {
        if applied.began_generation {
            self.metrics
                .generations
                .with_label_values(&[namespace])
                .inc();
        }
        if applied.evicted > 0 {
            tracing::warn!(
                namespace,
                evicted = applied.evicted,
                "the oldest registrations left to make room"
            );
        }
        if let Command::PutRank(registration) = command {
            let unknown = registration.rank.unknown_fields.len() as u64;
            self.metrics
                .unknown_fields
                .with_label_values(&[namespace])
                .inc_by(unknown);
        }
    }
}

fn changes_anything(applied: &[Applied]) -> bool {
    applied.iter().any(|applied| !applied.changed.is_empty())
}

/// What changed, for people.
fn told(subject: &str, what: &str, before: &str, after: &str) -> String {
    match (before, after) {
        (NOTHING, _) => format!("{subject}: {what}, {after}"),
        (_, NOTHING) => format!("{subject}: {what}, it was {before}"),
        _ => format!("{subject}: {what}, from {before} to {after}"),
    }
}

/// Does a job's commands to a draft and says what to store, or leaves the draft as it was.
fn draft_job(draft: &mut State, job: &Job) -> Result<(Vec<Applied>, Vec<Change>), WriteError> {
    let names = job.commands.iter().map(|(namespace, _)| namespace);
    let before = names.map(|name| (name.clone(), draft.namespaces.get(name).cloned()));
    let before: BTreeMap<String, Option<Arc<Namespace>>> = before.collect();
    let mut done = Vec::with_capacity(job.commands.len());
    let mut changes = Vec::new();
    let all = job.commands.iter().try_for_each(|(namespace, command)| {
        let applied = draft.apply(namespace, command, now());
        let applied = applied.map_err(WriteError::Refused)?;
        let changed = changes_of(draft, namespace, &applied.changed);
        changes.extend(changed.map_err(|error| WriteError::ReadOnly(error.to_string()))?);
        done.push(applied);
        Ok(())
    });
    if let Err(refused) = all {
        for (name, space_opt) in before {
            match space_opt {
                Some(space) => draft.namespaces.insert(name, space),
                None => draft.namespaces.remove(&name),
            };
        }
        return Err(refused);
    }
    Ok((done, changes))
}

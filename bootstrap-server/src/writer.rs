//! The one thread that changes registrations.
//!
//! Commands that wait are applied one after another to a draft; the draft becomes durable with one
//! synchronisation and is then published for readers. When that fails, the draft is dropped and
//! every command of it is told so: nothing changed.

use std::sync::mpsc;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use crate::error::StoreError;
use crate::guard::Who;
use crate::metrics::Metrics;
use crate::registry::{Applied, Command, Refused, State};
use crate::store::{Change, Store, changes_of, load_state};

/// Commands that wait at most; more are refused, so that a dead disk does not fill memory.
const MAX_WAITING: usize = 1024;
/// Commands of one synchronisation at most.
const MAX_GROUP: usize = 256;

/// Why a command did not change anything.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The rules say no.
    #[error(transparent)]
    Refused(Refused),
    /// The store failed, or too many commands wait.
    #[error("{0}")]
    Store(String),
}

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
    /// Loads a store and starts its thread.
    ///
    /// # Errors
    /// When the store cannot be read, or the thread cannot be started.
    pub fn start(store: Box<dyn Store>, metrics: Metrics) -> Result<Self, StoreError> {
        let state = load_state(store.as_ref())?;
        let published = Arc::new(RwLock::new(Arc::new(state)));
        let trouble = Arc::new(RwLock::new(None));
        let (jobs, waiting) = mpsc::sync_channel(MAX_WAITING);
        let writer = Writer {
            store,
            metrics,
            published: Arc::clone(&published),
            trouble: Arc::clone(&trouble),
            undo: Vec::new(),
        };
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

    /// Why the last change could not be made durable, if it could not.
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
        self.jobs.try_send(job).map_err(|error| match error {
            mpsc::TrySendError::Full(_) => {
                WriteError::Store("too many changes wait for the disk".to_owned())
            }
            mpsc::TrySendError::Disconnected(_) => {
                WriteError::Store("the writer has ended".to_owned())
            }
        })?;
        answered.await.unwrap_or_else(|_| {
            Err(WriteError::Store(
                "the writer ended before the change was durable".to_owned(),
            ))
        })
    }
}

struct Writer {
    store: Box<dyn Store>,
    metrics: Metrics,
    published: Arc<RwLock<Arc<State>>>,
    trouble: Arc<RwLock<Option<String>>>,
    /// What a failed commit may have left in the store, as it was before; the next commit puts it
    /// back, so that a restart never mixes refused changes into acknowledged ones.
    undo: Vec<Change>,
}

impl Writer {
    fn run(mut self, waiting: &mpsc::Receiver<Job>) {
        while let Ok(first) = waiting.recv() {
            let mut group = vec![first];
            group.extend(waiting.try_iter().take(MAX_GROUP - 1));
            self.commit(group);
        }
    }

    fn commit(&mut self, group: Vec<Job>) {
        let current = Arc::clone(
            &self
                .published
                .read()
                .unwrap_or_else(PoisonError::into_inner),
        );
        let mut draft = State::clone(&current);
        let mut changes: Vec<Change> = self.undo.clone();
        let undone = changes.len();
        let mut undo: Vec<Change> = Vec::new();
        let mut outcomes = Vec::with_capacity(group.len());
        for job in group {
            let before = draft.namespaces.get(&job.namespace).cloned();
            let applied = draft.apply(&job.namespace, &job.command, now());
            let outcome = match applied {
                Err(refused) => Err(WriteError::Refused(refused)),
                Ok(applied) => match Self::changes(&draft, &current, &job, &applied) {
                    Ok((changed, before)) => {
                        changes.extend(changed);
                        undo.extend(before);
                        Ok(applied)
                    }
                    Err(error) => {
                        draft
                            .namespaces
                            .insert(job.namespace.clone(), before.unwrap_or_default());
                        Err(WriteError::Store(error.to_string()))
                    }
                },
            };
            outcomes.push((job, outcome));
        }
        let begun = Instant::now();
        let has_changes = changes.len() > undone;
        let committed = if has_changes {
            self.store.commit(&changes)
        } else {
            Ok(())
        };
        if has_changes {
            self.metrics
                .store_seconds
                .observe(begun.elapsed().as_secs_f64());
        }
        if has_changes {
            let trouble_opt = committed.as_ref().err().map(ToString::to_string);
            *self.trouble.write().unwrap_or_else(PoisonError::into_inner) = trouble_opt;
        }
        match &committed {
            Ok(()) if has_changes => {
                self.undo.clear();
                *self
                    .published
                    .write()
                    .unwrap_or_else(PoisonError::into_inner) = Arc::new(draft);
            }
            Ok(()) => {}
            Err(error) => {
                self.undo.extend(undo);
                tracing::error!(%error, "changes were not made durable and are refused");
            }
        }
        for (job, outcome) in outcomes {
            let outcome = match (&committed, outcome) {
                (Err(error), Ok(_)) => Err(WriteError::Store(error.to_string())),
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

    /// The stored form of a change, and of what it replaces.
    fn changes(
        draft: &State,
        current: &State,
        job: &Job,
        applied: &Applied,
    ) -> Result<(Vec<Change>, Vec<Change>), StoreError> {
        let after = changes_of(draft, &job.namespace, &applied.changed)?;
        Ok((
            after,
            changes_of(current, &job.namespace, &applied.changed)?,
        ))
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

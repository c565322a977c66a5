//! The one thread that changes registrations.
//!
//! Commands are applied one after another to a draft. While the disk works on one group of them,
//! the next one is drafted on top of it; when the first is durable it is published for readers, and
//! its commands are answered. So a group is what came while the disk was busy. When the disk fails,
//! both drafts are dropped and every command of them is told so: nothing changed for readers.
//!
//! From then on the server is **read-only**: it serves what it has in memory and refuses changes
//! without touching the disk, until everything in memory could be written into new files, which is
//! tried `RETRY` after each failure, on a thread of its own. A change that was refused may have reached the old files; only a server
//! that ends before the new ones are complete would read it, as one whose acknowledgement was lost.

mod telling;

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use crate::api::EventKind;
use crate::config::DamagedStore;
use crate::error::StoreError;
use crate::events::Events;
use crate::guard::Who;
use crate::metrics::Metrics;
use crate::registry::{Applied, Command, Namespace, Refused, State};
use crate::store::{Change, Store, changes_of, named, state_of};

/// Commands that wait at most; more are refused, so that a dead disk does not fill memory.
const MAX_WAITING: usize = 1024;
/// Time between two attempts to write everything anew after the disk failed.
const RETRY: Duration = Duration::from_secs(5);
/// Time for a commit, less than a client waits: then the disk counts as failed.
const DEADLINE: Duration = Duration::from_secs(20);
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
    answer: oneshot::Sender<Outcome>,
    /// Its place among those that wait.
    _permit: OwnedSemaphorePermit,
}

type Outcome = Result<Vec<Applied>, WriteError>;

/// What the writer's thread acts on.
enum Message {
    Job(Job),
    /// The commit of this number is durable, or has failed.
    Stored(u64, Result<(), StoreError>),
    /// The store has something to do beside commits.
    Tend,
    /// Everything was written anew, or could not be.
    Rewritten(Rewritten),
    /// Nobody hands in commands any more.
    End,
}

/// A store that comes back from the thread that writes everything anew.
struct Rewritten {
    store: Box<dyn Store>,
    result: Result<(), StoreError>,
}

/// The way to the writer's thread, which ends when this is gone.
#[derive(Debug)]
struct Jobs {
    messages: mpsc::Sender<Message>,
    places: Arc<Semaphore>,
}

impl Drop for Jobs {
    fn drop(&mut self) {
        // Without a thread there is nothing to end.
        let _ = self.messages.send(Message::End);
    }
}

/// Reads registrations from memory, and hands changes to the writer's thread.
#[derive(Clone, Debug)]
pub struct Registrations {
    published: Arc<RwLock<Arc<State>>>,
    trouble: Arc<RwLock<Option<String>>>,
    jobs: Arc<Jobs>,
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
        let (messages, waiting) = mpsc::channel();
        let result = match read_only_opt {
            Some(_) => Ok(()),
            None => store.rewrite(&published.read().unwrap_or_else(PoisonError::into_inner)),
        };
        let (ended, has_ended) = watch::channel(());
        let rewriter = start_rewriter(messages.clone(), ended.clone())
            .map_err(|error| StoreError::Commit(error.to_string()))?;
        let mut writer = Writer {
            store_opt: None,
            rewriter,
            metrics,
            published: Arc::clone(&published),
            trouble: Arc::clone(&trouble),
            events,
            messages: messages.clone(),
            begun: 0,
            storing_opt: None,
            drafted: Group::default(),
            retry_at_opt: None,
        };
        writer.rewritten(Rewritten { store, result });
        if let Some(reason) = read_only_opt {
            writer.fail(&reason);
        }
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
            jobs: Arc::new(Jobs {
                messages,
                places: Arc::new(Semaphore::new(MAX_WAITING)),
            }),
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
        let place = Arc::clone(&self.jobs.places).try_acquire_owned();
        let permit = place.map_err(|_| WriteError::Busy)?;
        let (answer, answered) = oneshot::channel();
        let job = Job {
            commands,
            who: who.to_string(),
            answer,
            _permit: permit,
        };
        let ended = || WriteError::ReadOnly("the writer has ended, see the log".to_owned());
        let sent = self.jobs.messages.send(Message::Job(job));
        sent.map_err(|_| ended())?;
        answered.await.unwrap_or_else(|_| Err(ended()))
    }
}

/// Commands that become durable together.
#[derive(Default)]
struct Group {
    /// What they make of those before them; nothing before the first command.
    draft_opt: Option<State>,
    changes: Vec<Change>,
    outcomes: Vec<(Job, Outcome)>,
}

/// A group that the disk works on.
struct Storing {
    number: u64,
    begun: Instant,
    state: Arc<State>,
    outcomes: Vec<(Job, Outcome)>,
}

/// What a store is handed to for writing a state anew.
type Rewriter = mpsc::Sender<(Box<dyn Store>, Arc<State>)>;

/// Starts the thread that writes everything anew while the writer's refuses changes. It ends when
/// nobody can hand it a store, and drops `ended` then.
fn start_rewriter(
    messages: mpsc::Sender<Message>,
    ended: watch::Sender<()>,
) -> std::io::Result<Rewriter> {
    let (rewriter, stores) = mpsc::channel::<(Box<dyn Store>, Arc<State>)>();
    std::thread::Builder::new()
        .name("rewriter".to_owned())
        .spawn(move || {
            while let Ok((mut store, state)) = stores.recv() {
                let result = store.rewrite(&state);
                // A writer that has ended needs no store.
                let _ = messages.send(Message::Rewritten(Rewritten { store, result }));
            }
            drop(ended);
        })?;
    Ok(rewriter)
}

struct Writer {
    /// Nothing while everything is written anew; changes are refused then.
    store_opt: Option<Box<dyn Store>>,
    rewriter: Rewriter,
    metrics: Metrics,
    published: Arc<RwLock<Arc<State>>>,
    /// Why changes are refused.
    trouble: Arc<RwLock<Option<String>>>,
    events: Arc<Events>,
    /// For the store's calls.
    messages: mpsc::Sender<Message>,
    /// The number of the last commit.
    begun: u64,
    storing_opt: Option<Storing>,
    /// Drafted on top of what is being stored.
    drafted: Group,
    /// When everything is to be written anew, if it is.
    retry_at_opt: Option<Instant>,
}

impl Writer {
    fn run(mut self, messages: &mpsc::Receiver<Message>) {
        let mut is_ending = false;
        loop {
            let received = match self.deadline().or(self.retry_at_opt) {
                Some(at) => messages.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            // What came while this thread worked belongs together.
            let more = std::iter::from_fn(|| messages.try_recv().ok());
            for message in received.into_iter().chain(more) {
                match message {
                    Message::Job(job) => self.take(job),
                    Message::Stored(number, result) => self.stored(number, result),
                    Message::Tend => self.tend(),
                    Message::Rewritten(rewritten) => self.rewritten(rewritten),
                    Message::End => is_ending = true,
                }
            }
            if self.deadline().is_some_and(|at| at <= Instant::now()) {
                let reason = format!("nothing was written in {DEADLINE:?}");
                self.stored(self.begun, Err(StoreError::Commit(reason)));
            }
            if self.retry_at_opt.is_some_and(|at| at <= Instant::now()) {
                self.rewrite();
            }
            self.begin();
            if is_ending && self.storing_opt.is_none() {
                return;
            }
        }
    }

    /// When what the disk works on counts as failed.
    fn deadline(&self) -> Option<Instant> {
        let storing = self.storing_opt.as_ref();
        storing.map(|storing| storing.begun + DEADLINE)
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

    /// Adds a job to those that are drafted.
    fn take(&mut self, job: Job) {
        if let Some(reason) = self.trouble() {
            return self.refuse(job, &reason);
        }
        let draft_opt = self.drafted.draft_opt.take();
        let mut draft = draft_opt.unwrap_or_else(|| match &self.storing_opt {
            Some(storing) => State::clone(&storing.state),
            None => State::clone(&self.current()),
        });
        let outcome = draft_job(&mut draft, &job).map(|(applied, changes)| {
            self.drafted.changes.extend(changes);
            applied
        });
        self.drafted.draft_opt = Some(draft);
        self.drafted.outcomes.push((job, outcome));
    }

    /// Hands what is drafted to the disk, unless it is busy.
    fn begin(&mut self) {
        if self.storing_opt.is_some() {
            return;
        }
        let Some(store) = &mut self.store_opt else {
            return;
        };
        let group = std::mem::take(&mut self.drafted);
        let Some(draft) = group.draft_opt else {
            return;
        };
        if group.changes.is_empty() {
            // What is so already is as durable as it was.
            return self.answer(group.outcomes);
        }
        self.begun += 1;
        let number = self.begun;
        self.storing_opt = Some(Storing {
            number,
            begun: Instant::now(),
            state: Arc::new(draft),
            outcomes: group.outcomes,
        });
        let messages = self.messages.clone();
        let done = move |result| {
            // A writer that has ended needs no answer.
            let _ = messages.send(Message::Stored(number, result));
        };
        store.commit(&group.changes, Box::new(done));
    }

    /// Publishes and answers what is durable, or says why it is not.
    fn stored(&mut self, number: u64, result: Result<(), StoreError>) {
        // One that was given up may still end.
        let Some(storing) = self.storing_opt.take_if(|storing| storing.number == number) else {
            return;
        };
        let seconds = storing.begun.elapsed().as_secs_f64();
        self.metrics.store_seconds.observe(seconds);
        if let Err(error) = result {
            self.fail_for_now(&error);
            let drafted = std::mem::take(&mut self.drafted);
            let reason = error.to_string();
            for (job, _) in storing.outcomes.into_iter().chain(drafted.outcomes) {
                self.refuse(job, &reason);
            }
            return;
        }
        *self
            .published
            .write()
            .unwrap_or_else(PoisonError::into_inner) = storing.state;
        self.tend();
        // The disk goes on first.
        self.begin();
        self.answer(storing.outcomes);
    }

    fn tend(&mut self) {
        if self.storing_opt.is_some() || self.retry_at_opt.is_some() {
            return;
        }
        let state = self.current();
        let Some(store) = &mut self.store_opt else {
            return;
        };
        let messages = self.messages.clone();
        let wake = move || {
            // As above.
            let _ = messages.send(Message::Tend);
        };
        if let Err(error) = store.tend(&state, Box::new(wake)) {
            self.fail_for_now(&error);
        }
    }

    fn answer(&self, outcomes: Vec<(Job, Outcome)>) {
        for (job, outcome) in outcomes {
            if let Ok(applied) = &outcome {
                self.tell(&job, applied);
            }
            // A client that has gone is told nothing; its change stands.
            let _ = job.answer.send(outcome);
        }
    }

    /// Answers a job that may change nothing. What is so already is as durable as it was.
    fn refuse(&self, job: Job, reason: &str) {
        let mut draft = State::clone(&self.current());
        let outcome = match draft_job(&mut draft, &job) {
            Ok((_, changes)) if !changes.is_empty() => Err(WriteError::ReadOnly(reason.to_owned())),
            Ok((applied, _)) => Ok(applied),
            Err(error) => Err(error),
        };
        self.answer(vec![(job, outcome)]);
    }

    /// Begins to write everything into new files, after the disk failed.
    fn rewrite(&mut self) {
        self.retry_at_opt = None;
        if let Some(store) = self.store_opt.take()
            && let Err(mpsc::SendError((store, _))) = self.rewriter.send((store, self.current()))
        {
            // Its thread has panicked; the log says so, and the server stays read-only.
            self.store_opt = Some(store);
        }
    }

    /// Takes the store back; changes are taken from now on if everything is in new files.
    fn rewritten(&mut self, Rewritten { store, result }: Rewritten) {
        self.store_opt = Some(store);
        match result {
            Err(error) => self.fail_for_now(&error),
            Ok(()) => {
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

#[cfg(test)]
mod tests;

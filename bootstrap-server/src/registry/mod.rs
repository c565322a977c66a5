//! The rules of registrations, pure: a state and a command in, a new state and what to store out.
//!
//! **Generations.** The *shape* of a registration is its sizes, page size, data type, layouts,
//! flags and policy. The *instance* of a rank is its `ip:port`. A different shape, or a new
//! address for a rank of a complete generation, begins the next generation, whose ranks start
//! empty; the old instances are retired, and what they send is refused.
//!
//! With fixed ports a new process has the address of an old one. It is told apart by what an old
//! process never changes: an address that comes back with the present shape after another shape,
//! or as another rank, is a new process and is taken.

mod exported;
mod shape;

use common::wire::route::RouteRelease;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::exported::ExportedEngine;
pub use self::shape::{Rank, RankId, Registration, Shape};

/// Retired generations that are remembered.
const MAX_RETIRED: usize = 64;
/// Registrations of io engines at most: a restarted engine has a new key, so old ones pile up.
const MAX_REGISTRATIONS: usize = 4096;

/// How [`Applied`] says that something is not there.
pub const NOTHING: &str = "nothing";

/// SGLang's texts, which its clients' operators know.
pub const POLICIES_DIFFER: &str = "Inconsistent prefill allocation policies";
/// Likewise.
pub const DSV41_DIFFERS: &str = "DeepSeek-V4.1 DSpark PD layout differs across prefill ranks";

/// A generation that is over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Retired {
    /// Its number.
    pub generation: u64,
    /// Its shape.
    pub shape: Shape,
    /// Its ranks' instances, and which rank each was.
    pub instances: BTreeMap<String, RankId>,
}

/// The ranks that make one engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// Counts from 1.
    pub number: u64,
    /// Seconds since 1970.
    pub began_at: u64,
    /// The shape.
    pub shape: Shape,
    /// The port of the first rank that named one.
    pub http_port: Option<u16>,
    /// Those before it, oldest first.
    pub retired: Vec<Retired>,
}

/// A registration of an io engine, for people and for peers that restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineRegistration {
    /// The body, as it came.
    pub body: common::wire::route::RegistrationBody,
    /// Whether its instance's address may be dialled by the prober.
    pub may_probe: bool,
    /// Seconds since 1970.
    pub registered_at: u64,
}

/// Everything under one listening port.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Namespace {
    /// The engine's generation, once a rank has registered.
    pub generation_opt: Option<Generation>,
    /// Its ranks.
    pub ranks: BTreeMap<RankId, Arc<Rank>>,
    /// Registered io engines, by key.
    pub registrations: BTreeMap<String, Arc<EngineRegistration>>,
    /// Since when no new rooms are taken, in seconds since 1970.
    pub draining_since_opt: Option<u64>,
    /// When an operator last removed a rank, in seconds since 1970. It is not stored.
    pub rank_removed_at: u64,
}

impl Namespace {
    /// How many ranks a complete engine has; 0 before the first.
    pub fn expected(&self) -> usize {
        self.generation_opt.as_ref().map_or(0, |generation| {
            let shape = &generation.shape;
            let sizes = [shape.tp_size, shape.cp_size, shape.dp_size, shape.pp_size];
            sizes.into_iter().map(|size| size as usize).product()
        })
    }

    /// The release whose topology JSON is answered: the oldest of the ranks', because an older
    /// decode fails on a key that it does not know.
    pub fn release(&self) -> RouteRelease {
        let releases = self.ranks.values().map(|rank| rank.release);
        releases.min().unwrap_or(RouteRelease::V0523)
    }

    /// Whether every rank has registered.
    pub fn is_complete(&self) -> bool {
        self.generation_opt.is_some() && self.ranks.len() == self.expected()
    }

    /// Since when ranks are missing, in seconds since 1970: since the generation began, or since an
    /// operator removed one.
    pub fn incomplete_since(&self) -> Option<u64> {
        let generation = self
            .generation_opt
            .as_ref()
            .filter(|_| !self.is_complete())?;
        Some(generation.began_at.max(self.rank_removed_at))
    }

    /// The ranks that have not registered, at most `limit` of them.
    pub fn missing(&self, limit: usize) -> Vec<RankId> {
        let Some(generation) = &self.generation_opt else {
            return Vec::new();
        };
        let shape = &generation.shape;
        let ids = (0..shape.dp_size).flat_map(|dp| {
            (0..shape.cp_size).flat_map(move |cp| {
                (0..shape.tp_size)
                    .flat_map(move |tp| (0..shape.pp_size).map(move |pp| RankId { dp, cp, tp, pp }))
            })
        });
        ids.filter(|id| !self.ranks.contains_key(id))
            .take(limit)
            .collect()
    }
}

/// All namespaces.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// By name.
    pub namespaces: BTreeMap<String, Arc<Namespace>>,
}

/// A change that is asked for.
#[derive(Clone, Debug)]
pub enum Command {
    /// A rank registers.
    PutRank(Box<Registration>),
    /// An io engine registers.
    PutRegistration(String, Arc<EngineRegistration>),
    /// An io engine's registration is removed.
    DeleteRegistration(String),
    /// A rank is removed; it may register again.
    DeleteRank(RankId),
    /// A whole engine is removed.
    DeleteEngine,
    /// An engine takes no new rooms, or takes them again.
    SetDraining(bool),
    /// An engine becomes what was exported elsewhere; it is checked already.
    Replace(Box<Namespace>),
}

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Keys that changed; the new values are in the state.
    pub changed: Vec<Key>,
    /// Whether a generation began that is not the first.
    pub began_generation: bool,
    /// Registrations that left to make room.
    pub evicted: usize,
    /// What the command is about as it was before, in words, for the audit log.
    pub before: String,
    /// The same as it is now.
    pub after: String,
    /// For the audit log.
    pub what: &'static str,
}

/// A stored value's place.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// The generation.
    Generation,
    /// A rank.
    Rank(RankId),
    /// An io engine's registration.
    Registration(String),
    /// Since when it drains.
    Draining,
}

/// Why a command was refused. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The registration contradicts those of its generation.
    #[error("{0}")]
    Inconsistent(&'static str),
    /// The instance belongs to a generation that is over.
    #[error("{0}")]
    Retired(String),
    /// There is nothing of that name.
    #[error("there is nothing of that name")]
    Unknown,
}

impl Command {
    /// What it is about, in words.
    pub fn subject(&self) -> String {
        match self {
            Self::PutRank(registration) => format!("rank {}", registration.id),
            Self::PutRegistration(key, _) | Self::DeleteRegistration(key) => {
                format!("registration {key}")
            }
            Self::DeleteRank(id) => format!("rank {id}"),
            Self::DeleteEngine | Self::SetDraining(_) | Self::Replace(_) => "engine".to_owned(),
        }
    }
}

impl State {
    /// What is under a name.
    pub fn get(&self, namespace: &str) -> Option<&Namespace> {
        self.namespaces.get(namespace).map(Arc::as_ref)
    }

    /// Applies a command to one namespace.
    ///
    /// # Errors
    /// [`Refused`]; the state is unchanged.
    pub fn apply(
        &mut self,
        namespace: &str,
        command: &Command,
        now: u64,
    ) -> Result<Applied, Refused> {
        let space = self.namespaces.entry(namespace.to_owned()).or_default();
        // Readers keep the namespace as it was; all others are shared with them.
        let space = Arc::make_mut(space);
        let before = space.shown(command);
        let applied = space.apply(command, now).map(|applied| Applied {
            before,
            after: space.shown(command),
            ..applied
        });
        if *space == Namespace::default() {
            self.namespaces.remove(namespace);
        }
        applied
    }
}

impl Applied {
    fn nothing() -> Self {
        Self::change(Vec::new(), "nothing changed")
    }

    fn change(changed: Vec<Key>, what: &'static str) -> Self {
        Self {
            changed,
            began_generation: false,
            evicted: 0,
            before: String::new(),
            after: String::new(),
            what,
        }
    }
}

impl Namespace {
    /// What there is of a command's subject, in words, for the audit log.
    fn shown(&self, command: &Command) -> String {
        let generation_opt = self.generation_opt.as_ref();
        let number = generation_opt.map_or(0, |generation| generation.number);
        let shown_opt = match command {
            Command::PutRank(registration) => self
                .ranks
                .get(&registration.id)
                .map(|rank| format!("{} in generation {number}", rank.instance())),
            Command::PutRegistration(key, _) | Command::DeleteRegistration(key) => self
                .registrations
                .get(key)
                .map(|known| format!("{} at {}", known.body.role, known.body.instance)),
            Command::DeleteRank(id) => {
                let rank_opt = self.ranks.get(id);
                rank_opt.map(|rank| format!("{} in generation {number}", rank.instance()))
            }
            Command::SetDraining(_) => {
                let is_draining = self.draining_since_opt.is_some();
                Some(if is_draining { "draining" } else { "serving" }.to_owned())
            }
            Command::DeleteEngine | Command::Replace(_) => Some(format!(
                "generation {number}, {} ranks, {} registrations",
                self.ranks.len(),
                self.registrations.len()
            )),
        };
        shown_opt.unwrap_or_else(|| NOTHING.to_owned())
    }

    fn apply(&mut self, command: &Command, now: u64) -> Result<Applied, Refused> {
        match command {
            Command::PutRank(registration) => self.put_rank(registration, now),
            Command::PutRegistration(key, registration) => {
                Ok(self.put_registration(key, registration))
            }
            Command::DeleteRegistration(key) => {
                self.registrations.remove(key).ok_or(Refused::Unknown)?;
                let changed = vec![Key::Registration(key.clone())];
                Ok(Applied::change(changed, "registration deleted"))
            }
            Command::DeleteEngine => {
                if *self == Self::default() {
                    return Err(Refused::Unknown);
                }
                let changed = self.keys();
                *self = Self::default();
                Ok(Applied::change(changed, "engine deleted"))
            }
            Command::DeleteRank(id) => {
                self.ranks.remove(id).ok_or(Refused::Unknown)?;
                self.rank_removed_at = now;
                Ok(Applied::change(vec![Key::Rank(*id)], "rank deleted"))
            }
            Command::SetDraining(drains) => {
                if self.draining_since_opt.is_some() == *drains {
                    return Ok(Applied::nothing());
                }
                self.draining_since_opt = drains.then_some(now);
                let what = if *drains {
                    "drain began"
                } else {
                    "drain ended"
                };
                Ok(Applied::change(vec![Key::Draining], what))
            }
            Command::Replace(space) => {
                let mut changed = self.keys();
                *self = Self::clone(space);
                changed.extend(self.keys());
                changed.sort();
                changed.dedup();
                Ok(Applied::change(changed, "engine imported"))
            }
        }
    }

    /// Every stored value's place.
    pub fn keys(&self) -> Vec<Key> {
        let ranks = self.ranks.keys().copied().map(Key::Rank);
        let registrations = self.registrations.keys().cloned().map(Key::Registration);
        let single = [Key::Generation, Key::Draining];
        ranks.chain(registrations).chain(single).collect()
    }

    fn put_registration(&mut self, key: &str, registration: &Arc<EngineRegistration>) -> Applied {
        let known = self.registrations.get(key);
        if known.is_some_and(|known| known.body == registration.body) {
            return Applied::nothing();
        }
        let mut changed = vec![Key::Registration(key.to_owned())];
        let is_full = known.is_none() && self.registrations.len() >= MAX_REGISTRATIONS;
        let oldest = is_full.then(|| {
            let ages = self.registrations.iter();
            ages.min_by_key(|(_, known)| known.registered_at)
                .map(|(oldest, _)| oldest.clone())
        });
        let oldest = oldest.flatten();
        if let Some(oldest) = &oldest {
            self.registrations.remove(oldest);
            changed.push(Key::Registration(oldest.clone()));
        }
        self.registrations
            .insert(key.to_owned(), Arc::clone(registration));
        let mut applied = Applied::change(changed, "registration put");
        applied.evicted = usize::from(oldest.is_some());
        applied
    }

    fn put_rank(&mut self, registration: &Registration, now: u64) -> Result<Applied, Refused> {
        let Registration { id, shape, rank } = registration;
        let is_complete = self.is_complete();
        let Some(generation) = &mut self.generation_opt else {
            self.begin(1, shape, Vec::new(), now);
            return Ok(self.add(*id, rank, vec![Key::Generation], "first rank registered"));
        };
        let instance = rank.instance();
        let mut changed = Vec::new();
        let retired = generation.retired.iter().rev();
        let retired = retired
            .filter_map(|old| Some((old, old.instances.get(&instance)?)))
            .next();
        if let Some((old, old_id)) = retired {
            let has_new_shape = *shape == generation.shape && *shape != old.shape;
            let is_other_rank = *shape == generation.shape && id != old_id;
            if !has_new_shape && !is_other_rank {
                return Err(Refused::Retired(retired_text(&instance, old, generation)));
            }
            for old in &mut generation.retired {
                old.instances.remove(&instance);
            }
            changed.push(Key::Generation);
        }
        if *shape != generation.shape {
            if !is_complete {
                if shape.dsv41_spec_layout != generation.shape.dsv41_spec_layout {
                    return Err(Refused::Inconsistent(DSV41_DIFFERS));
                }
                if shape.decode_allocation_policy != generation.shape.decode_allocation_policy {
                    return Err(Refused::Inconsistent(POLICIES_DIFFER));
                }
            }
            return Ok(self.begin_next(*id, shape, rank, now));
        }
        // Equal layouts may still be written differently, and SGLang's server shows the last.
        let layout = |shape: &Shape| shape.dsv41_spec_layout.as_ref().map(ToString::to_string);
        if layout(shape) != layout(&generation.shape) {
            generation
                .shape
                .dsv41_spec_layout
                .clone_from(&shape.dsv41_spec_layout);
            changed.push(Key::Generation);
        }
        match self.ranks.get(id) {
            Some(known) if known.instance() == instance => {
                let same = known.http_port == rank.http_port
                    && known.release == rank.release
                    && known.unknown_fields == rank.unknown_fields;
                if same && changed.is_empty() {
                    return Ok(Applied::nothing());
                }
                Ok(self.add(*id, rank, changed, "rank updated"))
            }
            Some(_) if is_complete => Ok(self.begin_next(*id, shape, rank, now)),
            Some(_) => Ok(self.add(*id, rank, changed, "rank replaced")),
            None => Ok(self.add(*id, rank, changed, "rank registered")),
        }
    }

    fn begin(&mut self, number: u64, shape: &Shape, retired: Vec<Retired>, now: u64) {
        self.generation_opt = Some(Generation {
            number,
            began_at: now,
            shape: shape.clone(),
            http_port: None,
            retired,
        });
    }

    fn begin_next(&mut self, id: RankId, shape: &Shape, rank: &Rank, now: u64) -> Applied {
        let Some(old) = self.generation_opt.take() else {
            return Applied::nothing();
        };
        let removed = std::mem::take(&mut self.ranks);
        let mut changed: Vec<Key> = removed.keys().copied().map(Key::Rank).collect();
        changed.push(Key::Generation);
        let mut retired = old.retired;
        let instances = removed.iter().map(|(id, rank)| (rank.instance(), *id));
        let mut instances: BTreeMap<String, RankId> = instances.collect();
        instances.remove(&rank.instance());
        retired.push(Retired {
            generation: old.number,
            shape: old.shape,
            instances,
        });
        let surplus = retired.len().saturating_sub(MAX_RETIRED);
        retired.drain(..surplus);
        self.begin(old.number + 1, shape, retired, now);
        let mut applied = self.add(id, rank, changed, "generation began");
        applied.began_generation = true;
        applied
    }

    fn add(
        &mut self,
        id: RankId,
        rank: &Rank,
        mut changed: Vec<Key>,
        what: &'static str,
    ) -> Applied {
        if let Some(generation) = &mut self.generation_opt
            && generation.http_port.is_none()
            && rank.http_port.is_some()
        {
            generation.http_port = rank.http_port;
            changed.push(Key::Generation);
        }
        self.ranks.insert(id, Arc::new(rank.clone()));
        changed.push(Key::Rank(id));
        Applied::change(changed, what)
    }
}

fn retired_text(instance: &str, old: &Retired, current: &Generation) -> String {
    let shown = |shape: &Shape| serde_json::to_string(shape).unwrap_or_default();
    format!(
        "{instance} belongs to generation {} of this engine, which is over (shape {}); generation {} is \
         now registered (shape {}). Restart this rank with the engine that replaced it, or delete the \
         engine over the admin API and register again",
        old.generation,
        shown(&old.shape),
        current.number,
        shown(&current.shape)
    )
}

#[cfg(test)]
pub(crate) mod tests;

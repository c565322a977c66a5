//! The rules of registrations, pure: a state and a command in, a new state and what to store out.
//!
//! **Generations.** The *shape* of a registration is its sizes, page size, data type, layouts,
//! flags and policy. The *instance* of a rank is its `ip:port`. A different shape, or a new
//! address for a rank of a complete generation, begins the next generation, whose ranks start
//! empty; the old instances are retired.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::fields::{self, FieldError};

/// Retired generations that are remembered.
const MAX_RETIRED: usize = 64;
/// Ranks of one engine at most.
const MAX_RANKS: u64 = 1 << 20;
const MAX_SIZE: u64 = 1 << 16;

/// SGLang's texts, which its clients' operators know.
pub const POLICIES_DIFFER: &str = "Inconsistent prefill allocation policies";
/// Likewise.
pub const DSV41_DIFFERS: &str = "DeepSeek-V4.1 DSpark PD layout differs across prefill ranks";

/// A rank's place in its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct RankId {
    pub dp: u32,
    pub cp: u32,
    pub tp: u32,
    pub pp: u32,
}

impl std::fmt::Display for RankId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "dp{} cp{} tp{} pp{}",
            self.dp, self.cp, self.tp, self.pp
        )
    }
}

/// What all ranks of a generation have in common.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Shape {
    pub tp_size: u32,
    pub cp_size: u32,
    pub dp_size: u32,
    pub pp_size: u32,
    pub page_size: u32,
    pub kv_cache_dtype: String,
    pub kv_layout: Option<String>,
    pub dsv41_spec_layout: Option<Value>,
    pub follow_bootstrap_room: bool,
    pub enable_dsa_cache_layer_split: bool,
    pub enable_kv_cache_sharding: bool,
    pub decode_allocation_policy: String,
    /// Which keys the topology JSON has, as the fields of the registrations tell.
    pub release: ReplyRelease,
}

/// The releases that share one topology JSON (`spec/bootstrap-http.md`, last table).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplyRelease {
    /// 0.5.12 to 0.5.15.
    V0512,
    /// 0.5.17 to 0.5.20.
    V0517,
    /// 0.5.21.
    V0521,
    /// 0.5.22.
    V0522,
    /// 0.5.23, and every field set that no known release sends.
    V0523,
}

const BASE_FIELDS: [&str; 15] = [
    "attn_tp_size",
    "attn_tp_rank",
    "attn_cp_size",
    "attn_cp_rank",
    "attn_dp_size",
    "attn_dp_rank",
    "pp_size",
    "pp_rank",
    "system_dp_size",
    "system_dp_rank",
    "rank_ip",
    "rank_port",
    "page_size",
    "kv_cache_dtype",
    "load_balance_method",
];

/// What each release adds to the one before it.
const ADDED_FIELDS: [(ReplyRelease, &[&str]); 4] = [
    (
        ReplyRelease::V0517,
        &["enable_dsa_cache_layer_split", "prefill_http_port"],
    ),
    (ReplyRelease::V0521, &["dsv41_spec_layout"]),
    (ReplyRelease::V0522, &["decode_allocation_policy"]),
    (
        ReplyRelease::V0523,
        &["kv_layout", "enable_kv_cache_sharding"],
    ),
];

impl ReplyRelease {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V0512 => "0.5.12 to 0.5.15",
            Self::V0517 => "0.5.17 to 0.5.20",
            Self::V0521 => "0.5.21",
            Self::V0522 => "0.5.22",
            Self::V0523 => "0.5.23",
        }
    }

    /// The release that sends exactly these fields, else the newest.
    fn of(map: &Map<String, Value>) -> Self {
        let mut known: BTreeSet<&str> = BASE_FIELDS.into();
        let sent: BTreeSet<&str> = map.keys().map(String::as_str).collect();
        if sent == known {
            return Self::V0512;
        }
        for (release, added) in ADDED_FIELDS {
            known.extend(added);
            if sent == known {
                return release;
            }
        }
        Self::V0523
    }
}

/// One registered rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rank {
    /// Its address, as it came.
    pub ip: String,
    /// Its port.
    pub port: u16,
    /// The engine's HTTP port, if it said so.
    pub http_port: Option<u16>,
    /// Fields that no known release sends; kept, shown, never echoed.
    pub unknown_fields: Map<String, Value>,
    /// Whether its address may be dialled by the prober.
    pub may_probe: bool,
    /// Seconds since 1970.
    pub registered_at: u64,
}

impl Rank {
    /// The rank's instance.
    pub fn instance(&self) -> String {
        if self.ip.contains(':') && !self.ip.starts_with('[') {
            format!("[{}]:{}", self.ip, self.port)
        } else {
            format!("{}:{}", self.ip, self.port)
        }
    }
}

/// A `PUT /route`, read and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Registration {
    /// The rank's place.
    pub id: RankId,
    /// What it shares with the others.
    pub shape: Shape,
    /// The rank.
    pub rank: Rank,
}

impl Registration {
    /// Reads a body.
    ///
    /// # Errors
    /// What is wrong with which field.
    pub fn parse(map: &Map<String, Value>, may_probe: bool, now: u64) -> Result<Self, FieldError> {
        let size = |name: &str| narrow(fields::integer(map, name, 1, MAX_SIZE));
        let (tp_size, cp_size, pp_size) = (
            size("attn_tp_size")?,
            size("attn_cp_size")?,
            size("pp_size")?,
        );
        let (attn_dp_size, system_dp_size) = (size("attn_dp_size")?, size("system_dp_size")?);
        let rank = |name: &str, size: u32| {
            narrow(fields::integer(
                map,
                name,
                0,
                u64::from(size).saturating_sub(1),
            ))
        };
        let attn_dp_rank = rank("attn_dp_rank", attn_dp_size)?;
        let system_dp_rank = rank("system_dp_rank", system_dp_size)?;
        let (dp_size, dp) = if system_dp_size == 1 {
            (attn_dp_size, attn_dp_rank)
        } else {
            (system_dp_size, system_dp_rank)
        };
        let id = RankId {
            dp,
            cp: rank("attn_cp_rank", cp_size)?,
            tp: rank("attn_tp_rank", tp_size)?,
            pp: rank("pp_rank", pp_size)?,
        };
        let total = [tp_size, cp_size, dp_size, pp_size]
            .into_iter()
            .try_fold(1u64, |total, size| total.checked_mul(u64::from(size)));
        if total.is_none_or(|total| total > MAX_RANKS) {
            return Err(format!("the sizes make more than {MAX_RANKS} ranks"));
        }
        let method = fields::optional_text(map, "load_balance_method")?;
        let policy = fields::optional_text(map, "decode_allocation_policy")?;
        let shape = Shape {
            tp_size,
            cp_size,
            dp_size,
            pp_size,
            page_size: narrow(fields::integer_or_digits(
                map,
                "page_size",
                1,
                u64::from(u32::MAX),
            ))?,
            kv_cache_dtype: fields::text(map, "kv_cache_dtype")?,
            kv_layout: fields::optional_text(map, "kv_layout")?,
            dsv41_spec_layout: map
                .get("dsv41_spec_layout")
                .filter(|value| !value.is_null())
                .cloned(),
            follow_bootstrap_room: method.is_none_or(|method| method == "follow_bootstrap_room"),
            enable_dsa_cache_layer_split: fields::flag(map, "enable_dsa_cache_layer_split")?,
            enable_kv_cache_sharding: fields::flag(map, "enable_kv_cache_sharding")?,
            decode_allocation_policy: policy.unwrap_or_else(|| "early".to_owned()),
            release: ReplyRelease::of(map),
        };
        let known = |name: &str| {
            BASE_FIELDS.contains(&name)
                || ADDED_FIELDS.iter().any(|(_, added)| added.contains(&name))
        };
        let unknown_fields = map.iter().filter(|(name, _)| !known(name));
        let port = fields::integer_or_digits(map, "rank_port", 1, u64::from(u16::MAX))?;
        Ok(Self {
            id,
            shape,
            rank: Rank {
                ip: fields::text(map, "rank_ip")?,
                port: u16::try_from(port).unwrap_or_default(),
                http_port: fields::optional_port(map, "prefill_http_port")?,
                unknown_fields: unknown_fields
                    .map(|(name, value)| (name.clone(), value.clone()))
                    .collect(),
                may_probe,
                registered_at: now,
            },
        })
    }
}

fn narrow(number: Result<u64, FieldError>) -> Result<u32, FieldError> {
    number.and_then(|number| u32::try_from(number).map_err(|error| error.to_string()))
}

/// A generation that is over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Retired {
    /// Its number.
    pub generation: u64,
    /// Its shape.
    pub shape: Shape,
    /// Its ranks' instances.
    pub instances: BTreeSet<String>,
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
    /// Seconds since 1970.
    pub registered_at: u64,
}

/// Everything under one listening port.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Namespace {
    /// The engine's generation, once a rank has registered.
    pub generation_opt: Option<Generation>,
    /// Its ranks.
    pub ranks: BTreeMap<RankId, Rank>,
    /// Registered io engines, by key.
    pub registrations: BTreeMap<String, EngineRegistration>,
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

    /// Whether every rank has registered.
    pub fn is_complete(&self) -> bool {
        self.generation_opt.is_some() && self.ranks.len() == self.expected()
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
    pub namespaces: BTreeMap<String, Namespace>,
}

/// A change that is asked for.
#[derive(Clone, Debug)]
pub enum Command {
    /// A rank registers.
    PutRank(Box<Registration>),
    /// An io engine registers.
    PutRegistration(String, Box<EngineRegistration>),
    /// An io engine's registration is removed.
    DeleteRegistration(String),
    /// A whole engine is removed.
    DeleteEngine,
}

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Keys that changed; the new values are in the state.
    pub changed: Vec<Key>,
    /// Whether a generation began that is not the first.
    pub began_generation: bool,
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
}

/// Why a command was refused. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The registration contradicts those of its generation.
    Inconsistent(&'static str),
    /// The instance belongs to a generation that is over.
    Retired(String),
    /// There is nothing of that name.
    Unknown,
}

impl State {
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
        match command {
            Command::PutRank(registration) => space.put_rank(registration, now),
            Command::PutRegistration(key, registration) => {
                let known = space.registrations.get(key);
                if known.is_some_and(|known| known.body == registration.body) {
                    return Ok(Applied::nothing());
                }
                space
                    .registrations
                    .insert(key.clone(), (**registration).clone());
                Ok(Applied::change(
                    vec![Key::Registration(key.clone())],
                    "registration put",
                ))
            }
            Command::DeleteRegistration(key) => {
                space.registrations.remove(key).ok_or(Refused::Unknown)?;
                Ok(Applied::change(
                    vec![Key::Registration(key.clone())],
                    "registration deleted",
                ))
            }
            Command::DeleteEngine => {
                if space.generation_opt.is_none() && space.registrations.is_empty() {
                    return Err(Refused::Unknown);
                }
                let removed = std::mem::take(space);
                let mut changed: Vec<Key> = removed.ranks.into_keys().map(Key::Rank).collect();
                changed.extend(removed.registrations.into_keys().map(Key::Registration));
                changed.push(Key::Generation);
                Ok(Applied::change(changed, "engine deleted"))
            }
        }
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
            what,
        }
    }
}

impl Namespace {
    fn put_rank(&mut self, registration: &Registration, now: u64) -> Result<Applied, Refused> {
        let Registration { id, shape, rank } = registration;
        let is_complete = self.is_complete();
        let Some(generation) = &mut self.generation_opt else {
            self.begin(1, shape, Vec::new(), now);
            return Ok(self.add(*id, rank, vec![Key::Generation], "first rank registered"));
        };
        let instance = rank.instance();
        let retired = generation
            .retired
            .iter()
            .rev()
            .find(|old| old.instances.contains(&instance));
        if let Some(old) = retired {
            // An address of the past with the shape of the present is a new process behind a fixed
            // port; with any other shape it is a rank of the past.
            let is_new_process = *shape == generation.shape && *shape != old.shape;
            if !is_new_process {
                return Err(Refused::Retired(retired_text(&instance, old, generation)));
            }
        }
        if *shape != generation.shape {
            if !is_complete {
                if shape.decode_allocation_policy != generation.shape.decode_allocation_policy {
                    return Err(Refused::Inconsistent(POLICIES_DIFFER));
                }
                if shape.dsv41_spec_layout != generation.shape.dsv41_spec_layout {
                    return Err(Refused::Inconsistent(DSV41_DIFFERS));
                }
            }
            return Ok(self.begin_next(*id, shape, rank, now));
        }
        match self.ranks.get(id) {
            Some(known) if known.instance() == instance => {
                let same = known.http_port == rank.http_port
                    && known.unknown_fields == rank.unknown_fields;
                if same {
                    return Ok(Applied::nothing());
                }
                Ok(self.add(*id, rank, Vec::new(), "rank updated"))
            }
            Some(_) if is_complete => Ok(self.begin_next(*id, shape, rank, now)),
            Some(_) => Ok(self.add(*id, rank, Vec::new(), "rank replaced")),
            None => Ok(self.add(*id, rank, Vec::new(), "rank registered")),
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
        let mut instances: BTreeSet<String> = removed.values().map(Rank::instance).collect();
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
        self.ranks.insert(id, rank.clone());
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
mod tests {
    use super::*;
    use serde_json::json;

    fn registration(tp_size: u32, tp_rank: u32, port: u16, page_size: u32) -> Command {
        let body = json!({
            "attn_tp_size": tp_size, "attn_tp_rank": tp_rank, "attn_cp_size": 1, "attn_cp_rank": 0,
            "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1,
            "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": port, "page_size": page_size,
            "kv_cache_dtype": "auto", "load_balance_method": "round_robin",
        });
        let registration = Registration::parse(body.as_object().unwrap(), true, 7).unwrap();
        Command::PutRank(Box::new(registration))
    }

    fn put(
        state: &mut State,
        tp_size: u32,
        tp_rank: u32,
        port: u16,
        page: u32,
    ) -> Result<Applied, Refused> {
        state.apply("e", &registration(tp_size, tp_rank, port, page), 7)
    }

    fn number(state: &State) -> u64 {
        state.namespaces["e"]
            .generation_opt
            .as_ref()
            .unwrap()
            .number
    }

    #[test]
    fn one_rank_twice_is_one_rank() {
        let mut state = State::default();
        put(&mut state, 2, 0, 10, 64).unwrap();
        assert_eq!(put(&mut state, 2, 0, 10, 64).unwrap(), Applied::nothing());
        put(&mut state, 2, 0, 11, 64).unwrap();
        assert!(
            !state.namespaces["e"].is_complete(),
            "an incomplete generation takes a new address"
        );
        assert_eq!(number(&state), 1);
        assert_eq!(
            state.namespaces["e"].missing(9),
            [RankId {
                dp: 0,
                cp: 0,
                tp: 1,
                pp: 0
            }]
        );
        put(&mut state, 2, 1, 12, 64).unwrap();
        assert!(state.namespaces["e"].is_complete());
    }

    #[test]
    fn a_replaced_engine_begins_a_generation_and_its_past_is_refused() {
        let mut state = State::default();
        put(&mut state, 2, 0, 10, 64).unwrap();
        put(&mut state, 2, 1, 11, 64).unwrap();
        let applied = put(&mut state, 2, 0, 20, 64).unwrap();
        assert!(applied.began_generation && number(&state) == 2);
        assert_eq!(
            state.namespaces["e"].ranks.len(),
            1,
            "the new generation starts empty"
        );
        assert!(matches!(
            put(&mut state, 2, 1, 11, 64),
            Err(Refused::Retired(_))
        ));
        put(&mut state, 2, 1, 21, 64).unwrap();
        assert!(state.namespaces["e"].is_complete());
    }

    #[test]
    fn fixed_ports_may_come_back_with_another_shape() {
        let mut state = State::default();
        put(&mut state, 2, 0, 10, 64).unwrap();
        put(&mut state, 2, 1, 11, 64).unwrap();
        assert!(put(&mut state, 2, 0, 10, 32).unwrap().began_generation);
        put(&mut state, 2, 1, 11, 32).unwrap();
        assert!(state.namespaces["e"].is_complete());
        assert!(matches!(
            put(&mut state, 2, 1, 11, 64),
            Err(Refused::Retired(_)) | Ok(_)
        ));
    }

    #[test]
    fn releases_are_told_by_their_fields() {
        let base: Map<String, Value> = BASE_FIELDS
            .map(|name| (name.to_owned(), json!(0)))
            .into_iter()
            .collect();
        assert_eq!(ReplyRelease::of(&base), ReplyRelease::V0512);
        let mut fields = base.clone();
        for (release, added) in ADDED_FIELDS {
            fields.extend(added.iter().map(|name| ((*name).to_owned(), json!(0))));
            assert_eq!(ReplyRelease::of(&fields), release);
        }
        fields.insert("of_the_future".to_owned(), json!(0));
        assert_eq!(ReplyRelease::of(&fields), ReplyRelease::V0523);
        let minimal: Map<String, Value> = base.into_iter().take(14).collect();
        assert_eq!(ReplyRelease::of(&minimal), ReplyRelease::V0523);
    }
}

//! An engine as a document, for backup and migration.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{EngineRegistration, Generation, MAX_REGISTRATIONS, Namespace, Rank, RankId};

/// Everything that is stored of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportedEngine {
    /// The generation, once a rank has registered.
    pub generation: Option<Generation>,
    /// Its ranks.
    pub ranks: Vec<(RankId, Rank)>,
    /// Registered io engines, by key.
    pub registrations: BTreeMap<String, EngineRegistration>,
    /// Since when it drains.
    pub draining_since: Option<u64>,
}

impl From<&Namespace> for ExportedEngine {
    fn from(space: &Namespace) -> Self {
        let registrations = space.registrations.iter();
        Self {
            generation: space.generation_opt.clone(),
            ranks: space
                .ranks
                .iter()
                .map(|(id, rank)| (*id, Rank::clone(rank)))
                .collect(),
            registrations: registrations
                .map(|(key, known)| (key.clone(), EngineRegistration::clone(known)))
                .collect(),
            draining_since: space.draining_since_opt,
        }
    }
}

impl TryFrom<ExportedEngine> for Namespace {
    type Error = String;

    fn try_from(engine: ExportedEngine) -> Result<Self, String> {
        let number = engine.ranks.len();
        let ranks = engine.ranks.into_iter();
        let ranks: BTreeMap<RankId, Arc<Rank>> =
            ranks.map(|(id, rank)| (id, Arc::new(rank))).collect();
        if ranks.len() != number {
            return Err("a rank is there twice".to_owned());
        }
        if engine.registrations.len() > MAX_REGISTRATIONS {
            return Err(format!("more than {MAX_REGISTRATIONS} registrations"));
        }
        match &engine.generation {
            None if !ranks.is_empty() => return Err("ranks without a generation".to_owned()),
            None => {}
            Some(generation) => {
                let shape = &generation.shape;
                let is_outside = |id: &&RankId| {
                    id.dp >= shape.dp_size
                        || id.cp >= shape.cp_size
                        || id.tp >= shape.tp_size
                        || id.pp >= shape.pp_size
                };
                if let Some(id) = ranks.keys().find(is_outside) {
                    return Err(format!("rank {id} lies outside the engine's sizes"));
                }
            }
        }
        let registrations = engine.registrations.into_iter();
        Ok(Self {
            generation_opt: engine.generation,
            ranks,
            registrations: registrations
                .map(|(key, known)| (key, Arc::new(known)))
                .collect(),
            draining_since_opt: engine.draining_since,
            rank_removed_at: 0,
        })
    }
}

//! The stored form of registrations: keys of three parts, and JSON behind a version.

use std::sync::Arc;

use super::{Change, Entry, Lost};
use crate::error::StoreError;
use crate::registry::{Key, Namespace, RankId, State};

/// Version of the stored values, their first byte.
const VERSION: u8 = 1;
/// Parts of a key. A namespace or engine key may hold any other byte.
const SEPARATOR: char = '\u{1f}';

/// The stored form of what a command changed.
///
/// # Errors
/// [`StoreError::Commit`] when a value cannot be written as JSON.
pub fn changes_of(state: &State, namespace: &str, keys: &[Key]) -> Result<Vec<Change>, StoreError> {
    let empty = Namespace::default();
    let space = state.get(namespace).unwrap_or(&empty);
    let change = |key: &Key| {
        let value_opt = match key {
            Key::Generation => space.generation_opt.as_ref().map(to_bytes),
            Key::Draining => space.draining_since_opt.as_ref().map(to_bytes),
            Key::Rank(id) => space.ranks.get(id).map(|rank| to_bytes(rank.as_ref())),
            Key::Registration(name) => space
                .registrations
                .get(name)
                .map(|known| to_bytes(known.as_ref())),
        };
        Ok((key_bytes(namespace, key), value_opt.transpose()?))
    };
    keys.iter().map(change).collect()
}

/// The stored form of everything.
///
/// # Errors
/// As [`changes_of`].
pub fn entries_of(state: &State) -> Result<Vec<Entry>, StoreError> {
    let mut entries = Vec::new();
    for (namespace, space) in &state.namespaces {
        let changes = changes_of(state, namespace, &space.keys())?;
        entries.extend(
            changes
                .into_iter()
                .filter_map(|(key, value_opt)| Some((key, value_opt?))),
        );
    }
    Ok(entries)
}

/// Reads a store's content back into a state, and says which values cannot be read.
///
/// # Errors
/// [`StoreError::Version`] for a value of a newer server.
pub fn state_of(entries: &[Entry]) -> Result<(State, Vec<Lost>), StoreError> {
    let mut state = State::default();
    let mut lost = Vec::new();
    for (key, value) in entries {
        // The version comes first: a newer server may have other keys, too.
        check_version(key, value)?;
        if let Err(what) = read_into(&mut state, key, value) {
            let key = key.clone();
            lost.push(Lost { key, what });
        }
    }
    Ok((state, lost))
}

fn read_into(state: &mut State, key: &[u8], value: &[u8]) -> Result<(), String> {
    let key = std::str::from_utf8(key).map_err(|error| error.to_string())?;
    let parts: Vec<&str> = key.splitn(3, SEPARATOR).collect();
    match parts[..] {
        [namespace, "generation"] => {
            let generation = from_bytes(value)?;
            space_of(state, namespace).generation_opt = Some(generation);
        }
        [namespace, "draining"] => {
            let since = from_bytes(value)?;
            space_of(state, namespace).draining_since_opt = Some(since);
        }
        [namespace, "rank", id] => {
            let id: RankId = serde_json::from_str(id).map_err(|error| error.to_string())?;
            let rank = Arc::new(from_bytes(value)?);
            space_of(state, namespace).ranks.insert(id, rank);
        }
        [namespace, "registration", name] => {
            let registration = Arc::new(from_bytes(value)?);
            let space = space_of(state, namespace);
            space.registrations.insert(name.to_owned(), registration);
        }
        _ => return Err("its key is unknown".to_owned()),
    }
    Ok(())
}

fn space_of<'state>(state: &'state mut State, namespace: &str) -> &'state mut Namespace {
    let space = state.namespaces.entry(namespace.to_owned()).or_default();
    Arc::make_mut(space)
}

/// A key for people.
pub fn shown_key(key: &[u8]) -> String {
    String::from_utf8_lossy(key).replace(SEPARATOR, "/")
}

fn key_bytes(namespace: &str, key: &Key) -> Vec<u8> {
    let key = match key {
        Key::Generation => format!("{namespace}{SEPARATOR}generation"),
        Key::Draining => format!("{namespace}{SEPARATOR}draining"),
        Key::Rank(id) => {
            // Four integers always become JSON.
            let id = serde_json::to_string(id).unwrap_or_default();
            format!("{namespace}{SEPARATOR}rank{SEPARATOR}{id}")
        }
        Key::Registration(name) => format!("{namespace}{SEPARATOR}registration{SEPARATOR}{name}"),
    };
    key.into_bytes()
}

fn to_bytes(value: &impl serde::Serialize) -> Result<Vec<u8>, StoreError> {
    let mut bytes = vec![VERSION];
    serde_json::to_writer(&mut bytes, value)
        .map_err(|error| StoreError::Commit(error.to_string()))?;
    Ok(bytes)
}

fn check_version(key: &[u8], bytes: &[u8]) -> Result<(), StoreError> {
    match bytes.first() {
        Some(&VERSION) | None => Ok(()),
        Some(version) => Err(StoreError::Version {
            key: shown_key(key),
            version: *version,
            known: VERSION,
        }),
    }
}

fn from_bytes<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let (_, json) = bytes.split_first().ok_or("it is empty")?;
    serde_json::from_slice(json).map_err(|error| error.to_string())
}

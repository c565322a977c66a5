//! Where registrations survive: sled on the disk, or memory.

mod memory;
mod sled;

use std::sync::Arc;

use crate::error::StoreError;
use crate::registry::{Key, Namespace, RankId, State};

pub use self::memory::MemoryStore;
pub use self::sled::SledStore;

/// Version of the stored values, their first byte.
const VERSION: u8 = 1;
/// Parts of a key. A namespace or engine key may hold any other byte.
const SEPARATOR: char = '\u{1f}';

/// One change of one value; `None` removes it.
pub type Change = (Vec<u8>, Option<Vec<u8>>);

/// A stored value with its key.
pub type Entry = (Vec<u8>, Vec<u8>);

/// A place for values.
pub trait Store: Send {
    /// Everything, at start.
    ///
    /// # Errors
    /// When it cannot be read.
    fn load(&self) -> Result<Vec<Entry>, StoreError>;

    /// Makes changes, all or none, and returns when they are durable.
    ///
    /// # Errors
    /// [`StoreError::Commit`]; nothing may be acknowledged then.
    fn commit(&mut self, changes: &[Change]) -> Result<(), StoreError>;
}

/// The stored form of what a command changed.
///
/// # Errors
/// [`StoreError::Commit`] when a value cannot be written as JSON.
pub fn changes_of(state: &State, namespace: &str, keys: &[Key]) -> Result<Vec<Change>, StoreError> {
    let empty = Namespace::default();
    let space = state.namespaces.get(namespace).unwrap_or(&empty);
    let change = |key: &Key| {
        let value_opt = match key {
            Key::Generation => space.generation_opt.as_ref().map(to_bytes),
            Key::Rank(id) => space.ranks.get(id).map(to_bytes),
            Key::Registration(name) => space
                .registrations
                .get(name)
                .map(|known| to_bytes(known.as_ref())),
        };
        Ok((key_bytes(namespace, key), value_opt.transpose()?))
    };
    keys.iter().map(change).collect()
}

/// Reads a store's content back into a state.
///
/// # Errors
/// [`StoreError::Version`] or [`StoreError::Corrupt`] that names the value.
pub fn load_state(store: &dyn Store) -> Result<State, StoreError> {
    let mut state = State::default();
    for (key, value) in store.load()? {
        let key = String::from_utf8_lossy(&key).into_owned();
        // The version comes first: a newer server may have other keys, too.
        check_version(&key, &value)?;
        let parts: Vec<&str> = key.splitn(3, SEPARATOR).collect();
        let corrupt = |reason: String| StoreError::Corrupt {
            key: key.replace(SEPARATOR, "/"),
            reason,
        };
        match parts[..] {
            [namespace, "generation"] => {
                let space = state.namespaces.entry(namespace.to_owned()).or_default();
                space.generation_opt = Some(from_bytes(&key, &value)?);
            }
            [namespace, "rank", id] => {
                let id: RankId =
                    serde_json::from_str(id).map_err(|error| corrupt(error.to_string()))?;
                let space = state.namespaces.entry(namespace.to_owned()).or_default();
                space.ranks.insert(id, from_bytes(&key, &value)?);
            }
            [namespace, "registration", name] => {
                let space = state.namespaces.entry(namespace.to_owned()).or_default();
                space
                    .registrations
                    .insert(name.to_owned(), Arc::new(from_bytes(&key, &value)?));
            }
            _ => return Err(corrupt("its key is unknown".to_owned())),
        }
    }
    Ok(state)
}

fn key_bytes(namespace: &str, key: &Key) -> Vec<u8> {
    let key = match key {
        Key::Generation => format!("{namespace}{SEPARATOR}generation"),
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

fn check_version(key: &str, bytes: &[u8]) -> Result<(), StoreError> {
    match bytes.first() {
        Some(&VERSION) | None => Ok(()),
        Some(version) => Err(StoreError::Version {
            key: key.replace(SEPARATOR, "/"),
            version: *version,
            known: VERSION,
        }),
    }
}

fn from_bytes<T: serde::de::DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T, StoreError> {
    let key = key.replace(SEPARATOR, "/");
    match bytes.split_first() {
        Some((_, json)) => serde_json::from_slice(json).map_err(|error| StoreError::Corrupt {
            key,
            reason: error.to_string(),
        }),
        None => Err(StoreError::Corrupt {
            key,
            reason: "it is empty".to_owned(),
        }),
    }
}

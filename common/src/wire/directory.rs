//! What an engine with Mooncake's face answers to whoever asks it: `[engine, [memory, ...]]`, each
//! as its packed descriptor.

use rmpv::Value;

use crate::wire::descriptor::{EngineDesc, MemoryDesc};
use crate::wire::error::{WireError, msgpack_error};

/// An engine and its registered memory.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineEntry {
    /// Who answers.
    pub engine: EngineDesc,
    /// What it has registered.
    pub memories: Vec<MemoryDesc>,
}

impl EngineEntry {
    /// The body of an answer.
    ///
    /// # Errors
    /// [`WireError::Msgpack`] when a descriptor cannot be written.
    pub fn pack(&self) -> Result<Vec<u8>, WireError> {
        let memories = self.memories.iter();
        let memories = memories.map(|memory| memory.pack().map(Value::Binary));
        let value = Value::Array(vec![
            Value::Binary(self.engine.pack()?),
            Value::Array(memories.collect::<Result<_, _>>()?),
        ]);
        let mut body = Vec::new();
        rmpv::encode::write_value(&mut body, &value).map_err(|error| msgpack_error(WHAT, error))?;
        Ok(body)
    }

    /// Reads the body of an answer; bytes behind it are ignored.
    ///
    /// # Errors
    /// [`WireError::Msgpack`] and what descriptors are refused for.
    pub fn unpack(body: &[u8]) -> Result<Self, WireError> {
        let value = rmpv::decode::read_value(&mut &*body);
        let value = value.map_err(|error| msgpack_error(WHAT, error))?;
        let Some([engine, Value::Array(memories)]) = value.as_array().map(Vec::as_slice) else {
            return Err(otherwise("expected [engine, [memory, ...]]"));
        };
        let memories = memories.iter();
        let memories = memories.map(|memory| MemoryDesc::unpack(bytes(memory)?));
        Ok(Self {
            engine: EngineDesc::unpack(bytes(engine)?)?,
            memories: memories.collect::<Result<_, _>>()?,
        })
    }
}

const WHAT: &str = "directory answer";

fn bytes(packed: &Value) -> Result<&[u8], WireError> {
    packed
        .as_slice()
        .ok_or_else(|| otherwise("a descriptor that is not bytes"))
}

fn otherwise(detail: &str) -> WireError {
    WireError::Msgpack {
        what: WHAT,
        detail: detail.to_owned(),
    }
}

//! MoRI's packed descriptors, at every length of the array.

use common::wire::{EngineDesc, MemoryDesc, MemoryLocation};
use proptest::prelude::*;

use crate::messages::{engine_desc, memory_desc};

/// The elements in MoRI's order, built without the codec under test.
fn engine_elements(desc: &EngineDesc) -> Vec<rmpv::Value> {
    let mut elements: Vec<rmpv::Value> = vec![
        desc.key.as_str().into(),
        desc.node_id.as_str().into(),
        desc.hostname.as_str().into(),
        desc.host.as_str().into(),
        desc.port.into(),
        desc.pid.into(),
    ];
    elements.extend(desc.extra.iter().cloned());
    elements
}

fn memory_elements(desc: &MemoryDesc) -> Vec<rmpv::Value> {
    let mut elements: Vec<rmpv::Value> = vec![
        desc.engine_key.as_str().into(),
        desc.id.into(),
        desc.device_id.into(),
        desc.device_bus_id.as_str().into(),
        desc.data.into(),
        desc.size.into(),
        desc.location.number().into(),
        rmpv::Value::Binary(desc.ipc_handle.clone()),
        desc.numa_node.into(),
        desc.ipc_offset.into(),
        rmpv::Value::Binary(desc.fabric_handle.clone()),
        desc.vpod_id.into(),
        desc.vpod_ppod_id.as_str().into(),
        desc.fabric_offset.into(),
        desc.fabric_alloc_size.into(),
    ];
    elements.extend(desc.extra.iter().cloned());
    elements
}

fn packed(elements: &[rmpv::Value], text_as_bytes: bool) -> Vec<u8> {
    let swapped = elements.iter().map(|element| match element {
        rmpv::Value::String(text) if text_as_bytes => rmpv::Value::Binary(text.as_bytes().to_vec()),
        other => other.clone(),
    });
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, &rmpv::Value::Array(swapped.collect()))
        .expect("a vector takes every byte");
    bytes
}

/// What an older release's shorter array leaves of a descriptor: MoRI's defaults for the rest.
fn shortened(desc: &MemoryDesc, length: usize) -> MemoryDesc {
    let (whole, zeros) = (desc.clone(), vec![0; 64]);
    let has = |position: usize| position < length;
    MemoryDesc {
        engine_key: if has(0) {
            whole.engine_key
        } else {
            String::new()
        },
        id: if has(1) { whole.id } else { 0 },
        device_id: if has(2) { whole.device_id } else { -1 },
        device_bus_id: if has(3) {
            whole.device_bus_id
        } else {
            String::new()
        },
        data: if has(4) { whole.data } else { 0 },
        size: if has(5) { whole.size } else { 0 },
        location: if has(6) {
            whole.location
        } else {
            MemoryLocation::Unknown(0)
        },
        ipc_handle: if has(7) {
            whole.ipc_handle
        } else {
            zeros.clone()
        },
        numa_node: if has(8) { whole.numa_node } else { -1 },
        ipc_offset: if has(9) { whole.ipc_offset } else { 0 },
        fabric_handle: if has(10) { whole.fabric_handle } else { zeros },
        vpod_id: if has(11) { whole.vpod_id } else { -1 },
        vpod_ppod_id: if has(12) {
            whole.vpod_ppod_id
        } else {
            String::new()
        },
        fabric_offset: if has(13) { whole.fabric_offset } else { 0 },
        fabric_alloc_size: if has(14) { whole.fabric_alloc_size } else { 0 },
        extra: whole
            .extra
            .into_iter()
            .take(length.saturating_sub(15))
            .collect(),
    }
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn an_engine_descriptor_comes_back_at_every_length(
        desc in engine_desc(),
        length in 1usize..9,
        text_as_bytes: bool,
        behind in proptest::collection::vec(any::<u8>(), 0..4),
    ) {
        let elements = engine_elements(&desc);
        prop_assert_eq!(desc.pack(), Ok(packed(&elements, false)));
        let length = length.min(elements.len());
        let has = |position: usize| position < length;
        let kept = EngineDesc {
            key: desc.key.clone(),
            node_id: if has(1) { desc.node_id } else { String::new() },
            hostname: if has(2) { desc.hostname } else { String::new() },
            host: if has(3) { desc.host } else { String::new() },
            port: if has(4) { desc.port } else { 0 },
            pid: if has(5) { desc.pid } else { 0 },
            extra: desc.extra.into_iter().take(length.saturating_sub(6)).collect(),
        };
        // Extras keep their own types, so only the texts of known elements are written as bytes.
        let mut bytes = packed(&elements[..length], text_as_bytes && length <= 6);
        bytes.extend(behind);
        prop_assert_eq!(EngineDesc::unpack(&bytes), Ok(kept));
    }

    #[test]
    fn a_memory_descriptor_comes_back_at_every_length(
        desc in memory_desc(),
        length in 0usize..18,
        text_as_bytes: bool,
        behind in proptest::collection::vec(any::<u8>(), 0..4),
    ) {
        let elements = memory_elements(&desc);
        prop_assert_eq!(desc.pack(), Ok(packed(&elements, false)));
        let length = length.min(elements.len());
        let mut bytes = packed(&elements[..length], text_as_bytes && length <= 15);
        bytes.extend(behind);
        prop_assert_eq!(MemoryDesc::unpack(&bytes), Ok(shortened(&desc, length)));
    }
}

//! Every case of `control_frames.json`: what SGLang's own code sent and how it read.

mod malformed;
mod messages;

use common::ids::{Endpoint, Room};
use common::wire::descriptor::{HANDLE_BYTES, MemoryLocation};
use common::wire::{
    ControlMessage, EngineDesc, Frame, MemoryDesc, Register, Release, TransferInfo, decode_message,
};
use golden::{integer, list};
use serde_json::{Value, json};

const FILE: &str = "control_frames.json";

fn frames_of(case: &Value) -> Vec<Frame> {
    list(case, "frames")
        .iter()
        .map(|frame| hex::decode(frame.as_str().expect("hex")).expect("hex"))
        .collect()
}

fn room_of(value: &Value) -> Room {
    let number = integer(value).and_then(|number| u64::try_from(number).ok());
    number.and_then(Room::new).expect("a room number")
}

fn integers<T: TryFrom<i128>>(value: &Value) -> Vec<T> {
    let items = value.as_array().map_or(&[][..], Vec::as_slice);
    items
        .iter()
        .map(|item| {
            integer(item)
                .and_then(|number| T::try_from(number).ok())
                .expect("an integer")
        })
        .collect()
}

fn nested<T: TryFrom<i128>>(value: &Value) -> Vec<Vec<T>> {
    value
        .as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(integers)
        .collect()
}

fn number<T: TryFrom<i128>>(value: &Value) -> T {
    integer(value)
        .and_then(|number| T::try_from(number).ok())
        .expect("an integer")
}

fn text(value: &Value) -> String {
    value.as_str().expect("text").to_owned()
}

/// A descriptor as the golden file spells it out (handles are left out there; they are zeros).
fn memory_desc(value: &Value) -> Option<MemoryDesc> {
    if value.is_null() {
        return None;
    }
    Some(MemoryDesc {
        engine_key: text(&value["engine_key"]),
        id: number(&value["id"]),
        device_id: number(&value["device_id"]),
        device_bus_id: text(&value["device_bus_id"]),
        data: number(&value["data"]),
        size: number(&value["size"]),
        location: MemoryLocation::from_number(number(&value["loc"])),
        ipc_handle: vec![0; HANDLE_BYTES],
        numa_node: number(&value["numa_node"]),
        ipc_offset: number(&value["ipc_offset"]),
        fabric_handle: vec![0; HANDLE_BYTES],
        vpod_id: number(&value["vpod_id"]),
        vpod_ppod_id: text(&value["vpod_ppod_id"]),
        fabric_offset: number(&value["fabric_offset"]),
        fabric_alloc_size: number(&value["fabric_alloc_size"]),
        extra: Vec::new(),
    })
}

fn descs(value: &Value) -> Vec<MemoryDesc> {
    let items = value.as_array().map_or(&[][..], Vec::as_slice);
    items
        .iter()
        .map(|item| memory_desc(item).expect("a descriptor"))
        .collect()
}

fn register_of(decoded: &Value) -> Register {
    let engine = &decoded["engine_desc"];
    let states = decoded["state"].as_array().map_or(&[][..], Vec::as_slice);
    Register {
        endpoint: Endpoint::new(text(&decoded["endpoint"]), number(&decoded["dst_port"])),
        engine: EngineDesc {
            key: text(&engine["key"]),
            node_id: text(&engine["node_id"]),
            hostname: text(&engine["hostname"]),
            host: text(&engine["host"]),
            port: number(&engine["port"]),
            pid: number(&engine["pid"]),
            extra: Vec::new(),
        },
        kv: descs(&decoded["kv"]),
        aux: descs(&decoded["aux"]),
        states: states
            .iter()
            .map(|component| {
                component
                    .as_array()
                    .expect("a list")
                    .iter()
                    .map(memory_desc)
                    .collect()
            })
            .collect(),
        gpu_id: number(&decoded["gpu_id"]),
        tp_size: number(&decoded["decode_tp_size"]),
        engine_rank: number(&decoded["decode_tp_rank"]),
        kv_item_len: number(&decoded["dst_kv_item_len"]),
        state_item_lens: nested(&decoded["dst_state_item_lens"]),
        state_dims: nested(&decoded["dst_state_dim_per_tensor"]),
        dcp_size: number(&decoded["dst_dcp_size"]),
        dcp_rank: number(&decoded["dst_dcp_rank"]),
        state_layer_ids: nested(&decoded["dst_state_layer_ids"]),
        kv_layer_ids: integers(&decoded["dst_kv_layer_ids"]),
        release: Release::Dcp0522,
    }
}

fn decoded(frames: &[Frame]) -> Result<ControlMessage, String> {
    decode_message(frames)
        .map(|incoming| incoming.message)
        .map_err(|error| error.to_string())
}

/// The fields that SGLang's reader gives; -1 is its word for "no aux row".
fn outcome_of(info: &TransferInfo) -> Value {
    json!({
        "room": info.room.to_string(),
        "endpoint": info.endpoint.host,
        "dst_port": info.endpoint.port,
        "engine_key": info.engine_key,
        "dst_kv_indices": info.kv_indices,
        "dst_aux_index": info.aux_index.map_or(-1, i64::from),
        "dst_state_indices": info.state_indices,
        "required_dst_info_num": info.required_dst_info_num,
        "is_dummy": info.is_dummy(),
        "decode_prefix_len": info.decode_prefix_len,
    })
}

/// Indices are numbers or decimal strings in the file; keys may be fewer than ours.
fn transfer_info_outcome(value: &Value) -> Value {
    json!({
        "room": value["room"],
        "endpoint": value["endpoint"],
        "dst_port": value["dst_port"],
        "engine_key": value["engine_key"],
        "dst_kv_indices": integers::<i64>(&value["dst_kv_indices"]),
        "dst_aux_index": value["dst_aux_index"],
        "dst_state_indices": nested::<i64>(&value["dst_state_indices"]),
        "required_dst_info_num": value["required_dst_info_num"],
        "is_dummy": value["is_dummy"],
        "decode_prefix_len": value["decode_prefix_len"],
    })
}

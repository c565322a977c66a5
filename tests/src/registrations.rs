//! What engines register: route bodies and REGISTER frames of made-up ranks.

use common::ids::Endpoint;
use common::wire::{ControlMessage, EngineDesc, MemoryDesc, MemoryLocation, Register, Release};
use serde_json::{Value, json};

/// The body of `PUT /route` of one TP rank, as SGLang 0.5.23 sends it.
pub fn route_body(tp_size: u32, tp_rank: u32, port: u16, page_size: u32) -> Value {
    json!({
        "attn_tp_size": tp_size, "attn_tp_rank": tp_rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1,
        "system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": port, "page_size": page_size,
        "kv_cache_dtype": "auto", "kv_layout": null, "dsv41_spec_layout": null,
        "load_balance_method": "round_robin", "enable_dsa_cache_layer_split": false,
        "enable_kv_cache_sharding": false, "prefill_http_port": 30000,
        "decode_allocation_policy": "early",
    })
}

/// A body with one field replaced.
pub fn with(body: &Value, name: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[name] = value;
    body
}

/// The path of one rank's address, or of the topology with all -1.
pub fn route_path(dp: i64, cp: i64, tp: i64, pp: i64) -> String {
    format!(
        "/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"
    )
}

/// The path of the topology.
pub fn topology_path() -> String {
    route_path(-1, -1, -1, -1)
}

/// The path of an engine's registration.
pub fn registration_path(key: &str) -> String {
    format!("/v1/registrations/{key}")
}

/// The body of `PUT /v1/registrations/{key}`: two KV tensors, a mamba component of two tensors,
/// one aux buffer.
///
/// # Panics
/// When the codec refuses the message.
pub fn registration_body(key: &str, instance_port: u16) -> Value {
    let memory = |id: u32, size: u64| MemoryDesc {
        engine_key: key.to_owned(),
        id,
        data: 0x7f00_0000_0000 + u64::from(id) * 0x1000_0000,
        size,
        location: MemoryLocation::Host,
        numa_node: 0,
        ..MemoryDesc::default()
    };
    let register = Register {
        endpoint: Endpoint {
            host: "127.0.0.1".to_owned(),
            port: instance_port,
        },
        engine: EngineDesc {
            key: key.to_owned(),
            node_id: "node".to_owned(),
            hostname: "node".to_owned(),
            host: "127.0.0.1".to_owned(),
            port: 1,
            pid: 4242,
            extra: Vec::new(),
        },
        kv: vec![memory(0, 32768), memory(1, 32768)],
        aux: vec![memory(2, 512)],
        states: vec![vec![Some(memory(3, 8192)), Some(memory(4, 4096))]],
        gpu_id: -1,
        tp_size: 1,
        engine_rank: 0,
        kv_item_len: 1024,
        state_item_lens: vec![vec![2048, 1024]],
        state_dims: vec![vec![64, 96]],
        dcp_size: 1,
        dcp_rank: 0,
        state_layer_ids: vec![vec![3, 5]],
        kv_layer_ids: vec![0, 1],
        release: Release::NEWEST,
    };
    let frames = ControlMessage::Register(Box::new(register)).encode(Release::NEWEST);
    let frames = frames.expect("the register can be written");
    json!({
        "role": "decode",
        "instance": format!("127.0.0.1:{instance_port}"),
        "rank": 0,
        "register_frames": frames.iter().map(hex::encode).collect::<Vec<_>>(),
        "component_types": ["mamba"],
    })
}

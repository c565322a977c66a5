//! Rank mappings, addresses and statuses of rooms.

use common::ids::Generation;
use common::room::{DeferredBootstrap, DeferredNotice, advance};
use common::topology::{DecodeSide, PrefillTopology, parse_endpoint, resolve_rank_mapping};
use common::wire::KvPoll;
use common::wire::route::TopologyReply;
use golden::{Tally, list};
use serde_json::{Value, json};

use crate::{FILE, number, or_null, section};

#[test]
fn topology() {
    section("resolve_rank_mapping", |input| {
        let (prefill, decode) = (&input["prefill"], &input["decode"]);
        let flag = |value: &Value| *value == json!(true);
        let topology = PrefillTopology {
            attn_tp_size: number(&prefill["attn_tp_size"]),
            attn_cp_size: number(&prefill["attn_cp_size"]),
            dp_size: 1,
            pp_size: number(&prefill["pp_size"]),
            page_size: None,
            kv_cache_dtype: None,
            follow_bootstrap_room: true,
            enable_dsa_cache_layer_split: flag(&prefill["enable_dsa_cache_layer_split"]),
            enable_kv_cache_sharding: flag(&prefill["enable_kv_cache_sharding"]),
            decode_allocation_policy: "early".to_owned(),
        };
        let side = DecodeSide {
            attn_tp_size: number(&decode["attn_tp_size"]),
            engine_rank: number(&decode["engine_rank"]),
            attn_cp_size: 1,
            pp_size: number(&decode["pp_size"]),
            pp_rank: number(&decode["pp_rank"]),
            is_mla: flag(&decode["is_mla"]),
            all_cp_ranks: flag(&decode["enable_all_cp_ranks_for_transfer"]),
        };
        let value = or_null(resolve_rank_mapping(&topology, &side), |mapping| {
            json!({
                "target_tp_rank": mapping.target_tp_rank,
                "target_tp_ranks": mapping.target_tp_ranks,
                "target_cp_ranks": mapping.target_cp_ranks,
                "target_pp_ranks": mapping.target_pp_ranks,
                "required_dst_info_num": mapping.required_dst_info_num,
                "required_prefill_response_num": mapping.required_prefill_response_num,
            })
        });
        (value, None)
    });
    section("network_address_parse", |input| {
        let text = input.as_str().expect("an address");
        let value = or_null(parse_endpoint(text), |endpoint| {
            json!({
                "host": endpoint.host,
                "port": endpoint.port,
                "tcp": format!("tcp://{endpoint}").replace("[a:b:c]", "a:b:c"),
                "is_ipv6": endpoint.host.parse::<std::net::Ipv6Addr>().is_ok(),
            })
        });
        let port = text.rsplit_once(':').map_or("", |(_, port)| port);
        let signed = port.starts_with('+') && port[1..].bytes().all(|byte| byte.is_ascii_digit());
        (value, signed.then_some("integers are plain ascii digits"))
    });
}

#[test]
fn rooms() {
    section("update_status", |input| {
        let status = |value: &Value| value.as_u64().and_then(KvPoll::from_number);
        let after = advance(
            status(&input["current"]),
            status(&input["new"]).expect("a status"),
        );
        (
            after.map_or(Value::Null, |status| json!(status as u8)),
            None,
        )
    });
    let golden = golden::load(FILE);
    let mut tally = Tally::default();
    for trace in list(&golden, "deferred_bootstrap_traces") {
        let mut room: Option<DeferredBootstrap> = None;
        for (step, entry) in trace
            .as_array()
            .map_or(&[][..], Vec::as_slice)
            .iter()
            .enumerate()
        {
            let owner = Generation(
                entry["owner"]
                    .as_str()
                    .map_or(0, |name| u64::from(name.as_bytes()[0])),
            );
            let said = |notice: Option<DeferredNotice>| {
                notice.map_or(Value::Null, |notice| {
                    json!([[notice.endpoint.host, notice.endpoint.port], notice.failed])
                })
            };
            // Completing and closing need a room that exists; the others begin one.
            let operation = entry["op"].as_str().expect("an operation");
            let ours = match operation {
                "open" => {
                    let opened = room.get_or_insert_default().open(owner);
                    opened.map_or(Value::Null, |failed| json!({ "failed": failed }))
                }
                "register" => {
                    let endpoint = &entry["endpoint"];
                    let endpoint = common::ids::Endpoint::new(
                        endpoint[0].as_str().expect("a host"),
                        number(&endpoint[1]),
                    );
                    said(room.get_or_insert_default().register(endpoint))
                }
                "complete" => said(room.as_mut().and_then(|room| room.complete(owner))),
                "fail" => said(room.get_or_insert_default().fail()),
                "close_ok" => said(room.as_mut().and_then(|room| room.close(owner, true))),
                "close_fail" => said(room.as_mut().and_then(|room| room.close(owner, false))),
                other => panic!("an unknown operation: {other}"),
            };
            tally.compare(
                format!("step {step} of {trace}"),
                &entry["out"],
                &ours,
                None,
            );
        }
    }
    tally.finish("deferred_bootstrap_traces");
}

#[test]
fn a_published_size_is_no_reason_to_allocate() {
    let reply = |tp: u32, cp: u32| -> TopologyReply {
        let reply = serde_json::json!({
            "attn_tp_size": tp, "attn_cp_size": cp, "dp_size": 1, "pp_size": 1,
            "page_size": 64, "kv_cache_dtype": null, "follow_bootstrap_room": false,
        });
        serde_json::from_value(reply).unwrap()
    };
    assert!(PrefillTopology::try_from(&reply(1 << 10, 1 << 10)).is_ok());
    for (tp, cp) in [
        (1 << 10, (1 << 10) + 1),
        (u32::MAX, 1),
        (u32::MAX, u32::MAX),
    ] {
        let error = PrefillTopology::try_from(&reply(tp, cp)).unwrap_err();
        assert!(
            error.to_string().contains("more than 1048576 ranks"),
            "{error}"
        );
    }
}

//! The bootstrap server's JSON comes back.

use common::wire::route::{RankAddress, RegistrationBody, RouteRegistration, TopologyReply};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An opaque value that is not null, which stands for an absent one.
fn opaque() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        any::<i64>().prop_map(serde_json::Value::from),
        "\\PC{0,8}".prop_map(serde_json::Value::from),
    ];
    leaf.prop_recursive(2, 6, 3, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..3).prop_map(serde_json::Value::from),
            vec(("[a-z]{1,4}", inner), 0..3)
                .prop_map(|entries| serde_json::Value::Object(entries.into_iter().collect())),
        ]
    })
}

fn registration() -> impl Strategy<Value = RouteRegistration> {
    let texts = ("\\PC{0,12}", "\\PC{0,12}", "\\PC{0,12}", "\\PC{0,12}");
    let optional = (
        option::of("\\PC{0,8}"),
        option::of(opaque()),
        option::of(any::<u16>()),
    );
    let flags = any::<[bool; 2]>();
    (any::<[u32; 11]>(), any::<u16>(), texts, optional, flags).prop_map(
        |(sizes, rank_port, texts, optional, flags)| RouteRegistration {
            attn_tp_size: sizes[0],
            attn_tp_rank: sizes[1],
            attn_cp_size: sizes[2],
            attn_cp_rank: sizes[3],
            attn_dp_size: sizes[4],
            attn_dp_rank: sizes[5],
            pp_size: sizes[6],
            pp_rank: sizes[7],
            system_dp_size: sizes[8],
            system_dp_rank: sizes[9],
            rank_ip: texts.0,
            rank_port,
            page_size: sizes[10],
            kv_cache_dtype: texts.1,
            kv_layout: optional.0,
            dsv41_spec_layout: optional.1,
            load_balance_method: texts.2,
            enable_dsa_cache_layer_split: flags[0],
            enable_kv_cache_sharding: flags[1],
            prefill_http_port: optional.2,
            decode_allocation_policy: texts.3,
        },
    )
}

fn topology() -> impl Strategy<Value = TopologyReply> {
    let optional = (
        option::of(any::<u32>()),
        option::of("\\PC{0,8}"),
        option::of(opaque()),
        option::of("\\PC{0,8}"),
        option::of(any::<u16>()),
    );
    (
        any::<[u32; 4]>(),
        optional,
        any::<[bool; 3]>(),
        "\\PC{0,12}",
    )
        .prop_map(
            |(sizes, optional, flags, decode_allocation_policy)| TopologyReply {
                attn_tp_size: sizes[0],
                attn_cp_size: sizes[1],
                dp_size: sizes[2],
                pp_size: sizes[3],
                page_size: optional.0,
                kv_cache_dtype: optional.1,
                follow_bootstrap_room: flags[0],
                enable_dsa_cache_layer_split: flags[1],
                dsv41_spec_layout: optional.2,
                kv_layout: optional.3,
                decode_allocation_policy,
                enable_kv_cache_sharding: flags[2],
                prefill_http_port: optional.4,
            },
        )
}

fn comes_back<T>(body: &T) -> Result<(), TestCaseError>
where
    T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let text = serde_json::to_string(body).expect("a body is JSON");
    let again: T =
        serde_json::from_str(&text).map_err(|error| TestCaseError::fail(error.to_string()))?;
    prop_assert_eq!(&again, body);
    Ok(())
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn every_body_comes_back(
        registration in registration(),
        topology in topology(),
        (rank_ip, rank_port) in ("\\PC{0,12}", any::<u16>()),
        names in any::<[String; 2]>(),
        rank: u32,
        lists in (vec("[0-9a-f]{0,8}", 0..4), vec("[a-z_]{1,8}", 0..4)),
    ) {
        comes_back(&registration)?;
        comes_back(&topology)?;
        comes_back(&RankAddress { rank_ip, rank_port })?;
        let [role, instance] = names;
        let (register_frames, component_types) = lists;
        comes_back(&RegistrationBody { role, instance, rank, register_frames, component_types })?;
    }
}

//! What a bootstrap server answers to a rank that asks for its peers.

#![no_main]

use std::collections::BTreeMap;

use common::topology::{DecodeSide, PrefillTopology, parse_endpoint, resolve_rank_mapping};
use common::wire::route::{RankAddress, RegistrationBody, TopologyReply};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = serde_json::from_slice::<BTreeMap<String, u32>>(bytes);
    let _ = serde_json::from_slice::<RegistrationBody>(bytes);
    if let Ok(address) = serde_json::from_slice::<RankAddress>(bytes) {
        let _ = parse_endpoint(&format!("{}:{}", address.rank_ip, address.rank_port));
    }
    if let Ok(reply) = serde_json::from_slice::<TopologyReply>(bytes)
        && let Ok(topology) = PrefillTopology::try_from(&reply)
    {
        for (attn_tp_size, is_mla) in [(1, true), (4, false)] {
            let decode = DecodeSide {
                attn_tp_size,
                engine_rank: 3,
                attn_cp_size: 1,
                pp_size: 1,
                pp_rank: 0,
                is_mla,
                all_cp_ranks: true,
            };
            if let Ok(mapping) = resolve_rank_mapping(&topology, &decode) {
                let targets = &mapping.target_tp_ranks;
                assert!(!targets.is_empty() && targets.iter().all(|rank| *rank < topology.attn_tp_size));
            }
        }
    }
});

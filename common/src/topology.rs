//! A rank's place in the parallel groups, and which prefill ranks feed a decode rank.

use std::net::Ipv6Addr;

use crate::ids::{Endpoint, UniqueRank};
use crate::plan::PlanError;
use crate::wire::route::TopologyReply;
use crate::wire::unique_rank;

/// Ranks of one engine at most; the bootstrap server takes no more.
pub const MAX_RANKS: u64 = 1 << 20;

/// Sizes of the parallel groups and this rank's number in each; sizes are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ParallelConfig {
    pub tp_size: u32,
    pub tp_rank: u32,
    pub cp_size: u32,
    pub cp_rank: u32,
    pub dp_size: u32,
    pub dp_rank: u32,
    pub pp_size: u32,
    pub pp_rank: u32,
    pub dcp_size: u32,
    pub dcp_rank: u32,
}

impl Default for ParallelConfig {
    /// One rank alone.
    fn default() -> Self {
        Self {
            tp_size: 1,
            tp_rank: 0,
            cp_size: 1,
            cp_rank: 0,
            dp_size: 1,
            dp_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            dcp_size: 1,
            dcp_rank: 0,
        }
    }
}

impl ParallelConfig {
    /// Checks that each rank lies within its size.
    ///
    /// # Errors
    /// [`PlanError::Topology`] that names the group.
    pub fn validate(&self) -> Result<(), PlanError> {
        let groups = [
            ("tp", self.tp_rank, self.tp_size),
            ("cp", self.cp_rank, self.cp_size),
            ("dp", self.dp_rank, self.dp_size),
            ("pp", self.pp_rank, self.pp_size),
            ("dcp", self.dcp_rank, self.dcp_size),
        ];
        match groups.into_iter().find(|(_, rank, size)| rank >= size) {
            Some((group, rank, size)) => Err(PlanError::Topology {
                detail: format!("{group} rank {rank} is not within {group} size {size}"),
            }),
            None => Ok(()),
        }
    }

    /// The prefill's rank number across its TP, PP and CP groups.
    ///
    /// # Errors
    /// [`PlanError::Overflow`] when it does not fit 32 bits.
    pub fn unique_rank(&self) -> Result<UniqueRank, PlanError> {
        unique_rank(
            self.tp_rank,
            self.pp_rank,
            self.pp_size,
            self.cp_rank,
            self.cp_size,
        )
        .ok_or(PlanError::Overflow {
            what: "prefill unique rank",
        })
    }
}

/// What a decode learns of a prefill engine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PrefillTopology {
    pub attn_tp_size: u32,
    pub attn_cp_size: u32,
    pub dp_size: u32,
    pub pp_size: u32,
    pub page_size: Option<u32>,
    pub kv_cache_dtype: Option<String>,
    pub follow_bootstrap_room: bool,
    pub enable_dsa_cache_layer_split: bool,
    pub enable_kv_cache_sharding: bool,
    pub decode_allocation_policy: String,
}

impl TryFrom<&TopologyReply> for PrefillTopology {
    type Error = PlanError;

    /// # Errors
    /// [`PlanError::Topology`] when a size is 0, or there are more than [`MAX_RANKS`].
    fn try_from(reply: &TopologyReply) -> Result<Self, PlanError> {
        let sizes = [
            reply.attn_tp_size,
            reply.attn_cp_size,
            reply.dp_size,
            reply.pp_size,
        ];
        if sizes.contains(&0) {
            return Err(PlanError::Topology {
                detail: format!("the prefill published a size of 0 (tp, cp, dp, pp: {sizes:?})"),
            });
        }
        let mut factors = sizes.iter().map(|size| u64::from(*size));
        let ranks = factors.try_fold(1, u64::checked_mul);
        if ranks.is_none_or(|ranks| ranks > MAX_RANKS) {
            return Err(PlanError::Topology {
                detail: format!(
                    "the prefill published more than {MAX_RANKS} ranks (tp, cp, dp, pp: {sizes:?})"
                ),
            });
        }
        Ok(Self {
            attn_tp_size: reply.attn_tp_size,
            attn_cp_size: reply.attn_cp_size,
            dp_size: reply.dp_size,
            pp_size: reply.pp_size,
            page_size: reply.page_size,
            kv_cache_dtype: reply.kv_cache_dtype.clone(),
            follow_bootstrap_room: reply.follow_bootstrap_room,
            enable_dsa_cache_layer_split: reply.enable_dsa_cache_layer_split,
            enable_kv_cache_sharding: reply.enable_kv_cache_sharding,
            decode_allocation_policy: reply.decode_allocation_policy.clone(),
        })
    }
}

/// The decode side of a rank mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeSide {
    /// Attention TP size.
    pub attn_tp_size: u32,
    /// Engine rank, which counts over data-parallel groups too.
    pub engine_rank: u32,
    /// Context parallel size; must be 1.
    pub attn_cp_size: u32,
    /// Pipeline size: 1, or the prefill's.
    pub pp_size: u32,
    /// Pipeline rank.
    pub pp_rank: u32,
    /// Whether KV is latent and the same on every TP rank (`is_mla`, not the hybrid).
    pub is_mla: bool,
    /// Whether all CP ranks of the prefill send their share.
    pub all_cp_ranks: bool,
}

/// Which prefill ranks feed a decode rank, and how many answers each side waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMapping {
    /// The TP rank that is real for MLA, the others being dummies; `None`: all are real.
    pub target_tp_rank: Option<u32>,
    /// TP ranks to register with and to announce rooms to.
    pub target_tp_ranks: Vec<u32>,
    /// CP ranks likewise.
    pub target_cp_ranks: Vec<u32>,
    /// PP ranks likewise.
    pub target_pp_ranks: Vec<u32>,
    /// Decode ranks that announce each room to one prefill rank.
    pub required_dst_info_num: u32,
    /// Distinct prefill ranks whose Success makes a room's Success.
    pub required_prefill_response_num: u32,
}

impl RankMapping {
    /// Whether a target has nothing to deliver (MLA: every TP rank but the first).
    pub fn is_dummy(&self, is_mla: bool, tp_rank: u32) -> bool {
        is_mla && self.target_tp_rank.is_some_and(|real| real != tp_rank)
    }
}

/// SGLang's `resolve_rank_mapping`.
///
/// # Errors
/// [`PlanError::Topology`] with both sides' sizes when they do not fit.
pub fn resolve_rank_mapping(
    prefill: &PrefillTopology,
    decode: &DecodeSide,
) -> Result<RankMapping, PlanError> {
    let refused = |detail: String| Err(PlanError::Topology { detail });
    let (prefill_tp, decode_tp) = (prefill.attn_tp_size, decode.attn_tp_size);
    if prefill_tp == 0 || decode_tp == 0 {
        return refused(format!(
            "tp sizes must be positive: prefill {prefill_tp}, decode {decode_tp}"
        ));
    }
    if !prefill_tp
        .max(decode_tp)
        .is_multiple_of(prefill_tp.min(decode_tp))
    {
        return refused(format!(
            "one tp size must divide the other: prefill {prefill_tp}, decode {decode_tp}"
        ));
    }
    if decode.attn_cp_size != 1 {
        return refused(format!(
            "the decode's cp size must be 1, it is {}",
            decode.attn_cp_size
        ));
    }
    if decode.pp_size != prefill.pp_size && decode.pp_size != 1 {
        return refused(format!(
            "the decode's pp size must be 1 or the prefill's {}, it is {}",
            prefill.pp_size, decode.pp_size
        ));
    }
    let rank = decode.engine_rank % decode_tp;
    let sharded = decode.is_mla && prefill.enable_kv_cache_sharding && prefill.attn_cp_size == 1;
    let (target_tp_rank, target_tp_ranks, required_dst_info_num, mut responses) = if sharded {
        if prefill_tp != decode_tp {
            return refused(format!(
                "sharded mla kv needs equal tp sizes: prefill {prefill_tp}, decode {decode_tp}"
            ));
        }
        (None, (0..prefill_tp).collect(), decode_tp, prefill_tp)
    } else if decode_tp >= prefill_tp {
        let readers = decode_tp / prefill_tp;
        let target = rank / readers;
        (Some(target), vec![target], readers, 1)
    } else {
        let writers = prefill_tp / decode_tp;
        let first = rank * writers;
        let responses = if decode.is_mla { 1 } else { writers };
        (
            Some(first),
            (first..first + writers).collect(),
            1,
            responses,
        )
    };
    let all_cp_ranks = decode.all_cp_ranks
        || prefill.enable_dsa_cache_layer_split
        || prefill.enable_kv_cache_sharding;
    let target_cp_ranks: Vec<u32> = if all_cp_ranks {
        (0..prefill.attn_cp_size).collect()
    } else {
        vec![0]
    };
    let target_pp_ranks: Vec<u32> = if decode.pp_size == prefill.pp_size {
        vec![decode.pp_rank]
    } else {
        (0..prefill.pp_size).collect()
    };
    responses = responses
        .checked_mul(target_cp_ranks.len() as u32)
        .and_then(|responses| responses.checked_mul(target_pp_ranks.len() as u32))
        .ok_or(PlanError::Overflow {
            what: "number of expected responses",
        })?;
    Ok(RankMapping {
        target_tp_rank,
        target_tp_ranks,
        target_cp_ranks,
        target_pp_ranks,
        required_dst_info_num,
        required_prefill_response_num: responses,
    })
}

/// Reads `host:port` or `[ipv6]:port`.
///
/// # Errors
/// [`PlanError::Argument`] that says what is missing.
pub fn parse_endpoint(address: &str) -> Result<Endpoint, PlanError> {
    let refused = |detail: &str| PlanError::Argument {
        what: "address",
        detail: format!("{address:?}: {detail}, expected host:port or [ipv6]:port"),
    };
    let (host, port) = if let Some(bracketed) = address.strip_prefix('[') {
        let (host, rest) = bracketed
            .split_once(']')
            .ok_or_else(|| refused("the bracket is not closed"))?;
        if host.parse::<Ipv6Addr>().is_err() {
            return Err(refused("no ipv6 address stands in the brackets"));
        }
        (
            host,
            rest.strip_prefix(':')
                .ok_or_else(|| refused("the port is missing"))?,
        )
    } else {
        let (host, port) = address
            .rsplit_once(':')
            .ok_or_else(|| refused("the port is missing"))?;
        if address.parse::<Ipv6Addr>().is_ok() {
            return Err(refused(
                "a bare ipv6 address is ambiguous, put it in brackets",
            ));
        }
        (host, port)
    };
    if host.is_empty() {
        return Err(refused("the host is missing"));
    }
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port
        .parse()
        .ok()
        .filter(|_| digits)
        .ok_or_else(|| refused("the port is no port"))?;
    Ok(Endpoint::new(host, port))
}

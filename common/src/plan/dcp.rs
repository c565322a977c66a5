//! Decode context parallelism: MLA pages re-split by token over the decode's context ranks.
//!
//! Token `t` of the request (the decode's prefix counted) lives on context rank `t % size`. The
//! draft model's entries are not split: their destination pages hold `size` times as many tokens.

use crate::plan::PlanError;

/// Token indices, pairwise; a token index counts from the first token of page 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DcpTokens {
    /// Source tokens of the target model's entries.
    pub target_src: Vec<i64>,
    /// Their destinations.
    pub target_dst: Vec<i64>,
    /// Source tokens of the draft model's entries.
    pub draft_src: Vec<i64>,
    /// Their destinations.
    pub draft_dst: Vec<i64>,
}

/// Tokens of one chunk at most: each is listed, so a number that makes no sense would take all
/// memory. Chunks of real prompts are far below.
const MAX_TOKENS: u64 = 1 << 22;

/// One chunk that is to be re-split.
#[derive(Clone, Copy, Debug)]
pub struct DcpChunk<'a> {
    /// Source pages of the chunk.
    pub src_pages: &'a [i32],
    /// All destination pages of the request.
    pub dst_pages: &'a [i32],
    /// Tokens of a source page.
    pub page_size: u64,
    /// Decode context parallel size.
    pub dcp_size: u64,
    /// Decode context parallel rank.
    pub dcp_rank: u64,
    /// Pages of the request before the chunk.
    pub first_page: u64,
    /// Tokens that the decode already holds.
    pub decode_prefix_len: u64,
    /// Tokens in the chunk; all tokens of its pages if absent.
    pub num_tokens: Option<u64>,
}

/// SGLang's `build_dcp_token_transfer_plan`.
///
/// # Errors
/// [`PlanError::Argument`] when the prefix is not a whole number of virtual pages, a token falls
/// outside the page lists, or there are more than 4,194,304 tokens.
pub fn dcp_tokens(chunk: &DcpChunk<'_>) -> Result<DcpTokens, PlanError> {
    let refused = |detail: String| PlanError::Argument {
        what: "dcp re-split",
        detail,
    };
    let virtual_page = chunk
        .page_size
        .checked_mul(chunk.dcp_size)
        .filter(|size| *size > 0);
    let virtual_page =
        virtual_page.ok_or_else(|| refused("page and dcp size must be positive".into()))?;
    if chunk.dcp_rank >= chunk.dcp_size {
        return Err(refused(format!(
            "context rank {} is not within size {}",
            chunk.dcp_rank, chunk.dcp_size
        )));
    }
    if !chunk.decode_prefix_len.is_multiple_of(virtual_page) {
        return Err(refused(format!(
            "the decode prefix of {} tokens is no multiple of the virtual page of {virtual_page}",
            chunk.decode_prefix_len
        )));
    }
    let overflow = || PlanError::Overflow {
        what: "token of a dcp re-split",
    };
    let num_tokens = match chunk.num_tokens {
        Some(num_tokens) => num_tokens,
        None => (chunk.src_pages.len() as u64)
            .checked_mul(chunk.page_size)
            .ok_or_else(overflow)?,
    };
    if num_tokens > MAX_TOKENS {
        return Err(refused(format!(
            "a chunk of {num_tokens} tokens, at most {MAX_TOKENS} are possible"
        )));
    }
    let chunk_start = chunk
        .first_page
        .checked_mul(chunk.page_size)
        .ok_or_else(overflow)?;
    let absolute_start = chunk
        .decode_prefix_len
        .checked_add(chunk_start)
        .ok_or_else(overflow)?;
    // No token below lies at or behind this sum, nor does one context rank's step beyond it.
    chunk_start
        .checked_add(num_tokens)
        .and_then(|end| end.checked_add(chunk.dcp_size))
        .ok_or_else(overflow)?;
    let token = |pages: &[i32], page_size: u64, local: u64, side: &str| {
        let page = usize::try_from(local / page_size)
            .ok()
            .and_then(|page| pages.get(page));
        let page = page.ok_or_else(|| {
            refused(format!(
                "token {local} leaves the {} pages of the {side}",
                pages.len()
            ))
        })?;
        let start = i64::from(*page).checked_mul(i64::try_from(page_size).map_err(|_| overflow())?);
        start
            .and_then(|start| start.checked_add_unsigned(local % page_size))
            .ok_or_else(overflow)
    };
    let mut tokens = DcpTokens::default();
    let behind = absolute_start % chunk.dcp_size;
    let first_own = if chunk.dcp_rank >= behind {
        chunk.dcp_rank - behind
    } else {
        chunk.dcp_size - behind + chunk.dcp_rank
    };
    let mut offset = first_own;
    while offset < num_tokens {
        let local = (chunk_start + offset) / chunk.dcp_size;
        tokens
            .target_src
            .push(token(chunk.src_pages, chunk.page_size, offset, "prefill")?);
        tokens
            .target_dst
            .push(token(chunk.dst_pages, chunk.page_size, local, "decode")?);
        offset += chunk.dcp_size;
    }
    for offset in 0..num_tokens {
        tokens
            .draft_src
            .push(token(chunk.src_pages, chunk.page_size, offset, "prefill")?);
        tokens.draft_dst.push(token(
            chunk.dst_pages,
            virtual_page,
            chunk_start + offset,
            "decode",
        )?);
    }
    Ok(tokens)
}

/// Whether pages have to be re-split between these two ranks (SGLang's `requires_dcp_relayout`).
///
/// # Errors
/// [`PlanError::Topology`] when the two sides' context parallel groups do not fit.
pub fn needs_resplit(
    prefill: (u32, u32),
    decode: (u32, u32),
    latent_kv: bool,
) -> Result<bool, PlanError> {
    let ((src_size, src_rank), (dst_size, dst_rank)) = (prefill, decode);
    if src_size == dst_size {
        if src_rank != dst_rank {
            return Err(PlanError::Topology {
                detail: format!("dcp ranks must match: prefill {src_rank}, decode {dst_rank}"),
            });
        }
        return Ok(false);
    }
    if src_size == 1 && dst_size > 1 && latent_kv {
        if dst_rank >= dst_size {
            return Err(PlanError::Topology {
                detail: format!("dcp rank {dst_rank} of the decode is not within size {dst_size}"),
            });
        }
        return Ok(true);
    }
    Err(PlanError::Topology {
        detail: format!(
            "dcp {src_size} at the prefill to {dst_size} at the decode is not supported"
        ),
    })
}

/// Bytes of one token of each entry (SGLang's `prepare_dcp_token_item_lens`); `None` stands for a
/// destination length that the wire does not carry.
///
/// # Errors
/// [`PlanError::Geometry`] when the two sides' entries differ.
pub fn token_lens(
    src_item_lens: &[u64],
    dst_item_lens: &[Option<u64>],
    page_size: u64,
    dcp_size: u64,
    num_draft: usize,
) -> Result<Vec<u64>, PlanError> {
    let geometry = |detail: String| PlanError::Geometry {
        component: crate::metrics::COMPONENT_KV,
        detail,
    };
    if src_item_lens.len() != dst_item_lens.len() {
        return Err(geometry(format!(
            "dcp needs one decode entry for each prefill entry: prefill {}, decode {}",
            src_item_lens.len(),
            dst_item_lens.len()
        )));
    }
    let first_draft = src_item_lens.len().saturating_sub(num_draft);
    let pairs = src_item_lens.iter().zip(dst_item_lens).enumerate();
    pairs
        .map(|(entry, (src_item_len, dst_item_len))| {
            let token_len = src_item_len.checked_div(page_size);
            let token_len = token_len.ok_or_else(|| geometry("page size 0".to_owned()))?;
            let scale = page_size * if entry >= first_draft { dcp_size } else { 1 };
            match dst_item_len {
                Some(dst_item_len) if dst_item_len.checked_div(scale) != Some(token_len) => {
                    Err(geometry(format!(
                        "entry {entry} has {token_len} bytes a token at the prefill, {dst_item_len} \
                         bytes for {scale} tokens at the decode"
                    )))
                }
                _ => Ok(token_len),
            }
        })
        .collect()
}

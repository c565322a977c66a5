//! From the buffers that an engine describes to a rank's layout, with every check.

use common::ids::{ByteLen, ByteOffset};
use common::schema::{AttentionKind, KvLayout, RankLayout, StateKind, StateLayout, TensorLayout};
use io_engine::{AnyMemory, Engine, Region};

use crate::api::{AttachRequest, AttentionSpec, LayoutSpec, StateSpec, TensorSpec};
use crate::rank::RankBuffers;

/// Tensors of one rank at most; the largest models have some hundreds.
const MAX_TENSORS: usize = 16_384;
/// State components of one rank at most.
const MAX_STATES: usize = 64;

/// What is wrong with a described layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {detail}")]
pub struct LayoutError {
    what: String,
    detail: String,
}

fn refused(what: impl Into<String>, detail: impl Into<String>) -> LayoutError {
    LayoutError {
        what: what.into(),
        detail: detail.into(),
    }
}

/// Checks a described layout against its pools and makes the domain's.
///
/// # Errors
/// [`LayoutError`] that names the tensor and what is wrong with it.
pub fn place_layout(spec: &LayoutSpec, pools: &[u64]) -> Result<RankLayout, LayoutError> {
    let states = spec.states.iter().flat_map(|state| &state.tensors);
    let count = spec.kv.tensors.len() + spec.aux.len() + states.clone().count();
    if count > MAX_TENSORS || spec.states.len() > MAX_STATES {
        let counted = format!("{count} tensors and {} components", spec.states.len());
        return Err(refused(
            "layout",
            format!("{counted}, at most {MAX_TENSORS} and {MAX_STATES}"),
        ));
    }
    if spec.page_size == 0 {
        return Err(refused("page_size", "it is 0"));
    }
    let mut placed: Vec<(usize, u64, u64, String)> = Vec::with_capacity(count);
    let mut place = |what: String, tensor: &TensorSpec| {
        let layout = check_tensor(&what, tensor, pools)?;
        if layout.bytes.get() > 0 {
            placed.push((
                tensor.pool,
                tensor.offset,
                tensor.offset + tensor.bytes,
                what,
            ));
        }
        Ok::<_, LayoutError>(layout)
    };
    let mut list = |name: &str, tensors: &[TensorSpec]| {
        let tensors = tensors.iter().enumerate();
        tensors
            .map(|(at, tensor)| place(format!("{name} tensor {at}"), tensor))
            .collect()
    };
    let kv = KvLayout {
        tensors: list("kv", &spec.kv.tensors)?,
        layer_ids: spec.kv.layer_ids.clone(),
        start_layer: spec.kv.start_layer,
        num_draft_entries: spec.kv.num_draft_entries,
        attention: match spec.kv.attention {
            AttentionSpec::Mha => AttentionKind::Mha,
            AttentionSpec::Mla => AttentionKind::Mla,
            AttentionSpec::HybridMla => AttentionKind::HybridMla,
        },
        head_num: spec.kv.head_num,
        total_head_num: spec.kv.total_head_num,
    };
    parallel("kv layer_ids", kv.layer_ids.len(), kv.tensors.len())?;
    if kv.attention == AttentionKind::Mha && !kv.tensors.len().is_multiple_of(2) {
        let detail = format!(
            "{} tensors; k and v lists need an even number",
            kv.tensors.len()
        );
        return Err(refused("kv", detail));
    }
    let aux = list("aux", &spec.aux)?;
    let mut states = Vec::with_capacity(spec.states.len());
    for (at, state) in spec.states.iter().enumerate() {
        states.push(place_state(at, state, &mut list)?);
    }
    check_overlaps(placed)?;
    Ok(RankLayout {
        page_size: spec.page_size,
        kv,
        aux,
        states,
    })
}

/// Registers every tensor of a placed layout under its component's label.
///
/// # Errors
/// When a tensor cannot be registered; the engine keeps those before it.
pub fn register_buffers(
    engine: &Engine,
    spec: &LayoutSpec,
    layout: RankLayout,
    pools: &[AnyMemory],
) -> Result<(RankBuffers, Vec<Region>), String> {
    let mut regions = Vec::new();
    let mut list = |label: &str, specs: &[TensorSpec], tensors: &[TensorLayout]| {
        let pairs = specs.iter().zip(tensors);
        let registered = pairs.map(|(spec, tensor)| {
            let Some(pool) = pools.get(spec.pool).filter(|_| tensor.bytes.get() > 0) else {
                return Ok(None);
            };
            let offset = ByteOffset(spec.offset);
            let region = engine.register(pool.clone(), offset, tensor.bytes, label);
            let region = region.map_err(|error| format!("{label}: {error}"))?;
            regions.push(region.clone());
            Ok(Some(region))
        });
        registered.collect::<Result<Vec<Option<Region>>, String>>()
    };
    let kv = list(
        common::metrics::COMPONENT_KV,
        &spec.kv.tensors,
        &layout.kv.tensors,
    )?;
    let aux = list(common::metrics::COMPONENT_AUX, &spec.aux, &layout.aux)?;
    let states = spec.states.iter().zip(&layout.states);
    let states = states.map(|(spec, state)| list(state.kind.name(), &spec.tensors, &state.tensors));
    let states = states.collect::<Result<Vec<_>, _>>()?;
    Ok((
        RankBuffers {
            layout,
            kv,
            aux,
            states,
        },
        regions,
    ))
}

/// A key for a rank's io engine, in the shape of SGLang's and different for each call.
pub fn engine_key(request: &AttachRequest, host: &str) -> String {
    let role = request.role.name();
    let parallel = &request.parallel;
    let suffix = getrandom::u32().unwrap_or_default();
    format!(
        "io-{role}-dp{}-tp{}-pid{}-{host}-{suffix:08x}",
        parallel.attn_dp_rank,
        parallel.attn_tp_rank,
        std::process::id(),
    )
}

fn place_state(
    at: usize,
    state: &StateSpec,
    list: &mut impl FnMut(&str, &[TensorSpec]) -> Result<Vec<TensorLayout>, LayoutError>,
) -> Result<StateLayout, LayoutError> {
    let kind = StateKind::from_name(&state.kind).ok_or_else(|| {
        let known = StateKind::ALL.map(StateKind::name).join(", ");
        refused(
            format!("states[{at}]"),
            format!("type {:?} is unknown; known: {known}", state.kind),
        )
    })?;
    let tensors = list(kind.name(), &state.tensors)?;
    let count = tensors.len();
    parallel(&format!("{} dims", state.kind), state.dims.len(), count)?;
    parallel(
        &format!("{} outer_counts", state.kind),
        state.outer_counts.len(),
        count,
    )?;
    parallel(
        &format!("{} conv_shard_groups", state.kind),
        state.conv_shard_groups.len(),
        count,
    )?;
    parallel(
        &format!("{} layer_ids", state.kind),
        state.layer_ids.len(),
        count,
    )?;
    Ok(StateLayout {
        kind,
        tensors,
        dims: state.dims.clone(),
        outer_counts: state.outer_counts.clone(),
        conv_shard_groups: state.conv_shard_groups.clone(),
        layer_ids: state.layer_ids.clone(),
    })
}

/// A list beside the tensors is empty or has one element for each.
fn parallel(what: &str, length: usize, tensors: usize) -> Result<(), LayoutError> {
    if length == 0 || length == tensors {
        return Ok(());
    }
    Err(refused(
        what,
        format!("{length} elements for {tensors} tensors"),
    ))
}

fn check_tensor(
    what: &str,
    tensor: &TensorSpec,
    pools: &[u64],
) -> Result<TensorLayout, LayoutError> {
    let layout = TensorLayout {
        bytes: ByteLen(tensor.bytes),
        item_len: ByteLen(tensor.item_len),
    };
    if tensor.bytes > 0 && tensor.item_len == 0 {
        let detail = format!("{} bytes with items of 0 bytes", tensor.bytes);
        return Err(refused(what, detail));
    }
    if tensor.bytes == 0 {
        return Ok(TensorLayout {
            bytes: ByteLen(0),
            item_len: layout.item_len,
        });
    }
    let pool = pools.get(tensor.pool).ok_or_else(|| {
        refused(
            what,
            format!(
                "pool {} does not exist, there are {}",
                tensor.pool,
                pools.len()
            ),
        )
    })?;
    let end = tensor
        .offset
        .checked_add(tensor.bytes)
        .filter(|end| end <= pool);
    if end.is_none() {
        return Err(refused(
            what,
            format!(
                "{} bytes at offset {} leave pool {} of {pool} bytes",
                tensor.bytes, tensor.offset, tensor.pool
            ),
        ));
    }
    if !tensor.bytes.is_multiple_of(tensor.item_len) {
        let detail = format!(
            "{} bytes are no whole number of items of {}",
            tensor.bytes, tensor.item_len
        );
        return Err(refused(what, detail));
    }
    Ok(layout)
}

/// Two tensors over the same bytes would be written twice.
fn check_overlaps(mut placed: Vec<(usize, u64, u64, String)>) -> Result<(), LayoutError> {
    placed.sort();
    for pair in placed.windows(2) {
        let [one, other] = pair else { continue };
        if one.0 == other.0 && other.1 < one.2 {
            let detail = format!("it overlaps {} in pool {}", one.3, one.0);
            return Err(refused(other.3.clone(), detail));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::KvSpec;

    fn tensor(offset: u64, bytes: u64) -> TensorSpec {
        TensorSpec {
            pool: 0,
            offset,
            bytes,
            item_len: 64,
        }
    }

    fn spec() -> LayoutSpec {
        LayoutSpec {
            page_size: 16,
            kv: KvSpec {
                tensors: vec![tensor(0, 640), tensor(640, 640)],
                layer_ids: vec![],
                start_layer: 0,
                num_draft_entries: 0,
                attention: AttentionSpec::Mha,
                head_num: 1,
                total_head_num: 1,
            },
            aux: vec![tensor(1280, 64)],
            states: vec![StateSpec {
                kind: "mamba".to_owned(),
                tensors: vec![tensor(1344, 64)],
                dims: vec![4],
                outer_counts: vec![],
                conv_shard_groups: vec![],
                layer_ids: vec![],
            }],
        }
    }

    #[test]
    fn a_good_layout_is_placed() {
        let layout = place_layout(&spec(), &[1408]).unwrap();
        assert_eq!(layout.states[0].kind, StateKind::Mamba);
        assert_eq!(layout.kv.tensors.len(), 2);
    }

    #[test]
    fn every_mistake_is_named() {
        type Change = fn(&mut LayoutSpec);
        let cases: [(Change, &str); 8] = [
            (|spec| spec.page_size = 0, "page_size"),
            (
                |spec| spec.kv.tensors[1].offset = 600,
                "overlaps kv tensor 0",
            ),
            (|spec| spec.aux[0].offset = u64::MAX, "leave pool 0"),
            (|spec| spec.aux[0].pool = 3, "pool 3 does not exist"),
            (|spec| spec.aux[0].bytes = 63, "no whole number of items"),
            (
                |spec| spec.states[0].kind = "wamba".to_owned(),
                "type \"wamba\" is unknown",
            ),
            (
                |spec| spec.states[0].dims = vec![1, 2],
                "2 elements for 1 tensors",
            ),
            (|spec| spec.kv.tensors.truncate(1), "even number"),
        ];
        for (change, expected) in cases {
            let mut changed = spec();
            change(&mut changed);
            let error = place_layout(&changed, &[1408]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} names {expected:?}");
        }
    }
}

//! Which source tensor goes to which destination tensor.

use std::collections::{HashMap, VecDeque};

use crate::plan::PlanError;

/// A pair of tensor positions: source, destination.
pub type EntryPair = (usize, usize);

/// SGLang's `build_transfer_entry_pairs`: by layer id where both sides give ids (ids may repeat,
/// so occurrences pair in order), else by position.
///
/// # Errors
/// [`PlanError::Layers`] when ids are given on one side only and position may not stand in for
/// them, when a list has the wrong length, when a layer is missing, or when positions do not pair.
pub fn entry_pairs(
    component: &'static str,
    src_layer_ids: &[u32],
    dst_layer_ids: &[u32],
    src_count: usize,
    dst_count: usize,
    allow_positional_fallback: bool,
) -> Result<Vec<EntryPair>, PlanError> {
    let refused = |detail: String| PlanError::Layers { component, detail };
    if src_count == 0 {
        return Ok(Vec::new());
    }
    let one_sided = src_layer_ids.is_empty() != dst_layer_ids.is_empty();
    if one_sided && !allow_positional_fallback {
        return Err(refused("given by one side only".to_owned()));
    }
    if !one_sided && !src_layer_ids.is_empty() {
        if src_layer_ids.len() != src_count || dst_layer_ids.len() != dst_count {
            return Err(refused(format!(
                "prefill gives {} ids for {src_count} tensors, decode {} for {dst_count}",
                src_layer_ids.len(),
                dst_layer_ids.len()
            )));
        }
        let mut positions: HashMap<u32, VecDeque<usize>> = HashMap::new();
        for (position, layer) in dst_layer_ids.iter().enumerate() {
            positions.entry(*layer).or_default().push_back(position);
        }
        return src_layer_ids
            .iter()
            .enumerate()
            .map(|(src, layer)| {
                let dst = positions.get_mut(layer).and_then(VecDeque::pop_front);
                let dst = dst.ok_or_else(|| {
                    refused(format!("the decode has no tensor left for layer {layer}"))
                })?;
                Ok((src, dst))
            })
            .collect();
    }
    if dst_count < src_count || (src_count != dst_count && !allow_positional_fallback) {
        return Err(refused(format!(
            "{src_count} tensors at the prefill and {dst_count} at the decode pair by layer id only"
        )));
    }
    Ok((0..src_count)
        .map(|position| (position, position))
        .collect())
}

/// Pairs of K and V tensors (MHA): the first half of a list is K, the second half V.
/// Equal lengths pair by position, ids by id; without ids `[start_layer, start_layer + n)` of each
/// half, V counted from the destination's number of layers, or from its target model's where it
/// has `draft_layers` more than a prefill without a draft.
///
/// # Errors
/// [`PlanError::Layers`] when the lists do not pair.
pub fn mha_pairs(
    src_count: usize,
    dst_count: usize,
    start_layer: usize,
    src_layer_ids: &[u32],
    dst_layer_ids: &[u32],
    draft_layers: usize,
) -> Result<Vec<EntryPair>, PlanError> {
    let component = crate::metrics::COMPONENT_KV;
    let refused = |detail: String| Err(PlanError::Layers { component, detail });
    if !src_count.is_multiple_of(2) || !dst_count.is_multiple_of(2) {
        return refused(format!(
            "k and v need an even number of tensors: prefill {src_count}, decode {dst_count}"
        ));
    }
    let layers = src_count / 2;
    if src_count == dst_count {
        return Ok((0..src_count)
            .map(|position| (position, position))
            .collect());
    }
    if !src_layer_ids.is_empty() || !dst_layer_ids.is_empty() {
        return entry_pairs(
            component,
            src_layer_ids,
            dst_layer_ids,
            src_count,
            dst_count,
            false,
        );
    }
    let dst_layers = (dst_count / 2).saturating_sub(draft_layers);
    let end_layer = start_layer.saturating_add(layers);
    if end_layer > dst_layers {
        return refused(format!(
            "prefill layers {start_layer} to {end_layer} leave the decode's {dst_layers} layers"
        ));
    }
    let keys = (0..layers).map(|layer| (layer, start_layer + layer));
    let values = (0..layers).map(|layer| (layers + layer, dst_layers + start_layer + layer));
    Ok(keys.chain(values).collect())
}

/// Pairs of latent tensors (MLA): one list. Draft entries follow the target's on both sides.
///
/// # Errors
/// [`PlanError::Layers`] when the lists do not pair.
pub fn mla_pairs(
    src_count: usize,
    dst_count: usize,
    start_layer: usize,
    src_layer_ids: &[u32],
    dst_layer_ids: &[u32],
    num_draft: usize,
) -> Result<Vec<EntryPair>, PlanError> {
    let component = crate::metrics::COMPONENT_KV;
    if src_count == dst_count {
        return Ok((0..src_count)
            .map(|position| (position, position))
            .collect());
    }
    if !src_layer_ids.is_empty() || !dst_layer_ids.is_empty() {
        return entry_pairs(
            component,
            src_layer_ids,
            dst_layer_ids,
            src_count,
            dst_count,
            false,
        );
    }
    let targets = (src_count.checked_sub(num_draft)).zip(dst_count.checked_sub(num_draft));
    let Some((target, dst_target)) = targets else {
        return Err(PlanError::Layers {
            component,
            detail: format!(
                "{num_draft} draft entries of {src_count} tensors at the prefill and {dst_count} at \
                 the decode"
            ),
        });
    };
    let end_layer = start_layer.saturating_add(target);
    if end_layer > dst_target {
        return Err(PlanError::Layers {
            component,
            detail: format!(
                "prefill layers {start_layer} to {end_layer} leave the decode's {dst_target} layers"
            ),
        });
    }
    let targets = (0..target).map(|layer| (layer, start_layer + layer));
    let drafts = (0..src_count - target).map(|draft| (target + draft, dst_target + draft));
    Ok(targets.chain(drafts).collect())
}

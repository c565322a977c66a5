//! The models that the demo can serve, as logical shapes: no rank, no pool, no page.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Which model's state is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum ModelName {
    /// A small model with all kinds of state: K and V, mamba, sliding window and aux.
    #[value(name = "hybrid")]
    Hybrid,
    /// Dense: 36 layers, 8 KV heads of 128, no state components.
    #[value(name = "qwen3-8b")]
    Qwen3Dense8b,
    /// Hybrid: 12 of 48 layers with KV (2 heads of 256), 36 gated-delta-net layers.
    #[value(name = "qwen3.5-122b")]
    Qwen35Hybrid122b,
}

impl fmt::Display for ModelName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Hybrid => "hybrid",
            Self::Qwen3Dense8b => "qwen3-8b",
            Self::Qwen35Hybrid122b => "qwen3.5-122b",
        })
    }
}

/// Attention layers: for each token a K and a V of some heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// The model layers that have it.
    pub layer_ids: Vec<u32>,
    /// KV heads of the model.
    pub heads: u32,
    /// Bytes of one head of one token (head size times the element size).
    pub head_bytes: u32,
}

/// Linear-attention layers: for each request a convolution state and a recurrent state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MambaShape {
    /// The model layers that have it.
    pub layer_ids: Vec<u32>,
    /// Channels of the convolution's q, k and v parts, over all ranks. Each part is sharded by
    /// itself, so that a rank holds `[q shard | k shard | v shard]`.
    pub conv_groups: Vec<u32>,
    /// Bytes that one channel keeps (steps times the element size).
    pub conv_channel_bytes: u32,
    /// Heads of the recurrent state, over all ranks.
    pub recurrent_heads: u32,
    /// Rows of one head's matrix.
    pub recurrent_rows: u32,
    /// Bytes of one row of one head's matrix.
    pub recurrent_row_bytes: u32,
}

/// One auxiliary buffer: a row for each request, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxShape {
    /// What the row is for.
    pub name: &'static str,
    /// Bytes of one row.
    pub row_bytes: u32,
}

/// The state that one request of a model has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Its name on the command line.
    pub name: ModelName,
    /// Full attention: the paged KV cache.
    pub attention: AttentionShape,
    /// Linear attention, if any.
    pub mamba_opt: Option<MambaShape>,
    /// Sliding-window attention, if any.
    pub sliding_opt: Option<AttentionShape>,
    /// Tokens that the sliding window keeps.
    pub window_tokens: u32,
    /// Auxiliary rows.
    pub aux: Vec<AuxShape>,
    /// Longest prompt that the driver sends.
    pub max_prompt_tokens: u32,
    /// Whether the engine names the layer of each buffer, as SGLang does for hybrid models only.
    pub names_layers: bool,
}

/// What accompanies each request in SGLang's metadata buffers, in kind if not in full.
const AUX: [AuxShape; 3] = [
    AuxShape {
        name: "output_ids",
        row_bytes: 64,
    },
    AuxShape {
        name: "output_token_logprobs",
        row_bytes: 128,
    },
    AuxShape {
        name: "bootstrap_room",
        row_bytes: 64,
    },
];

/// `value * scale`, rounded, and at least `least`.
fn scaled(value: u32, scale: f64, least: u32) -> u32 {
    let product = (f64::from(value) * scale).round();
    // A float-to-integer cast saturates, so a huge scale cannot wrap.
    (product as u32).max(least)
}

impl ModelShape {
    /// The shape of a model. `scale` multiplies the number of layers (by whole repeats of the
    /// model's pattern of layers, at least one), the longest prompt and the window; each layer
    /// keeps its true shape. A prompt never gets shorter than `least_prompt_tokens`.
    pub fn new(name: ModelName, scale: f64, least_prompt_tokens: u32) -> Self {
        match name {
            ModelName::Hybrid => Self::hybrid(scale, least_prompt_tokens),
            ModelName::Qwen3Dense8b => Self {
                name,
                attention: AttentionShape {
                    layer_ids: (0..scaled(36, scale, 1)).collect(),
                    heads: 8,
                    head_bytes: 128 * 2,
                },
                mamba_opt: None,
                sliding_opt: None,
                window_tokens: 0,
                aux: AUX.to_vec(),
                max_prompt_tokens: scaled(192, scale, least_prompt_tokens),
                names_layers: false,
            },
            ModelName::Qwen35Hybrid122b => {
                // Three gated-delta-net layers, then one of full attention.
                let repeats = scaled(12, scale, 1);
                Self {
                    name,
                    attention: AttentionShape {
                        layer_ids: (0..repeats).map(|repeat| repeat * 4 + 3).collect(),
                        heads: 2,
                        head_bytes: 256 * 2,
                    },
                    mamba_opt: Some(MambaShape {
                        layer_ids: (0..repeats * 4).filter(|layer| layer % 4 != 3).collect(),
                        // 16 key heads and 64 value heads of 128: 12,288 channels, 3 steps each.
                        conv_groups: vec![2048, 2048, 8192],
                        conv_channel_bytes: 3 * 2,
                        recurrent_heads: 64,
                        recurrent_rows: 128,
                        recurrent_row_bytes: 128 * 4,
                    }),
                    sliding_opt: None,
                    window_tokens: 0,
                    aux: AUX.to_vec(),
                    max_prompt_tokens: scaled(1024, scale, least_prompt_tokens),
                    names_layers: true,
                }
            }
        }
    }

    fn hybrid(scale: f64, least_prompt_tokens: u32) -> Self {
        // Linear, sliding window, linear, full attention.
        let repeats = scaled(4, scale, 1);
        Self {
            name: ModelName::Hybrid,
            attention: AttentionShape {
                layer_ids: (0..repeats).map(|repeat| repeat * 4 + 3).collect(),
                heads: 8,
                head_bytes: 64 * 2,
            },
            mamba_opt: Some(MambaShape {
                layer_ids: (0..repeats * 2).map(|index| index * 2).collect(),
                conv_groups: vec![256, 256, 512],
                conv_channel_bytes: 3 * 2,
                recurrent_heads: 16,
                recurrent_rows: 64,
                recurrent_row_bytes: 64 * 4,
            }),
            sliding_opt: Some(AttentionShape {
                layer_ids: (0..repeats).map(|repeat| repeat * 4 + 1).collect(),
                heads: 8,
                head_bytes: 64 * 2,
            }),
            window_tokens: scaled(256, scale, least_prompt_tokens / 2),
            aux: AUX.to_vec(),
            max_prompt_tokens: scaled(1536, scale, least_prompt_tokens),
            names_layers: true,
        }
    }

    /// Refuses a TP size that the model cannot be sharded by, with a reason.
    pub fn check_tp(&self, tp_size: u32) -> Result<(), String> {
        let heads = self.attention.heads;
        let heads_fit = heads.is_multiple_of(tp_size) || tp_size.is_multiple_of(heads);
        if !heads_fit {
            return Err(format!(
                "{} has {heads} KV heads: neither divides the other",
                self.name
            ));
        }
        let Some(mamba) = &self.mamba_opt else {
            return Ok(());
        };
        let sharded = mamba.conv_groups.iter().chain([&mamba.recurrent_heads]);
        for size in sharded {
            if !size.is_multiple_of(tp_size) {
                return Err(format!(
                    "{} has linear-attention state of {size} heads or channels, which it does not divide",
                    self.name
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_large_hybrid_has_its_published_shape() {
        let model = ModelShape::new(ModelName::Qwen35Hybrid122b, 1.0, 32);
        let mamba = model.mamba_opt.expect("it is a hybrid");
        assert_eq!(model.attention.layer_ids.len(), 12);
        assert_eq!(mamba.layer_ids.len(), 36);
        assert_eq!(mamba.conv_groups.iter().sum::<u32>(), 12_288);
        let mut all = [model.attention.layer_ids, mamba.layer_ids].concat();
        all.sort_unstable();
        assert_eq!(all, (0..48).collect::<Vec<_>>());
    }

    #[test]
    fn no_scale_makes_anything_vanish() {
        for name in [
            ModelName::Hybrid,
            ModelName::Qwen3Dense8b,
            ModelName::Qwen35Hybrid122b,
        ] {
            for scale in [1e-9, 0.01, 0.3, 1.0, 2.0] {
                let model = ModelShape::new(name, scale, 64);
                assert!(!model.attention.layer_ids.is_empty());
                assert!(model.max_prompt_tokens >= 64);
                assert!(
                    model
                        .mamba_opt
                        .is_none_or(|mamba| !mamba.layer_ids.is_empty())
                );
                assert!(
                    model
                        .sliding_opt
                        .is_none_or(|sliding| !sliding.layer_ids.is_empty())
                );
            }
        }
    }

    #[test]
    fn tp_sizes_that_cut_a_head_are_refused() {
        let model = ModelShape::new(ModelName::Qwen35Hybrid122b, 0.1, 64);
        assert!(model.check_tp(4).is_ok());
        assert!(model.check_tp(3).is_err());
        assert!(
            ModelShape::new(ModelName::Hybrid, 1.0, 64)
                .check_tp(32)
                .is_err()
        );
    }
}

//! What a run is going to do, worked out and checked before anything starts.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::args::{InjectionKind, RunArgs};
use crate::content::{Generator, mix};
use crate::engine::{EngineConfig, Request};
use crate::layout::{Component, Side};
use crate::model::ModelShape;

/// Tells the generator of requests apart from others.
const REQUEST_STREAM: u64 = 1;

/// Every so many-th request is short enough for one chunk.
const SHORT_EVERY: u32 = 4;

/// Every so many-th request ends exactly on a page.
const ALIGNED_EVERY: u32 = 5;

/// A run, ready to start.
pub struct RunPlan {
    /// The command line.
    pub args: RunArgs,
    /// Drawn if the command line has none.
    pub seed: u64,
    /// Pages of one chunk.
    pub chunk_pages: u32,
    /// The model's shape.
    pub model: ModelShape,
    /// Every request.
    pub requests: Vec<Request>,
    /// Bytes of all pools of both engines.
    pub pool_bytes: u64,
}

impl RunPlan {
    /// Refuses what cannot work, with a reason.
    pub fn new(args: RunArgs) -> Result<Self> {
        let seed = args.seed.unwrap_or_else(random_seed);
        let chunk_pages = args.chunk_tokens.div_ceil(args.page_size);
        let probe = engine_config(&args, seed, chunk_pages, Side::Prefill);
        let model = probe.model_shape();
        for (flag, tp_size) in [
            ("--prefill-tp", args.prefill_tp),
            ("--decode-tp", args.decode_tp),
        ] {
            if let Err(reason) = model.check_tp(tp_size) {
                bail!("{flag} {tp_size} cannot work: {reason}");
            }
        }
        let (larger, smaller) = (
            args.prefill_tp.max(args.decode_tp),
            args.prefill_tp.min(args.decode_tp),
        );
        if !larger.is_multiple_of(smaller) {
            bail!(
                "--prefill-tp {} and --decode-tp {} cannot work: neither divides the other",
                args.prefill_tp,
                args.decode_tp
            );
        }
        if let Some(injection) = args.inject {
            let layouts = probe.layouts(&model, Side::Prefill);
            let has = layouts
                .iter()
                .any(|layout| layout.component(injection.component).is_some());
            if !has {
                bail!(
                    "--inject {injection} cannot work: {} has no {}",
                    args.model,
                    injection.component
                );
            }
        }

        let pool_bytes = [Side::Prefill, Side::Decode]
            .into_iter()
            .flat_map(|side| engine_config(&args, seed, chunk_pages, side).layouts(&model, side))
            .map(|layout| layout.pool_bytes())
            .sum();
        if let Some(available) = available_memory()
            && pool_bytes > available
        {
            bail!(
                "the pools need {}, but this machine has {} to spare: lower --scale or --concurrency",
                human_bytes(pool_bytes),
                human_bytes(available)
            );
        }
        let requests = requests(
            &args,
            seed,
            chunk_pages * args.page_size,
            model.max_prompt_tokens,
        );
        Ok(Self {
            args,
            seed,
            chunk_pages,
            model,
            requests,
            pool_bytes,
        })
    }

    /// The configuration of one side's engine, less what is known only once the services run.
    pub fn engine_config(&self, side: Side) -> EngineConfig {
        engine_config(&self.args, self.seed, self.chunk_pages, side)
    }

    /// The components that the model has.
    pub fn components(&self) -> Vec<Component> {
        let layouts = self
            .engine_config(Side::Decode)
            .layouts(&self.model, Side::Decode);
        let parts = layouts.first().map(|layout| layout.components.iter());
        parts
            .into_iter()
            .flatten()
            .map(|part| part.component)
            .collect()
    }

    /// The fault that a side's io engine has to make, in the words of the service.
    pub fn transport_fault(&self, side: Side) -> Option<String> {
        let injection = self.args.inject?;
        let in_transport = matches!(
            injection.kind,
            InjectionKind::DropWrite | InjectionKind::Misdirect
        );
        (in_transport && side == Side::Prefill).then(|| injection.to_string())
    }

    /// What is about to happen, in a few lines.
    pub fn describe(&self) -> String {
        let RunArgs {
            model,
            scale,
            prefill_tp,
            decode_tp,
            requests,
            concurrency,
            page_size,
            ..
        } = &self.args;
        let layers = |component: &Option<Vec<u32>>| component.as_ref().map_or(0, Vec::len);
        let mamba = self
            .model
            .mamba_opt
            .as_ref()
            .map(|mamba| mamba.layer_ids.clone());
        let sliding = self
            .model
            .sliding_opt
            .as_ref()
            .map(|sliding| sliding.layer_ids.clone());
        let tokens = self
            .requests
            .iter()
            .map(|request| u64::from(request.tokens))
            .sum::<u64>();
        let seed = self.seed;
        format!(
            "model {model} at scale {scale}: {} attention layers of {} KV heads, {} linear, {} sliding-window\n\
             prefill TP {prefill_tp} to decode TP {decode_tp}; {requests} requests of 1 to {} tokens ({tokens} in all), \
             {concurrency} at once; pages of {page_size}, chunks of {} pages\n\
             pools of {} in all; seed {seed} (repeat this run with --seed {seed})",
            self.model.attention.layer_ids.len(),
            self.model.attention.heads,
            layers(&mamba),
            layers(&sliding),
            self.model.max_prompt_tokens,
            self.chunk_pages,
            human_bytes(self.pool_bytes),
        )
    }
}

fn engine_config(args: &RunArgs, seed: u64, chunk_pages: u32, side: Side) -> EngineConfig {
    EngineConfig {
        model: args.model,
        scale: args.scale,
        memory: args.memory,
        tp_size: match side {
            Side::Prefill => args.prefill_tp,
            Side::Decode => args.decode_tp,
        },
        page_size: args.page_size,
        concurrency: args.concurrency,
        chunk_pages,
        seed,
        attach_socket: std::path::PathBuf::new(),
        api_socket: std::path::PathBuf::new(),
        bootstrap: String::new(),
        timeout: Duration::from_secs(args.request_timeout),
        injection_opt: args.inject,
    }
}

/// Prompts of all lengths: of one chunk, of several, ending on a page and within one.
fn requests(args: &RunArgs, seed: u64, chunk_tokens: u32, max_tokens: u32) -> Vec<Request> {
    let mut generator = Generator::new(seed, REQUEST_STREAM);
    let mut rooms = std::collections::HashSet::new();
    let mut requests = Vec::with_capacity(args.requests as usize);
    for index in 0..args.requests {
        let limit = if index % SHORT_EVERY == 0 {
            max_tokens.min(chunk_tokens)
        } else {
            max_tokens
        };
        let drawn = 1 + generator.below(u64::from(limit)) as u32;
        let tokens = if index % ALIGNED_EVERY == 0 && limit >= args.page_size {
            (drawn / args.page_size).max(1) * args.page_size
        } else {
            drawn
        };
        // The protocol's rooms have 63 bits.
        let room = loop {
            let room = generator.next_u64() >> 1;
            if rooms.insert(room) {
                break room;
            }
        };
        requests.push(Request { room, tokens });
    }
    requests
}

/// A seed from the clock and the process id: two runs need only differ.
fn random_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanoseconds = now.map_or(0, |since| since.as_nanos() as u64);
    mix(nanoseconds ^ u64::from(std::process::id()).rotate_left(32)) >> 32
}

/// What the kernel says can be allocated, in bytes.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Bytes with a binary unit.
pub fn human_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" {
                format!("{bytes} B")
            } else {
                format!("{value:.1} {unit}")
            };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// The order in which components appear in tables.
pub fn component_order(label: &str) -> usize {
    Component::ALL
        .iter()
        .position(|component| component.label() == label)
        .unwrap_or(usize::MAX)
}

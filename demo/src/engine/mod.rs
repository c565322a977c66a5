//! An engine process: several ranks of one side, and the HTTP interface that a router speaks to.
//!
//! It has no model. Where an engine would compute state, the prefill writes the bytes that
//! [`crate::content`] gives for the request's coordinates; where an engine would use it, the decode
//! compares. Everything else is what an engine does: pools in memory of its own that it hands to
//! the service, scattered pages, chunks, one room for each request on each rank.

mod decode;
mod http;
mod prefill;
mod rank;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use serde::{Deserialize, Serialize};

use crate::args::{Injection, PoolMemory};
use crate::layout::{CANARY_STRIDE, Capacity, Component, RankLayout, Side};
use crate::memory::CheckedBytes;
use crate::model::{ModelName, ModelShape};
use rank::Rank;

/// What the driver tells an engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineConfig {
    /// The model.
    pub model: ModelName,
    /// How far it is scaled.
    pub scale: f64,
    /// Where the pools are.
    pub memory: PoolMemory,
    /// Ranks of this engine.
    pub tp_size: u32,
    /// Tokens of one page.
    pub page_size: u32,
    /// Most requests at once; pools are sized for it.
    pub concurrency: u32,
    /// Pages that the prefill sends at once.
    pub chunk_pages: u32,
    /// Makes contents and page orders.
    pub seed: u64,
    /// The service's attach socket.
    pub attach_socket: PathBuf,
    /// The service's HTTP socket.
    pub api_socket: PathBuf,
    /// The bootstrap server, `host:port`.
    pub bootstrap: String,
    /// How long a room may take to reach its next status.
    pub timeout: Duration,
    /// A fault on purpose.
    pub injection_opt: Option<Injection>,
}

impl EngineConfig {
    /// The model's shape.
    pub fn model_shape(&self) -> ModelShape {
        // The shortest longest prompt still has several chunks and an unaligned end.
        let least_prompt_tokens = 2 * self.chunk_pages * self.page_size + self.page_size / 2 + 1;
        ModelShape::new(self.model, self.scale, least_prompt_tokens)
    }

    /// How much the pools of a rank hold: what the requests in flight can need, and for pages a
    /// quarter more, so that pages are taken from all over the pool.
    pub fn capacity(&self, model: &ModelShape) -> Capacity {
        let pages = |tokens: u32| tokens.div_ceil(self.page_size);
        let spacious = |pages: u32| with_canaries(self.concurrency * pages * 5 / 4);
        Capacity {
            kv_pages: spacious(pages(model.max_prompt_tokens)),
            // A window that begins within a page needs that page too.
            sliding_pages: spacious(pages(model.window_tokens) + 1),
            requests: with_canaries(self.concurrency + 1),
        }
    }

    /// The layout of each rank.
    pub fn layouts(&self, model: &ModelShape, side: Side) -> Vec<RankLayout> {
        let capacity = self.capacity(model);
        let layout =
            |rank| RankLayout::new(model, side, self.tp_size, rank, self.page_size, capacity);
        (0..self.tp_size).map(layout).collect()
    }
}

/// How many items a pool must have for `usable` of them to be handed out.
fn with_canaries(usable: u32) -> u32 {
    let mut items = usable;
    while items - items.div_ceil(CANARY_STRIDE) < usable {
        items += 1;
    }
    items
}

/// One line on standard output, once the engine can be used.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ready {
    /// Port of the engine's HTTP server on 127.0.0.1.
    pub port: u16,
}

/// What an engine shares between its requests.
pub struct Engine {
    pub side: Side,
    pub config: EngineConfig,
    pub model: ModelShape,
    pub ranks: Vec<Arc<Rank>>,
    /// Set once the fault on purpose has been made.
    pub injected: AtomicBool,
}

/// One request, as the engine sees it.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The router's `bootstrap_room`, which is also what the contents derive from.
    pub room: u64,
    /// Tokens of the prompt.
    pub tokens: u32,
}

/// What one component of one rank did for one request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Moved {
    /// The rank.
    pub tp_rank: u32,
    /// The component's label.
    pub component: String,
    /// How the bytes moved; empty on the decode, which does not know.
    #[serde(default)]
    pub transport: String,
    /// Prefill: bytes that the service reports. Decode: bytes that were compared.
    pub bytes: u64,
    /// Prefill: seconds that the service reports.
    #[serde(default)]
    pub seconds: f64,
}

/// What the check of the idle pools found right on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Checked {
    /// The rank.
    pub tp_rank: u32,
    /// For each component.
    pub components: Vec<(Component, CheckedBytes)>,
}

/// Runs an engine until it is killed.
pub async fn run(side: Side, config: EngineConfig) -> Result<()> {
    let model = config.model_shape();
    let starts = config
        .layouts(&model, side)
        .into_iter()
        .map(|layout| Rank::start(&config, &model, layout));
    let ranks = try_join_all(starts)
        .await?
        .into_iter()
        .map(Arc::new)
        .collect();
    let engine = Engine {
        side,
        config,
        model,
        ranks,
        injected: AtomicBool::new(false),
    };
    let (server, port) = http::serve(Arc::new(engine))?;
    let ready = serde_json::to_string(&Ready { port })?;
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{ready}")
        .and_then(|()| stdout.flush())
        .context("telling the driver")?;
    drop(stdout);
    server.await.context("serving http")
}

impl Engine {
    /// Compares every byte of every pool of every rank. The engine must be idle.
    pub async fn check_idle(&self) -> Result<Vec<Checked>> {
        decode::inject_untouched(self)?;
        try_join_all(self.ranks.iter().map(async |rank| {
            let owned = Arc::clone(rank);
            let components = rank::blocking(move || owned.memory.check_all()).await?;
            Ok(Checked {
                tp_rank: rank.memory.layout.tp_rank,
                components,
            })
        }))
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canaries_leave_what_is_needed() {
        for usable in [1, 14, 15, 16, 17, 300, 1001] {
            let items = with_canaries(usable);
            assert_eq!(items - items.div_ceil(CANARY_STRIDE), usable);
        }
    }
}

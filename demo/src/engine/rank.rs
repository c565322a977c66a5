//! One rank of an engine: its pools, its free pages and its place in the service.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use transfer_actor::api::{
    AttachRequest, DevicePool, EngineSpec, Indices, ParallelSpec, Role, RoomStatus, RoomView,
};
use transfer_actor::client::RankClient;

use super::EngineConfig;
use crate::content::Generator;
use crate::layout::{CANARY_STRIDE, Component, RankLayout, Side};
use crate::memory::{Placed, Pool, RankMemory};
use crate::model::ModelShape;
use crate::pages::FreeList;

/// Tells the generators of free lists apart from others.
const FREE_LIST_STREAM: u64 = 0x1000;

/// One rank, attached to the service.
pub struct Rank {
    /// Its pools.
    pub memory: Arc<RankMemory>,
    /// Its rooms.
    pub client: RankClient,
    free: Mutex<BTreeMap<Component, FreeList>>,
}

/// What a request holds of a rank's pools. It is given back only when the request's room has
/// ended; a request that fails keeps it for ever.
#[derive(Debug)]
pub struct Holding {
    placed: BTreeMap<Component, Vec<Placed>>,
}

impl Holding {
    /// Where a component of the request lies; empty when the model has no such component.
    pub fn placed(&self, component: Component) -> &[Placed] {
        self.placed.get(&component).map_or(&[], Vec::as_slice)
    }

    /// The bare numbers, in the order of the request.
    pub fn items(&self, component: Component) -> Vec<i32> {
        self.placed(component)
            .iter()
            .map(|place| place.item)
            .collect()
    }

    /// The aux row; every request has one.
    pub fn aux_row(&self) -> i32 {
        self.placed(Component::Aux)
            .first()
            .map_or(-1, |place| place.item)
    }

    /// The indices of the model's state components, in the order of their registration.
    pub fn state_indices(&self) -> Vec<Option<Indices>> {
        [Component::Mamba, Component::Swa]
            .into_iter()
            .filter(|component| self.placed.contains_key(component))
            .map(|component| Some(Indices(self.items(component))))
            .collect()
    }
}

/// What the service is handed of the pools, and what it is told of those in device memory.
fn descriptors(memory: &RankMemory) -> Result<(Vec<OwnedFd>, BTreeMap<usize, DevicePool>)> {
    let (mut descriptors, mut device_pools) = (Vec::new(), BTreeMap::new());
    for (at, pool) in memory.pools().iter().enumerate() {
        match pool {
            Pool::Host(memory) => descriptors.push(memory.as_fd().try_clone_to_owned()?),
            Pool::Device(memory) => {
                let handles = memory.handles()?;
                let device_pool = DevicePool {
                    runtime: handles.runtime.name().to_owned(),
                    device: hex::encode(handles.device),
                    lead: handles.lead.get(),
                    parts: handles.parts.iter().map(|(_, bytes)| bytes.get()).collect(),
                };
                device_pools.insert(at, device_pool);
                descriptors.extend(handles.parts.into_iter().map(|(descriptor, _)| descriptor));
            }
        }
    }
    Ok((descriptors, device_pools))
}

impl Rank {
    /// Allocates the pools, hands them to the service and waits until the rank is up.
    pub async fn start(
        config: &EngineConfig,
        model: &ModelShape,
        layout: RankLayout,
    ) -> Result<Self> {
        let seed = config.seed;
        let (side, tp_rank) = (layout.side, layout.tp_rank);
        let spec = layout.to_spec(model);
        let place = config.memory;
        let memory = blocking(move || RankMemory::allocate(layout, place, seed)).await?;
        let (descriptors, device_pools) = descriptors(&memory)?;
        let request = AttachRequest {
            role: match side {
                Side::Prefill => Role::Prefill,
                Side::Decode => Role::Decode,
            },
            bootstrap: (side == Side::Prefill).then(|| config.bootstrap.clone()),
            parallel: ParallelSpec {
                attn_tp_size: config.tp_size,
                attn_tp_rank: tp_rank,
                ..ParallelSpec::default()
            },
            engine: EngineSpec {
                kv_cache_dtype: "auto".to_owned(),
                kv_layout: None,
                load_balance_method: "round_robin".to_owned(),
                decode_allocation_policy: "early".to_owned(),
                prefill_http_port: None,
                sglang_release: None,
            },
            pools: memory
                .layout
                .components
                .iter()
                .map(|part| part.pool_bytes)
                .collect(),
            device_pools,
            layout: spec,
        };
        let client = RankClient::attach(
            &config.attach_socket,
            &config.api_socket,
            &request,
            &descriptors,
        )
        .await
        .with_context(|| format!("attaching {side} rank {tp_rank} to the service"))?;

        let list_of = |(pool, part): (u64, &crate::layout::ComponentLayout)| {
            let stream =
                FREE_LIST_STREAM + ((side as u64) << 32) + (u64::from(tp_rank) << 8) + pool;
            let generator = Generator::new(seed, stream);
            (
                part.component,
                FreeList::new(part.items, CANARY_STRIDE, generator),
            )
        };
        let free = (0_u64..)
            .zip(&memory.layout.components)
            .map(list_of)
            .collect();
        Ok(Self {
            memory: Arc::new(memory),
            client,
            free: Mutex::new(free),
        })
    }

    /// The components that the rank holds.
    pub fn components(&self) -> Vec<Component> {
        self.memory
            .layout
            .components
            .iter()
            .map(|part| part.component)
            .collect()
    }

    fn free(&self) -> MutexGuard<'_, BTreeMap<Component, FreeList>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the pages, slot and row of a request with so many tokens.
    pub fn take(&self, model: &ModelShape, tokens: u32) -> Result<Holding> {
        let page_size = self.memory.layout.page_size;
        let mut placed = BTreeMap::new();
        let mut free = self.free();
        for (component, list) in free.iter_mut() {
            let ordinals = match component {
                Component::Kv => 0..tokens.div_ceil(page_size),
                // The pages that hold any of the window's last tokens.
                Component::Swa => {
                    let first_token = tokens.saturating_sub(model.window_tokens);
                    first_token / page_size..tokens.div_ceil(page_size)
                }
                Component::Mamba | Component::Aux => 0..1,
            };
            let items = list.take(ordinals.len()).ok_or_else(|| {
                anyhow!("{component} has fewer than {} free items", ordinals.len())
            })?;
            let places = items.into_iter().zip(ordinals);
            let places = places
                .map(|(item, ordinal)| Placed { item, ordinal })
                .collect();
            placed.insert(*component, places);
        }
        Ok(Holding { placed })
    }

    /// Takes back what a request held.
    pub fn give_back(&self, holding: Holding) {
        let mut free = self.free();
        for component in holding.placed.keys() {
            if let Some(list) = free.get_mut(component) {
                list.give_back(&holding.items(*component));
            }
        }
    }

    /// Waits until a room has reached a status; an error if it fails or takes too long.
    pub async fn wait(&self, room: u64, status: RoomStatus, timeout: Duration) -> Result<RoomView> {
        let view = self
            .client
            .wait(room, Some(status), timeout)
            .await
            .context("waiting")?;
        let layout = &self.memory.layout;
        let (side, tp_rank) = (layout.side, layout.tp_rank);
        if view.status == RoomStatus::Failed {
            let reason = view.reason.as_deref().unwrap_or("no reason given");
            bail!("request {room} failed on {side} rank {tp_rank}: {reason}");
        }
        if view.status < status {
            bail!(
                "request {room} on {side} rank {tp_rank} was still {:?} after {timeout:?}, not {status:?}",
                view.status
            );
        }
        Ok(view)
    }
}

/// Runs work that computes or copies on a thread of its own.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .context("a worker thread panicked")?
}

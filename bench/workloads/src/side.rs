//! One side of a replay: its pools, what it registers, and what its bytes must be.

use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result, bail};
use common::ids::{ByteLen, ByteOffset, Endpoint};
use common::schema::{RankLayout, TensorLayout};
use common::wire::{MemoryDesc, Register, Release};
use io_engine::{Engine, Memory, Region};
use serde::{Deserialize, Serialize};

use crate::content::Coordinates;
use crate::model::{Capacity, Model, pages_per_request};

/// Tells the bytes of an untouched pool from contents.
const BACKGROUND: u64 = u64::MAX;
/// Threads that fill and check pools; neither is timed.
const CHECKERS: usize = 2;

/// What both processes agree on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// Name of the model.
    pub model: String,
    /// Tokens of one page.
    pub page_size: u32,
    /// Requests that the pools have room for.
    pub requests: usize,
    /// Of contents and orders.
    pub seed: u64,
    /// Threads that copy, and streams.
    pub threads: usize,
}

impl Setup {
    /// The model.
    pub fn model(&self) -> Result<Model> {
        Model::from_name(&self.model).with_context(|| format!("there is no model {}", self.model))
    }

    /// Room in the pools.
    pub fn capacity(&self) -> Capacity {
        Capacity::for_requests(self.requests, self.page_size)
    }
}

/// Where one request lies on one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Placement {
    /// Its pages, in the order of the prompt.
    pub pages: Vec<i32>,
    /// Its slot of the state component, and row of the aux buffers.
    pub slot: i32,
}

/// A request on one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Placed {
    /// Its number, a coordinate of its contents.
    pub request: u64,
    /// Where it lies.
    pub placement: Placement,
}

/// The parts of the state, each in a pool of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// K and V pages.
    Kv,
    /// Slots of the state component.
    State,
    /// Rows.
    Aux,
}

impl Part {
    /// In the order of the pools.
    pub const ALL: [Self; 3] = [Self::Kv, Self::State, Self::Aux];

    /// Its tensors.
    pub fn tensors(self, layout: &RankLayout) -> &[TensorLayout] {
        match self {
            Self::Kv => &layout.kv.tensors,
            Self::State => layout.states.first().map_or(&[], |state| &state.tensors),
            Self::Aux => &layout.aux,
        }
    }
}

/// One tensor of a pool.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    part: Part,
    position: usize,
    offset: u64,
    layout: TensorLayout,
}

/// A side's pools.
pub struct Side {
    setup: Setup,
    token_bytes: usize,
    /// Sizes.
    pub layout: RankLayout,
    /// One for each part; none where the model has no such part.
    pub pools: Vec<Option<Memory>>,
    buffers: Vec<Buffer>,
    /// A coordinate of the background.
    owner: u64,
}

/// A side's regions in one engine, by tensor.
pub struct Regions {
    /// K and V.
    pub kv: Vec<Region>,
    /// The state component.
    pub states: Vec<Vec<Region>>,
    /// Aux buffers.
    pub aux: Vec<Region>,
}

impl Side {
    /// Allocates the pools.
    pub fn new(setup: &Setup, owner: u64) -> Result<Self> {
        let model = setup.model()?;
        let layout = model.layout(setup.page_size, setup.capacity());
        let mut pools = Vec::new();
        let mut buffers = Vec::new();
        for part in Part::ALL {
            let mut end = 0;
            for (position, tensor) in part.tensors(&layout).iter().enumerate() {
                buffers.push(Buffer {
                    part,
                    position,
                    offset: end,
                    layout: *tensor,
                });
                end += tensor.bytes.get();
            }
            let pool = (end > 0).then(|| Memory::allocate("bench-replay", ByteLen(end)));
            pools.push(pool.transpose().context("allocating a pool")?);
        }
        Ok(Self {
            setup: setup.clone(),
            token_bytes: usize::try_from(model.token_bytes())?,
            layout,
            pools,
            buffers,
            owner,
        })
    }

    /// Paths by which another process of this user can map the pools.
    pub fn pool_paths(&self) -> Vec<String> {
        let paths = self.pools.iter().flatten().map(|pool| {
            let fd = pool.as_fd().as_raw_fd();
            format!("/proc/{}/fd/{fd}", std::process::id())
        });
        paths.collect()
    }

    /// Registers every tensor with an engine.
    pub fn register(&self, engine: &Engine) -> Result<Regions> {
        let part = |wanted: Part| -> Result<Vec<Region>> {
            let pool = self.pools.get(wanted as usize).and_then(Option::as_ref);
            let Some(pool) = pool else {
                return Ok(Vec::new());
            };
            let buffers = self.buffers.iter().filter(|buffer| buffer.part == wanted);
            let regions = buffers.map(|buffer| {
                let offset = ByteOffset(buffer.offset);
                Ok(engine.register(pool, offset, buffer.layout.bytes, "bench")?)
            });
            regions.collect()
        };
        let states = part(Part::State)?;
        Ok(Regions {
            kv: part(Part::Kv)?,
            states: (!states.is_empty()).then_some(states).into_iter().collect(),
            aux: part(Part::Aux)?,
        })
    }

    /// What a decode rank with these regions tells a prefill rank.
    pub fn registration(&self, engine: &Engine, regions: &Regions) -> Register {
        let descs =
            |regions: &[Region]| -> Vec<MemoryDesc> { regions.iter().map(Region::desc).collect() };
        let states = &self.layout.states;
        let item_len = |tensor: &TensorLayout| tensor.item_len.get();
        Register {
            endpoint: Endpoint::new("127.0.0.1".to_owned(), 1),
            engine: engine.desc(),
            kv: descs(&regions.kv),
            aux: descs(&regions.aux),
            states: regions
                .states
                .iter()
                .map(|state| state.iter().map(|region| Some(region.desc())).collect())
                .collect(),
            gpu_id: 0,
            tp_size: 1,
            engine_rank: 0,
            kv_item_len: self.layout.kv.tensors.first().map_or(0, item_len),
            state_item_lens: states
                .iter()
                .map(|state| {
                    let lengths = state.tensors.iter().map(item_len);
                    lengths
                        .filter_map(|length| u32::try_from(length).ok())
                        .collect()
                })
                .collect(),
            state_dims: states.iter().map(|state| state.dims.clone()).collect(),
            dcp_size: 1,
            dcp_rank: 0,
            state_layer_ids: states.iter().map(|state| state.layer_ids.clone()).collect(),
            kv_layer_ids: Vec::new(),
            release: Release::NEWEST,
        }
    }

    /// Every contiguous range of one request: pool, source offset, destination offset, length. For
    /// the raw limit, which has no planner.
    pub fn ranges(&self, src: &Placement, dst: &Placement) -> Vec<[u64; 4]> {
        let mut ranges = Vec::new();
        // Pools that do not exist are not counted by the raw limit.
        let mut pool_numbers = [0; Part::ALL.len()];
        let mut next = 0;
        for (number, pool) in pool_numbers.iter_mut().zip(&self.pools) {
            *number = next;
            next += u64::from(pool.is_some());
        }
        for buffer in &self.buffers {
            let item_len = buffer.layout.item_len.get();
            let at = |item: &i32| buffer.offset + item.unsigned_abs() as u64 * item_len;
            let items = self
                .items(buffer.part, src)
                .zip(self.items(buffer.part, dst));
            for (src, dst) in items {
                ranges.push([
                    pool_numbers[buffer.part as usize],
                    at(src),
                    at(dst),
                    item_len,
                ]);
            }
        }
        ranges
    }

    fn items<'a>(&self, part: Part, placement: &'a Placement) -> impl Iterator<Item = &'a i32> {
        match part {
            Part::Kv => placement.pages.iter(),
            Part::State | Part::Aux => std::slice::from_ref(&placement.slot).iter(),
        }
    }

    /// Puts the contents of requests, or without any the background, into the pools.
    pub fn fill(&self, requests: &[Placed]) -> Result<()> {
        self.each_item(
            requests,
            requests.is_empty(),
            |pool, offset, expected, _| Ok(pool.write(ByteOffset(offset), expected)?),
        )
    }

    /// Compares every byte of the pools: contents where a request lies, background elsewhere.
    pub fn verify(&self, requests: &[Placed]) -> Result<()> {
        self.each_item(requests, true, |pool, offset, expected, seen| {
            pool.read(ByteOffset(offset), seen)?;
            match seen
                .iter()
                .zip(expected)
                .position(|(seen, expected)| seen != expected)
            {
                None => Ok(()),
                Some(at) => bail!("byte {at} is wrong"),
            }
        })
    }

    /// Calls `act` with pool, offset and expected bytes of every item that a request holds, and
    /// with those of every other item if wanted.
    fn each_item(
        &self,
        requests: &[Placed],
        with_background: bool,
        act: impl Fn(&Memory, u64, &[u8], &mut [u8]) -> Result<()> + Sync,
    ) -> Result<()> {
        let share = |first: usize| -> Result<()> {
            let (mut expected, mut seen) = (Vec::new(), Vec::new());
            for buffer in self.buffers.iter().skip(first).step_by(CHECKERS) {
                let Some(Some(pool)) = self.pools.get(buffer.part as usize) else {
                    continue;
                };
                let item_len = buffer.layout.item_len.get();
                let items = usize::try_from(buffer.layout.bytes.get() / item_len.max(1))?;
                let mut owners = vec![None; items];
                for placed in requests {
                    for (ordinal, item) in self.items(buffer.part, &placed.placement).enumerate() {
                        let owner = owners.get_mut(usize::try_from(*item)?);
                        *owner.context("an item beyond its tensor")? =
                            Some((placed.request, ordinal));
                    }
                }
                expected.resize(usize::try_from(item_len)?, 0);
                seen.resize(expected.len(), 0);
                for (item, owner) in owners.into_iter().enumerate() {
                    if owner.is_none() && !with_background {
                        continue;
                    }
                    self.expect(buffer, item, owner, &mut expected);
                    let offset = buffer.offset + item as u64 * item_len;
                    act(pool, offset, &expected, &mut seen).with_context(|| {
                        format!(
                            "{:?} tensor {} item {item} (request and ordinal {owner:?})",
                            buffer.part, buffer.position
                        )
                    })?;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let share = &share;
            let threads: Vec<_> = (0..CHECKERS)
                .map(|first| scope.spawn(move || share(first)))
                .collect();
            threads.into_iter().try_for_each(|thread| {
                let result = thread.join();
                result.unwrap_or_else(|_| bail!("a checker panicked"))
            })
        })
    }

    fn expect(&self, buffer: &Buffer, item: usize, owner: Option<(u64, usize)>, out: &mut [u8]) {
        let tensor = Coordinates::new(self.setup.seed)
            .with(buffer.part as u64)
            .with(buffer.position as u64);
        match (owner, buffer.part) {
            (None, _) => tensor
                .with(BACKGROUND)
                .with(self.owner)
                .with(item as u64)
                .fill(out),
            (Some((request, page)), Part::Kv) => {
                let first_token = page as u64 * u64::from(self.setup.page_size);
                for (token, row) in (first_token..).zip(out.chunks_mut(self.token_bytes)) {
                    tensor.with(request).with(token).fill(row);
                }
            }
            (Some((request, _)), _) => tensor.with(request).fill(out),
        }
    }

    /// What both processes agreed on.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Pages of one request.
    pub fn pages_per_request(&self) -> usize {
        pages_per_request(self.setup.page_size) as usize
    }
}

//! One rank's pools: filled by the prefill, checked by the decode, byte by byte.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use io_engine::{
    ByteLen, ByteOffset, DeviceMemory, DeviceRuntime, Memory, TransportError, device_count,
};
use serde::{Deserialize, Serialize};

use crate::args::PoolMemory;
use crate::content::{Background, Coordinates};
use crate::layout::{Component, ComponentLayout, RankLayout, Side, Tensor};

/// Most bytes that are compared at once.
const CHECK_CHUNK_BYTES: u64 = 256 * 1024;

/// An item of a pool and which part of a request it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Number of the page, slot or row in the pool.
    pub item: i32,
    /// Which page of the request; 0 for a slot or row.
    pub ordinal: u32,
}

/// What must be at the place of a wrong byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Expectation {
    /// A request's state.
    Delivered {
        /// The request.
        room: u64,
        /// Which page of it.
        ordinal: u32,
        /// The page, slot or row of the pool.
        item: u64,
    },
    /// The background: nothing was ever placed in this item.
    Untouched {
        /// The page, slot or row of the pool.
        item: u64,
    },
    /// The background: no tensor lies here.
    OutsideTensors,
}

/// The first wrong byte that a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub struct Mismatch {
    /// Which engine's pool.
    pub side: Side,
    /// Which of its ranks.
    pub tp_rank: u32,
    /// Which component.
    pub component: Component,
    /// The tensor, or the one before the place when it lies outside all of them.
    pub tensor: String,
    /// Offset of the byte from the tensor's first, in bytes.
    pub offset: u64,
    /// What the byte must be.
    pub expected: u8,
    /// What it is.
    pub found: u8,
    /// How many bytes are wrong in the stretch that was being compared.
    pub wrong_bytes: u64,
    /// What must be there.
    pub expectation: Expectation,
    /// Whether the wrong bytes are the pool's first contents: nothing has been written there.
    pub still_background: bool,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            side,
            tp_rank,
            component,
            tensor,
            offset,
            expected,
            found,
            ..
        } = self;
        write!(
            formatter,
            "verification failed on {side} rank {tp_rank}: component {component}, tensor {tensor}, \
             offset {offset}: expected {expected:#04x}, found {found:#04x} ("
        )?;
        match self.expectation {
            Expectation::Delivered {
                room,
                ordinal,
                item,
            } => {
                write!(
                    formatter,
                    "request {room}, its item {ordinal}, kept in item {item}"
                )?;
            }
            Expectation::Untouched { item } => {
                write!(formatter, "item {item}, in which nothing was ever placed")?;
            }
            Expectation::OutsideTensors => write!(formatter, "outside every tensor")?,
        }
        write!(formatter, "; {} bytes wrong there", self.wrong_bytes)?;
        if self.still_background {
            write!(
                formatter,
                ", which still hold the background: nothing was written"
            )?;
        }
        write!(formatter, ")")
    }
}

/// Bytes that a check of a whole pool has found right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckedBytes {
    /// Hold the state of the last request that was placed there.
    pub placed: u64,
    /// Hold the background.
    pub untouched: u64,
}

#[derive(Clone, Copy, Debug)]
struct Owner {
    room: u64,
    ordinal: u32,
}

/// A pool, wherever it is.
pub enum Pool {
    Host(Memory),
    Device(DeviceMemory),
}

impl Pool {
    fn allocate(place: PoolMemory, name: &str, tp_rank: u32, bytes: u64) -> Result<Self> {
        let len = ByteLen(bytes);
        match place {
            PoolMemory::Host => Ok(Self::Host(Memory::allocate(name, len)?)),
            PoolMemory::Device => {
                let cuda = device_count(DeviceRuntime::Cuda);
                let (runtime, devices) = match &cuda {
                    Ok(count) => (DeviceRuntime::Cuda, *count),
                    Err(error) => {
                        let count = device_count(DeviceRuntime::Hip);
                        let both = |other| anyhow!("{error}; {other}");
                        (DeviceRuntime::Hip, count.map_err(both)?)
                    }
                };
                let number = tp_rank % devices.max(1);
                Ok(Self::Device(DeviceMemory::allocate(runtime, number, len)?))
            }
        }
    }

    /// Copies bytes out.
    pub fn read(&self, offset: ByteOffset, out: &mut [u8]) -> Result<(), TransportError> {
        match self {
            Self::Host(memory) => memory.read(offset, out),
            Self::Device(memory) => memory.read(offset, out),
        }
    }

    /// Copies bytes in.
    pub fn write(&self, offset: ByteOffset, bytes: &[u8]) -> Result<(), TransportError> {
        match self {
            Self::Host(memory) => memory.write(offset, bytes),
            Self::Device(memory) => memory.write(offset, bytes),
        }
    }
}

/// The pools of one rank, and whose state each item holds.
pub struct RankMemory {
    /// What lies where.
    pub layout: RankLayout,
    seed: u64,
    pools: Vec<Pool>,
    /// For each component the last request that was placed in each item.
    owners: Mutex<Vec<Vec<Option<Owner>>>>,
}

impl RankMemory {
    /// Allocates the pools and writes the background everywhere.
    pub fn allocate(layout: RankLayout, place: PoolMemory, seed: u64) -> Result<Self> {
        let mut pools = Vec::with_capacity(layout.components.len());
        for component in &layout.components {
            let name = format!(
                "ferry-{}-{}-{}",
                layout.side, layout.tp_rank, component.component
            );
            let memory = Pool::allocate(place, &name, layout.tp_rank, component.pool_bytes)
                .with_context(|| format!("allocating {} bytes for {name}", component.pool_bytes))?;
            pools.push(memory);
        }
        let owners = layout
            .components
            .iter()
            .map(|part| vec![None; part.items as usize])
            .collect();
        let memory = Self {
            layout,
            seed,
            pools,
            owners: Mutex::new(owners),
        };
        let mut bytes = vec![0_u8; CHECK_CHUNK_BYTES as usize];
        for (pool, component) in memory.layout.components.iter().enumerate() {
            let background = memory.background(pool);
            for (offset, len) in stretches(0, component.pool_bytes) {
                background.fill(offset, &mut bytes[..len]);
                memory.pools[pool].write(ByteOffset(offset), &bytes[..len])?;
            }
        }
        Ok(memory)
    }

    /// The pools, in the order of the layout's components.
    pub fn pools(&self) -> &[Pool] {
        &self.pools
    }

    fn background(&self, pool: usize) -> Background {
        Background::new(
            self.seed,
            self.layout.side as u64,
            self.layout.tp_rank,
            pool,
        )
    }

    fn owners(&self) -> MutexGuard<'_, Vec<Vec<Option<Owner>>>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn part(&self, component: Component) -> Result<(usize, &ComponentLayout)> {
        self.layout
            .component(component)
            .ok_or_else(|| anyhow!("the model has no {component}"))
    }

    /// Writes a request's state into items (the prefill's "computation").
    pub fn fill(&self, component: Component, room: u64, placed: &[Placed]) -> Result<()> {
        let (pool, part) = self.part(component)?;
        let request = Coordinates::new(self.seed).with(room);
        let mut bytes = Vec::new();
        for tensor in &part.tensors {
            bytes.resize(tensor.item_len as usize, 0);
            for place in placed {
                tensor.render(request, place.ordinal, &mut bytes);
                self.pools[pool].write(item_offset(tensor, place.item)?, &bytes)?;
            }
        }
        self.set_owners(pool, room, placed)
    }

    /// Compares items with a request's state and, when all are right, remembers whose they are.
    /// Returns the number of bytes that have arrived.
    pub fn check_request(&self, component: Component, room: u64, placed: &[Placed]) -> Result<u64> {
        let (pool, part) = self.part(component)?;
        let mut scratch = Scratch::default();
        for tensor in &part.tensors {
            for place in placed {
                let item = u64::try_from(place.item)?;
                let owner = Owner {
                    room,
                    ordinal: place.ordinal,
                };
                self.check_item(pool, part, tensor, item, owner, &mut scratch)?;
            }
        }
        self.set_owners(pool, room, placed)?;
        Ok(part.item_bytes() * placed.len() as u64)
    }

    /// Compares every byte of every pool: items that were ever placed hold the last request's
    /// state, everything else the background. Nobody may be writing.
    pub fn check_all(&self) -> Result<Vec<(Component, CheckedBytes)>> {
        let mut checked = Vec::new();
        for (pool, part) in self.layout.components.iter().enumerate() {
            let owners = self.owners()[pool].clone();
            let mut scratch = Scratch::default();
            let mut sum = CheckedBytes::default();
            let mut end_of_last = 0;
            for (index, tensor) in part.tensors.iter().enumerate() {
                let before = &part.tensors[index.saturating_sub(1)];
                let gap = end_of_last..tensor.offset;
                sum.untouched += self.check_gap(pool, part, before, gap, &mut scratch)?;
                for (item, owner_opt) in (0_u64..).zip(&owners) {
                    let start = tensor.offset + item * tensor.item_len;
                    match owner_opt {
                        Some(owner) => {
                            self.check_item(pool, part, tensor, item, *owner, &mut scratch)?;
                            sum.placed += tensor.item_len;
                        }
                        None => {
                            let span = start..start + tensor.item_len;
                            let expectation = Expectation::Untouched { item };
                            self.check_background(
                                pool,
                                part,
                                tensor,
                                span,
                                expectation,
                                &mut scratch,
                            )?;
                            sum.untouched += tensor.item_len;
                        }
                    }
                }
                end_of_last = tensor.offset + tensor.item_len * u64::from(part.items);
            }
            if let Some(last) = part.tensors.last() {
                let gap = end_of_last..part.pool_bytes;
                sum.untouched += self.check_gap(pool, part, last, gap, &mut scratch)?;
            }
            checked.push((part.component, sum));
        }
        Ok(checked)
    }

    /// Inverts one byte in the middle of an item, in a tensor from the middle of the component:
    /// what a check must find.
    pub fn flip_byte(&self, component: Component, item: i32) -> Result<()> {
        let (pool, part) = self.part(component)?;
        let tensor = &part.tensors[part.tensors.len() / 2];
        let offset = ByteOffset(item_offset(tensor, item)?.get() + tensor.item_len / 2);
        let mut byte = [0_u8];
        self.pools[pool].read(offset, &mut byte)?;
        byte[0] = !byte[0];
        self.pools[pool].write(offset, &byte)?;
        Ok(())
    }

    fn set_owners(&self, pool: usize, room: u64, placed: &[Placed]) -> Result<()> {
        let mut owners = self.owners();
        for place in placed {
            let owner_opt = owners[pool].get_mut(usize::try_from(place.item)?);
            let Some(owner) = owner_opt else {
                bail!("item {} is not in the pool", place.item)
            };
            *owner = Some(Owner {
                room,
                ordinal: place.ordinal,
            });
        }
        Ok(())
    }

    fn check_item(
        &self,
        pool: usize,
        part: &ComponentLayout,
        tensor: &Tensor,
        item: u64,
        owner: Owner,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let len = tensor.item_len as usize;
        scratch.resize(len);
        let request = Coordinates::new(self.seed).with(owner.room);
        tensor.render(request, owner.ordinal, &mut scratch.expected);
        let start = tensor.offset + item * tensor.item_len;
        let Owner { room, ordinal } = owner;
        let expectation = Expectation::Delivered {
            room,
            ordinal,
            item,
        };
        self.compare(pool, part, tensor, start, expectation, scratch)
    }

    fn check_gap(
        &self,
        pool: usize,
        part: &ComponentLayout,
        before: &Tensor,
        gap: std::ops::Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<u64> {
        let len = gap.end - gap.start;
        self.check_background(
            pool,
            part,
            before,
            gap,
            Expectation::OutsideTensors,
            scratch,
        )?;
        Ok(len)
    }

    fn check_background(
        &self,
        pool: usize,
        part: &ComponentLayout,
        tensor: &Tensor,
        span: std::ops::Range<u64>,
        expectation: Expectation,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let background = self.background(pool);
        for (start, len) in stretches(span.start, span.end) {
            scratch.resize(len);
            background.fill(start, &mut scratch.expected);
            self.compare(pool, part, tensor, start, expectation, scratch)?;
        }
        Ok(())
    }

    /// Compares the pool at `start` with the scratch's expected bytes.
    fn compare(
        &self,
        pool: usize,
        part: &ComponentLayout,
        tensor: &Tensor,
        start: u64,
        expectation: Expectation,
        scratch: &mut Scratch,
    ) -> Result<()> {
        self.pools[pool].read(ByteOffset(start), &mut scratch.found)?;
        if scratch.expected == scratch.found {
            return Ok(());
        }
        let pairs = || scratch.expected.iter().zip(&scratch.found);
        let wrong = |(expected, found): &(&u8, &u8)| expected != found;
        let wrong_bytes = pairs().filter(wrong).count() as u64;
        let Some(first) = pairs().position(|pair| wrong(&pair)) else {
            return Ok(());
        };
        let mut background = vec![0_u8; scratch.found.len()];
        self.background(pool).fill(start, &mut background);
        let still_background = !matches!(expectation, Expectation::Untouched { .. })
            && pairs()
                .zip(&background)
                .all(|(pair, first)| !wrong(&pair) || pair.1 == first);
        Err(Mismatch {
            side: self.layout.side,
            tp_rank: self.layout.tp_rank,
            component: part.component,
            tensor: tensor.name.clone(),
            offset: (start + first as u64).saturating_sub(tensor.offset),
            expected: scratch.expected[first],
            found: scratch.found[first],
            wrong_bytes,
            expectation,
            still_background,
        }
        .into())
    }
}

/// Two buffers that are compared, kept between comparisons.
#[derive(Default)]
struct Scratch {
    expected: Vec<u8>,
    found: Vec<u8>,
}

impl Scratch {
    fn resize(&mut self, len: usize) {
        self.expected.resize(len, 0);
        self.found.resize(len, 0);
    }
}

/// Where an item begins in its pool.
fn item_offset(tensor: &Tensor, item: i32) -> Result<ByteOffset> {
    let item = u64::try_from(item).context("an item number is negative")?;
    Ok(ByteOffset(tensor.offset + item * tensor.item_len))
}

/// Cuts `[start, end)` into pieces that fit the scratch buffers: where each begins and its length.
fn stretches(start: u64, end: u64) -> impl Iterator<Item = (u64, usize)> {
    (start..end)
        .step_by(CHECK_CHUNK_BYTES as usize)
        .map(move |offset| (offset, (end - offset).min(CHECK_CHUNK_BYTES) as usize))
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;

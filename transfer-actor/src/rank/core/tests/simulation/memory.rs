//! The pools of a rank's engine: who holds each item, and what was written into each byte.

use std::collections::BTreeMap;

use common::ids::ComponentId;
use common::schema::{RankLayout, TensorLayout};

/// The number of a request in a run.
pub type Request = usize;

/// One byte: whose source it came from, and how often it was written since its item was taken.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    source_opt: Option<Request>,
    writes: u32,
}

#[derive(Debug)]
struct Pool {
    item_len: u64,
    /// Who holds each item. One that is given up without proof keeps its holder for ever.
    holders: Vec<Option<Request>>,
    tensors: Vec<Vec<Cell>>,
}

impl Pool {
    fn new(tensors: &[TensorLayout]) -> Self {
        let item_len = tensors.first().map_or(1, |tensor| tensor.item_len.get());
        let items = |tensor: &TensorLayout| (tensor.bytes.get() / item_len) as usize;
        Self {
            item_len,
            holders: vec![None; tensors.first().map_or(0, items)],
            tensors: tensors
                .iter()
                .map(|tensor| vec![Cell::default(); tensor.bytes.get() as usize])
                .collect(),
        }
    }

    fn bytes_of(&self, item: usize) -> std::ops::Range<usize> {
        let begin = item * self.item_len as usize;
        begin..begin + self.item_len as usize
    }
}

/// Items of one request on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    pub pages: Vec<i32>,
    pub row: i32,
    pub aux: i32,
}

impl Holding {
    fn items(&self) -> impl Iterator<Item = (ComponentId, usize)> + '_ {
        let pages = self
            .pages
            .iter()
            .map(|page| (ComponentId::Kv, *page as usize));
        let others = [
            (ComponentId::State(0), self.row as usize),
            (ComponentId::Aux, self.aux as usize),
        ];
        pages.chain(others)
    }
}

/// A range of bytes on its way.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub component: ComponentId,
    pub dst_tensor: usize,
    pub src: u64,
    pub dst: u64,
    pub len: u64,
}

#[derive(Debug)]
pub struct Memory(BTreeMap<ComponentId, Pool>);

impl Memory {
    pub fn new(layout: &RankLayout) -> Self {
        Self(BTreeMap::from([
            (ComponentId::Kv, Pool::new(&layout.kv.tensors)),
            (ComponentId::State(0), Pool::new(&layout.states[0].tensors)),
            (ComponentId::Aux, Pool::new(&layout.aux)),
        ]))
    }

    /// Takes items for a request, at places that differ from one to the next.
    pub fn take(&mut self, request: Request, pages: usize, offset: usize) -> Option<Holding> {
        let free = |pool: &Pool| -> Vec<i32> {
            let count = pool.holders.len();
            let places = (0..count).map(|place| (place + offset) % count);
            let places = places.filter(|place| pool.holders[*place].is_none());
            places.map(|place| place as i32).collect()
        };
        let holding = Holding {
            pages: free(&self.0[&ComponentId::Kv])
                .into_iter()
                .take(pages)
                .collect(),
            row: *free(&self.0[&ComponentId::State(0)]).first()?,
            aux: *free(&self.0[&ComponentId::Aux]).first()?,
        };
        if holding.pages.len() < pages {
            return None;
        }
        for (component, item) in holding.items() {
            let pool = self.0.get_mut(&component)?;
            pool.holders[item] = Some(request);
            let bytes = pool.bytes_of(item);
            for tensor in &mut pool.tensors {
                tensor[bytes.clone()].fill(Cell::default());
            }
        }
        Some(holding)
    }

    /// The items are free for others.
    pub fn free(&mut self, holding: &Holding) {
        for (component, item) in holding.items() {
            if let Some(pool) = self.0.get_mut(&component) {
                pool.holders[item] = None;
            }
        }
    }

    /// Whose bytes a source range holds now.
    pub fn source(&self, range: &Range) -> Option<Request> {
        let pool = &self.0[&range.component];
        pool.holders[(range.src / pool.item_len) as usize]
    }

    /// A range lands. `holder_opt` is who announced its place, where the announcement tells.
    pub fn land(
        &mut self,
        range: &Range,
        request: Request,
        holder_opt: Option<Request>,
        source_opt: Option<Request>,
        has_succeeded: impl Fn(Request) -> bool,
    ) -> Result<(), String> {
        let component = range.component;
        let pool = self.0.get_mut(&component).ok_or("no such component")?;
        let first = (range.dst / pool.item_len) as usize;
        let last = ((range.dst + range.len - 1) / pool.item_len) as usize;
        for item in first..=last {
            let holder = pool.holders[item].ok_or_else(|| {
                format!(
                    "a write of request {request} lands in {component:?} item {item}, which is free"
                )
            })?;
            // A room's number may outlive its decode rank's patience: what the prefill sends on
            // the strength of an old announcement is for items that nobody may use any more.
            let is_passed_on = holder_opt.is_some_and(|announced| announced != holder);
            if is_passed_on || (holder != request && has_succeeded(holder)) {
                return Err(format!(
                    "a write of request {request} lands in {component:?} item {item}, which request {holder} uses"
                ));
            }
        }
        let bytes = range.dst as usize..(range.dst + range.len) as usize;
        for cell in &mut pool.tensors[range.dst_tensor][bytes] {
            cell.source_opt = source_opt;
            cell.writes += 1;
            if cell.writes > 1 {
                return Err(format!(
                    "a byte of {component:?} item {first} is written twice for request {request}"
                ));
            }
        }
        Ok(())
    }

    /// Whose bytes a range holds, if they were all written once for the same request.
    pub fn content(
        &self,
        component: ComponentId,
        tensor: u32,
        offset: u64,
        len: u64,
    ) -> Option<Request> {
        let cells = self.0.get(&component)?.tensors.get(tensor as usize)?;
        let mut cells = cells.get(offset as usize..(offset + len) as usize)?.iter();
        let request = cells.clone().next()?.source_opt?;
        let is_its = |cell: &Cell| (cell.source_opt, cell.writes) == (Some(request), 1);
        cells.all(is_its).then_some(request)
    }

    /// Every byte of these items was written once, from this request's own source.
    pub fn verify(&self, holding: &Holding, request: Request) -> Result<(), String> {
        for (component, item) in holding.items() {
            let pool = &self.0[&component];
            let cells = pool
                .tensors
                .iter()
                .flat_map(|tensor| &tensor[pool.bytes_of(item)]);
            for cell in cells {
                if (cell.source_opt, cell.writes) != (Some(request), 1) {
                    return Err(format!(
                        "request {request} succeeds, and a byte of {component:?} item {item} was written {} times, last from {:?}",
                        cell.writes, cell.source_opt
                    ));
                }
            }
        }
        Ok(())
    }
}

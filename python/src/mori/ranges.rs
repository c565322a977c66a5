//! What one transfer moves: three lists of numbers as Python has them, as runs of bytes.

use common::plan::{RunList, StridedRun};
use io_engine::{ByteLen, ByteOffset, Direction};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};

use crate::mori::numbers::{number, numbers};
use crate::mori::status::code;

/// The runs, or an error with MoRI's code and text.
pub(crate) type Runs = Result<RunList, (u32, String)>;

/// The offsets at both ends and the sizes of a transfer's ranges.
pub(crate) struct Ranges<'a, 'py> {
    pub(crate) local_offsets: &'a Bound<'py, PyAny>,
    pub(crate) remote_offsets: &'a Bound<'py, PyAny>,
    pub(crate) sizes: &'a Bound<'py, PyAny>,
}

impl<'py> Ranges<'_, 'py> {
    /// A transfer of one range.
    ///
    /// # Errors
    /// `TypeError` for what is no number of 64 bits that is not negative.
    pub(crate) fn single(&self, direction: Direction) -> PyResult<Runs> {
        let local = vec![number(self.local_offsets)?];
        let remote = vec![number(self.remote_offsets)?];
        Ok(runs(direction, local, remote, vec![number(self.sizes)?]))
    }

    /// A transfer of many; the lists may be arrays.
    ///
    /// # Errors
    /// As [`Ranges::single`].
    pub(crate) fn many(&self, direction: Direction) -> PyResult<Runs> {
        let (local, remote) = (numbers(self.local_offsets)?, numbers(self.remote_offsets)?);
        Ok(runs(direction, local, remote, numbers(self.sizes)?))
    }

    fn parts(&self) -> [&Bound<'py, PyAny>; 3] {
        [self.local_offsets, self.remote_offsets, self.sizes]
    }
}

fn runs(direction: Direction, local: Vec<u64>, remote: Vec<u64>, sizes: Vec<u64>) -> Runs {
    if local.len() != sizes.len() || remote.len() != sizes.len() {
        return Err((
            code::ERR_INVALID_ARGS,
            "lengths of local offsets, remote offsets or sizes mismatch".to_owned(),
        ));
    }
    let ranges = local.into_iter().zip(remote).zip(sizes);
    let runs = ranges.filter(|(_, size)| *size > 0);
    let runs = runs.map(|((local, remote), size)| {
        let (src, dst) = match direction {
            Direction::Write => (local, remote),
            Direction::Read => (remote, local),
        };
        StridedRun::contiguous(ByteOffset(src), ByteOffset(dst), ByteLen(size))
    });
    RunList::new(runs.collect()).map_err(|error| {
        let text = format!("length out of range: {error}");
        (code::ERR_INVALID_ARGS, text)
    })
}

/// The last lists that were read. Engines pass the same ones for tensor after tensor, which are
/// read once: a list with the same numbers, object by object, says the same again.
#[derive(Default)]
pub(crate) struct LastRanges(Option<Last>);

struct Last {
    lists: [Py<PyList>; 3],
    /// What was in them. Numbers never change, lists do.
    items: [Vec<Py<PyAny>>; 3],
    direction: Direction,
    runs: RunList,
}

/// Longer lists are read anew: what is kept must stay small.
const MOST_KEPT: usize = 1 << 16;

impl LastRanges {
    /// As [`Ranges::many`].
    ///
    /// # Errors
    /// As [`Ranges::single`].
    pub(crate) fn read(&mut self, ranges: &Ranges<'_, '_>, direction: Direction) -> PyResult<Runs> {
        let last = self.0.as_ref();
        if let Some(last) = last.filter(|last| last.says(ranges, direction)) {
            return Ok(Ok(last.runs.clone()));
        }
        let runs = ranges.many(direction)?;
        self.0 = match &runs {
            Ok(runs) => Last::keep(ranges, direction, runs),
            Err(_) => None,
        };
        Ok(runs)
    }
}

impl Last {
    fn keep(ranges: &Ranges<'_, '_>, direction: Direction, runs: &RunList) -> Option<Self> {
        let [local, remote, sizes] = ranges.parts().map(keep);
        let (local, remote, sizes) = (local?, remote?, sizes?);
        Some(Self {
            lists: [local.0, remote.0, sizes.0],
            items: [local.1, remote.1, sizes.1],
            direction,
            runs: runs.clone(),
        })
    }

    fn says(&self, ranges: &Ranges<'_, '_>, direction: Direction) -> bool {
        let parts = ranges.parts();
        let known = self.lists.iter().zip(&self.items);
        self.direction == direction
            && parts.into_iter().zip(known).all(|(part, (list, items))| {
                let list = list.bind(part.py());
                list.is(part)
                    && list.len() == items.len()
                    && list.iter().zip(items).all(|(item, known)| item.is(known))
            })
    }
}

fn keep(part: &Bound<'_, PyAny>) -> Option<(Py<PyList>, Vec<Py<PyAny>>)> {
    let list = part.cast_exact::<PyList>().ok()?;
    if list.len() > MOST_KEPT
        || list
            .iter()
            .any(|item| !item.is_exact_instance_of::<PyInt>())
    {
        return None;
    }
    let items = list.iter().map(Bound::unbind).collect();
    Some((list.clone().unbind(), items))
}

//! `FERRY_CHECKS` and `FERRY_CHECKED`: a Ferry prefill rank tells a Ferry decode rank that asked for
//! it what checksums its bytes have, and hears whether they are the same there.
//!
//! ```text
//! FERRY_CHECKS  | room | prefill unique rank | token | mode | groups
//! FERRY_CHECKED | room | decode ip | decode port | token | reason, empty when all sums are equal
//!
//! groups, one behind the other, little-endian:
//!   u32 component (0 kv, 1 aux, 2 + n the n-th state) | u32 tensors | u32 runs | u32 sums
//!   | u32 each tensor | u64 offset, u64 length, u64 stride, u32 count of each run | u64 each sum
//! ```

use crate::check::{CheckMode, CheckRun};
use crate::ids::{ByteLen, ByteOffset, ComponentId, Endpoint, Room};
use crate::wire::error::{WireError, shown};
use crate::wire::frame::{self, Frame};

/// What one prefill rank has written for a room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checks {
    /// The room.
    pub room: Room,
    /// The prefill rank.
    pub prefill_rank: i64,
    /// Names this message in its answer.
    pub token: u64,
    /// Which units have a sum.
    pub mode: CheckMode,
    /// By component, in pieces of work.
    pub groups: Vec<CheckGroup>,
}

/// Tensors that were written in the same places, and the sums of their units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckGroup {
    /// The component.
    pub component: ComponentId,
    /// Positions of the decode's tensors in the component.
    pub tensors: Vec<u32>,
    /// Where each of them was written.
    pub runs: Vec<CheckRun>,
    /// XXH3 (64 bits) of the units that have a sum, tensor by tensor.
    pub sums: Vec<u64>,
}

/// The answer to a [`Checks`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The room.
    pub room: Room,
    /// The decode rank that answers.
    pub endpoint: Endpoint,
    /// The token of the message that is answered.
    pub token: u64,
    /// What differs, and where; `None` when nothing does.
    pub mismatch: Option<String>,
}

/// Most bytes of all groups of a message: less than what a control connection takes, and more than
/// those of a million pages that each lie apart.
pub const MOST_CHECK_BYTES: usize = 32 << 20;
/// Most groups of a message. Each takes more memory than its bytes.
pub const MOST_CHECK_GROUPS: usize = 1 << 16;

const WHAT: &str = "checksums";
const HEADER_BYTES: usize = 16;
const RUN_BYTES: usize = 28;

impl Checks {
    pub(crate) const MIN_FRAMES: usize = 6;

    pub(super) fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [_checks, room, prefill_rank, token, mode, groups, ..] = frames else {
            return Err(WireError::TooFewFrames {
                message: "checks",
                need: Self::MIN_FRAMES,
                have: frames.len(),
            });
        };
        Ok(Self {
            room: frame::parse_room(room)?,
            prefill_rank: frame::parse_i64(prefill_rank, "prefill rank")?,
            token: frame::parse_u64(token, "token")?,
            mode: parse_mode(mode)?,
            groups: unpack_groups(groups)?,
        })
    }

    pub(super) fn encode(&self) -> Result<Vec<Frame>, WireError> {
        Ok(vec![
            frame::CHECKS.to_vec(),
            frame::ascii(self.room),
            frame::ascii(self.prefill_rank),
            frame::ascii(self.token),
            self.mode.name().as_bytes().to_vec(),
            pack_groups(&self.groups)?,
        ])
    }
}

impl CheckGroup {
    /// Bytes of it in a message.
    pub const fn wire_bytes(&self) -> usize {
        HEADER_BYTES
            + self.tensors.len() * size_of::<u32>()
            + self.runs.len() * RUN_BYTES
            + self.sums.len() * size_of::<u64>()
    }
}

impl Checked {
    pub(crate) const MIN_FRAMES: usize = 6;

    pub(super) fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [_checked, room, host, port, token, mismatch, ..] = frames else {
            return Err(WireError::TooFewFrames {
                message: "checked",
                need: Self::MIN_FRAMES,
                have: frames.len(),
            });
        };
        let mismatch = frame::parse_utf8(mismatch, "mismatch")?;
        Ok(Self {
            room: frame::parse_room(room)?,
            endpoint: frame::parse_endpoint(host, port)?,
            token: frame::parse_u64(token, "token")?,
            mismatch: Some(mismatch).filter(|mismatch| !mismatch.is_empty()),
        })
    }

    pub(super) fn encode(&self) -> Vec<Frame> {
        vec![
            frame::CHECKED.to_vec(),
            frame::ascii(self.room),
            self.endpoint.host.clone().into_bytes(),
            frame::ascii(self.endpoint.port),
            frame::ascii(self.token),
            self.mismatch.clone().unwrap_or_default().into_bytes(),
        ]
    }
}

/// The name of a mode.
pub(crate) fn parse_mode(bytes: &[u8]) -> Result<CheckMode, WireError> {
    let name = std::str::from_utf8(bytes).ok();
    name.and_then(CheckMode::from_name)
        .ok_or_else(|| WireError::Text {
            what: "mode of checksums",
            seen: shown(bytes),
            expected: "sampled or full",
        })
}

fn pack_groups(groups: &[CheckGroup]) -> Result<Frame, WireError> {
    let bytes = groups.iter().map(CheckGroup::wire_bytes).sum();
    check_size(bytes, groups.len())?;
    let mut frame = Frame::with_capacity(bytes);
    for group in groups {
        let length = |count: usize| {
            u32::try_from(count).map_err(|_| WireError::Number {
                what: WHAT,
                seen: count.to_string(),
                expected: "a length that fits 32 bits",
            })
        };
        let header = [
            group.component.number(),
            length(group.tensors.len())?,
            length(group.runs.len())?,
            length(group.sums.len())?,
        ];
        let numbers = header.iter().chain(&group.tensors);
        frame.extend(numbers.flat_map(|number| number.to_le_bytes()));
        for run in &group.runs {
            let places = [run.offset.get(), run.len.get(), run.stride];
            frame.extend(places.into_iter().flat_map(u64::to_le_bytes));
            frame.extend(run.count.to_le_bytes());
        }
        frame.extend(group.sums.iter().flat_map(|sum| sum.to_le_bytes()));
    }
    Ok(frame)
}

/// Refuses what nobody has to hold in memory.
fn check_size(bytes: usize, groups: usize) -> Result<(), WireError> {
    if bytes > MOST_CHECK_BYTES || groups > MOST_CHECK_GROUPS {
        return Err(WireError::Number {
            what: WHAT,
            seen: format!("{bytes} bytes in {groups} groups"),
            expected: "at most 32 MiB in 65536 groups",
        });
    }
    Ok(())
}

/// What is left of the groups.
struct Rest<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Rest<'a> {
    /// The next `count` records of `width` bytes: nothing is allocated for what is not there.
    fn records(&mut self, count: u32, width: usize) -> Result<&'a [u8], WireError> {
        let have = self.bytes.len();
        let need = (count as usize).checked_mul(width);
        let taken = need.and_then(|need| self.bytes.split_at_checked(need));
        let (records, rest) = taken.ok_or(WireError::Truncated {
            what: WHAT,
            offset: self.offset,
            need: need.unwrap_or(usize::MAX),
            have,
        })?;
        self.bytes = rest;
        self.offset += records.len();
        Ok(records)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let number = bytes.get(at..).and_then(<[u8]>::first_chunk);
    number.map_or(0, |number| u32::from_le_bytes(*number))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let number = bytes.get(at..).and_then(<[u8]>::first_chunk);
    number.map_or(0, |number| u64::from_le_bytes(*number))
}

fn unpack_groups(bytes: &[u8]) -> Result<Vec<CheckGroup>, WireError> {
    let mut rest = Rest { bytes, offset: 0 };
    let mut groups = Vec::new();
    while !rest.bytes.is_empty() {
        check_size(bytes.len(), groups.len() + 1)?;
        let header = rest.records(1, HEADER_BYTES)?;
        let [component, tensors, runs, sums] = [0, 4, 8, 12].map(|at| u32_at(header, at));
        // They would say nothing, and each would take memory.
        if [tensors, runs, sums].contains(&0) {
            return Err(WireError::Number {
                what: WHAT,
                seen: format!("{tensors} tensors, {runs} runs and {sums} sums"),
                expected: "a group that has some of each",
            });
        }
        let component = ComponentId::from_number(component).ok_or_else(|| WireError::Number {
            what: "component of checksums",
            seen: component.to_string(),
            expected: "kv, aux or the position of a state component",
        })?;
        let tensors = rest.records(tensors, size_of::<u32>())?.chunks_exact(4);
        let runs = rest.records(runs, RUN_BYTES)?.chunks_exact(RUN_BYTES);
        let sums = rest.records(sums, size_of::<u64>())?.chunks_exact(8);
        groups.push(CheckGroup {
            component,
            tensors: tensors.map(|tensor| u32_at(tensor, 0)).collect(),
            runs: runs
                .map(|run| CheckRun {
                    offset: ByteOffset(u64_at(run, 0)),
                    len: ByteLen(u64_at(run, 8)),
                    stride: u64_at(run, 16),
                    count: u32_at(run, 24),
                })
                .collect(),
            sums: sums.map(|sum| u64_at(sum, 0)).collect(),
        });
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_the_bytes_of_the_specification() {
        let group = CheckGroup {
            component: ComponentId::State(1),
            tensors: vec![7],
            runs: vec![CheckRun {
                offset: ByteOffset(0x10),
                len: ByteLen(0x20),
                stride: 0x30,
                count: 2,
            }],
            sums: vec![0x0102_0304_0506_0708],
        };
        let bytes = [
            &[3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 7, 0, 0, 0][..],
            &[0x10, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0],
            &[0x30, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0],
            &[8, 7, 6, 5, 4, 3, 2, 1],
        ]
        .concat();
        let groups = vec![group];
        assert_eq!(pack_groups(&groups).as_ref(), Ok(&bytes));
        assert_eq!(unpack_groups(&bytes), Ok(groups));
        for end in 1..bytes.len() {
            let short = unpack_groups(&bytes[..end]);
            assert!(matches!(short, Err(WireError::Truncated { .. })), "{end}");
        }
    }

    #[test]
    fn a_group_without_content_is_refused() {
        let mut bytes = [0; HEADER_BYTES];
        assert_eq!(unpack_groups(&bytes).unwrap_err().kind(), "number");
        bytes[4] = 1;
        assert_eq!(unpack_groups(&bytes).unwrap_err().kind(), "number");
        assert_eq!(unpack_groups(&[]), Ok(Vec::new()));
    }

    #[test]
    fn more_than_anybody_has_to_hold_is_refused_on_both_sides() {
        let group = |sums: usize| CheckGroup {
            component: ComponentId::Kv,
            tensors: vec![0],
            runs: vec![CheckRun {
                offset: ByteOffset(0),
                len: ByteLen(1),
                stride: 0,
                count: 1,
            }],
            sums: vec![0; sums],
        };
        let small = group(1);
        let most = vec![small.clone(); MOST_CHECK_GROUPS];
        let bytes = pack_groups(&most).expect("as many as there may be");
        assert_eq!(bytes.len(), small.wire_bytes() * most.len());
        assert_eq!(
            unpack_groups(&bytes).map(|groups| groups.len()),
            Ok(most.len())
        );
        let one_more = [&bytes[..], &bytes[..small.wire_bytes()]].concat();
        assert_eq!(unpack_groups(&one_more).unwrap_err().kind(), "number");
        assert!(pack_groups(&vec![small; MOST_CHECK_GROUPS + 1]).is_err());
        assert!(pack_groups(&[group(MOST_CHECK_BYTES / 8)]).is_err());
        assert_eq!(
            unpack_groups(&vec![0; MOST_CHECK_BYTES + 1])
                .unwrap_err()
                .kind(),
            "number"
        );
    }

    #[test]
    fn numbers_beyond_what_came_take_no_memory() {
        let mut bytes = [0xff; HEADER_BYTES];
        bytes[..4].copy_from_slice(&[0; 4]);
        let error = unpack_groups(&bytes).unwrap_err();
        assert_eq!(error.kind(), "truncated");
        bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(unpack_groups(&bytes).unwrap_err().kind(), "number");
    }
}

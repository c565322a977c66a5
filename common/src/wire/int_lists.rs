//! Lists of integers in one frame.
//!
//! Two forms: a plain array of little-endian integers, and a list of such arrays:
//!
//! ```text
//! u32 number of lists | for each: u32 length in bytes | for each: the integers
//! ```
//!
//! An empty frame is an empty list. A short tail is an error, never a shorter list.

use crate::wire::error::WireError;
use crate::wire::frame::Frame;

/// An integer that these lists carry.
pub trait ListInteger: Copy {
    /// Bytes of one integer.
    const WIDTH: usize;
    /// Appends the bytes, little-endian.
    fn put(self, frame: &mut Frame);
    /// From exactly [`ListInteger::WIDTH`] bytes, little-endian.
    fn take(bytes: &[u8]) -> Option<Self>;
}

macro_rules! list_integer {
    ($integer:ty) => {
        impl ListInteger for $integer {
            const WIDTH: usize = size_of::<Self>();
            fn put(self, frame: &mut Frame) {
                frame.extend(self.to_le_bytes());
            }
            fn take(bytes: &[u8]) -> Option<Self> {
                Some(Self::from_le_bytes(bytes.try_into().ok()?))
            }
        }
    };
}

list_integer!(i32);
list_integer!(u32);
// Releases after 0.5.23 widen item lengths to 64 bits.
list_integer!(u64);

/// Bytes of a length field.
const LENGTH_BYTES: usize = 4;

/// Writes a plain array.
pub fn pack_array<T: ListInteger>(integers: &[T]) -> Frame {
    let mut frame = Frame::with_capacity(integers.len() * T::WIDTH);
    integers.iter().for_each(|integer| integer.put(&mut frame));
    frame
}

/// Reads a plain array.
///
/// # Errors
/// [`WireError::TrailingBytes`] when the length is no multiple of the integer's width.
pub fn unpack_array<T: ListInteger>(bytes: &[u8], what: &'static str) -> Result<Vec<T>, WireError> {
    let extra = bytes.len() % T::WIDTH;
    if extra != 0 {
        return Err(WireError::TrailingBytes {
            what,
            offset: bytes.len() - extra,
            extra,
        });
    }
    Ok(bytes.chunks_exact(T::WIDTH).filter_map(T::take).collect())
}

/// Writes a list of lists; an empty list is an empty frame.
///
/// # Errors
/// [`WireError::Number`] when a list is too long for its length field.
pub fn pack_lists<T: ListInteger>(
    lists: &[Vec<T>],
    what: &'static str,
) -> Result<Frame, WireError> {
    if lists.is_empty() {
        return Ok(Frame::new());
    }
    let too_long = |length: usize| WireError::Number {
        what,
        seen: length.to_string(),
        expected: "a length that fits 32 bits",
    };
    let payload: usize = lists
        .iter()
        .map(|list| LENGTH_BYTES + list.len() * T::WIDTH)
        .sum();
    let mut frame = Frame::with_capacity(LENGTH_BYTES + payload);
    frame.extend(
        u32::try_from(lists.len())
            .map_err(|_| too_long(lists.len()))?
            .to_le_bytes(),
    );
    for list in lists {
        let length = list.len() * T::WIDTH;
        frame.extend(
            u32::try_from(length)
                .map_err(|_| too_long(length))?
                .to_le_bytes(),
        );
    }
    lists
        .iter()
        .flatten()
        .for_each(|integer| integer.put(&mut frame));
    Ok(frame)
}

/// Reads a list of lists.
///
/// # Errors
/// [`WireError::Truncated`] when bytes are missing, [`WireError::TrailingBytes`] when a list is
/// not whole or bytes stand behind the last one.
pub fn unpack_lists<T: ListInteger>(
    bytes: &[u8],
    what: &'static str,
) -> Result<Vec<Vec<T>>, WireError> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let mut offset = 0;
    let number = read_u32(bytes, &mut offset, what)?;
    // The lengths alone take four bytes each, so a count beyond that is refused before memory is
    // taken for it.
    let remaining = bytes.len() - offset;
    let need = (number as usize).saturating_mul(LENGTH_BYTES);
    if need > remaining {
        return Err(WireError::Truncated {
            what,
            offset,
            need,
            have: remaining,
        });
    }
    let mut lengths = offset;
    offset += need;
    let mut lists = Vec::with_capacity(number as usize);
    for _ in 0..number {
        let length = read_u32(bytes, &mut lengths, what)? as usize;
        let have = bytes.len() - offset;
        let list = bytes
            .get(offset..)
            .and_then(|rest| rest.get(..length))
            .ok_or(WireError::Truncated {
                what,
                offset,
                need: length,
                have,
            })?;
        lists.push(unpack_array(list, what)?);
        offset += length;
    }
    if offset != bytes.len() {
        return Err(WireError::TrailingBytes {
            what,
            offset,
            extra: bytes.len() - offset,
        });
    }
    Ok(lists)
}

fn read_u32(bytes: &[u8], offset: &mut usize, what: &'static str) -> Result<u32, WireError> {
    let field = bytes
        .get(*offset..)
        .and_then(|rest| rest.first_chunk::<LENGTH_BYTES>());
    let field = field.ok_or(WireError::Truncated {
        what,
        offset: *offset,
        need: LENGTH_BYTES,
        have: bytes.len().saturating_sub(*offset),
    })?;
    *offset += LENGTH_BYTES;
    Ok(u32::from_le_bytes(*field))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_every_shape_come_back() {
        for lists in [
            vec![],
            vec![vec![]],
            vec![vec![1, 2], vec![3]],
            vec![vec![u32::MAX]],
        ] {
            let frame = pack_lists(&lists, "test").expect("short lists fit");
            assert_eq!(unpack_lists::<u32>(&frame, "test"), Ok(lists));
        }
    }

    #[test]
    fn a_huge_count_is_refused_before_memory_is_taken() {
        let frame = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
        assert!(matches!(
            unpack_lists::<i32>(&frame, "test"),
            Err(WireError::Truncated {
                offset: 4,
                have: 4,
                ..
            })
        ));
    }

    #[test]
    fn a_short_tail_is_an_error() {
        let frame = [1, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0];
        assert_eq!(
            unpack_lists::<i32>(&frame, "test"),
            Err(WireError::Truncated {
                what: "test",
                offset: 8,
                need: 8,
                have: 4
            })
        );
    }
}

//! The fields inside frames: ASCII decimals and text.

use crate::ids::{Endpoint, Room};
use crate::wire::error::{WireError, shown};

/// First frame of REGISTER, TRANSFER_INFO and STATUS.
pub const GUARD: &[u8] = b"MoriMsgGuard";
/// First frame of ABORT.
pub const ABORT: &[u8] = b"ABORT";
/// First frame of ABORT_ACK.
pub const ABORT_ACK: &[u8] = b"ABORT_ACK";
/// First frame of AUX_DATA.
pub const AUX_DATA: &[u8] = b"AUX_DATA";
/// First frame of BOOTSTRAP.
pub const BOOTSTRAP: &[u8] = b"BOOTSTRAP";
/// First frame of HELLO, which only Ferry ranks send each other.
pub const HELLO: &[u8] = b"FERRY_HELLO";
/// First frame of the checksums that a Ferry prefill rank sends a Ferry decode rank.
pub const CHECKS: &[u8] = b"FERRY_CHECKS";
/// First frame of the answer.
pub const CHECKED: &[u8] = b"FERRY_CHECKED";
/// Second frame of REGISTER, where the other guarded messages have a room.
pub const NO_ROOM: &[u8] = b"None";
/// First bytes of the trailing frame between two Ferry ranks.
pub const FERRY_MAGIC: &[u8] = b"FRY1";

/// One frame as it is sent.
pub type Frame = Vec<u8>;

/// The digits of a number: no sign, space, underscore or other script.
const MAX_DIGITS: usize = 20;

fn digits(bytes: &[u8]) -> Option<u64> {
    let plain =
        !bytes.is_empty() && bytes.len() <= MAX_DIGITS && bytes.iter().all(u8::is_ascii_digit);
    if !plain {
        return None;
    }
    bytes.iter().try_fold(0u64, |number, digit| {
        number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
    })
}

/// A number of plain ASCII digits.
pub(crate) fn parse_u64(bytes: &[u8], what: &'static str) -> Result<u64, WireError> {
    digits(bytes).ok_or_else(|| WireError::Number {
        what,
        seen: shown(bytes),
        expected: "a number of plain ascii digits",
    })
}

/// A number of plain ASCII digits that fits 32 bits.
pub(crate) fn parse_u32(bytes: &[u8], what: &'static str) -> Result<u32, WireError> {
    digits(bytes)
        .and_then(|number| u32::try_from(number).ok())
        .ok_or_else(|| WireError::Number {
            what,
            seen: shown(bytes),
            expected: "a 32-bit number of plain ascii digits",
        })
}

/// A number of plain ASCII digits, with a minus where the field can be negative.
pub(crate) fn parse_i64(bytes: &[u8], what: &'static str) -> Result<i64, WireError> {
    let (negative, magnitude) = match bytes.split_first() {
        Some((b'-', rest)) => (true, rest),
        _ => (false, bytes),
    };
    let number = digits(magnitude).and_then(|number| {
        if negative {
            0i64.checked_sub_unsigned(number)
        } else {
            i64::try_from(number).ok()
        }
    });
    number.ok_or_else(|| WireError::Number {
        what,
        seen: shown(bytes),
        expected: "a 64-bit number of plain ascii digits",
    })
}

/// A TCP port.
pub(crate) fn parse_port(bytes: &[u8], what: &'static str) -> Result<u16, WireError> {
    digits(bytes)
        .and_then(|number| u16::try_from(number).ok())
        .ok_or_else(|| WireError::Number {
            what,
            seen: shown(bytes),
            expected: "a port",
        })
}

/// A room number, 0 to 2^63-1.
pub(crate) fn parse_room(bytes: &[u8]) -> Result<Room, WireError> {
    digits(bytes)
        .and_then(Room::new)
        .ok_or_else(|| WireError::Number {
            what: "room",
            seen: shown(bytes),
            expected: "a room number from 0 to 2^63-1",
        })
}

/// ASCII text.
pub(crate) fn parse_ascii(bytes: &[u8], what: &'static str) -> Result<String, WireError> {
    if !bytes.is_ascii() {
        return Err(WireError::Text {
            what,
            seen: shown(bytes),
            expected: "ascii text",
        });
    }
    Ok(bytes.iter().map(|byte| char::from(*byte)).collect())
}

/// UTF-8 text.
pub(crate) fn parse_utf8(bytes: &[u8], what: &'static str) -> Result<String, WireError> {
    std::str::from_utf8(bytes)
        .map(str::to_owned)
        .map_err(|_| WireError::Text {
            what,
            seen: shown(bytes),
            expected: "utf-8 text",
        })
}

/// A host and a port in two frames.
pub(crate) fn parse_endpoint(host: &[u8], port: &[u8]) -> Result<Endpoint, WireError> {
    let host = parse_ascii(host, "decode ip")?;
    if host.is_empty() {
        return Err(WireError::Text {
            what: "decode ip",
            seen: shown(b""),
            expected: "an address",
        });
    }
    Ok(Endpoint {
        host,
        port: parse_port(port, "decode port")?,
    })
}

/// A number as ASCII decimals.
pub(crate) fn ascii(number: impl std::fmt::Display) -> Frame {
    number.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_digits_are_numbers() {
        assert_eq!(parse_u64(b"0", "x"), Ok(0));
        assert_eq!(parse_u64(b"18446744073709551615", "x"), Ok(u64::MAX));
        for bad in [
            "",
            " 5",
            "5 ",
            "+5",
            "1_000",
            "-1",
            "5.0",
            "\u{0665}",
            "18446744073709551616",
            "0x5",
        ] {
            assert!(parse_u64(bad.as_bytes(), "x").is_err(), "{bad:?}");
        }
        assert_eq!(parse_i64(b"-9223372036854775808", "x"), Ok(i64::MIN));
        for bad in ["--1", "-", "-+1", "9223372036854775808"] {
            assert!(parse_i64(bad.as_bytes(), "x").is_err(), "{bad:?}");
        }
    }

    #[test]
    fn rooms_end_at_the_signed_maximum() {
        assert_eq!(
            parse_room(b"9223372036854775807").map(Room::get),
            Ok(Room::MAX)
        );
        for bad in ["9223372036854775808", "-1", "abc", ""] {
            assert!(parse_room(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }
}

//! Bytes of any kind: no panic, no memory beyond the order of the input, a typed error or a
//! message that is stable when it is written again.

use common::wire::int_lists::{unpack_array, unpack_lists};
use common::wire::{
    ControlMessage, EngineDesc, Frame, MemoryDesc, Release, WireError, decode_message,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::messages::{message, msgpack_value, register, release, trailer};

/// Serde takes at most a mebibyte on a length's word alone, for each of two levels of lists.
const TAKEN_ON_TRUST: u64 = 5 << 19;
/// A decoded element is larger than its shortest encoding, and lists double as they grow.
const BYTES_PER_INPUT_BYTE: u64 = 256;
/// Error texts quote what came, shortened.
const LONGEST_ERROR: usize = 400;

/// Runs a decoder; fails if it took more memory than the input can explain or gave an error whose
/// numbers cannot be.
fn decoded<T>(
    input_bytes: usize,
    decode: impl FnOnce() -> Result<T, WireError>,
) -> Result<Option<T>, TestCaseError> {
    let mut result = None;
    let taken = allocation_counter::measure(|| result = Some(decode()));
    let limit = TAKEN_ON_TRUST + BYTES_PER_INPUT_BYTE * input_bytes as u64;
    prop_assert!(
        taken.bytes_max <= limit,
        "{} bytes for {input_bytes}",
        taken.bytes_max
    );
    let error = match result.expect("the closure ran") {
        Ok(value) => return Ok(Some(value)),
        Err(error) => error,
    };
    match &error {
        WireError::Truncated {
            offset, need, have, ..
        } => {
            prop_assert!(have < need && offset + have <= input_bytes, "{error}");
        }
        WireError::TrailingBytes { offset, extra, .. } => {
            prop_assert!(*extra > 0 && offset + extra <= input_bytes, "{error}");
        }
        WireError::TooFewFrames { need, have, .. } => prop_assert!(have < need, "{error}"),
        _ => {}
    }
    let text = error.to_string();
    prop_assert!(
        text.len() <= LONGEST_ERROR,
        "{} bytes of error: {text}",
        text.len()
    );
    Ok(None)
}

/// What is the same for a message and for the message that comes back from its newest form.
fn settled(message: &ControlMessage) -> String {
    let mut message = message.clone();
    match &mut message {
        ControlMessage::Register(register) => register.release = Release::NEWEST,
        ControlMessage::TransferInfo(info) => {
            info.decode_prefix_len = info.decode_prefix_len.filter(|length| *length > 0);
        }
        _ => {}
    }
    // As text, since a NaN in an extra element does not equal itself.
    format!("{message:?}")
}

fn check_frames(frames: &[Frame]) -> Result<(), TestCaseError> {
    let input_bytes = frames.iter().map(Vec::len).sum::<usize>() + frames.len();
    let Some(incoming) = decoded(input_bytes, || decode_message(frames))? else {
        return Ok(());
    };
    let again = incoming.message.encode(Release::NEWEST);
    let again =
        again.map_err(|error| TestCaseError::fail(format!("cannot be written: {error}")))?;
    let reread = decode_message(&again);
    let reread = reread.map_err(|error| TestCaseError::fail(format!("cannot be read: {error}")))?;
    prop_assert_eq!(settled(&reread.message), settled(&incoming.message));
    Ok(())
}

#[derive(Clone, Debug)]
enum Damage {
    FlipBit(Index, Index, u8),
    Truncate(Index, Index),
    Insert(Index, Index, u8),
    Drop(Index),
    Double(Index),
    Keep(Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<Index>;
    prop_oneof![
        4 => (index(), index(), 0..8u8).prop_map(|(frame, at, bit)| Damage::FlipBit(frame, at, bit)),
        2 => (index(), index()).prop_map(|(frame, at)| Damage::Truncate(frame, at)),
        1 => (index(), index(), any::<u8>()).prop_map(|(frame, at, byte)| Damage::Insert(frame, at, byte)),
        1 => index().prop_map(Damage::Drop),
        1 => index().prop_map(Damage::Double),
        1 => index().prop_map(Damage::Keep),
    ]
}

impl Damage {
    fn apply(&self, frames: &mut Vec<Frame>) {
        let count = frames.len();
        if count == 0 {
            return;
        }
        match self {
            Self::FlipBit(frame, at, bit) => {
                let frame = &mut frames[frame.index(count)];
                if !frame.is_empty() {
                    let at = at.index(frame.len());
                    frame[at] ^= 1 << bit;
                }
            }
            Self::Truncate(frame, at) => {
                let frame = &mut frames[frame.index(count)];
                frame.truncate(at.index(frame.len() + 1));
            }
            Self::Insert(frame, at, byte) => {
                let frame = &mut frames[frame.index(count)];
                frame.insert(at.index(frame.len() + 1), *byte);
            }
            Self::Drop(frame) => {
                frames.remove(frame.index(count));
            }
            Self::Double(frame) => {
                let at = frame.index(count);
                frames.insert(at, frames[at].clone());
            }
            Self::Keep(frames_kept) => frames.truncate(frames_kept.index(count + 1)),
        }
    }
}

/// Bytes that msgpack's readers take for headers more often than chance would.
fn msgpack_like() -> impl Strategy<Value = Vec<u8>> {
    let headers = select(&[
        0x90u8, 0x91, 0x96, 0x9f, 0xc0, 0xc4, 0xc6, 0xc9, 0xcf, 0xd3, 0xd9, 0xdb, 0xdc, 0xdd, 0xde,
        0xdf, 0xff,
    ]);
    vec(prop_oneof![any::<u8>(), headers, 0..3u8], 0..200)
}

/// One header many times over: each level or element claims more than there is.
fn bomb() -> impl Strategy<Value = Vec<u8>> {
    const PREFIXES: &[&[u8]] = &[
        &[],
        &[0x91],
        &[0x92, 0x91],
        &[0x96, 0xa1, b'k'],
        &[0xdd, 0xff, 0xff, 0xff, 0xff],
    ];
    const HEADERS: &[&[u8]] = &[
        &[0x91],
        &[0xdd, 0xff, 0xff, 0xff, 0xff],
        &[0xdd, 0, 1, 0, 0],
        &[0xdc, 0xff, 0xff],
        &[0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0xc6, 0xff, 0xff, 0xff, 0xff],
        &[0xdb, 0xff, 0xff, 0xff, 0xff],
        &[0xc9, 0xff, 0xff, 0xff, 0xff, 1],
        &[0x91, 0xc4, 0],
        &[0xd9, 0xff],
    ];
    (select(PREFIXES), select(HEADERS), 1..2000usize)
        .prop_map(|(prefix, header, times)| [prefix, &header.repeat(times)].concat())
}

/// An array with elements of the wrong kinds, some of them long.
fn wrong_elements() -> impl Strategy<Value = Vec<u8>> {
    let long = (select(&["a", "\n", "\u{e9}"][..]), 100..2000usize)
        .prop_map(|(text, times)| rmpv::Value::from(text.repeat(times)));
    let element = prop_oneof![3 => msgpack_value(), 1 => long];
    vec(element, 0..18).prop_map(|elements| {
        let mut bytes = Vec::new();
        rmpv::encode::write_value(&mut bytes, &rmpv::Value::Array(elements))
            .expect("a vector takes every byte");
        bytes
    })
}

fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..200),
        msgpack_like(),
        bomb(),
        wrong_elements()
    ]
}

const NAMES: &[&[u8]] = &[
    b"MoriMsgGuard",
    b"ABORT",
    b"ABORT_ACK",
    b"AUX_DATA",
    b"BOOTSTRAP",
    b"None",
    b"FRY1",
];

fn any_frame() -> impl Strategy<Value = Frame> {
    let names = select(NAMES);
    prop_oneof![
        names.prop_map(<[u8]>::to_vec),
        "-?[0-9]{1,21}".prop_map(String::into_bytes),
        "[ -~]{0,12}".prop_map(String::into_bytes),
        any_bytes(),
        any_bytes().prop_map(|bytes| [b"FRY1", &bytes[..]].concat()),
    ]
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn damaged_messages_are_refused_or_stable(
        message in message(),
        release in release(),
        trailer in proptest::option::of(trailer()),
        damages in vec(damage(), 1..4),
    ) {
        let encoded = match &trailer {
            Some(trailer) => message.encode_with_trailer(release, trailer),
            None => message.encode(release),
        };
        let Ok(mut frames) = encoded else { return Ok(()) };
        for damage in &damages {
            damage.apply(&mut frames);
        }
        check_frames(&frames)?;
    }

    #[test]
    fn every_truncation_and_bit_flip_of_a_frame_is_refused_or_stable(
        message in message(),
        chosen in any::<Index>(),
    ) {
        let whole = message.encode(Release::NEWEST).expect("the newest form has every message");
        let at = chosen.index(whole.len());
        // Further on stand more descriptors of the same kind.
        for position in 0..whole[at].len().min(48) {
            let mut frames = whole.clone();
            frames[at].truncate(position);
            check_frames(&frames)?;
            for bit in 0..8 {
                let mut frames = whole.clone();
                frames[at][position] ^= 1 << bit;
                check_frames(&frames)?;
            }
        }
    }

    #[test]
    fn any_frames_are_refused_or_stable(
        kind in select(NAMES),
        rest in vec(any_frame(), 0..20),
        any in vec(any_frame(), 0..20),
    ) {
        let mut frames = vec![kind.to_vec()];
        frames.extend(rest);
        check_frames(&frames)?;
        check_frames(&any)?;
    }

    /// One frame of a good message holds anything at all.
    #[test]
    fn any_bytes_in_one_frame_are_refused_or_stable(
        message in message(),
        chosen in any::<Index>(),
        bytes in any_bytes(),
    ) {
        let mut frames = message.encode(Release::NEWEST).expect("the newest form has every message");
        let at = chosen.index(frames.len());
        frames[at] = bytes;
        check_frames(&frames)?;
    }

    /// As above; the frames that hold lists of descriptors have the richest reader.
    #[test]
    fn any_bytes_as_a_list_of_descriptors_are_refused_or_stable(
        register in register(),
        at in 5..8usize,
        bytes in any_bytes(),
    ) {
        let message = ControlMessage::Register(Box::new(register));
        let mut frames = message.encode(Release::NEWEST).expect("the newest form has every message");
        frames[at] = bytes;
        check_frames(&frames)?;
    }

    #[test]
    fn any_bytes_are_no_descriptor_or_a_stable_one(bytes in any_bytes()) {
        if let Some(desc) = decoded(bytes.len(), || EngineDesc::unpack(&bytes))? {
            let again = desc.pack().map_err(|error| TestCaseError::fail(error.to_string()))?;
            let reread = EngineDesc::unpack(&again).map(|desc| format!("{desc:?}"));
            prop_assert_eq!(reread, Ok(format!("{desc:?}")));
        }
        if let Some(desc) = decoded(bytes.len(), || MemoryDesc::unpack(&bytes))? {
            let again = desc.pack().map_err(|error| TestCaseError::fail(error.to_string()))?;
            let reread = MemoryDesc::unpack(&again).map(|desc| format!("{desc:?}"));
            prop_assert_eq!(reread, Ok(format!("{desc:?}")));
        }
    }

    #[test]
    fn any_bytes_are_no_lists_or_stable_ones(
        bytes in prop_oneof![
            vec(any::<u8>(), 0..80),
            vec(prop_oneof![0..6u32, any::<u32>()], 0..20)
                .prop_map(|words| words.into_iter().flat_map(u32::to_le_bytes).collect()),
        ],
    ) {
        decoded(bytes.len(), || unpack_array::<u64>(&bytes, "test"))?;
        decoded(bytes.len(), || unpack_lists::<u64>(&bytes, "test"))?;
        if let Some(lists) = decoded(bytes.len(), || unpack_lists::<i32>(&bytes, "test"))?
            && !lists.is_empty()
        {
            let again = common::wire::int_lists::pack_lists(&lists, "test");
            prop_assert_eq!(again, Ok(bytes), "there is one form of a list");
        }
    }
}

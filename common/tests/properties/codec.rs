//! Encode and decode are inverse.

use common::wire::int_lists::{ListInteger, pack_array, pack_lists, unpack_array, unpack_lists};
use common::wire::{ControlMessage, Release, WireError, decode_message, guess_kind};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::messages::{kept_by, message, release, trailer};

/// What decoding must give for a message in a release's form; `None` for the flat lists of 0.5.12,
/// which are refused or not told apart.
fn expected(release: Release, message: &ControlMessage) -> Option<ControlMessage> {
    let flat_lists = match message {
        ControlMessage::Register(register) => {
            !register.states.is_empty()
                || !register.state_item_lens.is_empty()
                || !register.state_dims.is_empty()
        }
        ControlMessage::TransferInfo(info) => !info.state_indices.is_empty(),
        _ => false,
    };
    (release > Release::Flat0512 || !flat_lists).then(|| kept_by(release, message))
}

fn check_lists<T>(lists: &[Vec<T>]) -> Result<(), TestCaseError>
where
    T: ListInteger + PartialEq + std::fmt::Debug,
{
    let frame = pack_lists(lists, "test").expect("short lists fit");
    prop_assert_eq!(unpack_lists::<T>(&frame, "test"), Ok(lists.to_vec()));
    for list in lists {
        prop_assert_eq!(
            &unpack_array::<T>(&pack_array(list), "test"),
            &Ok(list.clone())
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn every_message_comes_back_in_every_releases_form(
        message in message(),
        release in release(),
        trailer in proptest::option::of(trailer()),
    ) {
        let encoded = match &trailer {
            Some(trailer) => message.encode_with_trailer(release, trailer),
            None => message.encode(release),
        };
        let frames = match encoded {
            Ok(frames) => frames,
            Err(WireError::NotInRelease { .. }) => {
                prop_assert_eq!(release, Release::Flat0512);
                return Ok(());
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        prop_assert_eq!(guess_kind(&frames), message.kind());
        let decoded = decode_message(&frames);
        let Some(expected) = expected(release, &message) else {
            // A flat list with a descriptor in it is always recognised.
            if let ControlMessage::Register(register) = &message
                && let Some(only) = register.states.first().filter(|only| !only.is_empty())
            {
                let flat = WireError::FlatState { descriptors: only.len() };
                prop_assert_eq!(decoded, Err(flat));
            }
            return Ok(());
        };
        let incoming = decoded.map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(&incoming.message, &expected);
        prop_assert_eq!(incoming.trailer, trailer);
        prop_assert_eq!(incoming.ignored_frames, 0);
    }

    #[test]
    fn unknown_trailing_frames_are_ignored_and_counted(
        message in message(),
        unknown in vec(vec(any::<u8>(), 0..12), 1..=2),
        trailer in trailer(),
    ) {
        let release = Release::NEWEST;
        let mut frames = message.encode(release).expect("the newest form has every message");
        let with_trailer = message.encode_with_trailer(release, &trailer).expect("as above");
        // Only a message with all its optional frames has anything unknown behind them.
        let full = match &message {
            ControlMessage::Abort(abort) => abort.reply_to.is_some() && abort.generation.is_some(),
            ControlMessage::AbortAck(ack) => ack.generation.is_some(),
            ControlMessage::Hello(hello) => hello.checks.is_some(),
            _ => true,
        };
        prop_assume!(full && unknown.iter().all(|frame| !frame.starts_with(b"FRY1")));
        frames.extend(unknown.clone());
        let incoming = decode_message(&frames).expect("a whole message");
        prop_assert_eq!(&incoming.message, &kept_by(release, &message));
        prop_assert_eq!(incoming.ignored_frames, unknown.len());
        prop_assert_eq!(incoming.trailer, None);

        // The trailer is known by its magic, whatever stands before it.
        frames = with_trailer;
        frames.insert(frames.len() - 1, unknown[0].clone());
        let incoming = decode_message(&frames).expect("a whole message");
        prop_assert_eq!(&incoming.message, &kept_by(release, &message));
        prop_assert_eq!(incoming.ignored_frames, 1);
        prop_assert_eq!(incoming.trailer, Some(trailer));
    }

    #[test]
    fn integer_lists_come_back_in_every_width(
        narrow in vec(vec(any::<u32>(), 0..6), 0..6),
        wide in vec(vec(any::<u64>(), 0..6), 0..6),
        signed in vec(vec(any::<i32>(), 0..6), 0..6),
    ) {
        check_lists(&narrow)?;
        check_lists(&wide)?;
        check_lists(&signed)?;
    }
}

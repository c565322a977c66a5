//! Control messages: what is decoded can be sent again, and is then read as the same, but for what
//! has two forms of which one is sent.

#![no_main]

use common::wire::{ControlMessage, Release, decode_message, guess_kind};
use ferry_fuzz::frames;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let frames = frames(bytes);
    guess_kind(&frames);
    let Ok(incoming) = decode_message(&frames) else {
        return;
    };
    // Older releases have fewer fields, so only the newest keeps all.
    let Ok(encoded) = incoming.message.encode(Release::NEWEST) else {
        return;
    };
    let again = decode_message(&encoded).expect("what we send can be read");
    assert_eq!(settled(again.message), settled(incoming.message));
});

fn settled(mut message: ControlMessage) -> String {
    match &mut message {
        ControlMessage::Register(register) => register.release = Release::NEWEST,
        // SGLang reads a prefix of "0" as zero and writes zero as an empty frame, which it reads as
        // no prefix: both are a full send.
        ControlMessage::TransferInfo(info) => {
            info.decode_prefix_len = info.decode_prefix_len.filter(|length| *length > 0);
        }
        _ => {}
    }
    // As text, since a NaN in an extra element does not equal itself.
    format!("{message:?}")
}

//! Control messages: what is decoded can be sent again, and is then read as the same.

#![no_main]

use common::wire::{Release, decode_message, guess_kind};
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
    assert_eq!(again.message, incoming.message);
});

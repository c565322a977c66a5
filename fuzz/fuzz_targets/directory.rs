//! What an engine with Mooncake's face answers to whoever asks for its memory.

#![no_main]

use common::wire::EngineEntry;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(entry) = EngineEntry::unpack(bytes) {
        let packed = entry.pack().expect("what was unpacked can be packed");
        let again = EngineEntry::unpack(&packed).expect("what we send can be read");
        // As text, since a NaN in an extra element does not equal itself.
        assert_eq!(format!("{again:?}"), format!("{entry:?}"));
    }
});

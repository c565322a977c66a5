//! What a peer of the control port sends.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| zmtp::fuzzing::stream(bytes));

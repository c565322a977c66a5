//! What a peer of the tcp transport sends, from either side.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| io_engine::fuzzing::tcp_framing(bytes));

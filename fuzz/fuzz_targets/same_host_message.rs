//! What a process of this host sends over the Unix socket of an io engine, from either side.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| io_engine::fuzzing::same_host_message(bytes));

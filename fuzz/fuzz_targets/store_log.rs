//! A store's log, as a damaged disk gives it back.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| bootstrap_server::store::read_any_log(bytes));

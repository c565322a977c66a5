//! The bodies of the bootstrap server's API, its own and SGLang's question for rooms.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    bootstrap_server::admin::read_any_body(bytes);
    bootstrap_server::sglang::read_any_rooms(bytes);
});

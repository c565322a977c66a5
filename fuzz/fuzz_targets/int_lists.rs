//! Packed integers and lists of them.

#![no_main]

use common::wire::int_lists::{pack_lists, unpack_array, unpack_lists};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = unpack_array::<i32>(bytes, "fuzz");
    if let Ok(lists) = unpack_lists::<i32>(bytes, "fuzz") {
        let packed = pack_lists(&lists, "fuzz").expect("what was unpacked can be packed");
        assert_eq!(unpack_lists(&packed, "fuzz"), Ok(lists));
    }
    let _ = unpack_lists::<u32>(bytes, "fuzz");
});

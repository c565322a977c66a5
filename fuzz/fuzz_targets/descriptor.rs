//! Descriptors of engines and of memory, in every form that a release sends.

#![no_main]

use common::wire::{EngineDesc, MemoryDesc};
use io_engine::RemoteRegion;
use libfuzzer_sys::fuzz_target;

// Compared as text, since a NaN in an extra element does not equal itself.
fuzz_target!(|bytes: &[u8]| {
    if let Ok(desc) = EngineDesc::unpack(bytes) {
        let packed = desc.pack().expect("what was unpacked can be packed");
        let again = EngineDesc::unpack(&packed).expect("what we send can be read");
        assert_eq!(format!("{again:?}"), format!("{desc:?}"));
    }
    if let Ok(desc) = MemoryDesc::unpack(bytes) {
        let packed = desc.pack().expect("what was unpacked can be packed");
        let again = MemoryDesc::unpack(&packed).expect("what we send can be read");
        assert_eq!(format!("{again:?}"), format!("{desc:?}"));
        let _ = RemoteRegion::from_desc(&desc);
    }
});

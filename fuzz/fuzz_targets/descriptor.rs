//! Descriptors of engines and of memory, in every form that a release sends.

#![no_main]

use common::wire::{EngineDesc, MemoryDesc};
use io_engine::RemoteRegion;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(desc) = EngineDesc::unpack(bytes) {
        let packed = desc.pack().expect("what was unpacked can be packed");
        assert_eq!(EngineDesc::unpack(&packed).as_ref(), Ok(&desc));
    }
    if let Ok(desc) = MemoryDesc::unpack(bytes) {
        let packed = desc.pack().expect("what was unpacked can be packed");
        assert_eq!(MemoryDesc::unpack(&packed).as_ref(), Ok(&desc));
        let _ = RemoteRegion::from_desc(&desc);
    }
});

//! What a peer of the rdma transport sends on its control connection.

#![no_main]

use common::wire::rdma_control::{
    AskMemoryRegion, ControlType, HEADER_BYTES, RegEndpoint, Retire, framed, parse_header, unpack,
};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

fuzz_target!(|bytes: &[u8]| {
    let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return;
    };
    let Ok((kind, _)) = parse_header(*header) else {
        return;
    };
    // Each as what its number says, and as everything else.
    check::<RegEndpoint>(kind, body);
    check::<AskMemoryRegion>(kind, body);
    check::<Retire>(kind, body);
});

fn check<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(
    kind: ControlType,
    body: &[u8],
) {
    let Ok(message) = unpack::<T>(body) else {
        return;
    };
    let Ok(again) = framed(kind, &message) else {
        return;
    };
    let (header, body) = again.split_first_chunk::<HEADER_BYTES>().expect("a header");
    assert_eq!(parse_header(*header), Ok((kind, body.len())));
    assert_eq!(unpack::<T>(body), Ok(message));
}

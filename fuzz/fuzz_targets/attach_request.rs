//! What an engine sends over the attach socket: its tensors lie inside its pools and apart, or it
//! is refused.

#![no_main]

use libfuzzer_sys::fuzz_target;
use transfer_actor::api::AttachRequest;
use transfer_actor::service::place_layout;

fuzz_target!(|bytes: &[u8]| {
    let Ok(request) = serde_json::from_slice::<AttachRequest>(bytes) else {
        return;
    };
    if place_layout(&request.layout, &request.pools).is_err() {
        return;
    }
    let spec = &request.layout;
    let states = spec.states.iter().flat_map(|state| &state.tensors);
    for tensor in spec.kv.tensors.iter().chain(&spec.aux).chain(states) {
        if tensor.bytes > 0 {
            let end = tensor
                .offset
                .checked_add(tensor.bytes)
                .expect("it was placed");
            assert!(end <= request.pools[tensor.pool], "{tensor:?}");
        }
    }
});

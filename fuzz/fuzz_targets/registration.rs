//! A rank registers at the bootstrap server, once and again: what is refused changes nothing, and
//! what was accepted is accepted again and changes nothing then.

#![no_main]

use bootstrap_server::fields;
use bootstrap_server::registry::{Command, Registration, State};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(map) = fields::object(bytes) else {
        return;
    };
    let Ok(registration) = Registration::parse(&map, false, 0) else {
        return;
    };
    let mut state = State::default();
    let command = Command::PutRank(Box::new(registration));
    state.apply("fuzz", &command, 1).expect("the first rank");
    let registered = state.clone();
    state.apply("fuzz", &command, 2).expect("the same again");
    assert_eq!(state, registered);
});

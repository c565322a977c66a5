//! Properties over generated cases: the codec's two directions are inverse and survive any bytes,
//! plans write what they should and nothing twice, rooms never go back.
//!
//! A failing case is shrunk and printed; its seed is kept in the target folder, so the next run
//! starts with it. `PROPTEST_CASES` sets the number of cases.

mod bad_bytes;
mod codec;
mod descriptors;
mod messages;
mod plans;
mod rooms;
mod routes;

use proptest::test_runner::{Config, FileFailurePersistence};

/// Seeds of failures go to the target folder, never into the source tree.
fn config() -> Config {
    let seeds = concat!(env!("CARGO_TARGET_TMPDIR"), "/property-seeds.txt");
    Config {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(seeds))),
        ..Config::default()
    }
}

//! A rank whose thread is held up is known by it.

use std::sync::{Condvar, Mutex};

use super::*;
use crate::service::Ill;

#[actix_rt::test]
async fn a_rank_whose_thread_is_held_up_is_seen_stuck_until_it_goes_on() {
    let bootstrap = bootstrap_server();
    let held_up = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    let other = start(Role::Decode, (1, 0), &bootstrap, None).await;
    let ranks = [(3, held_up.rank.clone()), (5, other.rank.clone())];
    assert!(Ill::among(&ranks).await.is_nobody());
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let waiting = Arc::clone(&gate);
    // What runs on a rank's thread must not block; this does.
    let is_spawned = held_up.rank.spawn(async move {
        let (is_open, opened) = &*waiting;
        let is_open = is_open.lock().expect("no panic");
        let waited = opened.wait_timeout_while(is_open, DEADLINE, |is_open| !*is_open);
        drop(waited.expect("no panic"));
    });
    assert!(is_spawned);
    let ill = Ill::among(&ranks).await;
    assert_eq!((ill.stuck, ill.dead, ill.deaf), (vec![3], vec![], vec![]));
    *gate.0.lock().expect("no panic") = true;
    gate.1.notify_all();
    let deadline = Instant::now() + DEADLINE;
    while !Ill::among(&ranks).await.is_nobody() {
        assert!(Instant::now() < deadline, "it is stuck");
    }
}

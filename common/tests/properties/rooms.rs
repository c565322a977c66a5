//! A room's status never goes back, whatever is reported in whatever order.

use common::ids::{Endpoint, Generation};
use common::room::{DeferredBootstrap, advance};
use common::wire::KvPoll;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

#[derive(Clone, Copy, Debug)]
enum Step {
    Open(u64),
    Register(u16),
    Complete(u64),
    Fail,
    Close(u64, bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3u64).prop_map(Step::Open),
        (1..3u16).prop_map(Step::Register),
        (0..3u64).prop_map(Step::Complete),
        Just(Step::Fail),
        (0..3u64, any::<bool>()).prop_map(|(owner, success)| Step::Close(owner, success)),
    ]
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn a_status_never_goes_back(reports in vec(select(&KvPoll::ALL[..]), 0..40)) {
        let mut current: Option<KvPoll> = None;
        for new in reports {
            let next = advance(current, new);
            match (current, next) {
                (None, None) => prop_assert!(
                    !matches!(new, KvPoll::Bootstrapping | KvPoll::WaitingForInput),
                    "{new:?} begins a room"
                ),
                (None, Some(next)) => {
                    prop_assert_eq!(next, new);
                    prop_assert!(matches!(next, KvPoll::Bootstrapping | KvPoll::WaitingForInput));
                }
                (Some(before), None) => prop_assert!(false, "{before:?} was forgotten"),
                (Some(KvPoll::Failed), Some(next)) => prop_assert_eq!(next, KvPoll::Failed),
                (Some(before), Some(next)) if new == KvPoll::Failed => {
                    prop_assert_eq!(next, KvPoll::Failed, "after {:?}", before);
                }
                (Some(before), Some(next)) => {
                    prop_assert!(next >= before, "{before:?} became {next:?}");
                    prop_assert!(next == before || next == new, "{next:?} was not reported");
                }
            }
            current = next;
        }
    }

    /// Until a room is cleared after a success: it has one owner and one decode; the decode hears
    /// of readiness at most once and of nothing but failure after a failure.
    #[test]
    fn a_deferred_room_keeps_its_promises(steps in vec(step(), 0..30)) {
        let mut room = DeferredBootstrap::default();
        let (mut owner, mut decode, mut failed, mut readies) = (None, None, false, 0);
        for step in steps {
            let notice = match step {
                Step::Open(by) => {
                    let opened = room.open(Generation(by));
                    prop_assert_eq!(opened, owner.is_none().then_some(failed), "one owner");
                    owner = owner.or(Some(by));
                    None
                }
                Step::Register(port) => {
                    let first = *decode.get_or_insert(port);
                    let notice = room.register(Endpoint::new("decode", port));
                    if first != port {
                        let notice = notice.clone().expect("a second decode is told");
                        prop_assert!(notice.failed && notice.endpoint.port == port);
                        continue;
                    }
                    notice
                }
                Step::Complete(by) => room.complete(Generation(by)),
                Step::Fail => {
                    let notice = room.fail();
                    prop_assert_eq!(notice.is_some(), !failed && decode.is_some());
                    failed = true;
                    notice
                }
                Step::Close(by, success) => {
                    let notice = room.close(Generation(by), success);
                    if owner != Some(by) {
                        prop_assert_eq!(notice, None, "only the owner closes");
                        continue;
                    }
                    if success && !failed {
                        prop_assert_eq!(&room, &DeferredBootstrap::default());
                        prop_assert_eq!(notice.map(|notice| notice.failed), decode.map(|_| false));
                        (owner, decode, readies) = (None, None, 0);
                        continue;
                    }
                    owner = None;
                    failed = true;
                    notice
                }
            };
            if let Some(notice) = notice {
                prop_assert_eq!(Some(notice.endpoint.port), decode);
                prop_assert_eq!(notice.failed, failed);
                readies += usize::from(!notice.failed);
                prop_assert!(readies <= 1, "told twice that the prefill is ready");
            }
        }
    }
}

//! Statuses of rooms.

use common::room::advance;
use common::wire::KvPoll;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Failed is final, and otherwise the numbers only grow, whatever is reported in which order.
    #[test]
    fn a_status_never_goes_back(
        reports in prop::collection::vec(prop::sample::select(KvPoll::ALL.to_vec()), 0..40),
    ) {
        let mut current = None;
        let mut began = false;
        for report in reports {
            let next = advance(current, report);
            match (current, next) {
                (None, None) => prop_assert!(!began && !matches!(
                    report,
                    KvPoll::Bootstrapping | KvPoll::WaitingForInput
                )),
                (None, Some(first)) => {
                    prop_assert_eq!(first, report);
                    prop_assert!(!first.is_terminal(), "a room does not begin with its end");
                    began = true;
                }
                (Some(_), None) => prop_assert!(false, "a room is not forgotten by a report"),
                (Some(before), Some(after)) => {
                    let failed = after == KvPoll::Failed;
                    prop_assert!(failed || (before != KvPoll::Failed && after >= before));
                    prop_assert_eq!(failed, before == KvPoll::Failed || report == KvPoll::Failed);
                }
            }
            current = next;
        }
    }
}

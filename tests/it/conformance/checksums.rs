//! Our ranks want every byte to be compared by checksums, and the other side is SGLang's: it is
//! served as ever, sees nothing of it, and it is counted that nothing was compared.

use common::check::CheckMode;
use common::metrics::{CONTROL_MESSAGES, VERIFY_BYTES, VERIFY_UNAVAILABLE};

use super::*;

both_directions! {
    a_peer_that_cannot_compare_is_served => |direction: Direction| async move {
        let setting = Setting {
            model: Model::sharded_hybrid(),
            verify_opt: Some(CheckMode::Full),
            ..setting()
        };
        let mut cluster = Cluster::start(&setting, direction, tp(2, 1)).await;
        cluster.transfer_two(&setting, 900, 0).await;
        let ranks = cluster.prefills.iter().chain(&cluster.decodes);
        let ours: Vec<&Rank> = ranks.filter(|rank| rank.is_ours()).collect();
        assert!(!ours.is_empty());
        for rank in ours {
            let count = |name| rank.counted(name).unwrap_or_default();
            assert!(count(CONTROL_MESSAGES) > 0);
            assert_eq!(count(VERIFY_BYTES), 0);
            let expected = match direction {
                // Each decode rank, once.
                Direction::OursToSglang => 1,
                // Each Success of each prefill rank.
                _ => 4,
            };
            assert_eq!(count(VERIFY_UNAVAILABLE), expected);
        }
    };
}

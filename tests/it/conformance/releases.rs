//! The core of the matrix against one release of each row of the wire's table: its own classes are
//! the other side.

use super::*;

const ROOM: u64 = 1300;

/// Moves two requests between engines of these sizes.
async fn requests(setting: Setting, direction: Direction, sizes: Sizes, prefix_pages: u32) {
    let mut cluster = Cluster::start(&setting, direction, sizes).await;
    cluster.transfer_two(&setting, ROOM, prefix_pages).await;
}

/// Declares the core for a release; what only later ones have comes behind it.
macro_rules! release {
    ($module:ident, $release:literal $(, $extra:ident => $body:expr)*) => {
        mod $module {
            use super::*;

            /// One setting for each test; the model is the test's.
            fn setting() -> Setting {
                Setting {
                    release: $release.to_owned(),
                    ..super::super::setting()
                }
            }

            fn of(model: Model) -> Setting {
                Setting { model, ..setting() }
            }

            both_directions! {
                a_hybrid_request => |direction| requests(setting(), direction, ALONE, 0);
                tp_2_to_1 => |direction| requests(of(Model::dense()), direction, tp(2, 1), 0);
                tp_1_to_2 => |direction| requests(of(Model::dense()), direction, tp(1, 2), 0);
                latent_kv_2_to_1 => |direction| requests(of(Model::latent()), direction, tp(2, 1), 0);
                $($extra => $body;)*
            }
        }
    };
}

release!(v0_5_13, "0.5.13.post1");
release!(v0_5_18, "0.5.18",
    a_prefix_hit => |direction| requests(setting(), direction, ALONE, 2));
release!(v0_5_19, "0.5.19",
    a_prefix_hit => |direction| requests(setting(), direction, ALONE, 2));
release!(v0_5_21, "0.5.21",
    a_prefix_hit => |direction| requests(setting(), direction, ALONE, 2));
release!(v0_5_22, "0.5.22",
    a_prefix_hit => |direction| requests(setting(), direction, ALONE, 2));

/// 0.5.12 describes state in one flat list, which a prefill with several components cannot tell
/// apart: its decode is told so at once, with both forms named, and so is our engine.
#[actix_rt::test]
async fn a_flat_release_is_refused_at_once() {
    let of = |release: &str| Setting {
        release: release.to_owned(),
        model: Model::sharded_hybrid(),
        ..setting()
    };
    let (flat, nested) = (of("0.5.12"), of("0.5.13.post1"));
    if !can_run("a_flat_release_is_refused_at_once", &flat) {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = BootstrapServer::start(folder.path(), &[]);
    let address = server.address();
    let place = Place::ALONE;
    let mut prefill = Rank::start_ours(&nested, Role::Prefill, place, address).await;
    let mut decode = Rank::start_sglang(&flat, Role::Decode, place, address, false);
    let request = Request::new(&flat.model, ROOM, &[6]);
    prefill.open(ROOM, request.source.aux).await;
    decode.open(ROOM, 0).await;
    let begun = std::time::Instant::now();
    decode.announce(ROOM, &request.target, 0).await;
    let reasons = [
        decode.reach(ROOM, RoomStatus::Failed).await,
        prefill.reach(ROOM, RoomStatus::Failed).await,
    ];
    let elapsed = begun.elapsed();
    for reason in reasons {
        assert!(reason.contains("4 descriptors"), "{reason}");
        assert!(
            reason.contains("0.5.12") && reason.contains("0.5.13"),
            "{reason}"
        );
    }
    assert!(elapsed < std::time::Duration::from_secs(1), "{elapsed:?}");
    decode.check(None);
}

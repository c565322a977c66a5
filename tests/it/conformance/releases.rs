//! The core of the matrix against one release of each row of the wire's table: its own classes are
//! the other side.

use super::*;

const ROOM: u64 = 1300;

/// Moves two requests between engines of these sizes.
async fn requests(setting: Setting, direction: Direction, sizes: Sizes, prefix_pages: u32) {
    let mut cluster = Cluster::start(&setting, direction, sizes).await;
    for (number, chunks) in (0..).zip([[2, 4], [3, 1]]) {
        let mut request = Request::new(&setting.model, ROOM + number, &chunks);
        request.prefix_pages = prefix_pages;
        cluster.transfer(&request).await;
        cluster.clear(&request).await;
        for decode in &mut cluster.decodes {
            decode.prepare(None);
        }
    }
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

//! Engines of different sizes.

use super::*;
use crate::conformance::model::{Attention, State};

const ROOM: u64 = 77;

/// Moves two requests between engines of these sizes.
async fn between(model: Model, direction: Direction, sizes: Sizes) {
    let setting = Setting { model, ..setting() };
    let mut cluster = Cluster::start(&setting, direction, sizes).await;
    for (number, chunks) in (0..).zip([[2, 4], [3, 1]]) {
        let request = Request::new(&setting.model, ROOM + number, &chunks);
        cluster.transfer(&request).await;
        cluster.clear(&request).await;
        cluster
            .decodes
            .iter_mut()
            .for_each(|decode| decode.prepare(None));
    }
}

/// More ranks than KV heads: neighbours hold the same head.
fn few_heads() -> Model {
    Model {
        attention: Attention::Heads {
            heads: 2,
            head_bytes: 16,
        },
        ..Model::sharded_hybrid()
    }
}

every_direction! {
    tp_1_to_1 => |direction| between(Model::sharded_hybrid(), direction, tp(1, 1));
    tp_2_to_2 => |direction| between(Model::hybrid(), direction, tp(2, 2));
    tp_2_to_1 => |direction| between(Model::sharded_hybrid(), direction, tp(2, 1));
    tp_1_to_2 => |direction| between(Model::sharded_hybrid(), direction, tp(1, 2));
    tp_4_to_2 => |direction| between(Model::sharded_hybrid(), direction, tp(4, 2));
    tp_2_to_4 => |direction| between(Model::sharded_hybrid(), direction, tp(2, 4));
    tp_4_to_1 => |direction| between(Model::sharded_hybrid(), direction, tp(4, 1));
    tp_1_to_4 => |direction| between(Model::sharded_hybrid(), direction, tp(1, 4));
    replicated_heads_4_to_1 => |direction| between(few_heads(), direction, tp(4, 1));
    replicated_heads_1_to_4 => |direction| between(few_heads(), direction, tp(1, 4));
    latent_kv_2_to_1 => |direction| between(Model::latent(), direction, tp(2, 1));
    latent_kv_1_to_2 => |direction| between(Model::latent(), direction, tp(1, 2));
    latent_kv_to_dcp_2 => |direction| latent_to_dcp(direction, 0);
    latent_kv_to_dcp_2_behind_a_prefix => |direction| latent_to_dcp(direction, 2);
}

/// Latent pages are re-split by token over two decode context ranks.
async fn latent_to_dcp(direction: Direction, prefix_pages: u32) {
    let model = Model {
        states: Vec::new(),
        ..Model::latent()
    };
    let setting = Setting { model, ..setting() };
    let sizes = Sizes {
        decode_dcp: 2,
        ..tp(1, 2)
    };
    let mut cluster = Cluster::start(&setting, direction, sizes).await;
    let mut request = Request::new(&setting.model, ROOM, &[2, 4]);
    request.prefix_pages = prefix_pages;
    request.dcp_size = 2;
    request.target.pages.truncate(3);
    cluster.transfer(&request).await;
}

/// A tensor that every rank of a hybrid holds alike: 0.5.23's prefill refuses it across TP sizes,
/// ours elects one sender.
#[actix_rt::test]
async fn a_replicated_tensor_across_tp_is_sent_once_by_our_prefill() {
    if can_run("a_replicated_tensor_across_tp", &setting()) {
        let model = || Model {
            states: vec![Model::delta_nets(true)],
            ..Model::dense()
        };
        between(model(), Direction::OursToSglang, tp(2, 1)).await;
        between(model(), Direction::OursToSglang, tp(1, 2)).await;
    }
}

/// A window's pages of a model with K and V heads: 0.5.23 refuses them across TP sizes, our
/// prefill slices them by heads as it does KV.
#[actix_rt::test]
async fn a_window_across_tp_is_sliced_by_our_prefill() {
    let model = Model {
        states: vec![State::Window {
            layers: 2,
            heads: 4,
            head_bytes: 8,
        }],
        ..Model::dense()
    };
    if can_run("a_window_across_tp_is_sliced_by_our_prefill", &setting()) {
        between(model, Direction::OursToSglang, tp(2, 1)).await;
    }
}

//! The core of the matrix between SGLang's ranks of its backend `mooncake`, unmodified, over the
//! `mooncake` of our Python wheel.

use super::*;

const ROOM: u64 = 2100;

fn of(model: Model) -> Setting {
    Setting {
        model,
        backend: "mooncake",
        ..setting()
    }
}

fn can_run(test: &str) -> bool {
    Direction::SglangToSglang.can_run(test, &setting())
}

/// Moves two requests between engines of these sizes.
async fn requests(test: &str, setting: Setting, sizes: Sizes, prefix_pages: u32) {
    if !can_run(test) {
        return;
    }
    let mut cluster = Cluster::start(&setting, Direction::SglangToSglang, sizes).await;
    cluster.transfer_two(&setting, ROOM, prefix_pages).await;
}

/// Declares requests by their model, sizes and prefix.
macro_rules! requests {
    ($($name:ident => $setting:expr, $sizes:expr, $prefix:expr;)+) => {
        $(#[actix_rt::test]
        async fn $name() {
            requests(stringify!($name), $setting, $sizes, $prefix).await;
        })+
    };
}

requests! {
    a_hybrid_request => of(Model::hybrid()), ALONE, 0;
    a_prefix_hit => of(Model::hybrid()), ALONE, 2;
    latent_kv_with_indexer_pages => of(Model::latent()), ALONE, 0;
    latent_kv_2_to_1 => of(Model::latent()), tp(2, 1), 0;
    tp_2_to_1 => of(Model::sharded_hybrid()), tp(2, 1), 0;
    tp_1_to_2 => of(Model::sharded_hybrid()), tp(1, 2), 0;
    over_ipv6 => Setting { host: IpAddr::V6(std::net::Ipv6Addr::LOCALHOST), ..of(Model::hybrid()) }, ALONE, 0;
}

/// A failed write fails the request with both sides told; the prefill then refuses the session, as
/// is SGLang's rule.
#[actix_rt::test]
async fn a_failed_write() {
    if !can_run("a_failed_write") {
        return;
    }
    let setting = Setting {
        module_fault: "fail:memory:0",
        ..of(Model::hybrid())
    };
    let mut cluster = Cluster::start(&setting, Direction::SglangToSglang, ALONE).await;
    let request = Request::new(&setting.model, ROOM, &[2, 4]);
    cluster.open(&request).await;
    cluster.send(&request).await;
    cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
    cluster.decodes[0].reach(ROOM, RoomStatus::Failed).await;
}

#[actix_rt::test]
async fn a_decode_gives_up_before_the_transfer() {
    if !can_run("a_decode_gives_up_before_the_transfer") {
        return;
    }
    let setting = of(Model::hybrid());
    let mut cluster = Cluster::start(&setting, Direction::SglangToSglang, ALONE).await;
    let request = Request::new(&setting.model, ROOM, &[2, 4]);
    cluster.open(&request).await;
    cluster.decodes[0].abort(ROOM).await;
    cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
    cluster.decodes[0].check(None);
    let next = Request::new(&setting.model, ROOM + 1, &[2, 4]);
    cluster.transfer(&next).await;
}

/// The prefill notices by its write, the decode by its heartbeats.
#[actix_rt::test]
async fn either_side_dies() {
    if !can_run("either_side_dies") {
        return;
    }
    let setting = of(Model::hybrid());
    for prefill_dies in [false, true] {
        let mut cluster = Cluster::start(&setting, Direction::SglangToSglang, ALONE).await;
        let request = Request::new(&setting.model, ROOM, &[2, 4]);
        cluster.open(&request).await;
        cluster.send_chunk(&request, 0).await;
        let (dies, stays) = match prefill_dies {
            true => (&mut cluster.prefills[0], &mut cluster.decodes[0]),
            false => (&mut cluster.decodes[0], &mut cluster.prefills[0]),
        };
        dies.kill();
        if !prefill_dies {
            let pages = &request.source.pages[request.chunks[0]..];
            let end = ChunkEnd {
                tokens: pages.len() as u64 * u64::from(request.page_size),
                is_last: true,
            };
            stays.send(ROOM, pages, &request.source.states, end).await;
        }
        stays.reach(ROOM, RoomStatus::Failed).await;
    }
}

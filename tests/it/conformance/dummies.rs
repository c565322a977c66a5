//! Prefill ranks that have nothing to deliver (latent KV, more prefill than decode ranks) and a
//! prefix that the decode holds already. 0.5.23's decode puts the prefix's length into what it
//! tells a dummy, and 0.5.23's prefill then takes the dummy for real and reports Success before
//! any byte has moved.

use super::*;

const ROOM: u64 = 900;

both_directions! {
    a_dummy_with_a_prefix_reports_nothing => |direction| async move {
        let setting = Setting { model: Model::latent(), ..setting() };
        let mut cluster = Cluster::start(&setting, direction, tp(2, 1)).await;
        let mut request = Request::new(&setting.model, ROOM, &[4]);
        request.prefix_pages = 2;
        cluster.decodes[0].open(ROOM, 0).await;
        let prefix = request.prefix_tokens();
        cluster.decodes[0].announce(ROOM, &request.target, prefix).await;
        // The dummy finishes before the real rank has begun.
        for tp_rank in [1, 0] {
            let prefill = &mut cluster.prefills[tp_rank];
            prefill.prepare(Some((ROOM, &request.source, request.prefix_pages)));
            prefill.open(ROOM, request.source.aux).await;
            prefill.reach(ROOM, RoomStatus::WaitingForInput).await;
            prefill.begin_send(ROOM, request.source.pages.len(), request.source.aux);
            let end = ChunkEnd { tokens: 4 * u64::from(request.page_size), is_last: true };
            prefill.send(ROOM, &request.source.pages, &request.source.states, end).await;
            prefill.reach(ROOM, RoomStatus::Success).await;
            assert_eq!(prefill.statuses_sent(), usize::from(tp_rank == 0));
            if tp_rank == 1 {
                cluster.decodes[0].check(None);
                assert_ne!(cluster.decodes[0].status(ROOM).await, RoomStatus::Success);
            }
        }
        cluster.finish(&request).await;
    };
}

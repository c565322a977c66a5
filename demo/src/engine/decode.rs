//! A decode rank's part in a request: say where the state must land, wait, compare every byte.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use transfer_actor::api::{Announce, Indices, OpenRoom, RoomStatus};

use super::rank::{Rank, blocking};
use super::{Engine, Moved, Request};
use crate::args::InjectionKind;
use crate::layout::{Component, Side};

/// Serves one request on all ranks; returns once every byte that had to arrive was compared.
pub async fn serve(engine: &Engine, request: Request, bootstrap: &str) -> Result<Vec<Moved>> {
    let parts = engine
        .ranks
        .iter()
        .map(|rank| serve_on_rank(engine, rank, request, bootstrap));
    Ok(try_join_all(parts).await?.into_iter().flatten().collect())
}

async fn serve_on_rank(
    engine: &Engine,
    rank: &Arc<Rank>,
    request: Request,
    bootstrap: &str,
) -> Result<Vec<Moved>> {
    let timeout = engine.config.timeout;
    let room = request.room;
    let holding = rank.take(&engine.model, request.tokens)?;
    let open = OpenRoom {
        room,
        bootstrap: Some(bootstrap.to_owned()),
        prefill_dp_rank: None,
        aux_index: None,
    };
    rank.client.open(open).await.context("opening the room")?;
    let announce = Announce {
        kv_indices: Indices(holding.items(Component::Kv)),
        aux_index: Some(u32::try_from(holding.aux_row())?),
        state_indices: holding.state_indices(),
        decode_prefix_len: None,
    };
    rank.client
        .announce(room, announce)
        .await
        .context("announcing the room")?;
    rank.wait(room, RoomStatus::Success, timeout).await?;

    let mut moved = Vec::new();
    for component in rank.components() {
        let placed = holding.placed(component).to_vec();
        inject_delivered(
            engine,
            rank,
            component,
            placed.first().map(|place| place.item),
        )?;
        let checking = Arc::clone(rank);
        let check = move || checking.memory.check_request(component, room, &placed);
        moved.push(Moved {
            tp_rank: rank.memory.layout.tp_rank,
            component: component.label().to_owned(),
            transport: String::new(),
            bytes: blocking(check).await?,
            seconds: 0.0,
        });
    }
    rank.give_back(holding);
    rank.client.clear(room).await.context("clearing the room")?;
    Ok(moved)
}

/// Inverts one byte that has arrived, once, if the run asks for it.
fn inject_delivered(
    engine: &Engine,
    rank: &Rank,
    component: Component,
    item_opt: Option<i32>,
) -> Result<()> {
    let Some(item) = item_opt else { return Ok(()) };
    if is_due(engine, InjectionKind::FlipDelivered, component) {
        rank.memory.flip_byte(component, item)?;
    }
    Ok(())
}

/// Inverts one byte of an item that is never handed out, once, if the run asks for it.
pub fn inject_untouched(engine: &Engine) -> Result<()> {
    let (Some(injection), Some(rank)) = (engine.config.injection_opt, engine.ranks.first()) else {
        return Ok(());
    };
    if is_due(engine, InjectionKind::FlipUntouched, injection.component) {
        rank.memory.flip_byte(injection.component, 0)?;
    }
    Ok(())
}

fn is_due(engine: &Engine, kind: InjectionKind, component: Component) -> bool {
    let asked_for = engine.side == Side::Decode
        && engine
            .config
            .injection_opt
            .is_some_and(|injection| injection.kind == kind && injection.component == component);
    asked_for && !engine.injected.swap(true, Ordering::Relaxed)
}

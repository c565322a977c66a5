//! A prefill rank's part in a request: compute a chunk, send it, and go on until the last.

use std::sync::Arc;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use transfer_actor::api::{Chunk, Indices, OpenRoom, RoomStatus};

use super::rank::{Holding, Rank, blocking};
use super::{Engine, Moved, Request};
use crate::layout::Component;
use crate::memory::Placed;

/// Serves one request on all ranks; returns once the decode side has all of its state.
pub async fn serve(engine: &Engine, request: Request) -> Result<Vec<Moved>> {
    let parts = engine
        .ranks
        .iter()
        .map(|rank| serve_on_rank(engine, rank, request));
    Ok(try_join_all(parts).await?.into_iter().flatten().collect())
}

async fn serve_on_rank(engine: &Engine, rank: &Arc<Rank>, request: Request) -> Result<Vec<Moved>> {
    let timeout = engine.config.timeout;
    let room = request.room;
    let holding = rank.take(&engine.model, request.tokens)?;
    let open = OpenRoom {
        room,
        bootstrap: None,
        prefill_dp_rank: None,
        aux_index: Some(u32::try_from(holding.aux_row())?),
    };
    rank.client.open(open).await.context("opening the room")?;
    rank.wait(room, RoomStatus::WaitingForInput, timeout)
        .await?;

    let chunk_pages = engine.config.chunk_pages as usize;
    let kv = holding.placed(Component::Kv);
    let chunk_count = kv.len().div_ceil(chunk_pages);
    for (index, pages) in kv.chunks(chunk_pages).enumerate() {
        let last = index + 1 == chunk_count;
        fill(rank, room, Component::Kv, pages.to_vec()).await?;
        let mut chunk = Chunk {
            kv_indices: Indices(pages.iter().map(|page| page.item).collect()),
            last,
            ..Chunk::default()
        };
        if last {
            for component in [Component::Mamba, Component::Swa, Component::Aux] {
                let placed = holding.placed(component);
                if !placed.is_empty() {
                    fill(rank, room, component, placed.to_vec()).await?;
                }
            }
            chunk.state_indices = holding.state_indices();
        }
        rank.client
            .send_chunk(room, chunk)
            .await
            .context("sending a chunk")?;
    }

    let view = rank.wait(room, RoomStatus::Success, timeout).await?;
    finish(rank, room, holding).await?;
    let moved = |transfer: transfer_actor::api::TransferView| Moved {
        tp_rank: rank.memory.layout.tp_rank,
        component: transfer.component,
        transport: transfer.transport,
        bytes: transfer.bytes,
        seconds: transfer.seconds,
    };
    Ok(view.transfers.into_iter().map(moved).collect())
}

/// Nobody reads the pages any more: the room has ended.
async fn finish(rank: &Arc<Rank>, room: u64, holding: Holding) -> Result<()> {
    rank.give_back(holding);
    rank.client.clear(room).await.context("clearing the room")?;
    Ok(())
}

async fn fill(
    rank: &Arc<Rank>,
    room: u64,
    component: Component,
    placed: Vec<Placed>,
) -> Result<()> {
    let rank = Arc::clone(rank);
    blocking(move || rank.memory.fill(component, room, &placed)).await
}

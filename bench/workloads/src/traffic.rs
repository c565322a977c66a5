//! From a request's places to batches, as the component actors do it: one plan and one batch for
//! each component, descriptors read for each batch.

use anyhow::{Context, Result, bail};
use common::ids::ComponentId;
use common::plan::{ComponentPlan, KvChunk, PeerPlanner, PlannerOptions};
use common::schema::PeerLayout;
use common::topology::ParallelConfig;
use common::wire::{ControlMessage, MemoryDesc, Register, decode_message};
use futures::future::try_join_all;
use io_engine::{Region, RemoteRegion, Session, WriteBatch, WritePair};

use crate::side::{Placement, Regions, Side};

/// A decode rank as the prefill rank knows it.
pub struct Peer {
    /// What it registered.
    pub register: Register,
    planner: PeerPlanner,
}

impl Peer {
    /// Takes the frames of a REGISTER.
    pub fn new(frames: &[String], side: &Side) -> Result<Self> {
        let frames: Vec<Vec<u8>> = frames.iter().map(hex::decode).collect::<Result<_, _>>()?;
        let incoming = decode_message(&frames)?;
        let ControlMessage::Register(register) = incoming.message else {
            bail!("the peer sent another message than REGISTER");
        };
        let planner = PeerPlanner::new(
            &side.layout,
            &ParallelConfig::default(),
            &PeerLayout::from(&*register),
            PlannerOptions::default(),
        )?;
        Ok(Self {
            register: *register,
            planner,
        })
    }

    fn plans(&self, src: &Placement, dst: &Placement) -> Result<Vec<ComponentPlan>> {
        let mut plans = vec![self.planner.plan_kv(&KvChunk {
            src_pages: &src.pages,
            position: 0,
            dst_pages: &dst.pages,
            decode_prefix_len: 0,
            num_kv_tokens: None,
        })?];
        for index in 0..self.planner.state_count() {
            let index = u16::try_from(index)?;
            plans.push(self.planner.plan_state(index, &[src.slot], &[dst.slot])?);
        }
        let (src_row, dst_row) = (u32::try_from(src.slot)?, u32::try_from(dst.slot)?);
        plans.push(self.planner.plan_aux(src_row, dst_row)?);
        Ok(plans)
    }

    fn batch(&self, plan: &ComponentPlan, regions: &Regions) -> Result<WriteBatch> {
        let pairs = plan.pairs().map(|pair| {
            let (local, remote): (Option<&Region>, Option<&MemoryDesc>) = match plan.component {
                ComponentId::Kv => (regions.kv.get(pair.src), self.register.kv.get(pair.dst)),
                ComponentId::Aux => (regions.aux.get(pair.src), self.register.aux.get(pair.dst)),
                ComponentId::State(index) => {
                    let index = usize::from(index);
                    let locals = regions.states.get(index);
                    let remotes = self.register.states.get(index);
                    (
                        locals.and_then(|tensors| tensors.get(pair.src)),
                        remotes.and_then(|tensors| tensors.get(pair.dst)?.as_ref()),
                    )
                }
            };
            Ok(WritePair {
                local: local.context("a tensor without a region")?.clone(),
                remote: RemoteRegion::from_desc(remote.context("a tensor unknown to the peer")?)?,
                runs: pair.runs.clone(),
            })
        });
        Ok(WriteBatch {
            pairs: pairs.collect::<Result<_>>()?,
        })
    }

    /// Plans and writes one request, its components side by side; returns its bytes.
    pub async fn write(
        &self,
        session: &Session,
        regions: &Regions,
        src: &Placement,
        dst: &Placement,
    ) -> Result<u64> {
        let mut handles = Vec::new();
        for plan in self.plans(src, dst)? {
            handles.push(session.write(self.batch(&plan, regions)?));
        }
        let moved = try_join_all(handles).await?;
        Ok(moved.iter().map(|moved| moved.bytes).sum())
    }
}

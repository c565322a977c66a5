//! Between which memories a session is to move bytes, and sessions to one peer by that.

use std::borrow::Cow;

use common::wire::{EngineDesc, MemoryDesc};

use crate::engine::Engine;
use crate::error::{TransportError, TransportErrorKind};
use crate::region::{self, Region, RemoteRegion};
use crate::session::Session;
use crate::transport::TransportKind;

/// What a session is to reach. It decides which transports can serve it, so that none is chosen
/// that would fail its batches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Reach {
    /// Whether memory of this side is a device's.
    pub(crate) is_local_on_device: bool,
    /// Whether memory of the peer's is a device's.
    pub(crate) is_remote_on_device: bool,
    /// Why memory of the peer's cannot be mapped here; `None` when it can, or nothing is known.
    pub(crate) unshared_opt: Option<Cow<'static, str>>,
    /// Why network devices do not reach memory of this side.
    pub(crate) local_unreachable_opt: Option<Cow<'static, str>>,
    /// Why the peer's do not reach memory of the peer's.
    pub(crate) remote_unreachable_opt: Option<Cow<'static, str>>,
}

impl Reach {
    /// Between one region and one of a peer's.
    pub fn of(local: &Region, remote: &RemoteRegion) -> Self {
        Self {
            is_local_on_device: local.is_on_device(),
            is_remote_on_device: remote.is_known_on_device(),
            unshared_opt: remote.unshared_opt.clone(),
            local_unreachable_opt: unreachable(local),
            remote_unreachable_opt: remote.unreachable_opt.clone(),
        }
    }

    /// Between all of these regions and all memory that a peer's descriptors tell of.
    pub fn between<'a>(
        locals: impl IntoIterator<Item = &'a Region>,
        remotes: impl IntoIterator<Item = &'a MemoryDesc>,
    ) -> Self {
        let mut reach = Self::default();
        for local in locals.into_iter().filter(|local| local.is_on_device()) {
            reach.is_local_on_device = true;
            if reach.local_unreachable_opt.is_none() {
                reach.local_unreachable_opt = unreachable(local);
            }
        }
        for desc in remotes {
            let place = region::told_place(desc);
            reach.is_remote_on_device |= place.is_on_device;
            if reach.unshared_opt.is_none() {
                reach.unshared_opt = place.unshared();
            }
            if reach.remote_unreachable_opt.is_none() {
                reach.remote_unreachable_opt = place.unreachable();
            }
        }
        reach
    }

    /// A number below 32 that is the same for reaches that take the same transport.
    pub fn class(&self) -> u8 {
        u8::from(self.is_local_on_device)
            | u8::from(self.is_remote_on_device) << 1
            | u8::from(self.unshared_opt.is_some()) << 2
            | u8::from(self.local_unreachable_opt.is_some()) << 3
            | u8::from(self.remote_unreachable_opt.is_some()) << 4
    }

    /// Why a transport cannot serve it.
    pub(crate) fn check(&self, kind: TransportKind) -> Result<(), TransportError> {
        let none = |why: String| {
            Err(TransportError::quiesced(
                TransportErrorKind::NoCommonTransport,
                why,
            ))
        };
        match kind {
            TransportKind::Local | TransportKind::Tcp => Ok(()),
            TransportKind::Shm => match &self.unshared_opt {
                None => Ok(()),
                Some(why) => none(format!("the peer's memory is not shared: {why}")),
            },
            TransportKind::Cma if self.is_local_on_device => {
                none("it does not reach this engine's device memory".to_owned())
            }
            TransportKind::Cma if self.is_remote_on_device => {
                none("it does not reach the peer's device memory".to_owned())
            }
            TransportKind::Cma => Ok(()),
            TransportKind::Rdma => {
                match (&self.local_unreachable_opt, &self.remote_unreachable_opt) {
                    (Some(why), _) => none(format!("this engine's memory: {why}")),
                    (None, Some(why)) => none(format!("the peer's memory: {why}")),
                    (None, None) => Ok(()),
                }
            }
        }
    }
}

fn unreachable(local: &Region) -> Option<Cow<'static, str>> {
    local.unreachable().map(|why| Cow::Owned(why.to_owned()))
}

/// Open sessions to one peer's engine: one for each [`Reach`], the same where it takes the same
/// transport.
#[derive(Debug, Default)]
pub struct PeerSessions(Vec<(Reach, Session)>);

impl PeerSessions {
    /// The session that is open for this.
    pub fn get(&self, reach: &Reach) -> Option<&Session> {
        let found = self
            .0
            .iter()
            .find(|(known, _)| known.class() == reach.class());
        found.map(|(_, session)| session)
    }

    /// The session that is open for this, or a new one; as [`Engine::connect`].
    ///
    /// # Errors
    /// As [`Engine::connect`].
    pub fn open(
        &mut self,
        engine: &Engine,
        peer: &EngineDesc,
        reach: &Reach,
    ) -> Result<Session, TransportError> {
        if let Some(open) = self.get(reach) {
            return Ok(open.clone());
        }
        let open: Vec<Session> = self.0.iter().map(|(_, session)| session.clone()).collect();
        let session = engine.connect_for(peer, reach, &open)?;
        self.0.push((reach.clone(), session.clone()));
        Ok(session)
    }

    /// Forgets those that have died, and returns one of them.
    pub fn take_dead(&mut self) -> Option<Session> {
        let is_dead = |(_, session): &(Reach, Session)| !session.is_alive();
        let dead_opt = self.0.iter().find(|known| is_dead(known)).cloned();
        if dead_opt.is_some() {
            self.0.retain(|known| !is_dead(known));
        }
        dead_opt.map(|(_, session)| session)
    }

    /// Whether none is open.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::TAG_MAGIC;
    use common::wire::MemoryLocation;

    fn desc(location: MemoryLocation, tag: &[&str]) -> MemoryDesc {
        let mut elements = vec![TAG_MAGIC.into(), rmpv::Value::Binary(vec![0; 16])];
        elements.extend(tag.iter().map(|text| rmpv::Value::from(*text)));
        MemoryDesc {
            location,
            device_id: 0,
            extra: vec![rmpv::Value::Array(elements)],
            ..MemoryDesc::default()
        }
    }

    #[test]
    fn what_is_told_of_a_region_decides_which_transports_serve_it() {
        use TransportKind::{Cma, Local, Shm, Tcp};
        let passed_over = |descs: &[MemoryDesc]| {
            let reach = Reach::between(None, descs);
            let kinds = [Local, Shm, Cma, Tcp].into_iter();
            kinds
                .filter(|kind| reach.check(*kind).is_err())
                .collect::<Vec<_>>()
        };
        let (host, device) = (MemoryLocation::Host, MemoryLocation::Device);
        let pool = desc(host, &[]);
        let callers_own = desc(host, &["host", "no descriptor"]);
        let shared = desc(device, &["cuda"]);
        let refused = desc(device, &["hip", "no export"]);
        assert_eq!(passed_over(std::slice::from_ref(&pool)), []);
        assert_eq!(passed_over(std::slice::from_ref(&callers_own)), [Shm]);
        assert_eq!(passed_over(std::slice::from_ref(&shared)), [Cma]);
        assert_eq!(passed_over(std::slice::from_ref(&refused)), [Shm, Cma]);
        assert_eq!(passed_over(&[pool, shared, callers_own]), [Shm, Cma]);
        // Host memory under a device's name, and what an engine of another make says, which a
        // trusted pid and its addresses reach.
        assert_eq!(passed_over(&[desc(device, &["host"])]), []);
        let foreign = MemoryDesc {
            extra: Vec::new(),
            ..desc(device, &[])
        };
        assert_eq!(passed_over(&[foreign]), []);
        let far = desc(device, &["cuda", "", "no dma-buf"]);
        assert_eq!(passed_over(std::slice::from_ref(&far)), [Cma]);
        #[cfg(feature = "rdma")]
        {
            let why = Reach::between(None, &[far]).check(TransportKind::Rdma);
            assert!(why.unwrap_err().to_string().contains("no dma-buf"));
        }
        let why = Reach::between(None, &[refused]).check(Shm).unwrap_err();
        assert!(why.to_string().contains("no export"), "{why}");
    }
}

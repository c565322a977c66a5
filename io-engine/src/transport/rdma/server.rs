//! Control messages, on the side that is asked: makes queue pairs for peers and tells who may know
//! it where regions are.

use std::io::{self, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use common::wire::rdma_control::{
    AskMemoryRegion, ControlTag, ControlType, EndpointHandle, MemoryKeys, RegEndpoint, Retire,
    framed, unpack,
};
use serde::ser::Serialize;
use subtle::ConstantTimeEq;

use crate::engine::{EngineInner, Writer};
use crate::error::{TransportError, TransportErrorKind};
use crate::region::RegionKey;
use crate::transport::rdma::control::{receive, refusal};
use crate::transport::rdma::endpoint::{Endpoint, Owner, Route};
use crate::transport::rdma::rail::Rails;
use crate::transport::rdma::verbs::{Gid, Mtu};

/// Queue pairs that one connection of a Ferry engine may have.
const MOST_OF_A_CONNECTION: usize = 256;

/// Queue pairs that a connection has made; they are destroyed before it is closed, so that its end
/// proves theirs.
#[derive(Default)]
struct Accepted(Vec<(Retire, Arc<Endpoint>)>);

impl Accepted {
    /// Destroys one of them.
    fn retire(&mut self, asked: Retire) {
        self.0.retain(|(name, endpoint)| {
            let stays = *name != asked;
            if !stays {
                // The completion thread may hold it, too.
                endpoint.destroy();
            }
            stays
        });
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        self.0.iter().for_each(|(_, endpoint)| endpoint.destroy());
    }
}

/// Answers on a connection whose first byte is a control message's. A peer without a tag is
/// MoRI's, and gets one answer.
pub(crate) fn serve(
    stream: &Arc<TcpStream>,
    engine: &std::sync::Weak<EngineInner>,
    stall_timeout: Duration,
) -> io::Result<()> {
    let mut accepted = Accepted::default();
    stream.set_write_timeout(Some(stall_timeout))?;
    loop {
        // Between two messages a peer may be silent; within one it may not.
        stream.set_read_timeout(Some(stall_timeout))?;
        let (kind, body) = receive(stream)?.map_err(io::Error::other)?;
        let Some(owner) = engine.upgrade() else {
            return Ok(());
        };
        let rails = owner.rails().map_err(io::Error::other)?;
        let answerer = Answerer {
            engine: &owner,
            rails,
            stream,
        };
        let (answer, goes_on) = answerer.answer(kind, &body, &mut accepted)?;
        drop(owner);
        let mut out = &**stream;
        out.write_all(&answer)?;
        if !goes_on {
            return Ok(());
        }
        stream.set_read_timeout(None)?;
        if stream.peek(&mut [0])? == 0 {
            return Ok(());
        }
    }
}

struct Answerer<'a> {
    engine: &'a Arc<EngineInner>,
    rails: &'a Arc<Rails>,
    stream: &'a Arc<TcpStream>,
}

fn packed(kind: ControlType, body: &impl Serialize) -> io::Result<Vec<u8>> {
    framed(kind, body).map_err(io::Error::other)
}

impl Answerer<'_> {
    fn answer(
        &self,
        kind: ControlType,
        body: &[u8],
        accepted: &mut Accepted,
    ) -> io::Result<(Vec<u8>, bool)> {
        match kind {
            ControlType::RegEndpoint => {
                let asked: RegEndpoint = unpack(body).map_err(io::Error::other)?;
                let is_ferry = asked.tag_opt.is_some();
                let answer = match self.accept(&asked, accepted) {
                    Ok(answer) => answer,
                    Err(error) if is_ferry => {
                        tracing::warn!(peer = asked.engine_key, %error, "a queue pair was refused");
                        RegEndpoint {
                            engine_key: self.engine.key().to_owned(),
                            tag_opt: Some(ControlTag {
                                refusal: refusal(&error),
                                ..ControlTag::default()
                            }),
                            ..RegEndpoint::default()
                        }
                    }
                    // MoRI knows no refusals: the end of the connection is one.
                    Err(error) => return Err(io::Error::other(error)),
                };
                Ok((packed(kind, &answer)?, is_ferry))
            }
            ControlType::AskMemoryRegion => {
                let asked: AskMemoryRegion = unpack(body).map_err(io::Error::other)?;
                let (keys, tag) = self.keys(&asked).unwrap_or_else(|error| {
                    tracing::warn!(region = asked.id, %error, "a peer was not told of a region");
                    let tag = ControlTag {
                        refusal: refusal(&error),
                        ..ControlTag::default()
                    };
                    (MemoryKeys::default(), tag)
                });
                let is_ferry = asked.tag_opt.is_some();
                let answer = AskMemoryRegion {
                    keys,
                    tag_opt: is_ferry.then_some(tag),
                    ..asked
                };
                Ok((packed(kind, &answer)?, is_ferry))
            }
            ControlType::Retire => {
                let asked: Retire = unpack(body).map_err(io::Error::other)?;
                // Destroyed before the answer: nothing comes in over it any more.
                accepted.retire(asked);
                Ok((packed(kind, &asked)?, true))
            }
        }
    }

    /// Whether the peer may ask, and means this start of this engine.
    fn check_peer(&self, tag_opt: Option<&ControlTag>) -> Result<(), TransportError> {
        let token = self.rails.options.token.as_bytes();
        let told = tag_opt.map_or(&[][..], |tag| tag.token.as_slice());
        if !token.is_empty() && !bool::from(token.ct_eq(told)) {
            return Err(TransportError::quiesced(
                TransportErrorKind::PermissionDenied,
                "the rdma token is missing or wrong: set FERRY_RDMA_TOKEN to the same on both sides",
            ));
        }
        let meant = tag_opt.map_or(&[][..], |tag| tag.instance.as_slice());
        if !meant.is_empty() && meant != self.engine.instance() {
            return Err(TransportError::quiesced(
                TransportErrorKind::PermissionDenied,
                "another start of this engine is meant",
            ));
        }
        Ok(())
    }

    fn accept(
        &self,
        asked: &RegEndpoint,
        accepted: &mut Accepted,
    ) -> Result<RegEndpoint, TransportError> {
        self.check_peer(asked.tag_opt.as_ref())?;
        if accepted.0.len() >= MOST_OF_A_CONNECTION {
            return Err(TransportError::quiesced(
                TransportErrorKind::PermissionDenied,
                format!("a connection has at most {MOST_OF_A_CONNECTION} queue pairs"),
            ));
        }
        if asked.tag_opt.is_some() && accepted.0.is_empty() {
            let writer = Writer::Key(asked.engine_key.clone());
            self.engine.note_writer(self.stream, writer);
        }
        let (rails, options) = (self.rails, &self.rails.options);
        let rail = rails.asked_for(asked.rail)?;
        let address = rail.address(options)?;
        // This side posts no data over it.
        let (number, mut pair, poller) = rail.queue_pair(options, 1)?;
        let peer_mtu = asked.tag_opt.as_ref().map(|tag| tag.path_mtu);
        let mtu = match peer_mtu.filter(|code| *code > 0) {
            Some(code) => address.mtu.min(Mtu::from_code(u32::from(code))),
            None => address.mtu,
        };
        let peer_gid = Gid(asked.endpoint.gid);
        pair.connect(&rail.link(&address, &asked.endpoint, mtu, options))?;
        let queue_pair = pair.number();
        let route = Route {
            peer: asked.engine_key.clone(),
            own_gid: address.gid.gid,
            peer_gid,
        };
        let owner = Owner::Accepted {
            peer_key: asked.engine_key.clone(),
            notifications: Arc::clone(&rails.notifications),
        };
        let endpoint = Endpoint::new(rail, &poller, pair, owner, route);
        poller.adopt(number, &endpoint);
        // The end of the engine destroys all that it finds, and may have looked just before.
        if self.engine.is_shut_down() {
            endpoint.destroy();
            return Err(TransportError::closed_session());
        }
        let device = i32::try_from(rail.place).unwrap_or(0);
        match asked.tag_opt {
            Some(_) => accepted.0.push((Retire { queue_pair, device }, endpoint)),
            // MoRI says no goodbye: it stays until the engine ends, or the oldest makes room.
            None => self.engine.keep_foreign(endpoint),
        }
        Ok(RegEndpoint {
            engine_key: self.engine.key().to_owned(),
            local: asked.local,
            remote: asked.remote,
            device,
            endpoint: EndpointHandle {
                queue_pair,
                port: u32::from(rail.port()),
                lid: u32::from(address.lid),
                gid: address.gid.gid.0,
                ..EndpointHandle::default()
            },
            nic_rank: 0,
            rail: device,
            tag_opt: asked.tag_opt.as_ref().map(|_| ControlTag {
                path_mtu: mtu.code(),
                ..ControlTag::default()
            }),
        })
    }

    /// The keys of a region, for who may know them.
    fn keys(&self, asked: &AskMemoryRegion) -> Result<(MemoryKeys, ControlTag), TransportError> {
        let refused = |kind, what: &str| Err(TransportError::quiesced(kind, what.to_owned()));
        self.check_peer(asked.tag_opt.as_ref())?;
        if asked.engine_key != self.engine.key() {
            return refused(TransportErrorKind::NotRegistered, "it asked another engine");
        }
        let Some(rail) = self.rails.at(asked.device) else {
            return refused(TransportErrorKind::NotRegistered, "there is no such device");
        };
        let Some(region) = self.engine.region(asked.id) else {
            return refused(TransportErrorKind::NotRegistered, "there is no such region");
        };
        // A Ferry engine was told the key with the descriptor; MoRI's was, too, but cannot say so.
        if let Some(tag) = &asked.tag_opt {
            let told = <[u8; 16]>::try_from(tag.region_key.as_slice()).map(RegionKey);
            if !told.is_ok_and(|told| region.key().matches(&told)) {
                return refused(TransportErrorKind::BadKey, "the region's key is wrong");
            }
        }
        let registered = rail.register(&region)?;
        let tag = ControlTag {
            parts: registered.told_parts(),
            reads_back: registered.reads_back(),
            ..ControlTag::default()
        };
        if asked.tag_opt.is_none() && !tag.parts.is_empty() {
            return refused(
                TransportErrorKind::NoCommonTransport,
                "it is registered in several pieces, and a peer of another make takes one key only",
            );
        }
        Ok((registered.keys(), tag))
    }
}

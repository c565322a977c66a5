//! How an engine opens a session: which transport reaches a peer.

use std::borrow::Cow;
use std::sync::{Arc, PoisonError, Weak};

use common::wire::EngineDesc;

use super::{ENGINES, Engine, EngineInner};
use crate::error::{TransportError, TransportErrorKind};
use crate::fault::Faulty;
use crate::offer::{DeviceOffer, Offer};
use crate::reach::Reach;
use crate::region::Region;
use crate::session::Session;
use crate::transport::cma::Cma;
use crate::transport::local::Local;
#[cfg(feature = "rdma")]
use crate::transport::rdma::{PeerAddress, Rdma, SessionNames};
use crate::transport::shm::Shm;
use crate::transport::tcp::{Tcp, TcpOptions};
use crate::transport::{Transport, TransportKind};

impl Engine {
    /// Opens a session: picks the first transport in this engine's order that both sides offer and
    /// that can be proved to reach the peer. Blocks; call it from a thread that may.
    ///
    /// # Errors
    /// [`TransportErrorKind::NoCommonTransport`] when none does, with why for each.
    pub fn connect(&self, remote: &EngineDesc) -> Result<Session, TransportError> {
        let offer = Offer::of(remote)?;
        let theirs_opt = offer.and_then(|offer| offer.device_opt);
        let own_opt = self.inner().device_offer();
        let some = |why: String| (!why.is_empty()).then_some(Cow::Owned(why));
        let reach = Reach {
            is_local_on_device: own_opt.is_some(),
            is_remote_on_device: theirs_opt.is_some(),
            local_unreachable_opt: own_opt.and_then(|own| some(own.unreachable)),
            remote_unreachable_opt: theirs_opt
                .as_ref()
                .and_then(|theirs| some(theirs.unreachable.clone())),
            unshared_opt: theirs_opt.and_then(|theirs| some(theirs.unshared)),
        };
        self.connect_for(remote, &reach, &[])
    }

    /// As [`Engine::connect`], for a session that is to reach certain memory, whatever else there
    /// is on both sides. One of the `open` ones is taken where it is over the transport that would
    /// be chosen.
    ///
    /// # Errors
    /// As [`Engine::connect`].
    pub fn connect_for(
        &self,
        remote: &EngineDesc,
        reach: &Reach,
        open: &[Session],
    ) -> Result<Session, TransportError> {
        let offer = Offer::of(remote)?;
        let mut passed_over: Vec<(TransportKind, String)> = Vec::new();
        let inner = self.inner();
        for kind in &inner.config.transports {
            if let Err(error) = reach.check(*kind) {
                passed_over.push((*kind, error.to_string()));
                continue;
            }
            let is_open = |session: &&Session| session.transport() == *kind && session.is_alive();
            if let Some(session) = open.iter().find(is_open) {
                return Ok(session.clone());
            }
            match inner.open(*kind, remote, offer.as_ref()) {
                Ok(transport) => {
                    inner.adopt_session(&transport)?;
                    tracing::info!(
                        peer = remote.key,
                        transport = kind.name(),
                        passed_over = joined(&passed_over),
                        "session opened"
                    );
                    let transport = inner.with_fault(transport);
                    let timer = Arc::clone(&inner.timer);
                    return Ok(Session::new(transport, timer, &remote.key, passed_over));
                }
                Err(error) => passed_over.push((*kind, error.to_string())),
            }
        }
        Err(TransportError::quiesced(
            TransportErrorKind::NoCommonTransport,
            format!(
                "no transport reaches engine {} ({})",
                remote.key,
                joined(&passed_over)
            ),
        ))
    }
}

fn joined(passed_over: &[(TransportKind, String)]) -> String {
    let reasons = passed_over
        .iter()
        .map(|(kind, why)| format!("{kind}: {why}"));
    reasons.collect::<Vec<_>>().join("; ")
}

impl EngineInner {
    /// What peers are told of regions in device memory; `None` when there are none.
    pub(super) fn device_offer(&self) -> Option<DeviceOffer> {
        let mut regions = self.regions();
        regions.retain(Region::is_on_device);
        let mut unshared = regions
            .iter()
            .filter_map(|region| region.memory().unshared());
        let mut unreachable = regions.iter().filter_map(Region::unreachable);
        (!regions.is_empty()).then(|| DeviceOffer {
            unshared: unshared.next().unwrap_or_default(),
            unreachable: unreachable.next().unwrap_or_default().to_owned(),
        })
    }

    fn adopt_session(&self, transport: &Arc<dyn Transport>) -> Result<(), TransportError> {
        self.adopt(&self.sessions, Arc::downgrade(transport))
            .map_err(|error| {
                TransportError::quiesced(TransportErrorKind::Closed, error.to_string())
            })
    }

    fn with_fault(&self, transport: Arc<dyn Transport>) -> Arc<dyn Transport> {
        match self.config.fault_opt.clone() {
            Some(spec) => Arc::new(Faulty::new(transport, spec, Arc::clone(&self.faults))),
            None => transport,
        }
    }

    fn open(
        self: &Arc<Self>,
        kind: TransportKind,
        remote: &EngineDesc,
        offer: Option<&Offer>,
    ) -> Result<Arc<dyn Transport>, TransportError> {
        let none = |why: &str| TransportError::quiesced(TransportErrorKind::NoCommonTransport, why);
        let Some(offer) = offer else {
            return match kind {
                TransportKind::Cma if self.config.cma_trust_descriptors => {
                    self.open_trusted(remote)
                }
                TransportKind::Cma => Err(none(
                    "the peer is no ferry engine; --cma-trust-descriptors would believe its pid and addresses",
                )),
                // MoRI's sentinel for a peer without RDMA.
                TransportKind::Rdma if remote.port == 1 => {
                    Err(none("the peer's descriptor says that it has no rdma"))
                }
                TransportKind::Rdma => self.open_rdma(remote, None),
                TransportKind::Local | TransportKind::Shm | TransportKind::Tcp => {
                    Err(none("the peer is no ferry engine"))
                }
            };
        };
        // What is wrong here is told first.
        #[cfg(feature = "rdma")]
        if kind == TransportKind::Rdma {
            self.rails()?;
        }
        if !offer.has(kind) {
            return Err(none("the peer does not offer it"));
        }
        match kind {
            TransportKind::Local => {
                let engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
                let peer = engines.get(&offer.instance).and_then(Weak::upgrade);
                drop(engines);
                let peer = peer.ok_or_else(|| none("the peer is in another process"))?;
                Ok(Arc::new(Local::new(self, &peer)))
            }
            TransportKind::Shm => {
                let timeout = self.config.connect_timeout;
                let shm = Shm::connect(self, &offer.unix_name, offer.instance, timeout)?;
                Ok(Arc::new(shm))
            }
            TransportKind::Cma => {
                let timeout = self.config.connect_timeout;
                let cma = Cma::proven(self, &offer.unix_name, offer.instance, timeout)?;
                Ok(Arc::new(cma))
            }
            TransportKind::Rdma => self.open_rdma(remote, Some(offer)),
            TransportKind::Tcp => {
                let options = TcpOptions {
                    lanes: self.config.tcp_lanes,
                    connect_timeout: self.config.connect_timeout,
                    stall_timeout: self.config.stall_timeout,
                };
                let instances = (&offer.instance, &self.instance);
                let tcp = Tcp::connect(&remote.host, offer.tcp_port, instances, &options)?;
                Ok(Arc::new(tcp))
            }
        }
    }

    #[cfg(not(feature = "rdma"))]
    fn open_rdma(
        self: &Arc<Self>,
        _remote: &EngineDesc,
        _offer_opt: Option<&Offer>,
    ) -> Result<Arc<dyn Transport>, TransportError> {
        Err(TransportError::quiesced(
            TransportErrorKind::NoCommonTransport,
            "this build has no rdma",
        ))
    }

    #[cfg(feature = "rdma")]
    fn open_rdma(
        self: &Arc<Self>,
        remote: &EngineDesc,
        offer_opt: Option<&Offer>,
    ) -> Result<Arc<dyn Transport>, TransportError> {
        let rails = self.rails()?;
        let names = SessionNames {
            own_key: self.key.to_string(),
            own_instance: self.instance,
            peer_key: remote.key.clone(),
            peer_instance_opt: offer_opt.map(|offer| offer.instance),
        };
        let peer = PeerAddress {
            host: remote.host.clone(),
            port: remote.port,
            is_ferry: offer_opt.is_some(),
            timeout: self.config.rdma.control_timeout,
        };
        Ok(Arc::new(Rdma::connect(rails, names, peer)?))
    }

    fn open_trusted(
        self: &Arc<Self>,
        remote: &EngineDesc,
    ) -> Result<Arc<dyn Transport>, TransportError> {
        let pid = i32::try_from(remote.pid)
            .ok()
            .filter(|pid| *pid > 0)
            .ok_or_else(|| {
                TransportError::quiesced(
                    TransportErrorKind::Protocol,
                    format!("the peer's pid {} is no pid", remote.pid),
                )
            })?;
        tracing::warn!(
            peer = remote.key,
            pid,
            "the peer's pid and addresses are believed"
        );
        Ok(Arc::new(Cma::believed(self, pid)?))
    }
}

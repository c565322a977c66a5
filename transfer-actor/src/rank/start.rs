//! How a rank comes up: its sockets, its actor, its place at the bootstrap server.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use actix::Arbiter;
use common::ids::{Endpoint, Room};
use common::schema::{AttentionKind, RankLayout};
use common::topology::{DecodeSide, PrefillTopology, resolve_rank_mapping};
use common::wire::route::{RegistrationBody, RouteRegistration, RouteRelease};
use common::wire::{ControlMessage, MemoryDesc, Register, Release, unique_rank};
use futures::future::BoxFuture;
use io_engine::{Engine, Region};
use zmtp::{Limits as FrameLimits, PullSocket};

use crate::api::Role;
use crate::bootstrap_client::{BootstrapClient, BootstrapError};
use crate::control::{self, Outboxes};
use crate::error::ApiError;
use crate::messages::StopRank;
use crate::metrics::TransferMetrics;
use crate::rank::core::{
    DecodeCore, DecodeIdentity, PrefillCore, PrefillIdentity, PrefillTarget, RankCore,
    ResolvedPrefill,
};
use crate::rank::supervisor::Supervisor;
use crate::rank::{RankActor, RankAddress, RankBuffers, RankConfig, RankHandle};

/// How often a prefill that is not ready is asked again.
const NOT_READY_PAUSE: Duration = Duration::from_millis(250);
/// The policy under which the decode allocates only once the prefill is complete.
const PREFILL_COMPLETE: &str = "prefill_complete";

impl RankHandle {
    /// Starts a rank on a thread of its own: binds its control socket, starts its actor and, for a
    /// prefill, registers it at its bootstrap server (with back-off until the bootstrap timeout).
    ///
    /// # Errors
    /// `bad_rank` when the configuration makes no sense, `control_socket` when no port can be
    /// bound, `bootstrap_refused` or `bootstrap_unreachable`.
    pub async fn start(
        config: RankConfig,
        engine: Engine,
        buffers: RankBuffers,
        metrics: Arc<TransferMetrics>,
    ) -> Result<Self, ApiError> {
        check(&config, &buffers)?;
        let (config, buffers) = (Arc::new(config), Arc::new(buffers));
        let (started, is_started) = tokio::sync::oneshot::channel();
        let arbiter = Arbiter::new();
        let (for_actor, with_buffers, with_engine) =
            (Arc::clone(&config), Arc::clone(&buffers), engine.clone());
        let spawned = arbiter.spawn(async move {
            let outcome = bring_up(for_actor, with_engine, with_buffers, metrics);
            let failed = outcome.is_err();
            // Whoever asked may have gone; then the rank ends at once, as nobody has its address.
            let unwanted = started.send(outcome).is_err();
            if failed || unwanted {
                Arbiter::current().stop();
            }
        });
        let gone = || ApiError::new(500, "rank_gone", "the rank's thread ended before it was up");
        if !spawned {
            return Err(gone());
        }
        let (address, control, is_deaf) = is_started.await.map_err(|_| gone())??;
        let mut unregistered = Unregistered(Some(address.clone()));
        let handle = Self {
            address,
            is_deaf,
            arbiter: arbiter.handle(),
            role: config.role,
            engine_key: engine.desc().key,
            control: control.to_string(),
        };
        if let (Role::Prefill, Some(bootstrap)) = (config.role, &config.bootstrap_opt) {
            let registered = register_route(&config, &buffers, bootstrap, &control).await;
            if let Err(error) = registered {
                handle.stop("the rank could not be registered").await;
                return Err(error);
            }
        }
        unregistered.0 = None;
        Ok(handle)
    }
}

/// A rank whose start may be given up: it must not register itself for an engine that has gone.
struct Unregistered(Option<RankAddress>);

impl Drop for Unregistered {
    fn drop(&mut self) {
        let address_opt = self.0.take().and_then(|address| address.current());
        let Some(address) = address_opt else { return };
        #[allow(
            clippy::disallowed_methods,
            reason = "a lifecycle notice, sent once, and a drop cannot wait"
        )]
        address.do_send(StopRank(
            "its engine has gone before it was registered".to_owned(),
        ));
    }
}

fn check(config: &RankConfig, buffers: &RankBuffers) -> Result<(), ApiError> {
    let refused = |message: String| Err(ApiError::new(400, "bad_rank", message));
    if let Err(error) = config.parallel.validate() {
        return refused(error.to_string());
    }
    if config.parallel.cp_size != 1 {
        return refused(format!(
            "context parallel size {}: only 1 is served; prefill ranks send whole requests",
            config.parallel.cp_size
        ));
    }
    let policy = &config.engine.decode_allocation_policy;
    if !["early", PREFILL_COMPLETE].contains(&policy.as_str()) {
        return refused(format!(
            "decode allocation policy {policy:?}: there are early and {PREFILL_COMPLETE}"
        ));
    }
    let release = match route_release(config) {
        Ok(release) => release,
        Err(error) => return refused(error),
    };
    if policy == PREFILL_COMPLETE && release < RouteRelease::V0522 {
        return refused(format!(
            "decode allocation policy {policy}: sglang {} does not have it, 0.5.22 does",
            release.name()
        ));
    }
    let sizes = [
        config.parallel.tp_size,
        config.parallel.cp_size,
        config.parallel.pp_size,
    ];
    if config.role == Role::Prefill && policy == PREFILL_COMPLETE && sizes != [1, 1, 1] {
        return refused(format!(
            "{PREFILL_COMPLETE} needs tp, cp and pp of 1, they are {sizes:?}"
        ));
    }
    if buffers.kv.iter().any(Option::is_none) {
        return refused("every kv tensor needs a buffer".to_owned());
    }
    if config.role == Role::Prefill && config.bootstrap_opt.is_none() {
        return refused("a prefill rank needs its bootstrap server (host:port)".to_owned());
    }
    Ok(())
}

/// Which fields a prefill registers.
fn route_release(config: &RankConfig) -> Result<RouteRelease, String> {
    match &config.engine.sglang_release {
        None => Ok(RouteRelease::NEWEST),
        Some(version) => version.parse(),
    }
}

type Started = (RankAddress, Endpoint, Arc<AtomicBool>);

/// Runs on the rank's own thread.
fn bring_up(
    config: Arc<RankConfig>,
    engine: Engine,
    buffers: Arc<RankBuffers>,
    metrics: Arc<TransferMetrics>,
) -> Result<Started, ApiError> {
    let limits = FrameLimits {
        silence_timeout: config.push.silence_timeout,
        ..FrameLimits::default()
    };
    let bind = config.control_bind;
    let ports = config.control_ports_opt.clone().unwrap_or(0..=0);
    let socket = PullSocket::bind_range(bind, ports.clone(), limits).map_err(|error| {
        let message = match &config.control_ports_opt {
            Some(ports) => format!(
                "no control socket on {bind}, ports {} to {}, all tried: {error}; widen --control-ports, one port serves one rank",
                ports.start(),
                ports.end()
            ),
            None => format!("no control socket on {bind}: {error}"),
        };
        ApiError::new(503, "control_socket", message)
    })?;
    let control = Endpoint::new(config.advertise_host.clone(), socket.local_addr().port());
    let resolver = Resolver::new(&config, &buffers.layout);
    let (core, register_opt) = match config.role {
        Role::Prefill => {
            let unique = config.parallel.unique_rank();
            let unique =
                unique.map_err(|error| ApiError::new(400, "bad_rank", error.to_string()))?;
            let identity = PrefillIdentity {
                layout: buffers.layout.clone(),
                parallel: config.parallel,
                planner: config.planner,
                unique_rank: i64::from(unique.get()),
                is_deferred: config.engine.decode_allocation_policy == PREFILL_COMPLETE,
                contact: (control.clone(), engine.desc()),
                checks_opt: config.verify_opt,
            };
            let core = PrefillCore::new(identity, config.timeouts, config.limits);
            (RankCore::Prefill(Box::new(core)), None)
        }
        Role::Decode => {
            let register = register_of(&config, &engine, &buffers, &control);
            let identity = DecodeIdentity {
                is_only_way_in: io_engine::is_reached_by_tcp_only,
                layout: buffers.layout.clone(),
                register: register.clone(),
                allocation_policy: config.engine.decode_allocation_policy.clone(),
                first_generation: first_generation(),
                checks_opt: config.verify_opt,
            };
            let core = DecodeCore::new(identity, config.timeouts, config.limits);
            (RankCore::Decode(Box::new(core)), Some(register))
        }
    };
    let endpoint = control.clone();
    let (supervisor, address, successors) = Supervisor::new();
    let (outboxes, endings) = Outboxes::new(config.push);
    let actor = RankActor::new(
        config,
        core,
        engine,
        buffers,
        metrics,
        resolver,
        register_opt,
        endpoint,
        outboxes,
        (address.clone(), successors),
    );
    supervisor.start(actor);
    let is_deaf = Arc::new(AtomicBool::new(false));
    actix::spawn(control::serve(
        socket,
        address.clone(),
        Arc::clone(&is_deaf),
    ));
    actix::spawn(control::endings(endings, address.clone()));
    Ok((address, control, is_deaf))
}

/// Where a decode rank's generations begin: two lives of a rank share one in a million times, and
/// all fit the numbers that JSON carries exactly.
fn first_generation() -> u64 {
    const LIFE_BITS: u32 = 20;
    let life = getrandom::u32().unwrap_or_else(|_| std::process::id());
    u64::from(life >> (u32::BITS - LIFE_BITS)) << u32::BITS
}

/// What a decode rank tells each prefill rank once.
fn register_of(
    config: &RankConfig,
    engine: &Engine,
    buffers: &RankBuffers,
    control: &Endpoint,
) -> Register {
    let layout = &buffers.layout;
    let descs = |regions: &[Option<Region>]| -> Vec<MemoryDesc> {
        regions.iter().flatten().map(Region::desc).collect()
    };
    let states = buffers.states.iter();
    let narrow = |length: u64| u32::try_from(length).unwrap_or(u32::MAX);
    Register {
        endpoint: control.clone(),
        engine: engine.desc(),
        kv: descs(&buffers.kv),
        aux: descs(&buffers.aux),
        states: states
            .map(|tensors| {
                tensors
                    .iter()
                    .map(|region| region.as_ref().map(Region::desc))
                    .collect()
            })
            .collect(),
        gpu_id: 0,
        tp_size: config.parallel.tp_size,
        engine_rank: config.parallel.tp_rank,
        kv_item_len: layout
            .kv
            .tensors
            .first()
            .map_or(0, |tensor| tensor.item_len.get()),
        state_item_lens: layout
            .states
            .iter()
            .map(|state| {
                state
                    .tensors
                    .iter()
                    .map(|tensor| narrow(tensor.item_len.get()))
                    .collect()
            })
            .collect(),
        state_dims: layout
            .states
            .iter()
            .map(|state| state.dims.clone())
            .collect(),
        dcp_size: config.parallel.dcp_size,
        dcp_rank: config.parallel.dcp_rank,
        state_layer_ids: layout
            .states
            .iter()
            .map(|state| state.layer_ids.clone())
            .collect(),
        kv_layer_ids: layout.kv.layer_ids.clone(),
        release: Release::NEWEST,
    }
}

async fn register_route(
    config: &RankConfig,
    buffers: &RankBuffers,
    bootstrap: &str,
    control: &Endpoint,
) -> Result<(), ApiError> {
    let parallel = &config.parallel;
    let registration = RouteRegistration {
        attn_tp_size: parallel.tp_size,
        attn_tp_rank: parallel.tp_rank,
        attn_cp_size: parallel.cp_size,
        attn_cp_rank: parallel.cp_rank,
        attn_dp_size: parallel.dp_size,
        attn_dp_rank: parallel.dp_rank,
        pp_size: parallel.pp_size,
        pp_rank: parallel.pp_rank,
        system_dp_size: 1,
        system_dp_rank: 0,
        rank_ip: control.host.clone(),
        rank_port: control.port,
        page_size: buffers.layout.page_size,
        kv_cache_dtype: config.engine.kv_cache_dtype.clone(),
        kv_layout: config.engine.kv_layout.clone(),
        dsv41_spec_layout: None,
        load_balance_method: config.engine.load_balance_method.clone(),
        enable_dsa_cache_layer_split: false,
        enable_kv_cache_sharding: false,
        prefill_http_port: config.engine.prefill_http_port,
        decode_allocation_policy: config.engine.decode_allocation_policy.clone(),
    };
    let release = route_release(config).map_err(|error| ApiError::new(400, "bad_rank", error))?;
    let client =
        BootstrapClient::new(bootstrap).map_err(|error| bootstrap_error(bootstrap, &error))?;
    client
        .register_route(&registration, release, config.timeouts.bootstrap)
        .await
        .map_err(|error| bootstrap_error(bootstrap, &error))
}

fn bootstrap_error(bootstrap: &str, error: &BootstrapError) -> ApiError {
    let code = match error {
        BootstrapError::Refused { .. } => "bootstrap_refused",
        _ => "bootstrap_unreachable",
    };
    ApiError::new(502, code, format!("bootstrap server {bootstrap}: {error}"))
}

/// Finds prefill engines for a decode rank.
#[derive(Clone)]
pub(crate) struct Resolver {
    page_size: u32,
    kv_cache_dtype: String,
    timeout: Duration,
    side: DecodeSide,
}

impl Resolver {
    fn new(config: &RankConfig, layout: &RankLayout) -> Self {
        Self {
            page_size: layout.page_size,
            kv_cache_dtype: config.engine.kv_cache_dtype.clone(),
            timeout: config.timeouts.bootstrap,
            side: DecodeSide {
                attn_tp_size: config.parallel.tp_size,
                engine_rank: config.parallel.tp_rank,
                attn_cp_size: config.parallel.cp_size,
                pp_size: config.parallel.pp_size,
                pp_rank: config.parallel.pp_rank,
                is_mla: layout.kv.attention == AttentionKind::Mla,
                all_cp_ranks: false,
            },
        }
    }

    /// Asks a bootstrap server until it is ready or the bootstrap timeout is over.
    pub(crate) fn resolve(
        &self,
        room: Room,
        bootstrap: String,
        dp_rank_opt: Option<u32>,
    ) -> BoxFuture<'static, Result<ResolvedPrefill, String>> {
        let resolver = self.clone();
        Box::pin(async move {
            let within = tokio::time::timeout(
                resolver.timeout,
                resolver.resolve_within(room, &bootstrap, dp_rank_opt),
            );
            within.await.unwrap_or_else(|_| {
                let seconds = resolver.timeout.as_secs();
                Err(format!(
                    "bootstrap server {bootstrap} was not ready within {seconds} s"
                ))
            })
        })
    }

    async fn resolve_within(
        &self,
        room: Room,
        bootstrap: &str,
        dp_rank_opt: Option<u32>,
    ) -> Result<ResolvedPrefill, String> {
        let said = |error: BootstrapError| format!("bootstrap server {bootstrap}: {error}");
        let client = BootstrapClient::new(bootstrap).map_err(said)?;
        let reply = loop {
            match client.topology().await {
                Ok(reply) => break reply,
                Err(error @ BootstrapError::Refused { .. }) => return Err(said(error)),
                // It may be starting, or wait for its ranks.
                Err(_) => tokio::time::sleep(NOT_READY_PAUSE).await,
            }
        };
        let topology = PrefillTopology::try_from(&reply).map_err(|error| error.to_string())?;
        self.compare(&topology)?;
        let mapping =
            resolve_rank_mapping(&topology, &self.side).map_err(|error| error.to_string())?;
        let is_only_dp_rank = topology.dp_size == 1;
        let dp_rank = match dp_rank_opt {
            Some(dp_rank) => dp_rank,
            None if is_only_dp_rank => 0,
            None if topology.follow_bootstrap_room => {
                // Below the size, which is 32 bits.
                (room.get() % u64::from(topology.dp_size)) as u32
            }
            None => loop {
                let known = client.query_dp_ranks(&[room.get()]).await.map_err(said)?;
                if let Some(dp_rank) = known.get(&room.get()) {
                    break *dp_rank;
                }
                tokio::time::sleep(NOT_READY_PAUSE).await;
            },
        };
        let mut targets = Vec::new();
        for cp_rank in &mapping.target_cp_ranks {
            for tp_rank in &mapping.target_tp_ranks {
                for pp_rank in &mapping.target_pp_ranks {
                    let address = client.rank_address(dp_rank, *cp_rank, *tp_rank, *pp_rank);
                    let address = address.await.map_err(said)?;
                    let unique = unique_rank(
                        *tp_rank,
                        *pp_rank,
                        topology.pp_size,
                        *cp_rank,
                        topology.attn_cp_size,
                    );
                    let unique = unique.ok_or("the prefill's rank numbers do not fit 32 bits")?;
                    targets.push(PrefillTarget {
                        endpoint: Endpoint::new(address.rank_ip, address.rank_port),
                        is_dummy: mapping.is_dummy(self.side.is_mla, *tp_rank),
                        unique_rank: i64::from(unique.get()),
                        // Its answer to our REGISTER tells.
                        is_ferry: false,
                    });
                }
            }
        }
        Ok(ResolvedPrefill {
            bootstrap: bootstrap.to_owned(),
            dp_rank,
            is_only_dp_rank,
            mapping,
            targets,
            decode_allocation_policy: topology.decode_allocation_policy,
        })
    }

    /// What a REGISTER does not carry is compared here: pages of another size or type would land
    /// as garbage.
    fn compare(&self, topology: &PrefillTopology) -> Result<(), String> {
        if let Some(page_size) = topology.page_size.filter(|size| *size != self.page_size) {
            return Err(format!(
                "page size is {page_size} at the prefill and {} here",
                self.page_size
            ));
        }
        let other = topology
            .kv_cache_dtype
            .as_ref()
            .filter(|dtype| **dtype != self.kv_cache_dtype);
        if let Some(dtype) = other {
            return Err(format!(
                "kv cache dtype is {dtype} at the prefill and {} here",
                self.kv_cache_dtype
            ));
        }
        Ok(())
    }
}

/// Tells a prefill's bootstrap server of a decode rank.
pub(crate) fn publish_registration(
    bootstrap: String,
    register: &Register,
    layout: &RankLayout,
) -> BoxFuture<'static, ()> {
    let key = register.engine.key.clone();
    let frames = ControlMessage::Register(Box::new(register.clone())).encode(Release::NEWEST);
    let body = frames.map(|frames| RegistrationBody {
        role: Role::Decode.name().to_owned(),
        instance: register.endpoint.to_string(),
        rank: register.engine_rank,
        register_frames: frames.iter().map(hex::encode).collect(),
        component_types: layout
            .states
            .iter()
            .map(|state| state.kind.name().to_owned())
            .collect(),
    });
    Box::pin(async move {
        let published = async {
            let body = body.map_err(|error| error.to_string())?;
            let client = BootstrapClient::new(&bootstrap).map_err(|error| error.to_string())?;
            client
                .put_registration(&key, &body)
                .await
                .map_err(|error| error.to_string())
        };
        if let Err(error) = published.await {
            // A server of SGLang's own has no such route; nothing depends on it.
            tracing::info!(bootstrap, error, "the registration was not published");
        }
    })
}

//! The attach socket: one connection for each rank, its pools beside the first bytes.

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use common::ids::{ByteLen, ByteOffset};
use common::schema::{RankLayout, TensorLayout};
use common::topology::ParallelConfig;
use io_engine::{Engine, EngineConfig, Memory, Region};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use crate::api::{AttachReply, AttachRequest, ParallelSpec, Role, TensorSpec};
use crate::client::MAX_POOLS;
use crate::rank::{RankBuffers, RankConfig, RankHandle};
use crate::service::Service;
use crate::service::layout::place_layout;

/// Bytes of one request at most: 16,384 tensors take some 2 MB.
const MAX_REQUEST_BYTES: u32 = 16 << 20;
/// Time for an engine to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for writes into a rank's memory to drain before it is let go.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(5);
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts engines for as long as the service runs.
pub(super) async fn accept(service: Arc<Service>, listener: UnixListener) {
    let listener = listener
        .set_nonblocking(true)
        .and_then(|()| tokio::net::UnixListener::from_std(listener));
    let listener = match listener {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "the attach socket cannot be served"),
    };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(engine(Arc::clone(&service), stream));
            }
            Err(error) => {
                tracing::warn!(%error, "an engine could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// One engine's connection, from its request to its end.
async fn engine(service: Arc<Service>, stream: tokio::net::UnixStream) {
    let stream = match stream.into_std().and_then(|stream| {
        stream.set_nonblocking(false)?;
        Ok(stream)
    }) {
        Ok(stream) => stream,
        Err(error) => return tracing::warn!(%error, "an engine's connection cannot be used"),
    };
    let received = tokio::task::spawn_blocking(move || {
        let received = receive(&stream);
        (stream, received)
    });
    let Ok((stream, received)) = received.await else {
        return;
    };
    let (attached, reply) = match received {
        Ok((request, fds)) => match attach(&service, &request, fds).await {
            Ok(rank) => {
                let reply = AttachReply::Attached {
                    rank: rank.number,
                    engine_key: rank.handle.engine_key().to_owned(),
                    control: rank.handle.control().to_owned(),
                };
                (Some(rank), reply)
            }
            Err(message) => (None, AttachReply::Refused { message }),
        },
        Err(message) => (None, AttachReply::Refused { message }),
    };
    if let AttachReply::Refused { message } = &reply {
        tracing::warn!(reason = message, "an engine was refused");
    }
    // The engine says nothing more; the end of its connection is the end of its rank.
    let ended = tokio::task::spawn_blocking(move || {
        answer(&stream, &reply)?;
        wait_for_end(&stream)
    });
    let ended = ended.await;
    if let Ok(Err(error)) = &ended {
        tracing::debug!(%error, "an engine's connection broke");
    }
    if let Some(rank) = attached {
        tracing::info!(rank = rank.number, "an engine has gone; its rank ends");
        detach(&service, rank).await;
    }
}

/// A rank of this service.
struct Attached {
    number: u32,
    handle: RankHandle,
    engine: Engine,
    regions: Vec<Region>,
}

/// Reads a request and the descriptors beside its first bytes.
fn receive(stream: &UnixStream) -> Result<(AttachRequest, Vec<OwnedFd>), String> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: io::Error| format!("{what}: {error}")
    };
    stream
        .set_read_timeout(Some(REQUEST_TIMEOUT))
        .map_err(failed("setting a timeout"))?;
    let mut header = [0; 4];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_POOLS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut header)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    );
    let received = received.map_err(|error| format!("receiving the request: {error}"))?;
    let messages = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds: Vec<OwnedFd> = messages.flatten().collect();
    let rest = header.get_mut(received.bytes..).unwrap_or_default();
    let mut stream = stream;
    stream
        .read_exact(rest)
        .map_err(failed("receiving the request's length"))?;
    let length = u32::from_le_bytes(header);
    if length > MAX_REQUEST_BYTES {
        return Err(format!(
            "a request of {length} bytes, at most {MAX_REQUEST_BYTES} are possible"
        ));
    }
    let mut body = vec![0; length as usize];
    stream
        .read_exact(&mut body)
        .map_err(failed("receiving the request"))?;
    let request = serde_json::from_slice(&body).map_err(|error| format!("the request: {error}"))?;
    Ok((request, fds))
}

fn answer(mut stream: &UnixStream, reply: &AttachReply) -> io::Result<()> {
    let body = serde_json::to_vec(reply).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(&body)
}

fn wait_for_end(mut stream: &UnixStream) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    let mut byte = [0];
    while stream.read(&mut byte)? > 0 {}
    Ok(())
}

async fn attach(
    service: &Arc<Service>,
    request: &AttachRequest,
    fds: Vec<OwnedFd>,
) -> Result<Attached, String> {
    if !service.is_open() {
        return Err("the service is shutting down; attach to another or later".to_owned());
    }
    if fds.len() != request.pools.len() {
        return Err(format!(
            "{} file descriptors came beside a request that names {} pools",
            fds.len(),
            request.pools.len()
        ));
    }
    let layout =
        place_layout(&request.layout, &request.pools).map_err(|error| error.to_string())?;
    let pools = request.pools.iter().zip(fds).enumerate();
    let pools = pools.map(|(at, (bytes, fd))| {
        Memory::from_fd(fd, ByteLen(*bytes)).map_err(|error| format!("pool {at}: {error}"))
    });
    let pools: Vec<Memory> = pools.collect::<Result<_, _>>()?;
    let config = &service.config;
    let parallel = parallel_of(&request.parallel);
    let mut engine_config = EngineConfig::new(engine_key(request, config), config.host.clone());
    engine_config.transports = config.transports.clone();
    engine_config.tcp_bind = (config.bind, 0).into();
    engine_config.cma_trust_descriptors = config.cma_trust_descriptors;
    engine_config.fault_opt = config.inject_fault.clone();
    let engine = Engine::start(engine_config).map_err(|error| format!("the io engine: {error}"))?;
    let (buffers, regions) = register(&engine, request, layout, &pools)?;
    let rank_config = RankConfig {
        role: request.role,
        parallel,
        engine: request.engine.clone(),
        bootstrap_opt: request.bootstrap.clone(),
        advertise_host: config.host.clone(),
        control_bind: config.bind,
        control_ports_opt: config.control_ports.clone(),
        timeouts: config.timeouts(),
        limits: crate::rank::Limits::default(),
        planner: common::plan::PlannerOptions {
            strict_lengths: config.strict_lengths,
        },
        push: config.push_options(),
    };
    let metrics = Arc::clone(&service.metrics);
    let started = RankHandle::start(rank_config, engine.clone(), buffers, metrics).await;
    let handle = started.map_err(|error| error.message)?;
    let number = service.add(handle.clone());
    tracing::info!(
        rank = number,
        role = request.role.name(),
        engine_key = handle.engine_key(),
        control = handle.control(),
        "a rank is up"
    );
    Ok(Attached {
        number,
        handle,
        engine,
        regions,
    })
}

/// Ends a rank: its rooms fail, its writes drain, its memory is let go.
async fn detach(service: &Service, rank: Attached) {
    rank.handle.stop("its engine has gone").await;
    service.remove(rank.number);
    let Attached {
        engine,
        regions,
        number,
        ..
    } = rank;
    let released = tokio::task::spawn_blocking(move || {
        let late = regions
            .iter()
            .filter(|region| !engine.deregister(region, DEREGISTER_TIMEOUT))
            .count();
        engine.shutdown();
        late
    });
    match released.await {
        Ok(0) => tracing::info!(rank = number, "a rank has ended"),
        Ok(late) => tracing::warn!(
            rank = number,
            late,
            "a rank has ended; peers may still write to regions"
        ),
        Err(error) => tracing::error!(rank = number, %error, "a rank's memory was not let go"),
    }
}

fn parallel_of(spec: &ParallelSpec) -> ParallelConfig {
    // SGLang publishes one of two data-parallel groups: the system's where it has several.
    let uses_system = spec.system_dp_size > 1;
    ParallelConfig {
        tp_size: spec.attn_tp_size,
        tp_rank: spec.attn_tp_rank,
        cp_size: spec.attn_cp_size,
        cp_rank: spec.attn_cp_rank,
        dp_size: if uses_system {
            spec.system_dp_size
        } else {
            spec.attn_dp_size
        },
        dp_rank: if uses_system {
            spec.system_dp_rank
        } else {
            spec.attn_dp_rank
        },
        pp_size: spec.pp_size,
        pp_rank: spec.pp_rank,
        dcp_size: spec.dcp_size,
        dcp_rank: spec.dcp_rank,
    }
}

/// Unique for each attachment, in the shape of SGLang's keys.
fn engine_key(request: &AttachRequest, config: &crate::config::ServeConfig) -> String {
    let role = match request.role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    };
    let parallel = &request.parallel;
    let suffix = getrandom::u32().unwrap_or_default();
    format!(
        "io-{role}-dp{}-tp{}-pid{}-{}-{suffix:08x}",
        parallel.attn_dp_rank,
        parallel.attn_tp_rank,
        std::process::id(),
        config.host
    )
}

/// Registers every tensor under its component's label.
fn register(
    engine: &Engine,
    request: &AttachRequest,
    layout: RankLayout,
    pools: &[Memory],
) -> Result<(RankBuffers, Vec<Region>), String> {
    let mut regions = Vec::new();
    let mut list = |label: &str, specs: &[TensorSpec], tensors: &[TensorLayout]| {
        let pairs = specs.iter().zip(tensors);
        let registered = pairs.map(|(spec, tensor)| {
            let Some(pool) = pools.get(spec.pool).filter(|_| tensor.bytes.get() > 0) else {
                return Ok(None);
            };
            let region = engine.register(pool, ByteOffset(spec.offset), tensor.bytes, label);
            let region = region.map_err(|error| format!("{label}: {error}"))?;
            regions.push(region.clone());
            Ok(Some(region))
        });
        registered.collect::<Result<Vec<Option<Region>>, String>>()
    };
    let spec = &request.layout;
    let kv = list(
        common::metrics::COMPONENT_KV,
        &spec.kv.tensors,
        &layout.kv.tensors,
    )?;
    let aux = list(common::metrics::COMPONENT_AUX, &spec.aux, &layout.aux)?;
    let states = spec.states.iter().zip(&layout.states);
    let states = states.map(|(spec, state)| list(state.kind.name(), &spec.tensors, &state.tensors));
    let states = states.collect::<Result<Vec<_>, _>>()?;
    Ok((
        RankBuffers {
            layout,
            kv,
            aux,
            states,
        },
        regions,
    ))
}

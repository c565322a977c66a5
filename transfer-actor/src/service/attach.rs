//! The attach socket: one connection for each rank, its pools beside the first bytes.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use common::ids::{ByteLen, ByteOffset};
use common::topology::ParallelConfig;
use io_engine::{
    AnyMemory, DeviceHandles, DeviceMemory, DeviceRuntime, Engine, EngineConfig, Memory,
    RdmaOptions, Region,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;

use crate::api::{AttachReply, AttachRequest, DevicePool, Role};
use crate::client::MAX_POOLS;
use crate::config::ServeConfig;
use crate::rank::{RankBuffers, RankConfig, RankHandle};
use crate::service::layout::{engine_key, place_layout, register_buffers};
use crate::service::{Claim, Service};

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

/// One engine's connection, from its request to its end. No thread belongs to it, so engines that
/// say nothing hold nobody up.
async fn engine(service: Arc<Service>, mut stream: UnixStream) {
    let attached = match receive(&mut stream).await {
        Ok((request, fds)) => {
            tokio::select! {
                attached = attach(&service, Arc::new(request), fds) => attached,
                () = wait_for_end(&stream) => {
                    return tracing::info!("an engine has gone before its rank was up");
                }
            }
        }
        Err(message) => Err(message),
    };
    let reply = match &attached {
        Ok(rank) => AttachReply::Attached {
            rank: rank.number,
            engine_key: rank.handle.engine_key().to_owned(),
            control: rank.handle.control().to_owned(),
        },
        Err(message) => {
            tracing::warn!(reason = message, "an engine was refused");
            AttachReply::Refused {
                message: message.clone(),
            }
        }
    };
    let answered = answer(&mut stream, &reply).await;
    if let Err(error) = &answered {
        tracing::debug!(%error, "an engine's connection broke");
    }
    let Ok(rank) = attached else {
        // Closing what was not read through could cost the engine its answer.
        let _ = tokio::time::timeout(REQUEST_TIMEOUT, wait_for_end(&stream)).await;
        return;
    };
    // The engine says nothing more; the end of its connection is the end of its rank.
    if answered.is_ok() {
        tokio::select! {
            () = wait_for_end(&stream) => {
                tracing::info!(rank = rank.number, "an engine has gone; its rank ends");
            }
            // Closing the connection is how the engine learns of it.
            () = rank.handle.over() => {
                tracing::info!(rank = rank.number, "a rank is over; its engine may attach again");
            }
        }
    }
    detach(&service, rank).await;
}

/// A rank of this service.
struct Attached {
    number: u32,
    handle: RankHandle,
    engine: Engine,
    regions: Vec<Region>,
    claim_opt: Option<Claim>,
}

/// Reads a request and the descriptors beside its first bytes.
async fn receive(stream: &mut UnixStream) -> Result<(AttachRequest, Vec<OwnedFd>), String> {
    let received = tokio::time::timeout(REQUEST_TIMEOUT, receive_within(stream)).await;
    received.unwrap_or_else(|_| {
        let seconds = REQUEST_TIMEOUT.as_secs();
        Err(format!("no whole request came within {seconds} s"))
    })
}

async fn receive_within(stream: &mut UnixStream) -> Result<(AttachRequest, Vec<OwnedFd>), String> {
    let mut header = [0; 4];
    let first = stream.async_io(Interest::READABLE, || receive_first(stream, &mut header));
    let (received, fds) = first
        .await
        .map_err(|error| format!("receiving the request: {error}"))?;
    let rest = header.get_mut(received..).unwrap_or_default();
    stream
        .read_exact(rest)
        .await
        .map_err(|error| format!("receiving the request's length, four bytes: {error}"))?;
    let length = u32::from_le_bytes(header);
    if length > MAX_REQUEST_BYTES {
        return Err(format!(
            "a request of {length} bytes, at most {MAX_REQUEST_BYTES} are possible"
        ));
    }
    // It grows with what comes: a length alone takes no memory.
    let mut body = Vec::new();
    stream
        .take(u64::from(length))
        .read_to_end(&mut body)
        .await
        .map_err(|error| format!("receiving the request: {error}"))?;
    if body.len() < length as usize {
        return Err(format!(
            "the request ended after {} of {length} bytes",
            body.len()
        ));
    }
    let request = serde_json::from_slice(&body).map_err(|error| format!("the request: {error}"))?;
    Ok((request, fds))
}

/// The first bytes of a request, and the descriptors beside them.
fn receive_first(stream: &UnixStream, header: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_POOLS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        stream,
        &mut [IoSliceMut::new(header)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let messages = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds: Vec<OwnedFd> = messages.flatten().collect();
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other(
            "not every file descriptor could be taken; raise the service's limit of open files",
        ));
    }
    Ok((received.bytes, fds))
}

async fn answer(stream: &mut UnixStream, reply: &AttachReply) -> io::Result<()> {
    let body = serde_json::to_vec(reply).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_le_bytes()).await?;
    stream.write_all(&body).await
}

/// Returns when the other side has closed, or the connection broke. What still comes is dropped.
async fn wait_for_end(stream: &UnixStream) {
    let mut dropped = [0; 1024];
    loop {
        if stream.readable().await.is_err() {
            return;
        }
        match stream.try_read(&mut dropped) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return tracing::debug!(%error, "an engine's connection broke"),
        }
    }
}

async fn attach(
    service: &Arc<Service>,
    request: Arc<AttachRequest>,
    fds: Vec<OwnedFd>,
) -> Result<Attached, String> {
    if !service.is_open() {
        return Err("the service drains or shuts down; attach to another or later".to_owned());
    }
    let parts_of = |at: usize| {
        request
            .device_pools
            .get(&at)
            .map_or(1, |pool| pool.parts.len())
    };
    let wanted: usize = (0..request.pools.len()).map(parts_of).sum();
    let is_known = |at: &usize| *at < request.pools.len();
    if fds.len() != wanted || !request.device_pools.keys().all(is_known) {
        return Err(format!(
            "{} file descriptors came beside a request that names {} pools of {wanted} parts",
            fds.len(),
            request.pools.len()
        ));
    }
    let parallel = ParallelConfig::from(&request.parallel);
    let claim_opt = claim(service, &request, &parallel)?;
    let config = &service.config;
    let taken = {
        let (service, request) = (Arc::clone(service), Arc::clone(&request));
        tokio::task::spawn_blocking(move || take_memory(&service.config, &request, fds))
    };
    let (engine, buffers, regions) = taken
        .await
        .map_err(|error| format!("taking the pools: {error}"))??;
    let rank_config = RankConfig {
        role: request.role,
        parallel,
        engine: request.engine.clone(),
        bootstrap_opt: request.bootstrap.clone(),
        advertise_host: config.host.clone(),
        control_bind: config.bind,
        control_ports_opt: config.control_ports.clone(),
        timeouts: config.timeouts(),
        limits: config.limits(),
        planner: common::plan::PlannerOptions {
            strict_lengths: config.strict_lengths,
        },
        push: config.push_options(),
        verify_opt: config.verify.mode(),
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
        claim_opt,
    })
}

/// Maps an engine's pools, starts an io engine for it and registers its tensors. Mapping takes the
/// pools' space, which can be long, so it is no work for the threads that serve connections.
fn take_memory(
    config: &ServeConfig,
    request: &AttachRequest,
    fds: Vec<OwnedFd>,
) -> Result<(Engine, RankBuffers, Vec<Region>), String> {
    let layout =
        place_layout(&request.layout, &request.pools).map_err(|error| error.to_string())?;
    let mut fds = fds.into_iter();
    let pools = request.pools.iter().enumerate().map(|(at, bytes)| {
        let taken = match request.device_pools.get(&at) {
            Some(pool) => take_device_memory(pool, *bytes, &mut fds),
            None => fds
                .next()
                .ok_or_else(|| "its descriptor is missing".to_owned())
                .and_then(|fd| {
                    let memory = Memory::from_fd(fd, ByteLen(*bytes));
                    memory.map_err(|error| error.to_string())
                })
                .map(AnyMemory::Pool),
        };
        taken.map_err(|error| format!("pool {at}: {error}"))
    });
    let pools: Vec<AnyMemory> = pools.collect::<Result<_, String>>()?;
    let mut engine_config =
        EngineConfig::new(engine_key(request, &config.host), config.host.clone());
    engine_config.transports = config.transports.clone();
    engine_config.tcp_bind = (config.bind, 0).into();
    engine_config.cma_trust_descriptors = config.cma_trust_descriptors;
    engine_config.fault_opt = config.inject_fault.clone();
    engine_config.rdma = RdmaOptions::from_environment()?;
    engine_config.rdma.nic_map = config.nic_map.clone();
    let engine = Engine::start(engine_config).map_err(|error| format!("the io engine: {error}"))?;
    let (buffers, regions) = register_buffers(&engine, &request.layout, layout, &pools)?;
    Ok((engine, buffers, regions))
}

/// Maps a pool in device memory, of which the next descriptors are the parts.
fn take_device_memory(
    pool: &DevicePool,
    bytes: u64,
    fds: &mut impl Iterator<Item = OwnedFd>,
) -> Result<AnyMemory, String> {
    let runtime = DeviceRuntime::from_name(Some(&pool.runtime));
    let device = hex::decode(&pool.device).ok();
    let device = device.and_then(|device| <[u8; 16]>::try_from(device).ok());
    let handles = DeviceHandles {
        runtime,
        device: device.ok_or_else(|| format!("{:?} is no device's UUID", pool.device))?,
        lead: ByteOffset(pool.lead),
        bytes: ByteLen(bytes),
        // The lengths lead, so that no descriptor behind the last one is taken.
        parts: (pool.parts.iter().zip(fds))
            .map(|(bytes, fd)| (fd, ByteLen(*bytes)))
            .collect(),
    };
    let memory = DeviceMemory::from_handles(handles).map_err(|error| error.to_string())?;
    Ok(AnyMemory::Device(memory))
}

/// A bootstrap server knows one address for each prefill rank: a second engine would take the
/// first one's place and leave its rooms to time out. Decode ranks are found by no such number.
fn claim(
    service: &Arc<Service>,
    request: &AttachRequest,
    parallel: &ParallelConfig,
) -> Result<Option<Claim>, String> {
    let (Role::Prefill, Some(bootstrap)) = (request.role, &request.bootstrap) else {
        return Ok(None);
    };
    let place = format!(
        "prefill rank dp{} cp{} tp{} pp{} of bootstrap server {bootstrap}",
        parallel.dp_rank, parallel.cp_rank, parallel.tp_rank, parallel.pp_rank
    );
    match service.claim(place.clone()) {
        Some(claim) => Ok(Some(claim)),
        None => Err(format!(
            "{place} is attached to this service already; end the engine that holds it, or give this one another rank"
        )),
    }
}

/// Ends a rank: its rooms fail, its writes drain, its memory is let go.
async fn detach(service: &Service, mut rank: Attached) {
    // Its engine may be back before the last write has drained.
    drop(rank.claim_opt.take());
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

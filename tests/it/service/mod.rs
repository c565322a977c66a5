//! The transfer service as a process, through its sockets: a module for each behaviour. Here is
//! what they share: a small engine, and one request's way from a prefill to a decode.

mod api;
mod attach;
mod drain;
mod engine_death;
mod lifecycle;
mod limits;
mod live_metrics;
mod rdma_links;
mod reports;
mod starts;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};
use tests::process::{BootstrapServer, PATIENCE, wait_for};
use tests::service::{TransferService, attach_bytes, attach_reply, framed, memfd};
use transfer_actor::api::{Announce, Chunk, Indices, OpenRoom, RoomStatus, RoomView};
use transfer_actor::client::{ClientError, RankClient};

/// Makes a test of each behaviour for each transport, named after both.
macro_rules! on_every_transport {
    ($($behaviour:ident),+ $(,)?) => {
        on_every_transport!(@on shm, any(), $($behaviour),+);
        on_every_transport!(@on cma, any(), $($behaviour),+);
        on_every_transport!(@on tcp, any(), $($behaviour),+);
        on_every_transport!(@on rdma, all(), $($behaviour),+);
    };
    // `any()` never holds, `all()` always.
    (@on $transport:ident, $needs_a_device:meta, $($behaviour:ident),+) => {
        mod $transport {
            $(#[test]
            #[cfg_attr($needs_a_device, ignore = "needs the device of make test-rdma")]
            fn $behaviour() {
                super::$behaviour(stringify!($transport));
            })+
        }
    };
}
use on_every_transport;

/// Bytes of the small engine's only pool; a part at its end belongs to no buffer.
const POOL_BYTES: u64 = 4096;
/// Bytes of a page, a slot and a row.
const ITEM: usize = 64;
/// Where the buffers begin: 16 pages of K, 16 of V, 8 mamba slots, 4 aux rows.
const K: usize = 0;
const V: usize = 1024;
const MAMBA: usize = 2048;
const AUX: usize = 2560;

/// What one request of [`cross`] moves, in bytes.
const KV_BYTES: u64 = 3 * 2 * 64;
const MAMBA_BYTES: u64 = 64;
const AUX_BYTES: u64 = 64;

/// Sources and destinations of [`cross`].
const SRC_PAGES: [i32; 3] = [2, 4, 6];
const DST_PAGES: [i32; 3] = [3, 5, 7];
const SRC_SLOT: i32 = 1;
const DST_SLOT: i32 = 6;
const SRC_ROW: u32 = 1;
const DST_ROW: u32 = 3;

fn tensor(offset: usize, bytes: u64) -> Value {
    json!({ "pool": 0, "offset": offset, "bytes": bytes, "item_len": ITEM })
}

/// What the small engine says of itself.
fn attach_request(role: &str, bootstrap_opt: Option<&str>) -> Value {
    json!({
        "role": role,
        "bootstrap": bootstrap_opt,
        "parallel": {},
        "engine": { "kv_cache_dtype": "auto" },
        "pools": [POOL_BYTES],
        "layout": {
            "page_size": 4,
            "kv": {
                "tensors": [tensor(K, 1024), tensor(V, 1024)],
                "attention": "mha", "head_num": 1, "total_head_num": 1,
            },
            "aux": [tensor(AUX, 256)],
            "states": [{ "type": "mamba", "tensors": [tensor(MAMBA, 512)], "dims": [4] }],
        },
    })
}

/// Sends a request and its pools to a service, and reads the answer.
fn attach_raw(
    service: &TransferService,
    request: &Value,
    pools: &[BorrowedFd<'_>],
) -> (Value, UnixStream) {
    let bytes = framed(request.to_string().as_bytes());
    let mut stream = attach_bytes(&service.attach_socket(), &bytes, pools);
    (attach_reply(&mut stream), stream)
}

/// The reason of a refusal.
fn refusal(reply: &Value) -> &str {
    let message = reply["refused"]["message"].as_str();
    message.unwrap_or_else(|| panic!("it was not refused: {reply}"))
}

/// A bootstrap server and its folder.
fn bootstrap(arguments: &[&str]) -> (BootstrapServer, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    (BootstrapServer::start(folder.path(), arguments), folder)
}

/// One that soon notices a rank that is gone.
fn probing_bootstrap() -> (BootstrapServer, tempfile::TempDir) {
    bootstrap(&["--probe-interval", "1", "--probe-misses", "2"])
}

/// An engine with one small pool, attached to a service.
struct SmallEngine {
    runtime: tokio::runtime::Runtime,
    client: RankClient,
    pool: File,
    bootstrap: String,
}

impl SmallEngine {
    fn prefill(service: &TransferService, server: &BootstrapServer) -> Self {
        let bootstrap = server.address().to_string();
        Self::attach(service, "prefill", &bootstrap).expect("the prefill is attached")
    }

    fn decode(service: &TransferService, server: &BootstrapServer) -> Self {
        let bootstrap = server.address().to_string();
        Self::attach(service, "decode", &bootstrap).expect("the decode is attached")
    }

    /// Its pool is full of bytes that tell their place and the role.
    fn attach(service: &TransferService, role: &str, bootstrap: &str) -> Result<Self, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let pool = memfd(POOL_BYTES);
        pool.write_all_at(&first_content(role), 0)
            .expect("the pool can be written");
        let own_bootstrap_opt = (role == "prefill").then_some(bootstrap);
        let request = serde_json::from_value(attach_request(role, own_bootstrap_opt));
        let request = request.expect("the request is well-formed");
        let (attach_socket, api_socket) = (service.attach_socket(), service.api_socket());
        let attached = RankClient::attach(
            &attach_socket,
            &api_socket,
            &request,
            std::slice::from_ref(&pool),
        );
        let client = runtime.block_on(attached)?;
        Ok(Self {
            runtime,
            client,
            pool,
            bootstrap: bootstrap.to_owned(),
        })
    }

    fn content(&self) -> Vec<u8> {
        let mut content = vec![0; POOL_BYTES as usize];
        self.pool
            .read_exact_at(&mut content, 0)
            .expect("the pool can be read");
        content
    }

    fn try_open(&self, room: u64) -> Result<RoomView, ClientError> {
        let open = OpenRoom {
            room,
            bootstrap: Some(self.bootstrap.clone()),
            prefill_dp_rank: None,
            aux_index: Some(SRC_ROW),
        };
        self.runtime.block_on(self.client.open(open))
    }

    fn open(&self, room: u64) -> RoomView {
        self.try_open(room).expect("the room opens")
    }

    fn announce(&self, room: u64) -> RoomView {
        let announced = self.client.announce(room, announcement());
        self.runtime.block_on(announced).expect("it is announced")
    }

    fn send(&self, room: u64, chunk: Chunk) -> Result<RoomView, ClientError> {
        self.runtime.block_on(self.client.send_chunk(room, chunk))
    }

    fn wait(&self, room: u64, status: RoomStatus) -> RoomView {
        self.try_wait(room, status).expect("the room is known")
    }

    fn try_wait(&self, room: u64, status: RoomStatus) -> Result<RoomView, ClientError> {
        let waited = self.client.wait(room, Some(status), PATIENCE);
        self.runtime.block_on(waited)
    }

    fn abort(&self, room: u64, reason: &str) -> RoomView {
        let aborted = self.client.abort(room, Some(reason.to_owned()));
        self.runtime.block_on(aborted).expect("it is aborted")
    }

    fn clear(&self, room: u64) {
        let cleared = self.client.clear(room);
        self.runtime.block_on(cleared).expect("it is cleared");
    }

    fn drain(&self, timeout: Duration) -> Result<usize, ClientError> {
        self.runtime.block_on(self.client.drain(timeout))
    }

    fn view(&self, room: u64) -> Result<RoomView, ClientError> {
        let asked = self.client.wait(room, None, Duration::ZERO);
        self.runtime.block_on(asked)
    }
}

fn announcement() -> Announce {
    Announce {
        kv_indices: Indices(DST_PAGES.to_vec()),
        aux_index: Some(DST_ROW),
        state_indices: vec![Some(Indices(vec![DST_SLOT]))],
        decode_prefix_len: None,
    }
}

/// All that [`announcement`] asks for, in one chunk.
fn whole_chunk() -> Chunk {
    Chunk {
        kv_indices: Indices(SRC_PAGES.to_vec()),
        state_indices: vec![Some(Indices(vec![SRC_SLOT]))],
        num_kv_tokens: None,
        aux_index: None,
        last: true,
    }
}

/// What a pool holds before anything has moved.
fn first_content(role: &str) -> Vec<u8> {
    let salt = if role == "prefill" { 7 } else { 131 };
    let byte = |place: usize| (place.wrapping_mul(31) ^ (place >> 6).wrapping_mul(salt)) as u8;
    (0..POOL_BYTES as usize).map(byte).collect()
}

/// What the decode's pool holds once one request has crossed.
fn content_after_crossing() -> Vec<u8> {
    let source = first_content("prefill");
    let mut expected = first_content("decode");
    let mut copy = |buffer: usize, src: usize, dst: usize| {
        let (src, dst) = (buffer + src * ITEM, buffer + dst * ITEM);
        expected[dst..dst + ITEM].copy_from_slice(&source[src..src + ITEM]);
    };
    for (src, dst) in SRC_PAGES.into_iter().zip(DST_PAGES) {
        copy(K, src as usize, dst as usize);
        copy(V, src as usize, dst as usize);
    }
    copy(MAMBA, SRC_SLOT as usize, DST_SLOT as usize);
    copy(AUX, SRC_ROW as usize, DST_ROW as usize);
    expected
}

/// Opens a room on both sides and announces it; the prefill may send then.
fn begin(prefill: &SmallEngine, decode: &SmallEngine, room: u64) {
    decode.open(room);
    prefill.open(room);
    decode.announce(room);
    let view = prefill.wait(room, RoomStatus::WaitingForInput);
    assert_eq!(view.status, RoomStatus::WaitingForInput, "{view:?}");
}

/// A request whose write of pages hangs.
fn begin_and_stall(pair: &Pair, room: u64) {
    begin(&pair.prefill, &pair.decode, room);
    pair.prefill
        .send(room, whole_chunk())
        .expect("it is accepted");
    let view = pair.prefill.wait(room, RoomStatus::Transferring);
    assert_eq!(view.status, RoomStatus::Transferring, "the write stalls");
    // Before the session is open nothing has been written, and an abort would find no write.
    wait_for("what goes beside the pages", || {
        let view = pair.prefill.view(room).expect("it is known");
        let mut moved = view.transfers.iter();
        moved.find(|moved| moved.component == "mamba" && moved.outcome == "success")?;
        Some(())
    });
    let view = pair.decode.view(room).expect("it is known");
    assert!(!view.release_safe, "a write is under way");
}

/// Takes one request from the prefill to the decode, and looks at every byte of both pools.
fn cross(prefill: &SmallEngine, decode: &SmallEngine, room: u64) {
    begin(prefill, decode, room);
    prefill.send(room, whole_chunk()).expect("it is accepted");
    for engine in [prefill, decode] {
        let view = engine.wait(room, RoomStatus::Success);
        assert_eq!(view.status, RoomStatus::Success, "{view:?}");
    }
    assert_eq!(decode.content(), content_after_crossing());
    assert_eq!(prefill.content(), first_content("prefill"));
    for engine in [prefill, decode] {
        engine.clear(room);
    }
}

/// A bootstrap server, a service with a prefill and one with a decode.
struct Pair {
    prefill: SmallEngine,
    decode: SmallEngine,
    prefill_service: TransferService,
    decode_service: TransferService,
    server: BootstrapServer,
    _folder: tempfile::TempDir,
}

impl Pair {
    fn start(prefill_arguments: &[&str]) -> Self {
        Self::start_over("tcp", prefill_arguments, &[])
    }

    fn start_over(transport: &str, prefill_arguments: &[&str], decode_arguments: &[&str]) -> Self {
        let over = |arguments: &[&str]| {
            let arguments = [&["--transports", transport], arguments].concat();
            TransferService::start(&arguments)
        };
        Self::join(
            probing_bootstrap(),
            over(prefill_arguments),
            over(decode_arguments),
        )
    }

    /// An engine of each role, attached to services that run.
    fn join(
        (server, folder): (BootstrapServer, tempfile::TempDir),
        prefill_service: TransferService,
        decode_service: TransferService,
    ) -> Self {
        Self {
            prefill: SmallEngine::prefill(&prefill_service, &server),
            decode: SmallEngine::decode(&decode_service, &server),
            prefill_service,
            decode_service,
            server,
            _folder: folder,
        }
    }
}

/// The pool of a request that is sent by hand.
fn lend(pool: &File) -> [BorrowedFd<'_>; 1] {
    [pool.as_fd()]
}

//! Our ranks against SGLang's own classes, in both directions: SGLang's ranks are processes of
//! their own, whose data plane is the double of MoRI in `tests/conformance`; its descriptors are a
//! pid and addresses, which our `cma` transport serves where it is told to trust them.
//!
//! The same requests also run between SGLang's ranks alone, with its own bootstrap server, over the
//! `mori` of our Python wheel; and with the manager of our plugin on one side and on both.
//!
//! `FERRY_TEST_TRANSPORT` names the transport that all of them move bytes over (`rdma` on a host with
//! RDMA devices), and with `FERRY_TEST_MEMORY=device` every pool but those of aux rows is in device
//! memory; `FERRY_CUDA_LIBRARY` may name the stand-in for a driver. SGLang's ranks then use our
//! module, because the double has no network and knows no device.
//!
//! Every test compares every byte of every destination with what the model's logical shape says,
//! those that must not change too.

mod checksums;
mod dummies;
mod ends;
mod model;
mod module_ends;
mod mooncake;
mod plugin;
mod rank;
mod releases;
mod requests;
mod sharding;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use tests::process::{BootstrapServer, skip};
use tests::sglang::{NEWEST_RELEASE, SglangPeer};
use transfer_actor::api::{Role, RoomStatus};

use crate::conformance::model::{Model, Place, Placement};
use crate::conformance::rank::{ChunkEnd, DEADLINE, Rank, Setting, is_beyond_the_double};

/// Whose ranks are on which side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    OursToSglang,
    SglangToOurs,
    /// No rank is ours, the data plane of all is.
    SglangToSglang,
    /// The prefill has the manager of our plugin.
    ManagerToSglang,
    /// The decode has it.
    SglangToManager,
    /// Both have it.
    ManagerToManager,
}

impl Direction {
    /// Whether every rank is a process with SGLang's interface, over our Python module.
    fn is_over_our_module(self) -> bool {
        !matches!(self, Self::OursToSglang | Self::SglangToOurs)
    }

    /// The roles whose manager is our plugin's.
    const fn managers(self) -> &'static [Role] {
        match self {
            Self::ManagerToSglang => &[Role::Prefill],
            Self::SglangToManager => &[Role::Decode],
            Self::ManagerToManager => &[Role::Prefill, Role::Decode],
            Self::OursToSglang | Self::SglangToOurs | Self::SglangToSglang => &[],
        }
    }

    /// Says loudly when a test cannot run here.
    fn can_run(self, test: &str, setting: &Setting) -> bool {
        if (self.is_over_our_module() || is_beyond_the_double())
            && let Err(reason) = SglangPeer::imports_our_module()
        {
            skip(test, &reason);
            return false;
        }
        can_run(test, setting)
    }
}

/// Declares each test in one direction, as a module.
macro_rules! one_direction {
    ($module:ident, $direction:ident, $($(#[$meta:meta])* $name:ident => $body:expr;)+) => {
        mod $module {
            use super::*;
            $($(#[$meta])* #[actix_rt::test]
            async fn $name() {
                let direction = crate::conformance::Direction::$direction;
                if direction.can_run(stringify!($name), &setting()) {
                    ($body)(direction).await;
                }
            })+
        }
    };
}
pub(crate) use one_direction;

/// Declares each test in both directions between our ranks and SGLang's.
macro_rules! both_directions {
    ($($tests:tt)+) => {
        one_direction! { ours_to_sglang, OursToSglang, $($tests)+ }
        one_direction! { sglang_to_ours, SglangToOurs, $($tests)+ }
    };
}
pub(crate) use both_directions;

/// Declares each test in every direction.
macro_rules! every_direction {
    ($($tests:tt)+) => {
        both_directions! { $($tests)+ }
        one_direction! { sglang_over_our_module, SglangToSglang, $($tests)+ }
        one_direction! { our_manager_to_sglang, ManagerToSglang, $($tests)+ }
        one_direction! { sglang_to_our_manager, SglangToManager, $($tests)+ }
        one_direction! { our_manager_to_itself, ManagerToManager, $($tests)+ }
    };
}
pub(crate) use every_direction;

fn setting() -> Setting {
    Setting {
        model: Model::hybrid(),
        host: IpAddr::V4(Ipv4Addr::LOCALHOST),
        allocation_policy: "early".to_owned(),
        verify_opt: None,
        release: NEWEST_RELEASE.to_owned(),
        aux_by_write: false,
        fault_opt: None,
        is_over_our_module: false,
        managers: &[],
        backend: "mori",
        environment: Vec::new(),
        module_fault: "",
    }
}

/// Says loudly when a test cannot run here.
fn can_run(test: &str, setting: &Setting) -> bool {
    match SglangPeer::is_available(&setting.release) {
        Ok(()) => true,
        Err(reason) => {
            skip(test, &reason);
            false
        }
    }
}

/// Two engines and the bootstrap server between them.
struct Cluster {
    prefills: Vec<Rank>,
    decodes: Vec<Rank>,
    /// Held, so that it runs; none where SGLang's own serves.
    _bootstrap: Option<(BootstrapServer, tempfile::TempDir)>,
}

/// An address that was free a moment ago: SGLang's bootstrap server must be told its port.
fn free_address(host: IpAddr) -> SocketAddr {
    let listener = TcpListener::bind(SocketAddr::new(host, 0)).expect("a free port");
    listener.local_addr().expect("it has an address")
}

/// How many ranks each side has.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    prefill_tp: u32,
    decode_tp: u32,
    decode_dcp: u32,
}

const ALONE: Sizes = tp(1, 1);

const fn tp(prefill_tp: u32, decode_tp: u32) -> Sizes {
    Sizes {
        prefill_tp,
        decode_tp,
        decode_dcp: 1,
    }
}

impl Cluster {
    /// Starts all ranks; our bootstrap server is between them, or SGLang's where no rank is ours.
    async fn start(setting: &Setting, direction: Direction, sizes: Sizes) -> Self {
        if direction.is_over_our_module() {
            let setting = Setting {
                is_over_our_module: true,
                managers: direction.managers(),
                ..setting.clone()
            };
            let address = free_address(setting.host);
            return Self::start_at(&setting, direction, sizes, (address, true)).await;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let listen = SocketAddr::new(setting.host, 0).to_string();
        let server = BootstrapServer::start(folder.path(), &["--listen", &listen]);
        let address = server.address();
        let mut cluster = Self::start_at(setting, direction, sizes, (address, false)).await;
        cluster._bootstrap = Some((server, folder));
        cluster
    }

    /// Starts all ranks with a bootstrap server at an address, which SGLang's first prefill rank
    /// may have to serve.
    async fn start_at(
        setting: &Setting,
        direction: Direction,
        sizes: Sizes,
        (bootstrap, sglang_serves): (SocketAddr, bool),
    ) -> Self {
        let mut prefills = Vec::new();
        for tp_rank in 0..sizes.prefill_tp {
            let place = Place {
                tp_size: sizes.prefill_tp,
                tp_rank,
                ..Place::ALONE
            };
            let serves = sglang_serves && tp_rank == 0;
            prefills.push(match direction {
                Direction::OursToSglang => {
                    Rank::start_ours(setting, Role::Prefill, place, bootstrap).await
                }
                _ => Rank::start_sglang(setting, Role::Prefill, place, bootstrap, serves),
            });
        }
        let mut decodes = Vec::new();
        for tp_rank in 0..sizes.decode_tp {
            let place = Place {
                tp_size: sizes.decode_tp,
                tp_rank,
                dcp_size: sizes.decode_dcp,
                dcp_rank: tp_rank % sizes.decode_dcp,
            };
            decodes.push(match direction {
                Direction::SglangToOurs => {
                    Rank::start_ours(setting, Role::Decode, place, bootstrap).await
                }
                _ => Rank::start_sglang(setting, Role::Decode, place, bootstrap, false),
            });
        }
        Self {
            prefills,
            decodes,
            _bootstrap: None,
        }
    }

    /// Opens a request's room on both sides, announces it, and waits until it can be sent.
    async fn open(&mut self, request: &Request) {
        for prefill in &mut self.prefills {
            prefill.prepare(Some((request.room, &request.source, request.prefix_pages)));
            prefill.open(request.room, request.source.aux).await;
        }
        for decode in &mut self.decodes {
            decode.open(request.room, 0).await;
            let prefix = request.prefix_tokens();
            decode.announce(request.room, &request.target, prefix).await;
        }
        for prefill in &mut self.prefills {
            prefill
                .reach(request.room, RoomStatus::WaitingForInput)
                .await;
            let pages = request.source.pages.len();
            prefill.begin_send(request.room, pages, request.source.aux);
        }
    }

    /// Sends a request's chunks from every prefill rank.
    async fn send(&mut self, request: &Request) {
        for number in 0..request.chunks.len() {
            self.send_chunk(request, number).await;
        }
    }

    async fn send_chunk(&mut self, request: &Request, number: usize) {
        for prefill in &mut self.prefills {
            let first: usize = request.chunks[..number].iter().sum();
            let pages = &request.source.pages[first..first + request.chunks[number]];
            let end = ChunkEnd {
                tokens: pages.len() as u64 * u64::from(request.page_size),
                is_last: number + 1 == request.chunks.len(),
            };
            prefill
                .send(request.room, pages, &request.source.states, end)
                .await;
        }
    }

    /// Waits for the Success of both sides and compares every byte.
    async fn finish(&mut self, request: &Request) {
        for decode in &mut self.decodes {
            decode.reach(request.room, RoomStatus::Success).await;
        }
        for prefill in &mut self.prefills {
            prefill.reach(request.room, RoomStatus::Success).await;
        }
        self.check_landed(request);
    }

    fn check_landed(&mut self, request: &Request) {
        for decode in &mut self.decodes {
            let landed = (request.room, &request.target, request.landed_first_page());
            if !self.prefills[0].is_ours() {
                decode.wait_for_aux(landed);
            }
            decode.check(Some(landed));
        }
    }

    /// Forgets a request on both sides.
    async fn clear(&mut self, request: &Request) {
        for rank in self.prefills.iter_mut().chain(&mut self.decodes) {
            rank.clear(request.room).await;
        }
    }

    /// A whole request.
    async fn transfer(&mut self, request: &Request) {
        self.open(request).await;
        self.send(request).await;
        self.finish(request).await;
    }

    /// Two requests after each other, from this room's number on, of which the decode has some
    /// pages already.
    async fn transfer_two(&mut self, setting: &Setting, first_room: u64, prefix_pages: u32) {
        for (room, chunks) in (first_room..).zip([[2, 4], [3, 1]]) {
            let mut request = Request::new(&setting.model, room, &chunks);
            request.prefix_pages = prefix_pages;
            self.transfer(&request).await;
            self.clear(&request).await;
            for decode in &mut self.decodes {
                decode.prepare(None);
            }
        }
    }
}

/// One request: where it lies and how it is sent.
#[derive(Clone, Debug)]
struct Request {
    room: u64,
    page_size: u32,
    /// Pages of the prefill that the decode holds already.
    prefix_pages: u32,
    dcp_size: u32,
    source: Placement,
    target: Placement,
    /// Pages of each chunk.
    chunks: Vec<usize>,
}

impl Request {
    /// A request of six pages that lie scattered on both sides, in chunks of these sizes.
    fn new(model: &Model, room: u64, chunks: &[usize]) -> Self {
        let count: usize = chunks.iter().sum();
        let states = |rows: [&[i32]; 2]| {
            let slots = model.states.iter().map(|state| match state {
                model::State::Mamba { .. } => rows[0].to_vec(),
                model::State::Window { .. } | model::State::Whole { .. } => rows[1].to_vec(),
            });
            slots.collect()
        };
        let pages = |all: [i32; 8]| all[..count].to_vec();
        Self {
            room,
            page_size: model.page_size,
            prefix_pages: 0,
            dcp_size: 1,
            source: Placement {
                pages: pages([0, 7, 8, 3, 12, 11, 13, 14]),
                states: states([&[1], &[3, 4, 9]]),
                aux: 1,
            },
            target: Placement {
                pages: pages([9, 3, 4, 14, 0, 6, 1, 2]),
                states: states([&[5], &[1, 2, 0]]),
                aux: 2,
            },
            chunks: chunks.to_vec(),
        }
    }

    fn prefix_tokens(&self) -> u64 {
        u64::from(self.prefix_pages) * u64::from(self.page_size)
    }

    /// The number of the first page at the decode, whose pages hold more tokens under DCP.
    const fn landed_first_page(&self) -> u32 {
        self.prefix_pages / self.dcp_size
    }
}

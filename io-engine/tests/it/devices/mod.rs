//! Device memory, over the stand-in for its drivers: every transport moves it exactly, nothing of
//! the host's processor touches it, and each promise has a test that fails without its guard.
//!
//! The stand-in's settings are the process's, so the tests here take turns.

mod drivers;
mod processes;

use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use common::plan::{RunList, StridedRun};
use io_engine::{
    AnyMemory, ByteLen, ByteOffset, DeviceMemory, DeviceRuntime, Direction, Engine, ForeignMemory,
    Location, Memory, PeerSessions, Reach, Region, RemoteRegion, Session, TransferResult,
    TransportKind, WriteBatch, WritePair, device_drivers, device_report, set_device_library,
};

use crate::support::{
    BYTES, DEADLINE, Random, config, eventually, one_run, random_runs, through_the_wire,
};

const UNIT: u64 = 2 << 20;

/// The stand-in, open in this process.
pub(crate) struct StandIn {
    set: unsafe extern "C" fn(*const libc::c_char, u64) -> bool,
    get: unsafe extern "C" fn(*const libc::c_char) -> u64,
}

/// Where cargo puts the shared library of a dependency: beside the test.
fn library() -> PathBuf {
    let binary = std::env::current_exe().unwrap();
    let path = binary.parent().unwrap().join("libdevice_stand_in.so");
    assert!(path.exists(), "{} was not built", path.display());
    path
}

fn open(path: &Path) -> StandIn {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the library's constructors have no precondition; it is never closed.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null(), "{} cannot be opened", path.display());
    // SAFETY: both are functions of the library, with these signatures.
    unsafe {
        StandIn {
            set: std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*const libc::c_char, u64) -> bool,
            >(libc::dlsym(handle, c"ferry_stand_in_set".as_ptr())),
            get: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const libc::c_char) -> u64>(
                libc::dlsym(handle, c"ferry_stand_in_get".as_ptr()),
            ),
        }
    }
}

static STAND_IN: LazyLock<Mutex<StandIn>> = LazyLock::new(|| {
    let path = library();
    let stand_in = open(&path);
    assert!(set_device_library(DeviceRuntime::Cuda, &path));
    assert!(set_device_library(DeviceRuntime::Hip, &path));
    Mutex::new(stand_in)
});

/// Settings of the stand-in for one test; as they were behind it.
pub(crate) struct Turn(MutexGuard<'static, StandIn>);

impl Turn {
    pub(crate) fn take() -> Self {
        Self(STAND_IN.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set(&self, name: &str, number: u64) {
        let name = CString::new(name).unwrap();
        // SAFETY: a C string.
        assert!(unsafe { (self.0.set)(name.as_ptr(), number) }, "{name:?}");
    }

    pub(crate) fn get(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: a C string.
        unsafe { (self.0.get)(name.as_ptr()) }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        for name in [
            "delay_microseconds",
            "refuse_export",
            "refuse_dma_buf",
            "lose_current_device",
            "reset_at_copy",
            "refuse_batches",
            "peer_memory",
            "unordered_writes",
        ] {
            self.set(name, 0);
        }
        self.set("pinned_bytes", u64::MAX);
    }
}

const RUNTIMES: [DeviceRuntime; 2] = [DeviceRuntime::Cuda, DeviceRuntime::Hip];

/// Those transports that reach device memory.
const KINDS: [TransportKind; 3] = [TransportKind::Local, TransportKind::Shm, TransportKind::Tcp];

/// Memory at one of two places.
#[derive(Clone)]
pub(crate) enum Bytes {
    Host(Memory),
    Device(DeviceMemory),
}

impl Bytes {
    pub(crate) fn allocate(runtime_opt: Option<DeviceRuntime>, number: u32) -> Self {
        match runtime_opt {
            None => Self::Host(Memory::allocate("host", ByteLen(BYTES)).unwrap()),
            Some(runtime) => {
                Self::Device(DeviceMemory::allocate(runtime, number, ByteLen(BYTES)).unwrap())
            }
        }
    }

    fn memory(&self) -> AnyMemory {
        match self {
            Self::Host(memory) => AnyMemory::from(memory),
            Self::Device(memory) => AnyMemory::from(memory),
        }
    }

    pub(crate) fn register(&self, engine: &Engine) -> Region {
        let whole = (ByteOffset(0), ByteLen(BYTES));
        let registered = engine.register(self.memory(), whole.0, whole.1, "kv");
        registered.unwrap()
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        match self {
            Self::Host(memory) => memory.write(ByteOffset(offset), bytes),
            Self::Device(memory) => memory.write(ByteOffset(offset), bytes),
        }
        .unwrap();
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES as usize];
        match self {
            Self::Host(memory) => memory.read(ByteOffset(0), &mut bytes),
            Self::Device(memory) => memory.read(ByteOffset(0), &mut bytes),
        }
        .unwrap();
        bytes
    }
}

fn pattern(salt: u64) -> Vec<u8> {
    (0..BYTES)
        .map(|at| (at * 31 + at / 251 + salt) as u8)
        .collect()
}

/// Two engines, the session from one to the other, and a region of each.
pub(crate) struct Sides {
    _engines: [Engine; 2],
    pub(crate) session: Session,
    own: Region,
    theirs: Region,
}

impl Sides {
    pub(crate) fn open(kind: TransportKind, own: &Bytes, theirs: &Bytes) -> Self {
        Self::with_order(&[kind], own, theirs)
    }

    pub(crate) fn with_order(kinds: &[TransportKind], own: &Bytes, theirs: &Bytes) -> Self {
        let engine = |key| {
            let mut config = config(key, kinds[0]);
            config.transports = kinds.to_vec();
            Engine::start(config).unwrap()
        };
        let (source, target) = (engine("source"), engine("target"));
        let (own, theirs) = (own.register(&source), theirs.register(&target));
        let session = source.connect(&through_the_wire(&target.desc())).unwrap();
        Self {
            _engines: [source, target],
            session,
            own,
            theirs,
        }
    }

    fn batch(&self, runs: RunList) -> WriteBatch {
        let pair = WritePair {
            local: self.own.clone(),
            remote: RemoteRegion::from_desc(&self.theirs.desc()).unwrap(),
            runs,
        };
        WriteBatch { pairs: vec![pair] }
    }

    fn transfer(&self, direction: Direction, runs: RunList) -> TransferResult {
        self.session.transfer(direction, self.batch(runs), DEADLINE)
    }
}

/// What the destination holds when exactly the runs were moved.
fn expected(src: &[u8], dst: &[u8], runs: &RunList) -> Vec<u8> {
    let mut expected = dst.to_vec();
    for range in runs.iter_ranges() {
        let (from, to, len) = (range.src.get(), range.dst.get(), range.len.get());
        expected[to as usize..(to + len) as usize]
            .copy_from_slice(&src[from as usize..(from + len) as usize]);
    }
    expected
}

pub(crate) fn check_both_directions(
    sides: &Sides,
    own: &Bytes,
    theirs: &Bytes,
    runs: &RunList,
    case: &str,
) {
    for direction in [Direction::Write, Direction::Read] {
        let (src, dst) = match direction {
            Direction::Write => (own, theirs),
            Direction::Read => (theirs, own),
        };
        src.write(0, &pattern(3));
        dst.write(0, &pattern(77));
        let moved = sides.transfer(direction, runs.clone());
        let moved = moved.unwrap_or_else(|error| panic!("{case} {direction:?}: {error}"));
        assert_eq!(moved.bytes, runs.bytes().get(), "{case} {direction:?}");
        let wanted = expected(&pattern(3), &pattern(77), runs);
        assert!(
            dst.contents() == wanted,
            "{case} {direction:?}: wrong bytes"
        );
        assert!(
            src.contents() == pattern(3),
            "{case} {direction:?}: the source changed"
        );
    }
}

#[test]
fn device_memory_moves_exactly_over_every_transport_in_both_directions() {
    let turn = Turn::take();
    let seed = std::env::var("FERRY_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| std::process::id().into());
    println!("FERRY_SEED={seed}");
    let mut random = Random(seed);
    // Late enough that a byte that is looked at too early is noticed.
    turn.set("delay_microseconds", 300);
    for runtime in RUNTIMES {
        let places = [
            (Some(runtime), Some(runtime)),
            (Some(runtime), None),
            (None, Some(runtime)),
        ];
        for kind in KINDS {
            for (own, theirs) in places {
                let (own, theirs) = (Bytes::allocate(own, 0), Bytes::allocate(theirs, 1));
                let sides = Sides::open(kind, &own, &theirs);
                let case = format!(
                    "{kind} {:?} -> {:?}",
                    sides.own.location(),
                    sides.theirs.location()
                );
                for _ in 0..3 {
                    let runs = random_runs(&mut random);
                    check_both_directions(&sides, &own, &theirs, &runs, &case);
                }
                check_both_directions(&sides, &own, &theirs, &one_run(0, 0, BYTES), &case);
                check_both_directions(&sides, &own, &theirs, &one_run(5, 70_001, 1), &case);
            }
        }
    }
    assert!(
        turn.get("batches") > 0,
        "many copies were begun by one call"
    );
}

#[test]
fn a_region_says_where_it_is() {
    let _turn = Turn::take();
    let memory = Bytes::allocate(Some(DeviceRuntime::Hip), 1);
    let engine = Engine::start(config("one", TransportKind::Tcp)).unwrap();
    let region = memory.register(&engine);
    let location = Location::Device {
        runtime: DeviceRuntime::Hip,
        number: 1,
    };
    assert_eq!(region.location(), location);
    let told = RemoteRegion::from_desc(&region.desc()).unwrap();
    assert_eq!(told.location(), location);
    for driver in device_drivers() {
        assert!(driver.ends_with("2 devices"), "{driver}");
    }
}

#[test]
fn a_page_inside_a_larger_allocation_is_written_where_it_is() {
    let _turn = Turn::take();
    const LEAD: u64 = 3 * 4096 + 512;
    for kind in KINDS {
        // The region begins inside its memory, and the memory inside its allocation.
        let whole = DeviceMemory::allocate(DeviceRuntime::Cuda, 0, ByteLen(LEAD + BYTES)).unwrap();
        whole
            .write(ByteOffset(0), &vec![0xAB; (LEAD + BYTES) as usize])
            .unwrap();
        // SAFETY: the keeper is the memory around it.
        let inner = unsafe {
            DeviceMemory::new(
                DeviceRuntime::Cuda,
                whole.address() + 4096,
                ByteLen(LEAD + BYTES - 4096),
                whole.clone(),
            )
        }
        .unwrap();
        let own = Bytes::allocate(None, 0);
        own.write(0, &pattern(9));
        let (source, target) = (
            Engine::start(config("source", kind)).unwrap(),
            Engine::start(config("target", kind)).unwrap(),
        );
        let region = own.register(&source);
        let theirs = target
            .register(&inner, ByteOffset(LEAD - 4096), ByteLen(BYTES), "kv")
            .unwrap();
        let session = source.connect(&through_the_wire(&target.desc())).unwrap();
        let pair = WritePair {
            local: region,
            remote: RemoteRegion::from_desc(&theirs.desc()).unwrap(),
            runs: one_run(0, 0, BYTES),
        };
        let batch = WriteBatch { pairs: vec![pair] };
        session.transfer(Direction::Write, batch, DEADLINE).unwrap();
        let mut seen = vec![0; (LEAD + BYTES) as usize];
        whole.read(ByteOffset(0), &mut seen).unwrap();
        let (before, at) = seen.split_at(LEAD as usize);
        assert!(
            before.iter().all(|byte| *byte == 0xAB),
            "{kind}: in front of the region"
        );
        assert!(at == pattern(9), "{kind}: in the region");
    }
}

#[test]
fn a_pool_of_several_handles_is_one_region() {
    let turn = Turn::take();
    const LEN: u64 = 5 * UNIT - 4096;
    for kind in KINDS {
        let allocate = |number| {
            let len = ByteLen(LEN);
            DeviceMemory::allocate_in_parts(DeviceRuntime::Cuda, number, len, ByteLen(UNIT))
                .unwrap()
        };
        // What an earlier test had may be let go between the two counts.
        let (mut live, mut made_opt) = (0, None);
        eventually("each is made of five handles", || {
            made_opt = None;
            live = turn.get("live");
            made_opt = Some((allocate(0), allocate(1)));
            turn.get("live") == live + 10
        });
        let (own, theirs) = made_opt.unwrap();
        let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 + at / 65_521) as u8).collect();
        own.write(ByteOffset(0), &bytes).unwrap();
        let (source, target) = (
            Engine::start(config("source", kind)).unwrap(),
            Engine::start(config("target", kind)).unwrap(),
        );
        let whole = (ByteOffset(0), ByteLen(LEN));
        let region = source.register(&own, whole.0, whole.1, "kv").unwrap();
        let remote = target.register(&theirs, whole.0, whole.1, "kv").unwrap();
        let session = source.connect(&through_the_wire(&target.desc())).unwrap();
        let pair = WritePair {
            local: region,
            remote: RemoteRegion::from_desc(&remote.desc()).unwrap(),
            runs: one_run(0, 0, LEN),
        };
        let batch = WriteBatch { pairs: vec![pair] };
        session.transfer(Direction::Write, batch, DEADLINE).unwrap();
        let mut seen = vec![0; LEN as usize];
        theirs.read(ByteOffset(0), &mut seen).unwrap();
        assert!(seen == bytes, "{kind}");
        drop((session, remote, source, target, own, theirs));
        eventually("all handles are let go", || turn.get("live") <= live + 4);
    }
}

#[test]
fn small_pieces_are_gathered_and_scattered_on_the_device() {
    let turn = Turn::take();
    const PIECE: u64 = 64;
    const COUNT: u32 = 1 << 12;
    let runs = RunList::new(vec![StridedRun {
        src: ByteOffset(0),
        dst: ByteOffset(32),
        len: ByteLen(PIECE),
        count: COUNT,
        src_stride: 4 * PIECE,
        dst_stride: 2 * PIECE,
    }])
    .unwrap();
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        let (own, theirs) = (
            Bytes::allocate(Some(DeviceRuntime::Cuda), 0),
            Bytes::allocate(None, 0),
        );
        let sides = Sides::open(kind, &own, &theirs);
        let (before, calls) = (device_report(), turn.get("calls"));
        check_both_directions(&sides, &own, &theirs, &runs, kind.name());
        let gathered = device_report().gathered_pieces - before.gathered_pieces;
        assert_eq!(
            gathered,
            2 * u64::from(COUNT),
            "{kind}: out of the device, and into it"
        );
        let calls = turn.get("calls") - calls;
        assert!(
            calls < 100,
            "{kind}: {calls} calls for {COUNT} pieces in each direction"
        );
        // A few large ones go by themselves.
        let before = device_report();
        sides
            .transfer(Direction::Write, one_run(0, 0, 256 << 10))
            .unwrap();
        let after = device_report();
        assert_eq!(after.gathered_pieces, before.gathered_pieces, "{kind}");
        assert!(after.direct_pieces > before.direct_pieces, "{kind}");
    }
}

/// What an engine of a scripting language registers: pools in device memory, and rows in host
/// memory that is its caller's own.
#[test]
fn each_kind_of_memory_has_a_session_over_a_transport_that_reaches_it() {
    let _turn = Turn::take();
    let engine = |key, kinds: &[TransportKind]| {
        let mut config = config(key, kinds[0]);
        config.transports = kinds.to_vec();
        Engine::start(config).unwrap()
    };
    let order = [TransportKind::Shm, TransportKind::Cma, TransportKind::Tcp];
    for (kinds, wanted) in [
        (&order[..], [TransportKind::Shm, TransportKind::Cma]),
        (&order[2..], [TransportKind::Tcp, TransportKind::Tcp]),
    ] {
        let (source, target) = (engine("source", kinds), engine("target", kinds));
        // Peers may be told of an engine before it has registered anything.
        let desc = through_the_wire(&target.desc());
        let mut sessions = PeerSessions::default();
        let mut opened = Vec::new();
        for is_on_device in [true, false] {
            let [own, theirs] = [0, 1].map(|number| match is_on_device {
                true => Bytes::allocate(Some(DeviceRuntime::Cuda), number).memory(),
                false => AnyMemory::from(&ForeignMemory::allocate(ByteLen(BYTES)).unwrap()),
            });
            let whole = (ByteOffset(0), ByteLen(BYTES));
            let own = source.register(own, whole.0, whole.1, "kv").unwrap();
            let theirs = target.register(theirs, whole.0, whole.1, "kv").unwrap();
            own.write(ByteOffset(0), &pattern(8)).unwrap();
            let remote = RemoteRegion::from_desc(&theirs.desc()).unwrap();
            let reach = Reach::of(&own, &remote);
            assert_eq!(reach, Reach::between(Some(&own), Some(&theirs.desc())));
            let session = sessions.open(&source, &desc, &reach).unwrap();
            let again = sessions.open(&source, &desc, &reach).unwrap();
            assert_eq!(session.connection(), again.connection());
            let pair = WritePair {
                local: own,
                remote,
                runs: one_run(0, 0, BYTES),
            };
            let batch = WriteBatch { pairs: vec![pair] };
            session.transfer(Direction::Write, batch, DEADLINE).unwrap();
            let mut seen = vec![0; BYTES as usize];
            theirs.read(ByteOffset(0), &mut seen).unwrap();
            assert!(seen == pattern(8), "{kinds:?}");
            opened.push(session);
        }
        let transports: Vec<_> = opened.iter().map(Session::transport).collect();
        assert_eq!(transports, wanted);
        let is_shared = opened[0].connection() == opened[1].connection();
        assert_eq!(
            is_shared,
            wanted[0] == wanted[1],
            "one session for each transport"
        );
        opened[0].close();
        assert_eq!(
            sessions.take_dead().map(|lost| lost.connection()),
            Some(opened[0].connection())
        );
        assert_eq!(sessions.is_empty(), is_shared);
    }
}

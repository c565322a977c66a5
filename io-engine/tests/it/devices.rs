//! Device memory, over the stand-in for its drivers: every transport moves it exactly, nothing of
//! the host's processor touches it, and each promise has a test that fails without its guard.
//!
//! The stand-in's settings are the process's, so the tests here take turns.

use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::plan::{RunList, StridedRun};
use io_engine::{
    AnyMemory, ByteLen, ByteOffset, DeviceMemory, DeviceRuntime, Direction, Engine, ForeignMemory,
    Location, Memory, PeerSessions, Reach, Region, RemoteRegion, Session, TransferResult,
    TransportError, TransportErrorKind, TransportKind, WriteBatch, WritePair, device_drivers,
    device_report, set_device_library,
};

use rustix::process::Signal;

use crate::peers::{PeerProcess, heard_where, say_where, told_where};
use crate::support::{
    BYTES, DEADLINE, Random, assert_passes_alone, config, eventually, one_run, random_runs,
    through_the_wire,
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
fn a_driver_that_refuses_export_is_passed_over_loudly() {
    let turn = Turn::take();
    turn.set("refuse_export", 1);
    let (own, theirs) = (
        Bytes::allocate(Some(DeviceRuntime::Cuda), 0),
        Bytes::allocate(Some(DeviceRuntime::Cuda), 1),
    );
    let order = [TransportKind::Shm, TransportKind::Cma, TransportKind::Tcp];
    let sides = Sides::with_order(&order, &own, &theirs);
    assert_eq!(
        sides.session.transport(),
        TransportKind::Tcp,
        "the next that reaches it"
    );
    let passed_over = format!("{:?}", sides.session.passed_over());
    for words in [
        "CUDA_ERROR_NOT_SUPPORTED",
        "(801)",
        "operation not supported",
    ] {
        assert!(passed_over.contains(words), "{passed_over}");
    }
    check_both_directions(&sides, &own, &theirs, &one_run(0, 0, BYTES), "staged");
    // Nobody offers anything else: the session is refused, not opened to fail.
    let (source, target) = (
        Engine::start(config("source", TransportKind::Shm)).unwrap(),
        Engine::start(config("target", TransportKind::Shm)).unwrap(),
    );
    let _region = theirs.register(&target);
    let error = source
        .connect(&through_the_wire(&target.desc()))
        .unwrap_err();
    assert_eq!(error.kind(), TransportErrorKind::NoCommonTransport);
    assert!(
        error.to_string().contains("CUDA_ERROR_NOT_SUPPORTED"),
        "{error}"
    );
}

#[test]
fn the_calling_threads_device_is_as_it_was_though_the_driver_loses_it() {
    let turn = Turn::take();
    turn.set("lose_current_device", 1);
    let current = Current::open();
    for before in [0, 1] {
        current.set(before);
        let memory = DeviceMemory::allocate(DeviceRuntime::Hip, 0, ByteLen(BYTES)).unwrap();
        assert_eq!(current.get(), before, "allocating");
        memory.write(ByteOffset(0), &pattern(1)).unwrap();
        assert_eq!(current.get(), before, "writing");
        let mut seen = vec![0; BYTES as usize];
        memory.read(ByteOffset(0), &mut seen).unwrap();
        assert_eq!(current.get(), before, "reading");
        assert!(seen == pattern(1));
        // SAFETY: the keeper is the memory around it.
        let again = unsafe {
            DeviceMemory::new(
                DeviceRuntime::Hip,
                memory.address(),
                ByteLen(64),
                memory.clone(),
            )
        };
        assert_eq!(current.get(), before, "taking into use");
        drop((again, memory));
        assert_eq!(current.get(), before, "freeing");
    }
}

/// The current device of the calling thread, as an engine in this process would ask for it.
struct Current {
    get: unsafe extern "C" fn(*mut i32) -> i32,
    set: unsafe extern "C" fn(i32) -> i32,
}

impl Current {
    fn open() -> Self {
        let name = CString::new(library().as_os_str().as_bytes()).unwrap();
        // SAFETY: the library is open already; both are functions of it, with these signatures.
        unsafe {
            let handle = libc::dlopen(name.as_ptr(), libc::RTLD_NOW);
            Self {
                get: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut i32) -> i32>(
                    libc::dlsym(handle, c"hipGetDevice".as_ptr()),
                ),
                set: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(i32) -> i32>(
                    libc::dlsym(handle, c"hipSetDevice".as_ptr()),
                ),
            }
        }
    }

    fn get(&self) -> i32 {
        let mut device = -1;
        // SAFETY: the call writes one int.
        assert_eq!(unsafe { (self.get)(&mut device) }, 0);
        device
    }

    fn set(&self, device: i32) {
        // SAFETY: takes a number.
        assert_eq!(unsafe { (self.set)(device) }, 0);
    }
}

#[test]
fn a_copy_that_completes_late_is_not_reported_early() {
    let turn = Turn::take();
    for kind in KINDS {
        for (own, theirs) in [(true, false), (false, true), (true, true)] {
            let place = |is_device: bool| is_device.then_some(DeviceRuntime::Cuda);
            let (own, theirs) = (
                Bytes::allocate(place(own), 0),
                Bytes::allocate(place(theirs), 0),
            );
            let sides = Sides::open(kind, &own, &theirs);
            own.write(0, &pattern(5));
            theirs.write(0, &pattern(6));
            turn.set("delay_microseconds", 30_000);
            let handle = sides.session.write(sides.batch(one_run(0, 0, 64 << 10)));
            handle.wait(DEADLINE).expect("it ends").unwrap();
            // What is late now was reported too early.
            turn.set("delay_microseconds", 0);
            let wanted = expected(&pattern(5), &pattern(6), &one_run(0, 0, 64 << 10));
            assert!(theirs.contents() == wanted, "{kind}");
        }
    }
}

#[test]
fn out_of_pinned_memory_is_an_error_that_says_so_or_a_slower_copy() {
    let turn = Turn::take();
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        // Before there is memory again, which would keep the buffers.
        eventually("nothing is pinned", || turn.get("pinned_now") == 0);
        let (own, theirs) = (
            Bytes::allocate(None, 0),
            Bytes::allocate(Some(DeviceRuntime::Cuda), 0),
        );
        let sides = Sides::open(kind, &own, &theirs);
        own.write(0, &pattern(8));
        turn.set("pinned_bytes", 0);
        let error = sides
            .transfer(Direction::Write, one_run(0, 0, BYTES))
            .unwrap_err();
        assert_eq!(error.kind(), TransportErrorKind::Device, "{kind}: {error}");
        for words in [
            "pinned host memory",
            "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory",
        ] {
            assert!(error.to_string().contains(words), "{kind}: {error}");
        }
        // One buffer is enough, also for many pieces.
        turn.set("pinned_bytes", 512 << 10);
        sides
            .transfer(Direction::Write, one_run(0, 0, BYTES))
            .unwrap();
        turn.set("pinned_bytes", u64::MAX);
        assert!(theirs.contents() == pattern(8), "{kind}");
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

#[test]
fn a_device_that_is_reset_fails_what_is_under_way_with_the_drivers_words() {
    // The stand-in does not recover.
    assert_passes_alone("devices::reset_in_mid_transfer");
}

#[test]
#[ignore = "run by the test above, in a process of its own"]
fn reset_in_mid_transfer() {
    let turn = Turn::take();
    let (own, theirs) = (
        Bytes::allocate(Some(DeviceRuntime::Cuda), 0),
        Bytes::allocate(Some(DeviceRuntime::Cuda), 1),
    );
    let tcp = Sides::open(TransportKind::Tcp, &own, &theirs);
    let shm = Sides::open(TransportKind::Shm, &own, &theirs);
    let host = (Bytes::allocate(None, 0), Bytes::allocate(None, 0));
    let beside = Sides::open(TransportKind::Tcp, &host.0, &host.1);
    shm.transfer(Direction::Write, one_run(0, 0, 4096)).unwrap();
    // Of three batches each has one copy under way: out of a device, within, and into one.
    let into = Sides::open(TransportKind::Shm, &host.0, &theirs);
    into.transfer(Direction::Write, one_run(0, 0, 4096))
        .unwrap();
    tcp.transfer(Direction::Read, one_run(0, 0, 4096)).unwrap();
    turn.set("delay_microseconds", 300_000);
    let calls = turn.get("calls");
    let begun: Vec<_> = [&tcp, &shm, &into]
        .map(|sides| sides.session.write(sides.batch(one_run(0, 0, 64 << 10))))
        .into();
    eventually("each has begun its copy", || turn.get("calls") == calls + 3);
    turn.set("reset", 1);
    let failed = |error: TransportError| {
        assert_eq!(error.kind(), TransportErrorKind::Device, "{error}");
        let words = "CUDA_ERROR_CONTEXT_IS_DESTROYED (709)";
        assert!(error.to_string().contains(words), "{error}");
        assert!(error.is_quiesced(), "{error}");
    };
    for handle in begun {
        failed(handle.wait(DEADLINE).expect("it ends").unwrap_err());
    }
    // What comes later fails, too.
    for sides in [&tcp, &shm, &into] {
        for direction in [Direction::Write, Direction::Read] {
            failed(sides.transfer(direction, one_run(0, 0, BYTES)).unwrap_err());
        }
    }
    // Host memory goes on.
    host.0.write(0, &pattern(4));
    beside
        .transfer(Direction::Write, one_run(0, 0, BYTES))
        .unwrap();
    assert!(host.1.contents() == pattern(4));
}

#[test]
fn a_batch_waits_for_the_event_behind_which_its_bytes_are() {
    let turn = Turn::take();
    let (own, theirs) = (
        Bytes::allocate(Some(DeviceRuntime::Cuda), 0),
        Bytes::allocate(None, 0),
    );
    let producer = Producer::open();
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        let sides = Sides::open(kind, &own, &theirs);
        own.write(0, &pattern(1));
        let (Bytes::Device(from), Bytes::Device(to)) =
            (Bytes::allocate(Some(DeviceRuntime::Cuda), 0), own.clone())
        else {
            unreachable!("both are on the device");
        };
        from.write(ByteOffset(0), &pattern(2)).unwrap();
        turn.set("delay_microseconds", 50_000);
        let event = producer.copy_late(from.address(), to.address(), BYTES as usize);
        // The lateness is the producer's; the batch's own copies are quick.
        turn.set("delay_microseconds", 0);
        // SAFETY: the event lives to the end of the test.
        let handle = unsafe {
            sides
                .session
                .write_after(sides.batch(one_run(0, 0, BYTES)), event)
        };
        handle.wait(DEADLINE).expect("it ends").unwrap();
        assert!(theirs.contents() == pattern(2), "{kind}");
    }
}

/// An engine's own stream, on which it makes what is sent.
struct Producer {
    handle: *mut c_void,
    stream: u64,
}

impl Producer {
    fn open() -> Self {
        let name = CString::new(library().as_os_str().as_bytes()).unwrap();
        // SAFETY: the library is open already.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        let mut producer = Self { handle, stream: 0 };
        let mut stream = 0u64;
        // SAFETY: functions of the library, with these signatures.
        unsafe {
            producer.call::<unsafe extern "C" fn(i32) -> i32>(c"hipSetDevice", |call| call(0));
            producer
                .call::<unsafe extern "C" fn(*mut u64, u32) -> i32>(c"cuStreamCreate", |call| {
                    call(&mut stream, 1)
                });
        }
        producer.stream = stream;
        producer
    }

    /// # Safety
    /// `F` is the type of the function with this name.
    unsafe fn call<F: Copy>(&self, name: &std::ffi::CStr, with: impl FnOnce(F) -> i32) {
        // SAFETY: the handle is open.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        // SAFETY: a function's address, of the type that the caller says.
        let function = unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) };
        assert_eq!(with(function), 0, "{name:?}");
    }

    /// Begins a copy and returns the event behind it.
    fn copy_late(&self, src: u64, dst: u64, len: usize) -> u64 {
        let mut event = 0u64;
        // SAFETY: functions of the library, with these signatures.
        unsafe {
            self.call::<unsafe extern "C" fn(i32) -> i32>(c"hipSetDevice", |call| call(0));
            self.call::<unsafe extern "C" fn(*mut u64, u32) -> i32>(c"cuEventCreate", |call| {
                call(&mut event, 2)
            });
            self.call::<unsafe extern "C" fn(u64, u64, usize, u64) -> i32>(
                c"cuMemcpyAsync",
                |call| call(dst, src, len, self.stream),
            );
            self.call::<unsafe extern "C" fn(u64, u64) -> i32>(c"cuEventRecord", |call| {
                call(event, self.stream)
            });
        }
        // The stream has taken the copy before the lateness is set back.
        std::thread::sleep(Duration::from_millis(5));
        event
    }
}

/// An engine with a pool in device memory in a process of its own. Says the byte sum of its pool,
/// writes it into the pool named on its input, and deregisters.
#[test]
#[ignore = "started by other tests as a peer process"]
fn peer_process() {
    let _turn = Turn::take();
    let kind = std::env::var("FERRY_PEER_TRANSPORT")
        .unwrap()
        .parse()
        .unwrap();
    let engine = Engine::start(config("peer", kind)).unwrap();
    let memory = Bytes::allocate(Some(DeviceRuntime::Cuda), 1);
    memory.write(0, &pattern(0));
    let region = memory.register(&engine);
    say_where(&engine, &region);
    let mut written_to = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        if let Some(place) = line.strip_prefix("write ") {
            let (peer, remote) = heard_where(place);
            let session = engine.connect(&peer).unwrap();
            let pair = WritePair {
                local: region.clone(),
                remote,
                runs: one_run(0, 0, BYTES),
            };
            let batch = WriteBatch { pairs: vec![pair] };
            session.transfer(Direction::Write, batch, DEADLINE).unwrap();
            // It goes on holding what it has mapped.
            written_to.push(session);
            println!("said 1");
            continue;
        }
        match line.as_str() {
            "sum" => {
                let sum: u64 = memory.contents().iter().map(|byte| u64::from(*byte)).sum();
                println!("said {sum}");
            }
            "deregister" => println!("said {}", u64::from(engine.deregister(&region, DEADLINE))),
            other => panic!("{other:?} is no command"),
        }
    }
}

#[test]
fn device_memory_of_another_process_is_shared_and_survives_its_death_without_a_leak() {
    let turn = Turn::take();
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        let live = turn.get("live");
        let mut peer = PeerProcess::start_test(kind, "devices::peer_process");
        let engine = Engine::start(config("source", kind)).unwrap();
        let own = Bytes::allocate(Some(DeviceRuntime::Cuda), 0);
        own.write(0, &pattern(11));
        let region = own.register(&engine);
        let session = engine.connect(&peer.engine).unwrap();
        let batch = |runs| WriteBatch {
            pairs: vec![WritePair {
                local: region.clone(),
                remote: peer.region.clone(),
                runs,
            }],
        };
        let whole = batch(one_run(0, 0, BYTES));
        session
            .transfer(Direction::Write, whole.clone(), DEADLINE)
            .unwrap();
        let sum: u64 = pattern(11).iter().map(|byte| u64::from(*byte)).sum();
        assert_eq!(peer.ask("sum"), sum, "{kind}");
        own.write(0, &vec![0; BYTES as usize]);
        session
            .transfer(Direction::Read, whole.clone(), DEADLINE)
            .unwrap();
        assert!(own.contents() == pattern(11), "{kind}");
        peer.signal(Signal::KILL);
        peer.child.wait().unwrap();
        // What is mapped can still be written to; whether anybody is there is asked for here.
        eventually("the death is noticed", || !session.is_alive());
        let error = session
            .transfer(Direction::Write, whole, DEADLINE)
            .unwrap_err();
        assert_eq!(
            error.kind(),
            TransportErrorKind::PeerDead,
            "{kind}: {error}"
        );
        drop((session, engine, region, own));
        // What was gathered in is the lanes', and goes with the last memory.
        eventually("all that was imported is let go", || {
            turn.get("live") == live
        });
    }
}

#[test]
fn a_region_in_device_memory_is_free_once_its_writer_is_dead_or_has_let_go() {
    let turn = Turn::take();
    let kind = TransportKind::Shm;
    let mut peer = PeerProcess::start_test(kind, "devices::peer_process");
    let engine = Engine::start(config("source", kind)).unwrap();
    let own = Bytes::allocate(None, 0);
    let region = own.register(&engine);
    let session = engine.connect(&peer.engine).unwrap();
    let pair = WritePair {
        local: region,
        remote: peer.region.clone(),
        runs: one_run(0, 0, BYTES),
    };
    let batch = WriteBatch { pairs: vec![pair] };
    session
        .transfer(Direction::Write, batch.clone(), DEADLINE)
        .unwrap();
    assert_eq!(
        peer.ask("deregister"),
        1,
        "this side lets go when it is told"
    );
    let error = session
        .transfer(Direction::Write, batch, DEADLINE)
        .unwrap_err();
    assert_eq!(error.kind(), TransportErrorKind::NotRegistered, "{error}");
    // The other way about: the peer writes into memory of this process.
    let mut peer = PeerProcess::start_test(kind, "devices::peer_process");
    let live = turn.get("live");
    let written = Bytes::allocate(Some(DeviceRuntime::Cuda), 0);
    let region = written.register(&engine);
    peer.ask(&format!("write {}", told_where(&engine, &region)));
    assert!(written.contents() == pattern(0));
    peer.freeze();
    assert!(
        !engine.deregister(&region, Duration::from_millis(100)),
        "a writer that lives and has not let go holds it"
    );
    peer.signal(Signal::KILL);
    assert!(engine.deregister(&region, DEADLINE), "a dead one does not");
    drop((region, written));
    eventually("nothing is left of it", || turn.get("live") == live);
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

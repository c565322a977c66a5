//! Drivers that behave badly or late.

use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use io_engine::{
    ByteLen, ByteOffset, DeviceMemory, DeviceRuntime, Direction, Engine, TransportError,
    TransportErrorKind, TransportKind,
};

use super::{Bytes, KINDS, Sides, Turn, check_both_directions, expected, library, pattern};
use crate::support::{
    BYTES, DEADLINE, assert_passes_alone, config, eventually, one_run, through_the_wire,
};

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
fn a_device_that_is_reset_fails_what_is_under_way_with_the_drivers_words() {
    // The stand-in does not recover.
    assert_passes_alone("devices::drivers::reset_in_mid_transfer");
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

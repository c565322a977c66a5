//! Lets a network device into a device's memory: by a dma-buf that the device's driver exports, or
//! by the address, which a kernel module of that driver resolves ("peer memory").
//!
//! The registering itself is the caller's, so that this can be tested with a network device that is
//! none.

use std::os::fd::{AsFd, BorrowedFd};

use common::ids::{ByteLen, ByteOffset};

use super::DeviceMemory;
use super::nic_path::NicPath;
use crate::error::{TransportError, TransportErrorKind};
use crate::region::Location;

/// What a peer may do with registered memory, as verbs number it: this side's network device and
/// the peer's may write, and the peer's may read. Remote atomics are not asked for: nothing here
/// uses them, and network devices refuse them on memory of other devices.
pub(crate) const PEER_ACCESS: u32 = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ;

const LOCAL_WRITE: u32 = 1;
const REMOTE_WRITE: u32 = 1 << 1;
const REMOTE_READ: u32 = 1 << 2;

/// What one registration is to cover. Drivers export a range of one allocation only, so a region
/// that lies in several is registered in as many pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NicChunk {
    /// The device's address of its first byte.
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// An exported range, and where in it the chunk begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DmaBuf<'a> {
    pub(crate) fd: BorrowedFd<'a>,
    pub(crate) offset: u64,
}

/// Registers a range of a device's memory by the first of the ways that does: `register` is called
/// for each chunk, with a dma-buf or without, and with what peers may do; what it has made is
/// dropped where a later chunk is refused. Without an `order` it is the vendor's. Every refusal is
/// logged.
///
/// # Errors
/// [`TransportErrorKind::Memory`] when no way leads there, with why for each.
pub(crate) fn register<T>(
    memory: &DeviceMemory,
    (offset, len): (ByteOffset, ByteLen),
    order: &[NicPath],
    mut register: impl FnMut(NicChunk, Option<DmaBuf<'_>>, u32) -> Result<T, TransportError>,
) -> Result<Vec<(NicChunk, T)>, TransportError> {
    let by_vendor = match memory.location() {
        Location::Device { runtime, .. } => NicPath::order(runtime),
        Location::Host => NicPath::ALL,
    };
    let order = if order.is_empty() { &by_vendor } else { order };
    let chunks = memory.chunks(offset, len)?;
    let mut refused: Vec<String> = Vec::new();
    for path in order {
        let made = chunks.iter().map(|(start, len)| {
            let address = memory.device_address(start.get(), len.get())?;
            let chunk = NicChunk {
                address,
                len: len.get(),
            };
            let registered = match path {
                NicPath::PeerMemory => register(chunk, None, PEER_ACCESS)?,
                NicPath::DmaBuf => {
                    let (descriptor, lead) = memory.dma_buf(*start, *len)?;
                    let dma_buf = DmaBuf {
                        fd: descriptor.as_fd(),
                        offset: lead.get(),
                    };
                    register(chunk, Some(dma_buf), PEER_ACCESS)?
                }
            };
            Ok((chunk, registered))
        });
        match made.collect::<Result<Vec<_>, TransportError>>() {
            Ok(made) => return Ok(made),
            Err(error) => {
                tracing::warn!(?memory, %path, %error, "a network device is not let in this way");
                refused.push(format!("{path}: {error}"));
            }
        }
    }
    Err(TransportError::quiesced(
        TransportErrorKind::Memory,
        format!(
            "the network device does not reach {memory:?} ({})",
            refused.join("; ")
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs::File;
    use std::io::Seek;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::FileExt;
    use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

    use super::*;
    use crate::device::set_device_library;
    use crate::region::DeviceRuntime;

    const UNIT: u64 = 2 << 20;
    const REMOTE_ATOMIC: u32 = 1 << 3;

    type Set = unsafe extern "C" fn(*const libc::c_char, u64) -> bool;

    /// The stand-in for a driver; its settings are the process's, so tests take turns.
    static SET: LazyLock<Mutex<Set>> = LazyLock::new(|| {
        let binary = std::env::current_exe().unwrap();
        let path = binary.parent().unwrap().join("libdevice_stand_in.so");
        for runtime in [DeviceRuntime::Cuda, DeviceRuntime::Hip] {
            assert!(set_device_library(runtime, &path));
        }
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: the library's constructors have no precondition; it is never closed. The function
        // is the library's, with this signature.
        Mutex::new(unsafe {
            let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            assert!(!handle.is_null(), "{path:?} was not built");
            std::mem::transmute::<*mut libc::c_void, Set>(libc::dlsym(
                handle,
                c"ferry_stand_in_set".as_ptr(),
            ))
        })
    });

    struct Turn(MutexGuard<'static, Set>);

    impl Turn {
        fn take() -> Self {
            Self(SET.lock().unwrap_or_else(PoisonError::into_inner))
        }

        fn refuse_dma_bufs(&self, refuses: bool) {
            // SAFETY: a C string.
            assert!(unsafe { (self.0)(c"refuse_dma_buf".as_ptr(), refuses.into()) });
        }
    }

    impl Drop for Turn {
        fn drop(&mut self) {
            self.refuse_dma_bufs(false);
        }
    }

    /// A registration of a network device that writes through the descriptors that it was given.
    struct Registration {
        chunk: NicChunk,
        file_opt: Option<File>,
        /// Where the chunk begins in the descriptor's file.
        base: u64,
    }

    fn registration(chunk: NicChunk, dma_buf_opt: Option<DmaBuf<'_>>) -> Registration {
        let mut made = Registration {
            chunk,
            file_opt: None,
            base: 0,
        };
        if let Some(DmaBuf { fd, offset }) = dma_buf_opt {
            let mut file = File::from(fd.try_clone_to_owned().unwrap());
            // The stand-in's descriptors say by their position what a dma-buf calls 0.
            made.base = file.stream_position().unwrap() + offset;
            made.file_opt = Some(file);
        }
        made
    }

    fn rejected(what: &str) -> TransportError {
        TransportError::quiesced(TransportErrorKind::Memory, what)
    }

    /// As a peer's write comes in: to a device's address, in pieces where registrations end.
    fn write(registrations: &[Registration], address: u64, bytes: &[u8]) {
        let end = address + bytes.len() as u64;
        let mut written = 0;
        for Registration {
            chunk,
            file_opt,
            base,
        } in registrations
        {
            let (from, to) = (
                chunk.address.max(address),
                end.min(chunk.address + chunk.len),
            );
            if from < to {
                let part = &bytes[(from - address) as usize..(to - address) as usize];
                let file = file_opt.as_ref().expect("a dma-buf");
                file.write_all_at(part, base + (from - chunk.address))
                    .unwrap();
                written += part.len();
            }
        }
        assert_eq!(written, bytes.len(), "every byte belongs to a registration");
    }

    fn pattern(len: u64) -> Vec<u8> {
        (0..len).map(|at| (at * 31 + at / 251) as u8).collect()
    }

    fn check(memory: &DeviceMemory, offset: u64, bytes: &[u8]) {
        let mut seen = vec![0; memory.len().get() as usize];
        memory.read(ByteOffset(0), &mut seen).unwrap();
        let end = offset as usize + bytes.len();
        assert!(seen[offset as usize..end] == *bytes, "where they belong");
        assert!(
            seen[..offset as usize].iter().all(|byte| *byte == 0xAB),
            "in front"
        );
        assert!(seen[end..].iter().all(|byte| *byte == 0xAB), "behind");
    }

    fn filled(memory: DeviceMemory) -> DeviceMemory {
        let background = vec![0xAB; memory.len().get() as usize];
        memory.write(ByteOffset(0), &background).unwrap();
        memory
    }

    #[test]
    fn a_page_inside_a_larger_allocation_is_where_the_nic_writes_it() {
        let _turn = Turn::take();
        const LEAD: u64 = 5 * 4096 + 512;
        let whole = DeviceMemory::allocate(DeviceRuntime::Cuda, 0, ByteLen(UNIT)).unwrap();
        let whole = filled(whole);
        let bytes = pattern(3 * 4096);
        let range = (ByteOffset(LEAD), ByteLen(bytes.len() as u64));
        let made = register(&whole, range, &[], |chunk, dma_buf_opt, _| {
            Ok(registration(chunk, dma_buf_opt))
        });
        let made: Vec<_> = made.unwrap().into_iter().map(|(_, made)| made).collect();
        assert_eq!(made.len(), 1);
        write(&made, whole.address() + LEAD, &bytes);
        check(&whole, LEAD, &bytes);
    }

    #[test]
    fn each_handle_of_a_pool_of_several_is_exported_on_its_own() {
        let _turn = Turn::take();
        let len = ByteLen(4 * UNIT);
        let pool =
            DeviceMemory::allocate_in_parts(DeviceRuntime::Cuda, 1, len, ByteLen(UNIT)).unwrap();
        let pool = filled(pool);
        // From inside the first handle to inside the last one.
        let (start, bytes) = (UNIT / 2 + 100, pattern(3 * UNIT - 4096));
        let range = (ByteOffset(start), ByteLen(bytes.len() as u64));
        let made = register(&pool, range, &[NicPath::DmaBuf], |chunk, dma_buf_opt, _| {
            Ok(registration(chunk, dma_buf_opt))
        });
        let made: Vec<_> = made.unwrap().into_iter().map(|(_, made)| made).collect();
        assert_eq!(made.len(), 4);
        write(&made, pool.address() + start, &bytes);
        check(&pool, start, &bytes);
    }

    #[test]
    fn a_driver_that_refuses_dma_bufs_falls_back_as_configured() {
        let turn = Turn::take();
        turn.refuse_dma_bufs(true);
        let memory = DeviceMemory::allocate(DeviceRuntime::Cuda, 0, ByteLen(UNIT)).unwrap();
        let range = (ByteOffset(0), ByteLen(UNIT));
        let by_address = |_: NicChunk, dma_buf_opt: Option<DmaBuf<'_>>, _: u32| {
            assert!(dma_buf_opt.is_none());
            Ok(())
        };
        let made = register(&memory, range, &[], by_address).unwrap();
        assert_eq!(made[0].0.address, memory.address());
        let refused = register(&memory, range, &[NicPath::DmaBuf], by_address).unwrap_err();
        for words in ["dma-buf:", "CUDA_ERROR_NOT_SUPPORTED", "(801)"] {
            assert!(refused.to_string().contains(words), "{refused}");
        }
    }

    #[test]
    fn a_nic_that_rejects_atomics_takes_our_access_flags() {
        let _turn = Turn::take();
        let memory = DeviceMemory::allocate(DeviceRuntime::Hip, 1, ByteLen(UNIT)).unwrap();
        let range = (ByteOffset(0), ByteLen(UNIT));
        let strict = |_: NicChunk, _: Option<DmaBuf<'_>>, access: u32| match access & REMOTE_ATOMIC
            != 0
            || access & REMOTE_WRITE == 0
        {
            true => Err(rejected("unsupported access flags")),
            false => Ok(()),
        };
        register(&memory, range, &[], strict).unwrap();
    }

    #[test]
    fn a_nic_that_rejects_the_access_flags_of_one_way_is_let_in_by_the_other_or_says_why() {
        let _turn = Turn::take();
        for runtime in [DeviceRuntime::Cuda, DeviceRuntime::Hip] {
            let memory = DeviceMemory::allocate(runtime, 0, ByteLen(2 * UNIT)).unwrap();
            let range = (ByteOffset(4096), ByteLen(UNIT));
            for refused in NicPath::ALL {
                let mut tried = Vec::new();
                let made = register(&memory, range, &[], |_, dma_buf_opt, _| {
                    let path = match dma_buf_opt {
                        Some(_) => NicPath::DmaBuf,
                        None => NicPath::PeerMemory,
                    };
                    tried.push(path);
                    match path == refused {
                        true => Err(rejected("unsupported access flags")),
                        false => Ok(path),
                    }
                });
                assert_ne!(made.unwrap()[0].1, refused);
                // The vendor's order; the second only where the first was refused.
                let order = NicPath::order(runtime);
                let wanted = if order[0] == refused {
                    &order[..]
                } else {
                    &order[..1]
                };
                assert_eq!(tried, wanted);
            }
            let nobody = |_: NicChunk, _: Option<DmaBuf<'_>>, _: u32| -> Result<(), _> {
                Err(rejected("unsupported access flags"))
            };
            let error = register(&memory, range, &[], nobody)
                .unwrap_err()
                .to_string();
            for words in ["dma-buf: unsupported", "peer-memory: unsupported"] {
                assert!(error.contains(words), "{error}");
            }
        }
    }

    #[test]
    fn what_was_registered_before_a_refusal_is_let_go() {
        let _turn = Turn::take();
        let len = ByteLen(3 * UNIT);
        let pool =
            DeviceMemory::allocate_in_parts(DeviceRuntime::Cuda, 0, len, ByteLen(UNIT)).unwrap();
        let held = std::sync::Arc::new(());
        let mut count = 0;
        let made = register(
            &pool,
            (ByteOffset(0), len),
            &[NicPath::DmaBuf],
            |_, _, _| {
                count += 1;
                match count {
                    3 => Err(rejected("no more regions")),
                    _ => Ok(std::sync::Arc::clone(&held)),
                }
            },
        );
        assert!(made.is_err());
        assert_eq!((count, std::sync::Arc::strong_count(&held)), (3, 1));
    }
}

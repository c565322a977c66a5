//! A driver's shared library, opened when it is first needed, and the calls that CUDA and HIP have
//! alike: with one signature under two names.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// What a handle is to be made of; `CUmemAllocationProp`, and HIP's, which is laid out alike.
#[repr(C)]
pub(crate) struct AllocationProperties {
    /// 1: pinned.
    kind: c_int,
    /// 1: a file descriptor.
    handle_types: c_int,
    /// 1: a device.
    location_kind: c_int,
    location: c_int,
    windows: *mut c_void,
    compression: u8,
    /// Whether the network device may reach it.
    is_rdma_capable: u8,
    usage: u16,
    reserved: [u8; 4],
}

impl AllocationProperties {
    pub(crate) const fn exportable(device: c_int) -> Self {
        Self {
            kind: 1,
            handle_types: FILE_DESCRIPTOR,
            location_kind: 1,
            location: device,
            windows: std::ptr::null_mut(),
            compression: 0,
            is_rdma_capable: 1,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// A handle's form for other processes: a file descriptor.
pub(crate) const FILE_DESCRIPTOR: c_int = 1;

/// A range's form for network devices: a dma-buf's descriptor.
pub(crate) const DMA_BUF: c_int = 1;

/// Who may reach mapped memory; `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct Access {
    location_kind: c_int,
    location: c_int,
    flags: c_int,
}

impl Access {
    pub(crate) const fn read_and_write(device: c_int) -> Self {
        Self {
            location_kind: 1,
            location: device,
            flags: 3,
        }
    }
}

/// The attribute of an address that says on which device it is.
pub(crate) const DEVICE_ORDINAL: c_int = 9;

/// A stream that does not wait for the default one, nor the default one for it.
pub(crate) const NON_BLOCKING: c_uint = 1;
/// An event that takes no time stamps.
pub(crate) const WITHOUT_TIMING: c_uint = 2;
/// Pinned for every context.
pub(crate) const PORTABLE: c_uint = 1;

macro_rules! calls {
    ($($field:ident: fn($($argument:ty),*) = $cuda:literal, $hip:literal;)*) => {
        /// The calls that both have.
        pub(crate) struct Calls {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            /// Since CUDA 11.7, and ROCm 7.
            pub(crate) range_handle_opt: Option<RangeHandle>,
        }

        impl Calls {
            /// Finds them; `is_cuda` chooses between the names.
            ///
            /// # Safety
            /// The library is CUDA's driver or HIP, or one that has their calls.
            pub(crate) unsafe fn resolve(library: &Library, is_cuda: bool) -> Result<Self, String> {
                $(
                    let name = if is_cuda { $cuda } else { $hip };
                    // SAFETY: the caller says whose library it is; the call has this signature
                    // there.
                    let $field = unsafe { library.call(name)? };
                )*
                let name = if is_cuda {
                    c"cuMemGetHandleForAddressRange"
                } else {
                    c"hipMemGetHandleForAddressRange"
                };
                // SAFETY: as above.
                let range_handle_opt = unsafe { library.call(name) }.ok();
                Ok(Self { $($field,)* range_handle_opt })
            }
        }
    };
}

pub(crate) type RangeHandle = unsafe extern "C" fn(*mut c_void, u64, usize, c_int, u64) -> c_int;

calls! {
    init: fn(c_uint) = c"cuInit", c"hipInit";
    device_count: fn(*mut c_int) = c"cuDeviceGetCount", c"hipGetDeviceCount";
    device: fn(*mut c_int, c_int) = c"cuDeviceGet", c"hipDeviceGet";
    device_uuid: fn(*mut [u8; 16], c_int) = c"cuDeviceGetUuid_v2", c"hipDeviceGetUuid";
    allocate: fn(*mut u64, usize) = c"cuMemAlloc_v2", c"hipMalloc";
    free: fn(u64) = c"cuMemFree_v2", c"hipFree";
    allocation_of: fn(*mut u64, *mut usize, u64) =
        c"cuMemGetAddressRange_v2", c"hipMemGetAddressRange";
    pointer_attribute: fn(*mut c_void, c_int, u64) =
        c"cuPointerGetAttribute", c"hipPointerGetAttribute";
    allocate_host: fn(*mut u64, usize, c_uint) = c"cuMemHostAlloc", c"hipHostMalloc";
    free_host: fn(u64) = c"cuMemFreeHost", c"hipHostFree";
    granularity: fn(*mut usize, *const AllocationProperties, c_int) =
        c"cuMemGetAllocationGranularity", c"hipMemGetAllocationGranularity";
    create: fn(*mut u64, usize, *const AllocationProperties, u64) =
        c"cuMemCreate", c"hipMemCreate";
    release: fn(u64) = c"cuMemRelease", c"hipMemRelease";
    reserve: fn(*mut u64, usize, usize, u64, u64) =
        c"cuMemAddressReserve", c"hipMemAddressReserve";
    unreserve: fn(u64, usize) = c"cuMemAddressFree", c"hipMemAddressFree";
    map: fn(u64, usize, usize, u64, u64) = c"cuMemMap", c"hipMemMap";
    unmap: fn(u64, usize) = c"cuMemUnmap", c"hipMemUnmap";
    set_access: fn(u64, usize, *const Access, usize) = c"cuMemSetAccess", c"hipMemSetAccess";
    retain: fn(*mut u64, u64) =
        c"cuMemRetainAllocationHandle", c"hipMemRetainAllocationHandle";
    export: fn(*mut c_void, u64, c_int, u64) =
        c"cuMemExportToShareableHandle", c"hipMemExportToShareableHandle";
    import: fn(*mut u64, *mut c_void, c_int) =
        c"cuMemImportFromShareableHandle", c"hipMemImportFromShareableHandle";
    create_stream: fn(*mut u64, c_uint) = c"cuStreamCreate", c"hipStreamCreateWithFlags";
    destroy_stream: fn(u64) = c"cuStreamDestroy_v2", c"hipStreamDestroy";
    stream_waits_for: fn(u64, u64, c_uint) = c"cuStreamWaitEvent", c"hipStreamWaitEvent";
    synchronize: fn(u64) = c"cuStreamSynchronize", c"hipStreamSynchronize";
    create_event: fn(*mut u64, c_uint) = c"cuEventCreate", c"hipEventCreateWithFlags";
    destroy_event: fn(u64) = c"cuEventDestroy_v2", c"hipEventDestroy";
    record: fn(u64, u64) = c"cuEventRecord", c"hipEventRecord";
    wait: fn(u64) = c"cuEventSynchronize", c"hipEventSynchronize";
}

/// An open shared library; it is never closed.
pub(crate) struct Library {
    handle: *mut c_void,
    name: String,
}

impl Library {
    /// Opens the library that the program or the environment names, or the first of these that is
    /// there.
    pub(crate) fn open(
        chosen_opt: Option<&PathBuf>,
        variable: &str,
        names: &[&CStr],
    ) -> Result<Self, String> {
        let chosen = chosen_opt.cloned().map(PathBuf::into_os_string);
        let chosen = chosen.or_else(|| std::env::var_os(variable));
        let chosen = chosen.filter(|name| !name.is_empty());
        let chosen = chosen.map(|name| CString::new(name.into_vec())).transpose();
        let chosen = chosen.map_err(|_| format!("{variable} holds a zero byte"))?;
        let names = match &chosen {
            Some(name) => vec![name.as_c_str()],
            None => names.to_vec(),
        };
        let mut reasons = Vec::new();
        for name in names {
            // SAFETY: opening a library runs its constructors; the drivers' have no precondition,
            // and whoever set the variable answers for theirs.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            if !handle.is_null() {
                return Ok(Self {
                    handle,
                    name: name.to_string_lossy().into_owned(),
                });
            }
            // SAFETY: takes no pointers; what it returns stays valid until this thread's next call.
            let text = unsafe { libc::dlerror() };
            if !text.is_null() {
                // SAFETY: it is a C string, read before the next call.
                let text = unsafe { CStr::from_ptr(text) };
                reasons.push(text.to_string_lossy().into_owned());
            }
        }
        Err(reasons.join("; "))
    }

    /// One of its calls, as a function pointer of type `F`.
    ///
    /// # Safety
    /// `F` is a pointer to a function with the signature that the library's call of that name has.
    pub(crate) unsafe fn call<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle is open, and the name is a C string.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if found.is_null() {
            return Err(format!("{} has no {}", self.name, name.to_string_lossy()));
        }
        // SAFETY: of one size; the caller says that the symbol is such a function, and the library
        // is never closed.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
    }
}

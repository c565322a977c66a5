//! libibverbs, opened when it is first needed: this program starts on hosts that have none.
//!
//! Types and constants are rdma-sys's. Its functions are not called: a reference to one would make
//! the program need the library to start. Calls on the data path go through the tables of function
//! pointers that the objects carry, as the inline functions of the C header do.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::LazyLock;

use rdma_sys::{
    _compat_ibv_port_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

use crate::error::{TransportError, TransportErrorKind};

const NAMES: [&CStr; 2] = [c"libibverbs.so.1", c"libibverbs.so"];

macro_rules! entry_points {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library.
        pub(super) struct Library {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Since rdma-core 34.
            pub(super) register_dma_buf_opt: Option<RegisterDmaBuf>,
        }

        impl Library {
            /// # Safety
            /// `handle` is that of libibverbs, which stays open.
            unsafe fn resolve(handle: *mut c_void) -> Result<Self, String> {
                $(
                    // SAFETY: the caller's handle; the symbol has this signature in the library's
                    // header, which is part of its stable interface (version IBVERBS_1.x).
                    let $field = unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) $(-> $result)?,
                        >(symbol(handle, $symbol)?)
                    };
                )*
                // SAFETY: as above.
                let register_dma_buf_opt = unsafe {
                    symbol(handle, c"ibv_reg_dmabuf_mr")
                        .ok()
                        .map(|found| std::mem::transmute::<*mut c_void, RegisterDmaBuf>(found))
                };
                Ok(Self { $($field,)* register_dma_buf_opt })
            }
        }
    };
}

pub(super) type RegisterDmaBuf =
    unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;

entry_points! {
    get_device_list = c"ibv_get_device_list": fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list = c"ibv_free_device_list": fn(*mut *mut ibv_device);
    get_device_name = c"ibv_get_device_name": fn(*mut ibv_device) -> *const c_char;
    open_device = c"ibv_open_device": fn(*mut ibv_device) -> *mut ibv_context;
    close_device = c"ibv_close_device": fn(*mut ibv_context) -> c_int;
    query_device = c"ibv_query_device": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    query_port = c"ibv_query_port": fn(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int;
    get_async_event = c"ibv_get_async_event": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ack_async_event = c"ibv_ack_async_event": fn(*mut ibv_async_event);
    alloc_pd = c"ibv_alloc_pd": fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd = c"ibv_dealloc_pd": fn(*mut ibv_pd) -> c_int;
    reg_mr = c"ibv_reg_mr": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    dereg_mr = c"ibv_dereg_mr": fn(*mut ibv_mr) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel": fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel = c"ibv_destroy_comp_channel": fn(*mut ibv_comp_channel) -> c_int;
    create_cq = c"ibv_create_cq":
        fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq = c"ibv_destroy_cq": fn(*mut ibv_cq) -> c_int;
    get_cq_event = c"ibv_get_cq_event":
        fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events": fn(*mut ibv_cq, c_uint);
    create_qp = c"ibv_create_qp": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp = c"ibv_modify_qp": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    destroy_qp = c"ibv_destroy_qp": fn(*mut ibv_qp) -> c_int;
}

/// # Safety
/// `handle` came from `dlopen` and stays open.
unsafe fn symbol(handle: *mut c_void, name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the caller's handle, and a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if found.is_null() {
        return Err(format!("it has no {}", name.to_string_lossy()));
    }
    Ok(found)
}

fn open() -> Result<Library, String> {
    let mut reason = String::new();
    for name in NAMES {
        // SAFETY: opening a library runs its constructors; libibverbs's have no precondition.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: takes no pointers; what it returns stays valid until this thread's next call.
            let text = unsafe { libc::dlerror() };
            if !text.is_null() {
                // SAFETY: it is a C string, read before the next call.
                reason = unsafe { CStr::from_ptr(text) }
                    .to_string_lossy()
                    .into_owned();
            }
            continue;
        }
        // SAFETY: the handle was just opened and is never closed.
        return unsafe { Library::resolve(handle) };
    }
    Err(reason)
}

static LIBRARY: LazyLock<Result<Library, String>> = LazyLock::new(open);

/// The library, or why there is none.
pub(super) fn library() -> Result<&'static Library, TransportError> {
    LIBRARY.as_ref().map_err(|reason| {
        TransportError::quiesced(
            TransportErrorKind::NoCommonTransport,
            format!(
                "libibverbs cannot be opened ({reason}): install libibverbs1 and ibverbs-providers \
                 for rdma"
            ),
        )
    })
}

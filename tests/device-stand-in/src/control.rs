//! What the stand-in is told to do wrong, and what it has counted.

use std::ffi::{CStr, c_char};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that a test sets, or reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Setting {
    /// How many devices there are; 2 unless it is set before the first call.
    Devices,
    /// Each operation of a stream begins so many microseconds late.
    DelayMicroseconds,
    /// Not 0: no allocation can be exported as a descriptor.
    RefuseExport,
    /// Not 0: no range can be exported as a dma-buf.
    RefuseDmaBuf,
    /// Not 0: the processor, and so the kernel for a network device, reaches device memory at its
    /// address, as with a module that resolves such addresses.
    PeerMemory,
    /// Not 0: a network device's writes are not ordered for the device.
    UnorderedWrites,
    /// Bytes of pinned memory that can be had at once.
    PinnedBytes,
    /// Not 0: after each call of the driver the calling thread's current device is the last one.
    LoseCurrentDevice,
    /// Not 0: the device is reset before the copy with this number (counted by `Copies`).
    ResetAtCopy,
    /// Not 0: the device was reset; what is under way fails, and everything from now on.
    Reset,
    /// Not 0: one call for many copies is not supported.
    RefuseBatches,
    /// Not 0: host memory of a copy may be unpinned.
    AllowPageable,
    /// Copies that were begun, each range of a call for many counted.
    Copies,
    /// Calls that began one copy, many copies, or a pitched copy.
    Calls,
    /// Calls that began a pitched copy.
    Pitched,
    /// Calls that began many copies at once.
    Batches,
    /// Allocations of device memory that live in this process, imported ones too.
    Live,
    /// Bytes of pinned memory that live.
    PinnedNow,
}

const NAMES: [(&str, Setting); 18] = [
    ("devices", Setting::Devices),
    ("delay_microseconds", Setting::DelayMicroseconds),
    ("refuse_export", Setting::RefuseExport),
    ("refuse_dma_buf", Setting::RefuseDmaBuf),
    ("peer_memory", Setting::PeerMemory),
    ("unordered_writes", Setting::UnorderedWrites),
    ("pinned_bytes", Setting::PinnedBytes),
    ("lose_current_device", Setting::LoseCurrentDevice),
    ("reset_at_copy", Setting::ResetAtCopy),
    ("reset", Setting::Reset),
    ("refuse_batches", Setting::RefuseBatches),
    ("allow_pageable", Setting::AllowPageable),
    ("copies", Setting::Copies),
    ("calls", Setting::Calls),
    ("pitched", Setting::Pitched),
    ("batches", Setting::Batches),
    ("live", Setting::Live),
    ("pinned_now", Setting::PinnedNow),
];

/// What may be set in the environment of a process that a test starts.
const VARIABLE: &str = "FERRY_STAND_IN";

static NUMBERS: LazyLock<[AtomicU64; NAMES.len()]> = LazyLock::new(|| {
    let numbers: [AtomicU64; NAMES.len()] = std::array::from_fn(|_| AtomicU64::new(0));
    numbers[Setting::Devices as usize].store(2, Ordering::Relaxed);
    numbers[Setting::PinnedBytes as usize].store(u64::MAX, Ordering::Relaxed);
    for assignment in std::env::var(VARIABLE).unwrap_or_default().split(',') {
        let Some((name, text)) = assignment.split_once('=') else {
            continue;
        };
        if let (Some(setting), Ok(number)) = (by_name(name.trim()), text.trim().parse()) {
            numbers[setting as usize].store(number, Ordering::Relaxed);
        }
    }
    numbers
});

fn by_name(name: &str) -> Option<Setting> {
    let found = NAMES.iter().find(|(known, _)| *known == name);
    found.map(|(_, setting)| *setting)
}

pub(crate) fn get(setting: Setting) -> u64 {
    NUMBERS[setting as usize].load(Ordering::SeqCst)
}

pub(crate) fn is_set(setting: Setting) -> bool {
    get(setting) != 0
}

pub(crate) fn add(setting: Setting, number: u64) -> u64 {
    NUMBERS[setting as usize].fetch_add(number, Ordering::SeqCst) + number
}

pub(crate) fn subtract(setting: Setting, number: u64) {
    NUMBERS[setting as usize].fetch_sub(number, Ordering::SeqCst);
}

/// Sets a number by its name; false when there is no such.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_stand_in_set(name: *const c_char, number: u64) -> bool {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(setting) = name.to_str().ok().and_then(by_name) else {
        return false;
    };
    NUMBERS[setting as usize].store(number, Ordering::SeqCst);
    true
}

/// Reads a number by its name; the largest when there is no such.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_stand_in_get(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    name.to_str().ok().and_then(by_name).map_or(u64::MAX, get)
}

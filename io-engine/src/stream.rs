//! The copy routine of this machine.
//!
//! A page that is copied once is not read again here, so writing it past the caches saves reading
//! the old contents of the destination first. On some processors that copies half as much again
//! as `memcpy`, on others less, so both are measured once in each process.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::sys;

/// From this length on a copy may go past the caches.
const LEAST_BYTES: usize = 4096;
/// Larger than the caches together with the other buffer.
const SAMPLE_BYTES: usize = 24 << 20;
const SAMPLE_BLOCK: usize = 16 << 10;
/// Rounds of each routine, in turns; the best of each counts, as a busy machine only slows down.
const SAMPLE_ROUNDS: usize = 9;
/// Past the caches is the way to go unless `memcpy` takes less than this share of its time: it
/// leaves the caches to others, and one measurement says only so much.
const MEMCPY_WINS_BELOW: f64 = 0.85;
/// Blocks copied in one round of one routine.
const SAMPLE_COPIES: usize = 256;

/// Whether long copies go past the caches.
static IS_STREAMING: LazyLock<bool> = LazyLock::new(measure);

/// Measures, unless it was done; takes some 40 ms.
pub(crate) fn choose() {
    LazyLock::force(&IS_STREAMING);
}

/// As [`sys::copy`], by the faster routine.
///
/// # Safety
/// As there.
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    let is_long = len >= LEAST_BYTES;
    if is_long && *IS_STREAMING {
        // SAFETY: the caller's contract; it was measured, so the processor has the instructions.
        unsafe { copy_past_caches(src, dst, len) }
    } else {
        // SAFETY: the caller's contract is exactly this function's.
        unsafe { sys::copy(src, dst, len) }
    }
}

/// Tells the processor that this memory is used soon. Does nothing where it cannot.
pub(crate) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch does nothing that the program could notice, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(target_arch = "x86_64")]
fn can_stream() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

#[cfg(not(target_arch = "x86_64"))]
fn can_stream() -> bool {
    false
}

/// # Safety
/// As [`copy`], on a processor for which [`can_stream`] is true.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_past_caches(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{
        _MM_HINT_NTA, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256,
    };
    const VECTOR: usize = 32;
    const STEP: usize = 4 * VECTOR;
    // What is fetched behind the end of a short range is wasted.
    const LONG: usize = 64 << 10;
    const AHEAD: usize = 256;
    const AHEAD_IF_LONG: usize = 1024;
    // At least a page of memory: finding where the next one lies takes longer than its first bytes
    // do, and overlapping that makes long copies a tenth faster.
    const PAGE: usize = 4096;
    let ahead = if len < LONG { AHEAD } else { AHEAD_IF_LONG };
    let head = dst.align_offset(VECTOR).min(len);
    let body = (len - head) / STEP * STEP;
    let tail = len - head - body;
    // SAFETY: `head + body + tail == len`, so all three parts lie inside the caller's ranges,
    // which do not overlap. `dst + head` is aligned to a vector as the streaming stores need, and
    // the loads need no alignment. The fence orders the stores before whatever tells others of
    // them.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        let (from, to) = (src.add(head), dst.add(head));
        let mut at = 0;
        while at < body {
            if at % PAGE == 0 && at + PAGE < body {
                _mm_prefetch::<_MM_HINT_NTA>(from.add(at + PAGE).cast());
                _mm_prefetch::<_MM_HINT_NTA>(to.add(at + PAGE).cast_const().cast());
            }
            let next = from.wrapping_add(at + ahead);
            _mm_prefetch::<_MM_HINT_NTA>(next.cast());
            _mm_prefetch::<_MM_HINT_NTA>(next.wrapping_add(2 * VECTOR).cast());
            let source = from.add(at);
            let vectors =
                [0, 1, 2, 3].map(|place| _mm256_loadu_si256(source.add(place * VECTOR).cast()));
            let target = to.add(at);
            _mm256_stream_si256(target.cast(), vectors[0]);
            _mm256_stream_si256(target.add(VECTOR).cast(), vectors[1]);
            _mm256_stream_si256(target.add(2 * VECTOR).cast(), vectors[2]);
            _mm256_stream_si256(target.add(3 * VECTOR).cast(), vectors[3]);
            at += STEP;
        }
        std::ptr::copy_nonoverlapping(from.add(body), to.add(body), tail);
        _mm_sfence();
    }
}

/// # Safety
/// As [`copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_past_caches(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
}

fn measure() -> bool {
    if !can_stream() {
        return false;
    }
    let (src, mut dst) = (vec![1u8; SAMPLE_BYTES], vec![0u8; SAMPLE_BYTES]);
    let blocks = SAMPLE_BYTES / SAMPLE_BLOCK;
    let mut place = 0;
    let mut round = |copies_past_caches: bool| {
        let began = Instant::now();
        for _ in 0..SAMPLE_COPIES {
            // Steps that are prime to the number of blocks: no block comes twice in a round.
            place += 1;
            let from = src.chunks_exact(SAMPLE_BLOCK).nth(place * 7 % blocks);
            let to = dst.chunks_exact_mut(SAMPLE_BLOCK).nth(place * 13 % blocks);
            let (Some(from), Some(to)) = (from, to) else {
                continue;
            };
            if copies_past_caches {
                // SAFETY: two distinct buffers of one block each, on a processor that can.
                unsafe { copy_past_caches(from.as_ptr(), to.as_mut_ptr(), SAMPLE_BLOCK) }
            } else {
                to.copy_from_slice(from);
            }
        }
        began.elapsed()
    };
    let mut best = [Duration::MAX; 2];
    for _ in 0..SAMPLE_ROUNDS {
        best = [best[0].min(round(false)), best[1].min(round(true))];
    }
    let [cached, streamed] = best;
    let bytes = (SAMPLE_COPIES * SAMPLE_BLOCK) as f64;
    let rate = |time: Duration| bytes / time.as_secs_f64().max(1e-9) / 1e9;
    tracing::info!(
        memcpy_gb_per_s = rate(cached),
        streaming_gb_per_s = rate(streamed),
        "copy routines measured, for ranges of {LEAST_BYTES} bytes and more"
    );
    cached.as_secs_f64() >= streamed.as_secs_f64() * MEMCPY_WINS_BELOW
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_is_copied_exactly() {
        let src: Vec<u8> = (0..20_000u32)
            .map(|at| (at * 31 + at / 251) as u8)
            .collect();
        for (from, to, len) in (0..300)
            .map(|case| (case % 67, case * 7 % 71, LEAST_BYTES + case * 41))
            .chain([(0, 0, 0), (1, 2, 5), (3, 31, 127), (0, 32, 128)])
        {
            let mut dst = vec![0xEE; 20_000];
            if can_stream() {
                // SAFETY: both ranges lie inside their buffers, on a processor that can.
                unsafe { copy_past_caches(src[from..].as_ptr(), dst[to..].as_mut_ptr(), len) };
            } else {
                // SAFETY: both ranges lie inside their buffers.
                unsafe { copy(src[from..].as_ptr(), dst[to..].as_mut_ptr(), len) };
            }
            assert!(
                dst[to..to + len] == src[from..from + len],
                "{from} {to} {len}"
            );
            let untouched = dst[..to].iter().chain(&dst[to + len..]);
            assert!(
                untouched.copied().all(|byte| byte == 0xEE),
                "{from} {to} {len}"
            );
        }
    }
}

//! Reads the memory of the target and of the kernel.

use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::write_volatile;

use aya_ebpf::helpers::generated::{bpf_probe_read_kernel, bpf_probe_read_user};
use zerocopy::FromBytes;

/// Reads from the target's memory; `None` if the address is not mapped (or not resident).
#[inline(always)]
pub fn read_user<T: FromBytes>(address: u64) -> Option<T> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the helper writes `size_of::<T>()` bytes to `value`, which is that long. It checks `address` itself.
    let status =
        unsafe { bpf_probe_read_user(value.as_mut_ptr().cast(), size_of::<T>() as u32, address as *const c_void) };
    // SAFETY: the helper has written all bytes, and any bytes are a valid `T` (`FromBytes`).
    (status == 0).then(|| unsafe { value.assume_init() })
}

/// Sets all words of a value to zero, one by one. The code that the compiler generates for an assignment works byte by
/// byte.
///
/// # Safety
/// The pointer is to a value of whole words, aligned to 8, for which zeros are valid, and which nothing else uses.
#[inline(always)]
pub unsafe fn make_zero<T>(value: *mut T) {
    let mut word = 0;
    while word < size_of::<T>() / size_of::<u64>() {
        // SAFETY: the word is inside the value.
        unsafe { write_volatile(value.cast::<u64>().add(word), 0) };
        word += 1;
    }
}

/// Copies a value of whole words, one by one. For an assignment, the compiler may generate a call.
///
/// # Safety
/// The pointers are to values of whole words, aligned to 8. Nothing else uses the second value.
#[inline(always)]
pub unsafe fn copy_words<T>(from: *const T, to: *mut T) {
    let mut word = 0;
    while word < size_of::<T>() / size_of::<u64>() {
        // SAFETY: the word is inside both values.
        unsafe { write_volatile(to.cast::<u64>().add(word), from.cast::<u64>().add(word).read()) };
        word += 1;
    }
}

/// Reads from kernel memory; returns zeros on failure.
#[inline(always)]
pub fn read_kernel<T: FromBytes>(address: u64) -> T {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the helper writes `size_of::<T>()` bytes to `value`, which is that long, and zeros them on failure. Any
    // bytes are a valid `T` (`FromBytes`). The helper checks `address` itself.
    unsafe {
        bpf_probe_read_kernel(value.as_mut_ptr().cast(), size_of::<T>() as u32, address as *const c_void);
        value.assume_init()
    }
}

//! Reads of the target's and of the kernel's memory.

use core::ffi::c_void;
use core::mem::MaybeUninit;

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

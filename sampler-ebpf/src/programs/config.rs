//! The recording's constants, patched in by the loader. The verifier treats them as constants and removes dead
//! branches.

use sampler_ebpf::abi::Config;

#[unsafe(no_mangle)]
static CONFIG: Config = {
    // SAFETY: `Config` consists of integers only, so all zeros is a valid value.
    unsafe { core::mem::zeroed() }
};

/// Reads one constant. The read is volatile, so that the compiler does not assume the zeros above.
macro_rules! config {
    ($($field:ident).+) => {{
        // SAFETY: the pointer is to a field of a static, which is initialised and aligned; nothing writes to it.
        unsafe { core::ptr::read_volatile(&raw const (*$crate::config::pointer()).$($field).+) }
    }};
}
pub(crate) use config;

/// Address of the constants.
#[inline(always)]
pub const fn pointer() -> *const Config {
    &raw const CONFIG
}

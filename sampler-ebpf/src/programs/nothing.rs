//! The no-op baseline: a program that does nothing, for measuring the cost of a probe itself.

use core::ffi::c_void;

/// Returns at once.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/nothing")]
pub extern "C" fn nothing(_ctx: *mut c_void) -> u32 {
    0
}

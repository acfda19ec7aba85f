//! free and similar functions: one lookup of the address. Only tracked blocks cost more.

use core::ffi::c_void;

use crate::arch::Arguments;
use crate::context::cookie;
use crate::kernel_stack::use_kernel_stack;
use crate::live;
use crate::thread::ThreadState;

/// Runs at the entry of free, before the block can be reused.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/free")]
pub extern "C" fn free_entry(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    let call = cookie(ctx);
    let address = Arguments::of(ctx).get(call.old_argument());
    if address == 0 {
        return 0;
    }
    let lose = move || live::release_without_state(address);
    let Some(state) = ThreadState::of_target(call.link_kind(), lose) else { return 0 };
    live::release(state, address);
    0
}

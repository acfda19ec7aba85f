//! free and similar functions: one look-up of the address. Only a tracked block costs more.

use core::ffi::c_void;

use crate::ablation;
use crate::arch::Arguments;
use crate::context::cookie;
use crate::live;
use crate::thread::{OWN_LINKS, TRACKED, ThreadState};

/// Runs at the entry of free, before the block can be reused.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/free")]
pub extern "C" fn free_entry(ctx: *mut c_void) -> u32 {
    free::<TRACKED>(ctx)
}

/// The same, for links of one process.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/free_own")]
pub extern "C" fn free_entry_own(ctx: *mut c_void) -> u32 {
    free::<OWN_LINKS>(ctx)
}

#[inline(always)]
fn free<const LINK: u32>(ctx: *mut c_void) -> u32 {
    let address = Arguments::of(ctx).get(cookie(ctx).old_argument());
    if address == 0 || const { ablation::ends_after("free-cookie") } {
        return 0;
    }
    let Some(state) = ThreadState::of_target::<LINK>(move || live::release_without_state(address)) else { return 0 };
    if const { ablation::ends_after("free-state") } {
        return 0;
    }
    live::release(state, address);
    0
}

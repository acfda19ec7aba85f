//! Counts its runs, so that the daemon can find out for which threads a link runs programs.

use core::ffi::c_void;

use crate::counters::add_shared;
use crate::maps::TRIAL_RUNS;

/// Counts one run.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/count_run")]
pub extern "C" fn count_run(_ctx: *mut c_void) -> u32 {
    if let Some(runs) = TRIAL_RUNS.get_ptr_mut(0) {
        // SAFETY: the pointer is to the map's value.
        unsafe { add_shared(runs, 1) };
    }
    0
}

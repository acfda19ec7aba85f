//! Trampolines generated at run time that only align the stack and make a call: CPython's under `-X perf`. On some
//! machines they have neither call frame information nor a frame pointer.
//!
//! Their bytes are not available when the stack is unwound, so a trampoline is inferred: it lies in memory without a
//! file, its callee and its caller lie in the same file, and its return address follows a call instruction in that
//! file.

use crate::arch;
use crate::image::ModuleFiles;
use crate::mapping::ModuleId;
use crate::memory::Memory;
use crate::raw::SpaceView;
use crate::state::State;

/// Returns the caller of the trampoline at `state`, which has called into module `callee`; `None` if it does not look
/// like one.
pub fn leave(
    state: &State,
    space: &SpaceView,
    memory: &mut impl Memory,
    modules: &mut dyn ModuleFiles,
    callee: Option<ModuleId>,
) -> Option<State> {
    let known = arch::BARE_TRAMPOLINE?;
    let return_at = state.sp.checked_add(known.kept_bytes)?;
    let return_address = state.code_address(memory.read(return_at).ok()?);
    let mapping = space.find(return_address.wrapping_sub(1))?;
    if Some(mapping.module) != callee {
        return None;
    }
    let file_offset = mapping.offset_of(return_address.wrapping_sub(1)).checked_add(1)?;
    let mut bytes = [0; arch::LONGEST_CALL];
    let image = modules.image(mapping.module).ok()?;
    image.read_at(file_offset.checked_sub(arch::LONGEST_CALL as u64)?, &mut bytes).ok()?;
    (known.ends_in_call)(&bytes).then(|| state.returned(return_address, return_at.wrapping_add(8)))
}

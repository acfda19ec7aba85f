//! Trampolines made at run time that do nothing but call on, with the stack aligned: CPython's under `-X perf`, which
//! on some machines have neither call frame information nor a frame pointer.
//!
//! Their bytes are not to be had after the fact. That a frame is one is inferred: it lies in memory without a file, the
//! function that it called and the one that called it lie in one file, and what must be its return address follows a
//! call instruction of that file.

use super::image::ModuleFiles;
use super::memory::StackMemory;
use super::raw::SpaceView;
use super::state::State;
use crate::arch;
use crate::host::mappings::ModuleId;

/// The caller of the trampoline at `state`, which called a function of module `below`.
pub fn leave(
    state: &State,
    space: &SpaceView,
    memory: &mut StackMemory,
    modules: &mut dyn ModuleFiles,
    below: Option<ModuleId>,
) -> Option<State> {
    let known = arch::BARE_TRAMPOLINE?;
    let return_at = state.sp.checked_add(known.kept_bytes)?;
    let return_address = arch::code_address(memory.read(return_at).ok()?);
    let mapping = space.find(return_address.wrapping_sub(1))?;
    if Some(mapping.module) != below {
        return None;
    }
    let file_offset = mapping.offset_of(return_address.wrapping_sub(1)).checked_add(1)?;
    let mut bytes = [0; arch::LONGEST_CALL];
    let image = modules.image(mapping.module).ok()?;
    image.read_at(file_offset.checked_sub(arch::LONGEST_CALL as u64)?, &mut bytes).ok()?;
    (known.ends_in_call)(&bytes).then(|| state.returned(return_address, return_at.wrapping_add(8)))
}

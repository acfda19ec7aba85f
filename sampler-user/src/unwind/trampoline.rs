//! Trampolines made at run time that do nothing but call on, with the stack aligned: CPython's under `-X perf`
//! (`sub $8, %rsp; call *%rcx; add $8, %rsp; ret`), which have neither call frame information nor a frame pointer.
//!
//! Their bytes are not to be had after the fact. That a frame is one is inferred: it lies in memory without a file, the
//! function that it called and the one that called it lie in one file, and what must be its return address follows a
//! call instruction of that file.

use super::image::ModuleFiles;
use super::memory::StackMemory;
use super::raw::SpaceView;
use super::state::State;
use crate::host::mappings::ModuleId;

/// What the trampoline keeps below its return address, bytes.
const ALIGNMENT_BYTES: u64 = 8;
/// Longest indirect call instruction, bytes.
const LONGEST_CALL: usize = 7;

/// The caller of the trampoline at `state`, which called a function of module `below`.
pub fn leave(
    state: &State,
    space: &SpaceView,
    memory: &mut StackMemory,
    modules: &mut dyn ModuleFiles,
    below: Option<ModuleId>,
) -> Option<State> {
    if !cfg!(target_arch = "x86_64") {
        return None;
    }
    let return_at = state.sp.checked_add(ALIGNMENT_BYTES)?;
    let return_address = memory.read(return_at).ok()?;
    let mapping = space.find(return_address.wrapping_sub(1))?;
    if Some(mapping.module) != below {
        return None;
    }
    let file_offset = mapping.offset_of(return_address.wrapping_sub(1)).checked_add(1)?;
    let mut bytes = [0; LONGEST_CALL];
    let image = modules.image(mapping.module).ok()?;
    image.read_at(file_offset.checked_sub(LONGEST_CALL as u64)?, &mut bytes).ok()?;
    ends_in_call(&bytes).then(|| state.returned(return_address, return_at.wrapping_add(8)))
}

/// Whether a call instruction may end with these bytes.
fn ends_in_call(bytes: &[u8; LONGEST_CALL]) -> bool {
    let from_end = |back: usize| bytes[LONGEST_CALL - back];
    // call rel32
    if from_end(5) == 0xe8 {
        return true;
    }
    // call r/m64 (ff /2): the length of what follows the opcode tells the form of its operand.
    (2..=LONGEST_CALL).any(|length| {
        let (opcode, operand) = (from_end(length), from_end(length - 1));
        let (mode, register) = (operand >> 6, operand & 7);
        let sib = usize::from(mode != 3 && register == 4);
        let displacement = match (mode, register) {
            (1, _) => 1,
            (2, _) | (0, 5) => 4,
            _ => 0,
        };
        opcode == 0xff && (operand >> 3) & 7 == 2 && length == 2 + sib + displacement
    })
}

#[cfg(test)]
mod tests {
    use super::ends_in_call;

    #[test]
    fn calls_are_told_by_their_bytes() {
        for call in [
            &[0xe8, 1, 2, 3, 4][..],
            &[0xff, 0xd1],
            &[0x41, 0xff, 0xd3],
            &[0xff, 0x50, 0x18],
            &[0xff, 0x54, 0x24, 0x08],
            &[0xff, 0x15, 1, 2, 3, 4],
            &[0xff, 0x93, 1, 2, 3, 4],
            &[0xff, 0x94, 0xc3, 1, 2, 3, 4],
        ] {
            let mut bytes = [0x90; 7];
            bytes[7 - call.len()..].copy_from_slice(call);
            assert!(ends_in_call(&bytes), "{call:x?}");
        }
        for other in [[0x90; 7], [0, 0, 0, 0, 0, 0xff, 0xe1], [0x48, 0x83, 0xc4, 8, 0xc3, 0x90, 0x90]] {
            assert!(!ends_in_call(&other), "{other:x?}");
        }
    }
}

//! Finds variables of the runtime through the code that reads them, for programs without symbols.

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

/// Returns the address of the first variable of `bytes` bytes that a function loads into a register. `code`: the
/// function's code, which begins at `address`.
pub(crate) fn first_load(code: &[u8], address: u64, bytes: usize) -> Option<u64> {
    let decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    decoder.into_iter().take_while(|instruction| !instruction.is_invalid()).find_map(|it| load(&it, bytes))
}

fn load(instruction: &Instruction, bytes: usize) -> Option<u64> {
    let is_load = instruction.mnemonic() == Mnemonic::Mov
        && instruction.op0_kind() == OpKind::Register
        && instruction.op1_kind() == OpKind::Memory
        && instruction.memory_base() == Register::RIP
        && instruction.memory_index() == Register::None
        // Thread-local variables do not count.
        && instruction.segment_prefix() == Register::None;
    (is_load && instruction.op0_register().size() == bytes).then(|| instruction.memory_displacement64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_load_of_a_size_is_found() {
        // mov rcx, fs:[-8]; mov eax, [rip + 0x10]; lea rdx, [rip + 0x20]; mov rcx, [rip + 0x30]; ret
        let code = [
            &[0x64, 0x48, 0x8b, 0x0c, 0x25, 0xf8, 0xff, 0xff, 0xff][..],
            &[0x8b, 0x05, 0x10, 0, 0, 0],
            &[0x48, 0x8d, 0x15, 0x20, 0, 0, 0],
            &[0x48, 0x8b, 0x0d, 0x30, 0, 0, 0, 0xc3],
        ]
        .concat();
        assert_eq!(first_load(&code, 0x1000, 4), Some(0x1000 + 15 + 0x10));
        assert_eq!(first_load(&code, 0x1000, 8), Some(0x1000 + 29 + 0x30));
        assert_eq!(first_load(&code[..20], 0x1000, 8), None);
        assert_eq!(first_load(&[], 0, 8), None);
    }
}

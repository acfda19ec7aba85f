//! Call frame information for copied instructions: where the return address and the caller's registers are while these
//! instructions move the stack pointer (DWARF 5, §6.4.2; registers by the System V ABI for x86-64, §3.6.2).

use iced_x86::{Code, Instruction, InstructionInfoFactory, OpAccess, Register};

const DW_CFA_DEF_CFA_OFFSET: u8 = 0x0e;
const DW_CFA_OFFSET: u8 = 0x80;
const DW_CFA_RESTORE: u8 = 0xc0;
/// Distance of the stack pointer below the canonical frame address at a function's entry.
const ENTRY: i64 = 8;

/// Unwind rules that apply from a place on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FrameRow {
    /// The place.
    pub(crate) at: u32,
    /// Instructions of call frame information.
    pub(crate) rules: Vec<u8>,
}

impl FrameRow {
    /// From `at` on, the stack pointer is this many bytes below the canonical frame address.
    pub(crate) fn depth(at: u32, bytes: u8) -> Self {
        Self { at, rules: vec![DW_CFA_DEF_CFA_OFFSET, bytes] }
    }
}

/// The effect of an instruction on the stack pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing.
    None,
    /// Moves it down by a word, which gets this register's value if that is one that a callee must preserve.
    Pushed(Option<u8>),
    /// Moves it up by a word, which is loaded into this register if that is one that a callee must preserve.
    Popped(Option<u8>),
    /// Moves it up by this many bytes.
    Moved(i64),
}

/// The effect of an instruction; `None` if it cannot be determined.
pub(crate) fn change(infos: &mut InstructionInfoFactory, instruction: &Instruction) -> Option<Change> {
    let immediate = || instruction.immediate(1).cast_signed();
    let is_own = instruction.op0_register() == Register::RSP;
    match instruction.code() {
        Code::Push_r64 => return Some(Change::Pushed(preserved(instruction.op0_register()))),
        Code::Pushq_imm8 | Code::Pushq_imm32 | Code::Push_rm64 => return Some(Change::Pushed(None)),
        Code::Pop_r64 if !is_own => return Some(Change::Popped(preserved(instruction.op0_register()))),
        Code::Sub_rm64_imm8 | Code::Sub_rm64_imm32 if is_own => return Some(Change::Moved(immediate().checked_neg()?)),
        Code::Add_rm64_imm8 | Code::Add_rm64_imm32 if is_own => return Some(Change::Moved(immediate())),
        Code::Lea_r64_m if is_own && is_relative(instruction) => {
            return Some(Change::Moved(instruction.memory_displacement64().cast_signed()));
        }
        _ => {}
    }
    let used = infos.info(instruction).used_registers();
    let is_written = used.iter().any(|used| {
        let is_read = matches!(used.access(), OpAccess::Read | OpAccess::CondRead);
        used.register().full_register() == Register::RSP && !is_read
    });
    (!is_written).then_some(Change::None)
}

/// Whether the memory operand is at a fixed distance from the stack pointer.
fn is_relative(instruction: &Instruction) -> bool {
    instruction.memory_base() == Register::RSP && instruction.memory_index() == Register::None
}

/// The number of the register, if a function must preserve it.
fn preserved(register: Register) -> Option<u8> {
    match register {
        Register::RBX => Some(3),
        Register::RBP => Some(6),
        Register::R12 => Some(12),
        Register::R13 => Some(13),
        Register::R14 => Some(14),
        Register::R15 => Some(15),
        _ => None,
    }
}

/// Rows for instructions at these places. There is one more place, behind the last instruction: from there on, the
/// state is as at the entry.
pub(crate) fn rows(instructions: &[Instruction], places: &[u32]) -> Vec<FrameRow> {
    let mut infos = InstructionInfoFactory::new();
    let (mut depth, mut saved) = (ENTRY, Vec::new());
    let mut rows = Vec::new();
    for (instruction, behind) in instructions.iter().zip(places.iter().skip(1)) {
        let mut rules = Vec::new();
        match change(&mut infos, instruction) {
            // `ret`, and a jump that replaces a call: control does not go on here.
            None => break,
            Some(Change::None) => continue,
            Some(Change::Pushed(register)) => {
                depth += 8;
                if let Some(register) = register.filter(|register| !saved.contains(register)) {
                    saved.push(register);
                    rules.extend([DW_CFA_OFFSET | register]);
                    rules.extend(unsigned(depth / 8));
                }
            }
            Some(Change::Popped(register)) => {
                depth -= 8;
                let known = saved.iter().position(|known| Some(*known) == register);
                rules.extend(known.map(|known| DW_CFA_RESTORE | saved.remove(known)));
            }
            Some(Change::Moved(by)) => depth -= by,
        }
        let Some(offset) = u32::try_from(depth).ok() else { break };
        rows.push(FrameRow {
            at: *behind,
            rules: [&[DW_CFA_DEF_CFA_OFFSET][..], &unsigned(offset.into()), &rules].concat(),
        });
    }
    if let Some(end) = places.last().filter(|_| depth != ENTRY || !saved.is_empty()) {
        let mut row = FrameRow::depth(*end, ENTRY as u8);
        row.rules.extend(saved.iter().map(|register| DW_CFA_RESTORE | register));
        rows.retain(|row| row.at != *end);
        rows.push(row);
    }
    rows
}

/// Unsigned LEB128.
fn unsigned(value: i64) -> Vec<u8> {
    let mut rest = value.cast_unsigned();
    let mut bytes = Vec::new();
    loop {
        let byte = (rest & 0x7f) as u8;
        rest >>= 7;
        if rest == 0 {
            bytes.push(byte);
            return bytes;
        }
        bytes.push(byte | 0x80);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    fn decoded(code: &[u8]) -> Vec<Instruction> {
        Decoder::with_ip(64, code, 0x1000, DecoderOptions::NONE).into_iter().collect()
    }

    fn row(at: u32, rules: &[u8]) -> FrameRow {
        FrameRow { at, rules: rules.to_vec() }
    }

    #[test]
    fn pushes_and_pops_are_followed() {
        // push %r12; push %rax; mov %rdi,%rbx; sub $0x90,%rsp; add $0x90,%rsp; pop %rcx; pop %r12; ret
        let code = decoded(&[
            0x41, 0x54, 0x50, 0x48, 0x89, 0xfb, 0x48, 0x81, 0xec, 0x90, 0, 0, 0, 0x48, 0x81, 0xc4, 0x90, 0, 0, 0, 0x59,
            0x41, 0x5c, 0xc3,
        ]);
        let places = [10, 12, 13, 16, 23, 30, 31, 33, 34];
        let expected = [
            row(12, &[0x0e, 16, 0x8c, 2]),
            row(13, &[0x0e, 24]),
            row(23, &[0x0e, 0xa8, 1]),
            row(30, &[0x0e, 24]),
            row(31, &[0x0e, 16]),
            row(33, &[0x0e, 8, 0xcc]),
        ];
        assert_eq!(rows(&code, &places), expected);
        // Cut off after the first two: the code behind them is not part of them.
        let cut = [row(12, &[0x0e, 16, 0x8c, 2]), row(13, &[0x0e, 8, 0xcc])];
        assert_eq!(rows(&code[..2], &places[..3]), cut);
        assert_eq!(rows(&code[2..3], &places[2..4]), []);
    }

    #[test]
    fn what_moves_the_stack_pointer_otherwise_is_not_followed() {
        let mut infos = InstructionInfoFactory::new();
        let mut of = |code: &[u8]| change(&mut infos, &decoded(code)[0]);
        // mov %rbp,%rsp; and $-32,%rsp; leave; pop %rsp; add %rax,%rsp; lea (%rsp,%rax),%rsp; xchg %rax,%rsp
        for code in [
            &[0x48, 0x89, 0xec][..],
            &[0x48, 0x83, 0xe4, 0xe0],
            &[0xc9],
            &[0x5c],
            &[0x48, 0x01, 0xc4],
            &[0x48, 0x8d, 0x24, 0x04],
            &[0x48, 0x94],
        ] {
            assert_eq!(of(code), None, "{code:x?}");
        }
        assert_eq!(of(&[0x48, 0x8d, 0x64, 0x24, 0xf8]), Some(Change::Moved(-8)));
        assert_eq!(of(&[0x48, 0x89, 0xe5]), Some(Change::None), "mov %rsp,%rbp");
        assert_eq!(
            (of(&[0x53]), of(&[0x50]), of(&[0x6a, 1])),
            (Some(Change::Pushed(Some(3))), Some(Change::Pushed(None)), Some(Change::Pushed(None)))
        );
    }
}

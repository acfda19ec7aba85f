//! The instructions that a jump at a function's entry displaces, and their equivalents elsewhere.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, MemoryOperand, Mnemonic, OpAccess,
    Register, UsedRegister,
};

use crate::abi::PAGE_BYTES;
use crate::error::Refusal;
use crate::frame_rows::change;

/// Bytes of a jump with a 32-bit distance.
pub const JUMP_BYTES: usize = 5;
/// Bytes of a conditional jump with a 32-bit distance.
const NEAR_BRANCH_BYTES: usize = 6;

/// The first instructions of a function that the jump overwrites, in whole or in part.
#[derive(Clone, Debug)]
pub struct Displaced {
    /// The instructions, with their addresses.
    pub instructions: Vec<Instruction>,
    /// Their total length in bytes.
    pub length: usize,
    /// Whether control goes on behind the last of them.
    pub falls_through: bool,
    /// The instructions behind them that may run elsewhere as well. The originals stay in place for code that gets
    /// there by another way.
    pub following: Vec<Instruction>,
}

impl Displaced {
    /// Reads them from `code`, the bytes of the whole function, which begins at `address`.
    ///
    /// # Errors
    /// A [`Refusal`] if they cannot run elsewhere, or if the function's own jumps lead between them.
    pub fn read(address: u64, code: &[u8]) -> Result<Self, Refusal> {
        let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
        if reads_hidden_argument(Decoder::with_ip(64, code, address, DecoderOptions::NONE)) {
            return Err(Refusal::HiddenArgument);
        }
        let mut displaced = Self { instructions: Vec::new(), length: 0, falls_through: true, following: Vec::new() };
        while displaced.length < JUMP_BYTES {
            if !decoder.can_decode() || !displaced.falls_through {
                let ends_in_call = displaced.instructions.last().is_some_and(is_call);
                return Err(if ends_in_call { Refusal::Call } else { Refusal::TooShort });
            }
            let instruction = decoder.decode();
            if differs_by_processor(&instruction, code.get(displaced.length..).unwrap_or_default()) {
                return Err(Refusal::Immovable);
            }
            displaced.falls_through = movable(&instruction)?;
            displaced.length += instruction.len();
            displaced.instructions.push(instruction);
        }
        let inside = address + 1..address + displaced.length as u64;
        let all = displaced.instructions.iter().copied().chain(&mut decoder);
        // If the decoder gets lost, its results are unreliable, but it reports too many jumps rather than too few.
        if all
            .into_iter()
            .any(|instruction| is_branch(&instruction) && inside.contains(&instruction.near_branch_target()))
        {
            return Err(Refusal::JumpedInto);
        }
        let mut infos = InstructionInfoFactory::new();
        if displaced.falls_through && displaced.instructions.iter().all(|one| change(&mut infos, one).is_some()) {
            displaced.following = following(&mut infos, address, displaced.length, code);
        }
        Ok(displaced)
    }

    /// How many of the instructions that follow are worth copying if the copies may take `free` more bytes. If control
    /// leaves the copies by one of their own jumps, that saves the jump back: these two jumps are half of the cost of
    /// an unsampled call.
    pub fn worth_copying(&self, free: usize) -> usize {
        let (mut taken, mut worth) = (0, 0);
        for (before, instruction) in self.following.iter().enumerate() {
            taken += if instruction.is_jcc_short_or_near() {
                NEAR_BRANCH_BYTES
            } else if instruction.is_jmp_short_or_near() {
                JUMP_BYTES
            } else {
                instruction.len()
            };
            // Space for the jump back is included already, and that jump is not needed behind a last instruction.
            let (leaves, may_leave) = (is_last(instruction), instruction.is_jcc_short_or_near());
            if (leaves && taken <= free + JUMP_BYTES) || (may_leave && taken <= free) {
                worth = before + 1;
            }
        }
        worth
    }

    /// The instructions to encode elsewhere: the displaced ones, the first `following` of those that follow, and a jump
    /// to the rest. `redirected` returns the address to jump to instead of another. A call, which is always the last
    /// one, still returns to the original code, so that unwinders find the function there.
    ///
    /// # Errors
    /// [`Refusal::Branch`], [`Refusal::Call`].
    pub fn elsewhere(&self, following: usize, redirected: impl Fn(u64) -> u64) -> Result<Vec<Instruction>, Refusal> {
        let following = self.following.get(..following).unwrap_or_default();
        let mut moved: Vec<Instruction> = self.instructions.iter().chain(following).copied().collect();
        for instruction in moved.iter_mut().filter(|i| is_branch(i)) {
            instruction.as_near_branch();
            instruction.set_near_branch64(redirected(instruction.near_branch_target()));
        }
        let after = moved.last().map_or(0, Instruction::next_ip);
        let goes_on = self.falls_through && !following.last().is_some_and(is_last);
        if let Some(call) = moved.pop_if(|last| is_call(last)) {
            moved.extend(call_returning_to(&call, after)?);
        }
        if goes_on {
            moved.push(Instruction::with_branch(Code::Jmp_rel32_64, after).map_err(|_| Refusal::Branch)?);
        }
        Ok(moved)
    }
}

/// Instructions behind the first `displaced` bytes of a function that may run elsewhere. They form one sequence in the
/// page in which the displaced ones end, so that no other tool has changed them. The effect of each on the stack
/// pointer must be known, so that unwinders find the return address. None may be a call, because its callee would
/// return to the copy.
fn following(infos: &mut InstructionInfoFactory, address: u64, displaced: usize, code: &[u8]) -> Vec<Instruction> {
    let page_end = (address + displaced as u64).next_multiple_of(PAGE_BYTES);
    let end = code.len().min((page_end - address) as usize);
    let mut decoder = Decoder::with_ip(64, &code[..end], address, DecoderOptions::NONE);
    if decoder.set_position(displaced).is_err() {
        return Vec::new();
    }
    decoder.set_ip(address + displaced as u64);
    let mut following = Vec::new();
    while decoder.can_decode() {
        let at = decoder.position();
        let instruction = decoder.decode();
        let is_known = !differs_by_processor(&instruction, &code[at..end]) && movable(&instruction).is_ok();
        let leads_away = matches!(instruction.flow_control(), FlowControl::IndirectBranch) || is_call(&instruction);
        if !is_known || leads_away || (!is_last(&instruction) && change(infos, &instruction).is_none()) {
            break;
        }
        following.push(instruction);
        if is_last(&instruction) {
            break;
        }
    }
    following
}

/// Whether control never goes on behind an instruction of [`following`].
fn is_last(instruction: &Instruction) -> bool {
    instruction.flow_control() == FlowControl::Return || instruction.is_jmp_short_or_near()
}

/// Whether `instruction` is a branch with its target encoded in its bytes.
pub(crate) fn is_branch(instruction: &Instruction) -> bool {
    instruction.is_jmp_short_or_near() || instruction.is_jcc_short_or_near() || instruction.is_call_near()
}

/// Whether AMD processors take `bytes` for another instruction than Intel processors do: on AMD, a near branch with an
/// operand-size prefix has a 16-bit distance, and leads to a 16-bit address.
fn differs_by_processor(instruction: &Instruction, bytes: &[u8]) -> bool {
    let amd = Decoder::with_ip(64, bytes, instruction.ip(), DecoderOptions::AMD).decode();
    !amd.eq_all_bits(instruction)
}

/// Checks that `instruction` can be moved. Returns whether control goes on behind it.
fn movable(instruction: &Instruction) -> Result<bool, Refusal> {
    if instruction.is_invalid() {
        return Err(Refusal::UnknownInstruction);
    }
    match instruction.flow_control() {
        FlowControl::Next if instruction.is_privileged() => Err(Refusal::Immovable),
        FlowControl::Next => Ok(true),
        FlowControl::ConditionalBranch if instruction.is_jcc_short_or_near() => Ok(true),
        FlowControl::UnconditionalBranch if instruction.is_jmp_short_or_near() => Ok(false),
        // Through a register, a slot or the stack: the target does not depend on where the instruction is.
        FlowControl::IndirectBranch | FlowControl::Return => Ok(false),
        FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => Err(Refusal::Branch),
        FlowControl::Call | FlowControl::IndirectCall if is_call(instruction) => Ok(false),
        _ => Err(Refusal::Immovable),
    }
}

fn is_call(instruction: &Instruction) -> bool {
    instruction.is_call_near() || instruction.code() == Code::Call_rm64
}

/// Instructions that do the same as `call`, with this return address. They change no flags.
fn call_returning_to(call: &Instruction, address: u64) -> Result<Vec<Instruction>, Refusal> {
    let jump = if call.is_call_near() {
        Instruction::with_branch(Code::Jmp_rel32_64, call.near_branch_target()).map_err(|_| Refusal::Call)?
    } else {
        // The stack pointer moves before the operand is read.
        if call.memory_base() == Register::RSP || call.op0_register() == Register::RSP {
            return Err(Refusal::Call);
        }
        let mut jump = *call;
        jump.set_code(Code::Jmp_rm64);
        jump
    };
    let on_stack = |offset| MemoryOperand::with_base_displ(Register::RSP, offset);
    let half = |offset, value: u64| Instruction::with2(Code::Mov_rm32_imm32, on_stack(offset), value as u32);
    let reserve = Instruction::with2(Code::Lea_r64_m, Register::RSP, on_stack(-8));
    let built = [reserve, half(0, address), half(4, address >> 32)];
    let built: Result<Vec<_>, _> = built.into_iter().chain([Ok(jump)]).collect();
    built.map_err(|_| Refusal::Call)
}

/// Whether a function, up to its first branch, reads a register that the stub does not preserve: rax, r10 or r11.
/// Pushes do not count: compilers push any register to align the stack.
fn reads_hidden_argument(function: Decoder<'_>) -> bool {
    let mut infos = InstructionInfoFactory::new();
    let mut hidden = vec![Register::RAX, Register::R10, Register::R11];
    for instruction in function {
        let info = infos.info(&instruction);
        let is_hidden = |used: &UsedRegister| hidden.contains(&used.register().full_register());
        let reads = |used: &&UsedRegister| !matches!(used.access(), OpAccess::Write | OpAccess::CondWrite);
        let has_effect = !matches!(instruction.mnemonic(), Mnemonic::Push | Mnemonic::Nop);
        if has_effect && info.used_registers().iter().filter(reads).any(is_hidden) {
            return true;
        }
        let written: Vec<Register> = info.used_registers().iter().map(|used| used.register().full_register()).collect();
        hidden.retain(|register| !written.contains(register));
        if hidden.is_empty() || instruction.flow_control() != FlowControl::Next {
            return false;
        }
    }
    false
}

#[cfg(test)]
#[path = "displaced_tests.rs"]
mod tests;

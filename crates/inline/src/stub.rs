//! The stub of a hooked function: the path of unsampled calls, and the function's displaced instructions.
//!
//! At a function's entry `rax`, `r10` and `r11` are free. The stub counts in the thread's slot, and falls through to
//! the displaced instructions unless the countdown has ended or the call is unusual.

use core::mem::offset_of;

use iced_x86::{BlockEncoder, BlockEncoderOptions, Code as Op, Instruction, InstructionBlock, MemoryOperand, Register};

use crate::abi::{
    CODE, CRITERION_BYTES, Entries, FILTER, FILTER_BYTES, FUNCTION_OF_OBJECTS, Function, HASH, HASH_SHIFT, HEADER,
    Header, INSIDE_BYTES, LARGE_BYTES, NO_ARGUMENT, SLOTS, SLOTS_OFFSET, STUB_BYTES, STUBS, Slot,
};
use crate::error::Refusal;
use crate::frame_rows::{self, FrameRow};

/// Registers of integer arguments, in order (System V ABI, §3.2.3).
const ARGUMENT_REGISTERS: [Register; 6] =
    [Register::RDI, Register::RSI, Register::RDX, Register::RCX, Register::R8, Register::R9];

/// Low addresses that stand for places in the stub; nothing is ever mapped there.
mod label {
    pub(super) const HAVE_SLOT: u64 = 1;
    pub(super) const CLAIM: u64 = 2;
    pub(super) const ODD: u64 = 3;
    pub(super) const ENDS: u64 = 4;
    pub(super) const REFUSED: u64 = 5;
    pub(super) const MAYBE: u64 = 6;
    pub(super) const ORIGINAL: u64 = 7;
    pub(super) const INSIDE: u64 = 8;
    pub(super) const OUTSIDE: u64 = 9;
    pub(super) const UNNAMED: u64 = 64;
}

/// A stub's bytes.
#[derive(Clone, Debug)]
pub(crate) struct Stub {
    pub(crate) bytes: Vec<u8>,
    /// Offset of the displaced instructions from the stub's beginning.
    pub(crate) original: u32,
    /// Where these, and the instructions copied with them, end.
    pub(crate) original_end: u32,
    /// The offset of each displaced instruction.
    pub(crate) displaced: Vec<u32>,
    /// Unwind rows for the places where the return address is not at the stack pointer.
    pub(crate) frame: Vec<FrameRow>,
}

/// The parts of a stub.
pub(crate) struct Parts<'a> {
    pub(crate) base: u64,
    pub(crate) index: usize,
    pub(crate) entries: &'a Entries,
    pub(crate) function: &'a Function,
    pub(crate) criterion: u32,
    /// The displaced instructions, to be encoded elsewhere.
    pub(crate) original: &'a [Instruction],
    /// How many of these are displaced; the others follow them.
    pub(crate) displaced: usize,
    /// Whether an object allocator that is hooked too may call the function.
    pub(crate) may_be_inside: bool,
}

/// Instructions that jump to any address. `r11` must be free there.
pub(crate) fn far_jump(address: u64) -> Built<[Instruction; 2]> {
    let load = Instruction::with2(Op::Mov_r64_imm64, Register::R11, address).map_err(|_| Refusal::Immovable)?;
    let jump = Instruction::with1(Op::Jmp_rm64, Register::R11).map_err(|_| Refusal::Immovable)?;
    Ok([load, jump])
}

/// Instructions with labels in place of addresses.
struct Listing {
    base: u64,
    instructions: Vec<Instruction>,
    next: u64,
    label: Option<u64>,
}

type Built<T = ()> = Result<T, Refusal>;

impl Listing {
    fn label(&mut self, label: u64) {
        self.label = Some(label);
    }

    fn add(&mut self, instruction: Result<Instruction, iced_x86::IcedError>) -> Built {
        let mut instruction = instruction.map_err(|_| Refusal::Immovable)?;
        self.next += 1;
        instruction.set_ip(self.label.take().unwrap_or(label::UNNAMED + self.next));
        self.instructions.push(instruction);
        Ok(())
    }

    fn branch(&mut self, code: Op, target: u64) -> Built {
        self.add(Instruction::with_branch(code, target))
    }

    /// `lea register, [base + offset]`.
    fn address(&mut self, register: Register, offset: u64) -> Built {
        let memory = MemoryOperand::with_base_displ(Register::RIP, (self.base + offset) as i64);
        self.add(Instruction::with2(Op::Lea_r64_m, register, memory))
    }

    fn registers(&mut self, code: Op, to: Register, from: Register) -> Built {
        self.add(Instruction::with2(code, to, from))
    }

    fn immediate(&mut self, code: Op, register: Register, value: i32) -> Built {
        self.add(Instruction::with2(code, register, value))
    }
}

/// A field of the slot in `r10`.
fn slot(offset: usize) -> MemoryOperand {
    MemoryOperand::with_base_displ(Register::R10, offset as i64)
}

impl Parts<'_> {
    fn argument(number: u8) -> Built<Register> {
        ARGUMENT_REGISTERS.get(usize::from(number)).copied().ok_or(Refusal::Immovable)
    }

    fn shared(&self, entry: u32) -> u64 {
        self.base + CODE + u64::from(entry)
    }

    /// Jumps to the shared code, with the function in `r11`.
    fn leave(&self, listing: &mut Listing, label: u64, entry: u32) -> Built {
        listing.label(label);
        let function = HEADER + (size_of::<Header>() + self.index * size_of::<Function>()) as u64;
        listing.address(Register::R11, function)?;
        listing.branch(Op::Jmp_rel32_64, self.shared(entry))
    }

    /// Jumps to [`label::MAYBE`] if the old block may be sampled.
    fn filter(&self, listing: &mut Listing) -> Built {
        let old = Self::argument(self.function.old_argument)?;
        listing.registers(Op::Mov_r64_rm64, Register::RAX, old)?;
        listing.registers(Op::Mov_r64_rm64, Register::R10, old)?;
        listing.immediate(Op::Shr_rm64_imm8, Register::RAX, 4)?;
        listing.immediate(Op::Shr_rm64_imm8, Register::R10, 22)?;
        listing.registers(Op::Xor_r32_rm32, Register::EAX, Register::R10D)?;
        listing.address(Register::R11, FILTER)?;
        listing.immediate(Op::And_rm32_imm32, Register::EAX, (FILTER_BYTES - 1) as i32)?;
        let byte = MemoryOperand::with_base_index(Register::R11, Register::RAX);
        listing.add(Instruction::with2(Op::Cmp_rm8_imm8, byte, 0))?;
        listing.branch(Op::Jne_rel32_64, label::MAYBE)
    }

    /// Loads the size into `rax`.
    fn size(&self, listing: &mut Listing) -> Built {
        listing.registers(Op::Mov_r64_rm64, Register::RAX, Self::argument(self.function.size_argument)?)?;
        if self.function.times_argument != NO_ARGUMENT {
            listing.registers(Op::Imul_r64_rm64, Register::RAX, Self::argument(self.function.times_argument)?)?;
            listing.branch(Op::Jo_rel32_64, label::REFUSED)?;
        }
        Ok(())
    }

    /// Loads the thread's slot into `r10`.
    fn slot(&self, listing: &mut Listing) -> Built {
        let thread_pointer = MemoryOperand::new(Register::None, Register::None, 1, 0, 8, false, Register::FS);
        listing.add(Instruction::with2(Op::Mov_r64_rm64, Register::RAX, thread_pointer))?;
        listing.add(Instruction::with3(Op::Imul_r64_rm64_imm32, Register::R10, Register::RAX, HASH))?;
        listing.address(Register::R11, SLOTS_OFFSET)?;
        listing.immediate(Op::Shr_rm64_imm8, Register::R10, HASH_SHIFT as i32)?;
        let mask = (SLOTS - 1) * size_of::<Slot>();
        listing.immediate(Op::And_rm32_imm32, Register::R10D, mask as i32)?;
        listing.registers(Op::Add_r64_rm64, Register::R10, Register::R11)?;
        listing.add(Instruction::with2(Op::Cmp_rm64_r64, slot(0), Register::RAX))?;
        listing.branch(Op::Jne_rel32_64, label::CLAIM)
    }

    /// Counts `rax` bytes, and goes on in the original unless there is more to do.
    fn count(&self, listing: &mut Listing) -> Built {
        let less_one = MemoryOperand::with_base_displ(Register::RAX, -1);
        listing.add(Instruction::with2(Op::Lea_r64_m, Register::R11, less_one))?;
        listing.immediate(Op::Cmp_rm64_imm32, Register::R11, (LARGE_BYTES - 2) as i32)?;
        listing.branch(Op::Ja_rel32_64, label::ODD)?;
        listing.add(Instruction::with1(Op::Inc_rm64, slot(offset_of!(Slot, calls))))?;
        listing.add(Instruction::with2(Op::Add_rm64_r64, slot(offset_of!(Slot, bytes)), Register::RAX))?;
        let countdown = slot(offset_of!(Slot, countdown));
        listing.add(if self.criterion == CRITERION_BYTES {
            Instruction::with2(Op::Sub_rm64_r64, countdown, Register::RAX)
        } else {
            Instruction::with2(Op::Sub_rm64_imm8, countdown, 1)
        })?;
        listing.branch(Op::Jle_rel32_64, label::ENDS)
    }

    const fn is_of_objects(&self) -> bool {
        self.function.flags & FUNCTION_OF_OBJECTS != 0
    }

    /// Jumps to [`label::INSIDE`] if the thread may be in a function of an object allocator.
    fn is_inside(&self, listing: &mut Listing) -> Built {
        listing.add(Instruction::with2(Op::Cmp_rm64_imm8, slot(offset_of!(Slot, inside)), 0))?;
        listing.branch(Op::Jne_rel32_64, label::INSIDE)?;
        listing.label(label::OUTSIDE);
        Ok(())
    }

    /// Calls the function, and marks the slot during the call. Returns the indices of the first instruction with a word
    /// on the stack, and of the first one without it.
    fn call(listing: &mut Listing) -> Built<[usize; 2]> {
        let inside = slot(offset_of!(Slot, inside));
        listing.add(Instruction::with1(Op::Push_r64, Register::R10))?;
        let first = listing.instructions.len();
        listing.add(Instruction::with2(Op::Mov_rm64_r64, inside, Register::RSP))?;
        listing.branch(Op::Call_rel32_64, label::ORIGINAL)?;
        listing.add(Instruction::with1(Op::Pop_r64, Register::R10))?;
        let end = listing.instructions.len();
        listing.add(Instruction::with2(Op::Mov_rm64_imm32, inside, 0))?;
        // A scan of the stack must not take this for a return address.
        let return_address = MemoryOperand::with_base_displ(Register::RSP, -16);
        listing.add(Instruction::with2(Op::Mov_rm64_imm32, return_address, 0))?;
        listing.add(Ok(Instruction::with(Op::Retnq)))?;
        Ok([first, end])
    }

    /// The code that [`Self::is_inside`] jumps to: the call is part of another, or the slot's value is stale.
    fn inside(&self, listing: &mut Listing) -> Built {
        listing.label(label::INSIDE);
        listing.add(Instruction::with2(Op::Mov_r64_rm64, Register::RAX, slot(offset_of!(Slot, inside))))?;
        listing.registers(Op::Sub_r64_rm64, Register::RAX, Register::RSP)?;
        listing.immediate(Op::Cmp_rm64_imm32, Register::RAX, INSIDE_BYTES as i32)?;
        listing.branch(Op::Ja_rel32_64, label::OUTSIDE)?;
        listing.branch(Op::Jmp_rel32_64, label::ORIGINAL)
    }

    /// Adds the displaced instructions.
    fn original(&self, listing: &mut Listing) {
        let start = listing.instructions.len();
        listing.instructions.extend_from_slice(self.original);
        if let Some(first) = listing.instructions.get_mut(start) {
            // The shared code finds it by its offset.
            first.set_ip(label::ORIGINAL);
        }
        for instruction in listing.instructions.iter_mut().skip(start + 1) {
            listing.next += 1;
            instruction.set_ip(label::UNNAMED + listing.next);
        }
    }

    /// Encodes the stub.
    pub(crate) fn build(&self) -> Built<Stub> {
        let mut listing = Listing { base: self.base, instructions: Vec::new(), next: 0, label: None };
        let (has_old, allocates) =
            (self.function.old_argument != NO_ARGUMENT, self.function.size_argument != NO_ARGUMENT);
        if has_old {
            self.filter(&mut listing)?;
        }
        if allocates {
            self.slot(&mut listing)?;
            listing.label(label::HAVE_SLOT);
            if self.may_be_inside {
                self.is_inside(&mut listing)?;
            }
            self.size(&mut listing)?;
            self.count(&mut listing)?;
        }
        let framed = if allocates && self.is_of_objects() { Some(Self::call(&mut listing)?) } else { None };
        let original = listing.instructions.len();
        self.original(&mut listing);
        if allocates {
            listing.label(label::CLAIM);
            listing.branch(Op::Call_rel32_64, self.shared(self.entries.claim))?;
            listing.branch(Op::Jae_rel32_64, label::HAVE_SLOT)?;
            if self.is_of_objects() {
                // A shared slot cannot say which thread is inside, so what such a call requests from malloc counts
                // there.
                listing.branch(Op::Jmp_rel32_64, label::ORIGINAL)?;
            } else {
                self.size(&mut listing)?;
            }
            self.leave(&mut listing, label::ODD, self.entries.allocation)?;
            self.leave(&mut listing, label::ENDS, self.entries.allocation_ends_countdown)?;
            if self.function.times_argument != NO_ARGUMENT {
                self.leave(&mut listing, label::REFUSED, self.entries.refused)?;
            }
        }
        if allocates && self.may_be_inside {
            self.inside(&mut listing)?;
        }
        if has_old {
            let entry = if allocates { self.entries.reallocation } else { self.entries.free };
            self.leave(&mut listing, label::MAYBE, entry)?;
        }
        let at = self.base + STUBS + self.index as u64 * STUB_BYTES;
        let block = InstructionBlock::new(&listing.instructions, at);
        // All branches have 32-bit distances already, so the offset of the original does not depend on them.
        let options = BlockEncoderOptions::DONT_FIX_BRANCHES | BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let encoded = BlockEncoder::encode(64, block, options).map_err(|_| Refusal::OutOfReach)?;
        if encoded.code_buffer.len() as u64 > STUB_BYTES {
            return Err(Refusal::TooLong);
        }
        let offsets = &encoded.new_instruction_offsets;
        let end = encoded.code_buffer.len() as u32;
        let place = |at: usize| offsets.get(at).copied().unwrap_or(end);
        let of_call = framed.map(|[start, end]| [FrameRow::depth(place(start), 16), FrameRow::depth(place(end), 8)]);
        let places: Vec<u32> = (original..=original + self.original.len()).map(place).collect();
        let frame = of_call.into_iter().flatten().chain(frame_rows::rows(self.original, &places)).collect();
        let displaced = offsets.iter().skip(original).take(self.displaced).copied().collect();
        let (original, original_end) = (place(original), place(original + self.original.len()));
        Ok(Stub { original, original_end, displaced, frame, bytes: encoded.code_buffer })
    }
}

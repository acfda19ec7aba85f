//! The registers of one frame, and the steps from a frame to its caller.

use gimli::{CfaRule, Evaluation, EvaluationResult, LittleEndian, Location, Register, RegisterRule, Value as Operand};

use crate::address_bits::AddressBits;
use crate::arch;
use crate::cfi::Row;
use crate::memory::{Memory, Missing};
use crate::rule::{PlainRule, Saved};
use crate::runtime::RuntimeFrame;
use sampler_ebpf::abi::Registers;

/// Maximum number of operations of a DWARF expression. Real ones have under ten; a hostile one may loop.
const MAX_OPERATIONS: u32 = 256;

/// What is known about a register's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// Nothing.
    Unknown,
    /// The value.
    Known(u64),
    /// It is on the stack at this address, and is read only when needed.
    At(u64),
}

/// The registers of one frame.
#[derive(Clone, Debug)]
pub struct State {
    /// Instruction pointer.
    pub ip: u64,
    /// Stack pointer; a lower bound if the exact value is unknown.
    pub sp: u64,
    /// Whether `sp` is exact.
    sp_known: bool,
    /// The bits of saved return addresses that hold the address.
    bits: AddressBits,
    registers: [Value; arch::COUNT],
    /// Whether the value of any register that calls do not preserve may be known.
    scratch_known: bool,
}

/// Why a step failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepError {
    /// A word of the stack is missing.
    Missing(Missing),
    /// A register is needed whose value is unknown, or an expression is malformed.
    Unknown,
    /// The caller's frame would not lie above this one.
    Backwards,
    /// The frame pointer is zero.
    ZeroFramePointer,
}

impl From<Missing> for StepError {
    fn from(missing: Missing) -> Self {
        Self::Missing(missing)
    }
}

impl State {
    /// Creates the state in which a sample was taken.
    pub fn new(registers: &Registers, bits: AddressBits) -> Self {
        let mut state = Self {
            ip: registers.ip,
            sp: registers.sp,
            sp_known: true,
            bits,
            registers: [Value::Unknown; arch::COUNT],
            scratch_known: false,
        };
        state.registers[usize::from(arch::FRAME_POINTER)] = Value::Known(registers.fp);
        if let Some(link) = arch::LINK
            && registers.lr != 0
        {
            state.registers[usize::from(link)] = Value::Known(registers.lr);
        }
        state
    }

    /// Returns the code address in a saved return address.
    pub fn code_address(&self, word: u64) -> u64 {
        self.bits.code_address(word)
    }

    fn value(&self, number: u16, memory: &mut impl Memory) -> Result<u64, StepError> {
        match number {
            arch::STACK_POINTER => self.sp_known.then_some(self.sp).ok_or(StepError::Unknown),
            arch::RETURN_ADDRESS if arch::LINK.is_none() => Ok(self.ip),
            _ => match self.registers.get(usize::from(number)) {
                Some(Value::Known(value)) => Ok(*value),
                Some(Value::At(address)) => Ok(memory.read(*address)?),
                Some(Value::Unknown) | None => Err(StepError::Unknown),
            },
        }
    }

    fn forget_scratch(&mut self) {
        // The call has overwritten it.
        if let Some(link) = arch::LINK {
            self.registers[usize::from(link)] = Value::Unknown;
        }
        if self.scratch_known {
            for number in arch::SCRATCH {
                self.registers[usize::from(number)] = Value::Unknown;
            }
            self.scratch_known = false;
        }
    }

    /// Unwinds the frame by a plain rule.
    ///
    /// # Errors
    /// [`StepError`]; the state must not be used afterwards.
    pub fn leave_plain(&mut self, rule: &PlainRule, memory: &mut impl Memory) -> Result<(), StepError> {
        let cfa = match self.value(u16::from(rule.cfa_register), memory) {
            Ok(base) => base.wrapping_add_signed(i64::from(rule.cfa_offset)),
            Err(StepError::Unknown) => self.cfa_by_frame_pointer(rule, memory)?,
            Err(error) => return Err(error),
        };
        let at = |saved: Saved| saved.offset().map(|offset| cfa.wrapping_add_signed(offset));
        let (least, return_address) = match (at(rule.return_address), arch::LINK) {
            (Some(saved_at), _) => (self.sp.saturating_add(1), memory.read(saved_at)?),
            // Only the innermost function can have its return address in the link register. It may not have moved the
            // stack pointer.
            (None, Some(link)) if rule.return_address == Saved::SAME => (self.sp, self.value(link, memory)?),
            (None, _) => return Err(StepError::Unknown),
        };
        if cfa < least {
            return Err(StepError::Backwards);
        }
        self.ip = self.code_address(return_address);
        for (saved, number) in rule.preserved.iter().zip(arch::PRESERVED) {
            if let Some(address) = at(*saved) {
                self.registers[usize::from(number)] = Value::At(address);
            } else if *saved == Saved::UNDEFINED {
                self.registers[usize::from(number)] = Value::Unknown;
            }
        }
        self.forget_scratch();
        (self.sp, self.sp_known) = (cfa, true);
        Ok(())
    }

    /// Returns the canonical frame address of a frame whose stack pointer is unknown: its frame pointer points to
    /// where, according to the rule, the caller's frame pointer is saved.
    fn cfa_by_frame_pointer(&self, rule: &PlainRule, memory: &mut impl Memory) -> Result<u64, StepError> {
        let at = arch::PRESERVED.iter().position(|number| *number == arch::FRAME_POINTER);
        let saved = at.and_then(|at| rule.preserved[at].offset());
        match saved {
            Some(offset) if !self.sp_known && u16::from(rule.cfa_register) == arch::STACK_POINTER => {
                Ok(self.value(arch::FRAME_POINTER, memory)?.wrapping_sub(offset.cast_unsigned()))
            }
            _ => Err(StepError::Unknown),
        }
    }

    /// Unwinds the frame by its row of call frame information, evaluating expressions.
    ///
    /// # Errors
    /// [`StepError`]; the state must not be used afterwards.
    pub fn leave_by_row(&mut self, row: &Row, memory: &mut impl Memory) -> Result<(), StepError> {
        let is_signal = row.entry.is_signal_trampoline();
        let cfa = match row.row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => {
                self.value(register.0, memory)?.wrapping_add_signed(*offset)
            }
            CfaRule::Expression(expression) => self.evaluate(row, expression, None, memory)?,
        };
        let mut caller = Self { ip: 0, sp: cfa, sp_known: true, scratch_known: is_signal, ..*self };
        if !is_signal {
            caller.scratch_known = self.scratch_known;
            caller.forget_scratch();
        }
        let mut return_address = arch::LINK.map_or(Value::Unknown, |link| self.registers[usize::from(link)]);
        for (register, rule) in row.row.registers() {
            let value = match rule {
                RegisterRule::SameValue => continue,
                RegisterRule::Offset(offset) => Value::At(cfa.wrapping_add_signed(*offset)),
                RegisterRule::ValOffset(offset) => Value::Known(cfa.wrapping_add_signed(*offset)),
                RegisterRule::Register(other) => self.value(other.0, memory).map_or(Value::Unknown, Value::Known),
                RegisterRule::Expression(expression) => Value::At(self.evaluate(row, expression, Some(cfa), memory)?),
                RegisterRule::ValExpression(expression) => {
                    Value::Known(self.evaluate(row, expression, Some(cfa), memory)?)
                }
                RegisterRule::Constant(value) => Value::Known(*value),
                _ => Value::Unknown,
            };
            match register.0 {
                arch::RETURN_ADDRESS => return_address = value,
                arch::STACK_POINTER => caller.sp = read(value, memory)?,
                number => {
                    if let Some(slot) = caller.registers.get_mut(usize::from(number)) {
                        *slot = value;
                    }
                }
            }
        }
        caller.ip = self.code_address(read(return_address, memory)?);
        // A signal handler may run on a stack of its own. Every other frame lies below its caller's.
        if caller.sp <= self.sp && !is_signal {
            return Err(StepError::Backwards);
        }
        *self = caller;
        Ok(())
    }

    /// Unwinds the frame by its frame pointer: the caller's frame pointer is stored there, and the return address above
    /// it.
    ///
    /// # Errors
    /// [`StepError`]; the state must not be used afterwards.
    pub fn leave_by_frame_pointer(&mut self, memory: &mut impl Memory) -> Result<(), StepError> {
        let fp = self.value(arch::FRAME_POINTER, memory)?;
        if fp == 0 {
            return Err(StepError::ZeroFramePointer);
        }
        if fp < self.sp || !fp.is_multiple_of(8) {
            return Err(StepError::Backwards);
        }
        self.ip = self.code_address(memory.read(fp.wrapping_add(8))?);
        self.registers = [Value::Unknown; arch::COUNT];
        self.registers[usize::from(arch::FRAME_POINTER)] = Value::At(fp);
        self.scratch_known = false;
        (self.sp, self.sp_known) = (fp.wrapping_add(16), arch::FRAME_POINTER_GIVES_STACK_POINTER);
        Ok(())
    }

    /// Returns the registers that a runtime needs to unwind the frame.
    pub fn for_runtime(&self, memory: &mut impl Memory) -> RuntimeFrame {
        RuntimeFrame { ip: self.ip, sp: self.sp, fp: self.value(arch::FRAME_POINTER, memory).ok() }
    }

    /// Moves on to `caller`, the caller of a runtime's frame. The runtime's code preserves no other registers.
    ///
    /// # Errors
    /// [`StepError::Backwards`]
    pub fn leave_runtime(&mut self, caller: RuntimeFrame) -> Result<(), StepError> {
        if caller.sp <= self.sp {
            return Err(StepError::Backwards);
        }
        self.ip = self.code_address(caller.ip);
        self.registers = [Value::Unknown; arch::COUNT];
        self.registers[usize::from(arch::FRAME_POINTER)] = caller.fp.map_or(Value::Unknown, Value::Known);
        self.scratch_known = false;
        (self.sp, self.sp_known) = (caller.sp, true);
        Ok(())
    }

    /// Returns the state of the caller at `ip` and `sp`, for a frame that has changed no other preserved register.
    pub fn returned(&self, ip: u64, sp: u64) -> Self {
        let mut caller = Self { ip, sp, ..self.clone() };
        caller.forget_scratch();
        caller
    }

    /// Returns the caller by the link register, for a function that has saved nothing. `None` if the machine has no
    /// link register, if its value is unknown, or if it is also saved where the frame pointer points, as in functions
    /// with a frame.
    pub fn leave_by_link(&self, memory: &mut impl Memory) -> Option<Self> {
        let return_address = self.code_address(self.value(arch::LINK?, memory).ok()?);
        let frame = self.value(arch::FRAME_POINTER, memory).ok().filter(|frame| *frame >= self.sp);
        let saved = frame.and_then(|frame| memory.read(frame.wrapping_add(8)).ok());
        let is_saved = saved.is_some_and(|saved| self.code_address(saved) == return_address);
        (!is_saved).then(|| self.returned(return_address, self.sp))
    }

    /// Moves on from a signal trampoline to the code that the signal interrupted.
    ///
    /// # Errors
    /// [`StepError`]; the state must not be used afterwards.
    pub fn leave_signal(&mut self, memory: &mut impl Memory) -> Result<(), StepError> {
        let (frame, saved) = (self.sp, arch::SIGNAL_FRAME);
        self.ip = memory.read(frame.wrapping_add(saved.ip))?;
        self.sp = memory.read(frame.wrapping_add(saved.sp))?;
        for (number, offset) in saved.registers {
            self.registers[usize::from(*number)] = Value::At(frame.wrapping_add(*offset));
        }
        (self.sp_known, self.scratch_known) = (true, true);
        Ok(())
    }

    fn evaluate(
        &self,
        row: &Row,
        expression: &gimli::UnwindExpression<usize>,
        cfa: Option<u64>,
        memory: &mut impl Memory,
    ) -> Result<u64, StepError> {
        let end = expression.offset.checked_add(expression.length).ok_or(StepError::Unknown)?;
        let code = row.section.get(expression.offset..end).ok_or(StepError::Unknown)?;
        let reader = gimli::EndianSlice::new(code, LittleEndian);
        let mut evaluation = Evaluation::new(reader, row.entry.cie().encoding());
        evaluation.set_max_iterations(MAX_OPERATIONS);
        // The expression of a register starts with the CFA on its stack, that of the CFA itself with an empty stack
        // (DWARF 5, 6.4.3).
        if let Some(cfa) = cfa {
            evaluation.set_initial_value(cfa);
        }
        let bad = |_| StepError::Unknown;
        let mut result = evaluation.evaluate().map_err(bad)?;
        loop {
            result = match result {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresRegister { register: Register(number), .. } => {
                    let value = self.value(number, memory)?;
                    evaluation.resume_with_register(Operand::Generic(value)).map_err(bad)?
                }
                EvaluationResult::RequiresMemory { address, size, .. } => {
                    let word = memory.read(address)?;
                    let kept_bits = u32::from(size.clamp(1, 8)) * 8;
                    let value = word & (u64::MAX >> (64 - kept_bits));
                    evaluation.resume_with_memory(Operand::Generic(value)).map_err(bad)?
                }
                _ => return Err(StepError::Unknown),
            };
        }
        match evaluation.as_result().last().map(|piece| &piece.location) {
            Some(Location::Address { address }) => Ok(*address),
            _ => Err(StepError::Unknown),
        }
    }
}

fn read(value: Value, memory: &mut impl Memory) -> Result<u64, StepError> {
    match value {
        Value::Known(value) => Ok(value),
        Value::At(address) => Ok(memory.read(address)?),
        Value::Unknown => Err(StepError::Unknown),
    }
}

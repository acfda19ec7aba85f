//! The registers of a frame during a walk, and the steps from a frame to its caller.

use gimli::{CfaRule, Evaluation, EvaluationResult, LittleEndian, Location, Register, RegisterRule, Value as Operand};

use super::cfi::Row;
use super::memory::{Missing, StackMemory};
use super::rule::{PlainRule, Saved, register};
use sampler_ebpf::abi::Registers;

/// Most operations of one DWARF expression: real ones have under ten, a hostile one loops for ever.
const MAX_OPERATIONS: u32 = 256;

/// What is known about a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// Nothing.
    Unknown,
    /// Its value.
    Known(u64),
    /// Saved at this address of the stack; read only when needed.
    At(u64),
}

/// Registers of one frame.
#[derive(Clone, Debug)]
pub struct State {
    /// Instruction pointer.
    pub ip: u64,
    /// Stack pointer.
    pub sp: u64,
    registers: [Value; 16],
    /// Whether registers that calls do not preserve may be known.
    scratch_known: bool,
}

/// Why a step failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepError {
    /// A word of the stack is missing.
    Missing(Missing),
    /// A register is needed that nobody saved, or an expression is malformed.
    Unknown,
    /// The stack pointer would not grow.
    Backwards,
    /// The frame pointer is zero.
    ZeroFramePointer,
}

impl From<Missing> for StepError {
    fn from(missing: Missing) -> Self {
        Self::Missing(missing)
    }
}

/// Offsets of the interrupted registers from the stack pointer at a signal trampoline (Linux, x86-64: the `gregs` of
/// `ucontext_t` begin at byte 40, in the order r8…r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip).
const UCONTEXT_REGISTERS: [(u16, u64); 15] = [
    (8, 40),
    (9, 48),
    (10, 56),
    (11, 64),
    (12, 72),
    (13, 80),
    (14, 88),
    (15, 96),
    (5, 104),
    (4, 112),
    (register::RBP, 120),
    (register::RBX, 128),
    (1, 136),
    (0, 144),
    (2, 152),
];
const UCONTEXT_SP: u64 = 160;
const UCONTEXT_IP: u64 = 168;

impl State {
    /// The state in which a sample was taken.
    pub fn new(registers: &Registers) -> Self {
        let mut state =
            Self { ip: registers.ip, sp: registers.sp, registers: [Value::Unknown; 16], scratch_known: false };
        state.registers[usize::from(register::RBP)] = Value::Known(registers.fp);
        state
    }

    fn value(&self, number: u16, memory: &mut StackMemory) -> Result<u64, StepError> {
        match number {
            register::RSP => Ok(self.sp),
            register::RA => Ok(self.ip),
            _ => match self.registers.get(usize::from(number)) {
                Some(Value::Known(value)) => Ok(*value),
                Some(Value::At(address)) => Ok(memory.read(*address)?),
                Some(Value::Unknown) | None => Err(StepError::Unknown),
            },
        }
    }

    fn forget_scratch(&mut self) {
        if self.scratch_known {
            for number in [0, 1, 2, 4, 5, 8, 9, 10, 11] {
                self.registers[number] = Value::Unknown;
            }
            self.scratch_known = false;
        }
    }

    /// Leaves the frame by a plain rule.
    ///
    /// # Errors
    /// [`StepError`]; the state is then of no use.
    pub fn leave_plain(&mut self, rule: &PlainRule, memory: &mut StackMemory) -> Result<(), StepError> {
        let base = self.value(u16::from(rule.cfa_register), memory)?;
        let cfa = base.wrapping_add_signed(i64::from(rule.cfa_offset));
        if cfa <= self.sp {
            return Err(StepError::Backwards);
        }
        let at = |saved: Saved| saved.offset().map(|offset| cfa.wrapping_add_signed(offset));
        self.ip = memory.read(at(rule.return_address).ok_or(StepError::Unknown)?)?;
        for (saved, number) in rule.preserved.iter().zip(register::PRESERVED) {
            if let Some(address) = at(*saved) {
                self.registers[usize::from(number)] = Value::At(address);
            } else if *saved == Saved::UNDEFINED {
                self.registers[usize::from(number)] = Value::Unknown;
            }
        }
        self.forget_scratch();
        self.sp = cfa;
        Ok(())
    }

    /// Leaves the frame by its row of call frame information, whatever that needs.
    ///
    /// # Errors
    /// [`StepError`]; the state is then of no use.
    pub fn leave_by_row(&mut self, row: &Row, memory: &mut StackMemory) -> Result<(), StepError> {
        let is_signal = row.entry.is_signal_trampoline();
        let cfa = match row.row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => {
                self.value(register.0, memory)?.wrapping_add_signed(*offset)
            }
            CfaRule::Expression(expression) => self.evaluate(row, expression, None, memory)?,
        };
        let mut caller = Self { ip: 0, sp: cfa, registers: self.registers, scratch_known: is_signal };
        if !is_signal {
            caller.scratch_known = self.scratch_known;
            caller.forget_scratch();
        }
        let mut return_address = Value::Unknown;
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
                register::RA => return_address = value,
                register::RSP => caller.sp = read(value, memory)?,
                number => {
                    if let Some(slot) = caller.registers.get_mut(usize::from(number)) {
                        *slot = value;
                    }
                }
            }
        }
        caller.ip = read(return_address, memory)?;
        // A signal may have come on a stack of its own; every other frame lies below its caller's.
        if caller.sp <= self.sp && !is_signal {
            return Err(StepError::Backwards);
        }
        *self = caller;
        Ok(())
    }

    /// Leaves a frame whose frame pointer is the only hint.
    ///
    /// # Errors
    /// [`StepError`]; the state is then of no use.
    pub fn leave_by_frame_pointer(&mut self, memory: &mut StackMemory) -> Result<(), StepError> {
        let fp = self.value(register::RBP, memory)?;
        if fp == 0 {
            return Err(StepError::ZeroFramePointer);
        }
        if fp < self.sp || !fp.is_multiple_of(8) {
            return Err(StepError::Backwards);
        }
        self.ip = memory.read(fp.wrapping_add(8))?;
        self.registers = [Value::Unknown; 16];
        self.registers[usize::from(register::RBP)] = Value::At(fp);
        self.scratch_known = false;
        self.sp = fp.wrapping_add(16);
        Ok(())
    }

    /// The caller of a frame that changed no register but the stack pointer.
    pub fn returned(&self, ip: u64, sp: u64) -> Self {
        let mut caller = Self { ip, sp, ..self.clone() };
        caller.forget_scratch();
        caller
    }

    /// Leaves a signal trampoline for the code that the signal interrupted.
    ///
    /// # Errors
    /// [`StepError`]; the state is then of no use.
    pub fn leave_signal(&mut self, memory: &mut StackMemory) -> Result<(), StepError> {
        let context = self.sp;
        self.ip = memory.read(context.wrapping_add(UCONTEXT_IP))?;
        self.sp = memory.read(context.wrapping_add(UCONTEXT_SP))?;
        for (number, offset) in UCONTEXT_REGISTERS {
            self.registers[usize::from(number)] = Value::At(context.wrapping_add(offset));
        }
        self.scratch_known = true;
        Ok(())
    }

    fn evaluate(
        &self,
        row: &Row,
        expression: &gimli::UnwindExpression<usize>,
        cfa: Option<u64>,
        memory: &mut StackMemory,
    ) -> Result<u64, StepError> {
        let end = expression.offset.checked_add(expression.length).ok_or(StepError::Unknown)?;
        let code = row.section.get(expression.offset..end).ok_or(StepError::Unknown)?;
        let reader = gimli::EndianSlice::new(code, LittleEndian);
        let mut evaluation = Evaluation::new(reader, row.entry.cie().encoding());
        evaluation.set_max_iterations(MAX_OPERATIONS);
        // Register rules begin with the CFA on the expression's stack, the CFA's own rule with nothing.
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

fn read(value: Value, memory: &mut StackMemory) -> Result<u64, StepError> {
    match value {
        Value::Known(value) => Ok(value),
        Value::At(address) => Ok(memory.read(address)?),
        Value::Unknown => Err(StepError::Unknown),
    }
}

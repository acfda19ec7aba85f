//! x86-64: the code addresses that a function can return, tracked through its registers and its own stack.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use iced_x86::{
    Code, ConditionCode, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpKind,
    Register,
};

use super::x86_64::{is_written, stack_pointer_change};
use crate::flow::{Returned, Target};

/// Maximum instructions that are followed, over all paths and calls; a resolver has a few dozen.
const INSTRUCTIONS_MAX: usize = 20_000;
/// Maximum values of one place; a resolver chooses among a few.
const VALUES_MAX: usize = 32;
/// Maximum depth of calls within calls.
const DEPTH_MAX: usize = 4;
/// Numbers of the registers that a call does not preserve: rax, rcx, rdx, rsi, rdi, r8 to r11 (System V ABI, §3.2.1).
const CLOBBERED: [usize; 9] = [0, 1, 2, 6, 7, 8, 9, 10, 11];

/// A possible content of a register, or of a place on the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Value {
    /// An address in the file, or the content of a slot at that address.
    Code(Target),
    /// The stack pointer at the entry plus this many bytes.
    Stack(i64),
    /// Anything else.
    Unknown,
}

/// Every value that a place may have, over all paths that lead here. Empty if no path does.
type Values = BTreeSet<Value>;

fn unknown() -> Values {
    Values::from([Value::Unknown])
}

/// Adds another path's values. If there are too many, adds an unknown value instead.
fn merge(values: &mut Values, others: &Values) {
    if values.len() + others.len() > VALUES_MAX {
        values.insert(Value::Unknown);
    } else {
        values.extend(others);
    }
}

/// All places at one instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
struct State {
    registers: [Values; 16],
    /// By distance from the stack pointer at the entry, bytes; a missing place is unknown.
    stack: BTreeMap<i64, Values>,
}

impl State {
    fn at_entry() -> Self {
        let mut registers: [Values; 16] = std::array::from_fn(|_| unknown());
        registers[Register::RSP.number()] = Values::from([Value::Stack(0)]);
        Self { registers, stack: BTreeMap::new() }
    }

    fn get(&self, register: Register) -> Values {
        if register.is_gpr64() { self.registers[register.number()].clone() } else { unknown() }
    }

    fn set(&mut self, register: Register, values: Values) {
        if register.is_gpr() {
            self.registers[register.full_register().number()] = values;
        }
    }

    /// The place on the stack at a distance from a register, if known.
    fn place(&self, register: Register, distance: i64) -> Option<i64> {
        let values = self.get(register);
        match (values.len(), values.first()) {
            (1, Some(Value::Stack(at))) => at.checked_add(distance),
            _ => None,
        }
    }

    /// The place on the stack of a memory operand.
    fn operand_place(&self, instruction: &Instruction) -> Option<i64> {
        let plain = instruction.memory_index() == Register::None && instruction.segment_prefix() == Register::None;
        self.place(instruction.memory_base(), instruction.memory_displacement64() as i64).filter(|_| plain)
    }

    fn load(&self, place: Option<i64>) -> Values {
        place.and_then(|at| self.stack.get(&at)).cloned().unwrap_or_else(unknown)
    }

    /// The values of an operand of eight bytes.
    fn operand(&self, instruction: &Instruction, operand: u32) -> Values {
        match instruction.op_kind(operand) {
            OpKind::Register => self.get(instruction.op_register(operand)),
            OpKind::Memory if instruction.is_ip_rel_memory_operand() => {
                Values::from([Value::Code(Target::Slot(instruction.ip_rel_memory_address()))])
            }
            OpKind::Memory => self.load(self.operand_place(instruction)),
            OpKind::Immediate32 | OpKind::Immediate64 | OpKind::Immediate32to64 => {
                Values::from([Value::Code(Target::Address(instruction.immediate(operand)))])
            }
            _ => unknown(),
        }
    }

    /// Merges another path's state. Returns whether that added something.
    fn join(&mut self, other: &Self) -> bool {
        let before = self.clone();
        for (mine, theirs) in self.registers.iter_mut().zip(&other.registers) {
            merge(mine, theirs);
        }
        self.stack.retain(|at, _| other.stack.contains_key(at));
        for (at, mine) in &mut self.stack {
            other.stack.get(at).into_iter().for_each(|theirs| merge(mine, theirs));
        }
        *self != before
    }

    fn step(&mut self, instruction: &Instruction, info: &mut InstructionInfoFactory) {
        let conditional = instruction.condition_code() != ConditionCode::None && instruction.op_count() == 2;
        let target = (instruction.op_count() > 0 && instruction.op0_kind() == OpKind::Register)
            .then(|| instruction.op0_register())
            .filter(|register| register.is_gpr64() || register.is_gpr32());
        let written = match (instruction.mnemonic(), target) {
            (Mnemonic::Lea, Some(register)) if instruction.is_ip_rel_memory_operand() => {
                let address = instruction.ip_rel_memory_address();
                Some((register, Values::from([Value::Code(Target::Address(address))])))
            }
            (Mnemonic::Lea, Some(register)) => {
                let place = self.operand_place(instruction);
                Some((register, place.map_or_else(unknown, |at| Values::from([Value::Stack(at)]))))
            }
            (Mnemonic::Mov, Some(register)) => Some((register, self.operand(instruction, 1))),
            (_, Some(register)) if conditional && register.is_gpr64() => {
                let mut values = self.get(register);
                merge(&mut values, &self.operand(instruction, 1));
                Some((register, values))
            }
            (Mnemonic::Pop, Some(register)) => Some((register, self.load(self.place(Register::RSP, 0)))),
            _ => None,
        };
        let stored = match instruction.mnemonic() {
            Mnemonic::Push => Some((self.place(Register::RSP, -8), self.operand(instruction, 0))),
            Mnemonic::Mov if instruction.op0_kind() == OpKind::Memory && !instruction.is_ip_rel_memory_operand() => {
                Some((self.operand_place(instruction), self.operand(instruction, 1)))
            }
            _ => None,
        };
        let frame = self.place(Register::RBP, 0);
        let stack_pointer = match (instruction.mnemonic(), stack_pointer_change(instruction)) {
            (Mnemonic::Leave, _) => Some(self.place(Register::RBP, 8)),
            (_, change) => change.map(|change| self.place(Register::RSP, change)),
        };
        for used in info.info(instruction).used_registers() {
            if is_written(used) {
                self.set(used.register(), unknown());
            }
        }
        if instruction.mnemonic() == Mnemonic::Leave {
            self.set(Register::RBP, self.load(frame));
        }
        if let Some(place) = stack_pointer {
            self.set(Register::RSP, place.map_or_else(unknown, |at| Values::from([Value::Stack(at)])));
        }
        if let Some((register, values)) = written {
            self.set(register, values);
        }
        if let Some((Some(at), values)) = stored {
            self.stack.insert(at, values);
        }
    }

    /// Applies a call that returned `values`.
    fn called(&mut self, values: Values) {
        // The called function may write to places whose addresses it received.
        let gives_away = |number: &usize| self.registers[*number].iter().any(|v| matches!(v, Value::Stack(_)));
        if CLOBBERED.iter().any(gives_away) {
            self.stack.clear();
        }
        for number in CLOBBERED {
            self.registers[number] = unknown();
        }
        self.set(Register::RAX, values);
    }
}

/// See [`super::returns`].
pub(super) fn returns<'a>(address: u64, code_at: &dyn Fn(u64) -> Cow<'a, [u8]>) -> Returned {
    let mut budget = INSTRUCTIONS_MAX;
    let values = follow(address, code_at, 0, &mut budget);
    let targets = values.iter().filter_map(|value| if let Value::Code(target) = value { Some(*target) } else { None });
    let is_whole = !values.is_empty() && values.iter().all(|value| matches!(value, Value::Code(_)));
    Returned { targets: targets.collect(), is_whole }
}

/// The values that the function at `address` can return.
fn follow<'a>(address: u64, code_at: &dyn Fn(u64) -> Cow<'a, [u8]>, depth: usize, budget: &mut usize) -> Values {
    let mut returned = Values::new();
    let mut states: BTreeMap<u64, State> = BTreeMap::from([(address, State::at_entry())]);
    let mut open = vec![address];
    let mut info = InstructionInfoFactory::new();
    while let Some(start) = open.pop() {
        let Some(mut state) = states.get(&start).cloned() else { continue };
        let code = code_at(start);
        let mut decoder = Decoder::with_ip(64, &code, start, DecoderOptions::NONE);
        loop {
            if *budget == 0 || !decoder.can_decode() {
                returned.insert(Value::Unknown);
                break;
            }
            *budget -= 1;
            let instruction = decoder.decode();
            let mut next = Vec::new();
            match instruction.flow_control() {
                FlowControl::Next => {
                    state.step(&instruction, &mut info);
                    // Paths may join here.
                    if !states.contains_key(&instruction.next_ip()) {
                        continue;
                    }
                    next.push(instruction.next_ip());
                }
                FlowControl::Call | FlowControl::IndirectCall => {
                    let inside = instruction.is_call_near() && depth < DEPTH_MAX;
                    let values = if inside {
                        follow(instruction.near_branch_target(), code_at, depth + 1, budget)
                    } else {
                        unknown()
                    };
                    // A place on the callee's stack has no meaning here.
                    state.called(
                        values.into_iter().map(|v| if let Value::Code(_) = v { v } else { Value::Unknown }).collect(),
                    );
                    // A call at the end of a function does not return.
                    next.extend(decoder.can_decode().then(|| instruction.next_ip()));
                }
                FlowControl::UnconditionalBranch => next.push(instruction.near_branch_target()),
                FlowControl::ConditionalBranch => {
                    next.extend([instruction.near_branch_target(), instruction.next_ip()]);
                }
                FlowControl::Return => merge(&mut returned, &state.get(Register::RAX)),
                // `ud2` does not return.
                FlowControl::Exception if instruction.code() == Code::Ud2 => {}
                _ => {
                    returned.insert(Value::Unknown);
                }
            }
            for to in next {
                let is_new = match states.get_mut(&to) {
                    Some(known) => known.join(&state),
                    None => states.insert(to, state.clone()).is_none(),
                };
                if is_new {
                    open.push(to);
                }
            }
            break;
        }
    }
    returned
}

#[cfg(test)]
#[path = "x86_64_returns_tests.rs"]
mod tests;

//! x86-64: the functions that a function calls, and its return sites.
//!
//! A probed return instruction is single-stepped, which costs two traps in every call. Many returns follow a branch
//! after which the function does nothing but return, with its result in a register. Branches are emulated, so they are
//! probed instead if every path to the return passes one of them, and no loop runs through it.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use iced_x86::{Code, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpKind, Register};
use sampler_ebpf::abi::{ALWAYS, IN_REGISTER, ResultLocation};

use super::x86_64::{is_written, stack_pointer_change};
use super::x86_64_body::{Body, Step};
use crate::flow::Exits;

/// Maximum instructions that are followed from a branch to the returns behind it.
const FOLLOWED_MAX: usize = 64;
/// Maximum instructions of a function whose branches are tried. In longer ones the returns are probed.
const BODY_MAX: usize = 4_000;
/// Bytes of a word.
const WORD: i64 = 8;

/// See [`super::exits`].
pub(super) fn exits<'a>(address: u64, code_at: &dyn Fn(u64) -> Option<(u64, Cow<'a, [u8]>)>) -> Option<Exits> {
    let body = Body::read(address, code_at)?;
    let return_sites = return_sites(&body);
    Some(Exits { return_sites, calls: body.calls, calls_unknown: body.calls_unknown })
}

/// A branch that leads to nothing but returns, in one or both directions.
struct Candidate {
    at: u64,
    result: ResultLocation,
    /// The addresses in those directions.
    ways: Vec<u64>,
    returns: BTreeSet<u64>,
}

/// The sites that every returning call passes, and where its result is there.
fn return_sites(body: &Body) -> BTreeMap<u64, ResultLocation> {
    let is_return = |step: &Step| step.instruction.flow_control() == FlowControl::Return;
    let returns: BTreeSet<u64> = body.steps.iter().filter(|(_, step)| is_return(step)).map(|(at, _)| *at).collect();
    let mut chosen: Vec<Candidate> = if body.steps.len() > BODY_MAX {
        Vec::new()
    } else {
        let candidates = body.steps.values().filter_map(|step| candidate(body, step));
        candidates.filter(|candidate| !is_in_loop(body, candidate.at)).collect()
    };
    let covered: BTreeSet<u64> = returns.iter().copied().filter(|at| is_covered(body, *at, &chosen)).collect();
    // Keeps the last branches before the returns: the fewest calls pass them without returning there.
    let mut i = 0;
    while i < chosen.len() {
        let tried = chosen.remove(i);
        if !tried.returns.iter().filter(|at| covered.contains(at)).all(|at| is_covered(body, *at, &chosen)) {
            chosen.insert(i, tried);
            i += 1;
        }
    }
    let at_branches = chosen.into_iter().map(|candidate| (candidate.at, candidate.result));
    at_branches.chain(returns.difference(&covered).map(|at| (*at, ResultLocation::RETURN))).collect()
}

/// Whether a call may execute an instruction more than once.
fn is_in_loop(body: &Body, at: u64) -> bool {
    let next =
        |at: u64| body.steps.get(&at).into_iter().flat_map(|step| step.falls_to.into_iter().chain(step.jumps_to));
    let (mut seen, mut open) = (BTreeSet::new(), vec![at]);
    while let Some(from) = open.pop() {
        open.extend(next(from).filter(|to| seen.insert(*to)));
    }
    seen.contains(&at)
}

/// Whether every path to the return at `target` passes one of the `candidates` that lead there.
fn is_covered(body: &Body, target: u64, candidates: &[Candidate]) -> bool {
    let cut: BTreeSet<(u64, u64)> = candidates
        .iter()
        .filter(|candidate| candidate.returns.contains(&target))
        .flat_map(|candidate| candidate.ways.iter().map(|to| (candidate.at, *to)))
        .collect();
    let mut seen = BTreeSet::from([body.start]);
    let mut open = vec![body.start];
    while let Some(at) = open.pop() {
        if at == target {
            return false;
        }
        let Some(step) = body.steps.get(&at) else { continue };
        for to in step.falls_to.into_iter().chain(step.jumps_to) {
            if !cut.contains(&(at, to)) && seen.insert(to) {
                open.push(to);
            }
        }
    }
    true
}

/// `step` as a candidate, if it is a branch that leads to nothing but returns in at least one direction.
fn candidate(body: &Body, step: &Step) -> Option<Candidate> {
    let instruction = &step.instruction;
    let (jumps_to, at) = (step.jumps_to?, instruction.ip());
    let follow = |to| Followed::new(body).follow(to, &State::here());
    if instruction.is_jmp_short_or_near() {
        let (result, returns) = follow(jumps_to)?;
        return has_no_prefix(instruction).then(|| Candidate { at, result, ways: vec![jumps_to], returns });
    }
    if !instruction.is_jcc_short_or_near() || !has_no_prefix(instruction) {
        return None;
    }
    let falls_to = step.falls_to?;
    // `ConditionCode` has the conditions in the order of the instruction set, behind that for no condition.
    let condition = (instruction.condition_code() as u8).checked_sub(1)?;
    match (follow(jumps_to), follow(falls_to)) {
        (Some((result, taken)), Some((other, not_taken))) => (result == other).then(|| Candidate {
            at,
            result,
            ways: vec![jumps_to, falls_to],
            returns: taken.union(&not_taken).copied().collect(),
        }),
        (Some((result, returns)), None) => {
            Some(Candidate { at, result: ResultLocation { condition, ..result }, ways: vec![jumps_to], returns })
        }
        (None, Some((result, returns))) => {
            let condition = condition ^ 1;
            Some(Candidate { at, result: ResultLocation { condition, ..result }, ways: vec![falls_to], returns })
        }
        (None, None) => None,
    }
}

/// Whether a branch has the plain encoding, which the kernel emulates.
fn has_no_prefix(branch: &Instruction) -> bool {
    let opcode = if branch.is_jcc_near() { 2 } else { 1 };
    let distance = if branch.is_jcc_short() || branch.is_jmp_short() { 1 } else { 4 };
    branch.len() == opcode + distance
}

/// The content of a register, relative to the state at the branch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Value {
    /// The value that this register held, by its number.
    Register(usize),
    /// The value that was this far above the stack pointer, bytes.
    Stack(i64),
    Unknown,
}

/// The registers at an instruction behind a branch.
#[derive(Clone)]
struct State {
    values: [Value; 16],
    /// How far the stack pointer has moved, bytes.
    moved: i64,
}

impl State {
    fn here() -> Self {
        Self { values: std::array::from_fn(Value::Register), moved: 0 }
    }

    /// Applies `instruction`; `None` if its effect on the stack pointer is not known.
    fn step(&mut self, instruction: &Instruction, info: &mut InstructionInfoFactory) -> Option<()> {
        let set = match instruction.code() {
            Code::Mov_r64_rm64 | Code::Mov_rm64_r64
                if instruction.op0_kind() == OpKind::Register && instruction.op1_kind() == OpKind::Register =>
            {
                Some(self.values[instruction.op1_register().number()])
            }
            _ if instruction.mnemonic() == Mnemonic::Pop => Some(Value::Stack(self.moved)),
            _ => None,
        };
        let change = stack_pointer_change(instruction);
        for used in info.info(instruction).used_registers() {
            if is_written(used) && used.register().is_gpr() {
                let register = used.register().full_register();
                if register == Register::RSP {
                    change?;
                }
                self.values[register.number()] = Value::Unknown;
            }
        }
        self.moved += change.unwrap_or(0);
        if let Some(value) = set
            && instruction.op0_register().is_gpr64()
        {
            self.values[instruction.op0_register().number()] = value;
        }
        // Memory below the stack pointer is not considered.
        (self.moved >= 0).then_some(())
    }

    /// Where the result and the frame pointer are at the branch, given the state at a return.
    fn result(&self) -> Option<ResultLocation> {
        let words =
            |bytes: i64| u8::try_from(bytes / WORD).ok().filter(|words| bytes % WORD == 0 && *words < IN_REGISTER);
        let stack_pointer = Register::RSP.number();
        let frame_pointer = Register::RBP.number();
        let Value::Register(register) = self.values[Register::RAX.number()] else { return None };
        let words_to_frame_pointer = match self.values[frame_pointer] {
            Value::Register(at) if at == frame_pointer => IN_REGISTER,
            Value::Stack(bytes) => words(bytes)?,
            _ => return None,
        };
        (register != stack_pointer).then_some(ResultLocation {
            register: register as u8,
            condition: ALWAYS,
            words_to_return: words(self.moved)?,
            words_to_frame_pointer,
        })
    }
}

/// Follows a branch to the returns behind it.
struct Followed<'a> {
    body: &'a Body,
    info: InstructionInfoFactory,
    left: usize,
}

impl<'a> Followed<'a> {
    fn new(body: &'a Body) -> Self {
        Self { body, info: InstructionInfoFactory::new(), left: FOLLOWED_MAX }
    }

    /// The returns behind `at`, and where the result is; `None` if there may be anything else.
    fn follow(&mut self, at: u64, state: &State) -> Option<(ResultLocation, BTreeSet<u64>)> {
        let mut state = state.clone();
        let mut at = at;
        loop {
            self.left = self.left.checked_sub(1)?;
            let step = self.body.steps.get(&at)?;
            let instruction = &step.instruction;
            match instruction.flow_control() {
                FlowControl::Next => {
                    state.step(instruction, &mut self.info)?;
                    at = step.falls_to?;
                }
                FlowControl::UnconditionalBranch => at = step.jumps_to?,
                FlowControl::ConditionalBranch => {
                    let (result, mut returns) = self.follow(step.jumps_to?, &state)?;
                    let (other, more) = self.follow(step.falls_to?, &state)?;
                    returns.extend(more);
                    return (result == other).then_some((result, returns));
                }
                FlowControl::Return => return Some((state.result()?, BTreeSet::from([at]))),
                _ => return None,
            }
        }
    }
}

#[cfg(test)]
#[path = "x86_64_exits_tests.rs"]
mod tests;

//! x86-64: the instructions of a function, and the control flow between them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction};

use crate::flow::Target;

/// Maximum instructions that are decoded; no function of an allocator has as many.
const INSTRUCTIONS_MAX: usize = 20_000;

/// One instruction.
pub(super) struct Step {
    /// The instruction.
    pub(super) instruction: Instruction,
    /// Address of the instruction that follows, unless control never gets there.
    pub(super) falls_to: Option<u64>,
    /// The target of its jump.
    pub(super) jumps_to: Option<u64>,
}

/// The instructions that a call of a function can execute, in the function and in the code it jumps to.
pub(super) struct Body {
    /// Address of the first instruction.
    pub(super) start: u64,
    /// The instructions, by address.
    pub(super) steps: BTreeMap<u64, Step>,
    /// The functions it calls.
    pub(super) calls: BTreeSet<Target>,
    /// Whether it also calls through pointers.
    pub(super) calls_unknown: bool,
}

impl Body {
    /// Decodes the function at `address`. `code_at` gives the address that a jump really leads to, and the code from
    /// there up to the end of the function. If it returns `None` for code that is needed, so does this.
    pub(super) fn read<'a>(address: u64, code_at: &dyn Fn(u64) -> Option<(u64, Cow<'a, [u8]>)>) -> Option<Self> {
        let mut body = Self { start: address, steps: BTreeMap::new(), calls: BTreeSet::new(), calls_unknown: false };
        let mut open = vec![address];
        while let Some(start) = open.pop() {
            let (start, code) = code_at(start).filter(|(_, code)| !code.is_empty())?;
            let mut decoder = Decoder::with_ip(64, &code, start, DecoderOptions::NONE);
            while decoder.can_decode() {
                let instruction = decoder.decode();
                if body.steps.contains_key(&instruction.ip()) {
                    break;
                }
                if body.steps.len() >= INSTRUCTIONS_MAX || instruction.is_invalid() {
                    return None;
                }
                let mut step = Step { instruction, falls_to: Some(instruction.next_ip()), jumps_to: None };
                match instruction.flow_control() {
                    FlowControl::Next => {}
                    FlowControl::Call | FlowControl::IndirectCall => body.call(&instruction),
                    FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => {
                        step.jumps_to = Some(code_at(instruction.near_branch_target())?.0);
                        if instruction.flow_control() == FlowControl::UnconditionalBranch {
                            step.falls_to = None;
                        }
                    }
                    FlowControl::Return => step.falls_to = None,
                    FlowControl::Exception if instruction.code() == Code::Ud2 => step.falls_to = None,
                    // A jump through a table, or to another function.
                    _ => return None,
                }
                let (jumps_to, ends) = (step.jumps_to, step.falls_to.is_none());
                body.steps.insert(instruction.ip(), step);
                open.extend(jumps_to);
                if ends {
                    break;
                }
            }
        }
        Some(body)
    }

    fn call(&mut self, instruction: &Instruction) {
        if instruction.is_call_near() {
            self.calls.insert(Target::Address(instruction.near_branch_target()));
        } else if instruction.is_ip_rel_memory_operand() {
            self.calls.insert(Target::Slot(instruction.ip_rel_memory_address()));
        } else {
            self.calls_unknown = true;
        }
    }
}

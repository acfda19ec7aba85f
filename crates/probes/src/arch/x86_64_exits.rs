//! x86-64: the return sites of a function, and what it calls.

use std::collections::BTreeSet;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl};

use crate::flow::{Exits, Target};

/// Most instructions that are decoded; no function of an allocator has as many.
const INSTRUCTIONS_MAX: usize = 20_000;

/// See [`super::exits`].
pub(super) fn exits<'a>(address: u64, code_at: &dyn Fn(u64) -> &'a [u8]) -> Option<Exits> {
    let mut found = Exits::default();
    let mut seen = BTreeSet::new();
    let mut open = vec![address];
    while let Some(start) = open.pop() {
        let mut decoder = Decoder::with_ip(64, code_at(start), start, DecoderOptions::NONE);
        // This path leaves the known code of the function.
        if !decoder.can_decode() {
            return None;
        }
        while decoder.can_decode() {
            let instruction = decoder.decode();
            if !seen.insert(instruction.ip()) {
                break;
            }
            if seen.len() > INSTRUCTIONS_MAX || instruction.is_invalid() {
                return None;
            }
            match instruction.flow_control() {
                FlowControl::Next => {}
                FlowControl::Call if instruction.is_call_near() => {
                    found.calls.insert(Target::Address(instruction.near_branch_target()));
                }
                FlowControl::IndirectCall if instruction.is_ip_rel_memory_operand() => {
                    found.calls.insert(Target::Slot(instruction.ip_rel_memory_address()));
                }
                FlowControl::Call | FlowControl::IndirectCall => found.calls_unknown = true,
                FlowControl::ConditionalBranch => open.push(instruction.near_branch_target()),
                FlowControl::UnconditionalBranch => {
                    open.push(instruction.near_branch_target());
                    break;
                }
                FlowControl::Return => {
                    found.return_sites.insert(instruction.ip());
                    break;
                }
                FlowControl::Exception if instruction.code() == Code::Ud2 => break,
                // A jump through a table, or to another function.
                _ => return None,
            }
        }
    }
    Some(found)
}

#[cfg(test)]
#[path = "x86_64_exits_tests.rs"]
mod tests;

//! x86-64: where a function ends, and what it calls on the way.

use std::collections::BTreeSet;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl};

use super::{Ends, Target};

/// Instructions that are looked at; a function with more is not an allocator's.
const INSTRUCTIONS_MAX: usize = 20_000;

/// See [`super::ends`].
pub(super) fn ends<'a>(address: u64, code_at: &dyn Fn(u64) -> &'a [u8]) -> Option<Ends> {
    let mut found = Ends::default();
    let mut seen = BTreeSet::new();
    let mut open = vec![address];
    while let Some(start) = open.pop() {
        let mut decoder = Decoder::with_ip(64, code_at(start), start, DecoderOptions::NONE);
        // A path that leaves what is known of the function.
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
                    found.returns.insert(instruction.ip());
                    break;
                }
                FlowControl::Exception if instruction.code() == Code::Ud2 => break,
                // A jump through a table or to another function: where it ends is not known.
                _ => return None,
            }
        }
    }
    Some(found)
}

#[cfg(test)]
#[path = "x86_64_ends_tests.rs"]
mod tests;

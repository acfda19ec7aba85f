//! Calls and jumps from the allocator's own code to hooked functions: they lead to the original, so that only the
//! outermost call counts, and whatever jumps where.

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};

use crate::displaced::is_branch;
use crate::error::Refusal;
use crate::patch::Patch;

/// A piece of executable memory and what the file has there.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// Its address in the target.
    pub address: u64,
    /// Its bytes in the file.
    pub bytes: &'a [u8],
}

impl<'a> Text<'a> {
    /// The bytes in a range of addresses; `None` if it is not all here.
    #[must_use]
    pub fn range(&self, start: u64, end: u64) -> Option<&'a [u8]> {
        let from = usize::try_from(start.checked_sub(self.address)?).ok()?;
        let to = usize::try_from(end.checked_sub(self.address)?).ok()?;
        self.bytes.get(from..to)
    }
}

/// Where an inner call leads.
pub(crate) enum Leads {
    /// To a function that is not hooked.
    Elsewhere,
    /// To the hooked function with this index, directly.
    Directly(usize),
    /// To it, through this address in the offset table.
    ThroughSlot(usize),
}

/// The patches that lead inner calls in `[start, end)` of `text` to originals. Functions that an unpatchable jump leads
/// to are in the second list.
pub(crate) fn inner_calls(
    text: &Text<'_>,
    [start, end]: [u64; 2],
    leads: &dyn Fn(&Instruction) -> Leads,
    original: &dyn Fn(usize) -> u64,
) -> (Vec<Patch>, Vec<(usize, Refusal)>) {
    let (mut patches, mut refused) = (Vec::new(), Vec::new());
    let Some(code) = text.range(start, end) else { return (patches, refused) };
    let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        let function = match leads(&instruction) {
            Leads::Elsewhere => continue,
            Leads::Directly(function) | Leads::ThroughSlot(function) => function,
        };
        match redirected(&instruction, original(function)) {
            Some(bytes) => {
                let before = text.range(instruction.ip(), instruction.next_ip()).unwrap_or_default().to_vec();
                patches.push(Patch { address: instruction.ip(), before, after: bytes });
            }
            None => refused.push((function, Refusal::ShortInnerJump)),
        }
    }
    (patches, refused)
}

/// The call or jump with another target, in as many bytes.
fn redirected(instruction: &Instruction, target: u64) -> Option<Vec<u8>> {
    let opcode: &[u8] = match (instruction.flow_control(), instruction.len()) {
        (FlowControl::Call, 5) => &[0xe8],
        (FlowControl::UnconditionalBranch, 5) => &[0xe9],
        (FlowControl::ConditionalBranch, 6) => &[0x0f, 0x80 | condition(instruction)?],
        // call *slot(%rip), jmp *slot(%rip)
        (FlowControl::IndirectCall, 6) => &[0xe8],
        (FlowControl::IndirectBranch, 6) => &[0xe9],
        _ => return None,
    };
    let distance = target.wrapping_sub(instruction.ip() + opcode.len() as u64 + 4).cast_signed();
    let distance = i32::try_from(distance).ok()?;
    let mut bytes = opcode.to_vec();
    bytes.extend_from_slice(&distance.to_le_bytes());
    bytes.resize(instruction.len(), 0x90);
    Some(bytes)
}

/// The low four bits of a conditional jump's opcode.
fn condition(instruction: &Instruction) -> Option<u8> {
    // The library numbers conditions as the instruction set does, after "none".
    (instruction.is_jcc_near()).then(|| instruction.condition_code() as u8)?.checked_sub(1)
}

/// Whether anything in `text` that looks like a call or jump with a 32-bit distance leads into one of the `ranges`
/// (sorted, not overlapping), each after its first byte. It may be no instruction, and no harm is done then.
/// `None` stands for those jumps' absence; otherwise the index of the range.
pub(crate) fn jumped_into(text: &Text<'_>, ranges: &[[u64; 2]]) -> Vec<usize> {
    let mut found = Vec::new();
    let (Some([first, _]), Some([_, last])) = (ranges.first(), ranges.last()) else { return found };
    for byte in memchr::memchr3_iter(0xe8, 0xe9, 0x0f, text.bytes) {
        let at = if text.bytes[byte] == 0x0f { byte + 1 } else { byte };
        let Some((&opcode, distance)) = text.bytes.get(at..at + 5).and_then(<[u8]>::split_first) else { continue };
        // A conditional jump has a byte before its opcode.
        if at > byte && opcode & 0xf0 != 0x80 {
            continue;
        }
        let Ok(distance) = <[u8; 4]>::try_from(distance) else { continue };
        let from = text.address + at as u64;
        let target = (from + 5).wrapping_add_signed(i64::from(i32::from_le_bytes(distance)));
        // Most lead somewhere else altogether.
        if !(*first..*last).contains(&target) {
            continue;
        }
        let index = ranges.partition_point(|[start, _]| *start < target);
        let Some(index) = index.checked_sub(1) else { continue };
        let [start, end] = ranges[index];
        // What the displaced bytes themselves say is decided where they are decoded.
        if (start + 1..end).contains(&target) && !(start..end).contains(&from) && !found.contains(&index) {
            found.push(index);
        }
    }
    found
}

/// Whether code in `[start, end)` calls or jumps to one of these addresses, or through a slot at one.
#[must_use]
pub fn reaches(texts: &[Text<'_>], [start, end]: [u64; 2], is_wanted: &dyn Fn(u64) -> bool) -> bool {
    let Some(code) = texts.iter().find_map(|text| text.range(start, end)) else { return false };
    let decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
    let at = |address: u64| is_wanted(address).then_some(0);
    decoder.into_iter().any(|instruction| !matches!(leads(&instruction, &at, &at), Leads::Elsewhere))
}

/// Where `instruction` leads, given the addresses and the slots behind which hooked functions are.
pub(crate) fn leads(
    instruction: &Instruction,
    function_at: &dyn Fn(u64) -> Option<usize>,
    function_behind: &dyn Fn(u64) -> Option<usize>,
) -> Leads {
    if is_branch(instruction) {
        return function_at(instruction.near_branch_target()).map_or(Leads::Elsewhere, Leads::Directly);
    }
    let through_slot = matches!(instruction.flow_control(), FlowControl::IndirectCall | FlowControl::IndirectBranch)
        && instruction.is_ip_rel_memory_operand();
    if through_slot {
        return function_behind(instruction.ip_rel_memory_address()).map_or(Leads::Elsewhere, Leads::ThroughSlot);
    }
    Leads::Elsewhere
}

//! Redirects calls and jumps from the allocator's own code to hooked functions: they lead to the originals, so that
//! only the outermost call counts. Also finds which code jumps where.

use std::collections::BTreeSet;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};

use crate::displaced::{JUMP_BYTES, is_branch};
use crate::error::Refusal;

/// A piece of executable memory, and the file's content there.
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

/// Ranges of addresses as the fewest that cover the same: ascending, not overlapping.
#[must_use]
pub fn merged(mut ranges: Vec<[u64; 2]>) -> Vec<[u64; 2]> {
    ranges.sort_unstable();
    let mut merged: Vec<[u64; 2]> = Vec::new();
    for [start, end] in ranges {
        match merged.last_mut() {
            Some(last) if start <= last[1] => last[1] = last[1].max(end),
            _ => merged.push([start, end]),
        }
    }
    merged
}

/// Returns the patches that redirect inner calls in `[start, end)` of `text` to the originals. `leads` returns the
/// hooked function that an instruction leads to. The second list has the functions that a jump leads to which cannot be
/// patched.
pub(crate) fn inner_calls(
    text: &Text<'_>,
    [start, end]: [u64; 2],
    leads: &dyn Fn(&Instruction) -> Option<usize>,
    original: &dyn Fn(usize) -> u64,
) -> (Vec<Patch>, Vec<(usize, Refusal)>) {
    let (mut patches, mut refused) = (Vec::new(), Vec::new());
    let Some(code) = text.range(start, end) else { return (patches, refused) };
    let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        let Some(function) = leads(&instruction) else { continue };
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

/// The call or jump with another target, in the same number of bytes. A call stays one instruction, so the address at
/// which it returns is the same when the hooks have been removed meanwhile.
fn redirected(instruction: &Instruction, target: u64) -> Option<Vec<u8>> {
    let opcode: &[u8] = match (instruction.flow_control(), instruction.len()) {
        (FlowControl::Call, 5) => &[0xe8],
        (FlowControl::UnconditionalBranch, 5) => &[0xe9],
        (FlowControl::ConditionalBranch, 6) => &[0x0f, 0x80 | condition(instruction)?],
        // call *slot(%rip), with a prefix that does nothing, as linkers write it; jmp *slot(%rip), and a no-op.
        (FlowControl::IndirectCall, 6) => &[0x67, 0xe8],
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

/// Most bytes that a jump displaces: all instructions but the last together are shorter than the jump.
const MOST_DISPLACED: u64 = JUMP_BYTES as u64 - 1 + 15;

/// Bytes that look like calls and jumps with a 32-bit distance into functions' first instructions, behind their first
/// byte. They may not be instructions at all; that does no harm. Finding them takes a scan of all code of a file, so
/// the result may be kept for the next process that maps the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Jumps {
    into: BTreeSet<Jump>,
    /// Whether the file may have restartable sequences.
    restarts: bool,
}

/// The value in front of the code to which the kernel sends a thread that was interrupted in a restartable sequence
/// (`RSEQ_SIG` of Linux).
const RESTART_SIGNATURE: [u8; 4] = 0x5305_3053_u32.to_le_bytes();
/// `mov $…,%r10d`: a C library that passes the signature to the kernel, as a system call's fourth argument.
const TELLS_KERNEL: [u8; 2] = [0x41, 0xba];

fn has_restartable_sequences(code: &[u8]) -> bool {
    memchr::memmem::find_iter(code, &RESTART_SIGNATURE).any(|at| !code[..at].ends_with(&TELLS_KERNEL))
}

/// A jump into a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Jump {
    /// Address of the function.
    function: u64,
    /// Distance of its target from the function's beginning, bytes.
    into: u64,
    /// Distance of its opcode from the function's beginning, bytes; `None` if it is not among the function's first
    /// instructions.
    from: Option<u64>,
}

impl Jumps {
    /// Finds those in `texts` that lead into functions which begin at these addresses.
    #[must_use]
    pub fn new(texts: &[Text<'_>], mut functions: Vec<u64>) -> Self {
        functions.sort_unstable();
        let (Some(first), Some(last)) = (functions.first(), functions.last()) else { return Self::default() };
        let all = *first..last.saturating_add(MOST_DISPLACED);
        let mut jumps = BTreeSet::new();
        for text in texts {
            for (from, to) in near_branches(text) {
                // Most lead somewhere else.
                if !all.contains(&to) {
                    continue;
                }
                let before = &functions[..functions.partition_point(|function| *function < to)];
                for function in before.iter().rev().take_while(|function| to - **function < MOST_DISPLACED) {
                    let from = from.checked_sub(*function).filter(|from| *from < MOST_DISPLACED);
                    jumps.insert(Jump { function: *function, into: to - function, from });
                }
            }
        }
        let restarts = texts.iter().any(|text| has_restartable_sequences(text.bytes));
        Self { into: jumps, restarts }
    }

    /// Whether code of the file must only run at its own addresses, because the kernel knows restartable sequences by
    /// their addresses.
    pub(crate) const fn restarts(&self) -> bool {
        self.restarts
    }

    /// The same for a process where all addresses are larger by `bias`, with wrap-around.
    #[must_use]
    pub fn moved(&self, bias: u64) -> Self {
        let moved = |jump: &Jump| Jump { function: jump.function.wrapping_add(bias), ..*jump };
        Self { into: self.into.iter().map(moved).collect(), restarts: self.restarts }
    }

    /// Which of the `ranges` are entered behind their first byte, by index.
    pub(crate) fn entered(&self, ranges: &[[u64; 2]]) -> BTreeSet<usize> {
        let entered = |jump: &Jump| {
            let index = ranges.iter().position(|[start, _]| *start == jump.function)?;
            let [start, end] = ranges[index];
            let length = end - start;
            // Jumps within the displaced bytes are handled where these are decoded.
            let is_entered = jump.into < length && jump.from.is_none_or(|from| from >= length);
            is_entered.then_some(index)
        };
        self.into.iter().filter_map(entered).collect()
    }
}

/// Finds what looks like calls and jumps with a 32-bit distance: the address of the opcode, and the target.
fn near_branches(text: &Text<'_>) -> impl Iterator<Item = (u64, u64)> {
    memchr::memchr3_iter(0xe8, 0xe9, 0x0f, text.bytes).filter_map(|byte| {
        // A conditional jump has a byte before its opcode.
        let at = if text.bytes[byte] == 0x0f { byte + 1 } else { byte };
        let (&opcode, distance) = text.bytes.get(at..at + 5)?.split_first()?;
        if at > byte && opcode & 0xf0 != 0x80 {
            return None;
        }
        let distance = i32::from_le_bytes(<[u8; 4]>::try_from(distance).ok()?);
        // A file may claim any address for its code.
        let from = text.address.wrapping_add(at as u64);
        Some((from, from.wrapping_add(5).wrapping_add_signed(i64::from(distance))))
    })
}

/// Whether code in `[start, end)` calls or jumps to one of these addresses, or through a slot at one.
#[must_use]
pub fn reaches(texts: &[Text<'_>], [start, end]: [u64; 2], is_wanted: &dyn Fn(u64) -> bool) -> bool {
    let Some(code) = texts.iter().find_map(|text| text.range(start, end)) else { return false };
    let decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
    let at = |address: u64| is_wanted(address).then_some(0);
    decoder.into_iter().any(|instruction| leads(&instruction, &at, &at).is_some())
}

/// The hooked function that `instruction` leads to, given the addresses of hooked functions and the slots that hold
/// them.
pub(crate) fn leads(
    instruction: &Instruction,
    function_at: &dyn Fn(u64) -> Option<usize>,
    function_behind: &dyn Fn(u64) -> Option<usize>,
) -> Option<usize> {
    if is_branch(instruction) {
        return function_at(instruction.near_branch_target());
    }
    let through_slot = matches!(instruction.flow_control(), FlowControl::IndirectCall | FlowControl::IndirectBranch)
        && instruction.is_ip_rel_memory_operand();
    if through_slot { function_behind(instruction.ip_rel_memory_address()) } else { None }
}

/// Bytes to be replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    /// Where they are.
    pub address: u64,
    /// The bytes of the file.
    pub before: Vec<u8>,
    /// The new bytes, of the same length.
    pub after: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_may_be_said_to_be_at_the_end_of_all_addresses() {
        let code = [0xe8, 0xf8, 0xff, 0xff, 0xff, 0x0f, 0x84, 1, 0, 0, 0];
        let texts = [Text { address: u64::MAX - 2, bytes: &code }];
        let jumps = Jumps::new(&texts, vec![u64::MAX - 10, u64::MAX - 6, u64::MAX]);
        assert_eq!(jumps.entered(&[[u64::MAX - 10, u64::MAX - 4]]).into_iter().collect::<Vec<_>>(), [0]);
    }

    /// A call at `from` that leads to `to`.
    fn call(code: &mut [u8], from: u64, to: u64) {
        code[from as usize] = 0xe8;
        code[from as usize + 1..from as usize + 5].copy_from_slice(&((to as i32 - from as i32 - 5).to_le_bytes()));
    }

    #[test]
    fn jumps_are_those_into_first_instructions_wherever_the_code_is() {
        const FUNCTIONS: [u64; 3] = [0x100, 0x10a, 0x200];
        let entered = |calls: &[(u64, u64)], ranges: &[[u64; 2]]| {
            let mut code = vec![0x90; 0x300];
            calls.iter().for_each(|(from, to)| call(&mut code, *from, *to));
            let jumps = Jumps::new(&[Text { address: 0, bytes: &code }], FUNCTIONS.to_vec());
            // Below 0 as well.
            for bias in [0, 0x5555_0000_0000, 0_u64.wrapping_sub(0x80)] {
                let moved: Vec<_> = ranges.iter().map(|range| range.map(|at| at.wrapping_add(bias))).collect();
                assert_eq!(jumps.moved(bias).entered(&moved), jumps.entered(ranges));
            }
            jumps.entered(ranges).into_iter().collect::<Vec<_>>()
        };
        let ranges = [[0x200, 0x206], [0x100, 0x107]];
        assert_eq!(entered(&[(0x10, 0x100), (0x20, 0x206), (0x30, 0x107), (0x40, 0x201)], &ranges), [0]);
        assert_eq!(entered(&[(0x10, 0x106), (0x20, 0x101), (0x30, 0x205)], &ranges), [0, 1]);
        // A loop over the first instructions themselves, and one from behind them.
        assert_eq!(entered(&[(0x101, 0x103)], &ranges), []);
        assert_eq!(entered(&[(0x108, 0x103)], &ranges), [1]);
        // Behind the beginning of the next function, which is not hooked.
        assert_eq!(entered(&[(0x10, 0x10c)], &[[0x100, 0x110]]), [0]);
        assert_eq!(entered(&[(0x10, 0x10c)], &[[0x100, 0x10a], [0x10a, 0x110]]), [1]);
        assert_eq!(
            entered(&[(0x10, 0x10a)], &[[0x100, 0x110]]),
            [0],
            "the function may be unknown to whoever displaces code"
        );
    }
}

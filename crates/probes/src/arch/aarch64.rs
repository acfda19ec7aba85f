//! AArch64: the AAPCS64 calling convention, and the rules of the kernel's `arch/arm64/kernel/probes/decode-insn.c`.
//!
//! Probes are at a function's entry, or right after its landing pad if the instruction there is simulated: `x30` still
//! holds the return address. Tested on hand-assembled words, and by recordings on emulated machines.

use crate::allocators::Shape;
use crate::flow::{Flow, Target};
use crate::placement::{KernelRules, Placement};
use heapbpf_audit::ProbeKind;

/// What an instruction word does, as far as it matters for probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Nop,
    /// A landing pad, with which a protected function's code begins: `bti` or `paciasp`.
    LandingPad,
    /// `adr` or `adrp` to this register.
    Address(u8),
    /// `b`, `b.cond`, `cbz`, `cbnz`, `tbz` or `tbnz`, with the distance in bytes.
    Branch(i64),
    /// `bl`, with the distance in bytes.
    Call(i64),
    /// `br`, `blr` or `ret`.
    Register,
    /// A literal load. The kernel's simulation read user memory as its own; Linux 6.12 removed it, and refuses such
    /// loads.
    LiteralLoad,
    /// An exclusive load or store, which cannot succeed when single-stepped; an exception; most system instructions.
    Refused,
    Other,
}

fn signed(word: u32, low: u32, bits: u32) -> i64 {
    let field = (word >> low) & ((1 << bits) - 1);
    let shift = 64 - bits;
    (i64::from(field) << shift) >> shift
}

fn classify(word: u32) -> Word {
    match word {
        0xd503_201f => Word::Nop,
        0xd503_233f | 0xd503_241f | 0xd503_245f | 0xd503_249f | 0xd503_24df => Word::LandingPad,
        w if w & 0x1f00_0000 == 0x1000_0000 => Word::Address((w & 31) as u8),
        w if w & 0xfc00_0000 == 0x1400_0000 => Word::Branch(signed(w, 0, 26) * 4),
        w if w & 0xfc00_0000 == 0x9400_0000 => Word::Call(signed(w, 0, 26) * 4),
        w if w & 0xff00_0010 == 0x5400_0000 => Word::Branch(signed(w, 5, 19) * 4),
        w if w & 0x7e00_0000 == 0x3400_0000 => Word::Branch(signed(w, 5, 19) * 4),
        w if w & 0x7e00_0000 == 0x3600_0000 => Word::Branch(signed(w, 5, 14) * 4),
        w if w & 0xff9f_fc1f == 0xd61f_0000 => Word::Register,
        w if w & 0x3b00_0000 == 0x1800_0000 => Word::LiteralLoad,
        w if w & 0x3f00_0000 == 0x0800_0000 => Word::Refused,
        w if w & 0xff00_0000 == 0xd400_0000 || w & 0xffc0_0000 == 0xd500_0000 => Word::Refused,
        _ => Word::Other,
    }
}

fn treatment(rules: &KernelRules, word: Word) -> Option<ProbeKind> {
    match word {
        Word::Nop if rules.emulates_nop => Some(ProbeKind::Emulated),
        Word::Address(_) | Word::Branch(_) | Word::Call(_) | Word::Register => Some(ProbeKind::Emulated),
        Word::LiteralLoad | Word::Refused => None,
        Word::Nop | Word::LandingPad | Word::Other => Some(ProbeKind::Stepped),
    }
}

/// See [`super::place`].
pub(super) fn place(
    rules: &KernelRules,
    address: u64,
    code: &[u8],
    shape: Shape,
    entered: &dyn Fn(u64) -> bool,
) -> Option<Placement> {
    let mut best: Option<Placement> = None;
    for (word, offset) in code.as_chunks::<4>().0.iter().zip((0_u64..).step_by(4)).take(16) {
        let word = classify(u32::from_le_bytes(*word));
        if offset > 0 && entered(address.wrapping_add(offset)) {
            break;
        }
        if let Some(kind) = treatment(rules, word)
            && best.as_ref().is_none_or(|b| kind < b.kind)
        {
            let reason = match kind {
                ProbeKind::Emulated => "is simulated",
                _ => "is single-stepped",
            };
            best = Some(Placement {
                offset,
                kind,
                arguments: shape.arguments,
                stack_pointer_moved: 0,
                reason: format!("the instruction at +{offset:#x} {reason}"),
            });
        }
        // Only instructions that leave the arguments and x30 alone are passed. `paciasp` signs x30, so a probe after it
        // would read a signed return address.
        match word {
            Word::Nop => {}
            Word::LandingPad if code.get(offset as usize..offset as usize + 4) != Some(&[0x3f, 0x23, 0x03, 0xd5]) => {}
            Word::Address(register) if (8..=17).contains(&register) => {}
            _ => break,
        }
    }
    best
}

/// See [`super::flows`].
pub(super) fn flows(address: u64, code: &[u8], mut found: impl FnMut(Flow)) {
    let (words, _) = code.as_chunks::<4>();
    for (index, (word, offset)) in words.iter().zip((0_u64..).step_by(4)).enumerate() {
        let from = address.wrapping_add(offset);
        let word = u32::from_le_bytes(*word);
        let (is_call, target) = match classify(word) {
            Word::Branch(distance) => (false, Target::Address(from.wrapping_add_signed(distance))),
            Word::Call(distance) => (true, Target::Address(from.wrapping_add_signed(distance))),
            Word::Address(16) => match words.get(index + 1).and_then(|next| linkage_slot(from, word, *next)) {
                Some(slot) => (false, Target::Slot(slot)),
                None => continue,
            },
            _ => continue,
        };
        found(Flow { from, is_call, target });
    }
}

/// The slot through which a stub of the procedure linkage table jumps: `adrp x16, page; ldr x17, [x16, #offset]; …; br
/// x17`.
fn linkage_slot(from: u64, adrp: u32, next: [u8; 4]) -> Option<u64> {
    let ldr = u32::from_le_bytes(next);
    if adrp & 0x9f00_001f != 0x9000_0010 || ldr & 0xffc0_03ff != 0xf940_0211 {
        return None;
    }
    let pages = (signed(adrp, 5, 19) << 2) | i64::from(adrp >> 29 & 3);
    let page = (from & !0xfff).wrapping_add_signed(pages << 12);
    page.checked_add(u64::from(ldr >> 10 & 0xfff) * 8)
}

/// See [`super::forwards_to`].
pub(super) fn forwards_to(address: u64, code: &[u8]) -> Option<Target> {
    let words = code.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    let (at, word) = (0..).zip(words).find(|(_, word)| classify(*word) != Word::LandingPad)?;
    // `b`, not one of the conditional branches.
    let unconditional = word & 0xfc00_0000 == 0x1400_0000;
    match classify(word) {
        Word::Branch(distance) if unconditional && at < 2 => {
            Some(Target::Address(address.wrapping_add(at * 4).wrapping_add_signed(distance)))
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "aarch64_tests.rs"]
mod tests;

//! Rules and decoding on hand-assembled AArch64 words.

use heapbpf_audit::ProbeKind;

use super::*;
use crate::placement::Machine;

const ALLOCATES: Shape = Shape::allocates(0);
const NOP: u32 = 0xd503_201f;
const BTI_C: u32 = 0xd503_245f;
const PACIASP: u32 = 0xd503_233f;
/// `stp x29, x30, [sp, #-16]!`
const STP: u32 = 0xa9bf_7bfd;
const RET: u32 = 0xd65f_03c0;

fn code(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn placed(release: (u32, u32), words: &[u32]) -> Option<(u64, ProbeKind)> {
    let rules = KernelRules::of(Machine::Aarch64, release);
    place(&rules, 0x1000, &code(words), ALLOCATES, &|_| false).map(|p| (p.offset, p.kind))
}

#[test]
fn words_are_told_apart() {
    for (word, expected) in [
        (NOP, Word::Nop),
        (BTI_C, Word::LandingPad),
        (PACIASP, Word::LandingPad),
        (0x1400_0002, Word::Branch(8)),   // b +8
        (0x17ff_ffff, Word::Branch(-4)),  // b -4
        (0x9400_0001, Word::Call(4)),     // bl +4
        (0x5400_0040, Word::Branch(8)),   // b.eq +8
        (0xb400_0040, Word::Branch(8)),   // cbz x0, +8
        (0x35ff_ffe0, Word::Branch(-4)),  // cbnz w0, -4
        (0x3600_0040, Word::Branch(8)),   // tbz w0, #0, +8
        (0xb7ff_ffe0, Word::Branch(-4)),  // tbnz x0, #63, -4
        (0x1000_0003, Word::Address(3)),  // adr x3, .
        (0x9000_0010, Word::Address(16)), // adrp x16, .
        (RET, Word::Register),
        (0xd61f_0220, Word::Register),    // br x17
        (0xd63f_0000, Word::Register),    // blr x0
        (0x5800_0040, Word::LiteralLoad), // ldr x0, +8
        (0x9800_0040, Word::LiteralLoad), // ldrsw x0, +8
        (0xc85f_7c00, Word::Refused),     // ldxr x0, [x0]
        (0xd400_0001, Word::Refused),     // svc #0
        (0xd53b_d040, Word::Refused),     // mrs x0, tpidr_el0
        (STP, Word::Other),
        (0xaa00_03e1, Word::Other), // mov x1, x0
        (0xf940_0000, Word::Other), // ldr x0, [x0]
    ] {
        assert_eq!(classify(word), expected, "{word:#x}");
    }
}

#[test]
fn the_entry_unless_a_simulated_instruction_follows_a_landing_pad() {
    assert_eq!(placed((6, 12), &[STP, RET]), Some((0, ProbeKind::Stepped)));
    assert_eq!(placed((6, 12), &[0xb400_0040, RET]), Some((0, ProbeKind::Emulated)));
    assert_eq!(placed((6, 12), &[BTI_C, 0xb400_0040, RET]), Some((4, ProbeKind::Emulated)));
    assert_eq!(placed((6, 12), &[BTI_C, STP, 0xb400_0040]), Some((0, ProbeKind::Stepped)));
    // A signed return address cannot be used as a return address.
    assert_eq!(placed((6, 12), &[PACIASP, 0xb400_0040, RET]), Some((0, ProbeKind::Stepped)));
    assert_eq!(placed((6, 12), &[NOP, STP]), Some((0, ProbeKind::Stepped)));
    assert_eq!(placed((6, 13), &[NOP, STP]), Some((0, ProbeKind::Emulated)));
    // adrp into a scratch register, then a branch; into an argument.
    assert_eq!(placed((6, 12), &[0x9000_0010, RET]), Some((0, ProbeKind::Emulated)));
    assert_eq!(placed((6, 12), &[0x5800_0040, RET]), None);
    assert_eq!(placed((6, 12), &[]), None);
}

#[test]
fn stubs_of_the_linkage_table_lead_to_their_slot() {
    // adrp x16, +2 pages; ldr x17, [x16, #0x18]; add x16, x16, #0x18; br x17
    let mut found = Vec::new();
    flows(0x4010, &code(&[0xd000_0010, 0xf940_0e11, 0x9100_6210, 0xd61f_0220]), |flow| found.push(flow));
    assert_eq!(found, [Flow { from: 0x4010, is_call: false, target: Target::Slot(0x6018) }]);
    assert_eq!(forwards_to(0x100, &code(&[BTI_C, 0x1400_0002])), Some(Target::Address(0x10c)));
    assert_eq!(forwards_to(0x100, &code(&[0xb400_0040])), None);
}

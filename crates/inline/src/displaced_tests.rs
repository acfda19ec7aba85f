//! Displaced instructions, assembled by hand.

use super::*;

const AT: u64 = 0x40_0000;

fn read(code: &[u8]) -> Result<Displaced, Refusal> {
    Displaced::read(AT, code)
}

fn codes(instructions: &[Instruction]) -> Vec<Code> {
    instructions.iter().map(Instruction::code).collect()
}

#[test]
fn as_many_whole_instructions_as_the_jump_overwrites() {
    // push %r12; push %rbp; push %rbx; mov %rdi,%rbx; ret
    let displaced = read(&[0x41, 0x54, 0x55, 0x53, 0x48, 0x89, 0xfb, 0xc3]).unwrap();
    assert_eq!((displaced.length, displaced.instructions.len(), displaced.falls_through), (7, 4, true));
    let moved = displaced.elsewhere(|target| target).unwrap();
    assert_eq!((moved.len(), moved[4].code(), moved[4].near_branch_target()), (5, Code::Jmp_rel32_64, AT + 7));
}

#[test]
fn a_short_branch_gets_a_long_distance() {
    // test %rdi,%rdi; je +0x20; nop
    let displaced = read(&[0x48, 0x85, 0xff, 0x74, 0x20, 0x90]).unwrap();
    let moved = displaced.elsewhere(|target| target).unwrap();
    assert_eq!(codes(&moved), [Code::Test_rm64_r64, Code::Je_rel32_64, Code::Jmp_rel32_64]);
    assert_eq!(moved[1].near_branch_target(), AT + 5 + 0x20);
    // jmp to another function, which is hooked: its original
    let moved = read(&[0xe9, 0xfb, 0x0f, 0, 0]).unwrap().elsewhere(|target| target + 7).unwrap();
    assert_eq!((codes(&moved), moved[0].near_branch_target()), (vec![Code::Jmp_rel32_64], AT + 0x1007));
}

#[test]
fn a_call_returns_to_where_it_was() {
    // sub $8,%rsp; call +0x100; pop %rax; ret
    let displaced = read(&[0x48, 0x83, 0xec, 8, 0xe8, 0, 1, 0, 0, 0x58, 0xc3]).unwrap();
    assert_eq!((displaced.length, displaced.falls_through), (9, false));
    let moved = displaced.elsewhere(|target| target).unwrap();
    assert_eq!(
        codes(&moved),
        [Code::Sub_rm64_imm8, Code::Lea_r64_m, Code::Mov_rm32_imm32, Code::Mov_rm32_imm32, Code::Jmp_rel32_64]
    );
    assert_eq!((moved[2].immediate32(), moved[3].immediate32()), ((AT + 9) as u32, 0));
    assert_eq!(moved[4].near_branch_target(), AT + 9 + 0x100);
    // call *0x10(%rip); through a slot
    let moved = read(&[0xff, 0x15, 0x10, 0, 0, 0]).unwrap().elsewhere(|target| target).unwrap();
    assert_eq!((moved[3].code(), moved[3].ip_rel_memory_address()), (Code::Jmp_rm64, AT + 0x16));
    // call *8(%rsp)
    let call = read(&[0xff, 0x54, 0x24, 8, 0x90]).unwrap_err();
    assert_eq!(call, Refusal::Call, "it is not the last one");
    assert_eq!(read(&[0xff, 0x94, 0x24, 8, 0, 0, 0]).unwrap().elsewhere(|t| t).unwrap_err(), Refusal::Call);
}

#[test]
fn what_cannot_be_moved_is_refused() {
    for (code, refusal) in [
        (&[0xc3, 0xc3, 0xc3, 0xc3, 0xc3][..], Refusal::TooShort),
        (&[0x31, 0xc0], Refusal::TooShort),
        (&[], Refusal::TooShort),
        // Short jump.
        (&[0xeb, 0x10, 0x90, 0x90, 0x90], Refusal::TooShort),
        // An opcode that is none in 64-bit mode.
        (&[0x06, 0x90, 0x90, 0x90, 0x90], Refusal::UnknownInstruction),
        // jrcxz, loop
        (&[0xe3, 0x10, 0x90, 0x90, 0x90], Refusal::Branch),
        (&[0xe2, 0x10, 0x90, 0x90, 0x90], Refusal::Branch),
        // hlt, int3
        (&[0xf4, 0x90, 0x90, 0x90, 0x90], Refusal::Immovable),
        (&[0xcc, 0x90, 0x90, 0x90, 0x90], Refusal::Immovable),
        // data16 jmp, data16 call, data16 jne: another instruction on AMD's processors.
        (&[0x66, 0xe9, 0x10, 0, 0, 0], Refusal::Immovable),
        (&[0x66, 0xe8, 0x10, 0, 0, 0], Refusal::Immovable),
        (&[0x66, 0x0f, 0x85, 0x10, 0, 0, 0], Refusal::Immovable),
        // 0: push %rbx; 1: push %rbp; 2: mov %rdi,%rbx; 5: dec %edi; 7: jne 1
        (&[0x53, 0x55, 0x48, 0x89, 0xfb, 0xff, 0xcf, 0x75, 0xf8], Refusal::JumpedInto),
    ] {
        assert_eq!(read(code).unwrap_err(), refusal, "{code:x?}");
    }
    // A jump to the entry itself is no jump into it.
    assert!(read(&[0x53, 0x55, 0x48, 0x89, 0xfb, 0xff, 0xcf, 0x75, 0xf7]).is_ok());
}

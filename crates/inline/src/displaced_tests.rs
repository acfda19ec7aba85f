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
    let moved = displaced.elsewhere(0, |target| target).unwrap();
    assert_eq!((moved.len(), moved[4].code(), moved[4].near_branch_target()), (5, Code::Jmp_rel32_64, AT + 7));
}

#[test]
fn a_function_that_is_told_something_in_other_registers_is_refused() {
    // sub $0xd8,%rsp; mov %rdx,0x30(%rsp); test %al,%al; je
    let variadic = [0x48, 0x81, 0xec, 0xd8, 0, 0, 0, 0x48, 0x89, 0x54, 0x24, 0x30, 0x84, 0xc0, 0x74, 0x20, 0xc3];
    assert_eq!(read(&variadic).unwrap_err(), Refusal::HiddenArgument);
    // push %rbx; mov (%r10),%rax; ret
    assert_eq!(read(&[0x53, 0x49, 0x8b, 0x02, 0x90, 0x90, 0xc3]).unwrap_err(), Refusal::HiddenArgument);
    // push %rax; nopl (%rax); mov %rdi,%rax; test %rax,%rax; ret
    let aligned = [0x50, 0x0f, 0x1f, 0x00, 0x48, 0x89, 0xf8, 0x48, 0x85, 0xc0, 0xc3];
    assert!(read(&aligned).is_ok());
    // xor %eax,%eax; jmp: the code behind the jump does not count
    assert!(read(&[0x31, 0xc0, 0xe9, 0, 1, 0, 0, 0x84, 0xc0, 0xc3]).is_ok());
}

#[test]
fn a_short_branch_gets_a_long_distance() {
    // test %rdi,%rdi; je +0x20; nop
    let displaced = read(&[0x48, 0x85, 0xff, 0x74, 0x20, 0x90]).unwrap();
    let moved = displaced.elsewhere(0, |target| target).unwrap();
    assert_eq!(codes(&moved), [Code::Test_rm64_r64, Code::Je_rel32_64, Code::Jmp_rel32_64]);
    assert_eq!(moved[1].near_branch_target(), AT + 5 + 0x20);
    // jmp to another function, which is hooked: it leads to the original
    let moved = read(&[0xe9, 0xfb, 0x0f, 0, 0]).unwrap().elsewhere(0, |target| target + 7).unwrap();
    assert_eq!((codes(&moved), moved[0].near_branch_target()), (vec![Code::Jmp_rel32_64], AT + 0x1007));
}

#[test]
fn a_call_returns_to_where_it_was() {
    // sub $8,%rsp; call +0x100; pop %rax; ret
    let displaced = read(&[0x48, 0x83, 0xec, 8, 0xe8, 0, 1, 0, 0, 0x58, 0xc3]).unwrap();
    assert_eq!((displaced.length, displaced.falls_through), (9, false));
    let moved = displaced.elsewhere(0, |target| target).unwrap();
    assert_eq!(
        codes(&moved),
        [Code::Sub_rm64_imm8, Code::Lea_r64_m, Code::Mov_rm32_imm32, Code::Mov_rm32_imm32, Code::Jmp_rel32_64]
    );
    assert_eq!((moved[2].immediate32(), moved[3].immediate32()), ((AT + 9) as u32, 0));
    assert_eq!(moved[4].near_branch_target(), AT + 9 + 0x100);
    // call *0x10(%rip); through a slot
    let moved = read(&[0xff, 0x15, 0x10, 0, 0, 0]).unwrap().elsewhere(0, |target| target).unwrap();
    assert_eq!((moved[3].code(), moved[3].ip_rel_memory_address()), (Code::Jmp_rm64, AT + 0x16));
    // call *8(%rsp)
    let call = read(&[0xff, 0x54, 0x24, 8, 0x90]).unwrap_err();
    assert_eq!(call, Refusal::Call, "it is not the last one");
    assert_eq!(read(&[0xff, 0x94, 0x24, 8, 0, 0, 0]).unwrap().elsewhere(0, |t| t).unwrap_err(), Refusal::Call);
}

#[test]
fn what_cannot_be_moved_is_refused() {
    for (code, refusal) in [
        (&[0xc3, 0xc3, 0xc3, 0xc3, 0xc3][..], Refusal::TooShort),
        (&[0x31, 0xc0], Refusal::TooShort),
        (&[], Refusal::TooShort),
        // Short jump.
        (&[0xeb, 0x10, 0x90, 0x90, 0x90], Refusal::TooShort),
        // An opcode that is invalid in 64-bit mode.
        (&[0x06, 0x90, 0x90, 0x90, 0x90], Refusal::UnknownInstruction),
        // jrcxz, loop
        (&[0xe3, 0x10, 0x90, 0x90, 0x90], Refusal::Branch),
        (&[0xe2, 0x10, 0x90, 0x90, 0x90], Refusal::Branch),
        // hlt, int3
        (&[0xf4, 0x90, 0x90, 0x90, 0x90], Refusal::Immovable),
        (&[0xcc, 0x90, 0x90, 0x90, 0x90], Refusal::Immovable),
        // data16 jmp, data16 call, data16 jne: decoded differently by AMD processors.
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

/// `mov %rdi,%rax; mov %rdi,%rcx`, then `rest`.
fn following(rest: &[u8]) -> Displaced {
    read(&[&[0x48, 0x89, 0xf8, 0x48, 0x89, 0xf9], rest].concat()).unwrap()
}

#[test]
fn a_fast_path_is_copied_up_to_its_end() {
    // test %rax,%rax; je +16; mov (%rax),%rdx; ret; int3
    let displaced = following(&[0x48, 0x85, 0xc0, 0x74, 0x10, 0x48, 0x8b, 0x10, 0xc3, 0xcc]);
    assert_eq!((displaced.length, displaced.following.len()), (6, 4));
    assert_eq!(displaced.worth_copying(100), 4);
    let moved = displaced.elsewhere(4, |target| target + 0x1000).unwrap();
    let codes: Vec<Code> = moved.iter().map(Instruction::code).collect();
    assert_eq!(codes[2..], [Code::Test_rm64_r64, Code::Je_rel32_64, Code::Mov_r64_rm64, Code::Retnq]);
    assert_eq!(moved[3].near_branch_target(), AT + 11 + 16 + 0x1000);
    // A jump back, because the copy ends earlier.
    let moved = displaced.elsewhere(2, |target| target).unwrap();
    assert_eq!((moved.len(), moved[4].code(), moved[4].near_branch_target()), (5, Code::Jmp_rel32_64, AT + 11));
}

#[test]
fn a_copy_has_only_what_there_is_space_for_and_what_saves_a_jump() {
    // test, je, mov, ret: 3 + 6 + 3 + 1 bytes elsewhere, and no jump back.
    let displaced = following(&[0x48, 0x85, 0xc0, 0x74, 0x10, 0x48, 0x8b, 0x10, 0xc3]);
    let worth: Vec<usize> = [0, 7, 8, 9, 12, 13].map(|free| displaced.worth_copying(free)).to_vec();
    assert_eq!(worth, [0, 0, 4, 4, 4, 4]);
    // mov (%rax),%rdx alone: a jump back follows either way.
    assert_eq!(following(&[0x48, 0x8b, 0x10, 0xcc]).worth_copying(100), 0);
    // test, je, mov: up to the branch.
    assert_eq!(following(&[0x48, 0x85, 0xc0, 0x74, 0x10, 0x48, 0x8b, 0x10, 0xcc]).worth_copying(100), 2);
}

#[test]
fn a_copy_neither_calls_nor_moves_the_stack_anywhere_nor_waits_for_the_kernel() {
    for (rest, why) in [
        (&[0xe8, 0, 0, 0, 0][..], "call"),
        (&[0xff, 0xd0], "call *%rax"),
        (&[0xff, 0xe0], "jmp *%rax"),
        (&[0x48, 0x89, 0xec], "mov %rbp,%rsp"),
        (&[0x48, 0x83, 0xe4, 0xe0], "and $-32,%rsp"),
        (&[0x5c], "pop %rsp"),
        (&[0xc9], "leave"),
        (&[0x0f, 0x05], "syscall"),
        (&[0xcc], "int3"),
        (&[0xe3, 0], "jrcxz"),
        (&[0x66, 0xe9, 0, 0], "a jump that processors differ about"),
    ] {
        assert_eq!(following(rest).following, [], "{why}");
    }
    // push %rbp; sub $8,%rsp; mov 8(%rsp),%rax; add $8,%rsp; pop %rbp
    let frame = [0x55, 0x48, 0x83, 0xec, 8, 0x48, 0x8b, 0x44, 0x24, 8, 0x48, 0x83, 0xc4, 8, 0x5d, 0xcc];
    assert_eq!(following(&frame).following.len(), 5);
    // and $-32,%rsp; nop; test %rdi,%rdi; ret
    assert_eq!(read(&[0x48, 0x83, 0xe4, 0xe0, 0x90, 0x48, 0x85, 0xff, 0xc3]).unwrap().following, []);
}

/// Other tools may have changed further pages.
#[test]
fn a_copy_ends_with_its_page() {
    let code = [&[0x48, 0x89, 0xf8, 0x48, 0x89, 0xf9][..], &[0x90; 20], &[0xc3]].concat();
    let at = AT.next_multiple_of(PAGE_BYTES) + PAGE_BYTES;
    assert_eq!(Displaced::read(at - 16, &code).unwrap().following.len(), 10);
    assert_eq!(Displaced::read(at - 27, &code).unwrap().following.len(), 21);
    assert_eq!(Displaced::read(at - 6, &code).unwrap().following.len(), 0);
    assert_eq!(Displaced::read(at - 5, &code).unwrap().following.len(), 21);
}

//! Placement on hand-assembled x86-64 prologues.

use heapbpf_audit::ProbeKind;

use super::*;
use crate::placement::{Machine, NoOpLengths};

const ALLOCATES: Shape = Shape::allocates(0);
const FREES: Shape = Shape::frees(0);
/// `reallocarray(old, count, size)`.
const ARRAY: Shape = Shape::allocates(2).times(1).old(0);
const NEW: (u32, u32) = (6, 18);
const OLD: (u32, u32) = (6, 12);

fn placed_at(address: u64, release: (u32, u32), shape: Shape, code: &[u8], entered: &[u64]) -> Option<Placement> {
    let optimized = if release == NEW { vec![5] } else { Vec::new() };
    let optimized_no_ops = optimized.into_iter().collect();
    let rules = KernelRules { optimized_no_ops, ..KernelRules::of(Machine::X86_64, release) };
    place(&rules, address, code, shape, &|ip| entered.contains(&(ip - address)), &|_| false)
}

fn placed(shape: Shape, code: &[u8]) -> Option<(u64, ProbeKind)> {
    placed_at(0x1000, OLD, shape, code, &[]).map(|p| (p.offset, p.kind))
}

#[test]
fn a_push_at_the_entry() {
    assert_eq!(placed(ALLOCATES, b"\x41\x54\x55\xc3"), Some((0, ProbeKind::Emulated)));
    assert_eq!(placed(ALLOCATES, b"\x55\xc3"), Some((0, ProbeKind::Emulated)));
    // endbr64; push %rbp: a landing pad stays as it is.
    assert_eq!(placed(ALLOCATES, b"\xf3\x0f\x1e\xfa\x55\xc3"), Some((4, ProbeKind::Emulated)));
    // The kernel does not emulate `rex.w push`, `pushw` and `push $1`.
    assert_eq!(placed(ALLOCATES, b"\x48\x50\xc3"), Some((0, ProbeKind::Stepped)));
    assert_eq!(placed(ALLOCATES, b"\x66\x50\xc3"), Some((0, ProbeKind::Stepped)));
    assert_eq!(placed(ALLOCATES, b"\x6a\x01\xc3"), Some((0, ProbeKind::Stepped)));
}

#[test]
fn a_five_byte_no_op_is_best_where_the_kernel_can_turn_it_into_a_call() {
    // endbr64; nopl 0(%rax,%rax); push %rbp
    let code = b"\xf3\x0f\x1e\xfa\x0f\x1f\x44\x00\x00\x55\xc3";
    let at = |address, release| placed_at(address, release, ALLOCATES, code, &[]).map(|p| (p.offset, p.kind));
    // No-ops that become calls are never probed, because forked children lack the target of the call.
    assert_eq!(at(0x1000, NEW), Some((9, ProbeKind::Emulated)));
    assert_eq!(at(0x1000, OLD), Some((9, ProbeKind::Emulated)));
    // The last address at which the no-op fits, and the first at which it crosses the page.
    assert_eq!(at(0x1ff7, NEW), Some((9, ProbeKind::Emulated)));
    assert_eq!(at(0x1ff8, NEW), Some((4, ProbeKind::Emulated)));
    // push %rbp; then the no-op: the return address has moved.
    let late = placed_at(0x1000, NEW, ALLOCATES, b"\x55\x0f\x1f\x44\x00\x00\xc3", &[]).unwrap();
    assert_eq!((late.offset, late.kind), (0, ProbeKind::Emulated));
    let late = placed_at(0x1000, NEW, FREES, b"\x55\x0f\x1f\x44\x00\x00\xc3", &[]).unwrap();
    assert_eq!((late.offset, late.kind, late.stack_pointer_moved), (0, ProbeKind::Emulated, 0));
}

/// The call that replaces a no-op writes below the stack pointer.
#[test]
fn a_five_byte_no_op_is_left_alone_where_something_may_lie_below_the_stack_pointer() {
    const NO_OP: &[u8] = b"\x0f\x1f\x44\x00\x00\x55\xc3";
    let offset = |before: &[u8], release| {
        let code = [before, NO_OP].concat();
        placed_at(0x1000, release, FREES, &code, &[]).map(|p| (p.offset - before.len() as u64, p.kind))
    };
    let unused: [&[u8]; 7] = [
        b"\xf3\x0f\x1e\xfa",                     // endbr64
        b"\x48\x85\xff",                         // test %rdi,%rdi
        b"\x48\x8b\x44\x24\xf8",                 // mov -8(%rsp),%rax
        b"\x48\x83\xec\x18",                     // sub $24,%rsp
        b"\x48\x89\x44\x24\x08",                 // mov %rax,8(%rsp)
        b"\x48\x89\x05\x00\x00\x00\x00",         // mov %rax,0(%rip)
        b"\x64\x48\x89\x04\x25\x00\x00\x00\x00", // mov %rax,%fs:0
    ];
    for before in unused {
        assert_eq!(offset(before, NEW), Some((5, ProbeKind::Emulated)), "{before:x?}");
    }
    let used: [&[u8]; 6] = [
        b"\x48\x89\x44\x24\xf8", // mov %rax,-8(%rsp)
        b"\x48\x89\x04\xcc",     // mov %rax,(%rsp,%rcx,8)
        b"\x48\x89\x45\xf8",     // mov %rax,-8(%rbp)
        b"\x48\x89\x06",         // mov %rax,(%rsi)
        b"\x58",                 // pop %rax
        b"\x48\x83\xc4\x08",     // add $8,%rsp
    ];
    for before in used {
        // The push behind the no-op.
        for release in [NEW, OLD] {
            assert_eq!(offset(before, release), Some((5, ProbeKind::Emulated)), "{before:x?}");
        }
    }
    // Shorter no-ops stay no-ops, and the entry is always allowed.
    assert_eq!(placed_at(0x1000, NEW, FREES, b"\x48\x89\x44\x24\xf8\x90\xc3", &[]).map(|p| p.offset), Some(5));
    assert_eq!(offset(b"", NEW), Some((5, ProbeKind::Emulated)));
}

#[test]
fn an_avoided_instruction_gives_way_to_the_next_best() {
    // push %rbp; push %rbx; test %rdi,%rdi; ret
    let code = b"\x55\x53\x48\x85\xff\xc3";
    let rules = KernelRules::of(Machine::X86_64, OLD);
    let at = |avoided: &[u64]| {
        place(&rules, 0, code, FREES, &|_| false, &|ip| avoided.contains(&ip)).map(|p| (p.offset, p.kind))
    };
    assert_eq!(at(&[]), Some((0, ProbeKind::Emulated)));
    assert_eq!(at(&[0]), Some((1, ProbeKind::Emulated)));
    assert_eq!(at(&[0, 1]), Some((2, ProbeKind::Stepped)));
    assert_eq!(at(&[0, 1, 2, 5]), None);
}

#[test]
fn a_call_is_not_probed_where_there_may_be_shadow_stacks() {
    // test %rdi,%rdi; call +0; ret
    let code = b"\x48\x85\xff\xe8\0\0\0\0\xc3";
    let rules = KernelRules::of(Machine::X86_64, OLD);
    let at = |rules: KernelRules| place(&rules, 0, code, FREES, &|_| false, &|_| false).map(|p| (p.offset, p.kind));
    assert_eq!(at(rules), Some((3, ProbeKind::Emulated)));
    assert_eq!(at(KernelRules { has_shadow_stacks: true, ..rules }), Some((0, ProbeKind::Stepped)));
}

#[test]
fn sets_of_lengths() {
    let lengths: NoOpLengths = [5, 10, 16, 99].into_iter().collect();
    assert_eq!(lengths.iter().collect::<Vec<_>>(), [5, 10]);
    assert!(lengths.contains(10) && !lengths.contains(6) && !lengths.contains(16));
}

#[test]
fn long_no_ops_by_kernel() {
    // nopl (%rax); push %rbp
    let at = |release| placed_at(0, release, ALLOCATES, b"\x0f\x1f\x00\x55\xc3", &[]).map(|p| p.offset);
    assert_eq!((at(NEW), at(OLD)), (Some(0), Some(3)));
}

#[test]
fn of_a_nop_and_a_ten_byte_nop_the_first_one_is_chosen() {
    // Like libbpf's usdt.h since July 2026; ret.
    let code = b"\x90\x66\x2e\x0f\x1f\x84\0\0\0\0\0\xc3";
    for lengths in [&[][..], &[5], &[10]] {
        let optimized_no_ops = lengths.iter().copied().collect();
        let rules = KernelRules { optimized_no_ops, ..KernelRules::of(Machine::X86_64, NEW) };
        let at = |code| place(&rules, 0, code, ALLOCATES, &|_| false, &|_| false).map(|placement| placement.offset);
        assert_eq!((at(code), at(&code[1..11])), (Some(0), None), "{lengths:?}");
    }
}

#[test]
fn what_the_kernel_refuses_is_never_chosen() {
    // cs nopw 0(%rax,%rax); then test %rdi,%rdi; ret
    let code = b"\x2e\x0f\x1f\x84\x00\x00\x00\x00\x00\x48\x85\xff\xc3";
    assert_eq!(placed(ALLOCATES, code), Some((9, ProbeKind::Stepped)));
    // lock addl; hlt; int3; a 16-bit jump.
    assert_eq!(placed(ALLOCATES, b"\xf0\x83\x44\x24\xc0\x00"), None);
    assert_eq!(placed(ALLOCATES, b"\xf4"), None);
    assert_eq!(placed(ALLOCATES, b"\xcc"), None);
    assert_eq!(placed(ALLOCATES, b"\x66\xe9\x00\x00\x00\x00"), None);
    assert_eq!(placed(ALLOCATES, b""), None);
}

#[test]
fn what_cannot_be_decoded_leaves_the_entry_and_is_said() {
    // test %rdi,%rdi; then a byte that is no instruction in 64-bit mode.
    let placement = placed_at(0, NEW, FREES, b"\x48\x85\xff\x06\x55\xc3", &[]).unwrap();
    assert_eq!((placement.offset, placement.kind), (0, ProbeKind::Stepped));
    assert!(placement.reason.ends_with("nothing cheaper before bytes that are no instruction"), "{}", placement.reason);
    // The first bytes are no known instruction either: the kernel decides.
    for shape in [ALLOCATES, FREES] {
        let placement = placed_at(0, NEW, shape, b"\x06\x55\xc3", &[]).unwrap();
        assert_eq!((placement.offset, placement.kind, placement.arguments), (0, ProbeKind::Stepped, shape.arguments));
        assert!(placement.reason.contains("an instruction that heapbpf does not know"), "{}", placement.reason);
    }
}

#[test]
fn a_branch_is_the_last_instruction_that_every_call_passes() {
    // test %rdi,%rdi; je +0; push %rbp: the branch itself.
    assert_eq!(placed(FREES, b"\x48\x85\xff\x74\x00\x55\xc3"), Some((3, ProbeKind::Emulated)));
    // bnd jmp.
    assert_eq!(placed(ALLOCATES, b"\xf2\xe9\x00\x00\x00\x00"), Some((0, ProbeKind::Emulated)));
    // test; ret; push: nothing behind the return is used.
    let end = placed_at(0, OLD, FREES, b"\x48\x85\xff\xc3\x55", &[]).unwrap();
    assert_eq!((end.offset, end.kind), (0, ProbeKind::Stepped));
    assert!(end.reason.contains("the first basic block ends"), "{}", end.reason);
    // jmp *%rax
    assert_eq!(placed(FREES, b"\x48\x85\xff\xff\xe0\x55"), Some((0, ProbeKind::Stepped)));
}

#[test]
fn nothing_behind_a_place_that_a_branch_leads_to() {
    // test %rdi,%rdi; lea 8(%rdi),%rax; push %rbp
    let code = b"\x48\x85\xff\x48\x8d\x47\x08\x55\xc3";
    assert_eq!(placed(ALLOCATES, code), Some((7, ProbeKind::Emulated)));
    for target in [3, 7] {
        let placement = placed_at(0x1000, OLD, ALLOCATES, code, &[target]).unwrap();
        assert_eq!((placement.offset, placement.kind), (0, ProbeKind::Stepped), "+{target}");
        assert!(placement.reason.contains("a branch leads into the block"), "{}", placement.reason);
    }
    // A branch to the entry is like any other call.
    assert_eq!(placed_at(0x1000, OLD, ALLOCATES, code, &[0]).unwrap().offset, 7);
}

#[test]
fn a_lost_argument_leaves_the_entry() {
    // mov %fs:0,%rdi; push %rbp
    let code = b"\x64\x48\x8b\x3c\x25\x00\x00\x00\x00\x55\xc3";
    let lost = placed_at(0, OLD, ALLOCATES, code, &[]).unwrap();
    assert_eq!((lost.offset, lost.kind), (0, ProbeKind::Stepped));
    assert!(lost.reason.contains("an argument is overwritten"), "{}", lost.reason);
    // movzbl %dil,%edi; mov %edi,%esi (a copy of half); push %rbp
    assert_eq!(placed(ALLOCATES, b"\x40\x0f\xb6\xff\x89\xfe\x55\xc3"), Some((0, ProbeKind::Stepped)));
}

#[test]
fn an_argument_moved_to_another_argument_register_is_found_there() {
    // Like mimalloc's malloc: mov %rdi,%rsi; mov (%rdx),%rdi; cmp $0x400,%rsi; ja
    let code = b"\x48\x89\xfe\x48\x8b\x3a\x48\x81\xfe\x00\x04\x00\x00\x77\x00\xc3";
    let placement = placed_at(0, OLD, ALLOCATES, code, &[]).unwrap();
    assert_eq!((placement.offset, placement.kind, placement.arguments.size), (13, ProbeKind::Emulated, 1));
    // Swapped through rax: mov %rdi,%rax; mov %rsi,%rdi; mov %rax,%rsi; jmp
    let swap = b"\x48\x89\xf8\x48\x89\xf7\x48\x89\xc6\xeb\x00";
    let shape = Shape::allocates(1).old(0);
    let placement = placed_at(0, OLD, shape, swap, &[]).unwrap();
    assert_eq!((placement.offset, placement.arguments.size, placement.arguments.old), (9, 0, 1));
}

#[test]
fn a_moved_stack_pointer_matters_to_allocations_only() {
    // sub $0x18,%rsp; push %rbx
    let code = b"\x48\x83\xec\x18\x53\xc3";
    let placement = placed_at(0, OLD, ALLOCATES, code, &[]).unwrap();
    assert_eq!((placement.offset, placement.kind), (0, ProbeKind::Stepped));
    assert!(placement.reason.contains("the return address moves away"), "{}", placement.reason);
    let placement = placed_at(0, OLD, FREES, code, &[]).unwrap();
    assert_eq!((placement.offset, placement.kind, placement.stack_pointer_moved), (4, ProbeKind::Emulated, -0x18));
    // and $-32,%rsp: by an unknown distance.
    assert_eq!(placed(ALLOCATES, b"\x48\x83\xe4\xe0\x53\xc3"), Some((0, ProbeKind::Stepped)));
}

#[test]
fn behind_an_overflow_check_only_calls_that_fail_are_missed() {
    // Like glibc's reallocarray: mov %rsi,%rax; mul %rdx; mov %rax,%rsi; jo +0; jmp +0
    let code = b"\x48\x89\xf0\x48\xf7\xe2\x48\x89\xc6\x70\x05\xe9\x00\x00\x00\x00\xc3";
    let placement = placed_at(0, OLD, ARRAY, code, &[]).unwrap();
    assert_eq!((placement.offset, placement.kind), (11, ProbeKind::Emulated));
    assert_eq!(placement.arguments, Arguments { size: 1, times: NO_ARGUMENT, old: 0, out: NO_ARGUMENT });
    // Not checked at all.
    let unchecked = b"\x48\x89\xf0\x48\xf7\xe2\x48\x89\xc6\xe9\x00\x00\x00\x00\xc3";
    assert_eq!(placed(ARRAY, unchecked), Some((0, ProbeKind::Stepped)));
    // The flags are those of an addition: mul; add $1,%rcx; mov %rax,%rsi; jo; jmp.
    let other = b"\x48\x89\xf0\x48\xf7\xe2\x48\x83\xc1\x01\x48\x89\xc6\x70\x05\xe9\x00\x00\x00\x00";
    assert_eq!(placed(ARRAY, other), Some((0, ProbeKind::Stepped)));
    // A condition other than overflow: je.
    let zero = b"\x48\x89\xf0\x48\xf7\xe2\x48\x89\xc6\x74\x05\xe9\x00\x00\x00\x00";
    assert_eq!(placed(ARRAY, zero), Some((0, ProbeKind::Stepped)));
    // A branch from elsewhere into the checked path.
    assert_eq!(placed_at(0, OLD, ARRAY, code, &[11]).unwrap().offset, 0);
}

#[test]
fn any_bytes_give_a_placement_inside_them_or_none() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for _ in 0..50_000 {
        let length = (next() % 40) as usize;
        let code: Vec<u8> = (0..5).flat_map(|_| next().to_le_bytes()).take(length).collect();
        let address = next();
        for shape in [ALLOCATES, FREES, ARRAY] {
            if let Some(placement) = placed_at(address, NEW, shape, &code, &[]) {
                assert!(placement.offset < code.len() as u64, "{code:x?}");
                assert!(shape.is_free() || placement.stack_pointer_moved == 0, "{code:x?}");
            }
        }
        flows(address, &code, |_| ());
        forwards_to(address, &code);
    }
}

#[test]
fn transfers_of_control() {
    let mut found = Vec::new();
    // call +0; jmp *0x10(%rip); call *0x10(%rip); je -2; jmp *%rax
    flows(0x100, b"\xe8\0\0\0\0\xff\x25\x10\0\0\0\xff\x15\x10\0\0\0\x74\xfe\xff\xe0", |flow| found.push(flow));
    let flow = |from, is_call, target| Flow { from, is_call, target };
    assert_eq!(
        found,
        [
            flow(0x100, true, Target::Address(0x105)),
            flow(0x105, false, Target::Slot(0x11b)),
            flow(0x10b, true, Target::Slot(0x121)),
            flow(0x111, false, Target::Address(0x111)),
        ]
    );
    assert_eq!(forwards_to(0x100, b"\xf3\x0f\x1e\xfa\xeb\x10"), Some(Target::Address(0x116)));
    assert_eq!(forwards_to(0x100, b"\x31\xf6\xeb\x10"), None);
    assert_eq!(forwards_to(0x100, b"\x74\x10"), None);
}

#[test]
fn an_argument_that_was_moved_to_the_accumulator() {
    // Like mimalloc's calloc: mov 0(%rip),%rdx; mov %rdi,%rax; mov %fs:(%rdx),%rdi; cmp $1,%rax; je +1; …
    let counted = Shape::allocates(1).times(0);
    let mut code = b"\x48\x8b\x15\0\0\0\0\x48\x89\xf8\x64\x48\x8b\x3a\x48\x83\xf8\x01\x74\x01\x90\xc3".to_vec();
    let placement = placed_at(0, OLD, counted, &code, &[]).unwrap();
    assert_eq!((placement.offset, placement.kind), (18, ProbeKind::Emulated));
    let expected = Arguments { size: 1, times: ACCUMULATOR, ..Arguments::NONE };
    assert_eq!(placement.arguments, expected);
    // xor %eax,%eax instead of the comparison: the argument is gone.
    code.splice(14..18, *b"\x31\xc0\x66\x90");
    let placement = placed_at(0, OLD, counted, &code, &[]).unwrap();
    assert_eq!((placement.offset, placement.kind), (0, ProbeKind::Stepped));
}

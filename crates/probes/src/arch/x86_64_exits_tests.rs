//! Return sites and calls of small functions.

use super::*;

fn ended(code: &[u8]) -> Option<(Vec<u64>, usize, bool)> {
    let found = exits(0x1000, &|address| Some((address, code.get(address.checked_sub(0x1000)? as usize..)?.into())))?;
    Some((found.return_sites.keys().map(|at| at - 0x1000).collect(), found.calls.len(), found.calls_unknown))
}

/// The return sites of `code`, with the result at each, by their distances from the start.
fn sites(code: &[u8]) -> Vec<(u64, ResultLocation)> {
    let found = exits(0x1000, &|address| Some((address, code.get(address.checked_sub(0x1000)? as usize..)?.into())));
    found.unwrap().return_sites.into_iter().map(|(at, result)| (at - 0x1000, result)).collect()
}

#[test]
fn every_return_is_found() {
    // test %rdi,%rdi; je +3; xor %eax,%eax; ret; xor %eax,%eax; ret
    assert_eq!(ended(b"\x48\x85\xff\x74\x03\x31\xc0\xc3\x31\xc0\xc3"), Some((vec![7, 10], 0, false)));
    // call +0; call *%rax; rep ret; the rest belongs to another function.
    assert_eq!(ended(b"\xe8\0\0\0\0\xff\xd0\xf3\xc3\x06"), Some((vec![7], 1, true)));
    // Nothing follows a call at the end of a function, or ud2.
    assert_eq!(ended(b"\xe8\0\0\0\0"), Some((vec![], 1, false)));
    assert_eq!(ended(b"\x0f\x0b\xc3"), Some((vec![], 0, false)));
    // A loop: jmp to itself.
    assert_eq!(ended(b"\xeb\xfe"), Some((vec![], 0, false)));
}

#[test]
fn unknown_exits_are_none() {
    // jmp out of the function; jmp *%rax; no instruction; nothing.
    for code in [&b"\xe9\0\x10\0\0"[..], b"\xff\xe0", b"\x06", b""] {
        assert_eq!(ended(code), None, "{code:x?}");
    }
}

/// gperftools' operator new, shortened: after the branch only one direction returns, with the block in r9.
#[test]
fn a_branch_stands_for_the_return_behind_it() {
    // test %r9,%r9; je slow; mov (%r9),%rdx; mov %r9,%rax; ret; slow: call +0; ret
    let code = b"\x4d\x85\xc9\x74\x07\x49\x8b\x11\x4c\x89\xc8\xc3\xe8\0\0\0\0\xc3";
    let result = ResultLocation { register: 9, condition: 5, ..ResultLocation::RETURN };
    assert_eq!(sites(code), [(3, result), (17, ResultLocation::RETURN)]);
    // The other way round: jne fast; call +0; ret; fast: mov %r9,%rax; ret
    let code = b"\x4d\x85\xc9\x75\x06\xe8\0\0\0\0\xc3\x4c\x89\xc8\xc3";
    assert_eq!(sites(code), [(3, result), (10, ResultLocation::RETURN)]);
}

#[test]
fn both_ways_of_a_branch_and_the_last_of_several() {
    // mov %rax,%rbx [the result]; test; jb +4; cmp; nop; mov %rbx,%rax; pop %rbx; ret, after push %rbx and a call.
    let code = b"\x53\xe8\0\0\0\0\x48\x89\xc3\x72\x04\x48\x83\xf8\x01\x48\x89\xd8\x5b\xc3";
    let result = ResultLocation { register: 3, words_to_return: 1, ..ResultLocation::RETURN };
    assert_eq!(sites(code), [(9, result)]);
    // With push %rbp in front and pop %rbp behind, the caller's frame pointer is on the stack.
    let code = b"\x55\x53\xe8\0\0\0\0\x48\x89\xc3\x72\x04\x48\x83\xf8\x01\x48\x89\xd8\x5b\x5d\xc3";
    let result = ResultLocation { words_to_return: 2, words_to_frame_pointer: 1, ..result };
    assert_eq!(sites(code), [(10, result)]);
    // je +0; je +0; ret: two branches on the path, one of which is enough.
    assert_eq!(sites(b"\x74\x00\x74\x00\xc3"), [(2, ResultLocation::RETURN)]);
}

#[test]
fn returns_that_no_branch_stands_for() {
    // je +2; inc %eax; ret: one direction computes the result behind the branch.
    assert_eq!(sites(b"\x74\x02\xff\xc0\xc3"), [(4, ResultLocation::RETURN)]);
    // je +5; call; ret: not every path passes it... and a call lies between.
    assert_eq!(sites(b"\x74\x05\xe8\0\0\0\0\xc3"), [(7, ResultLocation::RETURN)]);
    // je +1; leave; ret: the stack pointer comes from an unknown place.
    assert_eq!(sites(b"\x74\x01\xc9\xc3"), [(3, ResultLocation::RETURN)]);
    // A loop: one direction of its branch leads to the return, but a call executes it once for each turn.
    assert_eq!(sites(b"\x74\x00\x75\xfc\xc3"), [(4, ResultLocation::RETURN)]);
    // The branch before the loop, which jumps over the loop, does not stand for the return behind it.
    assert_eq!(sites(b"\x74\x04\xff\xc9\x75\xfc\xc3"), [(6, ResultLocation::RETURN)]);
}

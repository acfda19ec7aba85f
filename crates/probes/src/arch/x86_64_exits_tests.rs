//! Return sites and calls of small functions.

use super::*;

fn ended(code: &[u8]) -> Option<(Vec<u64>, usize, bool)> {
    let found = exits(0x1000, &|address| {
        address.checked_sub(0x1000).and_then(|at| code.get(at as usize..)).unwrap_or_default()
    })?;
    Some((found.return_sites.iter().map(|at| at - 0x1000).collect(), found.calls.len(), found.calls_unknown))
}

#[test]
fn every_return_is_found() {
    // test %rdi,%rdi; je +1; ret; xor %eax,%eax; ret
    assert_eq!(ended(b"\x48\x85\xff\x74\x01\xc3\x31\xc0\xc3"), Some((vec![5, 8], 0, false)));
    // call +0; call *%rax; rep ret; the rest belongs to another function.
    assert_eq!(ended(b"\xe8\0\0\0\0\xff\xd0\xf3\xc3\x06"), Some((vec![7], 1, true)));
    // Nothing follows a call at the end of the function, nor ud2.
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

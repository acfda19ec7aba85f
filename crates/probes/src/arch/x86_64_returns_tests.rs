//! What small functions can return, on code like that of compilers.

use super::*;

/// `lea rax,[rip+0x10]; ret`, at [`HELPER`].
const HELPER_CODE: &[u8] = b"\x48\x8d\x05\x10\0\0\0\xc3";
const HELPER: u64 = 0x2000;
const START: u64 = 0x1000;

/// What the function with this code, at [`START`], returns.
fn returned(code: &[u8]) -> Returned {
    returns(START, &|address| match address {
        HELPER => HELPER_CODE.into(),
        _ => address.checked_sub(START).and_then(|at| code.get(at as usize..)).unwrap_or_default().into(),
    })
}

fn addresses(code: &[u8]) -> (Vec<u64>, bool) {
    let returned = returned(code);
    let address = |target: &Target| if let Target::Address(address) = target { Some(*address) } else { None };
    (returned.targets.iter().filter_map(address).collect(), returned.is_whole)
}

/// `call HELPER`, encoded for this distance from the start.
fn call(at: u64) -> Vec<u8> {
    let mut code = vec![0xe8];
    code.extend(((HELPER - (START + at + 5)) as u32).to_le_bytes());
    code
}

#[test]
fn one_and_two_choices() {
    assert_eq!(addresses(HELPER_CODE), (vec![START + 0x17], true));
    // lea rdx,[rip+0x20]; test edi,edi; lea rax,[rip+0x30]; cmovne rax,rdx; ret
    let code = b"\x48\x8d\x15\x20\0\0\0\x85\xff\x48\x8d\x05\x30\0\0\0\x48\x0f\x45\xc2\xc3";
    assert_eq!(addresses(code), (vec![START + 0x27, START + 0x40], true));
    // The same with absolute addresses: mov eax,0x401136; mov edx,0x401140; …
    let code = b"\xb8\x36\x11\x40\0\xba\x40\x11\x40\0\x85\xff\x48\x0f\x45\xc2\xc3";
    assert_eq!(addresses(code), (vec![0x40_1136, 0x40_1140], true));
}

#[test]
fn choices_that_went_over_the_stack() {
    // push rbp; mov rbp,rsp; sub rsp,16; test edi,edi; je; lea rax; mov [rbp-8],rax; jmp; lea rax; mov [rbp-8],rax;
    // mov rax,[rbp-8]; leave; ret
    let code = b"\x55\x48\x89\xe5\x48\x83\xec\x10\x85\xff\x74\x0d\x48\x8d\x05\x40\0\0\0\x48\x89\x45\xf8\xeb\x0b\
                 \x48\x8d\x05\x50\0\0\0\x48\x89\x45\xf8\x48\x8b\x45\xf8\xc9\xc3";
    assert_eq!(addresses(code), (vec![START + 0x13 + 0x40, START + 0x20 + 0x50], true));
    // lea rax; mov [rsp-8],rax; lea rdi,[rsp-8]; call: it received the place, and may have written there.
    let mut code = b"\x48\x8d\x05\x10\0\0\0\x48\x89\x44\x24\xf8\x48\x8d\x7c\x24\xf8".to_vec();
    code.extend(call(code.len() as u64));
    code.extend(b"\x48\x8b\x44\x24\xf8\xc3");
    assert_eq!(addresses(&code), (vec![], false));
}

#[test]
fn through_calls() {
    // sub rsp,8; call; add rsp,8; ret
    let mut code = b"\x48\x83\xec\x08".to_vec();
    code.extend(call(4));
    code.extend(b"\x48\x83\xc4\x08\xc3");
    assert_eq!(addresses(&code), (vec![HELPER + 0x17], true));
    // A call's argument is not what the function returns: lea rdi; call; lea rax; ret
    let mut code = b"\x48\x8d\x3d\x60\0\0\0".to_vec();
    code.extend(call(7));
    code.extend(b"\x48\x8d\x05\x10\0\0\0\xc3");
    assert_eq!(addresses(&code), (vec![START + 19 + 0x10], true));
    // Registers that a call preserves: push rbx; lea rbx; call; mov rax,rbx; pop rbx; ret
    let mut code = b"\x53\x48\x8d\x1d\x10\0\0\0".to_vec();
    code.extend(call(8));
    code.extend(b"\x48\x89\xd8\x5b\xc3");
    assert_eq!(addresses(&code), (vec![START + 8 + 0x10], true));
    // Registers that it does not preserve: lea rcx; call; mov rax,rcx; ret
    let mut code = b"\x48\x8d\x0d\x10\0\0\0".to_vec();
    code.extend(call(7));
    code.extend(b"\x48\x89\xc8\xc3");
    assert_eq!(addresses(&code), (vec![], false));
}

#[test]
fn slots_and_tables() {
    // mov rax,[rip+0x70]; ret
    let found = returned(b"\x48\x8b\x05\x70\0\0\0\xc3");
    assert_eq!(found, Returned { targets: BTreeSet::from([Target::Slot(START + 0x77)]), is_whole: true });
    // lea rdx,[rip+0x60]; mov rax,[rdx+rdi*8]; ret
    assert_eq!(addresses(b"\x48\x8d\x15\x60\0\0\0\x48\x8b\x04\xfa\xc3"), (vec![], false));
}

#[test]
fn nonsense_ends() {
    // jmp to itself; nothing; garbage; push in a loop; a call to itself.
    for code in [&b"\xeb\xfe"[..], b"", b"\x06\x06", b"\x50\xeb\xfd", b"\xe8\xfb\xff\xff\xff\xc3"] {
        assert_eq!(addresses(code), (vec![], false), "{code:x?}");
    }
}

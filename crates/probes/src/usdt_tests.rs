use super::*;

fn operand(descriptor: &str) -> Result<Operand, &'static str> {
    operand_of(descriptor)
}

#[test]
fn descriptors_of_arguments() {
    assert_eq!(operand("8@%rdi"), Ok(Operand::register(7, 8, false)));
    assert_eq!(operand("-4@%eax"), Ok(Operand::register(0, 4, true)));
    assert_eq!(operand("2@%r9w"), Ok(Operand::register(9, 2, false)));
    assert_eq!(operand("-4@16(%rsp)"), Ok(Operand::memory(4, 16, 4, true)));
    assert_eq!(operand("8@-0x10(%rbp)"), Ok(Operand::memory(5, -16, 8, false)));
    assert_eq!(operand("8@(%r15)"), Ok(Operand::memory(15, 0, 8, false)));
    assert_eq!(operand("8@$5"), Ok(Operand::constant(5)));
    assert_eq!(operand("-8@$-1"), Ok(Operand::constant(-1)));
}

#[test]
fn descriptors_that_cannot_be_read_are_refused_with_a_reason() {
    for descriptor in ["8@sym(%rip)", "8@sym+8(%rip)", "8@(%rax,%rbx,8)", "8@%fs:16", "8@8(%eax)", "8@", "8@16"] {
        let why = operand(descriptor).unwrap_err();
        assert!(why.starts_with("is at an address") || why.starts_with("is in a register"), "{descriptor}: {why}");
    }
    for descriptor in ["%rdi", "8f@%xmm0", "16@%rdi", "-@%rdi", "8@%ah", "8@$1x", "8@$4294967296", ""] {
        assert!(operand(descriptor).is_err(), "{descriptor}");
    }
}

/// The description of a note.
fn description(words: [u64; 3], texts: &[&str]) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    texts.iter().for_each(|text| bytes.extend([text.as_bytes(), b"\0"].concat()));
    bytes
}

#[test]
fn a_note_follows_the_file_when_that_is_moved() {
    let bytes = description([0x1000, 0x5000, 0x6000], &[PROVIDER, "alloc", "8@%rdi 8@%rsi 8@%rdx"]);
    let note = |base| parse(&bytes, base).expect("one of the provider's");
    assert_eq!((note(None).address, note(None).semaphore), (0x1000, 0x6000));
    assert_eq!((note(Some(0x15000)).address, note(Some(0x15000)).semaphore), (0x11000, 0x16000));
    let without = description([0x1000, 0x5000, 0], &[PROVIDER, "free", "8@%rdi"]);
    let note = parse(&without, Some(0x15000)).expect("one of the provider's");
    assert_eq!((note.semaphore, &*note.name, &*note.arguments), (0, "free", "8@%rdi"));
}

#[test]
fn notes_of_others_and_broken_ones_are_passed_over() {
    assert_eq!(parse(&description([1, 2, 3], &["libc", "alloc", ""]), None), None);
    assert_eq!(parse(&description([1, 2, 3], &[PROVIDER, "realloc", ""]), None), None);
    assert_eq!(parse(&description([1, 2, 3], &[PROVIDER]), None), None);
    let whole = description([1, 2, 3], &[PROVIDER, "free", "8@%rdi"]);
    for length in 0..24 {
        assert_eq!(parse(&whole[..length], Some(9)), None);
    }
}

#[test]
fn a_file_without_notes_announces_nothing() {
    let rules = KernelRules::of(Machine::X86_64, (6, 18));
    let file = std::fs::File::open("/proc/self/exe").expect("this program");
    assert!(announced(&file, &rules).expect("readable").is_none());
    assert!(matches!(announced(&b"#!/bin/sh".as_slice(), &rules), Err(AttachError::NotElf)));
}

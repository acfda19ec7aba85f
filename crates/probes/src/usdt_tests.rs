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

/// Address and file offset of the code, of the data, and of what follows both.
const CODE: u64 = 0x400;
const DATA: u64 = 0x500;
const NOTES: u64 = 0x600;
/// File offset of the section headers.
const HEADERS: u64 = 0x8000;

/// A position-independent program whose code begins with `code`, with these notes.
fn file(code: &[u8], notes: &[Vec<u8>]) -> Vec<u8> {
    let mut section = Vec::new();
    for note in notes {
        let length = u32::try_from(note.len()).expect("small");
        section.extend([8_u32, length, NOTE_TYPE].iter().flat_map(|word| word.to_le_bytes()));
        section.extend(b"stapsdt\0");
        section.extend(note);
        section.resize(section.len().next_multiple_of(4), 0);
    }
    let names = b"\0.note.stapsdt\0.stapsdt.base\0.shstrtab\0";
    let names_at = NOTES + section.len() as u64;
    let mut bytes = vec![0; HEADERS as usize];
    let mut put = |at: u64, part: &[u8]| bytes[at as usize..at as usize + part.len()].copy_from_slice(part);
    put(0, b"\x7fELF\x02\x01\x01");
    // Type, machine, version, entry, program headers, section headers, sizes and numbers.
    put(16, &[3, 0, 62, 0, 1, 0, 0, 0]);
    put(24, &[CODE, 64, HEADERS].map(u64::to_le_bytes).concat());
    put(52, &[64_u16, 56, 2, 64, 4, 3].map(u16::to_le_bytes).concat());
    for (i, (flags, start)) in [(5_u32, CODE), (6, DATA)].into_iter().enumerate() {
        let at = 64 + 56 * i as u64;
        put(at, &[1_u32, flags].map(u32::to_le_bytes).concat());
        put(at + 8, &[start, start, start, 0x100, 0x100, 0x100].map(u64::to_le_bytes).concat());
    }
    put(CODE, code);
    put(NOTES, &section);
    put(names_at, names);
    let sections = [
        (0_u32, 0_u32, 0_u64, 0_u64, 0_u64),
        (1, 7, 0, NOTES, section.len() as u64),
        (15, 1, 0x5000, DATA, 1),
        (29, 3, 0, names_at, names.len() as u64),
    ];
    for (name, kind, address, offset, length) in sections {
        bytes.extend([name, kind].map(u32::to_le_bytes).concat());
        bytes.extend([0, address, offset, length, 0, 1, 0].map(u64::to_le_bytes).concat());
    }
    bytes
}

fn plan(bytes: &[u8]) -> Result<Option<AllocatorFile>, AttachError> {
    announced(&bytes, &KernelRules::of(Machine::X86_64, (6, 18)))
}

fn alloc(address: u64, semaphore: u64, arguments: &str) -> Vec<u8> {
    description([address, 0x5000, semaphore], &[PROVIDER, "alloc", arguments])
}

#[test]
fn a_plan_has_the_probes_their_semaphores_and_their_arguments() {
    let free = description([CODE + 1, 0x5000, 0], &[PROVIDER, "free", "8@%rax"]);
    let other = description([CODE, 0x5000, 0], &["libc", "setjmp", "8@x"]);
    let notes = [other, free, alloc(CODE, DATA + 2, "8@%rdi -4@8(%rsp) 8@$7 8@%rax")];
    let plan = plan(&file(&[0x90, 0x90], &notes)).expect("usable").expect("announces");
    let of = |site: &PlannedSite| (site.function.clone(), site.site.offset, site.announces, site.return_needed);
    let sites: Vec<_> = plan.sites.iter().map(of).collect();
    let expected = [("alloc", CODE, Some(DATA + 2), true), ("free", CODE + 1, Some(0), false)];
    assert_eq!(sites, expected.map(|(name, at, semaphore, is)| (format!("{PROVIDER}:{name}"), at, semaphore, is)));
    let operands = [Operand::register(7, 8, false), Operand::memory(4, 8, 4, true), Operand::constant(7)];
    assert_eq!(plan.sites[0].site.operands, operands.map(|operand| operand.0));
    assert_eq!((plan.allocator.as_str(), plan.kind), ("otel_memory (USDT)", FileKind::StaticExecutable));
    assert!(plan.limits.is_empty());
}

#[test]
fn a_program_that_announces_no_frees_is_told_so() {
    let whole = plan(&file(&[0x90], &[alloc(CODE, 0, "8@%rdi 8@%rsi 8@%rdx")])).expect("usable").expect("announces");
    assert_eq!(whole.limits[0].what, "otel_memory:free");
    let free = description([CODE, 0x5000, 0], &[PROVIDER, "free", "8@%rax"]);
    assert!(plan(&file(&[0x90], &[free])).expect("readable").is_none(), "frees alone are nothing");
}

#[test]
fn mappings_are_announced_without_a_weight() {
    let note = |at, name| description([at, 0x5000, 0], &[PROVIDER, name, "8@%rdi 8@%rsi"]);
    let whole = plan(&file(&[0x90, 0x90], &[note(CODE, "mmap"), note(CODE + 1, "munmap")]));
    let whole = whole.expect("usable").expect("announces");
    let of = |site: &PlannedSite| (site.function.clone(), site.site.function, site.return_needed);
    let expected = [("mmap", true), ("munmap", false)];
    let expected = expected.map(|(name, begins)| (format!("{PROVIDER}:{name}"), ANNOUNCED_MMAP, begins));
    assert_eq!(whole.sites.iter().map(of).collect::<Vec<_>>(), expected);
    assert!(whole.sites.iter().all(|site| site.site.operands[1] != 0 && site.site.operands[2] == 0));
    assert!(whole.limits.is_empty());
    let both = [note(CODE, "mmap"), alloc(CODE, 0, "8@%rdi 8@%rsi 8@%rdx")];
    let limits = plan(&file(&[0x90], &both)).expect("usable").expect("announces").limits;
    let what: Vec<_> = limits.iter().map(|limit| limit.what.as_str()).collect();
    assert_eq!(what, ["otel_memory:free", "otel_memory:munmap"]);
    assert!(plan(&file(&[0x90], &[note(CODE, "munmap")])).expect("readable").is_none(), "nothing to end");
}

#[test]
fn a_probe_that_cannot_be_used_refuses_the_file_with_a_sentence() {
    let arguments = "8@%rdi 8@%rsi 8@%rdx";
    let refused = |code: &[u8], note: Vec<u8>| plan(&file(code, &[note])).expect_err("unusable").to_string();
    let cases = [
        (refused(&[0x90], alloc(CODE, 0, "8@%rdi 8@size(%rip) 8@%rdx")), "8@size(%rip)\" is at an address"),
        (refused(&[0x90], alloc(CODE, 0, "8@%rdi")), "fewer arguments than 3"),
        (refused(&[0x90], alloc(DATA, 0, arguments)), "outside of the file's code"),
        (refused(&[0x90], alloc(CODE, CODE, arguments)), "outside of the file's data"),
        (refused(&[0x90], alloc(CODE, DATA + 1, arguments)), "outside of the file's data"),
        (refused(&[0xf4], alloc(CODE, 0, arguments)), "the kernel refuses a probe"),
    ];
    for (said, wanted) in cases {
        assert!(said.contains(wanted) && said.contains("USDT probe otel_memory:alloc"), "{said}");
    }
    let many: Vec<_> = (0..=MOST_SITES).map(|_| alloc(CODE, 0, arguments)).collect();
    assert!(plan(&file(&[0x90], &many[..MOST_SITES])).is_ok());
    let said = plan(&file(&[0x90], &many)).expect_err("too many").to_string();
    assert!(said.contains("more than 256 probes"), "{said}");
}

//! Malformed and hostile call frame information, stacks and files.

use std::sync::Arc;

use heapbpf_elf::Elf;
use heapbpf_testing::own_process::{Library, OwnProcess, Random, unwind};
use heapbpf_unwind::dwarf::Unwinder;
use heapbpf_unwind::raw::{Completeness, Reason};

/// A library with an endless expression in the call frame information of a function:
/// DW_CFA_def_cfa_expression { DW_OP_breg7 0; DW_OP_skip -3 }.
const ENDLESS: &str = r#"
__asm__(".globl endless\n.type endless,@function\nendless:\n.cfi_startproc\n"
        "sub $8, %rsp\n.cfi_adjust_cfa_offset 8\n"
        ".cfi_escape 0x0f, 5, 0x77, 0, 0x2f, 0xfd, 0xff\n"
        "call *%rdi\nadd $8, %rsp\nxor %eax, %eax\nret\n.cfi_endproc\n.size endless, .-endless\n");
"#;

#[test]
fn endless_expressions_end() {
    let Some(library) = Library::compile(ENDLESS, &["-O2"]) else { return };
    let capture = library.capture("endless", 0);
    let process = OwnProcess::read().expect("/proc");
    let module = process.module(library.path.to_str().expect("UTF-8")).expect("mapped");
    let stack = unwind(&process, &capture);
    assert_eq!(stack.completeness, Completeness::Truncated(Reason::BadUnwindInformation(module)));
    assert_eq!(stack.frames.len(), 1);
}

/// Mutates a library's unwind sections, sometimes its headers, and truncates it. Nothing may panic or run forever. A
/// complete stack proves nothing, because hostile information can end any walk.
#[test]
fn mutated_modules_give_a_reason_or_a_stack() {
    // Without frame pointers, so that only the mutated information leads on. (To realign, arm64 needs one.)
    let truth = include_str!("truth.c");
    let Some(library) = Library::compile(truth, &["-O2", "-fomit-frame-pointer"]) else { return };
    let capture = library.capture(if cfg!(target_arch = "aarch64") { "recurse" } else { "realigned" }, 30);
    let mut process = OwnProcess::read().expect("/proc");
    let module = process.module(library.path.to_str().expect("UTF-8")).expect("mapped");
    let expected = unwind(&process, &capture);
    let pristine = std::fs::read(&library.path).expect("readable");
    let elf = Elf::read(&pristine).expect("ELF");
    let ranges: Vec<(usize, usize)> = [".eh_frame", ".eh_frame_hdr"]
        .iter()
        .filter_map(|name| elf.section(name))
        .map(|section| (section.offset as usize, section.bytes as usize))
        .chain([(0, 4096)])
        .collect();
    let mut random = Random(0x5eed);
    let mut different = 0;
    for round in 0..400 {
        let mut bytes = pristine.clone();
        let (start, length) = ranges[random.below(if round % 4 == 0 { ranges.len() } else { ranges.len() - 1 })];
        for _ in 0..1 + (length >> random.below(12)) {
            let at = start + random.below(length);
            bytes[at] = random.next_u64() as u8;
        }
        if round % 7 == 0 {
            bytes.truncate(random.below(pristine.len()));
        }
        process.replace_image(module, Arc::new(bytes));
        let stack = unwind(&process, &capture);
        assert!(!stack.frames.is_empty() && stack.frames.len() <= 512);
        different += u32::from(stack != expected);
    }
    assert!(different > 100, "mutations reach what is evaluated: {different}");
}

/// Random registers and stacks over real modules: values on the stack are as hostile as files.
#[test]
fn random_stacks_give_a_reason() {
    let process = OwnProcess::read().expect("/proc");
    let mut unwinder = Unwinder::default();
    let mut random = Random(7);
    let space = process.space();
    for _ in 0..20_000 {
        let mut capture = heapbpf_testing::own_process::OwnCapture::default();
        let code = |random: &mut Random| {
            let mapping = process.mappings()[random.below(process.mappings().len())];
            mapping.start + random.below((mapping.end - mapping.start) as usize) as u64
        };
        capture.registers.ip = code(&mut random);
        capture.registers.sp = if random.below(10) == 0 { random.next_u64() } else { 0x7fff_0000_0000 };
        capture.registers.fp = if random.below(3) == 0 { random.next_u64() } else { 0x7fff_0000_0100 };
        for _ in 0..random.below(200) {
            let word = match random.below(3) {
                0 => random.next_u64(),
                1 => capture.registers.sp.wrapping_add(random.below(2048) as u64 & !7),
                _ => code(&mut random),
            };
            capture.stack.extend_from_slice(&word.to_le_bytes());
        }
        let stack = unwinder.unwind(&mut process.clone(), &space, capture.input());
        // There are no frames if the first one is in the trampoline of another tool's return probe on this process.
        let is_probe = matches!(stack.completeness, Completeness::Truncated(Reason::ReturnProbe));
        assert!(!stack.frames.is_empty() || is_probe);
    }
}

//! Replays inputs of the fuzz targets `objects` and `usdt`, variants of these inputs, and the seeds of `objects`,
//! `usdt`, `attach` and `specs`.

use std::collections::BTreeSet;

use crate::{KernelRules, Machine, Table, examine_avoiding};

#[path = "../../../fuzz/shared/attach.rs"]
mod attach;
#[path = "../../elf/src/tests/build.rs"]
#[allow(dead_code, reason = "the tests of another crate need more of it")]
mod build;
#[path = "../../../fuzz/shared/damage.rs"]
mod damage;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;
#[path = "../../../fuzz/shared/objects.rs"]
mod shared;
#[path = "../../../fuzz/shared/specs.rs"]
mod specs;
#[path = "../../../fuzz/shared/usdt.rs"]
mod usdt;

use build::{Load, PROGRAM_HEADER_BYTES, Part};

/// File offset of the code, and its size.
const CODE: u64 = 64 + 2 * PROGRAM_HEADER_BYTES as u64;
const CODE_BYTES: u64 = 0x400;
const DATA_BYTES: u64 = 0x100;
/// Address of the code, and of variables.
const TEXT: u64 = 0x40_0000 + CODE;
const DATA: u64 = 0x50_0000 + CODE + CODE_BYTES;
const FUNCTIONS: [&str; 4] = ["Malloc", "Calloc", "Realloc", "Free"];
/// The object allocator's functions.
const OWN: u64 = TEXT + 0x300;

/// An interpreter whose table of allocators has three domains: objects and memory, which the object allocator serves,
/// and raw memory.
fn interpreter() -> Vec<u8> {
    let mut code = vec![0xc3; CODE_BYTES as usize];
    let (mut names, mut symbols, mut data) = (vec![0], vec![0; 24], Vec::new());
    for (domain, prefix) in ["PyObject_", "PyMem_", "PyMem_Raw"].into_iter().enumerate() {
        let table = DATA + 0x40 * domain as u64;
        data.resize(0x40 * domain + 8, 0);
        for (number, name) in FUNCTIONS.into_iter().enumerate() {
            let at = 0x40 * domain + 0x10 * number;
            // mov rax, [rip + …]; ret
            let next = TEXT + at as u64 + 7;
            let distance = (table + 8 * (number as u64 + 1)).wrapping_sub(next) as u32;
            code[at..at + 3].copy_from_slice(&[0x48, 0x8b, 0x05]);
            code[at + 3..at + 7].copy_from_slice(&distance.to_le_bytes());
            symbols.extend((names.len() as u32).to_le_bytes());
            symbols.extend([0x12, 0, 1, 0]);
            symbols.extend([TEXT + at as u64, 8].map(u64::to_le_bytes).as_flattened());
            names.extend(format!("{prefix}{name}\0").as_bytes());
            let raw = if domain == 2 { 0x80 } else { 0 };
            data.extend((OWN + raw + 0x10 * number as u64).to_le_bytes());
        }
    }
    data.resize(DATA_BYTES as usize, 0);
    let part = |name, kind, flags, address, link, bytes| Part { name, kind, flags, address, link, bytes };
    let parts = [
        part(".text", 1, 6, TEXT, 0, code),
        part(".data", 1, 3, DATA, 0, data),
        part(".dynsym", 11, 2, 0, 4, symbols),
        part(".dynstr", 3, 2, 0, 0, names),
    ];
    let loads = [
        Load { kind: 1, flags: 5, offset: 0, address: 0x40_0000, bytes: CODE + CODE_BYTES },
        Load { kind: 1, flags: 6, offset: CODE + CODE_BYTES, address: DATA, bytes: DATA_BYTES },
    ];
    build::file(&loads, &parts)
}

#[test]
fn inputs_of_the_fuzz_target_are_checked() {
    damage::replay("objects", "three-domains", &interpreter(), shared::check);
}

/// The input reaches the code that it is made for.
#[test]
fn the_input_s_table_is_found() {
    let (table, rules) = (Table::default().with_objects(true), KernelRules::of(Machine::X86_64, (6, 18)));
    let file = interpreter();
    let found = examine_avoiding(&file, "python3", &rules, &table, &BTreeSet::new());
    let objects = found.objects.expect("it is found");
    assert_eq!(objects.functions, [0, 1, 2, 3].map(|number| OWN + 0x10 * number));
    assert_eq!(objects.domains, [DATA + 8, DATA + 0x48]);
    assert!(objects.detours().is_some());
}

#[test]
fn seeds_of_objects_are_checked() {
    seeds::replay("objects", shared::check);
}

#[test]
fn seeds_of_attach_are_checked() {
    seeds::replay("attach", attach::check);
}

/// Found by the fuzzer: the program header of the code leads beyond the file.
#[test]
fn code_beyond_the_end_of_the_file_gets_no_probes() {
    let mut file = interpreter();
    // p_offset of the first program header.
    file[64 + 8..64 + 16].copy_from_slice(&(1_u64 << 50).to_le_bytes());
    shared::check(&file);
    let (table, rules) = (Table::default().with_objects(true), KernelRules::of(Machine::X86_64, (6, 18)));
    let found = examine_avoiding(&file, "python3", &rules, &table, &BTreeSet::new());
    assert!(found.plan.map_or(true, |plan| plan.sites.is_empty()));
}

/// A program that announces its samples: one probe with a semaphore in registers and memory, one without.
fn announcing() -> Vec<u8> {
    let note = |words: [u64; 3], texts: [&str; 3]| {
        let mut description: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        texts.iter().for_each(|text| description.extend([text.as_bytes(), b"\0"].concat()));
        let head = [8, description.len() as u32, 3].map(u32::to_le_bytes);
        description.resize(description.len().next_multiple_of(4), 0);
        [head.as_flattened(), b"stapsdt\0", &description].concat()
    };
    let alloc = note([TEXT + 0x10, 0x7000, DATA + 8], ["otel_memory", "alloc", "8@%rdi -4@16(%rsp) 8@$512"]);
    let notes = [alloc, note([TEXT + 0x40, 0x7000, 0], ["otel_memory", "free", "8@-0x10(%rbp)"])].concat();
    let part = |name, kind, flags, address, bytes| Part { name, kind, flags, address, link: 0, bytes };
    let parts = [
        part(".text", 1, 6, TEXT, vec![0x90; CODE_BYTES as usize]),
        part(".data", 1, 3, DATA, vec![0; DATA_BYTES as usize]),
        part(".note.stapsdt", 7, 0, 0, notes),
        part(".stapsdt.base", 1, 2, 0x7000, vec![0]),
    ];
    let loads = [
        Load { kind: 1, flags: 5, offset: 0, address: 0x40_0000, bytes: CODE + CODE_BYTES },
        Load { kind: 1, flags: 6, offset: CODE + CODE_BYTES, address: DATA, bytes: DATA_BYTES },
    ];
    build::file(&loads, &parts)
}

#[test]
fn inputs_of_usdt_are_checked() {
    damage::replay("usdt", "semaphore", &announcing(), usdt::check);
}

#[test]
fn seeds_of_usdt_are_checked() {
    seeds::replay("usdt", usdt::check);
}

/// The input reaches the code that it is made for.
#[test]
fn the_input_s_usdt_probes_are_found() {
    let found = crate::announced(&announcing(), &KernelRules::of(Machine::X86_64, (6, 18)));
    let found = found.expect("they can be used").expect("they are announced");
    let offsets: Vec<u64> = found.sites.iter().map(|planned| planned.site.offset).collect();
    assert_eq!(offsets, [CODE + 0x10, CODE + 0x40]);
}

#[test]
fn seeds_of_specs_are_checked() {
    seeds::replay("specs", specs::check);
}

/// Found by the fuzzer: the sections place the code at one offset of the file, the segments at another, beyond its end.
#[test]
fn code_that_is_not_where_segments_map_it_gets_no_probes() {
    let mut file = interpreter();
    // p_offset of the first program header.
    file[64 + 8..64 + 16].copy_from_slice(&0x500_u64.to_le_bytes());
    shared::check(&file);
    let (table, rules) = (Table::default().with_objects(true), KernelRules::of(Machine::X86_64, (6, 18)));
    let found = examine_avoiding(&file, "python3", &rules, &table, &BTreeSet::new());
    assert!(found.plan.map_or(true, |plan| plan.sites.is_empty()));
}

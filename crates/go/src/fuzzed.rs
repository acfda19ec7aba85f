//! Replays inputs of the fuzz target `go`, variants of them, and its seeds.

use crate::buckets::hash_of;

#[path = "../../elf/src/tests/build.rs"]
#[allow(dead_code, reason = "the tests of another crate need more of it")]
mod build;
#[path = "../../../fuzz/shared/damage.rs"]
mod damage;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;
#[path = "../../../fuzz/shared/go.rs"]
mod shared;

use build::{Load, Part};

/// Addresses of the function table, of the code, and of variables.
const TABLE: u64 = 0x40_2000;
const TEXT: u64 = 0x40_1000;
const BUCKETS: u64 = 0x50_0000;
const CYCLE: u64 = BUCKETS + 8;
const RATE: u64 = BUCKETS + 16;
const MODULE: u64 = 0x50_1000;
const FIRST: u64 = 0x60_0000;

/// A function table of Go 1.22: `main.list`, 0x100 bytes of code, in line 7 of `main.go`.
fn functions() -> Vec<u8> {
    const NAMES: &[u8] = b"\0main.list\0";
    let (names, units) = (72, 72 + 16);
    let (files, tables, functions) = (units + 8, units + 16, units + 32);
    let mut table = [&0xffff_fff1_u32.to_le_bytes()[..], &[0, 0, 1, 8]].concat();
    for word in [1, 1, TEXT, names, units, files, tables, functions] {
        table.extend(word.to_le_bytes());
    }
    table.extend(NAMES);
    table.resize(units as usize, 0);
    // The first file is at 0. Its name follows, then address tables with the number of the file (0) and the line (7).
    table.extend([0; 8]);
    table.extend(b"main.go\0");
    table.extend([0, 2, 0x80, 2, 0, 16, 0x80, 2, 0]);
    table.resize(functions as usize, 0);
    let entry = 16_u32;
    for number in [0, entry, 0x100, 0] {
        table.extend(number.to_le_bytes());
    }
    // Start, name, arguments, deferreturn, pcsp, pcfile, pcln, npcdata, cuOffset, startLine, and four bytes.
    for number in [0, 1, 0, 0, 0, 1, 5, 0, 0, 7, 0_u32] {
        table.extend(number.to_le_bytes());
    }
    table.resize(table.len() + 64, 0);
    table
}

/// The file. `data`: address of its variables, instead of a symbol for the program's description.
fn file(data: Option<u64>) -> Vec<u8> {
    let mut info = b"\xff Go buildinf:\x08\x02".to_vec();
    info.resize(32, 0);
    info.extend(b"\x08go1.22.1");
    let mut names = vec![0];
    let mut symbols = vec![0; 24];
    for (name, address) in [
        ("runtime.mbuckets", BUCKETS),
        ("runtime.mProfCycle", CYCLE),
        ("runtime.MemProfileRate", RATE),
        ("runtime.firstmoduledata", MODULE),
    ] {
        if data.is_some() && address == MODULE {
            continue;
        }
        symbols.extend((names.len() as u32).to_le_bytes());
        symbols.extend([1, 0, 1, 0]);
        symbols.extend([address, 8].map(u64::to_le_bytes).as_flattened());
        names.extend(name.as_bytes());
        names.push(0);
    }
    let part = |name, kind, address, link, bytes| Part { name, kind, flags: 2, address, link, bytes };
    let parts = [
        part(".text", 1, TEXT, 0, vec![0xcc; 0x100]),
        part(".gopclntab", 1, TABLE, 0, functions()),
        part(".go.buildinfo", 1, MODULE, 0, info),
        part(".symtab", 2, 0, 4 + 1, symbols),
        part(".strtab", 3, 0, 0, names),
        part(".data", 1, data.unwrap_or(MODULE), 0, vec![0; 0x40]),
    ];
    let load = Load { kind: 1, flags: 5, offset: 0, address: 0x40_0000, bytes: 0x1000 };
    build::file(&[load], &parts)
}

fn input(file: &[u8]) -> Vec<u8> {
    let mut input = [&0_u64.to_le_bytes()[..], &(file.len() as u32).to_le_bytes(), file].concat();
    let mut put = |address: u64, words: &[u64]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        shared::memory::piece(&mut input, address, &bytes);
    };
    put(BUCKETS, &[FIRST, 2, 1]);
    put(MODULE, &[TABLE, TABLE + 72]);
    put(MODULE + 176, &[TEXT]);
    put(MODULE + 320, &[0x40_3000]);
    let stack = [TEXT + 8, TEXT + 0x40];
    let second = FIRST + 0x100;
    for (address, next, size) in [(FIRST, second, 64), (second, 0, 4096)] {
        put(address, &[0, next, 1, hash_of(&stack, size), size, stack.len() as u64, stack[0], stack[1]]);
        put(address + 64, &[5, 2, 5 * size, 2 * size]);
    }
    input
}

#[test]
fn seeds_of_go_are_checked() {
    seeds::replay("go", shared::check);
}

mod long {
    use super::*;

    #[test]
    fn inputs_of_the_fuzz_target_are_checked() {
        damage::replay("go", "two-buckets", &input(&file(None)), shared::check);
        // Variables at the very end of the address space.
        damage::replay("go", "data-at-the-end", &input(&file(Some(u64::MAX - 0x48))), shared::check);
    }
}

/// The input exercises what it was made for.
#[test]
fn the_input_s_heap_is_read() {
    use std::time::{Duration, Instant};

    let file = file(None);
    let program = crate::Program::find(&file).expect("it is understood").expect("it is Go's");
    let memory = shared::memory::Pieces::parse(&input(&file)[12 + file.len()..]);
    let deadline = Instant::now() + Duration::from_secs(60);
    let heap = crate::Heap::read(&program, 0, &memory, crate::Moments::One, deadline).expect("it is sound");
    assert_eq!(
        heap.buckets.iter().map(|bucket| (bucket.size, bucket.objects)).collect::<Vec<_>>(),
        [(64, 3), (4096, 3)]
    );
    let function = program.functions.at(&file, &heap.places, TEXT + 8).expect("it has a name");
    assert_eq!((function.name.as_str(), function.file.as_str(), function.line), ("main.list", "main.go", 7));
}

use heapbpf_testing::skipped;

use super::*;
use crate::object_table::Detour;
use crate::placement::{KernelRules, Machine};
use crate::plan::examine_avoiding;
use crate::table::Table;

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("our own digits")).collect()
}

fn found(address: u64, hex: &str, slots: &[(u64, u64)]) -> BTreeSet<u64> {
    let slots: HashMap<u64, u64> = slots.iter().copied().collect();
    references(address, &bytes(hex), &|slot| slots.get(&slot).copied())
}

/// `PyObject_Malloc` and `PyObject_Calloc` of Debian's 3.11. The table is at 0x959f40, and the first function contains
/// a copy of the function at 0x4fb450.
#[test]
fn code_with_copies_refers_to_table_and_function() {
    let malloc =
        found(0x4f_b350, "534885ff0f8865adf2ff488b05e7eb45004889fb488b3dd5eb4500483d50b44f000f85c3000000", &[]);
    assert!([0x95_9f40, 0x95_9f48, 0x4f_b450].iter().all(|it| malloc.contains(it)), "{malloc:x?}");
    let calloc = found(
        0x57_f5c0,
        "4885f6741848b8ffffffffffffff7f31d248f7f64839f80f82aa18edff4889f24889fe488b3d56a93d00ff2560a93d00",
        &[],
    );
    assert!(calloc.contains(&0x95_9f50) && !calloc.contains(&0x95_9f48), "{calloc:x?}");
}

/// `PyObject_Malloc` of 3.8 in a library: the table is a variable.
#[test]
fn code_of_a_library_refers_to_a_variable() {
    let malloc = found(0xe_1b10, "4889fe4885ff7810488b3de10c2500ff25e30c25000f1f0031c0c3", &[]);
    assert_eq!(malloc, BTreeSet::from([0x33_2800, 0x33_2808]));
}

/// The same for 3.12: the table is in `_PyRuntime`, whose address is in the global offset table.
#[test]
fn code_of_a_library_refers_to_the_runtime_through_a_slot() {
    const HEX: &str = "4889fe4885ff7818488b05c1483700488bb8b0000000ffa0b80000000f1f400031c0c3";
    let malloc = found(0x1c_f430, HEX, &[(0x54_3d00, 0x64_3340)]);
    assert!(malloc.contains(&0x64_33f0) && malloc.contains(&0x64_33f8), "{malloc:x?}");
    // Without the loader's value, only the slot itself is found.
    assert_eq!(found(0x1c_f430, HEX, &[]), BTreeSet::from([0x54_3d00]));
}

#[test]
fn a_register_that_was_overwritten_is_not_believed() {
    // lea rax, [rip]; mov rax, [rax+8]; mov rcx, [rax+16]
    assert_eq!(found(0x1000, "488d0500000000488b4008488b4810", &[]), BTreeSet::from([0x1007, 0x100f]));
}

#[test]
fn one_structure_agrees_with_all_functions() {
    let all = |words: [&[u64]; 4]| agreeing(&words.map(|words| words.iter().copied().collect()));
    assert_eq!(all([&[0x108, 0x208], &[0x110], &[0x118, 7], &[0x120]]), BTreeSet::from([0x100]));
    assert_eq!(all([&[0x108], &[0x110], &[0x118], &[]]), BTreeSet::new());
    assert_eq!(all([&[0, 3, u64::MAX], &[16], &[u64::MAX], &[0]]), BTreeSet::new());
}

fn table() -> ObjectTable {
    ObjectTable {
        domains: vec![0x9000],
        functions: [0x1000, 0x1100, 0x1200, 0x1300],
        has_copies: true,
        raw: None,
        code: Vec::new(),
        data: Vec::new(),
        unused: Some(0x2010),
    }
}

#[test]
fn detours_jump_to_the_functions() {
    let detours = table().detours().expect("there is space");
    for (detour, function) in detours.into_iter().zip(table().functions) {
        let jump = Decoder::with_ip(64, &Detour::CODE, detour.address, DecoderOptions::NONE).decode();
        assert_eq!((jump.mnemonic(), jump.ip_rel_memory_address(), jump.len()), (Mnemonic::Jmp, detour.word(), 6));
        assert_eq!((detour.function, detour.word() % 8), (function, 0), "a word is written at once");
        assert!(detour.address >= 0x2010 && detour.word() + 8 <= detour.address + JUMP_BYTES);
    }
    assert_eq!(ObjectTable { unused: None, ..table() }.detours(), None);
}

#[test]
fn pointers_are_found_in_whole_tables_only() {
    let words = [0, 0x1010, 0x1110, 0x1210, 0x1310, 0x1010, 0x1110, 0x1010, 0x1110, 0x1210, 0x1310];
    assert_eq!(table().pointers_in(&words, 0x10).collect::<Vec<_>>(), [1, 7]);
    assert_eq!(table().pointers_in(&words, 0).count(), 0);
    assert_eq!(table().pointers_in(&words[8..], 0x10).count(), 0);
}

/// The interpreters of this machine.
fn interpreters() -> Vec<std::path::PathBuf> {
    let mut found = vec!["/usr/bin/python3".into()];
    let versions = std::env::home_dir().unwrap_or_default().join(".pyenv/versions");
    for version in std::fs::read_dir(versions).into_iter().flatten().flatten() {
        let files = std::fs::read_dir(version.path().join("lib")).into_iter().flatten().flatten();
        found.extend(files.map(|file| file.path()).filter(|path| path.to_string_lossy().ends_with(".so.1.0")));
    }
    found
}

/// The functions according to symbols, where there are any. The search does not use these.
fn by_symbols(image: &FileImage) -> Option<[u64; FUNCTIONS]> {
    let address = |wanted: &str| image.functions().find(|(name, _)| *name == wanted).map(|(_, symbol)| symbol.address);
    let names = ["_PyObject_Malloc", "_PyObject_Calloc", "_PyObject_Realloc", "_PyObject_Free"];
    let [malloc, calloc, realloc, free] = names.map(address);
    Some([malloc?, calloc?, realloc?, free?])
}

#[test]
fn installed_interpreters_are_planned_as_their_symbols_say() {
    let rules = KernelRules::of(Machine::X86_64, (6, 1));
    let mut seen = 0;
    for path in interpreters() {
        let Ok(file) = std::fs::File::open(&path) else { continue };
        let image = FileImage::read_if(&file, "", |_| true).expect("an ELF file");
        let is_old = path.to_string_lossy().contains("python2");
        let objects = match image.has_objects().then(|| find(&image, &file)) {
            Some(Ok(objects)) => objects,
            other => {
                assert!(is_old || other.is_none(), "{}: {other:?}", path.display());
                continue;
            }
        };
        seen += 1;
        assert!(by_symbols(&image).is_none_or(|known| known == objects.functions), "{}", path.display());
        assert_eq!(objects.domains.len(), 2, "{}", path.display());
        let examine = |table: &Table| examine_avoiding(&file, "", &rules, table, &BTreeSet::new());
        let planned = examine(&Table::default().with_objects(true));
        assert_eq!(planned.objects, Some(objects));
        let plan = planned.plan.expect("it has an allocator");
        // 3.13 contains mimalloc, which it only calls without the global interpreter lock.
        let has_another = plan.allocator != "Python objects";
        let mut names: Vec<&str> = plan.sites.iter().map(|site| &*site.function).collect();
        names.retain(|name| name.starts_with("python "));
        names.sort_unstable();
        assert_eq!(names, ["python calloc", "python free", "python malloc", "python realloc"]);
        assert!(plan.allocator.contains("Python objects"), "{}", plan.allocator);
        assert!(has_another || plan.missing.is_empty(), "{}: {:?}", path.display(), plan.missing);
        let unasked = examine(&Table::default());
        assert!(unasked.plan.is_err() != has_another && unasked.objects.is_none());
    }
    if seen == 0 {
        skipped("there is no CPython");
    }
}

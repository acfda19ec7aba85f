//! The table of CPython's object allocator, in a file that the fuzzer controls.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use heapbpf_probes::{KernelRules, Machine, Table, examine_avoiding};

/// The table of functions, the same for all files.
static TABLE: LazyLock<Table> = LazyLock::new(|| Table::default().with_objects(true));

/// Checks a file: the functions found are in its code, and probes are within the file.
pub fn check(data: &[u8]) {
    let file = data.to_vec();
    let rules = KernelRules::of(Machine::X86_64, (6, 18));
    let found = examine_avoiding(&file, "python3", &rules, &TABLE, &BTreeSet::new());
    if let Ok(plan) = &found.plan {
        assert!(plan.sites.iter().all(|planned| planned.site.offset < data.len() as u64));
    }
    let Some(objects) = found.objects else { return };
    assert!(objects.functions.iter().all(|function| objects.code.iter().any(|code| code.contains(function))));
    let words: Vec<u64> =
        data.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect();
    assert!(objects.pointers_in(&words, 0).all(|at| words[at..at + 4] == objects.functions));
    for detour in objects.detours().into_iter().flatten() {
        assert!(objects.functions.contains(&detour.function) && detour.word() % 8 == 0);
    }
}

//! Plans for allocators that a resolver (IFUNC) chooses when the program starts.

use super::tests::{RULES, analyse, compiled};
use super::*;

/// A library whose `malloc` is the function that `choose` returns.
const CHOSEN: &str = "typedef unsigned long n;\n#define KEEP __attribute__((noinline, noclone, used))\n\
    static char heap[4096]; static n used; __attribute__((visibility(\"hidden\"))) volatile int level = 1;\n\
    static KEEP void *quick(n size) { used += size; return heap + used; }\n\
    static KEEP void *careful(n size) { if (used + size > 4096) return 0; used += size; return heap + used; }\n\
    CHOOSE\n\
    void *malloc(n) __attribute__((ifunc(\"choose\")));\n\
    KEEP void free(void *block) { if (block) used--; }\n";

fn planned(choose: &str) -> Option<AllocatorFile> {
    let directory = tempfile::tempdir().unwrap();
    let build = ["cc -O2 -fPIC -shared -nostdlib -fcf-protection=none source.c -o lib.so"];
    let image = compiled(directory.path(), "lib.so", &CHOSEN.replace("CHOOSE", choose), &build)?;
    Some(analyse(&image, &RULES(), &Table::default()).unwrap())
}

#[test]
fn every_choice_of_a_resolver_is_probed() {
    let Some(plan) = planned("KEEP void *(*choose(void))(n) { return level ? quick : careful; }") else { return };
    assert_eq!(plan.allocator, "unknown malloc");
    let chosen: Vec<_> = plan.sites.iter().filter(|site| site.function == "malloc").collect();
    assert_eq!(chosen.len(), 2, "{:?}", plan.sites);
    assert!(chosen.iter().all(|site| site.reason.contains("IFUNC") && site.return_needed));
    assert_ne!(chosen[0].site.offset, chosen[1].site.offset);
    assert!(plan.missing.is_empty(), "{:?}", plan.missing);
    assert!(plan.sites.iter().any(|site| site.function == "free" && !site.reason.contains("IFUNC")));
}

#[test]
fn choices_that_the_code_does_not_tell_are_missing() {
    let table = "static void *(*const table[])(n) = {quick, careful};\n\
        KEEP void *(*choose(void))(n) { return table[level]; }";
    let Some(plan) = planned(table) else { return };
    let missing: Vec<_> = plan.missing.iter().map(|missing| missing.what.as_str()).collect();
    assert_eq!(missing, ["malloc"]);
    assert!(plan.missing[0].why.contains("not all possible choices can be found"), "{}", plan.missing[0].why);
    assert!(plan.sites.iter().all(|site| site.function != "malloc"));
}

#[test]
fn choices_in_other_files_are_covered_there_or_missing() {
    let imported = "extern void *NAME(n); KEEP void *(*choose(void))(n) { return level ? quick : NAME; }";
    let Some(plan) = planned(&imported.replace("NAME", "je_malloc")) else { return };
    assert_eq!(plan.covered, [Covered { function: "malloc".to_owned(), by: "je_malloc".to_owned() }]);
    assert!(plan.missing.is_empty() && plan.sites.iter().any(|site| site.function == "malloc"), "{:?}", plan.missing);
    let Some(plan) = planned(&imported.replace("NAME", "strange_take")) else { return };
    assert!(plan.covered.is_empty());
    assert_eq!(plan.missing, [Missing::new("malloc", "may be strange_take of another file (IFUNC)")]);
}

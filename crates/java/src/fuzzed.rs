//! Replays inputs of the fuzz target `java`, variants of them, and its seeds.

use crate::testing::{CALL_STUB_RETURN, HEAP, Sparse, jvm, put_blob, put_method};

#[path = "../../../fuzz/shared/damage.rs"]
mod damage;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;
#[path = "../../../fuzz/shared/java.rs"]
mod shared;

const STACK: u64 = 0x7fff_0000_0000;
const METHOD: u64 = 0x8000_0000;

/// The memory of a JVM with an interpreted method called by compiled code, which was called by native code.
fn memory() -> Sparse {
    let mut memory = jvm();
    put_blob(&mut memory, 0, 0x400, 0, "Interpreter");
    put_blob(&mut memory, 0x1_0000, 0x400, 0, "StubRoutines (1)");
    let compiled = put_blob(&mut memory, 0x1_0400, 0x400, 6, "nmethod");
    put_method(&mut memory, METHOD, &[8 << 3 | 5, 0xff, 20, 6, 0]);
    memory.word(compiled + 112, METHOD);
    // One place; its scope is the compiled method itself.
    let (places, scopes, methods) = (0x200_u32, 0x240_u32, 0x280_u32);
    memory.int(compiled + 268, places);
    memory.int(compiled + 272, places + 16);
    memory.int(compiled + 260, methods);
    memory.word(compiled + 120, compiled + u64::from(scopes));
    memory.int(compiled + u64::from(places), 0x100);
    memory.int(compiled + u64::from(places) + 4, 1);
    memory.put(compiled + u64::from(scopes) + 1, &[0, 1, 5]);
    memory.word(compiled + u64::from(methods), METHOD);
    // The interpreted frame and its callers.
    let fp = STACK + 0x80;
    for (address, word) in [
        (fp - 8, fp + 16),
        (fp - 24, METHOD),
        (fp - 64, METHOD + 0x100 + 48 + 3),
        (fp, STACK + 0x200),
        (fp + 8, compiled + 0x170 + 0x80),
        (fp + 16 + 48 - 16, STACK + 0x200),
        (fp + 16 + 48 - 8, CALL_STUB_RETURN),
        (STACK + 0x200, 0),
        (STACK + 0x208, 0x40_0000),
    ] {
        memory.word(address, word);
    }
    memory
}

#[test]
fn seeds_of_java_are_checked() {
    seeds::replay("java", shared::check);
}

#[test]
fn inputs_of_the_fuzz_target_are_checked() {
    let mut input: Vec<u8> = [HEAP + 0x100, STACK, STACK + 0x80].into_iter().flat_map(u64::to_le_bytes).collect();
    for (address, bytes) in memory().runs() {
        shared::memory::piece(&mut input, address, &bytes);
    }
    damage::replay("java", "interpreted-and-compiled", &input, shared::check);
}

/// The input exercises what it was made for.
#[test]
fn the_input_s_stack_is_walked() {
    let memory = memory();
    let vm = crate::testing::vm_in(&memory);
    let method = crate::Method::read(&memory, &vm, METHOD).expect("a method");
    assert_eq!((method.name.as_str(), method.line(8)), ("a.b.C.first", Some(5)));
    let blob = crate::Blob::find(&memory, &vm, HEAP + 0x1_0400 + 16 + 0x1f0).expect("it is readable").expect("there");
    let scopes = crate::scopes::scopes(&memory, &vm, &blob, blob.code + 0x80).expect("they are sound");
    assert_eq!(scopes, [crate::Scope { method: METHOD, bytecode: Some(4) }]);
}

//! A made-up JVM, and results for hostile ones.

use crate::code::{Blob, Kind};
use crate::frames::{NotLeft, Registers, Runs, leave, leave_otherwise};
use crate::layout::Vm;
use crate::memory::{ReadError, Unsupported};
use crate::method::Method;
use crate::scopes::{Scope, scopes};
use crate::testing::{
    CALL_STUB_RETURN, HEAP, HEAP_END, MAP, STRIDE, STRUCTS, Sparse, jvm, put_blob, put_method, tables, variable, vm_in,
};

#[test]
fn a_jvm_describes_itself() {
    let vm = vm_in(&jvm());
    assert_eq!((vm.layout.version, vm.release.as_str()), (17, "17.0.15+631m"), "nothing but what versions have");
    assert_eq!(vm.heap(HEAP).map(|heap| (heap.start, heap.end, heap.shift)), Some((HEAP, HEAP_END, 7)));
    assert_eq!(vm.heap(HEAP_END), None);
    assert_eq!(Vm::layout(&jvm(), &tables()).map(|(_, release)| release), Ok(vm.release));
}

#[test]
fn what_is_not_understood_is_refused() {
    let of = |change: &dyn Fn(&mut Sparse)| {
        let mut memory = jvm();
        change(&mut memory);
        Vm::read(&memory, &tables()).expect_err("it is refused")
    };
    assert_eq!(of(&|memory| memory.int(0x9010, 8)), Unsupported::Version(8));
    assert_eq!(of(&|memory| memory.int(0x9010, 99)), Unsupported::Version(99));
    assert_eq!(of(&|memory| memory.word(0x9000, 0)), Unsupported::NotReady);
    assert_eq!(of(&|memory| memory.word(variable("StructEntryArrayStride"), 0)), Unsupported::NotReady);
    // Skips the first entry, which describes a heap's memory.
    assert_eq!(of(&|memory| memory.word(variable("Structs"), STRUCTS + STRIDE)), Unsupported::Lacks("_memory"));
}

#[test]
fn tables_that_lie_are_refused() {
    let of = |changes: &[(u64, u64)]| {
        let mut memory = jvm();
        changes.iter().for_each(|(address, word)| memory.word(*address, *word));
        Vm::read(&memory, &tables()).expect_err("it is refused")
    };
    let tables_are_bad = Unsupported::Malformed("tables");
    assert_eq!(of(&[(variable("StructEntryArrayStride"), 1 << 40)]), tables_are_bad);
    assert_eq!(of(&[(variable("StructEntryTypeNameOffset"), 41)]), tables_are_bad);
    assert_eq!(of(&[(variable("StructEntryTypeNameOffset"), u64::MAX)]), tables_are_bad);
    assert_eq!(of(&[(variable("Structs"), 0x7777_0000)]), Unsupported::Unreadable);
    assert_eq!(of(&[(variable("Structs"), u64::MAX - 7)]), Unsupported::Unreadable);
    let heaps_are_bad = Unsupported::Malformed("code heaps");
    assert_eq!(of(&[(0x9100, 1 << 20)]), heaps_are_bad);
    assert_eq!(of(&[(0xa000 + 16, HEAP - 1)]), heaps_are_bad, "it ends before it begins");
    assert_eq!(of(&[(0xa000 + 16, u64::MAX)]), heaps_are_bad);
    assert_eq!(of(&[(0xa000 + 256, 64)]), heaps_are_bad);
    assert_eq!(of(&[(0x9200, 0)]), Unsupported::Unreadable);
}

#[test]
fn a_table_without_an_end_ends() {
    let mut memory = jvm();
    // Entries of eight bytes, in which all columns are the same word.
    for name in ["TypeName", "FieldName", "IsStatic", "Offset", "Address"] {
        memory.word(variable(&format!("StructEntry{name}Offset")), 0);
    }
    memory.word(variable("StructEntryArrayStride"), 8);
    memory.word(variable("Structs"), 0x100_0000);
    (0..1 << 15).for_each(|number| memory.word(0x100_0000 + number * 8, 0x5_0000));
    assert_eq!(Vm::read(&memory, &tables()), Err(Unsupported::Malformed("tables")));
}

#[test]
fn code_is_found_by_the_map_of_segments() {
    let mut memory = jvm();
    let interpreter = put_blob(&mut memory, 0, 0x1_0000, 0, "Interpreter");
    put_blob(&mut memory, 0x1_0000, 0x400, 0, "StubRoutines (1)");
    let compiled = put_blob(&mut memory, 0x1_0400, 0x400, 6, "nmethod");
    memory.word(compiled + 112, 0x1234_0000);
    let vm = vm_in(&memory);
    let at = |address| Blob::find(&memory, &vm, address);
    let kind = |address| at(address).expect("it is readable").map(|blob| (blob.kind, blob.start));
    assert_eq!(kind(HEAP + 0xfff0), Some((Kind::Interpreter, interpreter)), "many steps back");
    assert_eq!(kind(HEAP + 0x1_0100).map(|(kind, _)| kind), Some(Kind::Stub));
    assert_eq!(kind(HEAP + 0x1_0500), Some((Kind::Compiled, compiled)));
    assert_eq!(kind(HEAP + 0x2_0000), None, "nothing is there");
    assert_eq!(kind(HEAP_END), None);
    let blob = at(compiled + 0x200).expect("it is readable").expect("it is there");
    assert_eq!((blob.frame_bytes, blob.method, blob.code), (48, 0x1234_0000, compiled + 0x170));
    // Another method in the same place, and then none.
    memory.int(compiled + 304, 7);
    assert_ne!(Blob::read(&memory, &vm, compiled).map(|blob| blob.check), Ok(blob.check));
    memory.put(compiled - 8, &[0]);
    assert_eq!(Blob::find(&memory, &vm, compiled + 0x200), Ok(None));
}

#[test]
fn a_code_heap_that_lies_is_not_believed() {
    let mut memory = jvm();
    let compiled = put_blob(&mut memory, 0x400, 0x400, 6, "nmethod");
    let vm = vm_in(&memory);
    let malformed = Err(ReadError::Malformed);
    // Goes back beyond the start.
    memory.put(MAP + 2, &[200]);
    assert_eq!(Blob::find(&memory, &vm, HEAP + 0x100), malformed);
    // A blob that ends before the address, one that ends outside of the heap, and code outside of the blob.
    memory.int(compiled + 12, 16);
    assert_eq!(Blob::find(&memory, &vm, compiled + 0x200), malformed);
    memory.int(compiled + 12, u32::MAX);
    assert_eq!(Blob::find(&memory, &vm, compiled + 0x200), malformed);
    memory.int(compiled + 12, 0x3f0);
    memory.word(compiled + 32, 8);
    assert_eq!(Blob::find(&memory, &vm, compiled + 0x200), malformed);
    // An impossible frame size counts as none.
    memory.word(compiled + 32, compiled + 0x170);
    memory.int(compiled + 28, u32::MAX);
    assert_eq!(Blob::find(&memory, &vm, compiled + 0x200).map(|blob| blob.map(|blob| blob.frame_bytes)), Ok(Some(0)));
    memory.word(compiled + 96, 0x4444_4444_0000);
    assert_eq!(Blob::find(&memory, &vm, compiled + 0x200), Err(ReadError::Unreadable));
}

/// A stack at 0x100 with consecutive values: the word at 0x100 is 0x1000, the next one 0x1001.
fn counting(address: u64) -> Result<u64, ()> {
    (0x100..0x200).contains(&address).then(|| 0x1000 + (address - 0x100) / 8).ok_or(())
}

#[test]
fn frames_of_fixed_size_end_with_the_return_address() {
    let mut memory = jvm();
    let compiled = put_blob(&mut memory, 0, 0x400, 6, "nmethod");
    let vm = vm_in(&memory);
    let blob = Blob::read(&memory, &vm, compiled).expect("it is readable");
    let at = Registers { ip: compiled + 0x200, sp: 0x100, fp: None };
    let left = leave(&vm, &blob, at, &mut counting);
    let caller = Registers { ip: 0x1005, sp: 0x130, fp: Some(0x1004) };
    assert_eq!(left, Ok((Runs::Compiled { pc: compiled + 0x200 }, caller)));
    assert_eq!(leave(&vm, &blob, Registers { sp: 0x1f0, ..at }, &mut counting), Err(NotLeft::Stack(())));
    assert_eq!(leave(&vm, &blob, Registers { sp: u64::MAX - 8, ..at }, &mut counting), Err(NotLeft::Implausible));
    memory.int(compiled + 28, 1);
    let blob = Blob::read(&memory, &vm, compiled).expect("it is readable");
    assert_eq!(leave(&vm, &blob, at, &mut counting), Err(NotLeft::Implausible));
}

#[test]
fn a_frame_whose_code_is_no_longer_valid_has_its_true_return_address() {
    let mut memory = jvm();
    let compiled = put_blob(&mut memory, 0, 0x400, 6, "nmethod");
    memory.word(compiled + 128, compiled + 0x300);
    memory.int(compiled + 300, 16);
    let vm = vm_in(&memory);
    let blob = Blob::read(&memory, &vm, compiled).expect("it is readable");
    let mut stack = |address| if address == 0x110 { Ok(compiled + 0x210) } else { counting(address) };
    let pc_of = |ip, stack: &mut dyn FnMut(u64) -> Result<u64, ()>| {
        leave(&vm, &blob, Registers { ip, sp: 0x100, fp: None }, stack).map(|(runs, _)| runs)
    };
    assert_eq!(pc_of(compiled + 0x300, &mut stack), Ok(Runs::Compiled { pc: compiled + 0x210 }));
    assert_eq!(pc_of(compiled + 0x300, &mut counting), Ok(Runs::Compiled { pc: compiled + 0x300 }), "not written yet");
    assert_eq!(pc_of(compiled + 0x2ff, &mut stack), Ok(Runs::Compiled { pc: compiled + 0x2ff }));
}

#[test]
fn interpreted_frames_are_left_by_frame_pointer() {
    let mut memory = jvm();
    let start = put_blob(&mut memory, 0, 0x400, 0, "Interpreter");
    let vm = vm_in(&memory);
    let blob = Blob::read(&memory, &vm, start).expect("it is readable");
    let with = |sender, fp| {
        let mut stack = move |address| if address == 0x178 { Ok(sender) } else { counting(address) };
        leave(&vm, &blob, Registers { ip: start + 0x200, sp: 0x110, fp }, &mut stack)
    };
    let runs = Runs::Interpreted { method: 0x100d, bytecode: 0x1008 };
    let caller = Registers { ip: 0x1011, sp: 0x198, fp: Some(0x1010) };
    assert_eq!(with(0x198, Some(0x180)), Ok((runs, caller)));
    for (sender, fp) in [
        (0x188, Some(0x180)),
        (0x180 + 0x10_0000, Some(0x180)),
        (0x199, Some(0x180)),
        (0x198, None),
        (0x198, Some(0x181)),
        (0x198, Some(0x118)),
        (0x198, Some(u64::MAX - 7)),
    ] {
        assert_eq!(with(sender, fp), Err(NotLeft::Implausible), "{sender:#x} {fp:?}");
    }
}

#[test]
fn stubs_are_left_by_size_or_by_frame_pointer() {
    let mut memory = jvm();
    let stub = put_blob(&mut memory, 0x1_0000, 0x400, 0, "StubRoutines (1)");
    let sized = put_blob(&mut memory, 0x2_0000, 0x400, 4, "RuntimeStub - new");
    let vm = vm_in(&memory);
    let blob = |start| Blob::read(&memory, &vm, start).expect("it is readable");
    let at = |ip| Registers { ip, sp: 0x100, fp: Some(0x140) };
    let by_pointer = Registers { ip: 0x1009, sp: 0x150, fp: Some(0x1008) };
    let by_size = Registers { ip: 0x1003, sp: 0x120, fp: Some(0x1002) };
    assert_eq!(leave(&vm, &blob(stub), at(CALL_STUB_RETURN), &mut counting), Ok((Runs::CallStub, by_pointer)));
    assert_eq!(leave(&vm, &blob(stub), at(stub + 0x200), &mut counting), Ok((Runs::Stub, by_pointer)));
    assert_eq!(leave(&vm, &blob(sized), at(sized + 0x200), &mut counting), Ok((Runs::Stub, by_size)));
    assert_eq!(leave_otherwise(&blob(sized), at(sized + 0x200), &mut counting), Ok(by_pointer));
    assert_eq!(leave_otherwise(&blob(stub), at(stub + 0x200), &mut counting), Err(NotLeft::Implausible));
    let below = Registers { fp: Some(0xf8), ..at(stub) };
    assert_eq!(leave(&vm, &blob(stub), below, &mut counting), Err(NotLeft::Implausible));
}

/// Places at 0x10 (scope 1) and 0x20 (scope 4) of the code; scope 4 is inlined into scope 1.
fn with_scopes(memory: &mut Sparse) -> u64 {
    let compiled = put_blob(memory, 0, 0x800, 6, "nmethod");
    memory.word(compiled + 112, 0xaaaa);
    memory.int(compiled + 268, 0x400);
    memory.int(compiled + 272, 0x400 + 4 * 16);
    memory.int(compiled + 260, 0x500);
    memory.word(compiled + 120, compiled + 0x600);
    for (number, (offset, scope)) in (0..).zip([(u32::MAX, 0), (0x10, 1), (0x20, 4), (0x7fff_ffff, 0)]) {
        memory.int(compiled + 0x400 + number * 16, offset);
        memory.int(compiled + 0x400 + number * 16 + 4, scope);
    }
    memory.put(compiled + 0x600, &[0, 0, 1, 6, 1, 2, 0]);
    memory.word(compiled + 0x500, 0xaaaa);
    memory.word(compiled + 0x508, 0xbbbb);
    compiled
}

#[test]
fn inlined_methods_are_found_at_their_places() {
    let mut memory = jvm();
    let compiled = with_scopes(&mut memory);
    let vm = vm_in(&memory);
    let of = |memory: &Sparse, distance| {
        let blob = Blob::read(memory, &vm, compiled).expect("it is readable");
        scopes(memory, &vm, &blob, compiled + 0x170 + distance)
    };
    let outer = |bytecode| Scope { method: 0xaaaa, bytecode };
    assert_eq!(of(&memory, 0x10), Ok(vec![outer(Some(5))]), "scope 1: no caller, method 1, bytecode 5");
    assert_eq!(of(&memory, 0x18), Ok(vec![Scope { method: 0xbbbb, bytecode: None }, outer(Some(5))]));
    assert_eq!(of(&memory, 0x21), Ok(vec![outer(None)]), "nothing is described there");
    // A scope inlined into itself.
    memory.put(compiled + 0x604, &[4]);
    assert_eq!(of(&memory, 0x20).map(|scopes| scopes.len()), Ok(64));
    // No method, and more places than possible.
    memory.put(compiled + 0x604, &[1, 0]);
    assert_eq!(of(&memory, 0x20), Err(ReadError::Malformed));
    memory.int(compiled + 272, 0x400 - 16);
    assert_eq!(of(&memory, 0x20), Err(ReadError::Malformed));
    memory.int(compiled + 272, u32::MAX);
    assert_eq!(of(&memory, 0x20), Err(ReadError::Malformed));
}

#[test]
fn methods_have_names_files_and_lines() {
    let mut memory = jvm();
    // Bytecode 0 is line 7; 2 is line 10; 12 is line 9.
    let lines = [7, 2 << 3 | 3, 0xff, 20, 1, 0];
    put_method(&mut memory, 0x40_0000, &lines);
    let vm = vm_in(&memory);
    let method = Method::read(&memory, &vm, 0x40_0000).expect("it is readable");
    assert_eq!((method.name.as_str(), method.file.as_deref()), ("a.b.C.first", Some("a/b/C.java")));
    assert_eq!([0, 1, 2, 11, 12, 19].map(|index| method.line(index)), [7, 7, 10, 10, 9, 9].map(Some));
    let first = 0x40_0100 + 48;
    assert_eq!(
        [first - 1, first, first + 19, first + 20].map(|at| method.index_of(at)),
        [None, Some(0), Some(19), None]
    );
    assert_eq!(Method::check(&memory, &vm, 0x40_0000), Ok(method.check));
    assert!(method.held_bytes() > 20);
    // A hidden class, one without a package, and a file without a name.
    let mut named = |class: &str| {
        memory.short(0x40_0704, class.len() as u16);
        memory.put(0x40_0706, class.as_bytes());
        memory.short(0x40_0400 + 54, 0);
        let method = Method::read(&memory, &vm, 0x40_0000).expect("it is readable");
        (method.name, method.file)
    };
    assert_eq!(named("a/C$$Lambda$14/0x0000000800c03000"), ("a.C$$Lambda$14.first".into(), None));
    assert_eq!(named("Main$$Lambda+0x00007f1"), ("Main$$Lambda.first".into(), None));
}

#[test]
fn methods_that_lie_are_not_believed() {
    let mut memory = jvm();
    put_method(&mut memory, 0x40_0000, &[7, 0xff, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255]);
    let vm = vm_in(&memory);
    let of = |memory: &Sparse, address| Method::read(memory, &vm, address).map(|method| method.name);
    // Line numbers that continue past their end are not used.
    assert_eq!(Method::read(&memory, &vm, 0x40_0000).map(|method| method.line(3)), Ok(None));
    assert_eq!([of(&memory, 0), of(&memory, 0x40_0001)], [Err(ReadError::Unreadable), Err(ReadError::Malformed)]);
    assert_eq!(of(&memory, u64::MAX - 7), Err(ReadError::Unreadable));
    // A name outside of the pool, an empty one, and one that is not a string.
    memory.short(0x40_0100 + 34, 3);
    assert_eq!(of(&memory, 0x40_0000), Err(ReadError::Malformed));
    memory.short(0x40_0100 + 34, 1);
    memory.put(0x40_0746, b"\xfft\x1b");
    assert_eq!(of(&memory, 0x40_0000).as_deref(), Ok("a.b.C.\\xfft\x1bst"));
    memory.short(0x40_0744, 0);
    assert_eq!(of(&memory, 0x40_0000), Err(ReadError::Malformed));
    memory.short(0x40_0744, u16::MAX);
    assert_eq!(of(&memory, 0x40_0000), Err(ReadError::Malformed), "the name goes on into nothing");
    // Its constant part is shorter than its bytecodes.
    memory.short(0x40_0744, 5);
    memory.int(0x40_0100 + 24, 1);
    assert_eq!(of(&memory, 0x40_0000), Err(ReadError::Malformed));
}

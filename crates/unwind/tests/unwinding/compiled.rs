//! Stacks of compiled C code in which every frame is known.

use heapbpf_testing::own_process::{Library, OwnCapture, OwnProcess, exported_name, unwind};
use heapbpf_unwind::raw::{Completeness, Reason};

const TRUTH: &str = include_str!("truth.c");

/// Compiler flags that Debian's software and ours use.
const FLAVOURS: [&[&str]; 7] = [
    &["-O2", "-fomit-frame-pointer"],
    &["-O0"],
    &["-O2", "-fno-omit-frame-pointer"],
    &["-O3", "-pg"],
    &["-O2", "-fomit-frame-pointer", "-Wl,--no-eh-frame-hdr"],
    &["-O2", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-fno-omit-frame-pointer"],
    // Call frame information in `.debug_frame` only.
    &["-O2", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-fomit-frame-pointer", "-g"],
];

fn names(capture: &OwnCapture) -> (Vec<String>, Completeness) {
    let process = OwnProcess::read().expect("/proc");
    let stack = unwind(&process, capture);
    (stack.frames.iter().map(|frame| exported_name(frame.address)).collect(), stack.completeness.clone())
}

fn each_flavour(check: impl Fn(&Library, &[&str])) {
    for flags in FLAVOURS {
        if let Some(library) = Library::compile(TRUTH, flags) {
            check(&library, flags);
        }
    }
}

/// Checks that the innermost frames are `expected`, followed by the test's own code up to the thread's entry.
fn expect(capture: &OwnCapture, expected: &[&str], context: &[&str]) {
    let (names, completeness) = names(capture);
    assert!(names.len() > expected.len(), "{context:?}: {names:?} {completeness:?}");
    assert_eq!(names[..expected.len()], *expected, "{context:?}: {names:?} {completeness:?}");
    assert_eq!(completeness, Completeness::Complete, "{context:?}: {names:?}");
}

#[test]
fn recursion() {
    each_flavour(|library, flags| expect(&library.capture("recurse", 60), &["recurse"; 61], flags));
}

#[test]
fn alloca() {
    each_flavour(|library, flags| expect(&library.capture("recurse_alloca", 60), &["recurse_alloca"; 61], flags));
}

#[test]
fn realigned_frames() {
    each_flavour(|library, flags| {
        // Without call frame information, the frame pointer leads to the return address, but not to the caller's stack
        // pointer.
        expect(&library.capture("realigned", 20), &["realigned"; 21], flags);
    });
}

#[test]
fn tail_calls_leave_no_frame() {
    let Some(library) = Library::compile(TRUTH, &["-O2", "-fomit-frame-pointer"]) else { return };
    expect(&library.capture("tail_outer", 1), &["tail_target", "tail_outer"], &[]);
}

#[test]
fn allocation_in_a_signal_handler() {
    if heapbpf_testing::is_emulated("signal handlers return to a page without a name") {
        return;
    }
    let Some(library) = Library::compile(TRUTH, &["-O2", "-fomit-frame-pointer"]) else { return };
    let (names, completeness) = names(&library.capture("interrupted", 1));
    assert_eq!(names[0], "on_signal", "{names:?} {completeness:?}");
    assert!(names.contains(&"interrupted".into()), "{names:?} {completeness:?}");
    assert_eq!(completeness, Completeness::Complete, "{names:?}");

    let (names, completeness) = self::names(&library.capture("trapped", 1));
    assert_eq!((&*names[0], &*names[2]), ("on_signal", "trapped"), "{names:?} {completeness:?}");
    assert_eq!(completeness, Completeness::Complete, "{names:?}");
}

#[test]
fn handler_on_its_own_stack_ends_at_the_interrupted_function() {
    if heapbpf_testing::is_emulated("signal handlers return to a page without a name") {
        return;
    }
    let Some(library) = Library::compile(TRUTH, &["-O2", "-fomit-frame-pointer"]) else { return };
    let (names, completeness) = names(&library.capture("on_other_signal_stack", 1));
    assert_eq!((&*names[0], &*names[2]), ("on_signal", "on_other_signal_stack"), "{names:?} {completeness:?}");
    assert_eq!(names.len(), 3);
    assert_eq!(completeness, Completeness::Truncated(Reason::OtherStack), "{names:?}");
}

#[test]
fn coroutines_end_where_their_stack_begins() {
    for function in ["coroutine", "coroutine_without_link"] {
        let Some(library) = Library::compile(TRUTH, &["-O2", "-fomit-frame-pointer"]) else { return };
        let (names, completeness) = names(&library.capture(function, 4));
        assert_eq!(names[..5], ["recurse"; 5], "{names:?} {completeness:?}");
        assert!(names[5].starts_with("coroutine_"), "{names:?}");
        assert_eq!(names.len(), 7, "{names:?} {completeness:?}");
        assert_eq!(completeness, Completeness::Complete, "{names:?}");
    }
}

#[test]
fn allocation_during_lazy_binding() {
    let Some(library) = Library::compile(TRUTH, &["-O2", "-fomit-frame-pointer", "-Wl,-z,lazy"]) else { return };
    let (names, completeness) = names(&library.capture("lazy_binding", 1));
    assert_eq!(names[0], "resolver");
    let bound_by = names.iter().position(|name| name == "lazy_binding");
    assert!(bound_by.is_some_and(|at| at >= 2), "{names:?} {completeness:?}");
    assert_eq!(completeness, Completeness::Complete, "{names:?}");
}

#[test]
fn without_any_hint_the_module_is_named() {
    let flags = ["-O2", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-fomit-frame-pointer"];
    let Some(library) = Library::compile(TRUTH, &flags) else { return };
    let capture = library.capture("recurse", 10);
    let process = OwnProcess::read().expect("/proc");
    let stack = unwind(&process, &capture);
    let module = process.module(library.path.to_str().expect("UTF-8")).expect("mapped");
    // The frame pointer may be that of an outer frame. The walk then finds that frame, and does not invent frames in
    // between.
    let inside = stack.frames.iter().filter(|frame| frame.module == Some(module)).count();
    assert_eq!(inside, 1);
    if stack.frames.len() == 1 {
        assert_eq!(stack.completeness, Completeness::Truncated(Reason::NoUnwindInformation(module)));
    }
}

#[test]
fn section_headers_are_not_needed() {
    let Some(library) = Library::compile(TRUTH, &["-O2", "-fomit-frame-pointer"]) else { return };
    let capture = library.capture("recurse", 30);
    let mut process = OwnProcess::read().expect("/proc");
    let expected = unwind(&process, &capture);
    let mut bytes = std::fs::read(&library.path).expect("readable");
    bytes[40..48].fill(0); // e_shoff
    bytes[60..64].fill(0); // e_shnum, e_shstrndx
    let module = process.module(library.path.to_str().expect("UTF-8")).expect("mapped");
    process.replace_image(module, std::sync::Arc::new(bytes));
    assert_eq!(unwind(&process, &capture), expected);
}

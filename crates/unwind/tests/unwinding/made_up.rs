//! Walks over made-up modules and memory, for cases that compilers do not produce on demand.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use heapbpf_testing::own_process::{OwnProcess, captured, unwind};
use heapbpf_unwind::dwarf::{Capture, Limits, Unwinder};
use heapbpf_unwind::image::{Image, ModuleFiles};
use heapbpf_unwind::mapping::{Mapping, ModuleId};
use heapbpf_unwind::memory::{Memory, Missing, word};
use heapbpf_unwind::raw::{Completeness, RawStack, Reason, SpaceView};
use heapbpf_unwind::{AddressBits, ProcessKey, Registers};

const CODE: u64 = 0x40_0000;
const JIT: u64 = 0x7f00_0000_0000;
const STACK: u64 = 0x7ffc_0000_0000;

/// Words by address.
struct Words(HashMap<u64, u64>);

impl Memory for Words {
    fn read(&mut self, address: u64) -> Result<u64, Missing> {
        self.0.get(&address).copied().ok_or(Missing::Elsewhere)
    }
}

/// Module 0 is a file with these bytes, module 1 anonymous memory.
struct FileOfBytes(Vec<u8>);

impl ModuleFiles for FileOfBytes {
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        if module.0 == 0 { Ok(Arc::new(self.0.clone())) } else { Err("no file".into()) }
    }

    fn path(&self, module: ModuleId) -> Arc<str> {
        ["/made/up", ""][module.0 as usize].into()
    }

    fn build_id(&self, _: ModuleId) -> Option<Vec<u8>> {
        None
    }

    fn is_anonymous(&self, module: ModuleId) -> bool {
        module.0 == 1
    }
}

fn mappings() -> Vec<Mapping> {
    let mapping =
        |start, module| Mapping { start, end: start + 0x1000, file_offset: 0, module: ModuleId(module), since_ns: 0 };
    vec![mapping(CODE, 0), mapping(JIT, 1)]
}

/// The stack from `ip` with these words, as (distance from the stack pointer, word); the frame pointer is at `fp`.
fn walked(made: &mut FileOfBytes, ip: u64, fp: u64, words: &[(u64, u64)]) -> Arc<RawStack> {
    let mappings = mappings();
    let space = SpaceView { key: ProcessKey::default(), generation: None, mappings: &mappings };
    let registers = Registers { ip, sp: STACK, fp, lr: 0 };
    let mut memory = Words(words.iter().map(|(distance, word)| (STACK + distance, *word)).collect());
    Unwinder::default().unwind_in(made, &space, &registers, &[], &mut memory)
}

fn addresses(stack: &RawStack) -> Vec<u64> {
    stack.frames.iter().map(|frame| frame.address).collect()
}

fn truncated(reason: Reason) -> Completeness {
    Completeness::Truncated(reason)
}

#[test]
fn any_memory_gives_the_stack_of_a_copy() {
    let process = OwnProcess::read().expect("/proc");
    let capture = captured(20);
    let expected = unwind(&process, &capture);
    let mut memory = Words(HashMap::new());
    for offset in (0..capture.stack.len() as u32).step_by(8) {
        memory.0.extend(word(&capture.stack, offset).map(|word| (capture.registers.sp + u64::from(offset), word)));
    }
    let mut unwinder = Unwinder::new(Limits::default(), process.address_bits());
    for _ in 0..2 {
        let files = &mut process.clone();
        let stack = unwinder.unwind_in(files, &process.space(), &capture.registers, &[], &mut memory);
        assert_eq!(stack, expected);
        assert!(!unwinder.was_repeated, "only copies are cached");
    }
    assert_eq!((unwinder.statistics().stacks, unwinder.statistics().complete), (2, 2));
    // Without memory, only the caller is known, and the reason is not that the stack copy is too small.
    let stack =
        unwinder.unwind_in(&mut process.clone(), &process.space(), &capture.registers, &[], &mut Words(HashMap::new()));
    assert_eq!((stack.frames.len(), &stack.completeness), (1, &truncated(Reason::OtherStack)));
}

#[test]
fn frame_pointers_lead_through_code_without_call_frame_information() {
    let mut made = FileOfBytes(vec![0x90; 0x1000]);
    let records = [(0x20, STACK + 0x40), (0x28, CODE + 0x200), (0x40, 0), (0x48, CODE + 0x300)];
    let stack = walked(&mut made, CODE + 0x100, STACK + 0x20, &records);
    assert_eq!(addresses(&stack), [CODE + 0xff, CODE + 0x1ff, CODE + 0x2ff]);
    assert_eq!(stack.completeness, truncated(Reason::FramePointersEnd));
    // A frame record whose return address is in no mapping does not count, and neither does one below the stack
    // pointer.
    let stack = walked(&mut made, CODE + 0x100, STACK + 0x20, &[(0x20, STACK + 0x40), (0x28, 0x1234)]);
    assert_eq!(addresses(&stack), [CODE + 0xff]);
    let reason = Reason::Unreadable(ModuleId(0), "not a 64-bit little-endian ELF file".into());
    assert_eq!(stack.completeness, truncated(reason.clone()));
    assert_eq!(walked(&mut made, CODE + 0x100, STACK - 0x20, &records).completeness, truncated(reason));
}

#[test]
fn code_in_no_mapping_is_left_by_frame_pointer_too() {
    let mut made = FileOfBytes(vec![0x90; 0x1000]);
    let stack = walked(&mut made, 0x1234, STACK + 0x20, &[(0x20, 0), (0x28, CODE + 0x200)]);
    assert_eq!(addresses(&stack), [0x1233, CODE + 0x1ff]);
    assert_eq!((stack.frames[0].module, stack.frames[1].module), (None, Some(ModuleId(0))));
    assert_eq!(walked(&mut made, 0x1234, 0, &[]).completeness, truncated(Reason::UnmappedAddress));
    assert_eq!(walked(&mut made, 0, 0, &[]).completeness, truncated(Reason::NullReturnAddress));
    assert!(stack.has_jit_code(&made), "code in no mapping may be");
}

/// CPython's trampolines: `sub $8, %rsp; call *%rcx; add $8, %rsp; ret`, without a frame pointer.
#[test]
#[cfg(target_arch = "x86_64")]
fn trampolines_are_left_if_a_call_precedes_their_return_address() {
    let mut file = vec![0x90; 0x1000];
    file[0x2fe..0x300].copy_from_slice(&[0xff, 0xd1]);
    let words = |caller: u64| [(0x20, 0), (0x28, JIT + 0x10), (0x38, caller)];
    let stack = walked(&mut FileOfBytes(file.clone()), CODE + 0x100, STACK + 0x20, &words(CODE + 0x300));
    assert_eq!(addresses(&stack), [CODE + 0xff, JIT + 0xf, CODE + 0x2ff]);
    assert!(stack.has_jit_code(&FileOfBytes(vec![])));
    // Not after another instruction, not into code other than the caller's, and not outside of the file.
    for caller in [CODE + 0x301, CODE + 2, JIT + 0x20, 0x1234] {
        let stack = walked(&mut FileOfBytes(file.clone()), CODE + 0x100, STACK + 0x20, &words(caller));
        assert_eq!(addresses(&stack), [CODE + 0xff, JIT + 0xf], "{caller:#x}");
    }
}

/// A probed return: the kernel's trampoline is on the stack, and the call in flight has the return address.
#[test]
#[cfg(target_arch = "x86_64")]
fn return_addresses_of_in_flight_calls_are_restored() {
    use heapbpf_unwind::InFlightCall;

    let mut process = OwnProcess::read().expect("/proc");
    let mut capture = captured(10);
    let whole = unwind(&process, &capture);
    let caller = whole.frames[4].address + 1;
    let word_of = |at: &usize| capture.stack[*at..*at + 8] == caller.to_le_bytes();
    // The calls are all alike: the fourth word with this value is the return address of the fourth.
    let at = (0..capture.stack.len() - 8).step_by(8).filter(word_of).nth(3).expect("on the stack");
    let trampoline: u64 = 0x7f_ffff_e000;
    capture.stack[at..at + 8].copy_from_slice(&trampoline.to_le_bytes());
    process.add_mapping(trampoline..trampoline + 4096, "[uprobes]");
    let sp = capture.registers.sp + at as u64;
    let unwound = |in_flight: &[InFlightCall]| {
        let capture = Capture { in_flight, ..capture.input() };
        Unwinder::default().unwind(&mut process.clone(), &process.space(), capture)
    };
    assert_eq!(unwound(&[InFlightCall::default(), InFlightCall { sp, caller }]), whole);
    // The return address of another call is not used instead.
    let other = unwound(&[InFlightCall { sp: sp + 16, caller }]);
    assert_eq!(other.completeness, truncated(Reason::ReturnProbe));
}

#[test]
fn bits_above_the_address_are_ignored() {
    let mappings = mappings();
    let space = SpaceView { key: ProcessKey::default(), generation: None, mappings: &mappings };
    let registers = Registers { ip: CODE + 0x100, sp: STACK, fp: STACK + 0x20, lr: 0 };
    let signed = 0x00a5_0000_0000_0000 | (CODE + 0x200);
    let mut memory = Words(HashMap::from([(STACK + 0x20, 0), (STACK + 0x28, signed)]));
    let mut frames = |bits| {
        let mut unwinder = Unwinder::new(Limits::default(), bits);
        let made = &mut FileOfBytes(vec![0x90; 0x1000]);
        unwinder.unwind_in(made, &space, &registers, &[], &mut memory).frames.len()
    };
    assert_eq!((frames(AddressBits::lowest(48)), frames(AddressBits::ALL)), (2, 1));
}

#[test]
fn forgotten_processes_are_walked_again() {
    let process = OwnProcess::read().expect("/proc");
    let capture = captured(5);
    let input = capture.input();
    let mut unwinder = Unwinder::default();
    let unwound = |unwinder: &mut Unwinder| {
        let stack = unwinder.unwind(&mut process.clone(), &process.space(), input);
        (stack, unwinder.was_repeated)
    };
    let (first, repeated) = unwound(&mut unwinder);
    assert!(!repeated && unwound(&mut unwinder).1);
    unwinder.stacks.forget(&HashSet::from([ProcessKey::default()]));
    assert!(unwound(&mut unwinder).1, "another process");
    unwinder.stacks.forget(&HashSet::from([process.space().key]));
    let (again, repeated) = unwound(&mut unwinder);
    assert!(!repeated && Arc::ptr_eq(&first, &again), "equal stacks are still shared");
    assert!(Arc::ptr_eq(&first, &unwinder.stacks.intern((*first).clone())));
    let copy = (*first).clone();
    drop((first, again));
    unwinder.stacks.forget(&HashSet::from([process.space().key]));
    unwinder.stacks.sweep();
    assert_eq!(Arc::strong_count(&unwinder.stacks.intern(copy)), 2, "only the unwinder and this test hold it");
}

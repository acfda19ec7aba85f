//! Walks through code that a language runtime generated and describes.

use std::sync::Arc;

use heapbpf_unwind::dwarf::{Capture, Flaws, Limits, Unwinder};
use heapbpf_unwind::image::{Image, ModuleFiles};
use heapbpf_unwind::mapping::{Mapping, ModuleId};
use heapbpf_unwind::memory::{Memory, Missing};
use heapbpf_unwind::raw::{Completeness, RawFrame, RawStack, Reason, SpaceView};
use heapbpf_unwind::runtime::{Left, RuntimeCode, RuntimeFrame};
use heapbpf_unwind::{AddressBits, ProcessKey, Registers};

const CODE: u64 = 0x40_0000;
const JIT: u64 = 0x7f00_0000_0000;
/// Code of the runtime in no known mapping.
const NEW_JIT: u64 = JIT + 0x10_0000;
const STACK: u64 = 0x7ffc_0000_0000;

/// Module 0 is a file without call frame information, module 1 anonymous memory.
struct FileWithoutCfi;

impl ModuleFiles for FileWithoutCfi {
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        if module.0 == 0 { Ok(Arc::new(vec![0x90; 0x1000])) } else { Err("no file".into()) }
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

/// A function of the runtime.
const fn named(number: u64) -> RawFrame {
    RawFrame { address: 0, module: Some(ModuleId(9)), file_offset: number }
}

/// A runtime with frames of four words, the last of which is the return address, in code from [`JIT`] on. Each frame
/// stands for two functions.
struct Made4 {
    /// A fixed answer instead, if any.
    says: Option<Left>,
    /// Number of calls.
    asked: usize,
    /// How often its code has been replaced.
    replaced: u64,
}

impl RuntimeCode for Made4 {
    fn leave(&mut self, _: &SpaceView, at: RuntimeFrame, memory: &mut dyn Memory, frames: &mut Vec<RawFrame>) -> Left {
        self.asked += 1;
        if at.ip < JIT {
            return Left::NotMine;
        }
        if let Some(left) = self.says {
            return left;
        }
        frames.extend([named(at.ip + self.replaced), named(at.ip + self.replaced + 1)]);
        match memory.read(at.sp + 24) {
            Ok(ip) => Left::To(RuntimeFrame { ip, sp: at.sp + 32, fp: memory.read(at.sp + 16).ok() }),
            Err(missing) => Left::Missing(missing),
        }
    }

    fn version(&self, _: ProcessKey) -> u64 {
        self.replaced
    }
}

/// Unwinds the stack of a function in the file that the runtime's code at `jit` called, which in turn a function in the
/// file called.
fn walked(unwinder: &mut Unwinder, runtime: &mut Made4, jit: u64, copied: usize) -> Arc<RawStack> {
    let mapping =
        |start, module| Mapping { start, end: start + 0x1000, file_offset: 0, module: ModuleId(module), since_ns: 0 };
    let mappings = vec![mapping(CODE, 0), mapping(JIT, 1)];
    let space = SpaceView { key: ProcessKey::default(), generation: Some(1), mappings: &mappings };
    let registers = Registers { ip: CODE + 0x100, sp: STACK, fp: STACK, lr: 0 };
    // The innermost frame record, the runtime's frame, and its caller's frame record, which is the last.
    let one = vec![0x5555, jit, 0, 0, STACK + 0x30, CODE + 0x200, 0, CODE + 0x300];
    // The same with two frames of the runtime.
    let two = vec![0x5555, JIT + 0x10, 0, 0, 0, jit, 0, 0, STACK + 0x50, CODE + 0x200, 0, CODE + 0x300];
    let words: Vec<u64> = if jit == NEW_JIT { two } else { one };
    let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
    let stack = &bytes[..copied.min(bytes.len())];
    let capture = Capture { registers: &registers, stack: stack.into(), in_flight: &[], flaws: Flaws::default() };
    unwinder.unwind_with(&mut FileWithoutCfi, runtime, &space, capture)
}

fn offsets(stack: &RawStack) -> Vec<u64> {
    stack.frames.iter().map(|frame| frame.file_offset).collect()
}

#[test]
fn a_runtime_leaves_its_frames_and_names_them() {
    let frames = |jit| [jit, jit + 1];
    for (jit, of_runtime) in [(JIT + 0x10, vec![JIT + 0x10]), (NEW_JIT, vec![JIT + 0x10, NEW_JIT])] {
        let (mut unwinder, mut runtime) = (Unwinder::default(), Made4 { says: None, asked: 0, replaced: 0 });
        let stack = walked(&mut unwinder, &mut runtime, jit, 96);
        let expected: Vec<u64> = of_runtime.iter().flat_map(|jit| frames(*jit)).collect();
        assert_eq!(offsets(&stack), [&[0xff][..], &expected, &[0x1ff, 0x2ff]].concat(), "{jit:#x}");
        let asked = of_runtime.len();
        assert_eq!((&stack.completeness, runtime.asked), (&Completeness::Truncated(Reason::FramePointersEnd), asked));
        assert!(Arc::ptr_eq(&stack, &walked(&mut unwinder, &mut runtime, jit, 96)));
        assert_eq!(runtime.asked, asked, "the same words, the same stack");
    }
}

#[test]
fn a_kept_walk_ends_with_the_code_that_it_went_through() {
    let (mut unwinder, mut runtime) = (Unwinder::default(), Made4 { says: None, asked: 0, replaced: 0 });
    let before = walked(&mut unwinder, &mut runtime, JIT + 0x10, 96);
    runtime.replaced = 7;
    let after = walked(&mut unwinder, &mut runtime, JIT + 0x10, 96);
    assert_eq!((offsets(&before)[1], offsets(&after)[1]), (JIT + 0x10, JIT + 0x17));
}

#[test]
fn what_a_runtime_cannot_leave_ends_the_stack_and_is_asked_again() {
    let reason_of = |says, copied| {
        let (mut unwinder, mut runtime) = (Unwinder::default(), Made4 { says: Some(says), asked: 0, replaced: 0 });
        let stack = walked(&mut unwinder, &mut runtime, JIT + 0x10, copied);
        let Completeness::Truncated(reason) = stack.completeness.clone() else { panic!("{stack:?}") };
        walked(&mut unwinder, &mut runtime, JIT + 0x10, copied);
        (reason, stack.frames.len(), runtime.asked)
    };
    assert_eq!(reason_of(Left::Stuck("it was freed"), 64), (Reason::Runtime("it was freed"), 1, 2));
    assert_eq!(reason_of(Left::Missing(Missing::Above), 64), (Reason::StackCopyTooSmall, 1, 1));
    assert_eq!(reason_of(Left::Missing(Missing::Elsewhere), 64).0, Reason::OtherStack);
    // A caller below this frame.
    let below = RuntimeFrame { ip: CODE + 0x200, sp: STACK, fp: None };
    assert_eq!(reason_of(Left::To(below), 64).0, Reason::BrokenChain);
    // A caller in no mapping.
    let nowhere = RuntimeFrame { ip: 0x1234, sp: STACK + 0x30, fp: None };
    assert_eq!(reason_of(Left::To(nowhere), 64).0, Reason::UnmappedAddress);
    // Nothing calls from address zero. The frame pointer, which leads to a function, must not be used.
    let zero = RuntimeFrame { ip: 0, sp: STACK + 0x20, fp: Some(STACK + 0x20) };
    assert_eq!(reason_of(Left::To(zero), 64), (Reason::NullReturnAddress, 1, 1));
    // If the code is not the runtime's, it is handled like any code without a file.
    let (reason, frames, _) = reason_of(Left::NotMine, 64);
    assert_eq!((reason, frames), (Reason::NoUnwindInformation(ModuleId(1)), 2));
}

#[test]
fn frames_of_a_runtime_count_for_the_limits() {
    let limits = Limits { max_depth: 3, ..Limits::default() };
    let mut unwinder = Unwinder::new(limits, AddressBits::default());
    let stack = walked(&mut unwinder, &mut Made4 { says: None, asked: 0, replaced: 0 }, JIT + 0x10, 64);
    assert_eq!(
        (offsets(&stack), &stack.completeness),
        (vec![0xff, JIT + 0x10, JIT + 0x11], &Completeness::Truncated(Reason::DepthLimit))
    );
    let stack = walked(&mut Unwinder::default(), &mut Made4 { says: None, asked: 0, replaced: 0 }, JIT + 0x10, 32);
    assert_eq!(stack.completeness, Completeness::Truncated(Reason::StackCopyTooSmall));
}

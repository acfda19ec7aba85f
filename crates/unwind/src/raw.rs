//! Stacks before symbolization: frames as addresses in modules, and why a stack is truncated.

use std::sync::Arc;

use crate::image::ModuleFiles;
use crate::mapping::{Mapping, Mappings, ModuleId};
use sampler_ebpf::abi::ProcessKey;

/// An address space at one moment. Stacks are unwound in it and resolved against its mappings.
#[derive(Clone, Copy)]
pub struct SpaceView<'a> {
    /// The process that owns it.
    pub key: ProcessKey,
    /// A number that changes whenever the mappings do, and is never reused for the same `key`. `None` for a view of the
    /// past: stacks in it are not cached.
    pub generation: Option<u64>,
    /// Executable mappings.
    pub mappings: &'a dyn Mappings,
}

impl SpaceView<'_> {
    /// Returns the mapping that contains `address`.
    pub fn find(&self, address: u64) -> Option<&Mapping> {
        self.mappings.find(address)
    }

    /// Returns the frame at `address`, with the module that is mapped there, if any.
    pub fn frame(&self, address: u64) -> RawFrame {
        match self.find(address) {
            Some(mapping) => RawFrame::in_mapping(address, mapping),
            None => RawFrame { address, module: None, file_offset: 0 },
        }
    }
}

/// The code address of one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawFrame {
    /// An address inside the calling instruction (return address − 1), the instruction that a signal interrupted, or
    /// the first instruction of the trampoline that a signal handler returns to.
    pub address: u64,
    /// The module that was mapped there at the time of the sample.
    pub module: Option<ModuleId>,
    /// Offset of `address` in the module's file, bytes; 0 without a module.
    pub file_offset: u64,
}

impl RawFrame {
    /// Returns the frame at `address`, which must lie in `mapping`.
    pub fn in_mapping(address: u64, mapping: &Mapping) -> Self {
        Self { address, module: Some(mapping.module), file_offset: mapping.offset_of(address) }
    }
}

/// How a stack was unwound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnwinderKind {
    /// Call frame information over a copy of the stack.
    Dwarf,
    /// The kernel's frame-pointer walk.
    FramePointers,
    /// Not at all: only the allocator's caller is known.
    Caller,
}

impl UnwinderKind {
    /// The name in profiles.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dwarf => "dwarf",
            Self::FramePointers => "fp",
            Self::Caller => "caller",
        }
    }
}

/// Why a stack does not reach the thread's entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The next frame lies above the part of the stack that was copied.
    StackCopyTooSmall,
    /// The walk leads to a different stack from the one that it began on (from a signal stack, or a coroutine's).
    OtherStack,
    /// No call frame information covers the frame, and the frame pointer leads nowhere.
    NoUnwindInformation(ModuleId),
    /// The module's file cannot be read; the text says why.
    Unreadable(ModuleId, Arc<str>),
    /// The module's call frame information is malformed, or needs a register whose value is unknown.
    BadUnwindInformation(ModuleId),
    /// The stack pointer would move backwards.
    BrokenChain,
    /// A return address lies in no executable mapping.
    UnmappedAddress,
    /// A return address is zero.
    NullReturnAddress,
    /// The chain of frame pointers ends, which may or may not be the thread's entry.
    FramePointersEnd,
    /// A return address is synthetic: another tool has a return probe on the function, so the kernel's trampoline
    /// replaces its return address.
    ReturnProbe,
    /// The walk cannot get past a frame of a language runtime's code; the text says why.
    Runtime(&'static str),
    /// The stack has more frames than [`Limits::max_depth`](crate::dwarf::Limits::max_depth).
    DepthLimit,
    /// Evaluating its call frame information exceeded the budget of one stack.
    TooExpensive,
    /// There is no copy of the stack, although it was not lost: the kernel could not walk it.
    NoStack,
    /// The copy of the stack was shortened, because the stacks ring was filling up.
    StackCopyShortened,
    /// The outer frames differ from those that the copy was made for: words that the walk needs are missing.
    OuterFramesChanged,
    /// A page of the stack was not in memory when it was copied.
    MissingPage,
    /// The stack was lost: the stacks ring was full.
    StackRingFull,
    /// The stack was lost: the kernel's table of stacks had no free slot for it.
    StackTableFull,
    /// The copy of the stack did not arrive.
    CopyMissing,
    /// The overflow bucket: stands for all stacks that had too few samples to be kept separately.
    OverflowBucket,
    /// The sample's records were lost; only the block is known, from the kernel's live map.
    RecordLost,
}

impl Reason {
    /// Describes the reason to users. `path` returns the names of modules.
    pub fn text(&self, path: impl Fn(ModuleId) -> Arc<str>) -> String {
        match self {
            Self::StackCopyTooSmall => "stack copy too small (see --stack-bytes)".into(),
            Self::OtherStack => "continues on another stack".into(),
            Self::NoUnwindInformation(module) => format!("no unwind information in {}", path(*module)),
            Self::Unreadable(module, why) => format!("cannot read {}: {why}", path(*module)),
            Self::BadUnwindInformation(module) => format!("bad unwind information in {}", path(*module)),
            Self::BrokenChain => "broken chain".into(),
            Self::UnmappedAddress => "return address in no known mapping".into(),
            Self::NullReturnAddress => "null return address".into(),
            Self::FramePointersEnd => "frame pointers end here".into(),
            Self::ReturnProbe => "a return probe hides the caller".into(),
            Self::Runtime(why) => (*why).into(),
            Self::DepthLimit => "depth limit (see --max-depth)".into(),
            Self::TooExpensive => "unwind information too expensive".into(),
            Self::NoStack => "the kernel could not follow the stack".into(),
            Self::StackCopyShortened => {
                "stack copy cut short: the stacks ring was filling up (see --lossless, or a larger -i)".into()
            }
            Self::OuterFramesChanged => "outer frames were left out of the stack's copy".into(),
            Self::MissingPage => "a page of the stack was not in memory".into(),
            Self::StackRingFull => {
                "its stack was lost: the stacks ring was full (see --lossless, or a larger -i)".into()
            }
            Self::StackTableFull => "its stack was lost: the kernel's table of stacks was full (see --unwind)".into(),
            Self::CopyMissing => "its stack was lost: the copy did not arrive".into(),
            Self::OverflowBucket => "put together: more stacks than are told apart".into(),
            Self::RecordLost => "its record was lost: the events ring was full (see --lossless, or a larger -i)".into(),
        }
    }
}

/// Whether a stack is complete.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Completeness {
    /// It reaches the thread's entry.
    Complete,
    /// It ends before that, for this reason.
    Truncated(Reason),
}

/// An unwound stack, innermost frame first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RawStack {
    /// Frames; the first is the allocator's caller.
    pub frames: Box<[RawFrame]>,
    /// How it was unwound.
    pub unwinder: UnwinderKind,
    /// Whether it is complete.
    pub completeness: Completeness,
}

impl RawStack {
    /// Whether a frame is in JIT code: in anonymous memory, or in no known module.
    pub fn has_jit_code(&self, modules: &dyn ModuleFiles) -> bool {
        self.frames.iter().any(|frame| frame.module.is_none_or(|module| modules.is_anonymous(module)))
    }

    /// A stack without frames, for a sample whose records were lost.
    pub fn lost() -> Self {
        Self {
            frames: Box::new([]),
            unwinder: UnwinderKind::Caller,
            completeness: Completeness::Truncated(Reason::RecordLost),
        }
    }

    /// Builds the stack of a sample of which only the allocator's return address is known, for this reason.
    pub fn caller_only(space: &SpaceView, return_address: u64, reason: Reason) -> Self {
        Self {
            frames: Box::new([space.frame(return_address.saturating_sub(1))]),
            unwinder: UnwinderKind::Caller,
            completeness: Completeness::Truncated(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_name_their_module() {
        let path = |module: ModuleId| Arc::from(format!("/lib/{}.so", module.0));
        let module = ModuleId(3);
        for (reason, text) in [
            (Reason::StackCopyTooSmall, "stack copy too small (see --stack-bytes)"),
            (Reason::OtherStack, "continues on another stack"),
            (Reason::NoUnwindInformation(module), "no unwind information in /lib/3.so"),
            (Reason::Unreadable(module, "it is gone".into()), "cannot read /lib/3.so: it is gone"),
            (Reason::BadUnwindInformation(module), "bad unwind information in /lib/3.so"),
            (Reason::BrokenChain, "broken chain"),
            (Reason::UnmappedAddress, "return address in no known mapping"),
            (Reason::NullReturnAddress, "null return address"),
            (Reason::FramePointersEnd, "frame pointers end here"),
            (Reason::ReturnProbe, "a return probe hides the caller"),
            (Reason::Runtime("code of the JVM"), "code of the JVM"),
            (Reason::DepthLimit, "depth limit (see --max-depth)"),
            (Reason::TooExpensive, "unwind information too expensive"),
            (Reason::NoStack, "the kernel could not follow the stack"),
            (
                Reason::StackCopyShortened,
                "stack copy cut short: the stacks ring was filling up (see --lossless, or a larger -i)",
            ),
            (Reason::OuterFramesChanged, "outer frames were left out of the stack's copy"),
            (Reason::MissingPage, "a page of the stack was not in memory"),
            (Reason::StackRingFull, "its stack was lost: the stacks ring was full (see --lossless, or a larger -i)"),
            (Reason::StackTableFull, "its stack was lost: the kernel's table of stacks was full (see --unwind)"),
            (Reason::CopyMissing, "its stack was lost: the copy did not arrive"),
            (Reason::OverflowBucket, "put together: more stacks than are told apart"),
            (Reason::RecordLost, "its record was lost: the events ring was full (see --lossless, or a larger -i)"),
        ] {
            assert_eq!(reason.text(path), text);
        }
        let names = [UnwinderKind::Dwarf, UnwinderKind::FramePointers, UnwinderKind::Caller].map(UnwinderKind::name);
        assert_eq!(names, ["dwarf", "fp", "caller"]);
    }

    #[test]
    fn a_caller_alone_is_an_address_inside_its_call() {
        let mapping = Mapping { start: 0x1000, end: 0x2000, file_offset: 0x500, module: ModuleId(3), since_ns: 0 };
        let mappings = vec![mapping];
        let space = SpaceView { key: ProcessKey::default(), generation: None, mappings: &mappings };
        let stack = RawStack::caller_only(&space, 0x1100, Reason::NoStack);
        assert_eq!(*stack.frames, [RawFrame { address: 0x10ff, module: Some(ModuleId(3)), file_offset: 0x5ff }]);
        assert_eq!(stack.completeness, Completeness::Truncated(Reason::NoStack));
        assert_eq!(RawStack::caller_only(&space, 0, Reason::NoStack).frames[0].module, None);
        let lost = RawStack::lost();
        assert!(lost.frames.is_empty() && lost.completeness == Completeness::Truncated(Reason::RecordLost));
    }
}

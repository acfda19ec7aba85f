//! Stacks before symbolization.

use std::sync::Arc;

use super::image::ModuleFiles;
use crate::host::mappings::{AddressSpace, Mapping, ModuleId};
use sampler_ebpf::abi::ProcessKey;

/// Where addresses are looked up.
pub trait Mappings {
    /// The executable mapping that holds `address`.
    fn find(&self, address: u64) -> Option<&Mapping>;
}

/// Mappings that do not change: ascending by `start`, not overlapping.
impl Mappings for Vec<Mapping> {
    fn find(&self, address: u64) -> Option<&Mapping> {
        let after = self.partition_point(|mapping| mapping.start <= address);
        self[..after].last().filter(|mapping| mapping.contains(address))
    }
}

/// An address space as it was at some time.
#[derive(Clone, Copy, Debug)]
pub struct AtTime<'a> {
    space: &'a AddressSpace,
    time_ns: u64,
}

impl<'a> AtTime<'a> {
    /// `space` at CLOCK_MONOTONIC `time_ns`.
    pub fn new(space: &'a AddressSpace, time_ns: u64) -> Self {
        Self { space, time_ns }
    }

    /// This, as what stacks are unwound in. Mappings older than the last change have no generation of their own.
    pub fn view(&self, key: ProcessKey) -> SpaceView<'_> {
        let is_current = self.time_ns >= self.space.changed_ns();
        SpaceView { key, generation: is_current.then(|| self.space.generation()), mappings: self }
    }
}

impl Mappings for AtTime<'_> {
    fn find(&self, address: u64) -> Option<&Mapping> {
        self.space.resolve(address, self.time_ns)
    }
}

/// An address space at one moment: what a stack is unwound in and resolved against.
#[derive(Clone, Copy)]
pub struct SpaceView<'a> {
    /// Whose it is.
    pub key: ProcessKey,
    /// Number that changes whenever the mappings do, and is never used again for the same `key`. `None`: the view is
    /// of the past, and nothing about it is worth remembering.
    pub generation: Option<u64>,
    /// Executable mappings.
    pub mappings: &'a dyn Mappings,
}

impl SpaceView<'_> {
    /// The mapping that holds `address`.
    pub fn find(&self, address: u64) -> Option<&Mapping> {
        self.mappings.find(address)
    }

    /// `address` as a frame.
    pub fn frame(&self, address: u64) -> RawFrame {
        match self.find(address) {
            Some(mapping) => RawFrame::in_mapping(address, mapping),
            None => RawFrame { address, module: None, file_offset: 0 },
        }
    }
}

/// One frame's code address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawFrame {
    /// Address that lies inside the call (return address − 1), or of the instruction that a signal interrupted.
    pub address: u64,
    /// What was mapped there at the time of the sample.
    pub module: Option<ModuleId>,
    /// `address` as an offset in that module's file; 0 without a module.
    pub file_offset: u64,
}

impl RawFrame {
    /// The frame at `address`, which lies in `mapping`.
    pub fn in_mapping(address: u64, mapping: &Mapping) -> Self {
        Self { address, module: Some(mapping.module), file_offset: mapping.offset_of(address) }
    }
}

/// How a stack was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnwinderKind {
    /// Call frame information over a copy of the stack.
    Dwarf,
    /// The kernel's frame-pointer walk.
    FramePointers,
    /// Only the allocator's caller is known.
    Caller,
}

impl UnwinderKind {
    /// Name in profiles.
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
    /// The next frame is above what was copied.
    StackCopyTooSmall,
    /// The chain continues outside of the stack it began on (a signal stack, a coroutine's).
    OtherStack,
    /// No call frame information covers the frame, and the frame pointer is no help.
    NoUnwindInformation(ModuleId),
    /// The module's file cannot be read; the text says why.
    Unreadable(ModuleId, Arc<str>),
    /// The module's call frame information is malformed, or needs what cannot be known.
    BadUnwindInformation(ModuleId),
    /// The stack pointer would move backwards.
    BrokenChain,
    /// A return address that lies in no executable mapping.
    UnmappedAddress,
    /// A return address of zero.
    NullReturnAddress,
    /// The frame-pointer chain ends, which may or may not be the thread's entry.
    FramePointersEnd,
    /// The kernel has put its trampoline in the place of a return address: a return probe of somebody waits there.
    ReturnProbe,
    /// As many frames as allowed.
    DepthLimit,
    /// Evaluating the call frame information took more than one stack is allowed.
    TooExpensive,
    /// There was no copy of the stack.
    NoStack,
    /// It is no stack, but stands for those that had too few samples to be kept apart.
    PutTogether,
    /// The sample's records were lost; the kernel's live map told of the block alone.
    RecordLost,
}

impl Reason {
    /// The reason as text, `path` naming modules.
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
            Self::DepthLimit => "depth limit (see --max-depth)".into(),
            Self::TooExpensive => "unwind information too expensive".into(),
            Self::NoStack => "no stack was taken".into(),
            Self::PutTogether => "put together: more stacks than are told apart".into(),
            Self::RecordLost => "its record was lost: the events ring was full (see --ring-bytes)".into(),
        }
    }
}

/// Whether a stack is whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Completeness {
    /// It reaches the thread's entry.
    Complete,
    /// It was cut, and why.
    Cut(Reason),
}

/// A stack as unwinding leaves it, innermost frame first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RawStack {
    /// Frames; the first is the allocator's caller.
    pub frames: Box<[RawFrame]>,
    /// What found it.
    pub unwinder: UnwinderKind,
    /// Whether it is whole.
    pub completeness: Completeness,
}

impl RawStack {
    /// Whether some of it runs in code that the process has made itself, as far as can be told.
    pub fn has_own_code(&self, modules: &dyn ModuleFiles) -> bool {
        self.frames.iter().any(|frame| frame.module.is_none_or(|module| modules.is_anonymous(module)))
    }

    /// Stands for the stack of a sample whose records were lost.
    pub fn lost() -> Self {
        Self {
            frames: Box::new([]),
            unwinder: UnwinderKind::Caller,
            completeness: Completeness::Cut(Reason::RecordLost),
        }
    }

    /// The stack of a sample of which only the allocator's return address is known.
    pub fn caller_only(space: &SpaceView, return_address: u64) -> Self {
        Self {
            frames: Box::new([space.frame(return_address.saturating_sub(1))]),
            unwinder: UnwinderKind::Caller,
            completeness: Completeness::Cut(Reason::NoStack),
        }
    }
}

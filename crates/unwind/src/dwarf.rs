//! The unwinder: stacks by call frame information, with caches for rules and for repeated stacks.
//!
//! `gimli` evaluates the rows. The walk over them is our own, because it handles what off-the-shelf unwinders leave
//! out: all preserved registers (realigned frames, lazy binding), expressions of signal frames, and the reason why a
//! walk ended. Saved registers are located but not read, so a walk reads little more than one word per frame.

use std::sync::Arc;

use crate::address_bits::AddressBits;
use crate::cache::{StackCache, StackKey};
use crate::image::ModuleFiles;
use crate::memory::{Memory, Reads, StackCopy, StackMemory};
use crate::raw::{Completeness, RawFrame, RawStack, Reason, SpaceView, UnwinderKind};
use crate::rules::Rules;
use crate::runtime::{NoRuntime, RuntimeCode};
use crate::state::State;
use crate::walk::{Surroundings, walk};
use sampler_ebpf::abi::{InFlightCall, Registers};

/// Limits of an [`Unwinder`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of frames of a stack.
    pub max_depth: usize,
    /// Maximum memory for unwind sections, bytes. The least recently used are dropped first.
    pub section_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_depth: 512, section_bytes: 96 << 20 }
    }
}

/// A sample's registers and stack copy.
#[derive(Clone, Copy, Debug)]
pub struct Capture<'a> {
    /// Registers just after the allocator returned.
    pub registers: &'a Registers,
    /// The stack from `registers.sp` up.
    pub stack: StackCopy<'a>,
    /// Calls in flight whose returns are probed. On the stack, the address of the kernel's trampoline replaces their
    /// return addresses.
    pub in_flight: &'a [InFlightCall],
    /// How the copy differs from the stack.
    pub flaws: Flaws,
}

/// How a copy differs from the original stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flaws {
    /// Why the copy ends where it does.
    pub end: CopyEnd,
    /// Whether pages that were not in memory are zeros in the copy.
    pub has_gaps: bool,
}

/// Why a copy of a stack ends where it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyEnd {
    /// It reached the size limit.
    #[default]
    Limit,
    /// It reached the top of the thread's stack.
    Top,
    /// There was no space for more.
    NoSpace,
    /// The next page was not in memory.
    MissingPage,
}

impl Flaws {
    /// Returns a more specific reason why a walk over the copy ended, given the reason from the walk itself; `None` if
    /// there is none.
    fn explain(self, reason: &Reason) -> Option<Reason> {
        match (reason, self.end) {
            (Reason::StackCopyTooSmall, CopyEnd::Top) => Some(Reason::OtherStack),
            (Reason::StackCopyTooSmall, CopyEnd::NoSpace) => Some(Reason::StackCopyShortened),
            (Reason::StackCopyTooSmall, CopyEnd::MissingPage) => Some(Reason::MissingPage),
            (Reason::NullReturnAddress, _) if self.has_gaps => Some(Reason::MissingPage),
            _ => None,
        }
    }
}

/// Counters of an [`Unwinder`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Stacks unwound, including repeated ones.
    pub stacks: u64,
    /// Stacks that repeated an earlier one.
    pub repeated: u64,
    /// Stacks that reached the thread's entry.
    pub complete: u64,
    /// Modules whose unwind sections are loaded, including those that could not be read.
    pub modules: u64,
    /// Memory that the sections use, bytes.
    pub section_bytes: u64,
}

/// Unwinds stacks of any number of processes.
pub struct Unwinder {
    max_depth: usize,
    bits: AddressBits,
    rules: Rules,
    /// The stacks that were found, and others: equal ones share one `Arc`.
    pub stacks: StackCache,
    /// The words of the copy that the last walk of [`Self::unwind`] read.
    pub reads: Reads,
    frames: Vec<RawFrame>,
    statistics: Statistics,
    /// Whether the last stack came from the cache.
    pub was_repeated: bool,
}

impl Default for Unwinder {
    fn default() -> Self {
        Self::new(Limits::default(), AddressBits::default())
    }
}

impl Unwinder {
    /// Creates an unwinder without any loaded data, for a machine whose return addresses have these bits.
    pub fn new(limits: Limits, bits: AddressBits) -> Self {
        Self {
            max_depth: limits.max_depth,
            bits,
            rules: Rules::new(limits.section_bytes),
            stacks: StackCache::default(),
            reads: Reads::default(),
            frames: Vec::new(),
            statistics: Statistics::default(),
            was_repeated: false,
        }
    }

    /// Unwinds the stack of a sample. Equal stacks share one `Arc` as long as it is in use.
    ///
    /// If a capture repeats every word that the walk of an earlier one read, its stack comes from the cache.
    pub fn unwind(&mut self, modules: &mut dyn ModuleFiles, space: &SpaceView, capture: Capture) -> Arc<RawStack> {
        self.unwind_with(modules, &mut NoRuntime, space, capture)
    }

    /// Like [`Self::unwind`], for a process with a known language runtime.
    pub fn unwind_with(
        &mut self,
        modules: &mut dyn ModuleFiles,
        runtime: &mut dyn RuntimeCode,
        space: &SpaceView,
        capture: Capture,
    ) -> Arc<RawStack> {
        // If return addresses are hidden, the walk depends on more than the words that it reads.
        let hides_returns = capture.in_flight.iter().any(|call| call.sp != 0);
        let generation = space.generation.filter(|_| !hides_returns);
        let key = generation.map(|generation| StackKey {
            space: space.key,
            generation,
            runtime: runtime.version(space.key),
            registers: *capture.registers,
        });
        let kept = key.and_then(|key| self.stacks.get(&key, capture.stack, &mut self.reads));
        self.was_repeated = kept.is_some();
        let stack = kept.unwrap_or_else(|| {
            let mut reads = std::mem::take(&mut self.reads);
            let mut memory = StackMemory::new(capture.registers.sp, capture.stack, &mut reads);
            let stack = self.walk((modules, runtime), space, capture.registers, capture.in_flight, &mut memory);
            // A frame that a runtime cannot describe now may be known soon.
            let is_final =
                !reads.left_out && !matches!(stack.completeness, Completeness::Truncated(Reason::Runtime(_)));
            if let Some(key) = key.filter(|_| is_final) {
                self.stacks.put(key, capture.stack, &reads, &stack);
            }
            self.reads = reads;
            stack
        });
        let better = match &stack.completeness {
            // The walk requested words that the stack has but the copy lacks, so its result does not count.
            _ if self.reads.left_out => Some(Reason::OuterFramesChanged),
            Completeness::Truncated(reason) => capture.flaws.explain(reason),
            Completeness::Complete => None,
        };
        let stack = match better {
            Some(better) => self.stacks.intern(RawStack {
                completeness: Completeness::Truncated(better),
                frames: stack.frames.clone(),
                unwinder: stack.unwinder,
            }),
            None => stack,
        };
        self.count(&stack);
        stack
    }

    /// Like [`Self::unwind`], for a stack in any [`Memory`], and without the cache of repeated stacks.
    pub fn unwind_in<M: Memory>(
        &mut self,
        modules: &mut dyn ModuleFiles,
        space: &SpaceView,
        registers: &Registers,
        in_flight: &[InFlightCall],
        memory: &mut M,
    ) -> Arc<RawStack> {
        self.was_repeated = false;
        let stack = self.walk((modules, &mut NoRuntime), space, registers, in_flight, memory);
        self.count(&stack);
        stack
    }

    fn walk<M: Memory>(
        &mut self,
        (files, runtime): (&mut dyn ModuleFiles, &mut dyn RuntimeCode),
        space: &SpaceView,
        registers: &Registers,
        in_flight: &[InFlightCall],
        memory: &mut M,
    ) -> Arc<RawStack> {
        let (rules, max_depth) = (&mut self.rules, self.max_depth);
        let around = Surroundings { space, files, runtime, rules, in_flight, max_depth };
        let completeness = walk(around, State::new(registers, self.bits), memory, &mut self.frames);
        let frames = self.frames.as_slice().into();
        self.stacks.intern(RawStack { frames, unwinder: UnwinderKind::Dwarf, completeness })
    }

    fn count(&mut self, stack: &RawStack) {
        self.statistics.stacks += 1;
        self.statistics.repeated += u64::from(self.was_repeated);
        self.statistics.complete += u64::from(stack.completeness == Completeness::Complete);
    }

    /// Drops unwind sections that have not been used since the last call.
    pub fn drop_unused(&mut self) {
        self.rules.modules.drop_unused();
    }

    /// The counters so far.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            modules: self.rules.modules.count() as u64,
            section_bytes: self.rules.modules.held_bytes as u64,
            ..self.statistics
        }
    }
}

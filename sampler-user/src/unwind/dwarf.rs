//! Unwinding copied stacks by call frame information.
//!
//! The rows are evaluated by gimli; the walk over them is our own because it must follow what ready-made unwinders
//! leave out: all preserved registers (realigned frames, lazy binding), the expressions of signal frames, and *why*
//! a walk ended, without ever guessing in silence. Registers are located, not read: a walk reads one word per frame,
//! and few more.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::cache::{StackCache, StackKey};
use super::cfi::{Budget, Context, ModuleCfi};
use super::image::ModuleFiles;
use super::memory::{Missing, Reads, StackMemory};
use super::raw::{Completeness, RawFrame, RawStack, Reason, SpaceView, UnwinderKind};
use super::rule::{FoundRule, Rule, RuleCache};
use super::state::{State, StepError};
use super::trampoline;
use crate::arch;
use crate::host::mappings::{Mapping, ModuleId};
use sampler_ebpf::abi::{AwaitedReturn, ProcessKey, Registers};

/// More than the frame of a signal takes on the stack that it interrupts (red zone, extended processor state).
const SIGNAL_FRAME_BYTES: u64 = 32 << 10;

/// Where the kernel lets return-probed functions return to. Nothing there says where they came from.
const RETURN_PROBES: &str = "[uprobes]";

/// Limits of an [`Unwinder`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most frames of a stack.
    pub max_depth: usize,
    /// Most bytes of unwind sections held in memory; the least recently used go first.
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
    pub stack: &'a [u8],
    /// Return addresses that are hidden because their return is awaited by us.
    pub awaited: &'a [AwaitedReturn],
}

impl Capture<'_> {
    /// Whether some return addresses may not be on the stack.
    fn hides_returns(&self) -> bool {
        self.awaited.iter().any(|call| call.sp != 0)
    }

    /// The return address of the function that was left with that stack pointer.
    fn hidden_return(&self, sp: u64) -> Option<u64> {
        let entry_sp = sp.wrapping_sub(arch::RETURN_SLOT_BYTES);
        self.awaited.iter().find(|call| call.sp != 0 && call.sp == entry_sp).map(|call| call.caller)
    }
}

/// What unwinding has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Stacks unwound, repeated ones included.
    pub stacks: u64,
    /// Those that were a repetition of one seen before.
    pub repeated: u64,
    /// Stacks that reached the thread's entry.
    pub complete: u64,
    /// Frame rules found in the cache.
    pub rule_hits: u64,
    /// Frame rules evaluated from call frame information.
    pub rule_misses: u64,
    /// Modules whose unwind sections are in memory.
    pub modules: u64,
    /// Bytes of these.
    pub section_bytes: u64,
}

/// Unwinds stacks of any number of processes. Everything it keeps belongs to modules, nothing to a process.
pub struct Unwinder {
    limits: Limits,
    modules: Modules,
    rules: RuleCache,
    stacks: StackCache,
    context: Context,
    reads: Reads,
    frames: Vec<RawFrame>,
    statistics: Statistics,
    was_repeated: bool,
}

impl Default for Unwinder {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

impl Unwinder {
    /// An unwinder that has loaded nothing yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            modules: Modules { loaded: HashMap::new(), budget_bytes: limits.section_bytes, held_bytes: 0, clock: 0 },
            rules: RuleCache::default(),
            stacks: StackCache::default(),
            context: Context::new(),
            reads: Reads::default(),
            frames: Vec::new(),
            statistics: Statistics::default(),
            was_repeated: false,
        }
    }

    /// The stack of a sample. Equal stacks are the same `Arc`, as long as somebody holds it.
    pub fn unwind(&mut self, modules: &mut dyn ModuleFiles, space: &SpaceView, capture: Capture) -> Arc<RawStack> {
        self.statistics.stacks += 1;
        // With hidden return addresses the walk depends on more than what it reads.
        let generation = space.generation.filter(|_| !capture.hides_returns());
        let key = generation.map(|generation| StackKey { space: space.key, generation, registers: *capture.registers });
        let kept = key.and_then(|key| self.stacks.get(&key, capture.stack));
        self.was_repeated = kept.is_some();
        let stack = match kept {
            Some(stack) => {
                self.statistics.repeated += 1;
                stack
            }
            None => {
                let completeness = self.walk(modules, space, capture);
                let stack =
                    RawStack { frames: self.frames.as_slice().into(), unwinder: UnwinderKind::Dwarf, completeness };
                let stack = self.stacks.intern(stack);
                if let Some(key) = key {
                    self.stacks.put(key, capture.stack, &self.reads, &stack);
                }
                stack
            }
        };
        self.statistics.complete += u64::from(stack.completeness == Completeness::Complete);
        stack
    }

    /// The one `Arc` for stacks equal to one that was found in another way.
    pub fn intern(&mut self, stack: RawStack) -> Arc<RawStack> {
        self.stacks.intern(stack)
    }

    /// Whether the last stack was found in the cache.
    pub const fn was_repeated(&self) -> bool {
        self.was_repeated
    }

    /// Drops what was kept for repeated stacks of these address spaces.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        self.stacks.forget(ended);
    }

    /// Lets go of stacks that nobody else has any more.
    pub fn sweep(&mut self) {
        self.stacks.sweep();
    }

    /// Counters.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            rule_hits: self.rules.hits,
            rule_misses: self.rules.misses,
            modules: self.modules.loaded.len() as u64,
            section_bytes: self.modules.held_bytes as u64,
            ..self.statistics
        }
    }

    /// Walks from the capture to the thread's entry, frames into `self.frames`.
    fn walk(&mut self, modules: &mut dyn ModuleFiles, space: &SpaceView, capture: Capture) -> Completeness {
        self.frames.clear();
        let mut memory = StackMemory::new(capture.registers.sp, capture.stack, &mut self.reads);
        let mut state = State::new(capture.registers);
        let mut budget = Budget::of_one_stack();
        // Whether `state.ip` is where execution goes on (the sample itself, an interrupted instruction), as opposed
        // to a return address, which may lie behind the function's last byte.
        let mut is_exact = true;
        let mut was_planted = false;
        let mut on_other_stack = false;
        let hides_returns = capture.hides_returns();
        loop {
            if hides_returns
                && !is_exact
                && let Some(caller) = capture.hidden_return(state.sp)
                && space.find(state.ip).is_some_and(|at| &*modules.path(at.module) == RETURN_PROBES)
            {
                state.ip = caller;
            }
            let lookup = if is_exact { state.ip } else { state.ip.wrapping_sub(1) };
            let is_first = self.frames.is_empty();
            // The sample's own frame is looked up exactly, but named after the call it has just returned from.
            let mut address = if is_first { lookup.wrapping_sub(1) } else { lookup };
            let Some(mapping) = space.find(lookup) else {
                // The trampoline is the first thing in its page: what is looked up lies before.
                if space.find(state.ip).is_some_and(|at| &*modules.path(at.module) == RETURN_PROBES) {
                    return Completeness::Cut(Reason::ReturnProbe);
                }
                let step = state.clone().leave_by_frame_pointer_into(space, &mut memory);
                if is_first || step.is_some() {
                    self.frames.push(RawFrame { address, module: None, file_offset: 0 });
                }
                match step {
                    Some(caller) if self.frames.len() < self.limits.max_depth => state = caller,
                    Some(_) => return Completeness::Cut(Reason::DepthLimit),
                    None if was_planted => return Completeness::Complete,
                    None if state.ip == 0 => return Completeness::Cut(Reason::NullReturnAddress),
                    None => return Completeness::Cut(Reason::UnmappedAddress),
                }
                is_exact = false;
                continue;
            };
            let file_offset = mapping.offset_of(lookup);
            let found = match self.rules.get(mapping.module, file_offset) {
                Some(found) => Ok(found),
                None => {
                    self.modules.rule(modules, mapping.module, file_offset, !is_exact, &mut self.context, &mut budget)
                }
            };
            if let Ok(found) = &found {
                self.rules.put(mapping.module, file_offset, *found);
                if found.planted {
                    address = address.wrapping_add(1);
                }
            }
            let below = self.frames.last().and_then(|frame| frame.module);
            self.frames.push(RawFrame::in_mapping(address, mapping));
            let is_planted = found.as_ref().is_ok_and(|found| found.planted);
            let rule = match &found {
                Ok(found) => found.rule,
                Err(_) => Rule::Uncovered,
            };
            was_planted = is_planted && rule != Rule::SignalTrampoline;
            if matches!(rule, Rule::End | Rule::EntryPoint) {
                return Completeness::Complete;
            }
            if self.frames.len() >= self.limits.max_depth {
                return Completeness::Cut(Reason::DepthLimit);
            }
            is_exact = false;
            let sp = state.sp;
            let step = match rule {
                Rule::Plain(plain) => state.leave_plain(&plain, &mut memory),
                Rule::Entry { section, offset } => {
                    let step = self.modules.with_row(
                        modules,
                        mapping.module,
                        file_offset + u64::from(is_planted),
                        (section, offset),
                        &mut self.context,
                        |row| {
                            is_exact = row.entry.is_signal_trampoline();
                            state.leave_by_row(&row, &mut memory)
                        },
                    );
                    step.unwrap_or(Err(StepError::Unknown))
                }
                Rule::SignalTrampoline => {
                    is_exact = true;
                    state.leave_signal(&mut memory)
                }
                // To go on by frame pointer would leave the probed function's caller out in silence.
                Rule::Uncovered if &*modules.path(mapping.module) == RETURN_PROBES => {
                    self.frames.pop();
                    return Completeness::Cut(Reason::ReturnProbe);
                }
                Rule::Uncovered => {
                    // A link register into uncovered code of the same file may be from a call of the function's own.
                    let by_link = state.leave_by_link(&mut memory).filter(|caller| {
                        let call = caller.ip.wrapping_sub(1);
                        space.find(call).is_some_and(|at| {
                            let (context, offset) = (&mut self.context, at.offset_of(call));
                            let mut rule = || self.modules.rule(modules, at.module, offset, true, context, &mut budget);
                            at.module != mapping.module || rule().is_ok_and(|found| found.rule != Rule::Uncovered)
                        })
                    });
                    let leave = || leave_uncovered(&state, space, &mut memory, modules, mapping, below);
                    let Some(caller) = by_link.or_else(leave) else {
                        let why = state.clone().leave_by_frame_pointer(&mut memory);
                        return Completeness::Cut(self.why_uncovered(modules, mapping, found.err(), why.err()));
                    };
                    state = caller;
                    Ok(())
                }
                Rule::Bad | Rule::End | Rule::EntryPoint => Err(StepError::Unknown),
            };
            // Only a signal can move to another stack and have the way back written down.
            on_other_stack |= is_exact && state.sp.wrapping_sub(sp) > SIGNAL_FRAME_BYTES;
            // It was put there by hand, and nobody's return address is in the link register.
            if arch::LINK.is_some() && is_planted && step == Err(StepError::Unknown) {
                return Completeness::Complete;
            }
            if let Err(error) = step {
                return Completeness::Cut(match error {
                    StepError::Missing(_) if on_other_stack => Reason::OtherStack,
                    StepError::Missing(Missing::Above) => Reason::StackCopyTooSmall,
                    StepError::Missing(Missing::Elsewhere) => Reason::OtherStack,
                    StepError::Backwards | StepError::ZeroFramePointer => Reason::BrokenChain,
                    StepError::Unknown if budget.is_spent() => Reason::TooExpensive,
                    StepError::Unknown => Reason::BadUnwindInformation(mapping.module),
                });
            }
        }
    }

    /// Why a frame without call frame information could not be left by its frame pointer either.
    fn why_uncovered(
        &self,
        modules: &mut dyn ModuleFiles,
        mapping: &Mapping,
        unreadable: Option<Arc<str>>,
        step: Option<StepError>,
    ) -> Reason {
        match (unreadable, step) {
            (_, Some(StepError::Missing(Missing::Above))) => Reason::StackCopyTooSmall,
            (_, Some(StepError::ZeroFramePointer)) => Reason::FramePointersEnd,
            (Some(why), _) if !modules.is_anonymous(mapping.module) => Reason::Unreadable(mapping.module, why),
            _ => Reason::NoUnwindInformation(mapping.module),
        }
    }
}

/// The caller of a frame that no call frame information covers.
fn leave_uncovered(
    state: &State,
    space: &SpaceView,
    memory: &mut StackMemory,
    modules: &mut dyn ModuleFiles,
    mapping: &Mapping,
    below: Option<ModuleId>,
) -> Option<State> {
    let by_frame_pointer = state.leave_by_frame_pointer_into(space, memory);
    if by_frame_pointer.is_some() || !modules.is_anonymous(mapping.module) {
        return by_frame_pointer;
    }
    trampoline::leave(state, space, memory, modules, below)
}

impl State {
    /// The caller by frame pointer, if its return address lies in a known mapping: the only evidence there is that
    /// the register was a frame pointer at all.
    fn leave_by_frame_pointer_into(&self, space: &SpaceView, memory: &mut StackMemory) -> Option<Self> {
        let mut caller = self.clone();
        caller.leave_by_frame_pointer(memory).ok()?;
        space.find(caller.ip.wrapping_sub(1))?;
        Some(caller)
    }
}

/// Unwind sections of modules, within a budget.
struct Modules {
    loaded: HashMap<ModuleId, Loaded>,
    budget_bytes: usize,
    held_bytes: usize,
    clock: u64,
}

struct Loaded {
    cfi: Result<Arc<ModuleCfi>, Arc<str>>,
    size_bytes: usize,
    used: u64,
}

impl Modules {
    /// The rule for an address that no cache knows.
    ///
    /// # Errors
    /// Why the module cannot be read.
    fn rule(
        &mut self,
        source: &mut dyn ModuleFiles,
        module: ModuleId,
        file_offset: u64,
        is_return: bool,
        context: &mut Context,
        budget: &mut Budget,
    ) -> Result<FoundRule, Arc<str>> {
        let cfi = self.cfi(source, module)?;
        // The sections are the target's: gimli promises not to panic on them, and this makes it certain for us.
        let mut code =
            |offset, buffer: &mut [u8]| source.image(module).is_ok_and(|image| image.read_at(offset, buffer).is_ok());
        let rule = catch_unwind(AssertUnwindSafe(|| cfi.rule(context, file_offset, is_return, &mut code, budget)));
        Ok(rule.unwrap_or_else(|_| {
            *context = Context::new();
            FoundRule { rule: Rule::Bad, planted: false }
        }))
    }

    fn with_row<T>(
        &mut self,
        source: &mut dyn ModuleFiles,
        module: ModuleId,
        file_offset: u64,
        (section, offset): (super::rule::Section, u32),
        context: &mut Context,
        visit: impl FnOnce(super::cfi::Row<'_, '_>) -> T,
    ) -> Option<T> {
        let cfi = self.cfi(source, module).ok()?;
        // As above.
        let result = catch_unwind(AssertUnwindSafe(|| cfi.with_row(context, file_offset, section, offset, visit)));
        result.unwrap_or_else(|_| {
            *context = Context::new();
            None
        })
    }

    fn cfi(&mut self, source: &mut dyn ModuleFiles, module: ModuleId) -> Result<Arc<ModuleCfi>, Arc<str>> {
        self.clock += 1;
        if let Some(loaded) = self.loaded.get_mut(&module) {
            loaded.used = self.clock;
            return loaded.cfi.clone();
        }
        let cfi = load(source, module);
        let size_bytes = cfi.as_ref().map_or(0, |cfi| cfi.size_bytes()) + size_of::<ModuleCfi>();
        self.held_bytes += size_bytes;
        while self.held_bytes > self.budget_bytes && !self.loaded.is_empty() {
            let oldest = self.loaded.iter().min_by_key(|(_, loaded)| loaded.used).map(|(id, _)| *id);
            if let Some(gone) = oldest.and_then(|id| self.loaded.remove(&id)) {
                self.held_bytes -= gone.size_bytes;
            }
        }
        self.loaded.insert(module, Loaded { cfi: cfi.clone(), size_bytes, used: self.clock });
        cfi
    }
}

fn load(source: &mut dyn ModuleFiles, module: ModuleId) -> Result<Arc<ModuleCfi>, Arc<str>> {
    let image = source.image(module).map_err(Arc::<str>::from)?;
    // As above: the file is the target's.
    let read = catch_unwind(AssertUnwindSafe(|| ModuleCfi::read(&*image)));
    match read {
        Ok(Ok(cfi)) => Ok(Arc::new(cfi)),
        Ok(Err(error)) => Err(error.to_string().into()),
        Err(_) => Err("malformed file".into()),
    }
}

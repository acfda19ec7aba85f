//! The walk: from a sample's registers, frame by frame, to the thread's entry.

use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;

use sampler_ebpf::abi::InFlightCall;

use crate::arch;
use crate::cfi::Budget;
use crate::image::ModuleFiles;
use crate::mapping::{Mapping, ModuleId};
use crate::memory::{Memory, Missing};
use crate::raw::{Completeness, RawFrame, Reason, SpaceView};
use crate::rule::{FoundRule, Rule};
use crate::rules::Rules;
use crate::runtime::{Left, RuntimeCode};
use crate::state::{State, StepError};

/// Upper bound for a signal frame's size on the stack that it interrupts (red zone, extended processor state).
const SIGNAL_FRAME_BYTES: u64 = 32 << 10;

/// Name of the mapping that return-probed functions return to in the kernel's scheme. It has no call frame information.
const RETURN_PROBES: &str = "[uprobes]";

/// Everything that a walk needs, except memory.
pub struct Surroundings<'a> {
    /// Address space of the thread.
    pub space: &'a SpaceView<'a>,
    /// Files behind its mappings.
    pub files: &'a mut dyn ModuleFiles,
    /// Rules for the code in these files.
    pub rules: &'a mut Rules,
    /// Code that language runtimes generated.
    pub runtime: &'a mut dyn RuntimeCode,
    /// Calls whose return addresses the kernel has replaced with its trampoline.
    pub in_flight: &'a [InFlightCall],
    /// Maximum number of frames.
    pub max_depth: usize,
}

/// A walk in progress.
struct Walk<'a, M> {
    around: Surroundings<'a>,
    memory: &'a mut M,
    /// Frames found so far.
    frames: &'a mut Vec<RawFrame>,
    budget: Budget,
    state: State,
    /// Whether `state.ip` is the next instruction to execute (of the sample itself, or of interrupted code). Otherwise
    /// it is a return address, which may lie past the function's last byte.
    is_exact: bool,
    /// Whether the last frame's return address was synthetic.
    was_synthetic: bool,
    /// Whether a signal has led to another stack than the one that the walk began on.
    on_other_stack: bool,
}

/// Walks from `state` to the thread's entry. Stores the frames in `frames`, which is cleared first.
pub fn walk<'a, M: Memory>(
    around: Surroundings<'a>,
    state: State,
    memory: &'a mut M,
    frames: &'a mut Vec<RawFrame>,
) -> Completeness {
    frames.clear();
    let mut walk = Walk {
        around,
        memory,
        frames,
        budget: Budget::of_one_stack(),
        state,
        is_exact: true,
        was_synthetic: false,
        on_other_stack: false,
    };
    loop {
        if let Break(completeness) = walk.step() {
            return completeness;
        }
    }
}

const fn truncated(reason: Reason) -> ControlFlow<Completeness> {
    Break(Completeness::Truncated(reason))
}

impl<'a, M: Memory> Walk<'a, M> {
    /// Records the frame at `state`, and moves on to its caller.
    fn step(&mut self) -> ControlFlow<Completeness> {
        self.restore_return_address();
        let lookup = if self.is_exact { self.state.ip } else { self.state.ip.wrapping_sub(1) };
        // The sample's own frame is looked up at its exact address, but named after the call that it has just returned
        // from.
        let address = if self.frames.is_empty() { lookup.wrapping_sub(1) } else { lookup };
        match self.around.space.find(lookup) {
            Some(mapping) => self.leave_mapped(mapping, lookup, address),
            None => self.leave_unmapped(address),
        }
    }

    /// Replaces the kernel's trampoline with the real return address of a call in flight.
    fn restore_return_address(&mut self) {
        if self.is_exact || self.around.in_flight.is_empty() {
            return;
        }
        let entry_sp = self.state.sp.wrapping_sub(arch::RETURN_SLOT_BYTES);
        let left = self.around.in_flight.iter().find(|call| call.sp != 0 && call.sp == entry_sp);
        if let Some(call) = left
            && self.is_return_probe(self.state.ip)
        {
            self.state.ip = call.caller;
        }
    }

    /// Whether `address` is in the kernel's trampoline for return probes.
    fn is_return_probe(&self, address: u64) -> bool {
        self.around.space.find(address).is_some_and(|mapping| self.is_of_return_probes(mapping))
    }

    fn is_of_return_probes(&self, mapping: &Mapping) -> bool {
        &*self.around.files.path(mapping.module) == RETURN_PROBES
    }

    /// Unwinds a frame whose code lies in no known mapping.
    fn leave_unmapped(&mut self, address: u64) -> ControlFlow<Completeness> {
        // The trampoline is at the start of its page, so the lookup address lies before the page.
        if self.is_return_probe(self.state.ip) {
            return truncated(Reason::ReturnProbe);
        }
        // Zero is not the address of a calling function: whatever the frame pointer leads to, it is not the caller of
        // this frame. (An interrupted instruction at zero is a call through a null pointer.)
        if self.state.ip == 0 && !self.is_exact && !self.was_synthetic {
            return truncated(Reason::NullReturnAddress);
        }
        if let Some(left) = self.leave_runtime() {
            return left;
        }
        let caller = self.caller_by_frame_pointer();
        if self.frames.is_empty() || caller.is_some() {
            self.frames.push(RawFrame { address, module: None, file_offset: 0 });
        }
        match caller {
            Some(_) if self.frames.len() >= self.around.max_depth => truncated(Reason::DepthLimit),
            Some(caller) => {
                self.state = caller;
                self.is_exact = false;
                Continue(())
            }
            None if self.was_synthetic => Break(Completeness::Complete),
            None if self.state.ip == 0 => truncated(Reason::NullReturnAddress),
            None => truncated(Reason::UnmappedAddress),
        }
    }

    /// Unwinds a frame whose code lies in `mapping`, by the rule for `lookup`.
    fn leave_mapped(&mut self, mapping: &'a Mapping, lookup: u64, address: u64) -> ControlFlow<Completeness> {
        let Surroundings { files, rules, .. } = &mut self.around;
        let found = rules.find(&mut **files, mapping, lookup, !self.is_exact, &mut self.budget);
        let (FoundRule { rule, synthetic }, unreadable) = match found {
            Ok(found) => (found, None),
            Err(why) => (FoundRule { rule: Rule::Uncovered, synthetic: false }, Some(why)),
        };
        let callee = self.frames.last().and_then(|frame| frame.module);
        self.frames.push(RawFrame::in_mapping(address.wrapping_add(u64::from(synthetic)), mapping));
        self.was_synthetic = synthetic && rule != Rule::SignalTrampoline;
        if matches!(rule, Rule::End | Rule::EntryPoint) {
            return Break(Completeness::Complete);
        }
        if self.frames.len() >= self.around.max_depth {
            return truncated(Reason::DepthLimit);
        }
        self.is_exact = false;
        if rule == Rule::Uncovered {
            return self.leave_uncovered(mapping, callee, unreadable);
        }
        let sp = self.state.sp;
        let ip = self.state.ip;
        let step = self.leave_by_rule(rule, mapping.module, mapping.offset_of(lookup) + u64::from(synthetic));
        // Handlers return to the first byte of a signal trampoline; the byte before it is not part of its symbol.
        if self.is_exact
            && let Some(frame) = self.frames.last_mut()
        {
            *frame = RawFrame::in_mapping(ip, mapping);
        }
        // Only a signal frame can lead to another stack and say how to get back.
        self.on_other_stack |= self.is_exact && self.state.sp.wrapping_sub(sp) > SIGNAL_FRAME_BYTES;
        match step {
            Ok(()) => Continue(()),
            // No call led there, so the link register does not hold a caller's return address.
            Err(StepError::Unknown) if arch::LINK.is_some() && synthetic => Break(Completeness::Complete),
            Err(error) => truncated(self.why_not_left(error, mapping.module)),
        }
    }

    /// Unwinds a frame whose code, at `file_offset` of `module`, has a rule.
    fn leave_by_rule(&mut self, rule: Rule, module: ModuleId, file_offset: u64) -> Result<(), StepError> {
        match rule {
            Rule::Plain(plain) => self.state.leave_plain(&plain, self.memory),
            Rule::Entry { section, offset } => {
                let Surroundings { files, rules, .. } = &mut self.around;
                let (entry, budget) = ((section, offset), &mut self.budget);
                let step = rules.with_row(&mut **files, (module, file_offset), entry, budget, |row| {
                    self.is_exact = row.entry.is_signal_trampoline();
                    self.state.leave_by_row(&row, self.memory)
                });
                step.unwrap_or(Err(StepError::Unknown))
            }
            Rule::SignalTrampoline => {
                self.is_exact = true;
                self.state.leave_signal(self.memory)
            }
            Rule::Bad | Rule::End | Rule::EntryPoint | Rule::Uncovered => Err(StepError::Unknown),
        }
    }

    fn why_not_left(&self, error: StepError, module: ModuleId) -> Reason {
        match error {
            StepError::Missing(_) if self.on_other_stack => Reason::OtherStack,
            StepError::Missing(Missing::Above) => Reason::StackCopyTooSmall,
            StepError::Missing(Missing::Elsewhere) => Reason::OtherStack,
            StepError::Backwards | StepError::ZeroFramePointer => Reason::BrokenChain,
            StepError::Unknown if self.budget.is_spent() => Reason::TooExpensive,
            StepError::Unknown => Reason::BadUnwindInformation(module),
        }
    }

    /// Unwinds a frame that no call frame information covers, and that has called into module `callee`. `unreadable`:
    /// why the mapping's file could not be read.
    fn leave_uncovered(
        &mut self,
        mapping: &Mapping,
        callee: Option<ModuleId>,
        unreadable: Option<Arc<str>>,
    ) -> ControlFlow<Completeness> {
        // Continuing by frame pointer would silently leave out the caller of the probed function.
        if self.is_of_return_probes(mapping) {
            self.frames.pop();
            return truncated(Reason::ReturnProbe);
        }
        if self.around.files.is_anonymous(mapping.module) {
            let unnamed = self.frames.pop();
            if let Some(left) = self.leave_runtime() {
                return left;
            }
            self.frames.extend(unnamed);
        }
        let caller = self.caller_by_link(mapping).or_else(|| self.caller_by_frame_pointer());
        let caller = caller.or_else(|| self.caller_of_trampoline(mapping, callee));
        if let Some(caller) = caller {
            self.state = caller;
            return Continue(());
        }
        let step = self.state.clone().leave_by_frame_pointer(self.memory).err();
        let module = mapping.module;
        truncated(match (unreadable, step) {
            (_, Some(StepError::Missing(Missing::Above))) => Reason::StackCopyTooSmall,
            (_, Some(StepError::ZeroFramePointer)) => Reason::FramePointersEnd,
            (Some(why), _) if !self.around.files.is_anonymous(module) => Reason::Unreadable(module, why),
            _ => Reason::NoUnwindInformation(module),
        })
    }

    /// Unwinds a frame of code that a language runtime generated, which may stand for several frames; `None` if it is
    /// not the runtime's code.
    fn leave_runtime(&mut self) -> Option<ControlFlow<Completeness>> {
        let at = self.state.for_runtime(self.memory);
        let Surroundings { space, runtime, .. } = &mut self.around;
        let left = runtime.leave(space, at, self.memory, self.frames);
        if left != Left::NotMine {
            (self.is_exact, self.was_synthetic) = (false, false);
        }
        Some(match left {
            Left::NotMine => return None,
            Left::Missing(Missing::Above) if !self.on_other_stack => truncated(Reason::StackCopyTooSmall),
            Left::Missing(_) => truncated(Reason::OtherStack),
            Left::Stuck(why) => truncated(Reason::Runtime(why)),
            Left::To(_) if self.frames.len() >= self.around.max_depth => {
                self.frames.truncate(self.around.max_depth);
                truncated(Reason::DepthLimit)
            }
            Left::To(caller) => match self.state.leave_runtime(caller) {
                Ok(()) => Continue(()),
                Err(_) => truncated(Reason::BrokenChain),
            },
        })
    }

    /// Returns the caller by frame pointer, if its return address lies in a known mapping. That is the only evidence
    /// that the register was a frame pointer at all.
    fn caller_by_frame_pointer(&mut self) -> Option<State> {
        let mut caller = self.state.clone();
        caller.leave_by_frame_pointer(self.memory).ok()?;
        self.around.space.find(caller.ip.wrapping_sub(1))?;
        Some(caller)
    }

    /// Returns the caller by link register, if it leads to covered code or to another file. Uncovered code of the same
    /// file is not trusted: the register may be from a call that the function itself has made.
    fn caller_by_link(&mut self, mapping: &Mapping) -> Option<State> {
        let caller = self.state.leave_by_link(self.memory)?;
        let call = caller.ip.wrapping_sub(1);
        let at = self.around.space.find(call)?;
        let Surroundings { files, rules, .. } = &mut self.around;
        let mut rule = || rules.evaluate(&mut **files, at, call, true, &mut self.budget);
        (at.module != mapping.module || rule().is_ok_and(|found| found.rule != Rule::Uncovered)).then_some(caller)
    }

    /// Returns the caller of code without a file that is only a trampoline.
    fn caller_of_trampoline(&mut self, mapping: &Mapping, callee: Option<ModuleId>) -> Option<State> {
        let Surroundings { space, files, .. } = &mut self.around;
        if !files.is_anonymous(mapping.module) {
            return None;
        }
        leave_trampoline(&self.state, space, self.memory, &mut **files, callee)
    }
}

/// Returns the caller of the trampoline at `state`, which has called into module `callee`; `None` if it does not look
/// like one.
///
/// Such trampolines are generated at run time and only align the stack and make a call: CPython's under `-X perf`. On
/// some machines they have neither call frame information nor a frame pointer. Their bytes are not available when the
/// stack is unwound, so a trampoline is inferred: it lies in memory without a file, its callee and its caller lie in the
/// same file, and its return address follows a call instruction in that file.
fn leave_trampoline(
    state: &State,
    space: &SpaceView,
    memory: &mut impl Memory,
    modules: &mut dyn ModuleFiles,
    callee: Option<ModuleId>,
) -> Option<State> {
    let known = arch::BARE_TRAMPOLINE?;
    let return_at = state.sp.checked_add(known.kept_bytes)?;
    let return_address = state.code_address(memory.read(return_at).ok()?);
    let mapping = space.find(return_address.wrapping_sub(1))?;
    if Some(mapping.module) != callee {
        return None;
    }
    let file_offset = mapping.offset_of(return_address.wrapping_sub(1)).checked_add(1)?;
    let mut bytes = [0; arch::LONGEST_CALL];
    let image = modules.image(mapping.module).ok()?;
    image.read_at(file_offset.checked_sub(arch::LONGEST_CALL as u64)?, &mut bytes).ok()?;
    (known.ends_in_call)(&bytes).then(|| state.returned(return_address, return_at.wrapping_add(8)))
}

//! The walk: from a sample's registers, frame by frame, to the thread's entry.

mod no_unwind_information;

use std::ops::ControlFlow::{self, Break, Continue};

use sampler_ebpf::abi::InFlightCall;

use crate::arch;
use crate::cfi::Budget;
use crate::image::ModuleFiles;
use crate::mapping::{Mapping, ModuleId};
use crate::memory::{Memory, Missing};
use crate::raw::{Completeness, RawFrame, Reason, SpaceView};
use crate::rule::{FoundRule, Rule};
use crate::rules::Rules;
use crate::runtime::RuntimeCode;
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
}

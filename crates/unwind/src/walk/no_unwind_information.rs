//! What the walk does in code without unwind information: it asks the runtime that generated the code, and continues by
//! link register, by frame pointer, or as out of a trampoline.

use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;

use super::{Surroundings, Walk, truncated};
use crate::arch;
use crate::image::ModuleFiles;
use crate::mapping::{Mapping, ModuleId};
use crate::memory::{Memory, Missing};
use crate::raw::{Completeness, RawFrame, Reason, SpaceView};
use crate::rule::Rule;
use crate::runtime::Left;
use crate::state::{State, StepError};

impl<M: Memory> Walk<'_, M> {
    /// Unwinds a frame whose code lies in no known mapping.
    pub(super) fn leave_unmapped(&mut self, address: u64) -> ControlFlow<Completeness> {
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

    /// Unwinds a frame that no call frame information covers, and that has called into module `callee`. `unreadable`:
    /// why the mapping's file could not be read.
    pub(super) fn leave_uncovered(
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

//! Where the recorder gets the stack of a sample: by unwinding a copy, from the kernel's walk, or from the caller
//! alone. Also what the stack of a mapping tells about who made it.

use std::collections::HashMap;
use std::sync::Arc;

use heapbpf_heap::event::{decode_python, decode_python_code, decode_stack};
use heapbpf_host::Host;
use heapbpf_host::mappings::{AtTime, ModuleId};
use heapbpf_host::modules::ModuleKind;
use heapbpf_kernel::rings::Ring;
use heapbpf_profile::model::LossBound;
use heapbpf_unwind::dwarf::{Capture, CopyEnd, Flaws};
use heapbpf_unwind::image::ModuleFiles as _;
use heapbpf_unwind::kernel_walk;
use heapbpf_unwind::raw::{Completeness, RawStack, Reason};
use sampler_ebpf::abi::{AllocationRecord, MOST_MISSING_PAGES, ProcessKey, StackRecord, copy_end};

use super::Recorder;

/// Maximum number of stack copies unwound before other work gets its turn.
const MOST_COPIES: usize = 256;

/// Limit on cached stacks that the daemon did not unwind itself. A target can make any number. A full cache is cleared
/// and filled again.
const MOST_STACKS: usize = 1 << 16;

/// Who made a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    /// The program.
    Program,
    /// An allocator, for itself.
    Allocator,
    /// Code of a file that has not been examined yet: the process is not counted yet.
    Early,
    /// The program or an allocator: the stack ends in files that have allocators.
    Undecided,
}

/// The code of allocators, by module: file offsets between which everything runs for an allocator. Files without an
/// allocator have none. Files that are not here have not been examined.
#[derive(Debug, Default)]
pub struct AllocatorCode(HashMap<ModuleId, Vec<[u64; 2]>>);

impl AllocatorCode {
    /// Adds modules, or replaces what is known about them. `None`: forgets what is known.
    pub fn learn(&mut self, modules: Vec<(ModuleId, Option<Vec<[u64; 2]>>)>) {
        for (module, code) in modules {
            match code {
                Some(code) => self.0.insert(module, code),
                None => self.0.remove(&module),
            };
        }
    }

    /// Forgets modules for which `stays` returns false.
    pub fn forget(&mut self, stays: impl Fn(ModuleId) -> bool) {
        self.0.retain(|module, _| stays(*module));
    }

    /// Who made a mapping with this stack. `is_file`: whether a module is a file.
    fn maker(&self, stack: &RawStack, is_file: impl Fn(ModuleId) -> bool) -> Maker {
        let (mut is_early, mut has_left) = (false, false);
        for frame in &stack.frames {
            let code = frame.module.map(|module| self.0.get(&module).ok_or(module));
            match code {
                Some(Ok(code)) if code.iter().any(|[start, end]| (*start..*end).contains(&frame.file_offset)) => {
                    return Maker::Allocator;
                }
                Some(Ok(code)) => has_left |= code.is_empty(),
                Some(Err(module)) if is_file(module) => is_early = true,
                // Code that was made at run time, or that the kernel provides.
                Some(Err(_)) | None => has_left = true,
            }
        }
        match stack.completeness {
            _ if is_early => Maker::Early,
            Completeness::Truncated(_) if !has_left => Maker::Undecided,
            Completeness::Complete | Completeness::Truncated(_) => Maker::Program,
        }
    }
}

impl Recorder {
    /// Unwinds the stack copies of one read of the stacks ring. Returns their number.
    pub(super) fn drain_stacks(&mut self, stacks: &mut Ring, host: &mut Host) -> usize {
        let reserved = stacks.reserved_up_to();
        if stacks.read_up_to() == reserved {
            return 0;
        }
        // After this, all mappings made before these stacks were copied are known.
        self.poll(host);
        stacks.visit(reserved, MOST_COPIES, |copy| self.unwind(copy, host))
    }

    /// Unwinds a stack copy, a record of the stacks ring.
    fn unwind(&mut self, copy: &[u8], host: &mut Host) {
        if let Some(record) = decode_python(copy) {
            self.pythons.take_in(record);
            return;
        }
        if let Some(record) = decode_python_code(copy) {
            self.pythons.take_in_code(record);
            return;
        }
        let Some(copied) = decode_stack(copy) else {
            self.counters.records_unknown += 1;
            return;
        };
        let head = copied.head;
        self.longest_copy_bytes = self.longest_copy_bytes.max(u64::from(head.copied_bytes));
        let (registers, in_flight) = (&head.registers, &head.in_flight);
        let capture = Capture { registers, stack: copied.copy(), in_flight, flaws: flaws_of(&head) };
        let (processes, modules) = host.split();
        let space = processes.at(head.space.tgid, head.time_ns).map_or(&self.nowhere, |generation| &generation.space);
        self.javas.look_at(head.space, space, modules);
        let at = AtTime::new(space, head.time_ns);
        let mut stack = self.unwinder.unwind_with(modules, &mut self.javas, &at.view(head.space), capture);
        if !self.unwinder.was_repeated && stack.has_jit_code(modules) {
            self.runs_jit_code(head.space, head.time_ns);
        }
        let is_shortened = stack.completeness == Completeness::Truncated(Reason::StackCopyShortened);
        self.counters.stacks_shortened += u64::from(is_shortened);
        if head.ends_at == copy_end::PROCESS_LIMIT {
            let is_cut = stack.completeness == Completeness::Truncated(Reason::StackCopyTooSmall);
            self.stack_limits.note(head.space, u64::from(head.copied_bytes), is_cut);
        }
        if head.ends_at == copy_end::TOP {
            self.outer_stacks.note(&head, &stack, &self.unwinder.reads);
        }
        if let Some(merged) = self.pythons.merged(&head, &stack, &|module| modules.is_anonymous(module)) {
            stack = self.unwinder.stacks.intern(merged);
        }
        self.join.arrive(head.sample, stack);
    }

    /// A stack that was not copied, resolved once: what the kernel walked, or the caller alone for a `reason`.
    pub(super) fn without_copy(
        &mut self,
        record: &AllocationRecord,
        reason: Option<Reason>,
        host: &mut Host,
    ) -> Arc<RawStack> {
        let stack_id = if reason.is_none() { record.stack_id } else { 0 };
        let key = (record.space, record.caller, record.stack_kind, stack_id);
        if let Some(stack) = self.without_copies.get(&key) {
            return Arc::clone(stack);
        }
        self.poll(host);
        let at = self.at_time(record, host);
        let view = at.view(record.space);
        let stack = match reason {
            Some(reason) => RawStack::caller_only(&view, record.caller, reason),
            None => kernel_walk::from_kernel(&view, record.caller, &(self.traces)(stack_id), self.max_depth),
        };
        let stack = self.unwinder.stacks.intern(stack);
        if stack.has_jit_code(host.modules()) {
            self.runs_jit_code(record.space, record.time_ns);
        }
        if self.without_copies.len() >= MOST_STACKS {
            self.without_copies.clear();
        }
        self.without_copies.insert(key, Arc::clone(&stack));
        stack
    }

    /// Whether a sampled mapping does not count, because an allocator made it, or may have made it. Counts these.
    pub(super) fn leaves_out(&mut self, record: &AllocationRecord, stack: &RawStack, host: &Host) -> bool {
        let Some(allocators) = &self.allocators else { return false };
        let is_file = |module| host.modules().get(module).is_some_and(|module| module.kind == ModuleKind::File);
        match allocators.maker(stack, is_file) {
            Maker::Program => return false,
            Maker::Allocator => self.counters.mappings_of_allocators += 1,
            Maker::Early => self.counters.mappings_early += 1,
            Maker::Undecided => {
                self.counters.mappings_undecided += 1;
                let blocks = self.undecided.entry(record.process).or_default();
                blocks.add(&LossBound { samples: 1, sampled_bytes: record.size_bytes });
            }
        }
        true
    }

    /// Sampled mappings of a process that do not count because it is not known who made them.
    pub fn undecided_mappings(&self, process: &ProcessKey) -> LossBound {
        self.undecided.get(process).copied().unwrap_or_default()
    }

    /// The address space of a record at the time of the record.
    fn at_time<'a>(&'a self, record: &AllocationRecord, host: &'a Host) -> AtTime<'a> {
        let generation = host.processes().at(record.space.tgid, record.time_ns);
        AtTime::new(generation.map_or(&self.nowhere, |generation| &generation.space), record.time_ns)
    }
}

/// How a copy differs from the stack.
fn flaws_of(head: &StackRecord) -> Flaws {
    let end = match head.ends_at {
        _ if head.missing_pages > MOST_MISSING_PAGES => CopyEnd::MissingPage,
        copy_end::TOP => CopyEnd::Top,
        copy_end::NO_SPACE => CopyEnd::NoSpace,
        _ => CopyEnd::Limit,
    };
    Flaws { end, has_gaps: head.missing_pages > 0 }
}

#[cfg(test)]
mod tests {
    use heapbpf_unwind::raw::{RawFrame, UnwinderKind};

    use super::*;

    const LIBC: ModuleId = ModuleId(1);
    const PROGRAM: ModuleId = ModuleId(2);
    const NEW: ModuleId = ModuleId(3);
    const JIT: ModuleId = ModuleId(4);

    /// A stack of frames at these offsets, innermost first.
    fn stack(frames: &[(ModuleId, u64)], completeness: Completeness) -> RawStack {
        let frame =
            |&(module, file_offset): &(ModuleId, u64)| RawFrame { address: 1, module: Some(module), file_offset };
        RawStack { frames: frames.iter().map(frame).collect(), unwinder: UnwinderKind::Dwarf, completeness }
    }

    #[test]
    fn who_made_a_mapping_is_told_by_its_stack() {
        let mut code = AllocatorCode::default();
        code.learn(vec![(LIBC, Some(vec![[100, 200], [300, 310]])), (PROGRAM, Some(Vec::new()))]);
        let maker =
            |frames: &[(ModuleId, u64)], completeness| code.maker(&stack(frames, completeness), |module| module != JIT);
        let whole = |frames: &[(ModuleId, u64)]| maker(frames, Completeness::Complete);
        let cut = |frames: &[(ModuleId, u64)]| maker(frames, Completeness::Truncated(Reason::StackRingFull));
        assert_eq!(whole(&[(LIBC, 500), (PROGRAM, 150), (LIBC, 600)]), Maker::Program);
        for inside in [100, 199, 300, 309] {
            assert_eq!(whole(&[(LIBC, 500), (LIBC, inside), (PROGRAM, 7)]), Maker::Allocator);
            assert_eq!(cut(&[(LIBC, 500), (NEW, 1), (LIBC, inside)]), Maker::Allocator, "whatever else is there");
        }
        for outside in [99, 200, 299, 310] {
            assert_eq!(whole(&[(LIBC, 500), (LIBC, outside), (PROGRAM, 7)]), Maker::Program);
        }
        assert_eq!(whole(&[(LIBC, 500), (NEW, 150), (PROGRAM, 7)]), Maker::Early);
        assert_eq!((cut(&[(LIBC, 500)]), cut(&[])), (Maker::Undecided, Maker::Undecided));
        assert_eq!(cut(&[(LIBC, 500), (PROGRAM, 7)]), Maker::Program, "the allocator would have been left by then");
        assert_eq!(cut(&[(LIBC, 500), (JIT, 7)]), Maker::Program);
        code.forget(|module| module != LIBC);
        let stack = stack(&[(LIBC, 150), (PROGRAM, 7)], Completeness::Complete);
        let maker = |code: &AllocatorCode| code.maker(&stack, |_| true);
        assert_eq!(maker(&code), Maker::Early);
        code.learn(vec![(LIBC, Some(vec![[100, 200]]))]);
        assert_eq!(maker(&code), Maker::Allocator);
        code.learn(vec![(LIBC, None)]);
        assert_eq!(maker(&code), Maker::Early, "it was overwritten");
    }
}

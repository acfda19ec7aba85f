//! Where the recorder gets the stack of a sample: by unwinding a copy, from the kernel's walk, or from the caller
//! alone.

use std::collections::HashMap;
use std::sync::Arc;

use heapbpf_heap::event::{decode_python, decode_python_code, decode_stack};
use heapbpf_host::Host;
use heapbpf_host::mappings::AtTime;
use heapbpf_kernel::rings::Ring;
use heapbpf_unwind::dwarf::{Capture, CopyEnd, Flaws};
use heapbpf_unwind::frame_pointer;
use heapbpf_unwind::image::ModuleFiles as _;
use heapbpf_unwind::raw::{Completeness, RawStack, Reason};
use sampler_ebpf::abi::{AllocationRecord, MOST_MISSING_PAGES, StackRecord, copy_end};

use super::Recorder;

/// Maximum number of stack copies unwound before other work gets its turn.
const MOST_COPIES: usize = 256;

/// Limit on cached stacks that the daemon did not unwind itself. A target can make any number. A full cache is cleared
/// and filled again.
const MOST_STACKS: usize = 1 << 16;

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
        if !self.unwinder.was_repeated() && stack.has_jit_code(modules) {
            self.runs_jit_code(head.space, head.time_ns);
        }
        let is_shortened = stack.completeness == Completeness::Truncated(Reason::StackCopyShortened);
        self.counters.stacks_shortened += u64::from(is_shortened);
        if head.ends_at == copy_end::PROCESS_LIMIT {
            let is_cut = stack.completeness == Completeness::Truncated(Reason::StackCopyTooSmall);
            self.stack_limits.note(head.space, u64::from(head.copied_bytes), is_cut);
        }
        if head.ends_at == copy_end::TOP {
            self.outer_stacks.note(&head, &stack, self.unwinder.reads());
        }
        if let Some(merged) = self.pythons.merged(&head, &stack, &|module| modules.is_anonymous(module)) {
            stack = self.unwinder.intern(merged);
        }
        self.join.arrive(head.sample, stack);
    }

    /// The stack that the kernel walked, resolved once per (address space, stack ID, caller).
    pub(super) fn walked(&mut self, record: &AllocationRecord, host: &mut Host) -> Arc<RawStack> {
        let key = (record.space, record.stack_id, record.caller);
        if let Some(stack) = self.walked.get(&key) {
            return Arc::clone(stack);
        }
        let addresses = self.traces.read(record.stack_id);
        self.poll(host);
        let at = self.at_time(record, host);
        let stack = frame_pointer::from_kernel(&at.view(record.space), record.caller, &addresses, self.max_depth);
        let stack = self.unwinder.intern(stack);
        if stack.has_jit_code(host.modules()) {
            self.runs_jit_code(record.space, record.time_ns);
        }
        bounded(&mut self.walked).insert(key, Arc::clone(&stack));
        stack
    }

    /// A stack of one frame, the caller. `reason`: why there are no more.
    pub(super) fn caller(&mut self, record: &AllocationRecord, reason: Reason, host: &mut Host) -> Arc<RawStack> {
        let key = (record.space, record.caller, record.stack_kind);
        if let Some(stack) = self.callers.get(&key) {
            return Arc::clone(stack);
        }
        self.poll(host);
        let stack = RawStack::caller_only(&self.at_time(record, host).view(record.space), record.caller, reason);
        let stack = self.unwinder.intern(stack);
        bounded(&mut self.callers).insert(key, Arc::clone(&stack));
        stack
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
        copy_end::ROOM => CopyEnd::Room,
        _ => CopyEnd::Limit,
    };
    Flaws { end, has_gaps: head.missing_pages > 0 }
}

/// Clears a full cache, so that one more entry fits.
fn bounded<K, V>(stacks: &mut HashMap<K, V>) -> &mut HashMap<K, V> {
    if stacks.len() >= MOST_STACKS {
        stacks.clear();
    }
    stacks
}

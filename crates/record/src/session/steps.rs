//! One turn of the loop: takes in what has happened.

use std::time::Duration;

use heapbpf_attach::inline::{InlineHooks, Level, Levels};
use heapbpf_heap::event::Event;
use heapbpf_heap::live::UntrackedBlock;
use heapbpf_host::clock::monotonic_ns;
use sampler_ebpf::abi::{LiveKey, ProcessKey, ProcessRecord};

use super::state::Session;
use crate::intake::lives::End;
use crate::intake::recorder::{LONGEST_DRAIN_IF_AWAITED_NS, LONGEST_DRAIN_NS};
use crate::profiles::capture::jit_code_of;

/// Time between two runs of housekeeping.
const HOUSEKEEPING_NS: u64 = 1_000_000_000;

impl Session {
    /// Takes in everything that has happened. Returns the number of records.
    pub(super) fn cycle(&mut self) -> usize {
        self.attaching.look_at_held();
        self.recorder.poll(&mut self.host);
        let hooked = self.attaching.follow(&mut self.host);
        if hooked {
            self.recorder.set_functions(&self.attaching.hooks.functions);
        }
        // Before their first samples are taken in.
        if std::mem::take(&mut self.attaching.targets.some_again) {
            self.begin_heaps_anew();
        }
        // Those whose frames the BPF programs now report.
        for (module, runtime) in std::mem::take(&mut self.attaching.interpreters.new) {
            self.recorder.pythons.learn(module, runtime);
        }
        if self.attaching.sorts_mappings() {
            let new = self.attaching.take_new_code(&mut self.host);
            self.recorder.allocators.get_or_insert_default().learn(new);
        }
        let ends = std::mem::take(&mut self.attaching.heard_ends);
        ends.into_iter().for_each(|(pid, time_ns)| self.lives.heard(pid, time_ns));
        let records = self.take_in();
        self.complete_waiting_cut();
        self.settle_waiting_census();
        let now = monotonic_ns();
        if self.attaching.look_at_others_hooks(now) {
            self.begin_heaps_anew();
        }
        if self.until_housekeeping(now).is_zero() {
            self.housekeeping.done_ns = now;
            self.housekeep(now);
        }
        records
    }

    /// Time until housekeeping is due.
    pub(super) fn until_housekeeping(&self, now_ns: u64) -> Duration {
        Duration::from_nanos((self.housekeeping.done_ns + HOUSEKEEPING_NS).saturating_sub(now_ns))
    }

    /// Takes in the records in the rings. Returns how many there were.
    pub(super) fn take_in(&mut self) -> usize {
        let is_over = self.schedule.has_ended(monotonic_ns());
        let latest_ns = self.schedule.ends_ns.filter(|_| !is_over).unwrap_or(u64::MAX);
        let longest_copy_bytes = std::mem::take(&mut self.recorder.longest_copy_bytes);
        self.fit_rings(longest_copy_bytes);
        let (kernel, processes) = (&mut self.kernel, &mut self.process_events);
        let is_awaited = self.attaching.inline.as_ref().is_some_and(InlineHooks::may_wait);
        let longest_ns = if is_awaited { LONGEST_DRAIN_IF_AWAITED_NS } else { LONGEST_DRAIN_NS };
        let until_ns = latest_ns.min(monotonic_ns() + longest_ns);
        let records = self.recorder.drain(&mut kernel.events, &mut kernel.stacks, &mut self.host, processes, until_ns);
        self.grant_sites();
        let crashes = std::mem::take(&mut self.recorder.crashes);
        if !crashes.is_empty() {
            // Crashes do not wait for the events of the host: a child may just have been forked.
            self.recorder.poll(&mut self.host);
        }
        for crash in crashes {
            self.attaching.note_crash(&crash, &mut self.host);
            self.drop_untracked_heaps();
        }
        for (process, time_ns) in std::mem::take(&mut self.recorder.new_jit_processes) {
            let code = jit_code_of(process, time_ns, &mut self.host);
            self.worker.open_jit_code(process, code);
        }
        for (process, limit) in self.recorder.stack_limits.take_changed() {
            if let Err(error) = self.attaching.control.set_stack_limit(process, limit) {
                log::debug!("the stack copies of process {} stay as they are: {error}", process.tgid);
            }
        }
        for (stack, outer) in self.recorder.outer_stacks.take_changed() {
            log::debug!(
                "of the outer frames of process {} up to {:#x} is copied: {outer:x?}",
                stack.space.tgid,
                stack.top
            );
            if let Err(error) = self.attaching.control.set_outer_frames(stack, outer.as_ref()) {
                log::debug!("the stacks of process {} are copied as a whole: {error}", stack.space.tgid);
            }
        }
        if !self.process_events.is_empty() {
            // They may mention processes that started since the host's events were read.
            self.recorder.poll(&mut self.host);
        }
        std::mem::take(&mut self.process_events).into_iter().for_each(|event| self.apply(event));
        self.note_new_lives();
        if self.descriptions.note_new(&self.recorder, &mut self.host, &self.attaching) {
            self.drop_untracked_heaps();
            self.begin_heaps_anew();
        }
        let untracked = self.recorder.heap.take_untracked_blocks();
        self.forget_blocks(untracked);
        records
    }

    /// Lets processes take as many more samples as there is space for.
    fn grant_sites(&mut self) {
        let Some(inline) = &mut self.attaching.inline else { return };
        let has_forked = self.process_events.iter().any(|event| matches!(event, Event::Fork(_)));
        let (kernel, recorder) = (&self.kernel, &self.recorder);
        inline.grant(has_forked, || Levels {
            rings: [&kernel.events, &kernel.stacks].map(|ring| Level {
                reserved_up_to: ring.reserved_up_to(),
                read_up_to: ring.read_up_to(),
                size_bytes: ring.size_bytes(),
            }),
            records: recorder.records_taken_in(),
        });
    }

    /// Removes blocks from the kernel's live map.
    fn forget_blocks(&mut self, blocks: Vec<UntrackedBlock>) {
        for UntrackedBlock { space, address, sample } in blocks {
            self.kernel.live_entries.remove_sample(LiveKey { space, address }, sample);
        }
    }

    /// Acts on an event of a process.
    fn apply(&mut self, event: Event) {
        self.note_new_lives();
        match event {
            Event::Fork(ProcessRecord { process: parent, next: child, time_ns, .. }) => {
                let is_inline = self.attaching.inline.as_ref().is_some_and(|inline| inline.counted.is_child(child));
                self.attaching.forked(parent.tgid, child.tgid, is_inline, time_ns, &self.host);
                self.recorder.pythons.forked(parent, child.tgid);
            }
            Event::Uncounted(ProcessRecord { process, time_ns, .. }) => {
                self.attaching.program_was_missed(process, time_ns, &self.host);
            }
            Event::Exec(ProcessRecord { process: ended, time_ns, .. }) => {
                self.attaching.program_is_over(ended);
                if self.lives.end(ended, End::Exec, monotonic_ns()) {
                    self.replaced(ended, time_ns);
                }
            }
            Event::Exit(ProcessRecord { process, time_ns, cpu_us, .. }) => {
                let cpu_ns = 1000 * u64::from(cpu_us);
                self.attaching.program_is_over(process);
                self.attaching.targets.used(process.tgid, cpu_ns);
                self.attaching.activity.iter_mut().for_each(|activity| activity.ended(process, cpu_ns));
                if self.lives.end(process, End::Exit, monotonic_ns()) {
                    self.exited(process, time_ns);
                }
                self.attaching.executed.last.remove(&process.tgid);
            }
            Event::Reset(ProcessRecord { process, .. }) => {
                // What it had noted may already have been about its new program. The host reported the exec before it
                // ended.
                self.recorder.poll(&mut self.host);
                self.attaching.note_anew(process.tgid, &mut self.host);
            }
            // The recorder has taken them in.
            Event::Allocation(_) | Event::Free(_) | Event::Unmap(_) => {}
        }
        self.recorder.counters.ends_found = self.lives.found();
    }

    /// Ends the heap of a process that exited at `at_ns`: its blocks leave the live map and are in use as of its end.
    pub(super) fn end_heap(&mut self, space: ProcessKey, at_ns: u64) {
        let entries = &mut self.kernel.live_entries;
        let was_live = |address| entries.remove(LiveKey { space, address });
        self.recorder.counters.frees_reconciled += self.recorder.heap.end(space, at_ns, was_live);
    }

    /// Ends the heap of a program that was replaced at `at_ns`: its blocks leave the live map and are no longer in use.
    pub(super) fn replace_heap(&mut self, space: ProcessKey, at_ns: u64) {
        for address in self.recorder.heap.replace(space, at_ns) {
            self.kernel.live_entries.remove(LiveKey { space, address });
        }
    }

    /// Forgets the blocks in use of processes whose frees are no longer tracked. The kernel forgets them, too: it keeps
    /// capacity only for blocks whose frees it expects.
    pub(super) fn drop_untracked_heaps(&mut self) {
        if self.attaching.lacked_frees() {
            let heap = &self.recorder.heap;
            for space in self.descriptions.without_frees(heap, &self.host, &self.attaching) {
                let dropped = self.recorder.heap.stop_tracking(space);
                self.forget_blocks(dropped);
            }
        }
    }

    /// Restarts the heaps of processes whose frees are tracked again.
    pub(super) fn begin_heaps_anew(&mut self) {
        let targets = &self.attaching.targets;
        if !targets.some_hidden && !targets.some_given_up {
            return;
        }
        let heap = &self.recorder.heap;
        for (space, since_ns) in self.descriptions.with_frees_again(heap, &self.host, &self.attaching) {
            let dropped = self.recorder.heap.track_again(space, since_ns);
            self.forget_blocks(dropped);
        }
    }
}

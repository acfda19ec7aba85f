//! Housekeeping, once a second: work that is slow or must be delayed.

use std::collections::HashSet;
use std::sync::Arc;

use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::modules::KEPT_UNMAPPED;
use heapbpf_host::resident;
use heapbpf_kernel::totals::{self, Counts};
use sampler_ebpf::abi::ProcessKey;

use super::cut::Blocks;
use super::ends::Line;
use super::errors::Step;
use super::state::{Housekeeping, Session};
use crate::profiles::describe::SHARED_LINE;
use crate::profiles::snapshot::Measured;
use crate::profiles::symbolization::UnsymbolizedStack;

/// Delay before the counts of an exited process are collected: its last threads may still add to them.
const COLLECT_AFTER_NS: u64 = 1_000_000_000;
/// How long data about exited processes is kept for records that are still on their way.
const KEEP_ENDED_NS: u64 = 10_000_000_000;
/// The same for the mappings of processes without samples, once the rings have been emptied. After that, a sample can
/// only be waiting for its stack, which takes a second. With many short-lived processes, these mappings are most of the
/// memory.
const KEEP_UNSAMPLED_NS: u64 = 2_000_000_000;
/// After this many processes, memory is returned to the system sooner. That takes some milliseconds, so it is not done
/// too often.
const MANY_PROCESSES: usize = 256;
/// Minimum time for which unused unwind sections are kept, nanoseconds.
const KEEP_UNUSED_NS: u64 = 10_000_000_000;
const GIVE_BACK_EVERY_NS: u64 = 5_000_000_000;
/// The interval after fewer processes.
const GIVE_BACK_LAST_NS: u64 = 15_000_000_000;
/// Maximum number of named processes whose memory is read once a second.
const MOST_LOOKED_AT: usize = 8;
/// Maximum number of blocks of each that are looked up in its mappings.
const MOST_BLOCKS: usize = 1024;
/// Space of deleted files that is not worth looking at all stacks.
const MOST_DELETED_BYTES: u64 = 64 << 20;
/// After this many rows of exited processes, their names are forgotten, unless a snapshot with stacks came before.
const MANY_RETIRED_ROWS: usize = 16_384;

impl Housekeeping {
    /// Whether it is time to return memory to the system.
    fn gives_back(&mut self, now_ns: u64) -> bool {
        let (processes, given_back_ns) = self.forgotten;
        let wait_ns = if processes > MANY_PROCESSES { GIVE_BACK_EVERY_NS } else { GIVE_BACK_LAST_NS };
        let due = processes > 0 && now_ns.saturating_sub(given_back_ns) > wait_ns;
        if due {
            // Once more after many processes: another thread forgets names, and frees memory that only they referred
            // to.
            self.forgotten = (usize::from(processes > MANY_PROCESSES), now_ns);
        }
        due
    }
}

impl Session {
    /// Does the work that is slow or must be delayed.
    pub(super) fn housekeep(&mut self, now: u64) {
        let looked = self.attaching.look_again();
        self.errors.note(Step::Targets, looked, now);
        self.attaching.log_refusals();
        self.reconcile_if_lossy();
        let followed = self.recorder.host_error.take().map_or_else(|| self.host.tick(), Err);
        self.errors.note(Step::Host, followed, now);
        let keep_ns = if self.recorder.behind { KEEP_ENDED_NS } else { KEEP_UNSAMPLED_NS };
        self.housekeeping.forgotten.0 +=
            self.host.expire(now.saturating_sub(keep_ns), now.saturating_sub(KEEP_ENDED_NS));
        self.attaching.find_unreported_ends(now, &self.host);
        self.look_for_unreported_ends(now);
        self.drop_untracked_heaps();
        self.balance_classes();
        self.attaching.forget_ended(now.saturating_sub(KEEP_ENDED_NS));
        self.collect_ended(now.saturating_sub(COLLECT_AFTER_NS));
        self.retire();
        if now.saturating_sub(self.housekeeping.dropped_unused_ns) > KEEP_UNUSED_NS {
            self.housekeeping.dropped_unused_ns = now;
            self.recorder.drop_unused();
            self.attaching.let_go_of_unmapped(&self.host);
        }
        if self.housekeeping.gives_back(now) {
            self.give_memory_back();
        }
        let read = |pid| resident::rough(pid).map(|sums| sums.total_bytes());
        self.attaching.targets.read_first(now, read);
        self.look_at_memory();
    }

    /// Queues reading the memory of named processes: once they have ended, it is too late.
    fn look_at_memory(&self) {
        if self.plan.ended_apart() || !self.plan.targets.are_named() || self.worker.is_behind() {
            return;
        }
        let Ok(living) = totals::living(&self.attaching.programs) else { return };
        // Each process is listed once per thread.
        let living: HashSet<ProcessKey> = living.into_iter().collect();
        let named = living.into_iter().filter(|key| self.attaching.targets.named_alive.contains(&key.tgid));
        let measured = named.take(MOST_LOOKED_AT).map(|key| {
            // All mappings are among them.
            let mut blocks = self.recorder.heap.blocks(&key, MOST_BLOCKS);
            blocks.truncate(MOST_BLOCKS);
            let at_attach = self.attaching.targets.at_attach(key.tgid);
            Measured { process: 0, key, blocks, share: 1.0, at_attach }
        });
        self.worker.look(measured.collect());
    }

    /// Sets the intervals of size classes, if they have changed.
    fn balance_classes(&mut self) {
        let Some(classes) = &mut self.classes else { return };
        self.unfinished.classes |= classes.rebalance(self.recorder.heap.by_class()).is_some();
        if self.unfinished.classes && self.errors.may_try(Step::Classes, monotonic_ns()) {
            let set = self.attaching.control.set_trials(&classes.table);
            self.unfinished.classes = self.errors.note(Step::Classes, set, monotonic_ns()).is_none();
        }
    }

    /// Releases the memory that many short-lived processes took up.
    fn give_memory_back(&mut self) {
        self.kernel.events.shrink();
        self.recorder.shrink();
        self.descriptions.shrink();
        self.exited.shrink();
        self.forget_modules();
        self.tidy();
    }

    /// Forgets modules that no known process has mapped and that are on no stack of the heap. Finding out which takes a
    /// look at all stacks, so it is done when there are many, or when deleted files take up much space.
    fn forget_modules(&mut self) {
        let (processes, modules) = self.host.split();
        let holds_deleted = modules.deleted_bytes() > MOST_DELETED_BYTES;
        if modules.count() < self.housekeeping.modules + KEPT_UNMAPPED / 2 && !holds_deleted {
            return;
        }
        let running = processes.iter().filter(|it| it.until_ns.is_none());
        let mut needed: HashSet<ModuleId> = running.flat_map(|it| it.space.modules_ever()).collect();
        let frames = self.recorder.heap.stacks().flat_map(|(_, stack)| stack.frames.iter());
        needed.extend(frames.filter_map(|frame| frame.module));
        // Modules of ended processes are needed for some seconds only.
        self.housekeeping.modules = needed.len() + KEPT_UNMAPPED;
        needed.extend(processes.iter().flat_map(|it| it.space.modules_ever()));
        modules.forget(&needed);
        self.attaching.forget_modules(modules);
        if let Some(allocators) = &mut self.recorder.allocators {
            allocators.forget(|module| modules.get(module).is_some());
        }
    }

    /// Forgets names that are no longer needed.
    fn tidy(&mut self) {
        let stacks = self.recorder.heap.stacks();
        let stacks = stacks.map(|(process, stack)| UnsymbolizedStack { process, stack: Arc::clone(stack) });
        if self.worker.tidy(|| stacks.collect()) {
            self.housekeeping.retired_rows = 0;
        }
    }

    /// Moves the counts of processes that ended before `before_ns` out of the kernel.
    fn collect_ended(&mut self, before_ns: u64) {
        if !self.may_try(Step::Ended) {
            return;
        }
        let due = self.exited.take_due(before_ns);
        if due.is_empty() {
            return;
        }
        if let Some(inline) = &mut self.attaching.inline {
            inline.look();
        }
        self.recorder.forget_stacks(&due.iter().copied().collect());
        let mut due = due.into_iter();
        while let Some(process) = due.next() {
            let taken = self.kernel.totals.take(process);
            let Some(counters) = self.errors.note(Step::Ended, taken, monotonic_ns()) else {
                self.exited.put_back([process].into_iter().chain(due));
                return;
            };
            let mut counters = counters.unwrap_or_default();
            if let Some(inline) = &mut self.attaching.inline {
                counters.add(&inline.take(process, &counters));
            }
            let sampled = self.recorder.processes.contains_key(&process);
            let line = self.exited.line_of(&process, sampled, self.plan.keeps_running);
            let called = counters.hits() > 0;
            if called {
                self.attaching.has_figures(process);
            }
            self.attaching.program_was_counted(process, called || sampled, self.descriptions.comm(process));
            if called && line == Line::Shared {
                self.descriptions.share_line(process);
            }
            self.exited.counts.add(if line == Line::Shared { SHARED_LINE } else { process }, &counters);
            if self.plan.keeps_running {
                self.exited.retiring.insert(process);
            } else if !called && line != Line::Known {
                self.descriptions.forget_one(process);
            }
        }
    }

    /// Moves exited processes to the overflow bucket. All their records have been taken in: records are processed in
    /// order.
    fn retire(&mut self) {
        if self.exited.retiring.is_empty() || self.worker.is_behind() {
            return;
        }
        let ended = std::mem::take(&mut self.exited.retiring);
        let (mut retired, held) = self.parts(&Counts::default(), (&Blocks::new(), &Blocks::new())).retire(&ended);
        self.add_tracked_since(&retired.keys, &mut retired.processes);
        self.housekeeping.retired_rows += retired.rows.len();
        let done: HashSet<ProcessKey> = ended.difference(&held).copied().collect();
        self.exited.counts.forget(&done);
        self.worker.retire(retired);
        if self.housekeeping.retired_rows >= MANY_RETIRED_ROWS {
            self.tidy();
        }
        self.recorder.forget(&done);
        self.descriptions.forget(&done, &self.recorder);
        self.exited.retiring = held;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_sooner_after_a_storm_and_once_more_after_it() {
        let mut housekeeping = Housekeeping { forgotten: (MANY_PROCESSES + 1, 0), ..Housekeeping::default() };
        assert!(!housekeeping.gives_back(GIVE_BACK_EVERY_NS));
        let at_ns = GIVE_BACK_EVERY_NS + 1;
        assert!(housekeeping.gives_back(at_ns));
        assert!(!housekeeping.gives_back(at_ns + GIVE_BACK_LAST_NS));
        assert!(housekeeping.gives_back(at_ns + GIVE_BACK_LAST_NS + 1), "what only names referred to");
        assert!(!housekeeping.gives_back(u64::MAX), "nothing was forgotten since");
    }

    #[test]
    fn few_processes_are_not_worth_it_so_soon() {
        let mut housekeeping = Housekeeping { forgotten: (1, 0), ..Housekeeping::default() };
        assert!(!housekeeping.gives_back(GIVE_BACK_EVERY_NS + 1));
        assert!(housekeeping.gives_back(GIVE_BACK_LAST_NS + 1));
        assert!(!housekeeping.gives_back(u64::MAX));
    }
}

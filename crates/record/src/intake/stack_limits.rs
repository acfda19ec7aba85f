//! How much is copied of stacks whose top is unknown, by process: stacks of coroutines, of fibers, and of threads that
//! no C library created. All other stacks are copied up to their top, and need no limit.
//!
//! A process starts with [`FIRST_STACK_BYTES`]. It gets more when its stacks are cut at that limit. If the longest
//! copies are cut as well, they do not help, and the process goes back to the initial limit.

use std::collections::{HashMap, HashSet};

use sampler_ebpf::abi::{FIRST_STACK_BYTES, LARGEST_STACK_COPY, ProcessKey};

/// Factor by which a limit is raised.
const GROWTH: u64 = 4;
/// Number of stacks cut at the highest limit, in excess of those that were not, after which the limit is lowered for
/// good.
const MOST_IN_VAIN: i32 = 32;
/// Maximum number of processes with a limit of their own: the capacity of the kernel's map.
const MOST_PROCESSES: usize = 4096;

/// The limits that differ from [`FIRST_STACK_BYTES`].
#[derive(Default)]
pub struct StackLimits {
    processes: HashMap<ProcessKey, Limit>,
    changed: Vec<(ProcessKey, Option<u64>)>,
}

#[derive(Clone, Copy)]
struct Limit {
    bytes: u64,
    /// Stacks cut at the highest limit, minus those that were not; not below 0.
    in_vain: i32,
    gave_up: bool,
}

impl StackLimits {
    /// Notes a stack of a process whose copy ended at the process's limit, after `copied_bytes`. `is_cut`: the stack
    /// continues above.
    pub fn note(&mut self, process: ProcessKey, copied_bytes: u64, is_cut: bool) {
        let known = self.processes.get_mut(&process);
        let Some(limit) = known else {
            if is_cut && self.processes.len() < MOST_PROCESSES {
                let bytes = FIRST_STACK_BYTES * GROWTH;
                self.processes.insert(process, Limit { bytes, in_vain: 0, gave_up: false });
                self.changed.push((process, Some(bytes)));
            }
            return;
        };
        // A shorter copy was made before the limit was raised, or memory ended there.
        if limit.gave_up || copied_bytes < limit.bytes {
            return;
        }
        if limit.bytes < LARGEST_STACK_COPY {
            if is_cut {
                limit.bytes = (limit.bytes * GROWTH).min(LARGEST_STACK_COPY);
                self.changed.push((process, Some(limit.bytes)));
            }
            return;
        }
        limit.in_vain = (limit.in_vain + if is_cut { 1 } else { -1 }).max(0);
        if limit.in_vain >= MOST_IN_VAIN {
            limit.gave_up = true;
            self.changed.push((process, None));
        }
    }

    /// The limits that changed since the last call; `None` is [`FIRST_STACK_BYTES`].
    pub fn take_changed(&mut self) -> Vec<(ProcessKey, Option<u64>)> {
        std::mem::take(&mut self.changed)
    }

    /// Drops the limits of processes that have ended.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        let gone = self.processes.extract_if(|process, _| ended.contains(process));
        self.changed.extend(gone.filter(|(_, limit)| !limit.gave_up).map(|(process, _)| (process, None)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    fn process(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 1, tgid, exec_id: 0 }
    }

    #[test]
    fn the_limit_rises_while_stacks_are_cut() {
        let mut limits = StackLimits::default();
        limits.note(process(1), 64 * KIB, false);
        assert!(limits.take_changed().is_empty());
        let mut copied = 64 * KIB;
        let mut seen = Vec::new();
        for _ in 0..5 {
            limits.note(process(1), copied, true);
            for (of, limit) in limits.take_changed() {
                assert_eq!(of, process(1));
                copied = limit.unwrap();
                seen.push(copied / KIB);
            }
        }
        assert_eq!(seen, [256, 1024]);
        limits.note(process(2), 64 * KIB, true);
        assert_eq!(limits.take_changed(), [(process(2), Some(256 * KIB))], "each process for itself");
    }

    #[test]
    fn copies_that_were_made_before_the_limit_rose_do_not_count() {
        let mut limits = StackLimits::default();
        (0..100).for_each(|_| limits.note(process(1), 64 * KIB, true));
        assert_eq!(limits.take_changed(), [(process(1), Some(256 * KIB))]);
    }

    #[test]
    fn a_limit_that_does_not_help_is_lowered_for_good() {
        let mut limits = StackLimits::default();
        [64, 256].into_iter().for_each(|kib| limits.note(process(1), kib * KIB, true));
        limits.take_changed();
        let at_most = |limits: &mut StackLimits, is_cut| limits.note(process(1), LARGEST_STACK_COPY, is_cut);
        // As many whole stacks as cut ones: the limit helps.
        (0..1000).for_each(|round| at_most(&mut limits, round % 2 == 0));
        assert!(limits.take_changed().is_empty());
        (0..MOST_IN_VAIN).for_each(|_| at_most(&mut limits, true));
        assert_eq!(limits.take_changed(), [(process(1), None)]);
        [64, 256, 1024].into_iter().for_each(|kib| limits.note(process(1), kib * KIB, true));
        assert!(limits.take_changed().is_empty(), "not again");
    }

    #[test]
    fn ended_processes_make_way_and_their_number_is_bounded() {
        let mut limits = StackLimits::default();
        (0..2 * MOST_PROCESSES as u32).for_each(|tgid| limits.note(process(tgid), 64 * KIB, true));
        assert_eq!(limits.take_changed().len(), MOST_PROCESSES);
        limits.forget(&HashSet::from([process(3), process(1 << 30)]));
        assert_eq!(limits.take_changed(), [(process(3), None)]);
        limits.note(process(1 << 30), 64 * KIB, true);
        assert_eq!(limits.take_changed(), [(process(1 << 30), Some(256 * KIB))]);
    }
}

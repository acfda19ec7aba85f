//! Removes the hooks from all counted processes.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use heapbpf_host::side_by_side::on_all_processors;
use sampler_ebpf::abi::ProcessKey;
use sampler_ebpf::abi::inline::{InlineProcess, inline_state};

use super::{Counted, Process};
use crate::inline::limits;
use crate::inline::removal::{Next, take_out_now, try_to_take_out};

/// Maximum number of rounds for removing the hooks from all processes, because processes may fork in between.
const ROUNDS: usize = 64;

/// How often to check whether processes go on that keep their hooks because they were at rest.
const LOOK_AT_REST_AFTER: Duration = Duration::from_millis(200);

/// The listed processes that do not run in the memory of a `busy` one, which another thread may be stopping.
fn not_busy(entries: Vec<(ProcessKey, InlineProcess)>, busy: &HashSet<u32>) -> Vec<(ProcessKey, InlineProcess)> {
    entries.into_iter().filter(|(_, entry)| !busy.contains(&entry.memory_of.tgid)).collect()
}

impl Counted {
    /// Removes the hooks from all processes that are not `busy`, and keeps the counts of all, which must be read
    /// before. Processes at rest keep their hooks for now. Returns the processes that had hooks.
    pub(in crate::inline) fn stop(&mut self, busy: &HashSet<u32>) -> Vec<ProcessKey> {
        let mut entries = self.map.entries();
        entries.retain(|(_, entry)| entry.state != inline_state::LEFT);
        let ours = entries.iter().flat_map(|(process, entry)| self.made_in(entry.hooked).map(|it| (*process, it)));
        let ours: Vec<_> = ours.collect();
        self.processes.values_mut().filter(|known| !known.has_left()).for_each(Process::loses_hooks);
        self.at_rest = self.take_all_out(busy.clone(), false);
        self.looked_at_rest = Instant::now();
        ours.into_iter().for_each(|(process, (key, ours))| self.note_taken_from(process, key, ours));
        entries.into_iter().map(|(process, _)| process).collect()
    }

    /// Whether one of those at rest continues, or has ended. Checked a few times a second.
    pub(in crate::inline) fn has_any_gone_on(&mut self) -> bool {
        if self.at_rest.is_empty() || self.looked_at_rest.elapsed() < LOOK_AT_REST_AFTER {
            return false;
        }
        self.looked_at_rest = Instant::now();
        !self.at_rest.iter().all(|pid| limits::is_at_rest(*pid))
    }

    /// Removes the hooks from all processes, and forgets the processes.
    pub(in crate::inline) fn release_all(&mut self) {
        self.take_all_out(HashSet::new(), true);
        self.processes.clear();
    }

    /// Removes the hooks from all processes that are not `busy`. Waits for processes that are frozen only if it
    /// `is_last`. Otherwise they, and those that a signal stopped, keep their hooks and are returned.
    fn take_all_out(&mut self, mut busy: HashSet<u32>, is_last: bool) -> HashSet<u32> {
        // Hooks without a lock may be removed.
        self.linked.values().flatten().for_each(|linked| drop(linked.text.unlock()));
        let (mut done, mut at_rest) = (HashSet::new(), HashSet::<u32>::new());
        for _ in 0..ROUNDS {
            let entries = not_busy(self.map.entries(), &busy);
            if entries.is_empty() {
                break;
            }
            let have_them = entries.iter().filter(|(process, entry)| {
                entry.state != inline_state::LEFT && entry.memory_of == *process && done.insert(*process)
            });
            // As long as processes have the hooks, they must be listed, so that their children are listed, too. A
            // process that cannot be stopped now does not delay the others.
            let pids: Vec<u32> = have_them.map(|(process, _)| process.tgid).collect();
            let still = Mutex::new(Vec::new());
            on_all_processors(pids, |pid| {
                if !take_out_now(pid) {
                    still.lock().unwrap_or_else(PoisonError::into_inner).push(pid);
                }
            });
            let (still, since) = (still.into_inner().unwrap_or_else(PoisonError::into_inner), Instant::now());
            let resting = Mutex::new(HashSet::new());
            on_all_processors(still, |pid| {
                if try_to_take_out(pid, is_last.then_some(since)) == Next::AtRest {
                    log::info!("process {pid} is frozen or stopped: it keeps its inline hooks until it goes on");
                    resting.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
                }
            });
            at_rest.extend(resting.into_inner().unwrap_or_else(PoisonError::into_inner));
            busy.extend(&at_rest);
            not_busy(entries, &busy).iter().for_each(|(process, _)| self.map.remove(*process));
        }
        let unused = self.linked.extract_if(|hooked, _| !busy.contains(&hooked.tgid));
        unused.flat_map(|(_, linked)| linked).for_each(|linked| self.closing.close(linked.links));
        at_rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(tgid: u32) -> ProcessKey {
        ProcessKey { tgid, ..ProcessKey::default() }
    }

    #[test]
    fn whoever_is_being_stopped_keeps_its_hooks_for_now_with_all_in_its_memory() {
        let entry = |of: u32, memory_of: u32| {
            let (memory_of, hooked) = (process(memory_of), process(1));
            (process(of), InlineProcess { memory_of, hooked, ..InlineProcess::default() })
        };
        let all = || vec![entry(1, 1), entry(2, 1), entry(3, 3), entry(4, 4)];
        let left = |busy: &[u32]| -> Vec<u32> {
            not_busy(all(), &busy.iter().copied().collect()).iter().map(|(process, _)| process.tgid).collect()
        };
        assert_eq!((left(&[]), left(&[1]), left(&[3, 9])), (vec![1, 2, 3, 4], vec![3, 4], vec![1, 2, 4]));
    }
}

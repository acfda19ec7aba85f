//! Keeps track of which processes are hooked inline, why others are not, and which announce their samples. Pure.

use std::collections::{HashMap, HashSet};

use heapbpf_audit::Hook;

/// Maximum number of processes whose reason is kept.
const MOST_REASONS: usize = 1 << 16;

/// Which processes are hooked inline, and why others are not.
#[derive(Debug, Default)]
pub struct Standing {
    of_process: HashMap<u32, Result<(), String>>,
    /// Processes that announce their samples and have no allocator to hook.
    announcing: HashSet<u32>,
    /// Whether only announcements count.
    pub all_announce: bool,
    /// Whether no link serves all processes. Then a process that is counted without being known has inherited its
    /// parent's hooks.
    inherits: bool,
    /// Since when a process's Python objects are counted inside it (CLOCK_MONOTONIC), or why they are not.
    objects: HashMap<u32, Result<u64, String>>,
    /// End of each process that has an entry above and has ended (CLOCK_MONOTONIC).
    ended_ns: HashMap<u32, u64>,
}

impl Standing {
    /// Creates the state without any processes. `all_announce`: only announcements count. `inherits`: no link serves
    /// all processes.
    pub fn new(all_announce: bool, inherits: bool) -> Self {
        Self { all_announce, inherits, ..Self::default() }
    }

    /// Notes whether a process announces its samples and has no allocator to hook.
    pub fn note_announcing(&mut self, pid: u32, announces: bool) {
        if announces {
            self.announcing.insert(pid);
        } else {
            self.announcing.remove(&pid);
        }
    }

    /// Whether the announcements of a process count.
    pub fn announces(&self, pid: u32) -> bool {
        self.all_announce || self.announces_for_lack_of_allocator(pid)
    }

    /// Whether the announcements of a process count because it has no allocator to hook.
    pub fn announces_for_lack_of_allocator(&self, pid: u32) -> bool {
        self.announcing.contains(&pid)
    }

    /// Notes that a process is hooked inline, or why it is not. A hooked process stays hooked, although another of its
    /// allocators may be refused.
    pub fn note(&mut self, pid: u32, result: Result<(), String>) {
        let is_known = self.of_process.contains_key(&pid);
        if result.is_ok()
            || is_known && self.why_not(pid).is_some()
            || self.of_process.len() < MOST_REASONS && !is_known
        {
            self.of_process.insert(pid, result);
        }
    }

    /// Notes since when a process's Python objects are counted inside it (CLOCK_MONOTONIC), or why they are not.
    pub fn note_objects(&mut self, pid: u32, result: Result<u64, String>) {
        if self.objects.len() < MOST_REASONS || self.objects.contains_key(&pid) {
            self.objects.insert(pid, result);
        }
    }

    /// Copies what is known of a parent's objects to a child, which has a copy of the parent's memory.
    pub fn inherit_objects(&mut self, parent: u32, child: u32) {
        if let Some(parents) = self.objects.get(&parent).cloned() {
            self.note_objects(child, parents);
        }
    }

    /// Since when a process's Python objects are counted inside it (CLOCK_MONOTONIC), or why they are not. `None` if
    /// nothing is known about them.
    pub fn objects(&self, pid: u32) -> Option<Result<u64, &str>> {
        self.objects.get(&pid).map(|result| result.as_ref().copied().map_err(String::as_str))
    }

    /// Forgets how a process was hooked, because it runs another program. Whether it announces its samples is decided
    /// anew by [`Self::note_announcing`].
    pub fn forget(&mut self, pid: u32) {
        self.objects.remove(&pid);
        self.of_process.remove(&pid);
    }

    /// Notes that a process has ended at this time (CLOCK_MONOTONIC). What is known of it describes it until it is
    /// forgotten, or its id is given to another one.
    pub fn ended(&mut self, pid: u32, at_ns: u64) {
        if self.of_process.contains_key(&pid) || self.objects.contains_key(&pid) || self.announcing.contains(&pid) {
            self.ended_ns.insert(pid, at_ns);
        }
    }

    /// Forgets the process that had this id before this one began (CLOCK_MONOTONIC). The same beginning may be reported
    /// again, even after its end.
    pub fn began(&mut self, pid: u32, at_ns: u64) {
        if self.ended_ns.get(&pid).is_some_and(|ended_ns| *ended_ns <= at_ns) {
            self.forget_ended(pid);
        }
    }

    /// Forgets a process that has ended: its id may be given to another one.
    pub fn forget_ended(&mut self, pid: u32) {
        self.forget(pid);
        self.announcing.remove(&pid);
        self.ended_ns.remove(&pid);
    }

    /// How a process that has something to hook is hooked.
    pub fn hook(&self, pid: u32) -> Hook {
        if self.announces(pid) {
            return Hook::Usdt;
        }
        if self.of_process.get(&pid).map_or(self.inherits, Result::is_ok) { Hook::Inline } else { Hook::Probe }
    }

    /// Why a process that should be hooked inline is not.
    pub fn why_not(&self, pid: u32) -> Option<&str> {
        self.of_process.get(&pid)?.as_ref().err().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_announces_if_it_is_noted_or_all_do() {
        let mut standing = Standing::default();
        standing.note_announcing(1, true);
        assert_eq!((standing.hook(1), standing.hook(2)), (Hook::Usdt, Hook::Probe));
        standing.forget(1);
        assert!(standing.announces(1), "a fork or an exec decides that");
        standing.note_announcing(1, false);
        assert_eq!(standing.hook(1), Hook::Probe);
        let all = Standing::new(true, false);
        assert_eq!(Standing::new(false, true).hook(1), Hook::Inline);
        assert!(all.hook(1) == Hook::Usdt && !all.announces_for_lack_of_allocator(1));
    }

    #[test]
    fn the_last_reason_counts_and_what_is_hooked_stays_so() {
        let mut standing = Standing::default();
        assert_eq!((standing.hook(1), standing.why_not(1)), (Hook::Probe, None));
        standing.note(1, Err("it is busy".into()));
        standing.note(1, Err("it is traced".into()));
        assert_eq!((standing.hook(1), standing.why_not(1)), (Hook::Probe, Some("it is traced")));
        standing.note(1, Ok(()));
        standing.note(1, Err("a second allocator".into()));
        assert_eq!((standing.hook(1), standing.why_not(1)), (Hook::Inline, None));
        standing.forget(1);
        assert_eq!(standing.hook(1), Hook::Probe);
    }

    #[test]
    fn the_next_process_with_an_id_inherits_nothing() {
        let mut standing = Standing::default();
        standing.note(1, Ok(()));
        standing.note_announcing(1, true);
        standing.note_objects(1, Ok(7));
        standing.forget_ended(1);
        assert!(!standing.announces(1) && standing.objects(1).is_none());
        standing.note(1, Err("it is traced".into()));
        assert_eq!((standing.hook(1), standing.why_not(1)), (Hook::Probe, Some("it is traced")));
    }

    #[test]
    fn an_id_that_is_given_again_at_once_is_another_process() {
        let mut standing = Standing::default();
        standing.began(1, 10);
        standing.note(1, Ok(()));
        standing.note_objects(1, Ok(7));
        standing.ended(1, 20);
        standing.began(1, 10);
        assert_eq!(standing.hook(1), Hook::Inline, "its fork was heard late");
        standing.began(1, 30);
        standing.note(1, Err("it is traced".into()));
        standing.began(1, 30);
        assert_eq!((standing.why_not(1), standing.objects(1)), (Some("it is traced"), None));
        standing.ended(2, 40);
        assert!(standing.ended_ns.is_empty(), "nothing is known of it");
    }
}

//! Which processes are hooked inline, and why others that should be are not. Pure.

use std::collections::HashMap;

use heapbpf_audit::Hook;

/// Most processes of which the reason is kept.
const MOST_REASONS: usize = 1 << 16;

/// Which processes are hooked inline, and why others are not.
#[derive(Debug, Default)]
pub struct Standing {
    of_process: HashMap<u32, Result<(), String>>,
}

impl Standing {
    /// Notes that a process is hooked inline, or why it is not. What is hooked stays hooked: another of its allocators may be
    /// refused.
    pub fn note(&mut self, pid: u32, result: Result<(), String>) {
        let is_known = self.of_process.contains_key(&pid);
        if result.is_ok()
            || is_known && self.why_not(pid).is_some()
            || self.of_process.len() < MOST_REASONS && !is_known
        {
            self.of_process.insert(pid, result);
        }
    }

    /// Forgets a process: it runs another program, or has ended.
    pub fn forget(&mut self, pid: u32) {
        self.of_process.remove(&pid);
    }

    /// How a process is hooked that has something to hook.
    pub fn hook(&self, pid: u32) -> Hook {
        if self.of_process.get(&pid).is_some_and(Result::is_ok) { Hook::Inline } else { Hook::Probe }
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
}

//! How often Python frames could not be shown, and why.

use std::collections::BTreeMap;

use sampler_ebpf::abi::python_walk;

/// Why a stack shows native frames instead of Python's.
pub type Why = &'static str;

/// The process has several interpreters.
pub const SUBINTERPRETERS: Why = "the process has subinterpreters";
/// The interpreter does not know the thread.
pub const NO_THREAD: Why = "the interpreter did not know the thread";
/// The interpreter had not started, or had ended.
pub const NOT_RUNNING: Why = "the interpreter had not started yet or had ended";
/// Frames or code objects could not be read.
pub const UNREADABLE: Why = "frames or code objects could not be read";
/// Reading took too long.
pub const NO_ANSWER: Why = "reading the process's memory took too long";
/// The native stack and the Python frames do not agree.
pub const MISMATCH: Why = "native and Python frames did not agree";
/// No record of Python frames arrived: the BPF programs did not know the interpreter yet, or the record was lost.
pub const NOT_READ: Why = "the interpreter was not known yet, or its frames were lost";

/// The reason for one of [`python_walk`]; `None` if there are frames to show.
pub fn why_of_walk(walk: u32) -> Option<Why> {
    match walk {
        python_walk::COMPLETE | python_walk::TOO_DEEP => None,
        python_walk::SUBINTERPRETERS => Some(SUBINTERPRETERS),
        python_walk::NO_THREAD => Some(NO_THREAD),
        python_walk::NOT_RUNNING => Some(NOT_RUNNING),
        _ => Some(UNREADABLE),
    }
}

/// Counts what happened to stacks with Python frames.
#[derive(Debug, Default)]
pub struct Outcomes {
    all: u64,
    failed: BTreeMap<Why, u64>,
}

impl Outcomes {
    /// Counts a stack.
    pub fn count(&mut self, why: Option<Why>) {
        self.all += 1;
        if let Some(why) = why {
            *self.failed.entry(why).or_default() += 1;
        }
    }

    /// A note for the user, if a stack shows native frames instead.
    pub fn note(&self) -> Option<String> {
        let reasons: Vec<String> = self.failed.iter().map(|(why, count)| format!("{why} ({count})")).collect();
        let failed: u64 = self.failed.values().sum();
        let all = self.all;
        (failed > 0).then(|| {
            format!(
                "{failed} of {all} sampled stacks of Python programs show only native frames: {}",
                reasons.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_natively_is_told_with_its_reasons() {
        let mut outcomes = Outcomes::default();
        outcomes.count(None);
        assert_eq!(outcomes.note(), None);
        [MISMATCH, NO_THREAD, MISMATCH].map(Some).into_iter().for_each(|why| outcomes.count(why));
        let note = "3 of 4 sampled stacks of Python programs show only native frames: native and Python frames did not \
                    agree (2), the interpreter did not know the thread (1)";
        assert_eq!(outcomes.note().as_deref(), Some(note));
    }

    #[test]
    fn each_outcome_of_a_walk_is_known() {
        let of = [
            python_walk::COMPLETE,
            python_walk::TOO_DEEP,
            python_walk::UNREADABLE,
            python_walk::SUBINTERPRETERS,
            python_walk::NO_THREAD,
            python_walk::NOT_RUNNING,
        ]
        .map(why_of_walk);
        let [unreadable, subinterpreters] = [Some(UNREADABLE), Some(SUBINTERPRETERS)];
        let expected = [None, None, unreadable, subinterpreters, Some(NO_THREAD), Some(NOT_RUNNING)];
        assert_eq!(of, expected);
    }
}

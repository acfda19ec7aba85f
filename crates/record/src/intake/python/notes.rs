//! How often Python frames could not be shown, and why.

use sampler_ebpf::abi::python_walk;

/// Why a stack shows native frames instead of Python's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The process has several interpreters.
    Subinterpreters,
    /// The interpreter does not know the thread.
    NoThread,
    /// The interpreter had not started, or had ended.
    NotRunning,
    /// Frames or code objects could not be read.
    Unreadable,
    /// Reading took too long.
    NoAnswer,
    /// The native stack and the Python frames do not agree.
    Mismatch,
    /// No record of Python frames arrived: the BPF programs did not know the interpreter yet, or the record was lost.
    NotRead,
}

impl Why {
    const ALL: [Self; 7] = [
        Self::Subinterpreters,
        Self::NoThread,
        Self::NotRunning,
        Self::Unreadable,
        Self::NoAnswer,
        Self::Mismatch,
        Self::NotRead,
    ];

    /// The reason for one of [`python_walk`]; `None` if there are frames to show.
    pub fn of_walk(walk: u32) -> Option<Self> {
        match walk {
            python_walk::COMPLETE | python_walk::TOO_DEEP => None,
            python_walk::SUBINTERPRETERS => Some(Self::Subinterpreters),
            python_walk::NO_THREAD => Some(Self::NoThread),
            python_walk::NOT_RUNNING => Some(Self::NotRunning),
            _ => Some(Self::Unreadable),
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Subinterpreters => "the process has subinterpreters",
            Self::NoThread => "the interpreter did not know the thread",
            Self::NotRunning => "the interpreter had not started yet or had ended",
            Self::Unreadable => "frames or code objects could not be read",
            Self::NoAnswer => "reading the process's memory took too long",
            Self::Mismatch => "native and Python frames did not agree",
            Self::NotRead => "the interpreter was not known yet, or its frames were lost",
        }
    }
}

/// Counts what happened to stacks with Python frames.
#[derive(Debug, Default)]
pub struct Outcomes {
    all: u64,
    failed: [u64; Why::ALL.len()],
}

impl Outcomes {
    /// Counts a stack.
    pub fn count(&mut self, why: Option<Why>) {
        self.all += 1;
        if let Some(why) = why {
            self.failed[why as usize] += 1;
        }
    }

    /// A note for the user, if a stack shows native frames instead.
    pub fn note(&self) -> Option<String> {
        let reasons: Vec<String> = Why::ALL
            .iter()
            .zip(self.failed)
            .filter(|(_, count)| *count > 0)
            .map(|(why, count)| format!("{} ({count})", why.text()))
            .collect();
        let failed: u64 = self.failed.iter().sum();
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
        [Why::Mismatch, Why::NoThread, Why::Mismatch].map(Some).into_iter().for_each(|why| outcomes.count(why));
        let note = "3 of 4 sampled stacks of Python programs show only native frames: the interpreter did not know the \
                    thread (1), native and Python frames did not agree (2)";
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
        .map(Why::of_walk);
        let [unreadable, subinterpreters] = [Some(Why::Unreadable), Some(Why::Subinterpreters)];
        let expected = [None, None, unreadable, subinterpreters, Some(Why::NoThread), Some(Why::NotRunning)];
        assert_eq!(of, expected);
    }
}

//! The end-to-end test harness: programs with known truth, recordings of them, and checks of one against the other.
//!
//! A test takes its turn ([`environment::turn`]), starts a [`target::Target`] or lets heapbpf start one, records it
//! with a [`recorder::Recorder`], and compares the [`recorder::Outcome`] with the program's [`truth::Truth`].

pub mod browser;
pub mod busy;
pub mod certificates;
pub mod cgroup;
pub mod checks;
pub mod constant;
pub mod counting;
pub mod descriptors;
pub mod distinct;
pub mod doctor;
pub mod document;
pub mod environment;
pub mod guardian;
pub mod held;
pub mod hostile;
pub mod inline;
pub mod kernel;
pub mod map_calls;
pub mod others;
pub mod output;
pub mod pprof;
pub mod program;
pub mod pty;
pub mod python_stacks;
pub mod receivers;
pub mod recorder;
pub mod refusing;
pub mod scrape;
pub mod soak;
pub mod target;
pub mod tmux;
pub mod torture;
pub mod truth;

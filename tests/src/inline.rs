//! Recordings of one process with inline hooks.

use std::path::Path;

use crate::output::{Profile, Stats};
use crate::recorder::{Recorder, Recording};
use crate::target::Target;
use crate::truth::Truth;

/// A way of hooking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// A probe on every call.
    Probe,
    /// Counted inside the process.
    Inline,
}

/// The mappings of a process.
///
/// # Panics
/// If it has ended.
pub fn maps(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the target runs")
}

/// Whether pages of a process lead to code of inline hooks. The code itself may stay mapped: a word of a stack may look like
/// an address in it.
pub fn is_hooked(pid: u32) -> bool {
    let is_replaced = |line: &str| {
        let (_, name) = line.split_once("/memfd:heapbpf-inline-")?;
        let [base, bytes] = name.split(['-', ' ']).take(2).map(hex).collect::<Option<Vec<_>>>()?.try_into().ok()?;
        let start = hex(line.split('-').next()?)?;
        Some(!(base..base + bytes).contains(&start))
    };
    maps(pid).lines().any(|line| is_replaced(line) == Some(true))
}

fn hex(digits: &str) -> Option<u64> {
    u64::from_str_radix(digits, 16).ok()
}

/// A recording of one process at a fixed interval, hooked in one way.
pub fn recorder(pid: u32, hook: Hook, interval: u64) -> Recorder {
    let hook = if hook == Hook::Inline { "inline" } else { "probe" };
    Recorder::of(pid, interval).option("--hook", hook).flag("--no-follow")
}

/// Records a program from READY to its report, with further options.
///
/// # Panics
/// If it is not hooked as wanted, or not let go in the end.
pub fn record(program: &Path, arguments: &[&str], hook: Hook, interval: u64, options: &[[&str; 2]]) -> Recorded {
    let start = || Target::start(program, arguments);
    let (mut target, recording) = begin(&start, hook, interval, options);
    let pid = target.pid();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    assert!(!is_hooked(pid), "the original pages are back");
    (profile, stats, truth)
}

/// Starts a target and a recording of it.
///
/// # Panics
/// If it is not hooked as wanted.
pub fn begin(start: &dyn Fn() -> Target, hook: Hook, interval: u64, options: &[[&str; 2]]) -> (Target, Recording) {
    for _ in 0..ATTEMPTS {
        let target = start();
        let pid = target.pid();
        let recorder = options.iter().fold(recorder(pid, hook, interval), |it, [name, value]| it.option(name, value));
        let recording = recorder.start();
        if is_hooked(pid) == (hook == Hook::Inline) {
            return (target, recording);
        }
        println!("not hooked as wanted, and begun again: {}", recording.stop().stderr);
    }
    panic!("not hooked as wanted: {hook:?}")
}

/// Attempts to hook: on a busy machine, stopping a process may take too long.
const ATTEMPTS: usize = 5;

/// What a recording said, and what was true.
pub type Recorded = (Profile, Stats, Truth);

/// Totals are the target's own counts, and hits are its calls.
///
/// # Panics
/// If they are not.
pub fn counted_exactly(stats: &Stats, truth: &Truth) {
    assert_eq!(stats.hits, truth.allocs() + truth.failed + truth.abandoned, "{stats:?}");
    assert_eq!(stats.exact_alloc_objects, truth.allocs(), "{stats:?}");
    assert_eq!(stats.exact_alloc_bytes, truth.bytes(), "{stats:?}");
    assert_eq!(stats.lost(), 0, "{stats:?}");
}

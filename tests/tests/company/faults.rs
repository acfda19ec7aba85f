//! Faults in every map operation, and in what reading the rings needs: no fault goes unreported. The operations are not
//! listed here. The tests watch recordings of each kind and make each operation they do fail once.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{programs_dir, skipped, tool, turn};
use heapbpf_tests::map_calls::Operation;
use heapbpf_tests::output::{Estimate, Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Outcome, Recorder, Recording};
use heapbpf_tests::refusing::Faults;
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::Target;
use heapbpf_tests::torture::readable;
use heapbpf_tests::truth::Truth;

/// Number of calls of the target's sites.
const CALLS: &str = "20000";
/// An interval at which rings start small.
const GROWS_AT: u64 = 16384;

/// Kinds of recordings, which perform different operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Case {
    /// Samples every allocation.
    Exact,
    /// Stops the daemon while its rings fill up.
    Losses,
    /// Like `Losses`, with rings that grow, and an interval at which they start small.
    Growth,
    /// Has an interval for each size class.
    Classes,
    /// Uses the kernel's own stack walk.
    FramePointers,
    /// One target ends while another continues.
    Ends,
    /// Has short-lived children, half of which replace their program.
    Children,
    /// Counts inside the process.
    Inline,
    /// Records a Python interpreter.
    Python,
}

impl Case {
    const ALL: [Self; 9] = [
        Self::Exact,
        Self::Losses,
        Self::Growth,
        Self::Classes,
        Self::FramePointers,
        Self::Ends,
        Self::Children,
        Self::Inline,
        Self::Python,
    ];

    fn target(self) -> Target {
        match self {
            Self::Python => {}
            Self::Children => return Target::start(&program("brood"), ["short", "40", "100"]),
            Self::Growth => return Target::start(&program("mix"), ["1000000"]),
            _ => return Target::start(&program("mix"), [CALLS]),
        }
        let script = programs_dir().join("python_truth.py");
        Target::start_command(Command::new(python().expect("checked before")).arg(script).arg("/dev/null"))
    }

    fn recorder(self, pid: u32, other: u32) -> Recorder {
        let recorder = |interval| Recorder::of(pid, interval);
        match self {
            Self::Exact | Self::Python => recorder(1),
            Self::Children => recorder(1).option("--hook", "probe"),
            Self::Losses => recorder(1).option("--ring-bytes", "64KiB"),
            Self::Growth => recorder(GROWS_AT),
            Self::Classes => recorder(64).option("--criterion", "size-class"),
            Self::FramePointers => recorder(1).option("--unwind", "fp"),
            Self::Ends => recorder(1).pid(other),
            Self::Inline => recorder(1).option("--hook", "inline").flag("--no-follow"),
        }
    }

    /// Runs the target while the faults happen. Returns the truth, if the target reports it.
    fn work(self, target: &mut Target, recording: &Recording) -> Option<Truth> {
        if matches!(self, Self::Losses | Self::Growth) {
            recording.signal(libc::SIGSTOP);
            target.go();
            let truth = target.truth();
            recording.signal(libc::SIGCONT);
            return Some(truth);
        }
        target.go();
        (self != Self::Python).then(|| target.truth())
    }
}

/// The distribution's interpreter.
fn python() -> Option<PathBuf> {
    tool("python3")
}

/// The cases that can run on this machine.
fn cases(name: &str) -> Vec<Case> {
    let mut cases = Case::ALL.to_vec();
    if python().is_none() {
        skipped(name, "no python3: faults at what is read of interpreters");
        cases.retain(|case| *case != Case::Python);
    }
    if !cfg!(target_arch = "x86_64") {
        skipped(name, "inline hooks are of x86-64");
        cases.retain(|case| *case != Case::Inline);
    }
    cases
}

/// The outcome of a recording, and its target.
struct Recorded {
    outcome: Outcome,
    truth: Option<Truth>,
    pid: u32,
}

/// Records a case. `begin` runs once the probes are in place and starts the faults. Returns `None` if the recording
/// could not start.
fn record(case: Case, faults: &Arc<Faults>, begin: impl FnOnce()) -> Option<Recorded> {
    let mut other = Target::start(&program("mix"), ["10"]);
    let mut target = case.target();
    let pid = target.pid();
    let recorder = case.recorder(pid, other.pid()).failing(faults);
    let recording = match recorder.try_start() {
        Ok(recording) => recording,
        Err(said) => {
            readable(&said);
            assert!(said.contains("(exit status: 1)"), "{said}");
            assert!(target.end().success(), "the target came to harm: {said}");
            return None;
        }
    };
    begin();
    let truth = case.work(&mut target, &recording);
    if case == Case::Ends {
        assert!(target.end().success(), "the target came to harm");
        // heapbpf reads the ended process's counters over some time after its end.
        std::thread::sleep(Duration::from_millis(2500));
        other.run();
        faults.fail_one_in(0);
        return Some(Recorded { outcome: recording.stop(), truth, pid });
    }
    // Enough for several rounds of the once-a-second work.
    std::thread::sleep(Duration::from_millis(1200));
    faults.fail_one_in(0);
    let outcome = recording.stop();
    assert!(target.end().success(), "the target came to harm");
    Some(Recorded { outcome, truth, pid })
}

/// Whether an estimate is honest: its interval contains the truth, or it says that it has none.
fn honest(estimate: &Estimate, truth: u64) -> bool {
    match (estimate.low, estimate.high) {
        (Some(low), Some(high)) => low <= truth as f64 && truth as f64 <= high,
        _ => true,
    }
}

/// Checks that no loss went unreported. `results` checks the identity and sums of every profile.
fn check(case: Case, what: &str, recorded: &Recorded) {
    let Recorded { outcome, truth, pid } = recorded;
    let (profile, stats): (Profile, Stats) = outcome.results();
    readable(&outcome.stderr);
    let Some(truth) = truth else { return };
    let totals = &profile.totals;
    assert!(stats.hits > 0, "{what}");
    if case == Case::Ends {
        // The other target is counted as well.
        let process = profile.process(*pid);
        assert!(honest(&process.figures.alloc_bytes, truth.bytes()), "{what}: {:?}", process.figures);
        if stats.lost() == 0 {
            assert_eq!(process.figures.alloc_bytes.exact, Some(truth.bytes() as f64), "{what}");
        }
        return;
    }
    if let Some(exact) = totals.alloc_bytes.exact {
        assert_eq!(exact, truth.bytes() as f64, "{what}: exact totals are wrong: {stats:?}");
    }
    let in_use = totals.inuse_bytes.as_ref().expect("frees are tracked");
    assert!(honest(&totals.alloc_bytes, truth.bytes()), "{what}: {} not in {:?}", truth.bytes(), totals.alloc_bytes);
    assert!(honest(in_use, truth.live_bytes()), "{what}: {} not in {in_use:?}", truth.live_bytes());
    // Without losses, memory in use equals what the target reports.
    match case {
        Case::Classes | Case::FramePointers => {}
        Case::Growth if stats.lost() == 0 => checks::sites(&profile, truth, GROWS_AT, Compare::All),
        _ if stats.lost() == 0 => checks::sites(&profile, truth, 1, Compare::All),
        _ => {}
    }
}

/// Returns every operation that the cases perform, at the start and during the recording, each with the first case that
/// performs it.
fn operations(cases: &[Case]) -> [BTreeMap<Operation, Case>; 2] {
    let mut found = [BTreeMap::new(), BTreeMap::new()];
    for &case in cases {
        let noting = Faults::noting();
        let mut of_start = BTreeMap::new();
        let recorded = record(case, &noting, || of_start = noting.take_seen()).expect("nothing fails");
        check(case, "without faults", &recorded);
        for (found, seen) in found.iter_mut().zip([of_start, noting.take_seen()]) {
            seen.into_keys().for_each(|operation| {
                found.entry(operation).or_insert(case);
            });
        }
    }
    found
}

/// Calls `each` for each operation and returns the results. Runs two at a time, because recordings mostly wait.
fn with_each<T: Send>(operations: &BTreeMap<Operation, Case>, each: impl Fn(&Operation, Case) -> T + Sync) -> Vec<T> {
    let next = Mutex::new(operations.iter());
    let work = || {
        let next = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
        std::iter::from_fn(next).map(|(operation, case)| each(operation, *case)).collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let workers = [(); 2].map(|()| scope.spawn(work));
        let done = workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        done.flatten().collect()
    })
}

/// Each operation of the start fails: heapbpf reports it and ends with status 1, or manages without and is correct.
fn fail_at_the_start(operations: &BTreeMap<Operation, Case>) {
    assert!(operations.len() > 10, "{operations:?}");
    let done = with_each(operations, |operation, case| {
        let faults = Faults::of_operation(operation);
        faults.fail_one_in(1);
        let what = format!("{operation} fails at the start, {case:?}");
        let recorded = record(case, &faults, || faults.fail_one_in(0));
        println!("{what}: {} times, {}", faults.failed(), if recorded.is_some() { "did without" } else { "refused" });
        if let Some(recorded) = &recorded {
            check(case, &what, recorded);
        }
        (recorded.is_none(), (faults.failed() == 0).then_some(what))
    });
    let refused = done.iter().filter(|(is_refused, _)| *is_refused).count();
    let never: Vec<&String> = done.iter().filter_map(|(_, never)| never.as_ref()).collect();
    println!("{} operations, {refused} refused; {} did not occur again: {never:?}", operations.len(), never.len());
    assert!(never.len() * 3 < operations.len(), "most did not occur again: {never:?}");
}

/// Operations that fail at the start of a plain recording.
#[test]
fn operations_on_maps_may_fail_at_the_start() {
    let Some(_turn) = turn("operations_on_maps_may_fail_at_the_start") else { return };
    let [operations, _] = operations(&[Case::Exact]);
    println!("{operations:?}");
    fail_at_the_start(&operations);
}

/// The long set: all operations of all cases.
mod long {
    use super::*;

    /// Each operation of a running recording fails every other time. Identities hold, estimates are within their intervals
    /// or flagged, and memory in use is correct afterwards.
    #[test]
    fn every_operation_on_a_map_may_fail_while_it_records() {
        let name = "every_operation_on_a_map_may_fail_while_it_records";
        let Some(_turn) = turn(name) else { return };
        let [_, operations] = &operations(&cases(name));
        // These must be among them, to make sure that watching works.
        for map in ["TOTALS", "PROGRESS", "UNATTRIBUTED", "SLEEP", "LIVE", "TARGETS"] {
            assert!(operations.keys().any(|operation| operation.map == map), "{map}: {operations:?}");
        }
        let never = with_each(operations, |operation, case| {
            let faults = Faults::of_operation(operation);
            let what = format!("{operation} fails, {case:?}");
            let recorded = record(case, &faults, || faults.fail_one_in(2)).expect("nothing failed at the start");
            check(case, &what, &recorded);
            if faults.failed() == 0 {
                // There were too few operations for one to fail.
                let recorded = record(case, &faults, || faults.fail_next(2)).expect("nothing failed at the start");
                check(case, &what, &recorded);
            }
            println!("{what}: {} times", faults.failed());
            (faults.failed() == 0).then_some(what)
        });
        let never: Vec<String> = never.into_iter().flatten().collect();
        println!("{} operations; {} did not occur again: {never:?}", operations.len(), never.len());
        assert!(never.len() * 4 < operations.len(), "many did not occur again: {never:?}");
    }

    /// Each operation that any case performs at the start fails.
    #[test]
    fn every_operation_on_a_map_may_fail_at_the_start() {
        let name = "every_operation_on_a_map_may_fail_at_the_start";
        let Some(_turn) = turn(name) else { return };
        fail_at_the_start(&operations(&cases(name))[0]);
    }

    /// Rings cannot be mapped, or not be watched, when larger ones replace them.
    #[test]
    fn rings_that_cannot_grow_or_be_watched_lose_nothing_in_silence() {
        let Some(_turn) = turn("rings_that_cannot_grow_or_be_watched_lose_nothing_in_silence") else { return };
        for (what, faults) in [("mapping", Faults::of_shared_mappings()), ("watching", Faults::of_watching())] {
            let mut target = Case::Growth.target();
            let (recording, address) = Case::Growth.recorder(target.pid(), 0).failing(&faults).serve();
            // Once heapbpf serves figures, it is watching its rings. If it cannot do so at the start, it says so and
            // records nothing.
            assert_eq!(get(address, "/metrics").status, 200);
            faults.fail_one_in(2);
            let truth = Case::Growth.work(&mut target, &recording);
            std::thread::sleep(Duration::from_millis(1200));
            faults.fail_one_in(0);
            let recorded = Recorded { outcome: recording.stop(), truth, pid: target.pid() };
            println!("{what} rings failed {} times", faults.failed());
            assert!(faults.failed() > 0, "{what}: no ring grew");
            check(Case::Growth, what, &recorded);
            assert!(target.end().success(), "the target came to harm");
        }
    }
}

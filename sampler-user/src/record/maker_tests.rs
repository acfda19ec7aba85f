//! Tests of what becomes of ended processes when profiles are made.

use super::*;
use crate::profile::testing;
use crate::record::naming::Facts;
use crate::record::snapshot::Unnamed;

fn worker() -> Worker {
    let template = Profile { processes: Vec::new(), rows: Vec::new(), ..testing::ended_apart() };
    let naming = Naming::new(false, crate::symbols::symbolizer::Options::new(&[], 0), Default::default());
    Worker { template, adjustments: Adjustments::default(), naming, residue: Residue::default() }
}

fn key(tgid: u32) -> ProcessKey {
    ProcessKey { start_ns: 1, tgid, exec_id: 0 }
}

fn process(pid: u32, inuse_unknown: bool) -> Process {
    Process { pid, comm: "program".into(), ended: pid > 1, inuse_unknown, ..Process::default() }
}

/// Of the process with this number; each of `held` bytes is a block.
fn row(process: usize, pid: u32, inuse: u64, held: u64) -> SnapshotRow {
    let sums = |bytes| testing::sums(u64::from(bytes > 0), bytes, 1);
    SnapshotRow {
        process,
        thread: "main".into(),
        function: "malloc".into(),
        interval: 1,
        alloc: sums(2 * (inuse + held)),
        inuse: sums(inuse),
        at_exit: sums(held),
        peak: SampleSums::default(),
        ages: None,
        stack: Some(Unnamed { process: key(pid), stack: Arc::new(RawStack::lost()) }),
    }
}

fn snapshot(detail: Detail, processes: Vec<Process>, rows: Vec<SnapshotRow>) -> Snapshot {
    Snapshot {
        detail,
        live: true,
        time_windows: false,
        started: SystemTime::UNIX_EPOCH,
        duration: Duration::from_secs(9),
        unread: None,
        keys: processes.iter().map(|process| key(process.pid)).collect(),
        processes,
        rows,
        facts: Facts::default(),
        stats: Stats::default(),
        notes: Vec::new(),
        begun: Instant::now(),
        cost: Duration::ZERO,
    }
}

/// In use, at exit, allocated; in bytes.
fn totals(profile: &Profile) -> [f64; 3] {
    let sum = |of: fn(&Row) -> f64| profile.rows.iter().map(of).sum();
    [sum(|row| row.inuse.bytes), sum(|row| row.at_exit.bytes), sum(|row| row.alloc.bytes)]
}

#[test]
fn totals_at_exit_stay_when_processes_are_put_with_the_residue() {
    let mut worker = worker();
    let living = || (process(1, false), row(0, 1, 10, 0));
    let both = || (vec![process(2, false), process(3, false)], vec![row(0, 2, 0, 100), row(1, 3, 0, 23)]);
    let before = |detail| {
        let ((one, own), (ended, mut rows)) = (living(), both());
        rows.iter_mut().for_each(|row| row.process += 1);
        snapshot(detail, [vec![one], ended].concat(), [vec![own], rows].into_iter().flatten().collect())
    };
    let after = |detail| {
        let (one, own) = living();
        snapshot(detail, vec![one], vec![own])
    };
    let expected = [10.0, 123.0, 266.0];
    let made = worker.make(before(Detail::Stacks));
    assert_eq!(totals(&made.profile), expected);
    assert_eq!(made.profile.time, SystemTime::UNIX_EPOCH + Duration::from_secs(9));
    let (processes, rows) = both();
    let keys = processes.iter().map(|process| key(process.pid)).collect();
    worker.retire(Retired { keys, processes, rows, facts: Facts::default() });
    for detail in [Detail::Stacks, Detail::Lifetimes, Detail::Totals] {
        let profile = worker.make(after(detail)).profile;
        assert_eq!(totals(&profile), expected, "{detail:?}");
        let of_program = profile.rows.iter().filter(|row| row.process == 1).map(|row| row.at_exit.bytes).sum::<f64>();
        assert_eq!((of_program, profile.processes[1].pid), (123.0, 0), "{detail:?}");
    }
}

/// Where frees were given up nobody knows what was held.
#[test]
fn what_is_not_known_is_not_held_at_exit() {
    let mut worker = worker();
    let (processes, rows) = (vec![process(2, true)], vec![row(0, 2, 0, 100)]);
    worker.retire(Retired { keys: vec![key(2)], processes, rows, facts: Facts::default() });
    let profile = worker.make(snapshot(Detail::Stacks, vec![process(1, false)], vec![row(0, 1, 10, 0)])).profile;
    assert_eq!(totals(&profile), [10.0, 0.0, 220.0]);
    // Frees were given up of everybody since.
    let mut all = snapshot(Detail::Totals, vec![process(1, true)], vec![row(0, 1, 10, 0)]);
    all.live = false;
    assert_eq!(totals(&worker.make(all).profile), [0.0, 0.0, 220.0]);
}

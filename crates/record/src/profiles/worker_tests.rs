//! Tests of exited processes in profiles, and of the profile worker.

use std::collections::HashSet;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use heapbpf_host::mappings::ModuleId;
use heapbpf_profile::model::{LossBound, Losses, Module, RowKey};
use heapbpf_profile::testing;
use heapbpf_profile::value::Value;
use heapbpf_unwind::image::Image;
use heapbpf_unwind::raw::{RawFrame, RawStack};

use super::*;
use crate::attaching::arenas::AtAttach;
use crate::profiles::symbolization::{Facts, ModuleFacts, UnsymbolizedStack};

fn worker() -> Worker {
    let template = Profile { processes: Vec::new(), rows: Vec::new(), ..testing::ended_apart() };
    let symbolization = Symbolization::new(false, heapbpf_symbols::options::Options::new(&[], 0), Default::default());
    Worker::new(template, Adjustments::default(), symbolization)
}

fn key(tgid: u32) -> ProcessKey {
    ProcessKey { start_ns: 1, tgid, exec_id: 0 }
}

fn process(pid: u32, inuse_unknown: bool) -> Process {
    Process { pid, comm: "program".into(), ended: pid > 1, inuse_unknown, ..Process::default() }
}

/// A row of the process with this index. `inuse` and `held` (at exit) are one block each, if not zero; sizes in bytes.
fn row(process: usize, pid: u32, inuse: u64, held: u64) -> SnapshotRow {
    let sums = |bytes| testing::sums(u64::from(bytes > 0), bytes, 1);
    SnapshotRow {
        key: RowKey {
            process,
            thread: "main".into(),
            function: "malloc".into(),
            interval: 1,
            stack: Some(UnsymbolizedStack { process: key(pid), stack: Arc::new(RawStack::lost()) }),
        },
        alloc: sums(2 * (inuse + held)),
        inuse: sums(inuse),
        at_exit: sums(held),
        ..SnapshotRow::default()
    }
}

fn snapshot(detail: Detail, processes: Vec<Process>, rows: Vec<SnapshotRow>) -> Snapshot {
    Snapshot {
        measured: Vec::new(),
        idle: Vec::new(),
        unhooked: None,
        often: None,
        detail,
        marks: Vec::new(),
        growth_over: None,
        live: true,
        started: SystemTime::UNIX_EPOCH,
        duration: Duration::from_secs(9),
        unread: None,
        keys: processes.iter().map(|process| key(process.pid)).collect(),
        processes,
        rows,
        facts: Facts::default(),
        go: Vec::new(),
        stats: Stats::default(),
        notes: Vec::new(),
        begun: Instant::now(),
        cost: Duration::ZERO,
        cpu: Duration::ZERO,
    }
}

/// Processes that have ended, with their rows.
fn retired(processes: Vec<Process>, rows: Vec<SnapshotRow>) -> Retired {
    let keys = processes.iter().map(|process| key(process.pid)).collect();
    Retired { keys, processes, rows, held: HashSet::new(), facts: Facts::default() }
}

/// Bytes in use, held at exit and allocated.
fn totals(profile: &Profile) -> [f64; 3] {
    let sum = |of: fn(&Row) -> f64| profile.rows.iter().map(of).sum();
    [sum(|row| row.inuse.bytes), sum(|row| row.at_exit.bytes), sum(|row| row.alloc.bytes)]
}

#[test]
fn totals_at_exit_stay_when_processes_are_moved_to_the_overflow_bucket() {
    let mut worker = worker();
    let living = || (process(1, false), row(0, 1, 10, 0));
    let both = || (vec![process(2, false), process(3, false)], vec![row(0, 2, 0, 100), row(1, 3, 0, 23)]);
    let before = |detail| {
        let ((one, own), (ended, mut rows)) = (living(), both());
        rows.iter_mut().for_each(|row| row.key.process += 1);
        snapshot(detail, [vec![one], ended].concat(), [vec![own], rows].into_iter().flatten().collect())
    };
    let after = |detail| {
        let (one, own) = living();
        snapshot(detail, vec![one], vec![own])
    };
    let expected = [10.0, 123.0, 266.0];
    let made = worker.make(before(Detail::Stacks));
    assert_eq!(totals(&made.profile), expected);
    assert_eq!(made.profile.header.time, SystemTime::UNIX_EPOCH + Duration::from_secs(9));
    let (processes, rows) = both();
    worker.retire(retired(processes, rows));
    for detail in [Detail::Stacks, Detail::Lifetimes, Detail::Totals] {
        let profile = worker.make(after(detail)).profile;
        assert_eq!(totals(&profile), expected, "{detail:?}");
        let of_program =
            profile.rows.iter().filter(|row| row.key.process == 1).map(|row| row.at_exit.bytes).sum::<f64>();
        assert_eq!((of_program, profile.processes[1].pid), (123.0, 0), "{detail:?}");
    }
}

/// The estimate for lost samples is in the totals and in `--stats`, and stays when their process is moved to the
/// overflow bucket.
#[test]
fn lost_samples_are_in_the_totals_of_the_living_and_the_ended() {
    let mut worker = worker();
    let lossy = |pid, exact| Process {
        losses: Losses { alloc: LossBound { samples: 3, sampled_bytes: 80 }, ..Losses::default() },
        exact_alloc_bytes: Some(exact),
        exact_alloc_objects: Some(4),
        ..process(pid, false)
    };
    let both = || (vec![lossy(1, 100), lossy(2, 280)], vec![row(0, 1, 10, 0), row(1, 2, 0, 100)]);
    let (processes, rows) = both();
    let stats = Stats { estimated_alloc_bytes: 220.0, ..Stats::default() };
    let made = worker.make(Snapshot { stats, ..snapshot(Detail::Stacks, processes, rows) });
    assert_eq!((totals(&made.profile)[2], made.stats.estimated_alloc_bytes), (380.0, 380.0));
    let (mut processes, mut rows) = both();
    let (ended, mut of_ended) = (processes.pop().unwrap(), rows.pop().unwrap());
    of_ended.key.process = 0;
    worker.retire(retired(vec![ended], vec![of_ended]));
    for detail in [Detail::Stacks, Detail::Totals] {
        let (mut processes, mut rows) = both();
        processes.truncate(1);
        rows.truncate(1);
        let profile = worker.make(snapshot(detail, processes, rows)).profile;
        assert_eq!(totals(&profile)[2], 380.0, "{detail:?}");
        let lost = profile.rows.iter().filter(|row| row.is_of_lost_samples()).map(|row| row.alloc.bytes);
        assert_eq!(lost.collect::<Vec<_>>(), [80.0, 80.0], "{detail:?}");
    }
}

/// The host's exact total is unknown if a process is not counted, whether that process lives or has ended.
#[test]
fn an_exact_total_is_unknown_with_a_process_that_was_not_counted() {
    let announcing = Process { hook: Some(heapbpf_audit::Hook::Usdt), ..process(2, false) };
    let counted = Process { exact_alloc_bytes: Some(20), exact_alloc_objects: Some(1), ..process(1, false) };
    let exact = |profile: &Profile| heapbpf_profile::estimates::exact(profile, None, Value::AllocSpace);
    let mut worker = worker();
    let both = || snapshot(Detail::Stacks, vec![counted.clone(), announcing.clone()], vec![row(0, 1, 10, 0)]);
    assert_eq!(exact(&worker.make(both()).profile), None);
    worker.retire(retired(vec![announcing.clone()], vec![row(0, 2, 0, 100)]));
    let made = worker.make(snapshot(Detail::Stacks, vec![counted.clone()], vec![row(0, 1, 10, 0)]));
    assert_eq!((exact(&made.profile), made.profile.processes[1].exact_alloc_bytes), (None, None));
}

/// Where frees are not tracked, it is unknown what was held at exit.
#[test]
fn what_is_not_known_is_not_held_at_exit() {
    let mut worker = worker();
    worker.retire(retired(vec![process(2, true)], vec![row(0, 2, 0, 100)]));
    let profile = worker.make(snapshot(Detail::Stacks, vec![process(1, false)], vec![row(0, 1, 10, 0)])).profile;
    assert_eq!(totals(&profile), [10.0, 0.0, 220.0]);
    // From here on, frees are tracked for no process.
    let mut all = snapshot(Detail::Totals, vec![process(1, true)], vec![row(0, 1, 10, 0)]);
    all.live = false;
    assert_eq!(totals(&worker.make(all).profile), [0.0, 0.0, 220.0]);
}

/// Adds ages: blocks of weight 3 freed after one second, and one live block of weight 1.
fn with_ages(row: SnapshotRow) -> SnapshotRow {
    let mut ages = Ages::default();
    ages.record(0, 1_000_000_000, 3.0, false);
    ages.record_left(0, 2_000_000_000, None, 1.0);
    SnapshotRow { ages: Some(ages), ..row }
}

#[test]
fn lifetimes_are_estimated_only_where_frees_are_tracked() {
    let mut worker = worker();
    let rows = vec![with_ages(row(0, 1, 10, 0)), with_ages(row(1, 2, 10, 0))];
    let profile = worker.make(snapshot(Detail::Lifetimes, vec![process(1, false), process(2, true)], rows)).profile;
    let [tracked, untracked] = &profile.rows[..] else { panic!("{} rows", profile.rows.len()) };
    assert!(tracked.lifetimes.is_some() && tracked.peak.is_some() && tracked.inuse.bytes == 10.0);
    assert!(untracked.lifetimes.is_none() && untracked.peak.is_none() && untracked.inuse.bytes == 0.0);
    assert_eq!(untracked.alloc.bytes, tracked.alloc.bytes);
    assert!(profile.header.live);
}

#[test]
fn a_profile_says_what_its_snapshot_said() {
    let mut worker = worker();
    let stats = Stats { hits: 7, ..Stats::default() };
    let given = Snapshot {
        stats,
        notes: vec!["a note".into()],
        cost: Duration::from_millis(3),
        ..snapshot(Detail::Stacks, vec![process(1, false)], vec![row(0, 1, 10, 0)])
    };
    let begun = given.begun;
    let made = worker.make(given);
    assert_eq!((made.begun, made.cost, made.stats.hits), (begun, Duration::from_millis(3), 7));
    assert_eq!(made.keys, [key(1)]);
    assert!(made.profile.notes.contains(&"a note".to_owned()));
    // The daemon's own cost is measured when the profile is finished.
    assert!(made.stats.daemon_peak_rss_bytes > 0);
}

#[test]
fn jobs_are_done_in_order_and_the_last_one_too_when_the_session_goes() {
    let (jobs, queue) = channel();
    let (sender, done) = channel();
    for number in 0..3 {
        let sender = sender.clone();
        let then = move |made: FinishedProfile| sender.send((number, made.profile.processes.len())).unwrap();
        let processes: Vec<Process> = (0..number).map(|pid| process(pid, false)).collect();
        jobs.send(Job::Make(
            Box::new(snapshot(Detail::Totals, processes, Vec::new())),
            Box::new(then),
            Place::default(),
        ))
        .unwrap();
    }
    drop((jobs, sender));
    worker().work(&queue);
    assert_eq!(done.into_iter().collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 2)]);
}

/// A file whose reading panics the first `times` times.
struct Panics(AtomicUsize);

impl Image for Panics {
    fn length_bytes(&self) -> std::io::Result<u64> {
        let left = self.0.load(Ordering::Relaxed);
        if left > 0 {
            self.0.store(left - 1, Ordering::Relaxed);
            panic!("the reader of files did not expect this");
        }
        Err(std::io::ErrorKind::UnexpectedEof.into())
    }

    fn read_at(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        self.length_bytes().map(|_| ())
    }
}

/// A snapshot of a stack in a module whose file panics the first `times` times.
fn of_a_panicking_file(number: u32, times: usize) -> Snapshot {
    let module = ModuleId(number);
    let mut row = row(0, 1, 10, 0);
    let address = 0x5000 + u64::from(number);
    let frames = Box::new([RawFrame { module: Some(module), address, file_offset: address }]);
    row.key.stack =
        Some(UnsymbolizedStack { process: key(1), stack: Arc::new(RawStack { frames, ..RawStack::lost() }) });
    let facts = ModuleFacts {
        module: Module { path: format!("/lib/{number}.so").into(), start: 0x5000, end: 0x6000, ..Module::default() },
        is_anonymous: false,
        root: None,
        image: Ok(Arc::new(Panics(AtomicUsize::new(times)))),
    };
    let facts = Facts { modules: [(module, facts)].into(), ..Facts::default() };
    Snapshot { facts, ..snapshot(Detail::Stacks, vec![process(1, false)], vec![row]) }
}

/// A worker that finds names, on a thread of its own, and its queue of jobs.
fn started() -> (Sender<Job>, std::thread::JoinHandle<()>) {
    let (jobs, queue) = channel();
    let thread = std::thread::spawn(move || {
        let options = heapbpf_symbols::options::Options::new(&[], 0);
        let symbolization = Symbolization::new(true, options, Default::default());
        Worker { symbolization, ..worker() }.work(&queue);
    });
    (jobs, thread)
}

/// The profile of a snapshot; `None` if it could not be made.
fn made_by(jobs: &Sender<Job>, snapshot: Snapshot) -> Option<Profile> {
    let (sender, made) = channel();
    let then = move |made: FinishedProfile| sender.send(made.profile).unwrap();
    jobs.send(Job::Make(Box::new(snapshot), Box::new(then), Place::default())).unwrap();
    made.recv().ok()
}

/// Module and reason of the only frame.
fn frame_of(profile: &Profile) -> (&str, &str) {
    let frame = &profile.rows[0].key.stack.frames[0];
    (&profile.modules[frame.module.unwrap()].path, frame.reason.as_deref().unwrap())
}

#[test]
fn a_panic_while_names_are_found_costs_names_alone() {
    let (jobs, thread) = started();
    // The panic does not recur.
    let profile = made_by(&jobs, of_a_panicking_file(1, 1)).unwrap();
    let (module, reason) = frame_of(&profile);
    assert!(module == "/lib/1.so" && reason.starts_with("/lib/1.so: "), "named by the second attempt: {reason}");
    assert_eq!(totals(&profile), [10.0, 0.0, 20.0]);
    let has_note = |times: &str| {
        let text =
            format!("failed {times} because of an error inside heapbpf (the reader of files did not expect this)");
        move |profile: &Profile| profile.notes.iter().any(|note| note.contains(&text))
    };
    assert!(has_note("once")(&profile), "{:?}", profile.notes);
    // The panic persists.
    let profile = made_by(&jobs, of_a_panicking_file(2, usize::MAX)).unwrap();
    assert_eq!(frame_of(&profile), ("/lib/2.so", "not symbolized"));
    assert_eq!(totals(&profile), [10.0, 0.0, 20.0]);
    assert!(has_note("3 times")(&profile), "{:?}", profile.notes);
    // The next profiles are made as usual.
    let profile = made_by(&jobs, of_a_panicking_file(3, 0)).unwrap();
    assert!(frame_of(&profile).1.starts_with("/lib/3.so: "), "{:?}", frame_of(&profile));
    drop(jobs);
    thread.join().unwrap();
}

#[test]
fn a_panic_ends_its_job_and_no_other() {
    let (jobs, thread) = started();
    // Exited processes are kept.
    let ended = retired(vec![process(2, false)], vec![row(0, 2, 0, 100)]);
    jobs.send(Job::Retire(Box::new(ended), Place::default())).unwrap();
    let snapshot = || snapshot(Detail::Stacks, vec![process(1, false)], vec![row(0, 1, 10, 0)]);
    let then = |_| panic!("the writer did not expect this");
    jobs.send(Job::Make(Box::new(snapshot()), Box::new(then), Place::default())).unwrap();
    let profile = made_by(&jobs, snapshot()).unwrap();
    assert_eq!(totals(&profile), [10.0, 100.0, 220.0]);
    assert!(profile.notes.iter().any(|note| note.contains("the writer did not expect this")), "{:?}", profile.notes);
    // A row of a process that does not exist.
    let broken = Retired { keys: vec![key(3)], ..retired(Vec::new(), vec![row(7, 3, 0, 1)]) };
    jobs.send(Job::Retire(Box::new(broken), Place::default())).unwrap();
    assert_eq!(totals(&made_by(&jobs, snapshot()).unwrap()), [10.0, 100.0, 220.0]);
    drop(jobs);
    thread.join().unwrap();
}

#[test]
fn ended_processes_wait_to_be_named_until_there_are_many_or_for_some_time() {
    let retired = |rows: u32| retired(vec![process(2, false)], (0..rows).map(|stack| row(0, stack, 0, 1)).collect());
    let mut few = Unnamed::default();
    assert!(!few.is_due());
    few.add(retired(1));
    assert!(!few.is_due());
    few.since = Instant::now().checked_sub(LONGEST_UNNAMED);
    assert!(few.is_due());
    let mut many = Unnamed::default();
    many.add(retired(MOST_UNNAMED as u32 / 2));
    assert!(!many.is_due());
    many.add(retired(MOST_UNNAMED as u32 / 2 - 2));
    assert!(many.is_due(), "two processes, and their rows");
}

/// A client that asks often gets the same as others: unchanged stacks, new ones, and none that have gone.
#[test]
fn a_client_that_asks_often_gets_the_same_rows() {
    let (mut often, mut once) = (worker(), worker());
    let stacks: Vec<Arc<RawStack>> = (1..=4_u64)
        .map(|address| {
            let frame = RawFrame { address, module: None, file_offset: 0 };
            Arc::new(RawStack { frames: [frame].into(), ..RawStack::lost() })
        })
        .collect();
    let rows = |numbers: &[usize], bytes: u64| -> Vec<SnapshotRow> {
        let one = |&number: &usize| {
            let mut row = row(0, 1, bytes + number as u64, 0);
            row.key.stack = Some(UnsymbolizedStack { process: key(1), stack: Arc::clone(&stacks[number]) });
            row
        };
        numbers.iter().map(one).collect()
    };
    let mut old = Vec::new();
    for (numbers, bytes) in [(&[0, 1, 2][..], 10), (&[0, 1, 2], 20), (&[0, 1, 2, 3], 30), (&[1, 0, 3], 40), (&[3], 50)]
    {
        let of = |often| Snapshot { often, ..snapshot(Detail::Stacks, vec![process(1, false)], rows(numbers, bytes)) };
        let made = often.make(of(Some(Often { rows: std::mem::take(&mut old) })));
        let expected = once.make(of(None));
        assert_eq!(made.profile.rows, expected.profile.rows, "{numbers:?}");
        assert_eq!(made.profile.rows.len(), numbers.len());
        let emptied = std::mem::take(&mut *often.emptied.lock().unwrap());
        assert!(emptied.is_empty() && emptied.capacity() >= numbers.len(), "its capacity is used again");
        old = made.profile.rows;
    }
}

#[test]
fn memory_that_was_measured_is_shown_until_it_is_measured_again() {
    let mut worker = worker();
    let measured = |heap_bytes| Process {
        resident: Some(heapbpf_profile::model::Resident { heap_bytes, ..Default::default() }),
        ..process(1, false)
    };
    let mut made = |detail, process: Process, often: bool| {
        let often = often.then(Often::default);
        let made = worker.make(Snapshot { often, ..snapshot(detail, vec![process], vec![row(0, 1, 10, 0)]) });
        made.profile.processes[0].resident.map(|resident| resident.heap_bytes)
    };
    assert_eq!(made(Detail::Lifetimes, measured(7), true), Some(7));
    assert_eq!(made(Detail::Stacks, process(1, false), true), Some(7));
    assert_eq!(made(Detail::Stacks, process(2, false), true), None, "of another process nothing is known");
    assert_eq!(made(Detail::Stacks, process(1, false), false), None, "others have it measured each time");
    assert_eq!(made(Detail::Lifetimes, process(1, false), true), None, "it has ended, for example");
    assert_eq!(made(Detail::Stacks, process(1, false), true), None);
}

/// A handle, and the queues of work that waits for names and of totals.
fn handle() -> (ProfileWorker, Receiver<Job>, Receiver<Job>) {
    let ((jobs, to_name), (totals, to_add)) = (channel(), channel());
    let (place, cleanup, progress, emptied, demangler) = Default::default();
    (ProfileWorker { jobs, totals, place, cleanup, progress, emptied, demangler }, to_name, to_add)
}

/// Names may take minutes: totals, also of ended processes, have a queue of their own, and the work that waits for
/// names is bounded.
#[test]
fn totals_do_not_wait_for_names_and_few_wait_for_these() {
    let (handle, to_name, to_add) = handle();
    let snapshot = |detail| snapshot(detail, vec![process(1, false)], Vec::new());
    for _ in 1..MOST_WAITING {
        handle.make(snapshot(Detail::Stacks), drop);
    }
    assert!(!handle.is_behind());
    handle.retire(retired(vec![process(2, false)], vec![row(0, 2, 0, 100)]));
    assert!(handle.is_behind());
    let (answer, answered) = channel();
    handle.make(snapshot(Detail::Totals), move |made| answer.send(made.profile).expect("it is waited for"));
    to_name.recv().expect("a job");
    assert!(!handle.is_behind());
    drop(handle);
    worker().work(&to_add);
    assert_eq!(totals(&answered.recv().expect("it was made")), [0.0, 100.0, 200.0]);
}

/// Figures allow for what was allocated under every interval that was in force, and losses for the largest one: that of
/// a lost sample is not known.
#[test]
fn intervals_that_were_in_force_count_without_a_sample() {
    const R: [u64; 2] = [16 << 20, 1 << 20];
    let (handle, to_name, to_add) = handle();
    let losses = Losses { alloc: LossBound { samples: 3, sampled_bytes: 80 }, ..Losses::default() };
    let lossy = |pid| vec![Process { losses, ..process(pid, false) }];
    handle.set_interval(R[0]);
    handle.retire(retired(lossy(2), Vec::new()));
    handle.set_interval(R[1]);
    let (sender, made) = channel();
    for detail in [Detail::Totals, Detail::Stacks] {
        let sender = sender.clone();
        handle.make(snapshot(detail, lossy(1), Vec::new()), move |made| sender.send(made.profile).unwrap());
    }
    drop((handle, sender));
    worker().work(&to_add);
    worker().work(&to_name);
    let profiles: Vec<Profile> = made.iter().collect();
    assert_eq!(profiles.len(), 2);
    for profile in profiles {
        assert_eq!(profile.header.interval, R[1]);
        let used = heapbpf_profile::estimates::intervals_used(&profile);
        assert!(R.iter().all(|interval| used.contains(interval)), "{used:?}");
        let of_losses: Vec<u64> = profile.processes.iter().map(|process| process.losses.interval).collect();
        assert_eq!(of_losses, [R[0], R[0]]);
    }
}

/// Each cleanup holds the list of all stacks.
#[test]
fn one_cleanup_waits_while_names_are_found() {
    let (handle, to_name, _to_add) = handle();
    assert!(handle.tidy(Vec::new));
    assert!(!handle.tidy(|| panic!("nobody needs the list")));
    assert!(!handle.is_behind(), "profiles do not wait for it");
    drop(to_name.recv().expect("the first one"));
    assert!(handle.tidy(Vec::new));
}

/// The last profile waits for the removal of hooks before it measures memory, so it finds what was mapped until then.
#[test]
fn memory_of_the_last_profile_is_measured_after_the_hooks_were_removed() {
    const BYTES: u64 = 64 << 20;
    // A process that keeps what it reads.
    let mut keeping = Command::new("tail").args(["-c", "1G"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
    let keeping = keeping.as_mut().expect("every machine has it");
    let (pid, mut fed) = (keeping.id(), keeping.stdin.take().expect("a pipe"));
    let start_ns = heapbpf_host::process::Stat::read(pid).expect("it waits").start_ns;
    let key = ProcessKey { start_ns, tgid: pid, exec_id: 0 };
    let before = heapbpf_host::resident::rough(pid).expect("its memory").total_bytes();
    let (hooked, unhooked) = channel();
    let measured = Measured { process: 0, key, blocks: Vec::new(), share: 1.0, at_attach: AtAttach::default() };
    let last = move || {
        let last = snapshot(Detail::Lifetimes, vec![process(pid, false)], Vec::new());
        let made = worker().make(Snapshot { unhooked: Some(unhooked), measured: vec![measured], ..last });
        made.profile.processes[0].resident.expect("measured").total_bytes()
    };
    let resident = std::thread::scope(|scope| {
        let made = scope.spawn(last);
        fed.write_all(&vec![1; BYTES as usize]).expect("it reads");
        drop(hooked);
        made.join().expect("made")
    });
    assert!(resident >= before + BYTES / 2, "{resident} bytes, {before} before");
    drop(fed);
    assert!(keeping.wait().expect("our child").success());
}

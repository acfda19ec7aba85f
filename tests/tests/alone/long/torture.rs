//! What happens to heapbpf, and what its targets must not notice. Each test is a row of `cargo xtask torture`, which
//! repeats it. Here it is a short round. `torture_targets.rs` has what happens to the targets.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use heapbpf_tests::checks;
use heapbpf_tests::environment::{heapbpf, turn};
use heapbpf_tests::guardian::{cleaners_of, demanglers_of, guardians_of, leaks};
use heapbpf_tests::inline::{Hook, is_hooked, recorder};
use heapbpf_tests::kernel::{links_of, links_that_stay, orphaned_links};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, cpu_time, until};
use heapbpf_tests::torture::{
    Doomed, Limited, Small, Unharmed, accounted, hooks, lasting, name_of, no_link_is_orphaned, not_run,
    nothing_stays_in, readable, seen, times, was_killed, with_each_hook,
};

/// heapbpf attaches and detaches again and again, at intervals that sample much and little.
#[test]
fn attached_and_detached() {
    let Some(_turn) = turn("torture_attached_and_detached") else { return };
    with_each_hook(("attached and detached", times(3)), Unharmed::start, Unharmed::ends_well, |hook, target| {
        let (mut as_wanted, mut hits) = (0, 0);
        for cycle in 0..times(3) {
            let interval = [1 << 20, 4096, 65536][cycle as usize % 3];
            let recording = recorder(target.pid(), hook, interval).start();
            as_wanted += u32::from(is_hooked(target.pid()) == (hook == Hook::Inline));
            let stats = accounted(&recording.stop());
            assert!(stats.hits > 0, "cycle {cycle}: {stats:?}");
            hits += stats.hits;
        }
        assert!(as_wanted > 0, "never hooked as wanted");
        Some(format!("{as_wanted} hooked as asked; {hits} calls counted"))
    });
}

/// heapbpf is killed at any moment: before it has begun, while it attaches, and while it records.
#[test]
fn killed() {
    let Some(_turn) = turn("torture_killed") else { return };
    with_each_hook(("heapbpf killed (SIGKILL)", times(4)), Unharmed::start, Unharmed::ends_well, |hook, target| {
        let pid = target.pid().to_string();
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (mut with_links, mut hooked) = (0, 0);
        for kill in 0..times(4) {
            let mut command = Command::new(heapbpf());
            command.args(["-i", "4KiB", "--no-follow", "--hook", name_of(hook), "--pid", &pid]);
            let said = dir.path().join("said");
            let stderr = std::fs::File::create(&said).expect("our own directory");
            command.current_dir(dir.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
            target.assert_runs(&format!("kill {kill}"));
            let mut daemon = command.spawn().expect("the binary under test runs");
            let still_runs = |daemon: &mut Child| {
                let said = || std::fs::read_to_string(&said).unwrap_or_default();
                assert!(daemon.try_wait().expect("our child").is_none(), "heapbpf ended by itself: {}", said());
            };
            // One in four is killed at any moment, the others while links are made or soon after.
            if kill % 4 != 0 {
                until("a link", || {
                    still_runs(&mut daemon);
                    !links_of(daemon.id()).is_empty()
                });
            }
            // With inline hooks, every second one is killed while the target is hooked. On a busy machine that takes
            // longer, or the target gets probes.
            let patience = Instant::now() + Duration::from_secs(15);
            while hook == Hook::Inline && kill % 2 != 0 && !is_hooked(target.pid()) && Instant::now() < patience {
                std::thread::sleep(Duration::from_millis(2));
            }
            std::thread::sleep(Duration::from_millis(u64::from(kill * 37 % 300)));
            let held = guardians_of(daemon.id()).into_iter().chain([daemon.id()]).flat_map(links_of).collect();
            still_runs(&mut daemon);
            hooked += u32::from(is_hooked(target.pid()));
            daemon.kill().expect("it runs");
            daemon.wait().expect("our child");
            until("the end of the guardian", || guardians_of(daemon.id()).is_empty());
            until("the end of the cleaner", || cleaners_of(daemon.id()).is_empty());
            assert!(links_that_stay(&held).is_empty(), "kill {kill}");
            assert!(!is_hooked(target.pid()), "kill {kill}");
            with_links += u32::from(!held.is_empty());
        }
        Some(format!("{with_links} killed with links, {hooked} with inline hooks"))
    });
}

/// The kernel kills heapbpf because its memory cgroup is full. Its guardian is in the same cgroup.
#[test]
fn killed_for_want_of_memory() {
    let fault = "heapbpf out of memory in its cgroup";
    let Some(_turn) = turn("torture_killed_for_want_of_memory") else { return };
    for hook in hooks() {
        let before = orphaned_links();
        let mut kills = 0;
        for time in 0..times(1) {
            let name = format!("heapbpf-torture-{}-{}-{time}", std::process::id(), name_of(hook));
            let Some(group) = Limited::new(&name) else {
                not_run(fault, name_of(hook), "no memory cgroup can be made here");
                return;
            };
            let words = group.words();
            let mut target = Target::start(&program("many_stacks"), ["17", "40", "8"]);
            let recorder = recorder(target.pid(), hook, 1).through(&words.each_ref().map(OsStr::new));
            let recording = recorder.start();
            // Too little for 131,072 stacks.
            group.leave_space(4 << 20);
            let truth = target.run();
            assert_eq!(truth.allocs(), 1 << 17);
            let heapbpf = recording.pid();
            assert!(was_killed(recording), "it was not killed");
            until("the end of the guardian", || guardians_of(heapbpf).is_empty());
            kills += 1;
            nothing_stays_in(target.pid());
            assert!(target.end().success(), "it came to harm");
        }
        no_link_is_orphaned(&before);
        seen(fault, name_of(hook), times(1), &format!("{kills} killed by the kernel; nothing left, target right"));
    }
}

/// The kernel kills heapbpf, its guardian and its cleaner at the same moment, as it does when memory runs out in a
/// cgroup with `memory.oom.group`. No helper is left to remove inline hooks: the target continues with them until the
/// next recording or `doctor --clean`, which the rounds use in turn.
#[test]
fn killed_with_all_its_helpers() {
    let fault = "heapbpf, guardian and cleaner killed at once";
    let Some(_turn) = turn("torture_killed_with_all_its_helpers") else { return };
    with_each_hook((fault, times(2)), Unharmed::start, Unharmed::ends_well, |hook, target| {
        let name = format!("heapbpf-torture-all-{}-{}", std::process::id(), name_of(hook));
        let Some(group) = Doomed::new(&name) else {
            not_run(fault, name_of(hook), "no cgroup2 whose processes can be killed at once");
            return None;
        };
        let (mut killed, mut hooked, mut how) = (BTreeSet::new(), 0, "");
        for time in 0..times(2) {
            let words = group.words();
            let recording = recorder(target.pid(), hook, 4096).through(&words.each_ref().map(OsStr::new)).start();
            let heapbpf = recording.pid();
            let was_hooked = is_hooked(target.pid());
            let mut all = BTreeSet::new();
            until("all are in the group, and nobody else", || {
                let helpers = [guardians_of, cleaners_of, demanglers_of].map(|of| of(heapbpf)).concat();
                all = helpers.into_iter().chain([heapbpf]).collect();
                all == group.processes().into_iter().collect()
            });
            how = group.kill_all();
            assert!(was_killed(recording), "it was not killed");
            until("an empty group", || group.processes().is_empty());
            group.recover();
            assert_eq!(is_hooked(target.pid()), was_hooked, "nobody is left to take hooks out");
            killed.extend(all);
            hooked += u32::from(was_hooked);
            if time % 2 == 0 {
                nothing_stays_in(target.pid());
            } else {
                let stats = accounted(&recorder(target.pid(), hook, 4096).start().stop());
                assert!(stats.hits > 0, "{stats:?}");
            }
        }
        Some(format!(
            "{} processes killed by {how}; {hooked} times hooks stayed, and the next heapbpf or doctor --clean took them out; \
             {} probes leaked by the kernel",
            killed.len(),
            leaks(&killed).len()
        ))
    });
}

/// Limits how many files a process may open from now on.
fn limit_files(pid: u32, most: u64) {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the limit is only read, and the old one is not requested.
    let result = unsafe { libc::prlimit(pid as libc::pid_t, libc::RLIMIT_NOFILE, &limit, std::ptr::null_mut()) };
    assert_eq!(result, 0, "root may limit its processes");
}

/// Too few descriptors to start or to continue: heapbpf says so, or manages without.
#[test]
fn without_file_descriptors() {
    let fault = "no file descriptors";
    let Some(_turn) = turn("torture_without_file_descriptors") else { return };
    with_each_hook((fault, times(2) + 1), Unharmed::start, Unharmed::ends_well, |hook, target| {
        let (mut began, mut refused) = (0, Vec::new());
        let limits = [24_u32, 256, 512, 8].into_iter().cycle().take(times(2) as usize);
        for limit in limits {
            let most = format!("--nofile={limit}:{limit}");
            let words = ["prlimit".to_owned(), most];
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).arg(heapbpf());
            command.args(["--pid", &target.pid().to_string(), "--hook", name_of(hook), "--no-follow", "-d", "1s"]);
            let dir = tempfile::tempdir().expect("a temporary directory");
            let output = command.current_dir(dir.path()).stdin(Stdio::null()).output().expect("it runs");
            let said = String::from_utf8_lossy(&output.stderr);
            readable(&said);
            match output.status.code() {
                Some(0) => began += 1,
                Some(1 | 2) => {
                    assert!(said.contains("ulimit -Hn"), "{limit} descriptors: {said}");
                    refused.push(limit);
                }
                _ => panic!("{limit} descriptors: {}: {said}", output.status),
            }
        }
        // No descriptor is left once it records: it would need some later for children, libraries and its own files.
        let recording = Recorder::of(target.pid(), 4096).option("--hook", name_of(hook)).start();
        limit_files(recording.pid(), 3);
        std::thread::sleep(lasting(1));
        recording.signal(libc::SIGINT);
        let outcome = recording.ends();
        readable(&outcome.stderr);
        let words = outcome.stderr.to_lowercase();
        assert!(outcome.status.code() == Some(0) || words.contains("too many open files"), "{}", outcome.stderr);
        refused.sort_unstable();
        refused.dedup();
        Some(format!(
            "{began} recorded, the others said which limit to raise (with {refused:?}); with none left while it records \
             its exit status is {:?}",
            outcome.status.code()
        ))
    });
}

/// The disk is too full for its files: heapbpf says which file and why, and its target continues.
#[test]
fn without_space_on_the_disk() {
    let fault = "disk full";
    let Some(_turn) = turn("torture_without_space_on_the_disk") else { return };
    with_each_hook((fault, times(1)), Unharmed::start, Unharmed::ends_well, |hook, target| {
        let mut statuses = BTreeSet::new();
        for _ in 0..times(1) {
            let recorder = recorder(target.pid(), hook, 4096).option("--every", "300ms");
            let dir = recorder.dir().to_path_buf();
            let Some(_full) = Small::mount(&dir, 16 << 10) else {
                not_run(fault, name_of(hook), "no file system can be mounted here");
                return None;
            };
            let recording = recorder.start();
            std::thread::sleep(lasting(1));
            recording.signal(libc::SIGINT);
            let outcome = recording.ends();
            readable(&outcome.stderr);
            assert!(outcome.stderr.to_lowercase().contains("no space left"), "{}", outcome.stderr);
            assert_ne!(outcome.status.code(), Some(0), "its files are not there: {}", outcome.stderr);
            statuses.insert(outcome.status.code());
            // No output file is left half-written.
            for name in ["profile.json", "stats.json"] {
                let file = outcome.file(name);
                let text = std::fs::read_to_string(&file).unwrap_or_default();
                let whole = serde_json::from_str::<serde_json::Value>(&text).is_ok();
                assert!(text.is_empty() || whole, "{name} is cut: {} bytes", text.len());
            }
        }
        Some(format!("\"No space left on device\", exit status {statuses:?}"))
    });
}

/// No file may have a byte. The signal for that ends programs that do not expect it.
#[test]
fn with_a_limit_on_the_size_of_files() {
    let Some(_turn) = turn("torture_with_a_limit_on_the_size_of_files") else { return };
    with_each_hook(("no file may have a byte", times(1)), Unharmed::start, Unharmed::ends_well, |hook, target| {
        for _ in 0..times(1) {
            let words = ["prlimit", "--fsize=0:0"].map(OsStr::new);
            let recording = recorder(target.pid(), hook, 4096).through(&words).start();
            recording.signal(libc::SIGINT);
            let outcome = recording.ends();
            readable(&outcome.stderr);
            assert!(outcome.stderr.to_lowercase().contains("file too large"), "{}", outcome.stderr);
            assert_eq!(outcome.status.code(), Some(1), "{}", outcome.stderr);
        }
        Some("\"File too large\", exit status 1".to_owned())
    });
}

/// Counts what did not fit.
type Lossy = dyn Fn(&Profile, &Stats) -> u64;

/// Records two programs with little capacity: one that checks itself, and one whose truth is known. Everything that is
/// lost is counted. With `stopped`, heapbpf is stopped while they run.
fn with_little_capacity(fault: &str, interval: u64, options: &[[&str; 2]], stopped: bool, lossy: &Lossy) {
    for hook in hooks() {
        let before = orphaned_links();
        let mut lost = 0;
        for _ in 0..times(1) {
            let target = Unharmed::start();
            let mut known = Target::start(&program("mix"), ["5000"]);
            let recorder = recorder(target.pid(), hook, interval).pid(known.pid());
            let recording = options.iter().fold(recorder, |it, [name, value]| it.option(name, value)).start();
            if stopped {
                recording.signal(libc::SIGSTOP);
            }
            let truth = known.run();
            std::thread::sleep(lasting(1));
            if stopped {
                recording.signal(libc::SIGCONT);
            }
            let outcome = recording.stop();
            readable(&outcome.stderr);
            let (profile, stats) = outcome.results();
            let (bytes, objects) = checks::exact(profile.process(known.pid()));
            assert_eq!((objects, bytes), (Some(truth.allocs()), Some(truth.bytes())), "{stats:?}");
            assert!(lossy(&profile, &stats) > 0, "nothing was full: {:?}", profile.counters);
            lost += lossy(&profile, &stats);
            nothing_stays_in(known.pid());
            assert!(known.end().success(), "it came to harm");
            target.ends_well();
        }
        no_link_is_orphaned(&before);
        let what = format!(
            "{lost} did not fit, all counted; exact totals equal the program's own; nothing left, targets right"
        );
        seen(fault, name_of(hook), times(1), &what);
    }
}

/// A counter of a profile, by name.
fn counter(profile: &Profile, name: &str) -> u64 {
    profile.counters.get(name).and_then(|count| count.as_u64()).unwrap_or_default()
}

#[test]
fn with_a_full_ring() {
    let Some(_turn) = turn("torture_with_a_full_ring") else { return };
    with_little_capacity("ring full", 1, &[["--ring-bytes", "4096"]], false, &|_, stats| stats.lost());
}

#[test]
fn with_full_maps() {
    let Some(_turn) = turn("torture_with_full_maps") else { return };
    let options = [["--live-max", "16"], ["--stacks-max", "1000"]];
    with_little_capacity("maps full", 1, &options, false, &|profile, _| counter(profile, "untracked"));
}

/// heapbpf does not get to run for longer than its rings last.
#[test]
fn with_heapbpf_stopped() {
    let Some(_turn) = turn("torture_with_heapbpf_stopped") else { return };
    with_little_capacity("heapbpf stopped (SIGSTOP)", 512, &[["--ring-bytes", "64KiB"]], true, &|_, stats| {
        stats.lost()
    });
}

/// CPU time of this process's children that have ended.
fn time_of_children() -> Duration {
    // SAFETY: all zeros are a valid `rusage`, which the call overwrites.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is ours and has the type that the call writes.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) }, 0);
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// SIGTERM, as from systemd, with a million sampled blocks in use on 16,384 stacks (a tenth in a short round): the last
/// profile has everything. The test prints how long that took, and asserts no limit.
#[test]
fn ended_with_many_live_samples() {
    let Some(_turn) = turn("torture_ended_with_many_live_samples") else { return };
    let blocks: u64 = if lasting(0).is_zero() { 100_000 } else { 1_000_000 };
    for _ in 0..times(1) {
        let mut target = Target::start(&program("hoard"), [blocks.to_string()]);
        let recorder = recorder(target.pid(), Hook::Probe, 1).option("--live-max", "2000000");
        let recording = recorder.option("--stacks-max", "100000").start();
        target.go();
        assert_eq!(target.line(), "DONE");
        let (ended, worked) = (time_of_children(), cpu_time(recording.pid()));
        let begin = Instant::now();
        recording.signal(libc::SIGTERM);
        let outcome = recording.ends();
        let took = begin.elapsed();
        let work = time_of_children().saturating_sub(ended).saturating_sub(worked);
        readable(&outcome.stderr);
        let (profile, stats) = outcome.results();
        let (_, objects) = checks::exact(profile.process(target.pid()));
        assert!(objects.is_some_and(|objects| (blocks..blocks + 10).contains(&objects)), "{stats:?}");
        assert!(target.end().success(), "it came to harm");
        let fault = format!("SIGTERM with {blocks} live samples");
        let what = format!(
            "last profile after {:.1} s, for which it took {:.1} s of processor time; {} samples lost",
            took.as_secs_f64(),
            work.as_secs_f64(),
            stats.lost()
        );
        seen(&fault, "probe", 1, &what);
    }
}

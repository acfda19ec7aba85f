//! The breakdown of a process's resident memory, for a program that has some of every kind.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use flate2::read::GzDecoder;
use heapbpf_tests::cgroup::Cgroup;
use heapbpf_tests::doctor::doctor_of;
use heapbpf_tests::environment::{heapbpf, skipped, tool, turn};
use heapbpf_tests::kernel::linux;
use heapbpf_tests::output;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::{Target, memory_bytes, resident_bytes, stat, until};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// The parts that add up to resident memory.
const PARTS: [&str; 9] = ["heap", "files", "stacks", "shared", "jit_code", "runtime", "heapbpf", "other", "anonymous"];

/// Starts a program that waits for something that never comes. `None` if it is not installed.
fn waiting(words: &str) -> Option<Child> {
    let mut words = words.split(' ');
    let name = words.next()?;
    let mut command = Command::new(tool(name).unwrap_or_else(|| name.into()));
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().ok()
}

fn end(programs: Vec<Child>) {
    for mut program in programs {
        program.kill().expect("our own child");
        program.wait().expect("our own child");
    }
}

fn entry_of(profile: &Value, pid: u32) -> &Value {
    let all = profile["processes"].as_array().expect("processes");
    all.iter().find(|process| process["pid"] == pid).unwrap_or_else(|| panic!("{pid} is not listed"))
}

/// Checks that the parts of a process's memory are known, and add up to this many bytes.
fn adds_up(process: &Value, bytes: u64) {
    let part = |name: &str| process["resident"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {process}"));
    assert_eq!((PARTS.iter().map(|name| part(name)).sum::<u64>(), part("anonymous")), (bytes, 0), "{process}");
}

/// Every process of a cgroup has an entry with its memory, exact to the page, whether or not it allocates: ten programs
/// that wait, interpreters among them, and one that holds a large block from before the recording.
#[test]
fn every_target_has_its_memory_whether_or_not_it_allocates() {
    let case = "every_target_has_its_memory_whether_or_not_it_allocates";
    let Some(_turn) = turn(case) else { return };
    let Some(group) = Cgroup::new() else { return skipped(case, "no writable cgroup2 mount") };
    let words = [
        "bash",
        "bc",
        "cat",
        "lua5.4 -",
        "mawk 1",
        "perl -",
        "python3 -",
        "sh",
        "sleep 600",
        "sqlite3",
        "tail -f /dev/null",
    ];
    let idle: Vec<Child> = words.into_iter().filter_map(waiting).collect();
    // This one holds memory that is older than the recording.
    let holding = Target::start::<&str>(&program("resident"), []);
    let pids: Vec<u32> = idle.iter().map(std::process::Child::id).chain([holding.pid()]).collect();
    pids.iter().for_each(|pid| group.take("", *pid));
    let resident = || pids.iter().map(|pid| memory_bytes(*pid, "Rss", |_| true)).collect::<Vec<u64>>();
    // Once they have started, all of them sleep. One that waits for a CPU has not.
    let are_asleep = || pids.iter().all(|pid| stat(*pid).state == 'S');
    let mut last = Vec::new();
    until("programs that have started", || {
        std::thread::sleep(Duration::from_millis(200));
        let now = resident();
        std::mem::replace(&mut last, now) == last && are_asleep()
    });
    let cgroup = group.path().display().to_string();
    // Compare while the hooks are in place, because their pages are resident, too. A target that was stopped for
    // hooking may touch a page when it continues, so use a profile during which no memory changed. It is the first one
    // of a service, because later ones take over the parts of processes that have changed little.
    let recorded = (0..10).find_map(|_| {
        let mut busy = Target::start(&program("pairs"), ["500"]);
        group.take("", busy.pid());
        let (recording, address) = Recorder::new().option("--cgroup", &cgroup).interval(1).serve();
        let truth = busy.run();
        until("programs that were stopped sleep again", are_asleep);
        let before = resident();
        let json = get(address, "/debug/pprof/heap?format=json").body;
        let sums = resident();
        if before != sums {
            recording.stop();
            return None;
        }
        Some((recording, address, busy, truth, json, sums))
    });
    let (recording, address, busy, truth, json, sums) = recorded.expect("memory that does not change");
    let profile: Value = serde_json::from_reader(GzDecoder::new(&json[..])).expect("a profile");
    let of = |pid: u32| entry_of(&profile, pid);
    for (pid, expected) in pids.into_iter().zip(sums) {
        let process = of(pid);
        adds_up(process, expected);
        assert_eq!(process["alloc_bytes"]["exact"], 0, "{process}");
    }
    let held = of(holding.pid());
    assert!(held["resident"]["heap"].as_u64().is_some_and(|bytes| bytes >= 24 * MIB), "{held}");
    let before = &held["inuse_before"]["low"];
    assert!(before.as_f64().is_some_and(|bytes| (24.0..24.1).contains(&(bytes / MIB as f64))), "{held}");
    assert_eq!(of(busy.pid())["alloc_bytes"]["exact"].as_u64(), Some(truth.bytes()), "the others are as before");
    let metrics = get(address, "/metrics").text();
    let series = |pid: u32| format!("heapbpf_process_swapped_bytes{{pid=\"{pid}\"");
    assert!(idle.iter().all(|child| metrics.contains(&series(child.id()))), "{metrics}");
    let file = recording.dir().join("host.json.gz");
    std::fs::write(&file, json).expect("our own directory");
    let report = Command::new(heapbpf()).arg("report").arg(&file).output().expect("the binary under test runs");
    let text = String::from_utf8(report.stdout).expect("text");
    recording.stop();
    let first = text.lines().skip_while(|line| !line.contains("RESIDENT")).nth(1).unwrap_or_default();
    assert!(first.contains("resident ("), "the largest comes first:\n{text}");
    if idle.len() < 10 {
        skipped(case, &format!("fewer than ten of these programs are installed: {}", words.join(", ")));
    }
    end(idle);
    assert!(busy.end().success() && holding.end().success(), "nothing was done to them");
}

/// How much of each stack's blocks is in memory. It is exact to the byte where every allocation is sampled, and
/// otherwise within six standard errors of the estimate (a false alarm in 5 × 10⁸). At the end of the recording, a
/// program that has ended has nothing in memory.
#[test]
fn what_of_the_blocks_of_a_stack_is_in_memory() {
    let case = "what_of_the_blocks_of_a_stack_is_in_memory";
    let Some(_turn) = turn(case) else { return };
    let (page, blocks) = (4096, 40);
    let has_scan = linux() >= (6, 7);
    let read_only = if has_scan { page - 16 } else { MIB };
    let expected = [MIB / 2 - 16, MIB / 16, page - 16, MIB / 2, read_only];
    for interval in [1, 65_536] {
        let mut target = Target::start::<&str>(&program("touched"), []);
        let (outcome, _) = Recorder::of(target.pid(), interval).record(&mut target);
        let profile: Value = output::read(&outcome.file("profile.json"));
        let stacks = profile["stacks"].as_array().expect("stacks");
        for (site, expected) in expected.into_iter().enumerate() {
            let name = format!("site_{site:02}");
            let is_of = |stack: &&Value| stack["frames"][0]["function"] == name.as_str();
            let of = |field: &str| {
                let figures = stacks.iter().filter(is_of).map(|stack| &stack["resident_bytes"][field]);
                figures.map(|figure| figure.as_f64().unwrap_or_else(|| panic!("{name}: {figure}"))).sum::<f64>()
            };
            let truth = (expected * blocks) as f64;
            let error = of("estimate") - truth;
            assert!(error.abs() <= 6.0 * of("variance").sqrt(), "{name}: {} instead of {truth}", of("estimate"));
            assert!(
                interval > 1 || of("low") == truth && of("high") == truth,
                "{name}: {} to {}",
                of("low"),
                of("high")
            );
        }
        assert!(target.end().success(), "nothing was done to it");
    }
}

/// Memory that a program has mapped itself is in no figure. doctor, the report and JSON say how much it is, whether or
/// not the kernel has merged it with a block of malloc.
#[test]
fn memory_in_no_known_heap_is_told() {
    let Some(_turn) = turn("memory_in_no_known_heap_is_told") else { return };
    let is_unseen = |bytes: Option<u64>| bytes.is_some_and(|bytes| (12 * MIB..13 * MIB).contains(&bytes));
    for unseen in [0, 12] {
        let target = Target::start(&program("resident"), [unseen.to_string()]);
        let (_, found) = doctor_of(target.pid());
        let said = found["unaccounted_bytes"].as_u64();
        assert!(if unseen == 0 { said.is_none() } else { is_unseen(said) }, "{found}");
        let outcome = Recorder::of(target.pid(), 4096).start().stop();
        let profile: Value = output::read(&outcome.file("profile.json"));
        let process = entry_of(&profile, target.pid());
        assert_eq!(is_unseen(process["resident"]["other"].as_u64()), unseen > 0, "{process}");
        let text = outcome.report(&[]);
        let missed = text.lines().find(|line| line.starts_with("  missed")).unwrap_or_default();
        let (is_told, is_nothing) = (missed.contains("≥ 12."), missed.contains("nothing"));
        assert!(if unseen > 0 { is_told && !is_nothing } else { !missed.contains("resident memory") }, "{text}");
        assert!(target.end().success(), "nothing was done to it");
    }
}

#[test]
fn the_parts_of_resident_memory_add_up() {
    let Some(_turn) = turn("the_parts_of_resident_memory_add_up") else { return };
    let mut target = Target::start::<&str>(&program("resident"), []);
    let (outcome, truth) = Recorder::of(target.pid(), 4096).record(&mut target);
    let resident = resident_bytes(target.pid()).expect("it has memory");

    outcome.results();
    let file = outcome.file("profile.json");
    let profile: Value = output::read(&file);
    let of = &profile["processes"][0]["resident"];
    let part = |name: &str| of[name].as_u64().unwrap_or_else(|| panic!("no {name} in {of}"));
    let sum: u64 = PARTS.iter().map(|name| part(name)).sum();
    // The kernel adds up the page counts of its CPUs only from time to time: up to 64 pages per CPU and kind may be
    // missing (Linux, mm/memory.c).
    assert!(sum.abs_diff(resident) <= 4 * MIB, "{sum} in parts, {resident} resident: {of}");

    let within = |name: &str, range: std::ops::Range<u64>| {
        assert!(range.contains(&part(name)), "{name}: {} MiB are not in {range:?} bytes: {of}", part(name) / MIB);
    };
    // Both heaps, including freed memory in them. The older memory is one block, in its own mapping, which was not
    // sampled.
    within("heap", 40 * MIB..42 * MIB);
    within("stacks", 4 * MIB..5 * MIB);
    within("shared", 12 * MIB..13 * MIB);
    within("jit_code", 2 * MIB..3 * MIB);
    assert!((1..=512 << 10).contains(&part("heapbpf")), "{of}");
    // Includes the pages that inline hooks wrote to.
    within("other", 6 * MIB..8 * MIB);
    within("at_attach", 24 * MIB..25 * MIB);

    let live: u64 = ["site_00", "site_01"].iter().map(|name| truth.site(name).live_bytes).sum();
    assert_eq!(live, 8 * MIB);
    let text = outcome.report(&["--details"]);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for said in ["resident: ", " = heap 40", " + shared 12.", " in older blocks + 8."] {
        assert!(words.contains(said), "{said:?} is not in\n{text}");
    }
}

//! Samples that programs announce themselves (USDT provider `otel_memory`), compared with the true allocations.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::busy::start_starved;
use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::doctor::doctor_text_of;
use heapbpf_tests::environment::{heapbpf, skipped, turn};
use heapbpf_tests::output::{Estimate, Figures, Profile, Stats};
use heapbpf_tests::program::{copy_of, library, program, program_with, rust_program};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::{Target, until};
use heapbpf_tests::truth::Truth;

/// Sampling interval of the programs.
const INTERVAL: u64 = 16 << 10;
const ROUNDS: &str = "200000";

/// A static program without symbols, so its malloc cannot be found.
fn alone() -> PathBuf {
    alone_as("announced-alone")
}

/// Like [`alone`], under another name.
fn alone_as(name: &str) -> PathBuf {
    program_with("announced", name, &["-static", "-s", "-DALONE"])
}

/// Waits for this test's turn. Skips the test on machines whose probe arguments heapbpf cannot read.
fn turn_here(case: &str) -> Option<impl Sized> {
    if std::env::consts::ARCH != "x86_64" {
        skipped(case, "arguments of announcements are read on x86-64 only");
        return None;
    }
    turn(case)
}

/// Records with large rings: the programs announce thousands of samples within milliseconds, before rings can grow.
fn recorder(target: &Target) -> Recorder {
    Recorder::new().pid(target.pid()).option("--ring-bytes", "16MiB")
}

fn record(program: &Path, mode: &str, options: &[[&str; 2]]) -> (Profile, Stats, Truth) {
    let interval = INTERVAL.to_string();
    // Another test's links to the same file would make this process announce, too.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let own = copy_of(program, dir.path(), program.file_name().and_then(OsStr::to_str).expect("our own name"));
    let mut target = Target::start(&own, [&interval, ROUNDS, mode]);
    let recorder = options.iter().fold(recorder(&target), |it, [name, value]| it.option(name, value));
    let (profile, stats, truth) = recorder.results_of(&mut target);
    assert!(target.end().success(), "nobody listens any more");
    (profile, stats, truth)
}

/// Checks what holds for every profile of announcements: it has what was sampled, with error bars, and nothing is
/// exact.
fn announced(profile: &Profile, stats: &Stats, truth: &Truth) {
    checks::sites(profile, truth, INTERVAL, Compare::All);
    assert!(profile.processes.iter().all(|process| process.hook.as_deref() == Some("usdt")), "{profile:?}");
    assert!(profile.stacks.iter().all(|stack| stack.interval == INTERVAL), "each sample tells the interval");
    assert!(stats.hits == stats.submitted && stats.lost() == 0 && stats.frees_matched > 0, "{stats:?}");
    let total = &profile.totals.alloc_bytes;
    assert!(total.exact.is_none() && stats.exact_alloc_objects == 0, "{total:?}");
    let (low, high) = (total.low.expect("error bars"), total.high.expect("error bars"));
    assert!(low < total.value() && total.value() < high && high - low < 0.1 * total.value(), "{total:?}");
}

#[test]
fn figures_are_those_that_the_program_announces() {
    let Some(_turn) = turn_here("figures_are_those_that_the_program_announces") else { return };
    let (profile, stats, truth) = record(&program("announced"), "0", &[["--hook", "usdt"]]);
    announced(&profile, &stats, &truth);
    // The stack begins at the probe, in the function that announces.
    let stack = profile.stacks.iter().find(|stack| stack.site() == Some("site_01")).expect("sampled");
    let functions: Vec<_> = stack.frames.iter().filter_map(|frame| frame.function.as_deref()).take(4).collect();
    assert_eq!(functions, ["announce", "announced_take", "own_take", "site_01"]);
    assert_eq!(stack.function, "otel_memory:alloc");
    let audit = &stats.attach;
    assert!(audit.iter().all(|probe| probe.function.starts_with("otel_memory:")), "no allocator is hooked: {audit:?}");
    assert_eq!(audit.iter().filter(|probe| probe.function == "otel_memory:alloc").count(), 3);
}

/// Mappings are announced without a weight: each counts, as it is.
#[test]
fn mappings_that_the_program_announces_count_in_full() {
    let Some(_turn) = turn_here("mappings_that_the_program_announces_count_in_full") else { return };
    let (profile, stats, truth) = record(&program("announced"), "5", &[["--hook", "usdt"]]);
    let (mapped, sampled): (Vec<_>, Vec<_>) =
        profile.stacks.into_iter().partition(|stack| stack.function == "otel_memory:mmap");
    let site = truth.site("site_03");
    let sum = |of: fn(&Figures) -> Option<f64>| mapped.iter().filter_map(|stack| of(&stack.figures)).sum::<f64>();
    let estimate = |figure: &Option<Estimate>| figure.as_ref().and_then(|figure| figure.estimate);
    let [bytes, objects] = [sum(|it| it.alloc_bytes.estimate), sum(|it| it.alloc_objects.estimate)];
    assert_eq!((bytes, objects), (site.bytes as f64, site.allocs as f64), "{mapped:?}");
    let total = &profile.totals;
    assert_eq!(estimate(&total.address_space_bytes), Some(site.live_bytes as f64), "{total:?}");
    let inuse = mapped.iter().filter_map(|stack| estimate(&stack.figures.inuse_bytes)).sum::<f64>();
    assert_eq!(inuse, site.live_allocs as f64 * 4096.0, "a page of each was written to: {mapped:?}");
    assert!(mapped.iter().all(|stack| stack.interval == 1 && stack.site() == Some("site_03")), "{mapped:?}");
    assert!(stats.hits == stats.submitted && stats.lost() == 0 && stats.exact_alloc_objects == 0, "{stats:?}");
    // The samples of blocks tell their own interval, whatever is mapped.
    assert!(!sampled.is_empty() && sampled.iter().all(|stack| stack.interval == INTERVAL), "{sampled:?}");
}

#[test]
fn an_announced_unmapping_that_cannot_be_read_is_counted() {
    let Some(_turn) = turn_here("an_announced_unmapping_that_cannot_be_read_is_counted") else { return };
    let (profile, ..) = record(&program("announced"), "6", &[["--hook", "usdt"]]);
    assert_eq!(profile.counters["unmaps_lost"].as_u64(), Some(1), "{:?}", profile.counters);
}

#[test]
fn a_program_whose_allocator_cannot_be_found_is_profiled_by_what_it_announces() {
    let Some(_turn) = turn_here("a_program_whose_allocator_cannot_be_found") else { return };
    let (profile, stats, truth) = record(&alone(), "0", &[]);
    // Without symbols, sites have no names, so compare sums.
    let sum =
        |of: fn(&heapbpf_tests::output::Figures) -> f64| profile.stacks.iter().map(|it| of(&it.figures)).sum::<f64>();
    let law = truth.sites.iter().flat_map(|site| site.sizes.clone()).collect::<Vec<_>>();
    let law = |live: bool| {
        let pick = law.iter().map(|&[size, allocs, alive]| (size, if live { alive } else { allocs }));
        heapbpf_tests::truth::Law::of(pick, INTERVAL)
    };
    let bytes = sum(|figures| figures.alloc_bytes.value());
    assert!((bytes - law(false).bytes.truth).abs() <= law(false).bytes.tolerance(), "{bytes} of {:?}", law(false));
    let inuse = sum(|figures| figures.inuse_bytes.as_ref().expect("in use").value());
    assert!((inuse - law(true).bytes.truth).abs() <= law(true).bytes.tolerance(), "{inuse} of {:?}", law(true));
    assert_eq!(profile.processes[0].hook.as_deref(), Some("usdt"));
    assert!(stats.lost() == 0 && stats.hits == stats.submitted && stats.hits > 0, "{stats:?}");
}

#[test]
fn a_library_that_is_opened_later_is_followed() {
    let Some(_turn) = turn_here("a_library_that_is_opened_later_is_followed") else { return };
    let opened = library("announcing_library", "libannouncing.so", &["-s", "-lm"]);
    let interval = INTERVAL.to_string();
    let opened = opened.display().to_string();
    let mut target = Target::start(&program("announced"), [&*interval, ROUNDS, "0", &opened]);
    let mut recording = recorder(&target).option("--hook", "usdt").start();
    target.go();
    target.step();
    recording.await_more_links();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    announced(&profile, &stats, &truth);
}

#[test]
fn children_announce_like_their_parents() {
    let Some(_turn) = turn_here("children_announce_like_their_parents") else { return };
    let (profile, stats, truth) = record(&program("announced"), "2", &[["--hook", "usdt"]]);
    announced(&profile, &stats, &truth);
    let (profile, stats, truth) = record(&alone(), "2", &[]);
    let process = profile.processes.iter().find(|process| process.pid != truth.sites[0].pid);
    let child = profile.processes.iter().find(|process| process.pid == truth.sites[0].pid).expect("the child");
    assert!(process.is_none() || process.is_some_and(|it| it.figures.alloc_bytes.value() == 0.0), "{profile:?}");
    assert_eq!(child.hook.as_deref(), Some("usdt"));
    let estimate = child.figures.alloc_bytes.value();
    assert!((estimate / truth.bytes() as f64 - 1.0).abs() < 0.1 && stats.lost() == 0, "{estimate} {stats:?}");
}

#[test]
fn every_kind_of_link_raises_semaphores() {
    let Some(_turn) = turn_here("every_kind_of_link_raises_semaphores") else { return };
    for link in ["perf", "multi"] {
        let (profile, stats, truth) = record(&program("announced"), "0", &[["--hook", "usdt"], ["--link", link]]);
        announced(&profile, &stats, &truth);
    }
}

/// A Rust program with its own global allocator, which announces its samples by `asm!`. Every allocation of the site is
/// a sample of a known weight, so the figures are exact.
#[test]
fn a_rust_program_announces_by_inline_assembly() {
    let case = "a_rust_program_announces_by_inline_assembly";
    let Some(_turn) = turn_here(case) else { return };
    let Some(built) = rust_program("announcing", "opt-level=1") else {
        return skipped(case, "no Rust compiler that works");
    };
    let mut target = Target::start(&built, ["2000"]);
    let (profile, stats, truth) = recorder(&target).option("--hook", "usdt").results_of(&mut target);
    let site = truth.site("site_00");
    let stacks = profile.stacks.iter().filter(|stack| stack.site() == Some("site_00"));
    let figures = stacks.fold([0.0; 3], |[bytes, objects, inuse], stack| {
        let of = &stack.figures;
        let live = of.inuse_bytes.as_ref().expect("in use").value();
        [bytes + of.alloc_bytes.value(), objects + of.alloc_objects.value(), inuse + live]
    });
    // At R = 4,095, each announced allocation of 100 bytes stands for 4,145 bytes.
    let close = |found: f64, truth: u64| (found / (truth as f64 * 41.45) - 1.0).abs() < 1e-3;
    assert!(close(figures[0], site.bytes) && close(figures[1], site.allocs), "{figures:?} {site:?}");
    assert!(close(figures[2], site.live_bytes), "{figures:?} {site:?}");
    assert!(stats.submitted == site.allocs && stats.lost() == 0, "{stats:?}");
}

/// Two programs on the host, only one of them with an allocator that heapbpf finds: each is counted once, by its own
/// source.
#[test]
fn a_whole_host_has_both_sources() {
    let Some(_turn) = turn_here("a_whole_host_has_both_sources") else { return };
    let interval = INTERVAL.to_string();
    let programs = [alone_as("everywhere-alone"), program_with("announced", "everywhere", &[])];
    let mut targets = programs.map(|path| Target::start(&path, [&*interval, ROUNDS, "3"]));
    // For a short time, matches both programs by name.
    let (recording, address) = Recorder::new().option("--comm", "everywhere*").serve();
    let truths = targets.each_mut().map(Target::run);
    // A late program starts while the recording runs, is listed a little later, and allocates until then.
    let processes = || get(address, "/metrics").metric("heapbpf_processes").expect("a figure");
    until("samples of what came first", || processes() > 0.0);
    let mut late = Target::start(&alone_as("everywhere-alone"), [&*interval, ROUNDS, "4"]);
    late.go();
    until("samples of what came late", || processes() > 1.0);
    late.go();
    let late_truth = late.truth();
    let (profile, stats) = recording.stop().results();
    let hook = |pid: u32| profile.process(pid).hook.clone();
    assert_eq!(hook(targets[0].pid()).as_deref(), Some("usdt"));
    let share = |target: &Target, truth: &Truth| {
        profile.process(target.pid()).figures.alloc_bytes.value() / truth.bytes() as f64
    };
    assert!((share(&targets[0], &truths[0]) - 1.0).abs() < 0.1, "{stats:?}");
    assert_eq!(hook(late.pid()).as_deref(), Some("usdt"));
    let late = share(&late, &late_truth);
    assert!(late > 0.0 && late < 1.1, "{late}");
    let announced = |pid: u32| profile.stacks.iter().any(|it| it.pid == pid && it.function == "otel_memory:alloc");
    assert!(!announced(targets[1].pid()), "its malloc is hooked, and it calls that never");
}

#[test]
fn weights_by_no_common_interval_have_no_error_bars() {
    let Some(_turn) = turn_here("weights_by_no_common_interval_have_no_error_bars") else { return };
    let (profile, _, truth) = record(&program("announced"), "1", &[["--hook", "usdt"]]);
    let total = &profile.totals.alloc_bytes;
    assert!(total.low.is_none() && total.high.is_none(), "{total:?}");
    let reason = total.reason.as_deref().unwrap_or_default();
    assert!(reason.contains("not come from one sampling interval"), "{reason}");
    // The estimates use the program's own weights.
    assert!((total.value() / truth.bytes() as f64 - 1.0).abs() < 0.1, "{total:?} of {}", truth.bytes());
}

#[test]
fn a_process_without_announcements_is_told_so() {
    let Some(_turn) = turn_here("a_process_without_announcements_is_told_so") else { return };
    let target = Target::start(&program("mix"), ["100"]);
    let output = Command::new(heapbpf())
        .args(["--hook", "usdt", "-d", "1s", "--pid", &target.pid().to_string()])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("have USDT probes of the provider otel_memory"), "{said}");
}

/// `doctor` says which source a process has, and what is not recorded because of it.
#[test]
fn the_doctor_tells_of_announcements() {
    let Some(_turn) = turn_here("the_doctor_tells_of_announcements") else { return };
    let ask = |program: &Path| {
        let target = Target::start(program, ["4096", "1", "3"]);
        doctor_text_of(target.pid())
    };
    let said = ask(&alone());
    assert!(said.contains("otel_memory (USDT)") && said.contains("otel_memory:free"), "{said}");
    let said = ask(&program("announced"));
    assert!(said.contains("glibc") && !said.contains("otel_memory:free"), "{said}");
}

/// Tests of the long set.
mod long {
    use super::*;

    /// The kernel reports a program's mappings before its exec ends. If the program hardly gets to run, it may be listed in
    /// between.
    #[test]
    fn a_program_that_has_to_wait_while_it_begins_is_followed() {
        let Some(_turn) = turn_here("a_program_that_has_to_wait_while_it_begins_is_followed") else { return };
        const PROGRAMS: usize = 8;
        let interval = INTERVAL.to_string();
        let (recording, address) = Recorder::new().option("--comm", "waiting-alone").serve();
        let path = alone_as("waiting-alone");
        let words = [path.as_os_str(), (*interval).as_ref(), "2000".as_ref(), "4".as_ref()];
        let mut targets = start_starved(PROGRAMS, &words);
        targets.iter_mut().for_each(Target::go);
        // Each program allocates until samples of all have arrived.
        let processes = || get(address, "/metrics").metric("heapbpf_processes").expect("a figure");
        until("samples of all programs", || processes() >= PROGRAMS as f64);
        targets.iter_mut().for_each(Target::go);
        let (profile, _) = recording.stop().results();
        assert!(targets.iter().all(|it| profile.process(it.pid()).hook.as_deref() == Some("usdt")), "{profile:?}");
    }
}

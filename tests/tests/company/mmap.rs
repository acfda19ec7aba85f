//! `--mmap`: programs' own mappings, including parts of them, equal the truth at interval 1, and mappings that an
//! allocator makes for itself count once. With probes, all totals are exact. Beside inline hooks, the stacks of samples
//! tell whose a mapping is.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::kernel::linux;
use heapbpf_tests::output::{Estimate, Profile, Stats};
use heapbpf_tests::program::{program, program_with};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;

/// A recording with probes.
fn probed(pid: u32, interval: u64) -> Recorder {
    Recorder::of(pid, interval).flag("--mmap").option("--hook", "probe")
}

fn record(target: &mut Target, interval: u64, options: &[(&str, &str)]) -> (Profile, Stats, Truth) {
    let recorder = probed(target.pid(), interval);
    options.iter().fold(recorder, |it, (option, value)| it.option(option, value)).results_of(target)
}

fn exact(profile: &Profile, stats: &Stats, truth: &Truth, interval: u64) {
    checks::sites(profile, truth, interval, Compare::All);
    assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
    assert_eq!(stats.lost(), 0, "{stats:?}");
}

/// Includes direct system calls of the program, and every kind of link: each distinguishes malloc's mappings from
/// others.
#[test]
fn every_part_of_every_mapping() {
    let Some(_turn) = turn("every_part_of_every_mapping") else { return };
    for link in ["session", "multi", "perf"] {
        let mut target = Target::start(&program("mappings"), ["200"]);
        let (profile, stats, truth) = record(&mut target, 1, &[("--link", link)]);
        exact(&profile, &stats, &truth, 1);
        assert!(stats.reentrant > 0, "malloc mapped nothing for itself: {stats:?}");
        for function in ["mmap", "mremap", "brk", "malloc"] {
            assert!(profile.stacks.iter().any(|stack| stack.function == function), "no {function}");
        }
    }
}

#[test]
fn a_static_program() {
    let Some(_turn) = turn("a_static_program") else { return };
    let built = program_with("mappings", "mappings-static", &["-static"]);
    let (profile, stats, truth) = record(&mut Target::start(&built, ["200"]), 1, &[]);
    exact(&profile, &stats, &truth, 1);
}

/// With sampling, estimates are within their tolerance, also for the remainders of partly unmapped mappings.
#[test]
fn mappings_are_sampled() {
    let Some(_turn) = turn("mappings_are_sampled") else { return };
    for interval in [20_000, 200_000] {
        let (profile, stats, truth) = record(&mut Target::start(&program("mappings"), ["600"]), interval, &[]);
        exact(&profile, &stats, &truth, interval);
    }
}

/// Besides the sites, pthread_create maps the threads' stacks.
#[test]
fn mappings_of_threads() {
    let Some(_turn) = turn("mappings_of_threads") else { return };
    let (profile, stats, truth) = record(&mut Target::start(&program("mappings"), ["200", "threads"]), 1, &[]);
    checks::sites(&profile, &truth, 1, Compare::All);
    assert!(stats.exact_alloc_bytes > truth.bytes() + 2 * (64 << 10), "{stats:?}");
}

#[test]
fn mappings_of_a_child() {
    let Some(_turn) = turn("mappings_of_a_child") else { return };
    let mut target = Target::start(&program("mappings"), ["200", "child"]);
    let mut recording = probed(target.pid(), 1).start();
    target.go();
    target.step();
    recording.await_more_links();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    exact(&profile, &stats, &truth, 1);
}

/// Records 1,500 mappings, 1,200 of which are unmapped while the ring is full. `reused` of these addresses get another
/// mapping. Returns the profile.
fn unmapped_unseen(reused: &str) -> Profile {
    let mut target = Target::start(&program("healing"), ["0", "1200", "20000", "1500", reused]);
    let recording = probed(target.pid(), 1).option("--ring-bytes", "1MiB").start();
    target.go();
    target.step();
    recording.signal(libc::SIGSTOP);
    let truth = target.run();
    recording.signal(libc::SIGCONT);
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    assert_eq!(stats.hits, truth.allocs());
    let unmaps_lost = profile.counters["unmaps_lost"].as_u64().expect("a count");
    assert!(unmaps_lost >= 1000, "nothing to look up: {:?}", profile.counters);
    assert!(profile.notes.iter().any(|note| note.contains("unmappings")), "{:?}", profile.notes);
    profile
}

/// If the record of an unmapping was lost, the mapping is looked up in the process's current mappings.
#[test]
fn mappings_heal_from_lost_unmappings() {
    let Some(_turn) = turn("mappings_heal_from_lost_unmappings") else { return };
    let profile = unmapped_unseen("0");
    // Select by function, because the small ring may have lost some of the stacks.
    let mapped = profile.stacks.iter().filter(|stack| stack.function == "mmap");
    let allocated: f64 = mapped.map(|stack| stack.figures.alloc_bytes.value()).sum();
    assert_eq!(allocated, 7_500_000.0, "{:?}", profile.counters);
    let figures = [(&profile.totals.address_space_bytes, 1_500_000.0), (&profile.totals.inuse_objects, 300.0)];
    for (figure, truth) in figures {
        let figure = figure.as_ref().expect("in use");
        assert_eq!((figure.low, figure.high), (Some(truth), Some(truth)), "{figure:?}: all is explained");
    }
}

/// Where something else is mapped now, a lost unmapping cannot be detected. The confidence intervals allow for it.
#[test]
fn mappings_that_cannot_be_looked_up_are_covered() {
    let Some(_turn) = turn("mappings_that_cannot_be_looked_up_are_covered") else { return };
    let profile = unmapped_unseen("200");
    let figures = [(&profile.totals.address_space_bytes, 1_500_000.0), (&profile.totals.inuse_objects, 300.0)];
    for (figure, truth) in figures {
        let figure = figure.as_ref().expect("in use");
        let (low, high) = (figure.low.expect("an interval"), figure.high.expect("an interval"));
        assert!(low <= truth && truth <= high, "{figure:?}");
    }
}

/// Beside inline hooks, a mapping whose stack passes an allocator is the allocator's. Calls of malloc, which map each
/// large block, and of the program itself are told apart, and there are no exact totals.
#[test]
fn mappings_beside_inline_hooks_are_told_apart_by_their_stacks() {
    let case = "mappings_beside_inline_hooks_are_told_apart_by_their_stacks";
    let Some(_turn) = turn(case) else { return };
    if std::env::consts::ARCH != "x86_64" {
        return skipped(case, "inline hooks are for x86-64 only");
    }
    for (interval, options) in [(1, ["--hook", "inline"]), (20_000, ["--hook", "auto"])] {
        let mut target = Target::start(&program("mappings"), ["200"]);
        let [option, value] = options;
        let (profile, stats, truth) =
            Recorder::of(target.pid(), interval).flag("--mmap").option(option, value).results_of(&mut target);
        assert_eq!(stats.hooks[0].hook, "inline", "{stats:?}");
        checks::sites(&profile, &truth, interval, Compare::All);
        let is_reported = |function: &str| profile.stacks.iter().any(|stack| stack.function == function);
        let functions = ["mmap", "mremap", "brk", "malloc"];
        assert!(interval > 1 || functions.into_iter().all(is_reported), "{:?}", profile.stacks);
        let (own, undecided) = (stats.other["mappings_of_allocators"], stats.other["mappings_undecided"]);
        assert!(own > 0 && undecided == 0 && stats.lost() == 0, "{stats:?}");
        let totals = &profile.totals;
        assert!(totals.alloc_bytes.exact.is_none() && totals.alloc_objects.exact.is_none(), "{totals:?}");
        assert!(profile.notes.iter().any(|note| note.contains("no exact totals")), "{:?}", profile.notes);
        assert!(target.end().success(), "nothing was done to it");
    }
}

/// Of what a program maps, what it has written to is in use. The rest is address space.
#[test]
fn what_is_reserved_is_not_in_use() {
    let case = "what_is_reserved_is_not_in_use";
    let Some(_turn) = turn(case) else { return };
    if linux() < (6, 7) {
        return skipped(case, "older kernels do not list the pages of a terabyte");
    }
    let mut target = Target::start(&program("touched"), ["maps"]);
    let (profile, stats, truth) = probed(target.pid(), 1).results_of(&mut target);
    exact(&profile, &stats, &truth, 1);
    let stack = profile.stacks.iter().find(|stack| stack.site() == Some("site_05")).expect("it maps memory");
    let value = |figure: &Option<Estimate>| figure.as_ref().and_then(|it| it.estimate.zip(it.low).zip(it.high));
    let (size, touched) = ((1_u64 << 40) as f64, 40.0 * 3.0 * 4096.0);
    // A terabyte, of which three pages in each of forty places were written to.
    assert_eq!(value(&stack.figures.address_space_bytes), Some(((size, size), size)), "{stack:?}");
    assert_eq!(value(&stack.figures.inuse_bytes), Some(((touched, touched), touched)), "{stack:?}");
    assert_eq!(value(&stack.figures.inuse_objects), Some(((1.0, 1.0), 1.0)), "{stack:?}");
    assert!(target.end().success(), "nothing was done to it");
}

/// Without the option, mappings are not recorded.
#[test]
fn mappings_are_left_alone_by_default() {
    let Some(_turn) = turn("mappings_are_left_alone_by_default") else { return };
    let mut target = Target::start(&program("mappings"), ["50"]);
    let recording = Recorder::of(target.pid(), 1).start();
    let mut truth = target.run();
    truth.sites.retain(|site| site.site == "site_06");
    let (profile, stats) = recording.stop().results();
    exact(&profile, &stats, &truth, 1);
}

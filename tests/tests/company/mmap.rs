//! `--mmap`: programs' own mappings, including parts of them, equal the truth at interval 1, and mappings that an
//! allocator makes for itself count once.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::{program, program_with};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;

fn record(target: &mut Target, interval: u64, options: &[(&str, &str)]) -> (Profile, Stats, Truth) {
    let recorder = Recorder::of(target.pid(), interval).flag("--mmap");
    let recording = options.iter().fold(recorder, |it, (option, value)| it.option(option, value)).start();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    (profile, stats, truth)
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
    let mut recording = Recorder::of(target.pid(), 1).flag("--mmap").start();
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
    let recording = Recorder::of(target.pid(), 1).flag("--mmap").option("--ring-bytes", "1MiB").start();
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
    for (figure, truth) in [(&profile.totals.inuse_bytes, 1_500_000.0), (&profile.totals.inuse_objects, 300.0)] {
        let figure = figure.as_ref().expect("in use");
        assert_eq!((figure.low, figure.high), (Some(truth), Some(truth)), "{figure:?}: all is explained");
    }
}

/// Where something else is mapped now, a lost unmapping cannot be detected. The confidence intervals allow for it.
#[test]
fn mappings_that_cannot_be_looked_up_are_covered() {
    let Some(_turn) = turn("mappings_that_cannot_be_looked_up_are_covered") else { return };
    let profile = unmapped_unseen("200");
    for (figure, truth) in [(&profile.totals.inuse_bytes, 1_500_000.0), (&profile.totals.inuse_objects, 300.0)] {
        let figure = figure.as_ref().expect("in use");
        let (low, high) = (figure.low.expect("an interval"), figure.high.expect("an interval"));
        assert!(low <= truth && truth <= high, "{figure:?}");
    }
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

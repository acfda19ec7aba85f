//! Memory in use while records are lost: figures are correct, or their intervals contain the truth, and the daemon's
//! memory stays bounded.

use std::time::{Duration, Instant};

use heapbpf_tests::constant::{Cut, Judge, Load};
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::Profile;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::{Answer, get};
use heapbpf_tests::target::resident_bytes;

const EIGHT: Load = Load::FAST.with_threads(8);

/// Number of allocation and free records that a recording lost.
fn lost(profile: &Profile) -> u64 {
    ["lost_ring_full", "frees_lost"].iter().filter_map(|name| profile.counters[*name].as_u64()).sum()
}

/// The daemon is stopped for two seconds. If everything fits into the rings, nothing changes. Otherwise the intervals
/// contain the truth, and the loss is reported.
fn stopped(case: &str, loads: [(Load, Option<&str>); 2]) {
    let Some(_turn) = turn(case) else { return };
    let mut wrong = Vec::new();
    for (load, ring_bytes) in loads {
        let mut target = load.start();
        let recorder = Recorder::of(target.pid(), 1);
        let recorder = ring_bytes.into_iter().fold(recorder, |recorder, bytes| recorder.option("--ring-bytes", bytes));
        let (recording, address) = recorder.serve();
        let truth = target.run();
        std::thread::sleep(Duration::from_millis(300));
        recording.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_secs(2));
        recording.signal(libc::SIGCONT);
        let mut cuts: Vec<Cut> =
            (1..=5).map(|n| Cut::of_metrics(format!("metrics {n}"), &get(address, "/metrics"), target.pid())).collect();
        let outcome = recording.stop();
        drop(target);
        let (profile, _) = outcome.results();
        cuts.push(Cut::of_figures("the final profile", &profile.totals));
        let mut judge = Judge::new(&load, &truth);
        let lost = lost(&profile);
        println!("{load:?}: {lost} records lost: {cuts:?}");
        let fits = ring_bytes.is_none() && load.pause_us > 0;
        assert!(!fits || lost == 0, "10,000 records fit: {:?}", profile.counters);
        assert!(ring_bytes.is_none() || lost > 0, "a hundred thousand records do not fit: {:?}", profile.counters);
        for cut in &cuts {
            if lost == 0 {
                judge.exact(cut);
            } else if !judge.covered(cut) {
                judge.remark(format!("the truth is not in {cut:?}"));
            }
        }
        wrong.extend(judge.into_wrong());
        let output = format!("{}\n{}", outcome.stdout, outcome.stderr);
        let is_reported = ["lost", "records of"].iter().any(|words| output.contains(words));
        assert!(lost == 0 || is_reported, "{lost} records were lost, and nobody says so: {output}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Eight threads that pause leave the processors to others, and a small ring is too small for what they send.
#[test]
fn constant_while_the_daemon_is_stopped() {
    let loads = [(Load::SLOW, None), (Load::SLOW.with_threads(8), Some("1MiB"))];
    stopped("constant_while_the_daemon_is_stopped", loads);
}

/// The rings are full of records when the recording is to end, and heapbpf does not run until its time for reading them
/// is over. The profile reports the missing share and from when it is missing, and no figure has an interval.
#[test]
fn what_could_not_be_read_in_time_is_told() {
    /// On a busy machine, heapbpf may have read them before it is stopped.
    const ATTEMPTS: u32 = 5;
    let Some(_turn) = turn("what_could_not_be_read_in_time_is_told") else { return };
    assert!((0..ATTEMPTS).any(|_| was_too_late()), "heapbpf was always stopped too late");
}

/// Stops heapbpf while it makes its last cut, until its time for that is over. Returns whether it had not read
/// everything before. If it had, the figures are correct.
fn was_too_late() -> bool {
    /// How long heapbpf waits at its end for the rings to be read.
    const WAIT: Duration = Duration::from_secs(10);
    let mut target = EIGHT.start();
    let mut recording = Recorder::of(target.pid(), 1).option("--ring-bytes", "64MiB").flag("-vv").start();
    let truth = target.run();
    recording.signal(libc::SIGSTOP);
    // Some hundred thousand records: nothing is lost, so no other cut begins.
    std::thread::sleep(Duration::from_millis(200));
    let lines = recording.lines_by_now();
    recording.signal(libc::SIGINT);
    recording.signal(libc::SIGCONT);
    // From here on, it reads what is in the rings.
    recording.await_line("cut: counters read", lines);
    recording.signal(libc::SIGSTOP);
    drop(target);
    std::thread::sleep(WAIT);
    recording.signal(libc::SIGCONT);
    let outcome = recording.finish();
    let (profile, _) = outcome.results();
    let cut = Cut::of_figures("the final profile", &profile.totals);
    println!("{:?} at {:?}: {cut:?}", profile.unread, profile.time);
    let mut judge = Judge::new(&EIGHT, &truth);
    match &profile.unread {
        None if lost(&profile) == 0 => judge.exact(&cut),
        None => assert!(judge.covered(&cut), "the truth is not in {cut:?}"),
        Some(unread) => {
            assert!(0 < unread.records && unread.records <= unread.of, "{unread:?}");
            assert!((unread.share - unread.records as f64 / unread.of as f64).abs() < 1e-6, "{unread:?}");
            assert!(profile.time.is_some(), "from which moment is it?");
            for figure in [&cut.bytes, &cut.objects, &profile.totals.alloc_bytes, &profile.totals.alloc_objects] {
                assert_eq!((figure.low, figure.high), (None, None), "{figure:?}");
                assert!(figure.reason.as_ref().is_some_and(|reason| reason.contains("in time")), "{figure:?}");
            }
            assert!(outcome.stdout.contains("in time"), "the user is not told: {}", outcome.stdout);
        }
    }
    let wrong = judge.into_wrong();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    profile.unread.is_some()
}

/// Number of lost allocation and free records so far, from a scrape.
fn lost_so_far(metrics: &Answer) -> f64 {
    let series = ["heapbpf_lost_total{reason=\"ring_full\"}", "heapbpf_events_total{name=\"frees_lost\"}"];
    series.iter().map(|series| metrics.metric(series).unwrap_or_else(|| panic!("no {series}"))).sum()
}

/// Scrapes a load whose records do not fit into the rings `scrapes` times, and takes snapshots as well. Each of these
/// is a cut. Its truth and its interval may be lower by one block per thread. Two things must hold:
/// - the truth is in the interval of at least 95 % of the cuts;
/// - an interval of zero width means that nothing is uncertain, so the figure is the truth. A loss before the cut that
///   its reconciliation did not recover widens the interval.
fn covered(load: &Load, ring_bytes: &str, scrapes: usize) {
    /// Pause between scrapes. Each cut briefly stops the daemon from reading, so more cuts cause more losses.
    const PAUSE: Duration = Duration::from_millis(25);
    let Some(_turn) = turn(&format!("covered {load:?} {ring_bytes}")) else { return };
    let mut target = load.start();
    let recorder = Recorder::of(target.pid(), 1).option("--ring-bytes", ring_bytes).option("--every", "250ms");
    let (recording, address) = recorder.serve();
    let truth = target.run();
    let passed = heapbpf_tests::constant::numbers_of_snapshots(&recording.dir()).last().copied().unwrap_or(0) + 1;
    let mut cuts = Vec::new();
    let before = lost_so_far(&get(address, "/metrics"));
    while cuts.len() < scrapes {
        let metrics = get(address, "/metrics");
        cuts.push(Cut::of_metrics(format!("metrics {}", cuts.len()), &metrics, target.pid()));
        std::thread::sleep(PAUSE);
    }
    let during = lost_so_far(&get(address, "/metrics")) - before;
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    cuts.extend(Cut::snapshots(&outcome.dir(), passed));
    cuts.push(Cut::of_figures("the final profile", &profile.totals));

    let share = lost(&profile) as f64 / (stats.hits + stats.frees_matched) as f64;
    let mut judge = Judge::new(load, &truth);
    let truth_bytes = truth.live_bytes() as f64;
    let mut ratios: Vec<f64> = cuts.iter().map(|cut| cut.bytes.value() / truth_bytes).collect();
    ratios.sort_by(f64::total_cmp);
    let inside = cuts.iter().filter(|cut| judge.covered(cut)).count();
    let certain = cuts.iter().filter(|cut| cut.is_certain()).count();
    println!(
        "{load:?}, {ring_bytes}: {:.1} % of records lost; {inside} of {} cuts include the truth, {certain} have zero width; \
         estimates are {:.3} to {:.3} of the truth, {:.3} in the median",
        100.0 * share,
        cuts.len(),
        ratios[0],
        ratios[ratios.len() - 1],
        ratios[ratios.len() / 2],
    );
    assert!(during > 0.0, "nothing was lost while it was scraped");
    for cut in cuts.iter().filter(|cut| cut.is_certain()) {
        judge.exact(cut);
    }
    if (inside as f64) < 0.95 * cuts.len() as f64 {
        judge.remark(format!("the truth is in {inside} of {} intervals", cuts.len()));
    }
    let wrong = judge.into_wrong();
    assert!(
        wrong.is_empty(),
        "{} findings, among them:\n{}",
        wrong.len(),
        wrong[wrong.len().saturating_sub(20)..].join("\n")
    );
}

/// With a ring of one page, the smallest possible, losses occur in short bursts.
#[test]
fn intervals_include_the_truth_with_a_ring_of_one_page() {
    covered(&Load { blocks: 800, ..Load::FAST }, "4KiB", 50);
}

/// Tests of the long set.
mod long {
    use super::*;

    /// Eight threads at full speed send more than heapbpf can read, also after it was stopped.
    #[test]
    fn constant_while_the_daemon_is_stopped_at_full_speed() {
        stopped("constant_while_the_daemon_is_stopped_at_full_speed", [(Load::FAST, None), (EIGHT, None)]);
    }

    /// Blocks whose frees were lost are recovered without a snapshot: 1,600 blocks are in use, and hundreds of
    /// thousands of frees are lost each second. The bound is generous: it is twice the growth of memory between two
    /// times that the allocator returns it to the kernel, but less than all lost blocks would take in this time (about
    /// 10 million of about 100 bytes).
    #[test]
    fn memory_stays_bounded_while_frees_are_lost() {
        let Some(_turn) = turn("memory_stays_bounded_while_frees_are_lost") else { return };
        const GROWTH: u64 = 128 << 20;
        const TIME: Duration = Duration::from_secs(20);
        let mut target = EIGHT.start();
        let recording = Recorder::of(target.pid(), 1).option("--ring-bytes", "64KiB").start();
        let truth = target.run();
        std::thread::sleep(Duration::from_secs(3));
        let begun = Instant::now();
        let mut sizes = Vec::new();
        while begun.elapsed() < TIME {
            let Some(bytes) = resident_bytes(recording.pid()) else {
                let outcome = recording.ends();
                panic!("heapbpf ended ({}) after {sizes:?}:\n{}\n{}", outcome.status, outcome.stderr, outcome.stdout);
            };
            sizes.push(bytes);
            std::thread::sleep(Duration::from_millis(250));
        }
        let (before, most) = (sizes[0], sizes.iter().copied().max().expect("not empty"));
        let (profile, _) = recording.stop().results();
        let frees_lost = profile.counters["frees_lost"].as_u64().expect("a count");
        println!("{frees_lost} frees lost; resident bytes from three seconds on: {sizes:?}");
        assert!(frees_lost > 100_000, "{:?}", profile.counters);
        assert!(most < before + GROWTH, "{before} bytes grew to {most}");
        let judge = Judge::new(&EIGHT, &truth);
        let cut = Cut::of_figures("the final profile", &profile.totals);
        assert!(judge.covered(&cut), "the truth is not in {cut:?}");
    }

    /// Bursts larger than the ring, with blocks that stay in use across them.
    #[test]
    fn intervals_include_the_truth_when_bursts_are_lost() {
        covered(&Load { blocks: 800, batch: 200, pause_us: 5000, ..Load::FAST }, "4KiB", 200);
    }
}

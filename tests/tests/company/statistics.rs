//! Statistics of real recordings, through the command line: allocation sequences that bias other samplers, criteria,
//! plans, comparisons, calibration.
//!
//! Unless stated otherwise, tolerances are those of `truth::Sum::tolerance`, which rejects a correct estimate with
//! probability 5.7e-7 at most.

use std::path::Path;
use std::process::{Command, Output};

use heapbpf_tests::checks::{self, Compare, site_sums};
use heapbpf_tests::environment::{heapbpf, stop_limit, turn};
use heapbpf_tests::output::{self, Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::{Law, Truth};

fn record(name: &str, arguments: &[&str], options: &[&str]) -> (Outcome, Truth) {
    let mut target = Target::start(&program(name), arguments);
    Recorder::new().pid(target.pid()).flags(options).record(&mut target)
}

/// Records a whole process, from its first allocation to its exit.
fn record_whole(name: &str, arguments: &[&str], interval: u64, seed: u64) -> Outcome {
    Recorder::new()
        .interval(interval)
        .option("--seed", &seed.to_string())
        .variable("FREE_RUNNING", "1".as_ref())
        .command(&program(name), arguments)
        .start()
        .finish()
}

fn run(words: &[&str]) -> Output {
    Command::new(heapbpf()).envs(stop_limit()).args(words).output().expect("the binary under test runs")
}

/// Standard output of a command that must succeed.
fn shown(words: &[&str]) -> String {
    let output = run(words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn json(words: &[&str]) -> serde_json::Value {
    serde_json::from_str(&shown(words)).expect("JSON")
}

fn path(outcome: &Outcome, name: &str) -> String {
    outcome.file(name).to_str().expect("a plain path").to_owned()
}

/// Sequences that bias samplers which carry the overshoot of a sample over (the first two) or use a fixed stride (the
/// last two).
#[test]
fn pathological_sequences_are_true() {
    let Some(_turn) = turn("pathological_sequences_are_true") else { return };
    // At most 15,000 samples each: the ring holds as many stacks, even if heapbpf gets no CPU meanwhile.
    let sequences: [(&[&str], u64); 3] = [
        // One huge allocation, then a hundred tiny ones.
        (&["2000", "10000x1", "1x100"], 100),
        (&["20000", "99x1", "1x1"], 100),
        // A cycle of R bytes: a fixed stride always samples the same site.
        (&["15000", "48x1", "16x1", "64x1"], 128),
    ];
    for (arguments, interval) in sequences {
        let (outcome, truth) = record("sequence", arguments, &["--interval", &interval.to_string()]);
        let (profile, stats) = outcome.results();
        assert_eq!(stats.lost(), 0);
        checks::sites(&profile, &truth, interval, Compare::All);
    }
}

/// Checks bytes and object counts of every site, where a size is sampled with probability `share(size)`.
fn unbiased(profile: &Profile, truth: &Truth, share: impl Fn(u64) -> f64) {
    let found = site_sums(profile, None);
    for site in &truth.sites {
        let law = Law::with_shares(site.sizes.iter().map(|&[size, allocs, _]| (size, allocs)), &share);
        let figures = found.get(&site.site).copied().unwrap_or_default().figures;
        for (what, law, estimate) in [("bytes", law.bytes, figures[0]), ("objects", law.objects, figures[1])] {
            let tolerance = law.tolerance().max(1e-6 * law.truth);
            let off = (estimate - law.truth).abs();
            assert!(off <= tolerance, "{} {what}: {estimate} instead of {} ± {tolerance}", site.site, law.truth);
        }
    }
}

fn results(outcome: &Outcome, criterion: &str) -> (Profile, Stats) {
    let (profile, stats) = outcome.results();
    assert_eq!(stats.lost(), 0);
    let raw: serde_json::Value = output::read(&outcome.file("profile.json"));
    assert_eq!(raw["criterion"], criterion);
    (profile, stats)
}

#[test]
fn by_allocations_bytes_and_numbers_are_true() {
    let Some(_turn) = turn("by_allocations_bytes_and_numbers_are_true") else { return };
    let (outcome, truth) = record("mix", &["300000"], &["--criterion", "allocations", "--interval", "50"]);
    let (profile, stats) = results(&outcome, "allocations");
    unbiased(&profile, &truth, |_| 1.0 / 50.0);
    let law = Law::with_shares([(1, truth.allocs())], |_| 1.0 / 50.0).samples;
    assert!((stats.submitted as f64 - law.truth).abs() < law.tolerance(), "{} samples", stats.submitted);
    let objects = &profile.totals.alloc_objects;
    assert!(objects.low.is_some() && objects.high.is_some(), "{objects:?}");
}

/// With even coverage, estimates stay unbiased while intervals change, and the rare class is seen. A class's interval
/// is at most the overall one times the number of classes. If sampling went by allocation, the rare class would have 40
/// samples (σ 6.3). How many more it has depends on when the first change comes.
#[test]
fn by_size_class_the_rare_is_seen_and_figures_are_true() {
    let Some(_turn) = turn("by_size_class_the_rare_is_seen_and_figures_are_true") else { return };
    let arguments = ["4000", "16x1000", "4096x10", "65536x1"];
    let options = ["--criterion", "size-class", "--interval", "100", "--no-live"];
    let (outcome, truth) = record("sequence", &arguments, &options);
    let warning = "using probes instead of inline hooks: they do not work with --criterion size-class";
    assert!(outcome.stderr.contains(warning) || cfg!(not(target_arch = "x86_64")), "{}", outcome.stderr);
    let (profile, stats) = results(&outcome, "size-class");
    unbiased(&profile, &truth, |_| 1.0 / 300.0);
    let samples: Vec<u64> = site_sums(&profile, None).values().map(|sums| sums.samples).collect();
    println!("samples by class: {samples:?} of {} hits", stats.hits);
    assert!(samples.len() == 3 && samples[2] > 100, "the rare class has {samples:?}");
}

/// Intervals by size class, planned from a profile and then used for a recording, give correct figures. A plan for the
/// profile's own interval predicts about as many samples as the profile has (every stack has one size, so the
/// difference is random: 6 σ).
#[test]
fn plans_are_made_of_profiles_and_recorded_with() {
    let Some(_turn) = turn("plans_are_made_of_profiles_and_recorded_with") else { return };
    let arguments = ["3000", "64x20", "1000x4", "40000x1"];
    let (outcome, _) = record("sequence", &arguments, &["--interval", "4096"]);
    let (profile, stats) = outcome.results();
    let (file, classes) = (path(&outcome, "profile.json"), path(&outcome, "plan.json"));
    let plan = json(&["plan", &file, "--json", "--classes", &classes, "--interval", "4096"]);
    let rows = plan["intervals"].as_array().expect("a list");
    assert_eq!((rows.len(), rows[0]["interval"].as_u64()), (8, Some(4096)));
    let planned = rows[0]["samples_per_second"].as_f64().expect("a number") * profile.duration_seconds;
    let samples = stats.submitted as f64;
    assert!((planned - samples).abs() < 6.0 * samples.sqrt(), "{planned} planned, {samples} taken");
    assert!(shown(&["plan", &file]).contains("SEEN FROM"));

    let given: serde_json::Value = output::read(Path::new(&classes));
    let intervals: Vec<(u64, f64)> = given["classes"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|class| (class["from_bytes"].as_u64().expect("bytes"), class["interval"].as_f64().expect("a number")))
        .collect();
    let share = |size: u64| intervals.iter().rfind(|class| class.0 <= size).map_or(1.0, |class| 1.0 / class.1);
    // Classes without live blocks get the largest interval, so they would not be sampled at all.
    let mixed = ["10000", "64x20", "1000x4", "40000x1"];
    let (outcome, truth) =
        record("sequence", &mixed, &["--criterion", "size-class", "--interval", &format!("@{classes}")]);
    let (profile, _) = results(&outcome, "size-class");
    unbiased(&profile, &truth, share);
}

#[test]
fn a_running_process_is_planned_for() {
    let Some(_turn) = turn("a_running_process_is_planned_for") else { return };
    let mut leak = Command::new(program("leak")).arg("60").stdout(std::process::Stdio::null()).spawn().expect("runs");
    let pid = leak.id().to_string();
    let plan = run(&["plan", "--pid", &pid, "--json"]);
    let _ = leak.kill();
    let _ = leak.wait();
    assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
    let plan: serde_json::Value = serde_json::from_slice(&plan.stdout).expect("JSON and nothing else");
    assert!(plan["sites"].as_u64().expect("a number") >= 3, "{plan}");
    assert!(plan["allocations_per_second"].as_f64().expect("a number") > 0.0);
    assert!(plan["automatic"]["interval"].as_u64().is_some(), "{plan}");
}

/// `-i auto` uses the model of `heapbpf plan` with the costs of this machine. A plan from the profile knows the sizes,
/// while the recording knew only their mean, and call counts vary, so the two agree within a factor of four. Figures
/// are correct although the interval changed, within the tolerance of the larger one. With inline hooks, the CPU time
/// of the program matters, which is in the profile.
#[test]
fn the_automatic_interval_is_that_of_a_plan() {
    let Some(_turn) = turn("the_automatic_interval_is_that_of_a_plan") else { return };
    the_plan_is_for("probe", "600000");
    if cfg!(target_arch = "x86_64") {
        the_plan_is_for("inline", "6000000");
    }
}

fn the_plan_is_for(hook: &str, times: &str) {
    let (outcome, truth) = record("mix", &[times], &["--hook", hook, "--interval", "auto"]);
    let (profile, stats) = outcome.results();
    assert_eq!(stats.lost(), 0);
    let chosen = profile.interval_bytes;
    let said = profile.notes.iter().any(|note| note.contains("chosen for the call rate"));
    assert!(chosen.is_power_of_two() && said, "{chosen}: {:?}", profile.notes);
    let plan = json(&["plan", &path(&outcome, "profile.json"), "--hook", hook, "--json"]);
    assert_ne!(plan["costs_from"], "elsewhere", "{plan}");
    assert_eq!(plan["inline_share"], f64::from(u8::from(hook == "inline")), "{plan}");
    let planned = plan["automatic"]["interval"].as_u64().expect("a number");
    println!("{chosen} chosen, {planned} planned; costs {}", plan["costs"]);
    assert!((planned / 4..=planned * 4).contains(&chosen), "{chosen} chosen, {planned} planned");
    let largest = profile.stacks.iter().map(|stack| stack.interval).max().expect("stacks");
    let total = truth.sites.iter().flat_map(|site| site.sizes.iter().map(|row| (row[0], row[1])));
    let law = Law::of(total, largest).bytes;
    let off = (profile.totals.alloc_bytes.value() - law.truth).abs();
    assert!(off < law.tolerance(), "off by {off}, {} allowed", law.tolerance());
}

/// Site and significance of every stack in a comparison of allocated bytes.
fn grown(before: &Outcome, after: &Outcome) -> Vec<(String, bool, f64)> {
    let (before, after) = (path(before, "profile.json"), path(after, "profile.json"));
    let diff = json(&["diff", &before, &after, "--json", "--value", "alloc_space"]);
    let stacks = diff["stacks"].as_array().expect("a list");
    let site = |stack: &serde_json::Value| {
        let frames = stack["frames"].as_array().expect("a list");
        let names = frames.iter().filter_map(|frame| frame["function"].as_str());
        names.into_iter().find(|name| name.starts_with("site_")).unwrap_or("other").to_owned()
    };
    stacks
        .iter()
        .map(|stack| (site(stack), stack["significant"] == true, stack["q_value"].as_f64().unwrap_or(1.0)))
        .collect()
}

/// Nothing grows between three identical runs (q ≤ 0.05 for any stack has a probability below 5 %, and the seeds are
/// fixed). In the fourth run one site allocates three times as much: the comparison finds that site and no other. The
/// result is the same at another interval.
#[test]
fn what_grew_is_found_and_nothing_else() {
    let Some(_turn) = turn("what_grew_is_found_and_nothing_else") else { return };
    let same = ["2000", "64x20", "1000x10", "4000x10"];
    let leak = ["2000", "64x20", "1000x30", "4000x10"];
    let before = record_whole("sequence", &same, 65_536, 1);
    for seed in 2..=3 {
        let again = record_whole("sequence", &same, 65_536, seed);
        let stacks = grown(&before, &again);
        assert!(stacks.len() >= 2 && stacks.iter().all(|stack| !stack.1), "{stacks:?}");
    }
    for interval in [65_536, 16_384] {
        let after = record_whole("sequence", &leak, interval, 4);
        let stacks = grown(&before, &after);
        let found: Vec<&str> = stacks.iter().filter(|stack| stack.1).map(|stack| stack.0.as_str()).collect();
        assert_eq!(found, ["site_01"], "at {interval}: {stacks:?}");
    }
}

/// Calibrated stacks add up to the exact totals. The confidence interval is that of the raw figure.
#[test]
fn calibrated_sums_are_exact() {
    let Some(_turn) = turn("calibrated_sums_are_exact") else { return };
    let options = ["--interval", "65536", "--calibrate"];
    let (outcome, truth) = record("mix", &["200000"], &options);
    let profile: Profile = output::read(&outcome.file("profile.json"));
    let (mut bytes, mut objects) = (0.0, 0.0);
    for stack in &profile.stacks {
        bytes += stack.figures.alloc_bytes.value();
        objects += stack.figures.alloc_objects.value();
    }
    assert!((bytes - truth.bytes() as f64).abs() < 1.0, "{bytes} instead of {}", truth.bytes());
    assert!((objects - truth.allocs() as f64).abs() < 1.0, "{objects} instead of {}", truth.allocs());
    // A saved profile is read back unchanged, and is not calibrated again.
    let file = path(&outcome, "profile.json");
    let report = shown(&["report", "--calibrate", &file]);
    assert!(report.contains("calibrated"), "{report}");
    assert!(!report.contains("do not trust"), "{report}");
}

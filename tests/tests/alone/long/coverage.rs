//! How often the confidence intervals of real recordings contain the truth (`cargo xtask bench real-coverage`): a figure
//! of docs/sampling.md. Unlike a simulation, it shows errors of the BPF side and the daemon.

use std::fmt::Write as _;

use heapbpf_tests::environment::turn;
use heapbpf_tests::output::Stack;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Site;

/// Number of short runs of the workload, each in a new process with different draws.
const RUNS: usize = 240;
/// Number of runs per recording.
const AT_ONCE: usize = 20;
/// Sampling intervals R, in bytes.
const INTERVALS: [u64; 2] = [16 << 10, 128 << 10];
/// Lower bounds of the table's rows, in expected samples of a site.
const LINES: [f64; 9] = [0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 50.0];

/// Results for the sites of one row.
#[derive(Default)]
struct Line {
    sites: u32,
    seen: u32,
    held: u32,
    held_if_seen: u32,
    widths: Vec<f64>,
}

impl Line {
    fn add(&mut self, site: &Site, stacks: &[&Stack], interval: u64) {
        let truth = site.bytes as f64;
        self.sites += 1;
        let [stack] = stacks else {
            // An unseen site's upper bound is R ln(2/α).
            self.held += u32::from(truth <= interval as f64 * (2.0f64 / 0.05).ln());
            return;
        };
        let bytes = &stack.figures.alloc_bytes;
        let (low, high) = (bytes.low.expect("an interval"), bytes.high.expect("an interval"));
        let holds = u32::from((low..=high).contains(&truth));
        self.seen += 1;
        self.held += holds;
        self.held_if_seen += holds;
        self.widths.push((high - low) / truth);
    }

    fn text(&mut self) -> String {
        self.widths.sort_by(f64::total_cmp);
        let width = self.widths.get(self.widths.len() / 2).copied().unwrap_or(f64::NAN);
        let share = |held: u32, of: u32| f64::from(held) / f64::from(of.max(1));
        let (all, seen) = (share(self.held, self.sites), share(self.held_if_seen, self.seen));
        let error = 100.0 * (0.05 * 0.95 / f64::from(self.sites.max(1))).sqrt();
        format!("{} | {all:.3} | {seen:.3} | {width:.2} | {error:.1} %", self.sites)
    }
}

/// Measures coverage by expected samples. It fails if the coverage of all sites together is more than 5 standard errors
/// below 95 % (sites of a run are independent: each has its own bytes).
#[test]
#[ignore = "takes minutes: cargo xtask bench real-coverage"]
fn error_bars_of_real_recordings_hold_the_truth() {
    let Some(_turn) = turn("error_bars_of_real_recordings_hold_the_truth") else { return };
    let mut lines: [Line; LINES.len()] = Default::default();
    for interval in INTERVALS {
        for batch in 0..RUNS / AT_ONCE {
            let mut targets: Vec<Target> = (0..AT_ONCE).map(|_| Target::start(&program("mix"), ["12000"])).collect();
            let recorder = Recorder::new().interval(interval).option("--seed", &(batch + 1).to_string());
            let recording = targets.iter().fold(recorder, |recorder, target| recorder.pid(target.pid())).start();
            let truths: Vec<_> = targets.iter_mut().map(|target| (target.pid(), target.run())).collect();
            let (profile, stats) = recording.stop().results();
            assert_eq!(stats.lost(), 0, "{stats:?}");
            for (pid, truth) in &truths {
                // Two sizes of one site on two source lines are two stacks, so only sites with one stack are compared.
                for site in truth.sites.iter().filter(|site| site.site != "site_18") {
                    let expected = site.law(interval, false).samples.truth;
                    let Some(line) = LINES.iter().rposition(|from| expected >= *from) else { continue };
                    let of_site = |stack: &&Stack| stack.pid == *pid && stack.site() == Some(&site.site);
                    let stacks: Vec<&Stack> = profile.stacks.iter().filter(of_site).collect();
                    assert!(stacks.len() <= 1, "{} has {} stacks", site.site, stacks.len());
                    lines[line].add(site, &stacks, interval);
                }
            }
        }
    }
    let mut table = String::from(
        "\n| expected samples | sites | held | held if seen | width/truth | standard error |\n|---|---|---|---|---|---|\n",
    );
    for (line, from) in lines.iter_mut().zip(LINES) {
        // Writing to a string cannot fail.
        let _ = writeln!(table, "| from {from} | {} |", line.text());
    }
    println!("{table}");
    let (sites, held) = lines.iter().fold((0, 0), |sum, line| (sum.0 + line.sites, sum.1 + line.held));
    let share = f64::from(held) / f64::from(sites);
    println!("{held} of {sites} hold the truth: {share:.4}");
    assert!(share > 0.95 - 5.0 * (0.05 * 0.95 / f64::from(sites)).sqrt(), "{share}");
}

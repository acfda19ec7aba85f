//! How large the errors of real recordings are (`cargo xtask bench errors`): .NET's table and heapprofd's charts with
//! heapbpf's own figures, for docs/sampling.md. With HEAPBPF_PICTURES=DIR, DIR/errors.svg has the charts.

use std::fmt::Write as _;

use heapbpf_plots::{Axis, Curve, Entry, Figure, Key, Panel, Point, Unit};
use heapbpf_statistics::detect::detection;
use heapbpf_tests::environment::turn;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::sampled_share;

/// Number of short runs of a workload, each in a new process with different draws.
const RUNS: usize = 240;
/// Number of runs per recording.
const AT_ONCE: usize = 20;
/// Sampling interval R, bytes.
const INTERVAL: u64 = 16 << 10;
/// Allocations a second, so that no ring fills up.
const PACE: &str = "500000";
/// Size of the blocks of the program `growing`, bytes.
const BLOCK: u64 = 1000;
/// The share of them that its site 01 allocates.
const SHARE: f64 = 0.9;

/// A site in one recording.
struct Recorded {
    /// What it really allocated.
    bytes: f64,
    /// The estimate divided by that, less 1. Without a sample the estimate is 0.
    error: f64,
    /// Half of the error bar, as a share of `bytes`; `None` without a sample.
    half: Option<f64>,
}

/// Site 01 in [`RUNS`] recordings of `growing`, which allocates about this many blocks there. Each `series` draws other
/// numbers.
fn recorded(blocks: f64, series: usize) -> Vec<Recorded> {
    let arguments = [format!("{:.0}", blocks / SHARE), PACE.to_owned()];
    let mut all = Vec::new();
    let batches = RUNS / AT_ONCE;
    for seed in series * batches + 1..=(series + 1) * batches {
        let mut targets: Vec<Target> = (0..AT_ONCE).map(|_| Target::start(&program("growing"), &arguments)).collect();
        let recorder = Recorder::new().interval(INTERVAL).option("--seed", &seed.to_string());
        let recording = targets.iter().fold(recorder, |recorder, target| recorder.pid(target.pid())).start();
        let truths: Vec<_> = targets.iter_mut().map(|target| (target.pid(), target.run())).collect();
        let (profile, stats) = recording.stop().results();
        assert_eq!(stats.lost(), 0, "{stats:?}");
        for (pid, truth) in &truths {
            let bytes = truth.site("site_01").bytes as f64;
            let stack = profile.stacks.iter().find(|it| it.pid == *pid && it.site() == Some("site_01"));
            let figure = stack.map(|stack| &stack.figures.alloc_bytes);
            let error = figure.and_then(|it| it.estimate).unwrap_or(0.0) / bytes - 1.0;
            let half = figure.and_then(|it| Some((it.high? - it.low?) / 2.0 / bytes));
            all.push(Recorded { bytes, error, half });
        }
    }
    all
}

/// Numbers of samples, and the numbers of failed trials with 1 in 102,400 between which the true one lies in 95 %, from
/// docs/design/features/RandomizedAllocationSampling.md of .NET's runtime.
const DOTNET: [(u64, f64, f64); 4] = [
    (10, 491_039.0, 1_749_469.0),
    (100, 8_331_581.0, 12_342_053.0),
    (1000, 96_149_867.0, 108_842_093.0),
    (10_000, 1_004_017_229.0, 1_044_156_743.0),
];
const DOTNET_INTERVAL: f64 = 102_400.0;

/// Prints .NET's table beside the errors of sites with so many expected samples. It fails if a row's central 95 % are
/// more than a half larger than .NET's.
#[test]
#[ignore = "a benchmark: cargo xtask bench errors"]
fn errors_of_real_recordings_by_number_of_samples() {
    let Some(_turn) = turn("errors_of_real_recordings_by_number_of_samples") else { return };
    let mut table = String::from(
        "\n| samples | .NET's 95 % | 95 % of the recordings | half an interval (median) | recordings |\n\
         |---|---|---|---|---|\n",
    );
    for (samples, low, high) in DOTNET {
        let all = recorded(samples as f64 / sampled_share(BLOCK, INTERVAL), 0);
        let mut errors: Vec<f64> = all.iter().map(|it| it.error).collect();
        let mut halves: Vec<f64> = all.iter().filter_map(|it| it.half).collect();
        errors.sort_by(f64::total_cmp);
        halves.sort_by(f64::total_cmp);
        let of_dotnet = [low, high].map(|trials| trials / DOTNET_INTERVAL / samples as f64 - 1.0);
        let outside = errors.len() / 40;
        let of_ours = [errors[outside], errors[errors.len() - 1 - outside]];
        let text = |[low, high]: [f64; 2]| format!("{:+.1} to {:+.1} %", 100.0 * low, 100.0 * high);
        let half = 100.0 * halves.get(halves.len() / 2).copied().unwrap_or(f64::NAN);
        let (dotnet, ours, count) = (text(of_dotnet), text(of_ours), errors.len());
        // Writing to a string cannot fail.
        let _ = writeln!(table, "| {samples} | {dotnet} | {ours} | {half:.1} % | {count} |");
        assert!(of_ours[0] > 1.5 * of_dotnet[0] && of_ours[1] < 1.5 * of_dotnet[1], "{table}");
    }
    println!("{table}");
}

/// Bytes of a site, in intervals.
const SIZES: [f64; 10] = [0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 16.0];
/// What each chart shows, from the top.
const CHARTS: [&str; 3] =
    ["share of recordings that see it", "mean relative error", "mean relative error if it is seen"];

/// The three figures of a site of this size, as heapprofd's document computes them: one trial a byte, weighted by R.
fn computed(bytes: f64) -> [f64; 3] {
    let it = detection(bytes as u64, INTERVAL).expect("at least one byte");
    [it.seen, it.expected_error, it.expected_error_if_seen]
}

/// The mean, and its standard error.
fn mean(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean, (variance / count).sqrt())
}

/// Draws heapprofd's three charts with what recordings show: a site of so many bytes is seen in which share of them, and
/// how far off is its estimate. It fails if a point is more than 5 standard errors and 5 % from the curve (heapbpf
/// weighs each block once, which differs from heapprofd's estimate by less than that for blocks of 1,000 bytes; one
/// false alarm in 50,000 runs).
#[test]
#[ignore = "a benchmark: cargo xtask bench errors"]
fn errors_of_real_recordings_beside_heapprofds_charts() {
    let Some(_turn) = turn("errors_of_real_recordings_beside_heapprofds_charts") else { return };
    let mut measured: [Vec<Point>; 3] = Default::default();
    for (series, size) in SIZES.into_iter().enumerate() {
        let all = recorded((size * INTERVAL as f64 / BLOCK as f64).round(), series);
        let bytes = all[0].bytes;
        let seen: Vec<f64> = all.iter().map(|it| f64::from(u8::from(it.half.is_some()))).collect();
        let errors: Vec<f64> = all.iter().map(|it| it.error.abs()).collect();
        let if_seen: Vec<f64> = all.iter().filter(|it| it.half.is_some()).map(|it| it.error.abs()).collect();
        for (chart, (values, curve)) in [seen, errors, if_seen].iter().zip(computed(bytes)).enumerate() {
            let (y, error) = mean(values);
            println!("{:.2} R: {}: {y:.3} ± {error:.3}, computed {curve:.3}", bytes / INTERVAL as f64, CHARTS[chart]);
            assert!((y - curve).abs() < 5.0 * error + 0.05 * curve, "{size}");
            measured[chart].push(Point { x: bytes, y, band: None });
        }
    }
    let Some(dir) = std::env::var_os("HEAPBPF_PICTURES") else { return };
    let svg = figure(measured).svg().expect("a picture");
    std::fs::write(std::path::Path::new(&dir).join("errors.svg"), svg).expect("a directory");
}

fn figure(measured: [Vec<Point>; 3]) -> Figure {
    let (low, high) = (SIZES[0] * INTERVAL as f64, SIZES[SIZES.len() - 1] * INTERVAL as f64);
    let panel = |(chart, points): (usize, Vec<Point>)| {
        let steps = (0..=200).map(|step| low * (high / low).powf(f64::from(step) / 200.0));
        let of_curve: Vec<Point> = steps.map(|x| Point { x, y: computed(x)[chart], band: None }).collect();
        let most = points.iter().chain(&of_curve).map(|point| point.y).fold(1.0, f64::max);
        Panel {
            x: Axis::logarithmic("bytes that a site allocates", Unit::Bytes, low, high),
            y: Axis::linear(CHARTS[chart], Unit::Share, most),
            curves: vec![
                Curve::through(Key::Whole, of_curve),
                Curve { dots: true, ..Curve::through(Key::Part(1), points) },
            ],
            marks: Vec::new(),
        }
    };
    let entry = |key, name: &str, about: String| Entry { key, name: name.to_owned(), about };
    Figure {
        title: "What sampling shows of a site".to_owned(),
        subject: "a program that allocates blocks of 1,000 bytes, one sample in 16 KiB".to_owned(),
        panels: measured.into_iter().enumerate().map(panel).collect(),
        legend: vec![
            entry(Key::Whole, "computed, as in heapprofd's document", String::new()),
            entry(Key::Part(1), "recorded by heapbpf", format!("{RUNS} recordings a point")),
        ],
        notes: Vec::new(),
    }
}

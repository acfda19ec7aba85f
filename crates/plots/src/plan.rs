//! What different sampling intervals would show of a program, and what they would cost.

use heapbpf_profile::units;
use heapbpf_statistics::detect::detection;
use heapbpf_statistics::plan::{Costs, LARGEST_INTERVAL, PlanRow, Workload, automatic, row};

use crate::axis::{Axis, Unit};
use crate::figure::{Curve, Entry, Figure, Key, Mark, Panel, Point};

/// Smallest interval shown, in bytes.
const SMALLEST_INTERVAL: u64 = 4_096;
/// Stack sizes whose error is shown, as shares of all bytes. The first is everything.
const SHARES: [f64; 3] = [1.0, 0.01, 0.001];

/// Error and cost against the sampling interval, for a recording of the workload's length. `subject` names the program.
pub fn plan(subject: &str, workload: &Workload, costs: Costs) -> Figure {
    let intervals: Vec<u64> = (SMALLEST_INTERVAL.ilog2()..=LARGEST_INTERVAL.ilog2()).map(|power| 1 << power).collect();
    let x = || {
        let (low, high) = (SMALLEST_INTERVAL as f64, LARGEST_INTERVAL as f64);
        Axis::logarithmic("sampling interval, bytes between samples", Unit::Bytes, low, high)
    };
    let automatic = automatic(workload, costs, None).map(|found| found.interval as f64);
    let mark = automatic.map(|x| Mark { x, text: format!("-i auto: {}", units::bytes(x)) });
    let bytes = workload.sites.iter().sum::<f64>() * workload.seconds;
    let mut legend = Vec::new();
    let mut curves = Vec::new();
    for (index, share) in SHARES.into_iter().enumerate() {
        let key = if index == 0 { Key::Whole } else { Key::Part(index) };
        let size = (bytes * share).max(1.0) as u64;
        let error = |interval: u64| detection(size, interval).map_or(1.0, |found| found.expected_error_binomial);
        let points = intervals.iter().map(|&interval| Point { x: interval as f64, y: error(interval), band: None });
        curves.push(Curve::through(key, points.collect()));
        let name = if index == 0 {
            "error of all that is allocated".into()
        } else {
            format!("error of a stack with {} of it", units::percent(share))
        };
        legend.push(Entry { key, name, about: units::bytes(size as f64) });
    }
    let errors = || curves.iter().flat_map(|curve: &Curve| &curve.points).map(|point| point.y);
    let least = errors().fold(1.0, f64::min);
    let errors = Panel {
        x: x(),
        y: Axis::logarithmic("mean error of an estimate of bytes", Unit::Share, power_of_ten(least), 10.0),
        curves,
        marks: mark.iter().cloned().collect(),
    };
    let rows: Vec<_> = intervals.iter().map(|&interval| row(workload, costs, interval)).collect();
    let line = |key, cpus: fn(&PlanRow) -> f64| {
        let points = rows.iter().map(|row| Point { x: row.interval as f64, y: cpus(row), band: None });
        Curve::through(key, points.collect())
    };
    let (hooks, samples) = (Key::Part(SHARES.len()), Key::Part(SHARES.len() + 1));
    let of_hooks = |row: &PlanRow| row.probe_cpus + row.inline_cpus;
    let most = rows.first().map_or(0.0, |row| of_hooks(row).max(row.sample_cpus));
    let least = rows.last().map_or(0.0, |row| of_hooks(row).min(row.sample_cpus)).max(most * 1e-5);
    let (what, each_ns) = if workload.inline_share > 0.5 {
        ("inline hooks on", format!("{:.1}", costs.inline_ns))
    } else {
        ("the probes of", units::count(costs.probe_ns))
    };
    let cost = Panel {
        x: x(),
        y: Axis::logarithmic(
            "CPU time of the program, share of one CPU",
            Unit::Share,
            power_of_ten(least),
            power_of_ten(most) * 10.0,
        ),
        curves: vec![line(hooks, of_hooks), line(samples, |row| row.sample_cpus)],
        marks: mark.into_iter().collect(),
    };
    let name = if workload.inline_share > 0.0 { "hooks" } else { "probes" };
    legend.push(Entry {
        key: hooks,
        name: format!("cost of the {name}, whatever the interval"),
        about: units::percent(rows.first().map_or(0.0, of_hooks)),
    });
    legend.push(Entry { key: samples, name: "cost of the samples, on top of that".into(), about: String::new() });
    Figure {
        title: "What a sampling interval shows and costs".into(),
        subject: subject.to_owned(),
        panels: vec![errors, cost],
        legend,
        notes: vec![format!(
            "For {} as in this profile ({} allocations a second). The error is the mean of |estimate − truth| / truth for blocks much \
             smaller than the interval; it is less for larger ones. Costs: {each_ns} ns for {what} an allocation and its free, {} ns for a \
             sample.",
            units::seconds(workload.seconds),
            units::count(workload.classes.iter().map(|class| class.allocations).sum::<f64>() + 0.0),
            units::count(costs.sample_ns)
        )],
    }
}

/// The largest power of ten that does not exceed a share.
fn power_of_ten(share: f64) -> f64 {
    10_f64.powf(share.clamp(1e-9, 1e3).log10().floor())
}

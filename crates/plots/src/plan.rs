//! What different sampling intervals would show of a program, and what they would cost.

use heapbpf_profile::units;
use heapbpf_statistics::detect::detection;
use heapbpf_statistics::plan::{Costs, LARGEST_INTERVAL, Workload, automatic, row};

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
    let automatic = automatic(workload, costs, None).interval;
    let mark = Mark { x: automatic as f64, text: format!("-i auto: {}", units::bytes(automatic as f64)) };
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
        marks: vec![mark.clone()],
    };
    let rows: Vec<_> = intervals.iter().map(|&interval| row(workload, costs, interval)).collect();
    let line = |key, cpus: fn(&heapbpf_statistics::plan::PlanRow) -> f64| {
        let points = rows.iter().map(|row| Point { x: row.interval as f64, y: cpus(row), band: None });
        Curve::through(key, points.collect())
    };
    let (probes, samples) = (Key::Part(SHARES.len()), Key::Part(SHARES.len() + 1));
    let probe_cpus = rows.first().map_or(0.0, |row| row.probe_cpus);
    let most = rows.first().map_or(0.0, |row| row.probe_cpus.max(row.sample_cpus));
    let least = rows.last().map_or(0.0, |row| row.probe_cpus.min(row.sample_cpus)).max(most * 1e-5);
    let cost = Panel {
        x: x(),
        y: Axis::logarithmic(
            "CPU time of the program, share of one CPU",
            Unit::Share,
            power_of_ten(least),
            power_of_ten(most) * 10.0,
        ),
        curves: vec![line(probes, |row| row.probe_cpus), line(samples, |row| row.sample_cpus)],
        marks: vec![mark],
    };
    legend.push(Entry {
        key: probes,
        name: "cost of the probes, whatever the interval".into(),
        about: units::percent(probe_cpus),
    });
    legend.push(Entry { key: samples, name: "cost of the samples, on top of that".into(), about: String::new() });
    Figure {
        title: "What a sampling interval shows and costs".into(),
        subject: subject.to_owned(),
        panels: vec![errors, cost],
        legend,
        notes: vec![format!(
            "For {} as in this profile ({} allocations a second). The error is the mean of |estimate − truth| / truth for blocks much \
             smaller than the interval; it is less for larger ones. Costs: {} ns for the probes of an allocation and its free, {} ns for a \
             sample.",
            units::seconds(workload.seconds),
            units::count(workload.classes.iter().map(|class| class.allocations).sum::<f64>() + 0.0),
            units::count(costs.probe_ns),
            units::count(costs.sample_ns)
        )],
    }
}

/// The largest power of ten that does not exceed a share.
fn power_of_ten(share: f64) -> f64 {
    10_f64.powf(share.clamp(1e-9, 1e3).log10().floor())
}

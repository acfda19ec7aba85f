//! The time that probes took over a recording, next to the calls that they counted.

use heapbpf_profile::model::{PROBE_NS, Profile};
use heapbpf_profile::report::subject;
use heapbpf_profile::units;

use crate::axis::{Axis, Unit};
use crate::error::PlotError;
use crate::figure::{Curve, Entry, Figure, Key, Panel, Point};
use crate::{seconds_between, snapshots};

/// Counters of the calls that trigger a probe.
const CALLS: [&str; 3] = ["hits", "inner", "frees_seen"];

/// The time of the probes and the calls between snapshots of a recording. The order of the profiles does not matter.
///
/// # Errors
/// There are fewer than two points in time, or the profiles have no such counters.
pub fn overhead(profiles: &[Profile]) -> Result<Figure, PlotError> {
    let (order, last, start) = snapshots(profiles, "overhead")?;
    if !order.iter().all(|profile| profile.counters.contains_key(PROBE_NS)) {
        return Err(PlotError::NoProbeTimes);
    }
    let probes = |profile: &Profile| profile.counters.get(PROBE_NS).map_or(0.0, |ns| *ns as f64 / 1e9);
    let calls = |profile: &Profile| {
        CALLS.iter().filter_map(|name| profile.counters.get(*name)).fold(0.0, |sum, count| sum + *count as f64)
    };
    let (cpus, of_probes) = rates(&order, start, probes);
    let (per_second, of_calls) = rates(&order, start, calls);
    let each = if of_calls > 0.0 { of_probes / of_calls * 1e9 } else { 0.0 };
    let x = || Axis::up_to("time since the recording began", Unit::Seconds, seconds_between(start, last.header.time));
    let high = |points: &[Point]| points.iter().map(|point| point.y).fold(0.0, f64::max);
    let panel = |key, label: &str, unit, points: Vec<Point>| Panel {
        x: x(),
        y: Axis::linear(label, unit, high(&points)),
        curves: vec![Curve { steps: true, ..Curve::through(key, points) }],
        marks: Vec::new(),
    };
    let (one, two) = (Key::Part(1), Key::Part(2));
    Ok(Figure {
        title: "What the probes took".into(),
        subject: format!("{} · from {}", subject(last), crate::moment(start)),
        panels: vec![
            panel(one, "time of the probes, share of one CPU", Unit::Share, cpus),
            panel(two, "calls a second that a probe answered", Unit::Count, per_second),
        ],
        legend: vec![
            Entry { key: one, name: "time of the probes".into(), about: format!("{} in all", units::seconds(of_probes)) },
            Entry {
                key: two,
                name: "allocations, frees and calls between allocators' own functions".into(),
                about: format!("{} in all, {} ns each", units::count(of_calls), units::count(each)),
            },
        ],
        notes: vec![
            "Means between snapshots. The time is calls × the cost of each kind of call as it was measured on this machine, not a \
             measurement of the program."
                .into(),
        ],
    })
}

/// The rate of a sum between snapshots, as steps that start with the recording, and the final sum.
fn rates(order: &[&Profile], start: std::time::SystemTime, of: impl Fn(&Profile) -> f64) -> (Vec<Point>, f64) {
    let (mut points, mut before) = (Vec::new(), (0.0, 0.0));
    for profile in order {
        let now = (seconds_between(start, profile.header.time), of(profile));
        let time = now.0 - before.0;
        if time > 0.0 {
            points.push(Point { x: before.0, y: ((now.1 - before.1) / time).max(0.0), band: None });
        }
        before = now;
    }
    let last = points.last().map(|point| Point { x: before.0, ..*point });
    points.extend(last);
    (points, before.1)
}

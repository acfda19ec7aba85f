//! Growth between two points in time, for the page: the stacks of a comparison.

use indexmap::IndexSet;
use serde::Serialize;

use super::calls::{Chain, Frames, Functions, Names, Place, Stacks};
use crate::diff::{Change, Diff, DiffFrame, DiffOptions, diff};
use crate::group::GroupBy;
use crate::model::Profile;
use crate::report::FrameView;
use crate::units;
use crate::value::Value;
use heapbpf_statistics::estimate::Estimate;

/// What grew between two profiles of one recording.
#[derive(Serialize)]
pub struct GrowthData {
    from_ms: u64,
    to_ms: u64,
    confidence: f64,
    false_discovery_rate: f64,
    total: Row,
    notes: Vec<String>,
    groups: Vec<String>,
    strings: Vec<String>,
    functions: Functions,
    frames: Frames,
    stacks: Stacks,
    rows: Vec<Row>,
}

/// The change of one stack, in bytes.
#[derive(Default, Serialize)]
struct Row {
    /// Estimate, low, high.
    before: [Option<f64>; 3],
    after: [Option<f64>; 3],
    change: [Option<f64>; 3],
    q: Option<f64>,
    significant: bool,
}

impl Row {
    fn of(change: &Change) -> Self {
        let ends = |figure: Estimate| [Some(figure.estimate), figure.low, figure.high].map(|it| it.map(f64::round));
        Self {
            before: ends(change.before),
            after: ends(change.after),
            change: ends(change.change),
            q: change.q_value.or(change.p_value),
            significant: change.significant,
        }
    }
}

/// Compares the memory in use of two profiles as `heapbpf diff` does.
pub fn growth_data(before: &Profile, after: &Profile, confidence: f64, frames: FrameView) -> GrowthData {
    let options = DiffOptions {
        values: vec![Value::InuseSpace],
        group_by: GroupBy::Program,
        confidence,
        frames,
        ..DiffOptions::default()
    };
    let Diff { mut totals, stacks, notes, confidence, false_discovery_rate, .. } = diff(before, after, &options);
    let mut names = Names::new(frames.rules);
    let mut groups: IndexSet<String> = IndexSet::new();
    let chains: Vec<Chain> = stacks
        .iter()
        .map(|stack| {
            let (group, _) = groups.insert_full(stack.group.clone());
            let frames = stack.frames.iter().rev().map(|DiffFrame { frame, name, .. }| {
                let place = Place {
                    file: frame.file.as_deref().unwrap_or(""),
                    line: frame.line.unwrap_or(0),
                    module: frame.module.as_deref().unwrap_or(""),
                    inlined: frame.inlined,
                };
                names.call(frame.function.as_deref().unwrap_or(name), frame.function.is_some(), &place)
            });
            Chain { group: group as u32, cut: 0, frames: frames.collect() }
        })
        .collect();
    let groups: Vec<String> = groups.into_iter().collect();
    let (columns, order) = Stacks::new(&names, &chains, &groups);
    let mut total = totals.pop().map(|total| Row::of(&total)).unwrap_or_default();
    // A single test needs no multiple-testing correction.
    total.significant = total.q.is_some_and(|p| p <= false_discovery_rate);
    GrowthData {
        from_ms: units::unix_ms(before.header.time),
        to_ms: units::unix_ms(after.header.time),
        confidence,
        false_discovery_rate,
        total,
        notes,
        groups,
        rows: order.iter().map(|&index| Row::of(&stacks[index].figures)).collect(),
        strings: names.strings.0.into_iter().collect(),
        functions: names.functions,
        frames: names.frames,
        stacks: columns,
    }
}

//! A value over time, from several snapshots.

use heapbpf_profile::estimates::{Pool, intervals_used};
use heapbpf_profile::model::Profile;
use heapbpf_profile::report::{FigureText, ReportOptions, StackFigures, figures_of_stacks, subject};
use heapbpf_profile::units;
use heapbpf_profile::value::Value;

use crate::axis::{Axis, Unit};
use crate::error::PlotError;
use crate::figure::{Curve, Entry, Figure, Key, Panel, Point};
use crate::{PlotOptions, seconds_between, snapshots, stack_name};

/// A value over time: the total, and the stacks that are largest in the last snapshot. The order of the profiles does
/// not matter.
///
/// # Errors
/// There are fewer than two points in time, or the value is not known.
pub fn timeline(profiles: &[Profile], options: &PlotOptions) -> Result<Figure, PlotError> {
    let (order, last, start) = snapshots(profiles, "a timeline")?;
    let value = options.value.unwrap_or_else(|| Value::default_of(last));
    if value.needs_frees() && !order.iter().all(|profile| profile.header.live) {
        return Err(PlotError::NotFollowed(value.name()));
    }
    // All snapshots use the same grouping; some may have a single process.
    let several = order.iter().any(|profile| profile.number_of_processes() > 1);
    let group_by = options.group_by.or_else(|| {
        let widest = order.iter().max_by_key(|profile| profile.number_of_processes());
        widest.filter(|_| several).map(|profile| heapbpf_profile::group::GroupBy::default_of(profile))
    });
    let report = ReportOptions { sort: Some(value), group_by, frames: options.frames, ..ReportOptions::default() };
    let stacks: Vec<Vec<StackFigures>> = order.iter().map(|profile| figures_of_stacks(profile, &report)).collect();
    let point = |profile: &Profile, pool: &Pool| {
        let estimate = pool.estimate(profile, value, options.confidence);
        let x = seconds_between(start, profile.header.time);
        Point { x, y: estimate.estimate, band: estimate.low.zip(estimate.high) }
    };
    let entry = |key, name, pool: &Pool| Entry {
        key,
        name,
        about: FigureText::new(last, pool, value, options.confidence).text(),
    };
    let mut curves = Vec::new();
    let mut legend = Vec::new();
    let has_some = |stack: &&StackFigures| stack.pool.total(value) > 0.0;
    let with_some: Vec<&StackFigures> = stacks.last().into_iter().flatten().filter(has_some).collect();
    let largest = &with_some[..with_some.len().min(options.stacks)];
    for (index, stack) in largest.iter().enumerate() {
        let key = Key::Part(index + 1);
        let points = order.iter().zip(&stacks).map(|(profile, stacks)| {
            let is_same = |it: &&StackFigures| {
                (&it.group, &it.functions, &it.cut) == (&stack.group, &stack.functions, &stack.cut)
            };
            let found = stacks.iter().find(is_same);
            let unseen = || {
                let mut pool = Pool::default();
                pool.allow_for(&intervals_used(profile));
                pool
            };
            found.map_or_else(|| point(profile, &unseen()), |found| point(profile, &found.pool))
        });
        curves.push(Curve { dots: true, ..Curve::through(key, points.collect()) });
        legend.push(entry(key, stack_name(stack), &stack.pool));
    }
    let whole: Vec<Point> = order.iter().map(|profile| point(profile, &Pool::whole(profile))).collect();
    let others = with_some.len() - largest.len();
    let more = if others > 0 { format!(" ({} more stacks)", units::count(others as f64)) } else { String::new() };
    legend.insert(0, entry(Key::Whole, format!("all of it{more}"), &Pool::whole(last)));
    curves.insert(0, Curve { dots: true, ..Curve::through(Key::Whole, whole) });
    let top = |point: &Point| point.band.map_or(point.y, |band| band.1.max(point.y));
    let high = curves.iter().flat_map(|curve| &curve.points).map(top).fold(0.0, f64::max);
    let x = Axis::up_to("time since the recording began", Unit::Seconds, seconds_between(start, last.header.time));
    let y = Axis::linear(value.title(), if value.is_bytes() { Unit::Bytes } else { Unit::Count }, high);
    let title = value.title();
    Ok(Figure {
        title: format!("{}{} over time", title[..1].to_uppercase(), &title[1..]),
        subject: format!("{} · from {}", subject(last), crate::moment(start)),
        panels: vec![Panel { x, y, curves, marks: Vec::new() }],
        legend,
        notes: vec![format!(
            "Dots are snapshots; figures in the legend are of the last one. Shaded: {} confidence intervals, where there are honest \
             ones.",
            units::percent(options.confidence)
        )],
    })
}

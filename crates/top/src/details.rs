//! Figures that are computed only for visible rows: intervals, median lifetimes, the last minute.

use heapbpf_profile::report::FigureText;
use heapbpf_profile::{Pool, Row, Value};

use crate::world::World;

/// Figures of a visible row.
#[derive(Clone, Debug)]
pub(crate) struct Details {
    /// Bytes in use (allocated, if frees are not followed), with their interval.
    pub(crate) size: FigureText,
    /// How fast they grow, and the interval of that.
    pub(crate) growth: (String, String),
    /// Bytes in use at several points during the last minute.
    pub(crate) series: Vec<f64>,
}

/// The figures of some leaves.
pub(crate) fn details(world: &World, leaves: &[u32]) -> Details {
    let inuse = |of: &dyn Fn(u32) -> f64| leaves.iter().map(|leaf| of(*leaf)).sum::<f64>();
    let mut series: Vec<f64> = world.history.points().map(|point| inuse(&|leaf| point.of(leaf).0)).collect();
    series.push(inuse(&|leaf| world.now.sums_of(leaf).inuse_bytes));
    let rows: Vec<&Row> = world.now.rows(leaves).collect();
    Details { size: text(world, &world.now.pool(leaves), world.value()), growth: world.growth_text(&rows), series }
}

/// Further figures of some leaves, only for the selected row: blocks in use, bytes allocated, and calls, each with its
/// interval, which takes some microseconds.
pub(crate) fn others(world: &World, leaves: &[u32]) -> [FigureText; 3] {
    let pool = world.now.pool(leaves);
    [world.counted(), Value::AllocSpace, Value::AllocObjects].map(|value| text(world, &pool, value))
}

fn text(world: &World, pool: &Pool, value: Value) -> FigureText {
    let profile = &*world.now.profile;
    FigureText::new(profile, pool, value, world.confidence).quiet_if_unseen(profile, pool, value)
}

const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Values as a row of at most `columns` bars, the newest on the right. Heights are relative to the largest value shown.
/// A value that is not known (NaN) has none.
pub(crate) fn sparkline(series: &[f64], columns: usize) -> String {
    let shown = &series[series.len().saturating_sub(columns)..];
    let largest = shown.iter().copied().fold(0.0, f64::max);
    if largest <= 0.0 {
        return String::new();
    }
    let level = |value: f64| LEVELS[((value / largest * 7.0).round().clamp(0.0, 7.0)) as usize];
    shown.iter().map(|value| if value.is_nan() { ' ' } else { level(*value) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_relative_to_the_largest() {
        assert_eq!(sparkline(&[0.0, 1.0, 2.0, 4.0], 8), "▁▃▅█");
        assert_eq!(sparkline(&[9.0, 1.0, 1.0], 2), "██", "of what is shown");
        assert_eq!(sparkline(&[0.0, 0.0], 8), "");
        assert_eq!(sparkline(&[1.0, f64::NAN, 2.0], 8), "▅ █");
        assert_eq!(sparkline(&[], 8), "");
    }
}

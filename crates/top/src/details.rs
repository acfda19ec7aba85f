//! Figures that are computed only for visible rows: intervals, median lifetimes, the last minute.

use heapbpf_profile::report::FigureText;
use heapbpf_profile::{Pool, Value};

use crate::world::World;

/// Figures of a visible row.
#[derive(Clone, Debug)]
pub(crate) struct Details {
    /// Bytes in use (allocated, if frees are not followed), with their interval.
    pub(crate) size: FigureText,
    /// Bytes in use at several points during the last minute.
    pub(crate) series: Vec<f64>,
}

/// Further figures, only for the selected row. Each interval takes some microseconds.
#[derive(Clone, Debug)]
pub(crate) struct Others {
    /// Blocks in use, with their interval.
    pub(crate) blocks: FigureText,
    /// Bytes allocated, with their interval.
    pub(crate) allocated: FigureText,
    /// Allocations, with their interval.
    pub(crate) allocations: FigureText,
}

/// The figures of some leaves.
pub(crate) fn details(world: &World, leaves: &[u32]) -> Details {
    let inuse = |leaves: &[u32], of: &dyn Fn(u32) -> f64| leaves.iter().map(|leaf| of(*leaf)).sum::<f64>();
    let mut series: Vec<f64> = world.history.points().map(|point| inuse(leaves, &|leaf| point.inuse(leaf))).collect();
    series.push(inuse(leaves, &|leaf| world.now.sums_of(leaf).inuse_bytes));
    Details { size: text(world, &world.now.pool(leaves), world.value()), series }
}

/// The further figures of some leaves.
pub(crate) fn others(world: &World, leaves: &[u32]) -> Others {
    let pool = world.now.pool(leaves);
    Others {
        blocks: text(world, &pool, if world.is_live() { Value::InuseObjects } else { Value::AllocObjects }),
        allocated: text(world, &pool, Value::AllocSpace),
        allocations: text(world, &pool, Value::AllocObjects),
    }
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

//! What was in use during the last minute.

use std::collections::VecDeque;
use std::time::Duration;

use crate::moment::Moment;
use crate::sums::Sums;

/// Time between two points.
const SPACING: Duration = Duration::from_secs(5);
/// How long points are kept.
const WINDOW: Duration = Duration::from_secs(60);
/// Shortest time over which a rate is shown.
const LEAST: Duration = Duration::from_millis(900);

/// Figures of all leaves at one point in time.
#[derive(Debug)]
pub(crate) struct Point {
    /// Length of the recording at that point.
    pub(crate) at: Duration,
    /// Bytes in use and bytes allocated of each leaf.
    figures: Vec<(f64, f64)>,
    /// Bytes allocated, in total.
    pub(crate) allocated: f64,
}

impl Point {
    /// Bytes in use and bytes allocated of a leaf.
    pub(crate) fn of(&self, leaf: u32) -> (f64, f64) {
        self.figures.get(leaf as usize).copied().unwrap_or_default()
    }
}

/// The points of the last minute.
#[derive(Debug, Default)]
pub(crate) struct History {
    points: VecDeque<Point>,
}

impl History {
    /// Adds a moment, unless it is too close to the last one.
    pub(crate) fn add(&mut self, moment: &Moment) {
        if self.points.back().is_some_and(|last| moment.at < last.at) {
            // A different recording.
            self.points.clear();
        }
        if self.points.back().is_some_and(|last| moment.at < last.at + SPACING) {
            return;
        }
        let figures = moment.sums.iter().map(|sums: &Sums| (sums.inuse_bytes, sums.alloc_bytes)).collect();
        self.points.push_back(Point { at: moment.at, figures, allocated: moment.total.alloc_bytes });
        while self.points.front().is_some_and(|first| first.at + WINDOW < moment.at) {
            self.points.pop_front();
        }
    }

    /// The points, oldest first.
    pub(crate) fn points(&self) -> impl Iterator<Item = &Point> {
        self.points.iter()
    }

    /// The newest point that is old enough for a rate, and the seconds since then.
    pub(crate) fn for_rate(&self, now: Duration) -> Option<(&Point, f64)> {
        let old = |point: &&Point| point.at + SPACING <= now;
        let any = self.points.front().filter(|point| point.at + LEAST <= now);
        let point = self.points.iter().rev().find(old).or(any)?;
        Some((point, (now - point.at).as_secs_f64()))
    }

    /// Removes all points.
    pub(crate) fn clear(&mut self) {
        self.points.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leaves::Leaves;
    use heapbpf_profile::testing;
    use std::sync::Arc;

    #[test]
    fn points_are_of_the_last_minute_and_five_seconds_apart() {
        let (mut leaves, mut history) = (Leaves::default(), History::default());
        assert!(history.for_rate(Duration::from_secs(9)).is_none());
        for tenths in 0..1_000_u64 {
            let mut profile = testing::small();
            profile.header.duration = Duration::from_millis(tenths * 100);
            history.add(&Moment::new(Arc::new(profile), &mut leaves));
        }
        let at: Vec<u64> = history.points().map(|point| point.at.as_secs()).collect();
        assert_eq!(at, (7..20).map(|five| five * 5).collect::<Vec<_>>());
        let now = Duration::from_millis(99_900);
        let (point, seconds) = history.for_rate(now).expect("points");
        assert_eq!((point.at.as_secs(), (seconds * 10.0).round()), (90, 99.0));
        assert!(point.of(0).0 > 0.0 && point.of(99) == (0.0, 0.0));
        let mut anew = testing::small();
        anew.header.duration = Duration::ZERO;
        history.add(&Moment::new(Arc::new(anew), &mut leaves));
        assert_eq!(history.points().count(), 1, "another recording begins");
        assert!(history.for_rate(Duration::from_millis(100)).is_none());
    }
}

//! The moments of the recording that can be compared: profiles kept from its start on, and those that pages got, within
//! bounds.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use heapbpf_profile::units::unix_ms;
use heapbpf_record::requests::FinishedProfile;

use super::source::Shared;

/// Maximum number of moments kept.
pub const MOST_MOMENTS: usize = 32;
/// Maximum number of rows of all moments together. A row takes about half a kilobyte.
const MOST_ROWS: usize = 100_000;
/// Number of sums by allocation time (of memory in use) that take as much memory as a row.
const SUMS_OF_A_ROW: usize = 4;
/// Number of rows that take as much memory as a process.
const ROWS_OF_A_PROCESS: usize = 4;
/// How long a moment stays protected after it was compared.
const SPARED: Duration = Duration::from_secs(600);

/// A profile that is kept.
struct Moment {
    shared: Arc<Shared>,
    compared: Option<Instant>,
}

impl Moment {
    fn time_ms(&self) -> u64 {
        unix_ms(self.shared.made.profile.header.time)
    }

    /// Its size in rows.
    fn rows(&self) -> usize {
        let FinishedProfile { profile, recent, .. } = &self.shared.made;
        let processes = profile.processes.len() + profile.idle.len();
        profile.rows.len() + recent.count() / SUMS_OF_A_ROW + processes * ROWS_OF_A_PROCESS
    }
}

/// The moments kept, in time order.
#[derive(Default)]
pub struct Moments(Mutex<Vec<Moment>>);

impl Moments {
    /// Keeps a profile. Beyond the bounds, a moment between two others is dropped, preferably an old one whose
    /// neighbours are close.
    pub fn keep(&self, shared: Arc<Shared>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let moment = Moment { shared, compared: None };
        if kept.last().is_some_and(|last| last.time_ms() >= moment.time_ms()) {
            return;
        }
        // Their encodings have been sent by now.
        kept.iter().for_each(|moment| moment.shared.forget_encodings());
        kept.push(moment);
        let rows = |kept: &[Moment]| kept.iter().map(Moment::rows).sum::<usize>();
        while kept.len() > 2 && (kept.len() > MOST_MOMENTS || rows(&kept) > MOST_ROWS) {
            let dropped = dispensable(&kept);
            kept.remove(dropped);
        }
    }

    /// The times of all moments kept (Unix time in milliseconds).
    pub fn times(&self) -> Vec<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().map(Moment::time_ms).collect()
    }

    /// The times of all moments kept, since the start of the recording.
    pub fn marks(&self) -> Vec<Duration> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().map(|moment| moment.shared.made.profile.header.duration).collect()
    }

    /// Returns the moment of this time (Unix time in milliseconds) and records that it is compared now.
    pub fn at(&self, time_ms: u64) -> Option<Arc<Shared>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let moment = kept.iter_mut().find(|moment| moment.time_ms() == time_ms)?;
        moment.compared = Some(Instant::now());
        Some(Arc::clone(&moment.shared))
    }
}

/// Returns the index of the moment that is missed least. Expects at least three moments, and never returns the first or
/// the last.
fn dispensable(kept: &[Moment]) -> usize {
    let now = kept.last().map_or(0, Moment::time_ms);
    let cost = |&index: &usize| {
        let gap = kept[index + 1].time_ms().saturating_sub(kept[index - 1].time_ms());
        let is_spared = kept[index].compared.is_some_and(|compared| compared.elapsed() < SPARED);
        (is_spared, gap as f64 / (now.saturating_sub(kept[index].time_ms()) + 1) as f64)
    };
    let order = |a: &usize, b: &usize| {
        let (a, b) = (cost(a), cost(b));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
    };
    (1..kept.len() - 1).min_by(order).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use heapbpf_profile::testing;

    use super::*;
    use crate::source::tests::finished;

    fn shared(time_ms: u64, rows: usize) -> Arc<Shared> {
        let mut profile = testing::small();
        profile.header.time = UNIX_EPOCH + Duration::from_millis(time_ms);
        let row = profile.rows[0].clone();
        profile.rows = vec![row; rows];
        Arc::new(Shared::new(finished(profile, Vec::new())))
    }

    #[test]
    fn moments_are_bounded_and_become_rarer_with_their_age() {
        let moments = Moments::default();
        for time in 1..=500 {
            moments.keep(shared(time * 1000, 1));
        }
        let kept = moments.times();
        assert_eq!((kept.len(), kept[0], kept[MOST_MOMENTS - 1]), (MOST_MOMENTS, 1000, 500_000));
        assert!(kept.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(kept[1] - kept[0] > kept[MOST_MOMENTS - 1] - kept[MOST_MOMENTS - 2], "{kept:?}");
        moments.keep(shared(400_000, 1));
        assert_eq!(moments.times(), kept, "what is not later is known");
    }

    #[test]
    fn a_moment_that_was_compared_stays() {
        let moments = Moments::default();
        moments.keep(shared(1, 1));
        moments.keep(shared(2, 1));
        for time in 3..=200 {
            moments.keep(shared(time, 1));
            assert!(moments.at(2).is_some());
        }
        assert!(moments.at(7777).is_none());
    }

    #[test]
    fn rows_are_bounded_as_well() {
        let moments = Moments::default();
        (1..=5).for_each(|time| moments.keep(shared(time, MOST_ROWS / 3 - 100)));
        assert_eq!(moments.times().len(), 3);
        (6..=9).for_each(|time| moments.keep(shared(time, MOST_ROWS)));
        assert_eq!(moments.times(), [1, 9], "two can always be compared");
    }
}

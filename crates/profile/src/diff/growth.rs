//! Growth of memory in use within one recording.

use super::DiffOptions;
use super::judge::{Side, change};
use crate::estimates::Pool;
use crate::model::{Profile, Row};
use crate::value::Value;
use heapbpf_statistics::binomial::at_least;
use heapbpf_statistics::estimate::Estimate;

/// With fewer samples, growth cannot be distinguished from chance: each sample may have been kept or freed.
pub(crate) const FEWEST: u64 = 5;

/// Growth of some rows over [`Header::growth_over`](crate::model::Header::growth_over).
#[derive(Clone, Copy, Debug)]
pub struct Grown {
    /// Bytes per second.
    pub per_second: Estimate,
    /// Probability of growth at least this large if memory in use stays about constant; `None` if it cannot be tested.
    pub p_value: Option<f64>,
    /// Samples that were allocated during that time and kept.
    pub kept: u64,
}

/// Growth of each process; `None` where it is not known.
pub fn growth_of_processes(profile: &Profile, confidence: f64) -> Vec<Option<Grown>> {
    profile.rows_of_processes().iter().map(|rows| growth(profile, rows, confidence)).collect()
}

/// Growth of some rows; `None` if it is not known.
///
/// Blocks that were allocated and kept, and blocks that were freed in the same time, are independent samples; they are
/// compared as the two sides of a difference. Even exact figures do not make growth certain, because requests start and
/// end at random. So the numbers of samples are compared too, as if each sample were equally likely to be on either
/// side, and the larger p-value counts.
pub fn growth(profile: &Profile, rows: &[&Row], confidence: f64) -> Option<Grown> {
    let seconds = profile.header.growth_over?.as_secs_f64();
    let rows: Vec<&Row> = rows.iter().copied().filter(|row| !row.is_of_go_runtime()).collect();
    let is_known = |row: &&Row| profile.knows_growth(row.key.process);
    if rows.is_empty() || seconds <= 0.0 || !rows.iter().all(is_known) {
        return None;
    }
    let [kept, freed] = [true, false].map(|is_kept| {
        let mut pool = Pool::default();
        for row in &rows {
            let growth = row.growth.unwrap_or_default();
            pool.add_inuse(row, if is_kept { &growth.kept } else { &growth.freed });
        }
        pool
    });
    let side = Side::new(profile, Value::InuseSpace, 1.0);
    let options = DiffOptions { confidence, ..DiffOptions::default() };
    let change = change(&side, &freed, &side, &kept, &options);
    let intervals = || rows.iter().map(|row| row.key.interval.max(1) as f64);
    let (finest, coarsest) = (intervals().fold(f64::INFINITY, f64::min), intervals().fold(1.0, f64::max));
    let (kept, freed) = (kept.samples(Value::InuseSpace), freed.samples(Value::InuseSpace));
    let by_number = at_least(kept + freed, kept, coarsest / (finest + coarsest));
    let per = |bytes: f64| bytes / seconds;
    let Estimate { estimate, low, high, .. } = change.change;
    Some(Grown {
        per_second: Estimate { estimate: per(estimate), low: low.map(per), high: high.map(per), ..change.change },
        p_value: change.p_value.filter(|_| kept + freed >= FEWEST).map(|by_bytes| by_bytes.max(by_number)),
        kept,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing;
    use heapbpf_statistics::growth::Growth;

    fn grown(kept: u64, freed: u64, interval: u64) -> Grown {
        let mut profile = testing::small();
        profile.header.growth_over = Some(Duration::from_secs(10));
        let row = &mut profile.rows[0];
        row.key.interval = interval;
        row.growth =
            Some(Growth { kept: testing::sums(kept, 64, interval), freed: testing::sums(freed, 64, interval) });
        profile.processes.iter_mut().for_each(|process| process.losses = Default::default());
        growth(&profile, &[&profile.rows[0]], 0.95).expect("growth")
    }

    #[test]
    fn growth_is_per_second_and_has_an_interval() {
        let leak = grown(40, 0, 64 << 10);
        let each = 6_553.6;
        assert!((leak.per_second.estimate / (40.0 * each) - 1.0).abs() < 0.01, "{leak:?}");
        assert!(leak.per_second.low.is_some_and(|low| low > 25.0 * each) && leak.p_value.is_some_and(|p| p < 1e-9));
        assert!(leak.per_second.high.is_some_and(|high| high < 60.0 * each), "{leak:?}");
    }

    #[test]
    fn what_is_replaced_does_not_grow() {
        for interval in [1, 64 << 10] {
            let cache = grown(43, 40, interval);
            assert!(cache.p_value.is_some_and(|p| p > 0.3), "{cache:?}");
            assert!(grown(40, 43, interval).p_value.is_some_and(|p| p > 0.5));
            assert!(grown(80, 40, interval).p_value.is_some_and(|p| p < 1e-3));
        }
        assert_eq!(grown(0, 5, 1).p_value, Some(1.0));
        assert_eq!(grown(4, 0, 1).p_value, None);
    }

    #[test]
    fn without_all_its_frees_the_growth_of_a_process_is_not_known() {
        let profile = testing::followed_again();
        let grown = growth_of_processes(&profile, 0.95);
        assert!(profile.header.growth_over.is_some() && grown[0].is_none() && grown[1].is_some(), "{grown:?}");
    }

    #[test]
    fn without_a_time_nothing_is_known() {
        let mut profile = testing::small();
        profile.header.growth_over = None;
        assert!(growth(&profile, &[&profile.rows[0]], 0.95).is_none());
    }
}

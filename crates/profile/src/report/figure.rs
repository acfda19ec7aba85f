//! Text of an estimate and its interval.

use super::units::{ByteUnit, count};
use crate::estimates::Pool;
use crate::model::Profile;
use crate::value::Value;
use heapbpf_statistics::estimate::Estimate;

/// A change in bytes, and the ends of its interval in the same unit: `+41.0 KiB` and `[33.0, 50.2]`. The latter is
/// empty if the change is exact or has no interval.
pub fn change_text(change: &Estimate) -> (String, String) {
    let unit = ByteUnit::of(change.estimate);
    let figure = |value: f64| if value < 0.0 { format!("−{}", unit.figure(-value)) } else { unit.figure(value) };
    let plus = if change.estimate > 0.0 { "+" } else { "" };
    let bounds = match (change.low, change.high) {
        (Some(low), Some(high)) if low < high => format!("[{}, {}]", figure(low), figure(high)),
        _ => String::new(),
    };
    (format!("{plus}{} {}", figure(change.estimate), unit.name()), bounds)
}

/// A growth per second, likewise: `+41.0 KiB/s` and `[33.0, 50.2]`.
pub fn rate_text(per_second: &Estimate) -> (String, String) {
    let (figure, bounds) = change_text(per_second);
    (figure + "/s", bounds)
}

/// A figure and its interval as two texts for adjacent columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FigureText {
    /// The figure, such as `12.3 MiB` or `1,234`.
    pub figure: String,
    /// The interval: `[10.1, 15.0]` in the unit of the figure, `[0, 1.84 MiB]` without a sample, `at least 512 B`, or
    /// empty.
    pub bounds: String,
    /// Why there is no interval although the figure is an estimate from samples.
    pub unbounded: Option<&'static str>,
}

impl FigureText {
    /// The text of a value of a pool, with its interval at `confidence`.
    pub fn new(profile: &Profile, pool: &Pool, value: Value, confidence: f64) -> Self {
        if !pool.knows(profile, value) {
            return Self::not_known();
        }
        let estimate = pool.estimate(profile, value, confidence);
        let samples = pool.samples(value);
        let unit = value.is_bytes().then(|| ByteUnit::of(estimate.estimate));
        let figure = match unit {
            Some(unit) => format!("{} {}", unit.figure(estimate.estimate), unit.name()),
            None => count(estimate.estimate),
        };
        let number = |bound: f64| match unit {
            // Bytes are too small a unit for the upper end.
            Some(_) if estimate.estimate == 0.0 && bound > 0.0 => super::units::bytes(bound),
            Some(unit) => unit.figure(bound),
            None => count(bound),
        };
        // With a single sample, the lower end is the sampled size and the upper end says little. If samples may have
        // been lost, the upper end is shown, because it allows for them.
        let touched = pool.is_touched(profile, value);
        if profile.errors_known() && samples == 1 && !touched && estimate.low != estimate.high && value.is_bytes() {
            let least = super::units::bytes(pool.sampled_bytes(value) as f64);
            return Self { figure, bounds: format!("≥ {least}"), unbounded: None };
        }
        match (estimate.low, estimate.high) {
            (Some(low), Some(high)) if low == high => Self { figure, ..Self::default() },
            (Some(low), Some(high)) => {
                Self { figure, bounds: format!("[{}, {}]", number(low), number(high)), unbounded: None }
            }
            // Without a sample, there is no claim.
            _ if samples == 0 && estimate.estimate == 0.0 && !touched => Self { figure, ..Self::default() },
            _ => {
                let unbounded = estimate.reason.filter(|_| profile.errors_known());
                Self { figure: format!("~{figure}"), bounds: String::new(), unbounded }
            }
        }
    }

    /// The text of a value that was counted exactly.
    pub fn exactly(exact: u64, value: Value) -> Self {
        let exact = exact as f64;
        let figure = if value.is_bytes() { super::units::bytes(exact) } else { count(exact) };
        Self { figure, ..Self::default() }
    }

    /// The figure, and its interval if there is one.
    pub fn text(&self) -> String {
        if self.bounds.is_empty() { self.figure.clone() } else { format!("{} {}", self.figure, self.bounds) }
    }

    /// The text of a value in use if frees were not followed.
    pub fn not_known() -> Self {
        Self { figure: "not known".into(), ..Self::default() }
    }

    /// Drops the interval of a stack that has no samples in use and cannot have lost any.
    pub fn quiet_if_unseen(self, profile: &Profile, pool: &Pool, value: Value) -> Self {
        if pool.samples(value) == 0 && pool.total(value) == 0.0 && !pool.is_touched(profile, value) {
            return Self { bounds: String::new(), unbounded: None, ..self };
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn text(rows: &[usize], value: Value) -> FigureText {
        let profile = testing::small();
        let pool = Pool::of(rows.iter().map(|&row| &profile.rows[row]));
        FigureText::new(&profile, &pool, value, 0.95)
    }

    #[test]
    fn bounds_are_in_the_unit_of_the_figure() {
        let figure = text(&[0], Value::InuseSpace);
        assert!(figure.figure.ends_with(" MiB"), "{figure:?}");
        assert!(figure.bounds.starts_with('[') && figure.bounds.ends_with(']') && !figure.bounds.contains('B'));
    }

    #[test]
    fn a_change_has_its_interval_in_its_unit() {
        let change = Estimate { estimate: 41_984.0, low: Some(-1_024.0), high: Some(51_405.0), ..Estimate::default() };
        assert_eq!(change_text(&change), ("+41.0 KiB".to_owned(), "[−1.00, 50.2]".to_owned()));
        assert_eq!(rate_text(&Estimate { low: None, ..change }), ("+41.0 KiB/s".to_owned(), String::new()));
        assert_eq!(change_text(&Estimate { estimate: -512.0, ..Estimate::default() }).0, "−512 B");
    }

    #[test]
    fn a_stack_seen_once_has_at_least_what_was_seen() {
        assert_eq!(text(&[3], Value::InuseSpace).bounds, "≥ 512 B");
    }

    #[test]
    fn counts_of_mixed_sizes_are_marked() {
        let figure = text(&[0, 4], Value::AllocObjects);
        assert!(figure.figure.starts_with('~') && figure.unbounded.is_some() && figure.bounds.is_empty(), "{figure:?}");
    }

    #[test]
    fn of_nothing_seen_the_upper_end_has_a_unit_of_its_own() {
        let profile = testing::small();
        let mut pool = Pool::default();
        pool.allow_for(&[512 << 10]);
        let figure = FigureText::new(&profile, &pool, Value::AllocSpace, 0.95);
        assert_eq!((figure.figure.as_str(), figure.bounds.as_str()), ("0 B", "[0, 1.84 MiB]"));
    }

    #[test]
    fn what_was_fully_sampled_needs_no_bounds() {
        let mut profile = testing::small();
        profile.rows[0].key.interval = 1;
        profile.rows[0].alloc = testing::sums(5, 100, 1);
        let figure = FigureText::new(&profile, &Pool::of(&profile.rows[..1]), Value::AllocSpace, 0.95);
        assert_eq!((figure.figure.as_str(), figure.bounds.as_str()), ("500 B", ""));
    }
}

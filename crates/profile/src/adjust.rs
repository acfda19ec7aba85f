//! Adjustments: other figures from the same samples. They are calibrated by exact totals, or taken at the peak.

use super::estimates::exact;
use super::model::{Process, Profile};
use super::value::Value;
use heapbpf_statistics::calibrate::{Estimated, by_regression};
use heapbpf_statistics::sums::SampleSums;

/// The point in time for which figures in use are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum At {
    /// The end of the recording, or of the process.
    #[default]
    End,
    /// When the estimated total in use was highest.
    Peak,
}

/// Adjustments to a profile before it is shown or written.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Adjustments {
    /// Whether to calibrate allocation totals by their exact counts.
    pub calibrate: bool,
    /// The point in time of the figures in use.
    pub at: At,
}

/// Why a profile cannot be adjusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdjustError {
    /// No process has exact totals.
    #[error("cannot calibrate: the profile has no exact totals (only .json keeps them)")]
    NotCounted,
    /// The format does not keep the peak, or the recording did not.
    #[error("the profile has no figures at the peak: record without --no-live, to a .json file")]
    NoPeak,
    /// Probes were attached only in time windows, and the figures are already corrected for that.
    #[error(
        "probes were attached only in time windows: totals were not counted between them, and figures are already corrected"
    )]
    TimeWindows,
    /// The profile has estimates only, no samples.
    #[error("the profile's format keeps no samples to estimate from: use .json or .parquet")]
    NoSamples,
}

impl Adjustments {
    /// Applies the adjustments and adds a note about each to the profile.
    ///
    /// # Errors
    ///
    /// The profile lacks what an adjustment needs. Adjustments before that one have been applied.
    pub fn apply(&self, profile: &mut Profile) -> Result<(), AdjustError> {
        if self.at == At::Peak {
            at_peak(profile)?;
        }
        if self.calibrate { calibrate(profile) } else { Ok(()) }
    }
}

/// Calibrates the allocation totals of each process by regression (`docs/sampling.md`), so that its stacks add up to
/// its exact counts. Intervals remain those of the unbiased estimates.
fn calibrate(profile: &mut Profile) -> Result<(), AdjustError> {
    if !profile.header.samples_known {
        return Err(AdjustError::NoSamples);
    }
    if profile.header.time_windows {
        return Err(AdjustError::TimeWindows);
    }
    let mut calibrated = 0;
    for process in 0..profile.processes.len() {
        let mut done = false;
        for value in [Value::AllocSpace, Value::AllocObjects] {
            let Some(counted) = exact(profile, Some(process), value) else { continue };
            let mut sums: Vec<&mut SampleSums> =
                profile.rows.iter_mut().filter(|row| row.key.process == process).map(|row| &mut row.alloc).collect();
            let parts: Vec<Estimated> = sums.iter().map(|sums| part(sums, value)).collect();
            for ((sums, part), calibrated) in sums.iter_mut().zip(&parts).zip(by_regression(&parts, counted as f64)) {
                *correction(sums, value) = calibrated - part.estimate;
            }
            done = true;
        }
        calibrated += usize::from(done);
    }
    if calibrated == 0 {
        return Err(AdjustError::NotCounted);
    }
    profile.notes.push(format!(
        "calibrated: allocation totals of {calibrated} of {} processes are fitted to their exact counts by regression; \
         intervals are those of the figures before calibration",
        profile.processes.len()
    ));
    Ok(())
}

fn part(sums: &SampleSums, value: Value) -> Estimated {
    let variance = if value.is_bytes() { sums.bytes_variance } else { sums.objects_variance };
    Estimated { estimate: value.raw_estimate_of(sums), variance }
}

fn correction(sums: &mut SampleSums, value: Value) -> &mut f64 {
    if value.is_bytes() { &mut sums.bytes_correction } else { &mut sums.objects_correction }
}

/// Replaces the figures in use by those at the peak. Figures of ended processes at exit do not change.
fn at_peak(profile: &mut Profile) -> Result<(), AdjustError> {
    if !profile.header.live || profile.rows.iter().all(|row| row.peak.is_none()) && !profile.rows.is_empty() {
        return Err(AdjustError::NoPeak);
    }
    for row in &mut profile.rows {
        (row.inuse, row.in_memory) = (row.peak.unwrap_or_default(), None);
    }
    for Process { losses, .. } in &mut profile.processes {
        losses.inuse_unbounded |= losses.peak_unknown;
    }
    profile
        .notes
        .push("figures in use are those at the peak (highest estimated total), of the processes alive then".into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimates::Pool;
    use crate::loss_bounds::PEAK_UNKNOWN;
    use crate::testing;

    #[test]
    fn calibrated_stacks_add_up_and_intervals_stay() {
        let mut profile = testing::small();
        profile.processes[0].exact_alloc_bytes = Some(70_000_000);
        profile.processes[0].exact_alloc_objects = Some(12_345);
        let rows =
            |profile: &Profile| profile.rows.iter().filter(|row| row.key.process == 0).cloned().collect::<Vec<_>>();
        let before = Pool::of(&rows(&profile)).estimate(&profile, Value::AllocSpace, 0.95);
        Adjustments { calibrate: true, ..Adjustments::default() }.apply(&mut profile).expect("counted");
        let pool = Pool::of(&rows(&profile));
        let after = pool.estimate(&profile, Value::AllocSpace, 0.95);
        assert!((after.estimate - 70e6).abs() < 1e-3, "{after:?}");
        assert!((pool.total(Value::AllocObjects) - 12_345.0).abs() < 1e-6);
        assert_eq!((after.low, after.high), (before.low, before.high));
        assert!(profile.notes.iter().any(|note| note.starts_with("calibrated: ")));
        for process in &mut profile.processes {
            (process.exact_alloc_bytes, process.exact_alloc_objects) = (None, None);
        }
        assert_eq!(calibrate(&mut profile), Err(AdjustError::NotCounted));
    }

    #[test]
    fn the_peak_takes_the_place_of_the_end() {
        let mut profile = testing::small();
        profile.rows.iter_mut().for_each(|row| row.peak = None);
        let at_peak = Adjustments { at: At::Peak, ..Adjustments::default() };
        assert_eq!(at_peak.apply(&mut profile.clone()), Err(AdjustError::NoPeak));
        profile.rows[0].peak = Some(testing::sums(9, 4_096, profile.rows[0].key.interval));
        at_peak.apply(&mut profile).expect("a peak");
        assert_eq!(profile.rows[0].inuse.samples, 9);
        assert!(profile.rows[1..].iter().all(|row| row.inuse.samples == 0));
    }

    /// Records lost before the peak may hide that the peak was at another time; then its figures have no interval.
    #[test]
    fn a_peak_after_losses_has_no_interval() {
        let mut profile = testing::small();
        profile.rows.iter_mut().for_each(|row| row.peak = Some(row.inuse));
        profile.processes[1].losses.peak_unknown = true;
        let at_end = profile.clone();
        Adjustments { at: At::Peak, ..Adjustments::default() }.apply(&mut profile).expect("a peak");
        let of = |profile: &Profile, process| {
            let rows = profile.rows.iter().filter(|row| row.key.process == process);
            Pool::of(rows).estimate(profile, Value::InuseSpace, 0.95)
        };
        assert_eq!((of(&profile, 1).low, of(&profile, 1).reason), (None, Some(PEAK_UNKNOWN)));
        assert!(of(&profile, 0).low.is_some() && of(&at_end, 1).low.is_some());
        let allocated = Pool::whole(&profile).estimate(&profile, Value::AllocSpace, 0.95);
        assert!(allocated.low.is_some());
    }
}

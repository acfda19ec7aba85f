//! What changed between two profiles, stack by stack, and which growth is more than chance.

mod frames;
mod judge;
mod stacks;

use serde::Serialize;

use super::group::GroupBy;
use super::model::Profile;
use super::value::Value;
use crate::sampling::estimate::Estimate;
use crate::sampling::growth::q_values;

pub use frames::DiffFrame;
use judge::Side;

/// How to compare.
#[derive(Clone, Debug)]
pub struct DiffOptions {
    /// What to compare; each value is a family of its own for the correction. Empty: what the profiles show first.
    pub values: Vec<Value>,
    /// Stacks are told apart by this, too; never by pid, which differs from run to run.
    pub group_by: GroupBy,
    /// Confidence level of intervals, 0 to 1.
    pub confidence: f64,
    /// Greatest expected share of false ones among the stacks called significant.
    pub false_discovery_rate: f64,
    /// What allocations are counted per.
    pub exposure: Exposure,
}

impl Default for DiffOptions {
    fn default() -> Self {
        Self {
            values: Vec::new(),
            group_by: GroupBy::Comm,
            confidence: 0.95,
            false_discovery_rate: 0.05,
            exposure: Exposure::Automatic,
        }
    }
}

/// What figures of allocation, and those at exit, are counted per. Figures in use are levels, and compared per recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Exposure {
    /// Per second, unless both recordings lasted until their processes ended: then they are whole runs.
    Automatic,
    /// Per second of recording.
    Seconds,
    /// Per recording.
    Recording,
    /// Per request or whatever else there were so many of, before and after.
    Given(f64, f64),
}

/// The comparison: what `heapbpf diff --json` writes.
#[derive(Clone, Debug, Serialize)]
pub struct Diff {
    /// The first profile.
    pub before: DiffSide,
    /// The second profile.
    pub after: DiffSide,
    /// Level of intervals.
    pub confidence: f64,
    /// Level that q-values are compared with.
    pub false_discovery_rate: f64,
    /// All stacks together, one for each value.
    pub totals: Vec<Change>,
    /// Significant growth first, the largest on top; then the rest, by the size of the change.
    pub stacks: Vec<StackChange>,
    /// What the reader must know.
    pub notes: Vec<String>,
}

/// One of the two profiles.
#[derive(Clone, Debug, Serialize)]
pub struct DiffSide {
    /// Host.
    pub host: String,
    /// Sampling interval R.
    pub interval: u64,
    /// Length of the recording.
    pub duration_seconds: f64,
    /// What figures of allocation are divided by to compare them.
    pub exposure: f64,
}

/// How one figure changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Which figure: `inuse_bytes`, `alloc_bytes`, ….
    pub value: &'static str,
    /// As in the first profile.
    pub before: Estimate,
    /// As in the second profile.
    pub after: Estimate,
    /// after − before · (exposure after / exposure before), with its MOVER interval.
    pub change: Estimate,
    /// Probability of such growth or more if there was none; `null` with the reason where it cannot be judged.
    pub p_value: Option<f64>,
    /// The same, corrected for the number of stacks (Benjamini–Hochberg).
    pub q_value: Option<f64>,
    /// Whether it grew: q-value within the false discovery rate.
    pub significant: bool,
    /// Why it cannot be judged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
}

/// How a stack changed.
#[derive(Clone, Debug, Serialize)]
pub struct StackChange {
    /// Group (process name) that the stack is in.
    pub group: String,
    /// Allocator function that was called.
    pub function: String,
    /// Frames, innermost first.
    pub frames: Vec<DiffFrame>,
    /// The figures.
    #[serde(flatten)]
    pub figures: Change,
}

/// Whether what is in use is known of all processes.
fn knows_inuse(profile: &Profile) -> bool {
    profile.live && profile.without_inuse() == 0
}

/// Compares two profiles. Stacks are the same if group, allocator function and frames have the same names.
pub fn diff(before: &Profile, after: &Profile, options: &DiffOptions) -> Diff {
    let defaults = [if [before, after].into_iter().all(knows_inuse) { Value::InuseSpace } else { Value::AllocSpace }];
    let values: &[Value] = if options.values.is_empty() { &defaults } else { &options.values };
    let exposures = exposures(before, after, options.exposure);
    let matched = stacks::matched(before, after, options.group_by);
    let (mut totals, mut changes) = (Vec::new(), Vec::new());
    for &value in values {
        let (e_before, e_after) = if value.is_inuse() { recordings(before, after) } else { exposures };
        let sides = [Side::new(before, value, e_before), Side::new(after, value, e_after)];
        let [was, is] = &sides;
        totals.push(judge::change(was, &stacks::total(before), is, &stacks::total(after), options));
        let mut family: Vec<StackChange> = matched
            .iter()
            .filter(|stack| stack.before.samples(value) + stack.after.samples(value) > 0 || !judgeable(before, after))
            .map(|stack| StackChange {
                group: stack.group.clone(),
                function: stack.function.clone(),
                frames: stack.frames(before, after),
                figures: judge::change(was, &stack.before, is, &stack.after, options),
            })
            .collect();
        correct(&mut family, options.false_discovery_rate);
        changes.append(&mut family);
    }
    changes.sort_by(|a, b| {
        let size = |change: &Change| {
            let size = change.change.estimate;
            if change.significant { size } else { size.abs() }
        };
        let (a, b) = (&a.figures, &b.figures);
        b.significant.cmp(&a.significant).then(size(b).total_cmp(&size(a)))
    });
    Diff {
        before: side(before, exposures.0),
        after: side(after, exposures.1),
        confidence: options.confidence,
        false_discovery_rate: options.false_discovery_rate,
        totals,
        stacks: changes,
        notes: notes(before, after, values, exposures),
    }
}

fn judgeable(before: &Profile, after: &Profile) -> bool {
    before.errors_known() && after.errors_known()
}

/// q-values of a family, over the stacks that have a p-value.
fn correct(family: &mut [StackChange], rate: f64) {
    let p_values: Vec<f64> = family.iter().filter_map(|stack| stack.figures.p_value).collect();
    let judged = family.iter_mut().filter(|stack| stack.figures.p_value.is_some());
    for (stack, q) in judged.zip(q_values(&p_values)) {
        stack.figures.q_value = Some(q);
        stack.figures.significant = q <= rate;
    }
}

fn exposures(before: &Profile, after: &Profile, exposure: Exposure) -> (f64, f64) {
    let seconds = |profile: &Profile| profile.duration.as_secs_f64();
    let whole_run =
        |profile: &Profile| !profile.processes.is_empty() && profile.processes.iter().all(|process| process.ended);
    let pair = match exposure {
        Exposure::Given(before, after) => (before, after),
        Exposure::Recording => recordings(before, after),
        Exposure::Automatic if whole_run(before) && whole_run(after) => recordings(before, after),
        Exposure::Automatic | Exposure::Seconds => (seconds(before), seconds(after)),
    };
    // A profile read from elsewhere may have no duration.
    let usable = |x: f64| x.is_finite() && x > 0.0;
    if usable(pair.0) && usable(pair.1) { pair } else { (1.0, 1.0) }
}

/// Merged profiles are of several recordings: figures are compared by their mean.
fn recordings(before: &Profile, after: &Profile) -> (f64, f64) {
    (f64::from(before.recordings.max(1)), f64::from(after.recordings.max(1)))
}

fn side(profile: &Profile, exposure: f64) -> DiffSide {
    DiffSide {
        host: profile.host.clone(),
        interval: profile.interval,
        duration_seconds: profile.duration.as_secs_f64(),
        exposure,
    }
}

fn notes(before: &Profile, after: &Profile, values: &[Value], exposures: (f64, f64)) -> Vec<String> {
    let mut notes = Vec::new();
    if !judgeable(before, after) {
        notes.push(
            "differences only: a profile without its samples, or of time windows only, does not say how sure they are"
                .to_owned(),
        );
    }
    if values.iter().any(|value| value.needs_frees()) && ![before, after].into_iter().all(knows_inuse) {
        notes.push(
            "frees were not followed in both recordings: what is in use or was held at exit cannot be compared"
                .to_owned(),
        );
    }
    if judgeable(before, after) && [before, after].iter().any(|profile| !profile.losses().is_none()) {
        notes.push(
            "records were lost: intervals and p-values allow for it, and what losses explain is no growth".to_owned(),
        );
    }
    if values.iter().any(|value| value.is_inuse()) && before.recordings != after.recordings {
        notes.push(format!(
            "figures in use are compared per recording: {} before, {} after",
            before.recordings, after.recordings
        ));
    }
    if values.iter().any(|value| !value.is_inuse()) && exposures.0 != exposures.1 {
        notes.push(format!(
            "allocations are compared per unit of exposure: {:.6} before, {:.6} after",
            exposures.0, exposures.1
        ));
    }
    notes
}

#[cfg(test)]
#[path = "diff/tests.rs"]
mod tests;

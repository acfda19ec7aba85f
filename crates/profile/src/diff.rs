//! Comparison of two profiles, stack by stack, with a significance test for growth.

mod csv;
pub mod growth;
mod judge;
mod stacks;

use serde::Serialize;

use super::estimates::{Pool, intervals_used};
use super::group::GroupBy;
use super::model::{Process, Profile, Resident};
use super::naming::told_apart;
use super::report::FrameView;
use super::report::chain::KnownOrigins;
use super::units;
use super::value::Value;
use heapbpf_statistics::estimate::Estimate;

pub use csv::csv;
use judge::{FALSE_DISCOVERY_RATE, Side, correct};
pub use stacks::DiffFrame;
use stacks::Title;

/// How to compare two profiles.
#[derive(Clone, Debug)]
pub struct DiffOptions {
    /// The values to compare. Each is a separate family for the multiple-testing correction. Empty: the default value
    /// of the profiles.
    pub values: Vec<Value>,
    /// What else distinguishes stacks. Process ids never do, because they differ from run to run.
    pub group_by: GroupBy,
    /// Confidence level of intervals, 0 to 1.
    pub confidence: f64,
    /// The exposure that allocations are divided by.
    pub exposure: Exposure,
    /// How tables show frames.
    pub frames: FrameView,
}

impl Default for DiffOptions {
    fn default() -> Self {
        Self {
            values: Vec::new(),
            group_by: GroupBy::Comm,
            confidence: 0.95,
            exposure: Exposure::Automatic,
            frames: FrameView::default(),
        }
    }
}

/// The exposure by which figures of allocation and at exit are divided. Figures in use are levels, so they are compared
/// per recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Exposure {
    /// Per second; per recording if both recordings are whole runs, that is, all their processes have ended.
    Automatic,
    /// Per second of recording.
    Seconds,
    /// Per recording.
    Recording,
    /// Per unit of something else, such as requests: the numbers before and after.
    Given(f64, f64),
}

/// The result of a comparison; `heapbpf diff --json` writes it.
#[derive(Clone, Debug, Serialize)]
pub struct Diff {
    /// The first profile.
    pub before: DiffSide,
    /// The second profile.
    pub after: DiffSide,
    /// Confidence level of intervals, 0 to 1.
    pub confidence: f64,
    /// The false discovery rate that q-values are compared with.
    pub false_discovery_rate: f64,
    /// The change of the total, one entry per value.
    pub totals: Vec<Change>,
    /// Stacks with significant growth, the largest first; then all others by the size of their change.
    pub stacks: Vec<StackChange>,
    /// Changes by function, [`Verdict::Sure`] ones first, then by size.
    pub functions: Vec<FunctionChange>,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

/// One of the two profiles in a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct DiffSide {
    /// Host name.
    pub host: String,
    /// Sampling interval R in trials.
    pub interval: u64,
    /// Length of the recording in seconds.
    pub duration_seconds: f64,
    /// The exposure that figures of allocation are divided by.
    pub exposure: f64,
    /// Resident memory of the processes that run, or of all if none does, without heapbpf's own pages; `None` if it was
    /// not measured, or if several recordings were added up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident: Option<Resident>,
}

/// The change of one figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Name of the figure: `inuse_bytes`, `alloc_bytes`, ….
    pub value: &'static str,
    /// The figure in the first profile.
    pub before: Estimate,
    /// The figure in the second profile.
    pub after: Estimate,
    /// after − before · (exposure after / exposure before), with its MOVER interval.
    pub change: Estimate,
    /// p-value of the null hypothesis that there is no growth; `None` if it cannot be tested.
    pub p_value: Option<f64>,
    /// q-value: the p-value corrected for the number of stacks (Benjamini–Hochberg).
    pub q_value: Option<f64>,
    /// Whether the growth is significant: the q-value does not exceed the false discovery rate.
    pub significant: bool,
    /// Direction of the change.
    pub direction: Direction,
    /// p-value of the null hypothesis that there is no change: twice the smaller of the one-sided p-values.
    pub p_two_sided: Option<f64>,
    /// Verdict after correction for all changes that were compared; `None` if it cannot be tested.
    pub verdict: Option<Verdict>,
    /// Why there is no p-value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
}

/// Direction of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Larger than before.
    Grew,
    /// Smaller than before.
    Shrank,
    /// Zero before.
    New,
    /// Zero after.
    Gone,
    /// Equal.
    Same,
}

/// Whether chance explains a change. p-values are corrected for the number of tests (Benjamini–Hochberg).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Significant at the false discovery rate.
    Sure,
    /// Significant at five times the false discovery rate.
    Maybe,
    /// Neither.
    Chance,
}

/// The change of all stacks that a function titles.
#[derive(Clone, Debug, Serialize)]
pub struct FunctionChange {
    /// Group, such as the process name; `old → new` if the program was renamed.
    pub group: String,
    /// The short name of the function. It does not depend on the other changes.
    pub function: String,
    /// The full name, which tells functions apart.
    pub full_name: String,
    /// The name for tables: the full one where others have the same short name.
    #[serde(skip)]
    pub shown: String,
    /// Its file and line, or its module.
    #[serde(skip)]
    pub place: String,
    /// The change of its figure.
    #[serde(flatten)]
    pub figures: Change,
}

/// The change of one stack.
#[derive(Clone, Debug, Serialize)]
pub struct StackChange {
    /// Group of the stack, such as the process name.
    pub group: String,
    /// Allocator function that was called.
    pub function: String,
    /// Frames, innermost first.
    pub frames: Vec<DiffFrame>,
    /// The change of its figure.
    #[serde(flatten)]
    pub figures: Change,
}

/// Whether the memory in use of all processes is known.
fn knows_inuse(profile: &Profile) -> bool {
    profile.header.live && profile.without_inuse() == 0
}

/// Compares two profiles. Stacks match if their group, allocator function and frames have the same names.
pub fn diff(before: &Profile, after: &Profile, options: &DiffOptions) -> Diff {
    let defaults = [if [before, after].into_iter().all(knows_inuse) { Value::InuseSpace } else { Value::AllocSpace }];
    let values: &[Value] = if options.values.is_empty() { &defaults } else { &options.values };
    let exposures = exposures(before, after, options.exposure);
    let matched = stacks::matched(before, after, options.group_by, None);
    let mut known = KnownOrigins::default();
    let titled = stacks::matched(before, after, options.group_by, Some((options.frames, &mut known)));
    let titles: Vec<Title> = titled.iter().map(|it| it.title(before, after, options.frames, &mut known)).collect();
    let names: Vec<_> =
        titled.iter().zip(&titles).map(|(it, title)| (&title.function, title.name.as_str(), &it.group)).collect();
    let names = told_apart(&names);
    let (mut totals, mut changes, mut functions) = (Vec::new(), Vec::new(), Vec::new());
    for &value in values {
        let (e_before, e_after) = if value.is_inuse() { recordings(before, after) } else { exposures };
        let sides = [Side::new(before, value, e_before), Side::new(after, value, e_after)];
        let [was, is] = &sides;
        totals.push(judge::change(was, &stacks::total(before), is, &stacks::total(after), options));
        let is_seen = |stack: &&stacks::Matched| {
            stack.before.samples(value) + stack.after.samples(value) > 0 || !judgeable(before, after)
        };
        let mut of_functions: Vec<FunctionChange> = titled
            .iter()
            .zip(titles.iter().zip(&names))
            .filter(|(it, _)| is_seen(it))
            .map(|(it, (title, name))| {
                let figures = judge::change(was, &it.before, is, &it.after, options);
                let Title { function, name: short, place } = title;
                let (full_name, shown) = (function.name.to_string(), name.clone());
                FunctionChange {
                    group: it.group.clone(),
                    function: short.clone(),
                    full_name,
                    shown,
                    place: place.clone(),
                    figures,
                }
            })
            .collect();
        correct(of_functions.iter_mut().map(|it| &mut it.figures), 0);
        functions.append(&mut of_functions);
        let mut family: Vec<StackChange> = matched
            .iter()
            .filter(is_seen)
            .map(|stack| StackChange {
                group: stack.group.clone(),
                function: stack.function.clone(),
                frames: stack.frames(before, after, options.frames, &mut known),
                figures: judge::change(was, &stack.before, is, &stack.after, options),
            })
            .collect();
        correct(family.iter_mut().map(|stack| &mut stack.figures), 0);
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
    functions.sort_by(|a, b| {
        let order =
            |it: &FunctionChange| (it.figures.verdict.unwrap_or(Verdict::Chance), it.figures.change.estimate.abs());
        let (a, b) = (order(a), order(b));
        a.0.cmp(&b.0).then(b.1.total_cmp(&a.1))
    });
    Diff {
        before: side(before, exposures.0),
        after: side(after, exposures.1),
        confidence: options.confidence,
        false_discovery_rate: FALSE_DISCOVERY_RATE,
        totals,
        stacks: changes,
        functions,
        notes: notes(before, after, values, exposures),
    }
}

/// The changes of a family of figures, such as those of all functions. Each pair holds the rows of one figure before
/// and after. `tests` is the size of the whole family, including figures that were left out because they did not grow;
/// those count as tests without a result.
pub fn changes(
    (before, after): (&Profile, &Profile),
    mut pairs: Vec<(Pool, Pool)>,
    value: Value,
    tests: usize,
    options: &DiffOptions,
) -> Vec<Change> {
    let (e_before, e_after) =
        if value.is_inuse() { recordings(before, after) } else { exposures(before, after, options.exposure) };
    let (was, is) = (Side::new(before, value, e_before), Side::new(after, value, e_after));
    let (used_before, used_after) = (intervals_used(before), intervals_used(after));
    let changed = pairs.iter_mut().map(|(pool_before, pool_after)| {
        // Any process may have lost all rows of a figure.
        pool_before.cover(0..before.processes.len());
        pool_after.cover(0..after.processes.len());
        pool_before.allow_for(&used_before);
        pool_after.allow_for(&used_after);
        judge::change(&was, pool_before, &is, pool_after, options)
    });
    let mut changes: Vec<Change> = changed.collect();
    correct(changes.iter_mut(), tests);
    changes
}

fn judgeable(before: &Profile, after: &Profile) -> bool {
    before.errors_known() && after.errors_known()
}

fn exposures(before: &Profile, after: &Profile, exposure: Exposure) -> (f64, f64) {
    let seconds = |profile: &Profile| profile.header.duration.as_secs_f64();
    let whole_run =
        |profile: &Profile| !profile.processes.is_empty() && profile.processes.iter().all(|process| process.ended);
    let pair = match exposure {
        Exposure::Given(before, after) => (before, after),
        Exposure::Recording => recordings(before, after),
        Exposure::Automatic if whole_run(before) && whole_run(after) => recordings(before, after),
        Exposure::Automatic | Exposure::Seconds => (seconds(before), seconds(after)),
    };
    // A profile from another tool may have no duration.
    let usable = |x: f64| x.is_finite() && x > 0.0;
    if usable(pair.0) && usable(pair.1) { pair } else { (1.0, 1.0) }
}

/// The numbers of recordings: merged profiles are compared by their mean per recording.
fn recordings(before: &Profile, after: &Profile) -> (f64, f64) {
    (f64::from(before.header.recordings.max(1)), f64::from(after.header.recordings.max(1)))
}

fn side(profile: &Profile, exposure: f64) -> DiffSide {
    let processes = || profile.processes.iter().chain(&profile.idle);
    let has_ended = processes().all(|process| process.ended);
    let resident = Process::resident_of_all(processes().filter(|process| process.ended == has_ended));
    DiffSide {
        host: profile.header.host.clone(),
        interval: profile.header.interval,
        duration_seconds: profile.header.duration.as_secs_f64(),
        exposure,
        resident: resident.filter(|_| profile.header.recordings <= 1).map(|all| Resident { own_bytes: 0, ..all }),
    }
}

fn notes(before: &Profile, after: &Profile, values: &[Value], exposures: (f64, f64)) -> Vec<String> {
    let mut notes = Vec::new();
    if !judgeable(before, after) {
        notes.push(
            "differences only, without significance: a profile has no samples, or was recorded only in time windows"
                .to_owned(),
        );
    }
    if values.iter().any(|value| value.needs_frees()) && ![before, after].into_iter().all(knows_inuse) {
        notes.push(
            "frees were not tracked in at least one recording: memory in use or held at exit cannot be compared"
                .to_owned(),
        );
    }
    if values.iter().any(|value| value.needs_frees())
        && let Some((number, last)) = [before, after].iter().rev().find_map(|profile| profile.inuse_since())
    {
        let s = if number == 1 { "" } else { "es" };
        notes.push(format!(
            "tracking of frees resumed in the middle of a recording for {number} process{s} (last at {}): older blocks are \
             missing there, which may explain a change of memory in use",
            units::time_of_day(last)
        ));
    }
    if judgeable(before, after) && [before, after].iter().any(|profile| !profile.losses().is_none()) {
        notes.push(
            "records were lost: intervals and p-values allow for it; a change that losses may explain is not significant"
                .to_owned(),
        );
    }
    if values.iter().any(|value| value.is_inuse()) && before.header.recordings != after.header.recordings {
        notes.push(format!(
            "figures in use are compared per recording: {} before, {} after",
            before.header.recordings, after.header.recordings
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

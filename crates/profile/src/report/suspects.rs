//! Leak suspects: functions whose memory in use grows, or that keep some blocks far beyond the lifetimes of the others
//! of the same stack.
//!
//! Stacks are judged individually and then combined by function, so that a leak is not averaged away among the other
//! stacks.

use std::collections::BTreeMap;

use heapbpf_statistics::growth::q_values;
use heapbpf_statistics::outliving::{self, Octave, Outliving};
use indexmap::IndexMap;

use super::stacks::{Group, INDENT, chains_apart, judged_groups};
use super::{Context, plural};
use crate::diff::growth::{FEWEST, Grown, growth};
use crate::group::Groups;
use crate::intern::NO_STACK;
use crate::model::Row;
use crate::naming::{FunctionKey, told_apart};
use crate::report::figure::rate_text;
use crate::report::text::{Style, wrap};
use crate::units;
use crate::value::Value;

/// Largest q-value at which a stack is listed, that is, the largest expected share of chance findings in the list. It
/// is small because users check growth repeatedly.
const CHANCE: f64 = 0.01;
/// Number of suspects in a report that was not asked for them.
const FEW: usize = 3;
/// Lines for the calls of a stack.
const STACK_LINES: usize = 2;
/// Minimum number of samples at which a stack that grew earlier but no longer grows is reported as full.
const MANY: u64 = 8;

/// With fewer samples in use, growth cannot be judged, and error bars are wide.
pub(super) const FEW_IN_USE: u64 = 10;

/// Why a stack is suspected.
#[derive(Clone, Copy, Debug)]
pub(super) enum Why {
    /// It grows, and none of its samples was freed. `left`: samples in use; `kept`: how many of them are new, if known.
    FreesNothing { left: u64, kept: Option<u64> },
    /// Some of its blocks live far beyond the lifetimes of the others.
    Outlives { found: Outliving, q_value: f64 },
    /// It grows, although it frees blocks of all ages.
    Grows,
}

impl Why {
    /// Adds another stack of the function.
    const fn add(&mut self, other: &Self) {
        if let (Self::FreesNothing { left, kept }, Self::FreesNothing { left: more, kept: more_kept }) = (self, other) {
            *left += *more;
            if let (Some(kept), Some(more)) = (kept, more_kept) {
                *kept += *more;
            }
        }
    }

    /// Name in CSV and JSON.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::FreesNothing { .. } => "only grows",
            Self::Outlives { .. } => "outlives",
            Self::Grows => "grows",
        }
    }
}

/// A function with its suspected stacks.
pub(super) struct Suspect<'a> {
    pub(super) function: FunctionKey<'a>,
    /// Its short name.
    pub(super) short: String,
    /// Name under which the function is shown.
    pub(super) name: String,
    /// Its stacks, the fastest-growing first.
    pub(super) stacks: Vec<&'a Group<'a>>,
    /// The reason for its first stack, combined with those of the other stacks suspected for the same reason.
    pub(super) why: Why,
    /// Growth of all its stacks together; `None` if the profile does not contain it.
    pub(super) grown: Option<Grown>,
}

impl<'a> Suspect<'a> {
    /// Whether another stack of the function frees blocks, among all `groups` that were judged.
    pub(super) fn frees_elsewhere(&self, context: &Context<'a>, groups: &[Group<'a>]) -> bool {
        let Some(first) = self.stacks.first() else { return false };
        let frees = |group: &&Group| ages(group).iter().any(|octave| octave.freed > 0);
        let mut freeing = groups.iter().filter(|group| group.name == first.name).filter(frees);
        freeing.any(|group| group.function(context) == self.function)
    }

    /// Whether it is this function of this program.
    pub(super) fn is_of(&self, program: &str, function: &FunctionKey) -> bool {
        self.function == *function && self.stacks.first().is_some_and(|group| group.name == program)
    }

    pub(super) fn inuse_bytes(&self) -> f64 {
        self.stacks.iter().map(|group| in_use(group)).sum()
    }
}

/// The findings.
pub(super) struct SuspectFindings<'a> {
    /// Suspects, the fastest-growing first.
    pub(super) suspects: Vec<Suspect<'a>>,
    /// Number of stacks that could be judged.
    pub(super) judged: u64,
    /// Stacks that grew earlier but no longer grow, the largest first, with the age of the youngest block in seconds.
    pub(super) full: Vec<(&'a Group<'a>, f64)>,
}

/// A stack with the results of its tests.
struct Judged<'a> {
    group: &'a Group<'a>,
    ages: Vec<Octave>,
    outliving: Option<Outliving>,
    grown: Option<Grown>,
}

impl Judged<'_> {
    fn left(&self) -> u64 {
        self.ages.iter().map(|octave| octave.left).sum()
    }

    fn as_freeing_nothing(&self) -> Why {
        Why::FreesNothing { left: self.left(), kept: self.grown.map(|grown| grown.kept) }
    }

    fn frees_nothing(&self) -> bool {
        self.ages.iter().all(|octave| octave.freed == 0)
    }
}

/// Sorts by the lower bound of growth, so that certain growth comes before possible chance, and then by bytes in use.
fn sort_by_growth<T>(all: &mut [T], of: impl Fn(&T) -> (Option<Grown>, f64)) {
    let certain = |grown: Grown| grown.per_second.low.unwrap_or(grown.per_second.estimate);
    let order = |it: &T| {
        let (grown, inuse_bytes) = of(it);
        (grown.map_or(f64::NEG_INFINITY, certain), inuse_bytes)
    };
    all.sort_by(|a, b| {
        let (a, b) = (order(a), order(b));
        b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
}

/// Judges stacks.
pub(super) fn find<'a>(context: &Context<'a>, groups: &'a [Group<'a>]) -> SuspectFindings<'a> {
    let confidence = context.options.confidence;
    let of = |group: &'a Group<'a>| {
        let has_changed = group.rows.iter().any(|row| row.growth.is_some());
        let ages = ages(group);
        let outliving = outliving::outliving(&ages);
        let grown = || growth(context.profile, &group.rows, confidence);
        Judged { group, ages, outliving, grown: if has_changed { grown() } else { None } }
    };
    let all: Vec<Judged> = groups.iter().map(of).collect();
    let q_of = |p_values: Vec<Option<f64>>| {
        let tested: Vec<f64> = p_values.iter().copied().flatten().collect();
        let mut q_values = q_values(&tested).into_iter();
        p_values.into_iter().map(move |p| p.and_then(|_| q_values.next()).unwrap_or(1.0)).collect::<Vec<f64>>()
    };
    let q_outlives = q_of(all.iter().map(|it| it.outliving.as_ref().map(|found| found.p_value)).collect());
    let q_grows = q_of(all.iter().map(|it| it.grown.and_then(|grown| grown.p_value)).collect());
    let is_judged = |it: &&Judged| it.outliving.is_some() || it.grown.is_some_and(|grown| grown.p_value.is_some());
    let judged = all.iter().filter(is_judged).count() as u64;

    let mut suspected: Vec<(&Judged, Why)> = Vec::new();
    for ((it, q_outlives), q_grows) in all.iter().zip(q_outlives).zip(q_grows) {
        let why = match it.outliving {
            Some(found) if q_outlives <= CHANCE => Some(Why::Outlives { found, q_value: q_outlives }),
            _ if q_grows <= CHANCE && it.frees_nothing() => Some(it.as_freeing_nothing()),
            _ if q_grows <= CHANCE => Some(Why::Grows),
            // Older profiles do not contain the growth of a stack.
            _ => only_grows(context, it).then(|| it.as_freeing_nothing()),
        };
        suspected.extend(why.map(|why| (it, why)));
    }
    sort_by_growth(&mut suspected, |(it, _)| (it.grown, in_use(it.group)));
    let suspects = by_function(context, &suspected);
    let mut full: Vec<_> = all.iter().filter_map(|it| Some((it.group, full(context, it)?))).collect();
    full.sort_by(|(a, _), (b, _)| in_use(b).total_cmp(&in_use(a)));
    SuspectFindings { suspects, judged, full }
}

/// Combines stacks that the same function titles.
fn by_function<'a>(context: &Context<'a>, suspected: &[(&Judged<'a>, Why)]) -> Vec<Suspect<'a>> {
    let mut suspects: IndexMap<(&str, FunctionKey), Suspect> = IndexMap::new();
    for (it, why) in suspected {
        let function = it.group.function(context);
        let suspect = suspects.entry((&it.group.name, function.clone())).or_insert_with(|| {
            let first = it.group.chain(context).into_iter().next();
            let short = first.map_or_else(|| NO_STACK.into(), |(call, _)| call.name);
            Suspect { function, short, name: String::new(), stacks: Vec::new(), why: *why, grown: it.grown }
        });
        if !suspect.stacks.is_empty() {
            suspect.why.add(why);
        }
        suspect.stacks.push(it.group);
    }
    let names = suspects.iter().map(|((program, key), suspect)| (key, suspect.short.as_str(), program));
    let names = told_apart(&names.collect::<Vec<_>>());
    let mut suspects: Vec<Suspect> = suspects.into_values().collect();
    suspects.iter_mut().zip(names).for_each(|(suspect, name)| suspect.name = name);
    for suspect in suspects.iter_mut().filter(|suspect| suspect.stacks.len() > 1) {
        let rows: Vec<&Row> = suspect.stacks.iter().flat_map(|group| group.rows.iter().copied()).collect();
        suspect.grown = growth(context.profile, &rows, context.options.confidence);
    }
    sort_by_growth(&mut suspects, |suspect| (suspect.grown, suspect.inuse_bytes()));
    suspects
}

/// Whether a stack grew without any frees, judged by the ages of its blocks.
fn only_grows(context: &Context, it: &Judged) -> bool {
    let half_ns = (context.profile.header.duration / 2).as_nanos().max(1).ilog2();
    let young: u64 = it.ages.iter().filter(|octave| octave.exponent < half_ns).map(|octave| octave.left).sum();
    let is_growing = it.frees_nothing() && young > 0 && young < it.left();
    context.profile.header.growth_over.is_none() && is_growing && in_use(it.group) > 0.0
}

/// The age of the youngest block, in seconds, of a stack that was filled and has not changed since.
fn full(context: &Context, it: &Judged) -> Option<f64> {
    let over = context.profile.header.growth_over?.as_secs_f64();
    let youngest = it.ages.iter().filter(|octave| octave.left > 0).map(|octave| octave.exponent).min()?;
    let is_known = it.group.rows.iter().all(|row| context.profile.knows_growth(row.key.process));
    let is_unchanged = is_known && it.grown.is_none() && it.frees_nothing();
    let has_stopped = is_unchanged && it.left() >= MANY && in_use(it.group) > 0.0;
    has_stopped.then(|| Octave::begin_seconds(youngest).max(over))
}

/// What to say if no stack is suspected: `none`, or why that cannot be said.
pub(super) fn without_suspects(context: &Context, groups: &[Group], found: &SuspectFindings, none: &str) -> String {
    if found.judged > 0 {
        return format!("{none} ({} judged)", plural(found.judged, "stack"));
    }
    let changed = |group: &Group| {
        let growth = group.rows.iter().filter_map(|row| row.growth.as_ref());
        growth.map(|growth| growth.kept.samples.saturating_add(growth.freed.samples)).fold(0, u64::saturating_add)
    };
    let is_few = context.whole.samples(Value::InuseSpace) < FEW_IN_USE;
    let is_known = |row: &Row| context.profile.knows_growth(row.key.process);
    match groups.iter().map(changed).max().unwrap_or(0) {
        0 if is_few => "too few samples to judge growth".to_owned(),
        0 if context.profile.rows.iter().all(is_known) => none.to_owned(),
        1..FEWEST => "too few samples to judge growth".to_owned(),
        _ => "not known: no stack could be judged".to_owned(),
    }
}

pub(super) fn ages(group: &Group) -> Vec<Octave> {
    outliving::added(group.lifetimes.iter().map(|(lifetimes, _)| lifetimes.ages.as_slice()))
}

pub(super) fn in_use(group: &Group) -> f64 {
    group.pool.total(Value::InuseSpace) + group.pool.total(Value::AtExitSpace)
}

/// `+41.0 KiB/s [33.0, 50.2]`, and without an interval `+41.0 KiB/s`.
pub(super) fn rate(grown: &Grown) -> (String, String) {
    let (figure, bounds) = rate_text(&grown.per_second);
    (figure, if bounds.is_empty() { bounds } else { format!(" {bounds}") })
}

/// Lines for a report that was not asked for suspects; empty if there are none.
pub(super) fn brief(context: &Context) -> Vec<String> {
    let groups = judged_groups(context);
    let found = find(context, &groups);
    if found.suspects.is_empty() {
        return Vec::new();
    }
    let mut lines = listed(context, &found, FEW);
    if found.suspects.len() > FEW {
        lines.push(context.paint(Style::Dim, "  … (heapbpf report --suspects has all)"));
    }
    lines
}

/// Lines of the report on suspects: the suspects, and stacks that are full.
pub(super) fn section(context: &Context) -> Vec<String> {
    let groups = judged_groups(context);
    let top = context.options.top;
    let found = find(context, &groups);
    if !groups.iter().any(|group| !ages(group).is_empty()) {
        let why = "this profile has no sample ages: only .json has them, if recorded without --no-live";
        let mut lines = vec![context.heading("Leak suspects")];
        lines.extend(wrap(why, context.width - 2).iter().map(|line| format!("  {line}")));
        return lines;
    }
    let mut lines = if found.suspects.is_empty() {
        let about = format!(" · {}", without_suspects(context, &groups, &found, "none"));
        vec![context.headed("Leak suspects", &about)]
    } else {
        listed(context, &found, top)
    };
    lines.extend(no_longer_growing(context, &found.full, top));
    lines
}

fn listed(context: &Context, found: &SuspectFindings, most: usize) -> Vec<String> {
    let about = format!(
        " · {} · {} judged · at most {} are chance",
        plural(found.suspects.len() as u64, "function"),
        plural(found.judged, "stack"),
        units::percent(CHANCE)
    );
    let mut lines = vec![context.headed("Leak suspects", &about)];
    for (number, suspect) in found.suspects.iter().take(most).enumerate() {
        let Some(first) = suspect.stacks.first() else { continue };
        let figure = suspect.grown.as_ref().map_or_else(|| held(context, first), rate);
        let in_use = suspect.grown.map(|_| format!(" · {} in use", units::bytes(suspect.inuse_bytes())));
        let several = (suspect.stacks.len() > 1).then(|| format!(" · {} stacks", suspect.stacks.len()));
        let about = [in_use, several].into_iter().flatten().collect::<String>();
        lines.push(head(context, number, &figure, &about));
        let mut chain = first.chain(context);
        chain.iter_mut().take(1).for_each(|(call, _)| call.name.clone_from(&suspect.name));
        lines.extend(first.calls(context, &chain, STACK_LINES));
        let holders = holders(context, suspect).map_or_else(String::new, |holders| format!("; {holders}"));
        lines.extend(indented(context, &(evidence(context, suspect) + &holders)));
    }
    if found.suspects.iter().take(most).any(|suspect| suspect.grown.is_some()) {
        let what = format!("growth of these functions {}; the rest of a program may shrink", lately(context));
        let what = wrap(&what, context.width - 2).into_iter();
        lines.extend(what.map(|line| context.paint(Style::Dim, &format!("  {line}"))));
    }
    lines
}

/// Which processes of a program a suspect is in: `in 2 of 6 processes: pid 1234 has 98 %`. `None` if the program has
/// only one, if the suspect's rows are those of several processes, or if the profile is merged, where one PID may be on
/// several hosts.
pub(super) fn holders(context: &Context, suspect: &Suspect) -> Option<String> {
    let processes = &context.profile.processes;
    let groups = Groups::new(context.profile, context.group_by);
    let name = &suspect.stacks.first()?.name;
    let program = (0..processes.len()).filter(|process| groups.of_process(*process) == *name);
    let number: u64 = program.map(|process| processes[process].count()).sum();
    let mut bytes: BTreeMap<u32, f64> = BTreeMap::new();
    for row in suspect.stacks.iter().flat_map(|group| &group.rows) {
        let program = processes.get(row.key.process)?;
        let process = match row.member {
            Some(member) => &program.members.get(member)?.process,
            None if program.count() == 1 => program,
            None => return None,
        };
        *bytes.entry(process.pid).or_default() += match &suspect.grown {
            Some(_) => row.growth.map_or(0.0, |growth| growth.kept.bytes - growth.freed.bytes),
            None => row.inuse.bytes + row.at_exit.bytes,
        };
    }
    bytes.retain(|_, bytes| *bytes > 0.0);
    let is_told_apart = number > 1 && context.profile.header.recordings == 1;
    let (pid, most) = bytes.iter().max_by(|a, b| a.1.total_cmp(b.1)).filter(|_| is_told_apart)?;
    let share = units::percent(most / bytes.values().sum::<f64>());
    Some(match bytes.len() {
        1 => format!("in 1 of {number} processes: pid {pid}"),
        some => format!("in {some} of {number} processes: pid {pid} has {share}"),
    })
}

/// ` 1  +41.0 KiB/s [33.0, 50.2] · 2.10 MiB in use`.
fn head(context: &Context, number: usize, (amount, more): &(String, String), about: &str) -> String {
    let number = context.paint(Style::Dim, &format!("{:>2}", number + 1));
    let amount = context.paint(Style::Bold, amount);
    format!("{number}  {amount}{}", context.paint(Style::Dim, &format!("{more}{about}")))
}

/// What a stack has in use or held at exit, with its interval.
fn held(context: &Context, group: &Group) -> (String, String) {
    let is_at_exit = group.pool.total(Value::InuseSpace) <= 0.0 && group.pool.total(Value::AtExitSpace) > 0.0;
    let (value, what) = if is_at_exit { (Value::AtExitSpace, "at exit") } else { (Value::InuseSpace, "in use") };
    let figure = context.figure(&group.pool, value);
    let bounds = if figure.bounds.is_empty() { String::new() } else { format!(" {}", figure.bounds) };
    (figure.figure, format!("{bounds} {what}"))
}

fn evidence(context: &Context, suspect: &Suspect) -> String {
    let found = match &suspect.why {
        Why::FreesNothing { left, kept } => {
            let kept =
                kept.map(|kept| format!(", {} of them allocated {}", units::count(kept as f64), lately(context)));
            let kept = kept.unwrap_or_default();
            return format!("none of {} was freed{kept}: a leak, or a cache that fills", plural(*left, "sample"));
        }
        Why::Grows => return format!("more was allocated than freed {}", lately(context)),
        Why::Outlives { found, .. } => found,
    };
    format!(
        "{} freed within {}; {} older than {}, after which {} freed, although {} would be expected",
        samples(found.freed, "was", "were"),
        units::seconds(found.usual_seconds),
        samples(found.older, "in use is", "in use are"),
        units::seconds(found.beyond_seconds),
        match found.freed_beyond {
            0 => "none was".to_owned(),
            1 => "1 was".to_owned(),
            n => format!("{} were", units::count(n as f64)),
        },
        units::count(found.expected_beyond.round().max(1.0)),
    )
}

/// `in the last 30 s`.
pub(super) fn lately(context: &Context) -> String {
    let over = context.profile.header.growth_over.unwrap_or_default();
    format!("in the last {}", units::seconds(over.as_secs_f64()))
}

fn samples(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", plural(number, "sample"), if number == 1 { one } else { many })
}

fn indented(context: &Context, text: &str) -> Vec<String> {
    let lines = wrap(text, context.width - INDENT);
    lines.iter().map(|line| format!("{:INDENT$}{}", "", context.paint(Style::Dim, line))).collect()
}

fn no_longer_growing(context: &Context, full: &[(&Group, f64)], most: usize) -> Vec<String> {
    if full.is_empty() {
        return Vec::new();
    }
    let about = format!(" · {}", plural(full.len() as u64, "stack"));
    let mut lines = vec![String::new(), context.headed("Full: nothing freed, and no longer growing", &about)];
    let chains = chains_apart(context, full.iter().take(most).map(|(group, _)| *group));
    for (number, ((group, seconds), chain)) in full.iter().zip(&chains).enumerate() {
        let (amount, bounds) = held(context, group);
        let about = format!(", since {}", units::seconds(*seconds));
        lines.push(head(context, number, &(format!("full at {amount}"), bounds), &about));
        lines.extend(group.calls(context, chain, STACK_LINES));
    }
    lines
}

//! Leak suspects: stacks some of whose blocks live far beyond the lifetimes of the others.

use heapbpf_statistics::growth::q_values;
use heapbpf_statistics::outliving::{self, Octave, Outliving};

use super::stacks::{Group, INDENT, judged_groups};
use super::{Context, chain, plural};
use crate::report::text::{Style, clip, width, wrap};
use crate::units;
use crate::value::Value;

/// q-value up to which a stack is listed: the share of listed ones that is expected to be chance, at most.
const CHANCE: f64 = 0.05;
/// Suspects in a report that does not ask for them.
const FEW: usize = 3;
/// Lines for the calls of a stack.
const STACK_LINES: usize = 2;

/// A stack, and what was found.
pub(super) struct Suspect<'a> {
    pub(super) group: &'a Group<'a>,
    pub(super) found: Outliving,
    pub(super) q_value: f64,
}

/// A stack of which nothing was freed, and that is still growing.
pub(super) struct Growing<'a> {
    pub(super) group: &'a Group<'a>,
    /// Samples in use.
    pub(super) left: u64,
    /// Those of them that are younger than half of the recording.
    pub(super) young: u64,
}

/// Lines of a report that does not ask for suspects; empty if there is none.
pub(super) fn brief(context: &Context) -> Vec<String> {
    let groups = judged_groups(context);
    let (suspects, judged) = suspects(&groups);
    if suspects.is_empty() {
        return Vec::new();
    }
    let mut lines = listed(context, &suspects, judged, FEW);
    if suspects.len() > FEW {
        lines.push(context.paint(Style::Dim, "  … (heapbpf report --suspects has all)"));
    }
    lines
}

/// Lines of the report of suspects: those that were found, and stacks of which nothing was freed.
pub(super) fn section(context: &Context) -> Vec<String> {
    let groups = judged_groups(context);
    let top = context.options.top;
    if !groups.iter().any(|group| !ages(group).is_empty()) {
        let why = "this profile has no ages of samples: only .json of a recording that followed frees has them";
        let mut lines = vec![context.heading("Leak suspects")];
        lines.extend(wrap(why, context.width - 2).iter().map(|line| format!("  {line}")));
        return lines;
    }
    let (suspects, judged) = suspects(&groups);
    let mut lines = if suspects.is_empty() {
        let about = format!(" · none of {} that can be judged", plural(judged, "stack"));
        vec![context.heading("Leak suspects") + &context.paint(Style::Dim, &about)]
    } else {
        listed(context, &suspects, judged, top)
    };
    lines.extend(growing(context, &groups, top));
    lines
}

pub(super) fn ages(group: &Group) -> Vec<Octave> {
    outliving::added(group.lifetimes.iter().map(|(lifetimes, _)| lifetimes.ages.as_slice()))
}

/// Suspects by their bytes in use, and the number of stacks that could be judged.
pub(super) fn suspects<'a>(groups: &'a [Group<'a>]) -> (Vec<Suspect<'a>>, u64) {
    let judged: Vec<(&Group, Outliving)> =
        groups.iter().filter_map(|group| outliving::outliving(&ages(group)).map(|found| (group, found))).collect();
    let q_values = q_values(&judged.iter().map(|(_, found)| found.p_value).collect::<Vec<_>>());
    let number = judged.len() as u64;
    let all = judged.into_iter().zip(q_values);
    let mut suspects: Vec<Suspect> = all
        .map(|((group, found), q_value)| Suspect { group, found, q_value })
        .filter(|it| it.q_value <= CHANCE)
        .collect();
    suspects.sort_by(|a, b| in_use(b.group).total_cmp(&in_use(a.group)));
    (suspects, number)
}

pub(super) fn in_use(group: &Group) -> f64 {
    group.pool.total(Value::InuseSpace) + group.pool.total(Value::AtExitSpace)
}

fn listed(context: &Context, suspects: &[Suspect], judged: u64, wanted: usize) -> Vec<String> {
    let title = "Leak suspects";
    let about = format!(
        " · {} of {} that can be judged · at most {} of them are expected to be chance",
        units::count(suspects.len() as f64),
        plural(judged, "stack"),
        units::percent(CHANCE)
    );
    let about = clip(&about, context.width.saturating_sub(width(title)));
    let mut lines = vec![context.heading(title) + &context.paint(Style::Dim, &about)];
    for (number, Suspect { group, found, q_value }) in suspects.iter().take(wanted).enumerate() {
        lines.push(head(context, number, group, &format!("q-value {}", q(*q_value))));
        lines.extend(calls(context, group));
        lines.extend(evidence(context, found));
    }
    lines
}

/// ` 1  1.20 MiB [0.9, 1.5] in use · q-value 1e-9`.
fn head(context: &Context, number: usize, group: &Group, about: &str) -> String {
    let held = group.pool.total(Value::InuseSpace) <= 0.0 && group.pool.total(Value::AtExitSpace) > 0.0;
    let (value, what) = if held { (Value::AtExitSpace, "at exit") } else { (Value::InuseSpace, "in use") };
    let figure = context.figure(&group.pool, value);
    let bounds = if figure.bounds.is_empty() { String::new() } else { format!(" {}", figure.bounds) };
    let number = context.paint(Style::Dim, &format!("{:>2}", number + 1));
    let amount = context.paint(Style::Bold, &figure.figure);
    format!(
        "{number}  {amount}{} {what}{}",
        context.paint(Style::Dim, &bounds),
        context.paint(Style::Dim, &format!(" · {about}"))
    )
}

fn calls(context: &Context, group: &Group) -> Vec<String> {
    let (lead, cut) = (group.name.as_ref(), group.cut.as_deref());
    let columns = context.width - INDENT;
    let lines = chain::lines(&group.chain(context), lead, cut, columns, STACK_LINES, context.options.color);
    lines.into_iter().map(|line| format!("{:INDENT$}{line}", "")).collect()
}

fn evidence(context: &Context, found: &Outliving) -> Vec<String> {
    let text = format!(
        "{} freed within {}; {} older than {}, after which {} freed where {} would be expected",
        was(found.freed),
        units::seconds(found.usual_seconds),
        are(found.older),
        units::seconds(found.beyond_seconds),
        match found.freed_beyond {
            0 => "none was".to_owned(),
            1 => "1 was".to_owned(),
            n => format!("{} were", units::count(n as f64)),
        },
        units::count(found.expected_beyond.round().max(1.0)),
    );
    indented(context, &text)
}

fn was(samples: u64) -> String {
    format!("{} {}", plural(samples, "sample"), if samples == 1 { "was" } else { "were" })
}

fn are(samples: u64) -> String {
    format!("{} in use {}", plural(samples, "sample"), if samples == 1 { "is" } else { "are" })
}

fn indented(context: &Context, text: &str) -> Vec<String> {
    let lines = wrap(text, context.width - INDENT);
    lines.iter().map(|line| format!("{:INDENT$}{}", "", context.paint(Style::Dim, line))).collect()
}

/// A q-value as `diff` writes it.
fn q(value: f64) -> String {
    if value < 0.001 { format!("{value:.1e}") } else { format!("{value:.3}") }
}

/// Octaves below this one are younger than half of the recording.
fn half_ns(context: &Context) -> u32 {
    (context.profile.header.duration / 2).as_nanos().max(1).ilog2()
}

/// Stacks of which nothing was freed, and that are still growing, by their bytes in use: there is no curve to live beyond.
pub(super) fn only_growing<'a>(context: &Context, groups: &'a [Group<'a>]) -> Vec<Growing<'a>> {
    let half_ns = half_ns(context);
    let mut found: Vec<Growing> = groups
        .iter()
        .filter_map(|group| {
            let ages = ages(group);
            let left: u64 = ages.iter().map(|octave| octave.left).sum();
            let is_young = |octave: &&Octave| octave.exponent < half_ns;
            let young: u64 = ages.iter().filter(is_young).map(|octave| octave.left).sum();
            let is_growing = ages.iter().all(|octave| octave.freed == 0) && young > 0 && young < left;
            (is_growing && in_use(group) > 0.0).then_some(Growing { group, left, young })
        })
        .collect();
    found.sort_by(|a, b| in_use(b.group).total_cmp(&in_use(a.group)));
    found
}

fn growing(context: &Context, groups: &[Group], wanted: usize) -> Vec<String> {
    let found = only_growing(context, groups);
    if found.is_empty() {
        return Vec::new();
    }
    let title = "Nothing freed, and still growing";
    let about =
        format!(" · {} · nothing to compare with: a leak, or a cache that fills", plural(found.len() as u64, "stack"));
    let about = clip(&about, context.width.saturating_sub(width(title)));
    let mut lines = vec![String::new(), context.heading(title) + &context.paint(Style::Dim, &about)];
    for (number, Growing { group, left, young }) in found.iter().take(wanted).enumerate() {
        let about = format!(
            "none of {} freed, {} younger than {}",
            plural(*left, "sample"),
            units::count(*young as f64),
            units::seconds(Octave::begin_seconds(half_ns(context)))
        );
        lines.push(head(context, number, group, &about));
        lines.extend(calls(context, group));
    }
    lines
}

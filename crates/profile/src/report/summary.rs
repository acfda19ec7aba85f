//! The answer at the head of a report of many processes: which programs hold and which allocate how much, how sure that is,
//! what was given up, and what to do about it.

use super::processes::{Entry, entries};
use super::{Context, plural};
use crate::group::GroupBy;
use crate::model::Profile;
use crate::report::text::{Style, clip, width};
use crate::units;
use crate::value::Value;

/// Programs that are named.
const PROGRAMS: usize = 3;
/// Columns of a line's title.
const TITLE: usize = 13;
/// Most lines of an item.
const MOST_LINES: usize = 2;

/// Lines of the answer.
pub(super) fn lines(context: &Context) -> Vec<String> {
    let by = if context.group_by == GroupBy::Process { GroupBy::Process } else { GroupBy::Program };
    let entries = entries(context, by);
    let mut lines = Vec::new();
    if context.profile.knows_some_inuse() {
        lines.extend(largest(context, &entries, Value::InuseSpace, "holding"));
    }
    lines.extend(largest(context, &entries, Value::AllocSpace, "allocating"));
    let given_up = given_up(context);
    if given_up.is_empty() {
        lines.extend(listed(context, "given up", vec![(Style::Dim, "nothing".into())]));
        return lines;
    }
    lines.extend(listed(context, "given up", given_up.into_iter().map(|text| (Style::Warning, text)).collect()));
    lines
}

/// The programs with the largest figures.
fn largest(context: &Context, entries: &[Entry], value: Value, title: &str) -> Vec<String> {
    let mut order: Vec<&Entry> = entries.iter().filter(|entry| entry.pool.total(value) > 0.0).collect();
    order.sort_by(|a, b| b.pool.total(value).total_cmp(&a.pool.total(value)));
    let text = |entry: &&Entry| {
        let figure = entry.figure(context, value);
        let bounds = if figure.bounds.is_empty() { String::new() } else { format!(" {}", figure.bounds) };
        (Style::Plain, format!("{} {}{bounds}", clip(&entry.name, context.width / 2), figure.figure))
    };
    if order.is_empty() { Vec::new() } else { listed(context, title, order.iter().take(PROGRAMS).map(text).collect()) }
}

/// A title and items, in at most [`MOST_LINES`] lines.
fn listed(context: &Context, title: &str, items: Vec<(Style, String)>) -> Vec<String> {
    listed_in(context, title, items, MOST_LINES)
}

/// A title and items, in at most `most` lines.
pub(super) fn listed_in(context: &Context, title: &str, items: Vec<(Style, String)>, most: usize) -> Vec<String> {
    let mut lines = vec![format!("  {title:<0$}", TITLE - 3)];
    let mut used = TITLE - 1;
    let begin = " ".repeat(TITLE - 1);
    let last = items.len().saturating_sub(1);
    for (index, (style, text)) in items.into_iter().enumerate() {
        let text = clip(&text, context.width - TITLE - 2);
        let end = if index == last { "" } else { " ·" };
        if used + 1 + width(&text) + width(end) > context.width {
            if lines.len() == most {
                break;
            }
            lines.push(begin.clone());
            used = TITLE - 1;
        }
        used += 1 + width(&text) + width(end);
        if let Some(line) = lines.last_mut() {
            line.push(' ');
            line.push_str(&context.paint(style, &text));
            line.push_str(&context.paint(Style::Dim, end));
        }
    }
    lines
}

/// What figures lack, each with the option that helps.
pub(super) fn given_up(context: &Context) -> Vec<String> {
    let profile = context.profile;
    let mut found = Vec::new();
    let mut add = |what: String, remedy: &str| {
        let remedy = if remedy.is_empty() { String::new() } else { format!(" ({remedy})") };
        found.push(what + &remedy);
    };
    let count = |name: &str| profile.counters.get(name).copied().unwrap_or(0);
    let share = |part: u64, of: u64| units::percent(part as f64 / of.max(1) as f64);
    let samples = context.whole.samples(Value::AllocSpace);
    if profile.header.unread.is_some() {
        add("the last records, not read in time".into(), "a larger -i");
    }
    let lost = profile.losses().alloc.samples;
    if lost > 0 {
        let of = samples.saturating_add(lost);
        add(format!("records of {} ({})", plural(lost, "sample"), share(lost, of)), "--ring-bytes");
    }
    if count("untracked") > 0 {
        let untracked = count("untracked");
        add(format!("the frees of {} ({})", plural(untracked, "sample"), share(untracked, samples)), "--live-max");
    }
    if profile.header.time_windows {
        add("what happened between time windows".into(), BUDGET);
    }
    match profile.without_inuse() as u64 {
        0 => {}
        processes => add(format!("what is in use in {}", plural(processes, "process")), BUDGET),
    }
    if let Some((processes, _)) = profile.inuse_since() {
        add(format!("older blocks in use in {}", plural(processes, "process")), BUDGET);
    }
    let late: u64 = late(profile);
    if late > 0 && !profile.header.time_windows {
        add(format!("the time before probes in {}", plural(late, "process")), "");
    }
    let cut: u64 = profile.rows.iter().filter(|row| row.key.stack.cut.is_some()).map(|row| row.alloc.samples).sum();
    if cut * 100 > samples {
        // Most lack a stack because there was no room for its copy, or a copy was too short.
        let remedy = if count("stacks_lost").saturating_mul(2) > cut { "--ring-bytes" } else { "--stack-bytes" };
        add(format!("whole stacks of {} of the samples", share(cut, samples)), remedy);
    }
    found
}

/// What helps where the overhead budget made heapbpf give something up.
const BUDGET: &str = "--max-overhead";

/// Number of processes that were hooked for a part of their time only.
fn late(profile: &Profile) -> u64 {
    profile.processes.iter().filter(|process| process.coverage < 0.9995).map(|process| process.count()).sum()
}

//! The answer at the top of a report about many processes: which programs hold and allocate how much, how certain that
//! is, what is missing, and what to do about it.

use std::collections::HashSet;

use super::processes::{Entry, entries};
use super::remarks::{cut_samples, is_about, is_in_no_figure};
use super::resident::unaccounted_bytes;
use super::{Context, TITLE, plural};
use crate::group::GroupBy;
use crate::model::Process;
use crate::report::text::{Style, clip, width};
use crate::units;
use crate::value::Value;
use heapbpf_audit::{Hook, Missing};

/// Maximum number of programs named.
const PROGRAMS: usize = 3;
/// Maximum number of lines per item.
pub(super) const MOST_LINES: usize = 2;

/// Lines of the answer.
pub(super) fn lines(context: &Context) -> Vec<String> {
    let by = if context.group_by == GroupBy::Process { GroupBy::Process } else { GroupBy::Program };
    let entries = entries(context, by);
    let mut lines = Vec::new();
    if context.profile.knows_some_inuse() {
        lines.extend(largest(context, &entries, Value::InuseSpace, "holding"));
    }
    lines.extend(largest(context, &entries, Value::AllocSpace, "allocating"));
    lines.extend(missed_lines(context, MOST_LINES));
    lines
}

/// What no figure has, on at most `most` lines.
pub(super) fn missed_lines(context: &Context, most: usize) -> Vec<String> {
    let mut items: Vec<_> = missed(context).into_iter().map(|text| (Style::Warning, text)).collect();
    if items.is_empty() {
        items.push((Style::Dim, "nothing".into()));
    }
    listed_in(context, "missed", items, most)
}

/// What no figure has, the largest first: memory, calls, and what was not hooked. Empty if nothing was missed.
fn missed(context: &Context) -> Vec<String> {
    let (least, most) = unaccounted_bytes(context);
    let mut missed = Vec::new();
    if least > 0.0 {
        let much = units::bytes(least);
        missed.push(format!("≥ {much} of other resident memory: mmap, a runtime's, or older"));
    }
    if most > 0.0 {
        missed.push(format!("≤ {} of resident memory of unknown use", units::bytes(most)));
    }
    missed.extend(given_up(context));
    let profile = context.profile;
    let not_hooked = profile.processes.iter().chain(&profile.idle).flat_map(|process| &process.missing);
    let not_hooked = not_hooked.map(|missing| &*missing.what);
    // That has already been reported.
    let (mut known, reported) = (HashSet::new(), [Missing::UNSEEN, Missing::EXACT_MAPPINGS]);
    let not_hooked: Vec<&str> = not_hooked.filter(|what| !reported.contains(what) && known.insert(*what)).collect();
    if let [first, rest @ ..] = not_hooked.as_slice() {
        let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
        missed.push(format!("{first}{more} (heapbpf doctor)"));
    }
    let is_other = |note: &&String| is_in_no_figure(note) && !not_hooked.iter().any(|what| is_about(note, what));
    let remarks = profile.notes.iter().filter(is_other).count() as u64;
    if remarks > 0 {
        missed.push(format!("see {} below", plural(remarks, "remark")));
    }
    missed
}

/// The programs with the largest figures.
fn largest(context: &Context, entries: &[Entry], value: Value, title: &str) -> Vec<String> {
    let mut order: Vec<&Entry> = entries.iter().filter(|entry| entry.pool.total(value) > 0.0).collect();
    order.sort_by(|a, b| b.pool.total(value).total_cmp(&a.pool.total(value)));
    let text = |entry: &&Entry| {
        let figure = entry.figure(context, value).text();
        (Style::Plain, format!("{} {figure}", clip(&entry.name, context.width / 2)))
    };
    let items: Vec<_> = order.iter().take(PROGRAMS).map(text).collect();
    if items.is_empty() { Vec::new() } else { listed_in(context, title, items, MOST_LINES) }
}

/// A title and items, on at most `most` lines. `…` stands for items that do not fit.
pub(super) fn listed_in(context: &Context, title: &str, items: Vec<(Style, String)>, most: usize) -> Vec<String> {
    let mut lines = vec![format!("  {title:<0$}", TITLE - 3)];
    let mut used = TITLE - 1;
    let begin = " ".repeat(TITLE - 1);
    let last = items.len().saturating_sub(1);
    for (index, (style, text)) in items.into_iter().enumerate() {
        // Leave space for the mark that more follows. The first item always fits.
        let text = clip(&text, context.width - TITLE - 2);
        let needed = 1 + width(&text) + if index == last { 0 } else { 2 };
        let fits = used + needed <= context.width;
        let is_full = !fits && lines.len() == most;
        if index > 0
            && let Some(line) = lines.last_mut()
        {
            line.push_str(&context.paint(Style::Dim, if is_full { " …" } else { " ·" }));
        }
        if is_full {
            break;
        }
        if !fits {
            lines.push(begin.clone());
            used = TITLE - 1;
        }
        used += needed;
        if let Some(line) = lines.last_mut() {
            line.push(' ');
            line.push_str(&context.paint(style, &text));
        }
    }
    lines
}

/// What figures lack, each with the option that helps.
fn given_up(context: &Context) -> Vec<String> {
    let profile = context.profile;
    let mut found = Vec::new();
    let mut add = |what: String, remedy: &str| {
        let remedy = if remedy.is_empty() { String::new() } else { format!(" ({remedy})") };
        found.push(what + &remedy);
    };
    let count = |name: &str| profile.counters.get(name).copied().unwrap_or(0);
    let share = |part: u64, of: u64| units::percent(part as f64 / of.max(1) as f64);
    let unseen: u64 = profile.processes.iter().filter(|it| it.was_unseen()).map(Process::count).sum();
    if unseen > 0 {
        let them = if unseen == 1 { "it" } else { "them" };
        add(format!("{} while another recording counted {them}", plural(unseen, "process")), "");
    }
    let samples = context.whole.samples(Value::AllocSpace);
    if profile.header.unread.is_some() {
        add("records that were not read in time".into(), "a larger -i");
    }
    let lost = profile.losses().alloc.samples;
    if lost > 0 {
        let of = samples.saturating_add(lost);
        add(format!("{}, {} of all", plural(lost, "lost sample"), share(lost, of)), "a larger -i");
    }
    if count("untracked") > 0 {
        let untracked = count("untracked");
        let remedy = match count("set_full") {
            0 => "--live-max",
            full if full < untracked => "--live-max, or a larger -i",
            _ => "a larger -i",
        };
        add(format!("frees of {}, {} of all", plural(untracked, "sample"), share(untracked, samples)), remedy);
    }
    if profile.header.time_windows {
        add("the time between time windows".into(), BUDGET);
    }
    match profile.without_inuse() as u64 {
        0 => {}
        processes => {
            let has_budget = profile.processes.iter().any(|it| it.inuse_unknown && may_be_of_budget(it));
            add(format!("memory in use in {}", plural(processes, "process")), if has_budget { BUDGET } else { "" });
        }
    }
    if let Some((processes, _)) = profile.inuse_since() {
        let has_budget = profile.processes.iter().any(|it| it.inuse_since.is_some() && may_be_of_budget(it));
        let what = format!("what {} allocated before frees were tracked", plural(processes, "process"));
        add(what, if has_budget { BUDGET } else { "" });
    }
    let is_late = |it: &&Process| it.coverage < 0.9995 && !it.was_unseen();
    let late: u64 = profile.processes.iter().filter(is_late).map(Process::count).sum();
    if late > 0 && !profile.header.time_windows {
        add(format!("part of the time of {}", plural(late, "process")), "");
    }
    let reasons = cut_samples(profile);
    let cut: u64 = reasons.values().sum();
    if let Some((most, _)) = reasons.into_iter().max_by_key(|(_, samples)| *samples).filter(|_| cut * 100 > samples) {
        // If an option helps, the reason names it: "… (see --stack-bytes)".
        let remedy = most.split_once("(see ").map_or(most, |(_, option)| option.trim_end_matches(')'));
        // Processes that are probed cannot wait.
        let can_wait = !profile.processes.iter().all(|process| process.hook == Some(Hook::Probe));
        let remedy = if can_wait { remedy } else { remedy.trim_start_matches("--lossless, or ") };
        add(format!("whole stacks of {} of the samples", share(cut, samples)), remedy);
    }
    found
}

/// The option that helps if heapbpf left something out to keep the overhead budget.
const BUDGET: &str = "--max-overhead";

/// Whether a budget may be why frees of a process were not tracked. It never is for inline hooks.
fn may_be_of_budget(process: &Process) -> bool {
    !process.was_unseen() && process.hook != Some(Hook::Inline)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Stack;
    use crate::report::{ReportOptions, report};
    use crate::testing;

    #[test]
    fn only_processes_with_inline_hooks_are_advised_to_wait() {
        let options = ReportOptions::default();
        let advice = |hook| {
            let mut profile = testing::small().only_process(1);
            profile.processes[0].hook = Some(hook);
            let cut = "the stacks ring was full (see --lossless, or a larger -i)";
            for row in &mut profile.rows {
                let whole = Stack::clone(&row.key.stack);
                row.key.stack = Stack { cut: Some(cut.into()), ..whole }.into();
            }
            given_up(&Context::new(&profile, &options)).pop()
        };
        let whole = |remedy| Some(format!("whole stacks of 100 % of the samples ({remedy})"));
        assert_eq!(advice(Hook::Inline), whole("--lossless, or a larger -i"));
        assert_eq!(advice(Hook::Probe), whole("a larger -i"));
    }

    /// Allocations hidden by another recording's inline hooks are in no figure. The report lists that first among what
    /// was missed, no figure of allocation has an error bar, and nothing claims that everything was counted.
    #[test]
    fn time_under_the_hooks_of_another_recording_is_missed() {
        let mut profile = testing::followed_again().only_process(0);
        let process = &mut profile.processes[0];
        process.missing = vec![heapbpf_audit::Missing::unseen()];
        (process.coverage, process.exact_alloc_bytes, process.exact_alloc_objects) = (0.625, None, None);
        let text = report(&profile, &ReportOptions::default());
        let missed = text.lines().find(|line| line.trim_start().starts_with("missed")).expect("missed");
        assert!(missed.contains("1 process while another recording counted it"), "{text}");
        assert!(
            !text.contains("part of the time") && !text.contains("the rest is missing") && !text.contains("budget"),
            "{text}"
        );
        assert!(text.contains("was counted for 62.5 % of its time in the recording"), "{text}");
        assert!(
            text.contains("no error bars for allocated figures of 1 process") && !text.contains("counted exactly"),
            "{text}"
        );
        let estimate = |value| crate::estimates::Pool::of(&profile.rows).estimate(&profile, value, 0.95).low;
        assert_eq!([Value::AllocSpace, Value::AllocObjects].map(estimate), [None, None]);
        let in_use = text.lines().find(|line| line.trim_start().starts_with("in use")).expect("in use");
        assert!(in_use.contains('[') && text.contains("only blocks since"), "{text}");
    }
}

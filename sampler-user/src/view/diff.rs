//! The comparison of two profiles as a text table.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use heapbpf_profile::diff::{Change, Diff, DiffFrame, Direction, FunctionChange, StackChange, Verdict};
use heapbpf_profile::escape::escaped;
use heapbpf_profile::naming::base_name;
use heapbpf_profile::report::text::{Column, Style, Table, clip_middle, width, wrap};
use heapbpf_profile::units;
use heapbpf_statistics::estimate::Estimate;

use super::TableOptions;

/// Parts of resident memory that changed by less than this share of it are left out.
const PART: f64 = 0.01;

/// The comparison as text: by function, or by stack.
pub fn table(diff: &Diff, options: &TableOptions) -> String {
    let mut lines = Vec::new();
    for total in &diff.totals {
        lines.push(format!(
            "{}: {} before, {} after; changed by {}",
            total.value,
            figure(total, &total.before),
            figure(total, &total.after),
            bounded(total, &total.change)
        ));
    }
    lines.extend(resident(diff).iter().flat_map(|text| wrap(text, options.width)));
    lines.extend(if options.stacks { by_stack(diff, options) } else { by_function(diff, options) });
    lines.extend(diff.notes.iter().map(|note| format!("! {}", escaped(note))));
    lines.push(String::new());
    lines.join("\n")
}

/// Resident memory before and after, with its parts that changed. `None` if either is unknown.
fn resident(diff: &Diff) -> Option<String> {
    let (before, after) = (diff.before.resident?, diff.after.resident?);
    let change = |before: u64, after: u64| {
        let sign = match after.cmp(&before) {
            Ordering::Less => "−",
            Ordering::Equal => "",
            Ordering::Greater => "+",
        };
        format!("{sign}{}", units::bytes(after.abs_diff(before) as f64))
    };
    let (was, is) = (before.total_bytes(), after.total_bytes());
    let parts = before.parts().into_iter().zip(after.parts());
    let changed = parts.filter(|((_, before), (_, after))| after.abs_diff(*before) as f64 >= PART * was.max(is) as f64);
    let changed: Vec<String> =
        changed.map(|((name, before), (_, after))| format!("{name} {}", change(before, after))).collect();
    let changed = if changed.is_empty() { String::new() } else { format!(" ({})", changed.join(", ")) };
    let [was_text, is_text] = [was, is].map(|bytes| units::bytes(bytes as f64));
    Some(format!("resident: {was_text} before, {is_text} after; changed by {}{changed}", change(was, is)))
}

/// The table of functions that changed.
fn by_function(diff: &Diff, options: &TableOptions) -> Vec<String> {
    let all = &diff.functions;
    let of = |verdict| all.iter().filter(|it| it.figures.verdict == Some(verdict)).count();
    let compared = all.len();
    let mut lines = vec![match (of(Verdict::Sure), of(Verdict::Maybe)) {
        _ if compared == 0 => "There is nothing to compare.".to_owned(),
        _ if all.iter().all(|it| it.figures.verdict.is_none()) => {
            format!("Whether chance explains the changes cannot be said ({compared} functions compared).")
        }
        (0, 0) => format!("No function changed by more than chance explains ({compared} compared)."),
        (sure, 0) => format!("{sure} of {compared} functions changed by more than chance explains:"),
        (sure, maybe) => {
            format!("{sure} of {compared} functions changed by more than chance explains, {maybe} more may have:")
        }
    }];
    let shown = &all[..compared.min(options.top)];
    if shown.is_empty() {
        return lines;
    }
    lines.push(String::new());
    lines.extend(rows_of_functions(shown, options));
    if compared > shown.len() {
        lines.push(format!("… and {} more", compared - shown.len()));
    }
    let reasons: BTreeSet<&str> = shown.iter().filter_map(|it| it.figures.reason).collect();
    lines.extend(reasons.into_iter().map(|reason| format!("cannot be judged: {reason}")));
    if all.iter().any(|it| it.figures.verdict.is_some()) {
        let text = format!(
            "sure: at most {} of these are expected to be chance · --stacks has stacks and q-values of growth",
            units::percent(diff.false_discovery_rate)
        );
        lines.extend(wrap(&text, options.width));
    }
    lines
}

/// The rows of functions below their header. On a narrow terminal, each function is on a line of its own.
fn rows_of_functions(shown: &[FunctionChange], options: &TableOptions) -> Vec<String> {
    let has_groups = shown.iter().any(|it| it.group != shown[0].group);
    let name = |FunctionChange { group, shown, place, .. }: &FunctionChange| {
        let lead = if has_groups { format!("{group}: ") } else { String::new() };
        let at = if place.is_empty() { String::new() } else { format!(" {place}") };
        format!("{lead}{shown}{at}")
    };
    let table = |has_names: bool| {
        let mut columns = vec![
            Column::right("#", Style::Dim).gap(1),
            Column::right("BEFORE", Style::Plain),
            Column::right("AFTER", Style::Plain),
            Column::left("CHANGE", Style::Bold),
            Column::left("", Style::Plain),
        ];
        columns.extend(has_names.then(|| Column::left("FUNCTION", Style::Name)));
        let mut table = Table::new(columns);
        for (number, change) in (1..).zip(shown) {
            let mut cells = cells(number.to_string(), &change.figures);
            cells.extend(has_names.then(|| clip_middle(&name(change), options.width * 2 / 5)));
            table.row(cells);
        }
        table
    };
    let (head, rows) = table(true).lines(options.width, false);
    let has_names = std::iter::once(&head).chain(&rows).all(|line| width(line) <= options.width);
    let (head, rows) = table(has_names).lines(options.width, options.color);
    let mut lines = vec![head];
    for (row, change) in rows.into_iter().zip(shown) {
        lines.push(row);
        lines.extend(
            (!has_names).then(|| format!("      {}", clip_middle(&name(change), options.width.saturating_sub(6)))),
        );
    }
    lines
}

/// The cells that both tables have.
fn cells(number: String, figures: &Change) -> Vec<String> {
    let [before, after] = [&figures.before, &figures.after].map(|it| figure(figures, it));
    vec![number, before, after, bounded(figures, &figures.change), said(figures)]
}

/// Returns a text such as `grew, sure`.
fn said(figures: &Change) -> String {
    let direction = match figures.direction {
        Direction::Grew => "grew",
        Direction::Shrank => "shrank",
        Direction::New => "new",
        Direction::Gone => "gone",
        Direction::Same => return "same".into(),
    };
    match figures.verdict {
        Some(Verdict::Sure) => format!("{direction}, sure"),
        Some(Verdict::Maybe) => format!("{direction}, maybe"),
        Some(Verdict::Chance) => format!("{direction}, chance"),
        None => direction.into(),
    }
}

/// The table of stacks, those that grew first.
fn by_stack(diff: &Diff, options: &TableOptions) -> Vec<String> {
    let mut lines = Vec::new();
    let compared = diff.stacks.len();
    let count = |which: fn(&Change) -> bool| diff.stacks.iter().filter(|stack| which(&stack.figures)).count();
    let judged = count(|figures| figures.q_value.is_some());
    let shrank = count(|figures| figures.verdict == Some(Verdict::Sure) && figures.change.estimate < 0.0);
    lines.push(match (count(|figures| figures.significant), shrank) {
        _ if judged == 0 && compared > 0 => {
            format!("Whether chance explains the changes cannot be said ({compared} compared).")
        }
        (0, 0) => format!("No stack grew by more than chance explains ({compared} compared)."),
        (1, 0) => format!("1 stack of {compared} grew by more than chance explains:"),
        (grew, 0) => format!("{grew} stacks of {compared} grew by more than chance explains:"),
        (grew, _) => format!("{grew} of {compared} stacks grew and {shrank} shrank by more than chance explains:"),
    });
    lines.push(String::new());
    let mut table = Table::new(vec![
        Column::right("#", Style::Dim),
        Column::right("BEFORE", Style::Plain),
        Column::right("AFTER", Style::Plain),
        Column::left("CHANGE", Style::Bold),
        Column::left("", Style::Plain).dispensable(1),
        Column::right("Q OF GROWTH", Style::Plain),
    ]);
    let shown = &diff.stacks[..compared.min(options.top)];
    for (number, stack) in (1..).zip(shown) {
        let figures = &stack.figures;
        let mut cells = cells(format!("{number}{}", if figures.significant { " *" } else { "" }), figures);
        cells.push(figures.q_value.map_or_else(|| "-".into(), probability));
        table.row(cells);
    }
    let (head, rows) = table.lines(options.width, options.color);
    lines.push(head);
    for (row, stack) in rows.into_iter().zip(shown) {
        lines.push(row);
        lines.extend(
            wrap(&chain(stack), options.width.saturating_sub(6)).into_iter().map(|line| format!("      {line}")),
        );
        if let Some(reason) = stack.figures.reason {
            lines.push(format!("      cannot be judged: {reason}"));
        }
    }
    if compared > shown.len() {
        lines.push(format!("… and {} more", compared - shown.len()));
    }
    if judged > 0 {
        lines.push(format!(
            "* q-value of growth up to {}: of the stacks so marked, at most that share is expected to be chance",
            diff.false_discovery_rate
        ));
    }
    lines
}

/// Returns the calls of a stack as in a report: the visible ones, with their lines, or with the module where a new one
/// begins.
fn chain(stack: &StackChange) -> String {
    let mut module = None;
    let mut calls = Vec::new();
    for DiffFrame { frame, name, .. } in stack.frames.iter().filter(|frame| frame.is_shown) {
        let place = match (&frame.file, frame.line) {
            (Some(file), Some(line)) => format!(" {}:{line}", base_name(file)),
            (Some(file), None) => format!(" {}", base_name(file)),
            (None, _) if frame.function.is_some() && frame.module.is_some() && frame.module != module => {
                format!(" {}", base_name(frame.module.as_deref().unwrap_or_default()))
            }
            _ => String::new(),
        };
        module = if frame.file.is_none() { frame.module.clone() } else { None };
        calls.push(format!("{name}{place}"));
    }
    // A profile may have no frames, only the function that was called.
    if calls.is_empty() && !stack.function.is_empty() {
        calls.push(stack.function.clone());
    }
    format!("{} · {}", stack.group, calls.join(" ← "))
}

/// A probability as text: `0.19`, `0.0042`, `3.1e-7`.
fn probability(value: f64) -> String {
    match value {
        ..0.001 => format!("{value:.1e}"),
        ..0.01 => format!("{value:.4}"),
        _ => format!("{value:.2}"),
    }
}

fn amount(change: &Change, value: f64) -> String {
    let text = if change.value.ends_with("bytes") { units::bytes(value.abs()) } else { units::count(value.abs()) };
    if value < 0.0 { format!("−{text}") } else { text }
}

fn figure(change: &Change, estimate: &Estimate) -> String {
    amount(change, estimate.estimate)
}

fn bounded(change: &Change, estimate: &Estimate) -> String {
    let sign = if estimate.estimate > 0.0 { "+" } else { "" };
    let figure = amount(change, estimate.estimate);
    match (estimate.low, estimate.high) {
        (Some(low), Some(high)) if low != high => {
            format!("{sign}{figure} [{}, {}]", amount(change, low), amount(change, high))
        }
        _ => format!("{sign}{figure}"),
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::diff::{DiffOptions, diff};
    use heapbpf_profile::testing;

    use super::*;

    #[test]
    fn what_cannot_be_judged_is_not_called_chance() {
        let text = |samples_known| {
            let mut profile = testing::small();
            profile.header.samples_known = samples_known;
            let found = diff(&profile, &profile, &DiffOptions::default());
            let [functions, stacks] =
                [false, true].map(|stacks| table(&found, &TableOptions { width: 100, color: false, top: 20, stacks }));
            assert_eq!(functions.contains("cannot be said"), !samples_known, "{functions}");
            stacks
        };
        assert!(text(true).contains("No stack grew by more than chance explains") && text(true).contains("* q-value"));
        let unknown = text(false);
        assert!(unknown.contains("cannot be said") && !unknown.contains("q-value"), "{unknown}");
        assert!(!unknown.contains("· ←"), "{unknown}");
    }

    /// A fixed leak is a decrease, and a renamed program matches.
    #[test]
    fn functions_changed_either_way_with_how_sure_that_is() {
        let text = |change: &dyn Fn(&mut heapbpf_profile::Profile)| {
            let (before, mut after) = (testing::small().only_process(0), testing::small().only_process(0));
            change(&mut after);
            let found = diff(&before, &after, &DiffOptions::default());
            table(&found, &TableOptions { width: 120, color: false, top: 20, stacks: false })
        };
        let fixed = text(&|after| {
            after.rows.retain(|row| row.key.stack.frames.iter().all(|it| it.function.as_deref() != Some("grow")))
        });
        assert!(fixed.contains("1 of 2 functions changed by more than chance explains"), "{fixed}");
        let line = fixed.lines().find(|line| line.contains("grow json.c:31")).expect("a row");
        assert!(line.contains("gone, sure") && line.contains('−'), "{fixed}");
        let renamed = text(&|after| after.processes[0].comm = "other".into());
        assert!(renamed.contains("No function changed by more than chance explains (2 compared)"), "{renamed}");
        let leaking = text(&|after| after.rows[0].inuse = testing::sums(60, 4_096, 524_288));
        let line = leaking.lines().find(|line| line.contains("grow json.c:31")).expect("a row");
        assert!(line.contains("grew, sure"), "{leaking}");
        assert!(leaking.lines().all(|line| line.chars().count() <= 120), "{leaking}");
    }

    #[test]
    fn resident_memory_is_compared_where_both_profiles_have_it() {
        let text = |before: &heapbpf_profile::Profile, after: &heapbpf_profile::Profile| {
            let options = TableOptions { width: 200, color: false, top: 20, stacks: false };
            table(&diff(before, after, &DiffOptions::default()), &options)
        };
        let before = testing::measured();
        let mut after = before.clone();
        assert!(text(&before, &after).contains("\nresident: 308 MiB before, 308 MiB after; changed by 0 B\n"));
        let resident = after.processes[0].resident.as_mut().expect("measured");
        resident.heap_bytes -= 100 << 20;
        resident.files_bytes += 20 << 20;
        resident.other_bytes += 1;
        let changed =
            "resident: 308 MiB before, 228 MiB after; changed by −80.0 MiB (heap −100 MiB, files +20.0 MiB)\n";
        assert!(text(&before, &after).contains(changed), "{}", text(&before, &after));
        // Nothing is known of the memory of a process that runs.
        after.processes[0].resident = None;
        assert!(!text(&before, &after).contains("resident:"));
        assert!(!text(&testing::small(), &after).contains("resident:"));
    }

    /// The q-value is about growth alone.
    #[test]
    fn a_stack_that_is_gone_is_no_stack_without_a_change() {
        let (mut before, mut after) = (testing::small().only_process(0), testing::small().only_process(0));
        before.rows[0].inuse = testing::sums(200, 70_000, 524_288);
        after.rows.remove(0);
        let found = diff(&before, &after, &DiffOptions::default());
        let text = table(&found, &TableOptions { width: 120, color: false, top: 20, stacks: true });
        assert!(text.contains("stacks grew and 1 shrank by more than chance explains:"), "{text}");
        let row = text.lines().find(|line| line.contains("gone, sure")).expect("a row");
        assert!(row.contains('−') && row.ends_with("1.00") && !row.contains('*'), "{text}");
    }

    #[test]
    fn on_a_narrow_terminal_each_function_has_a_line_of_its_own() {
        let (before, mut after) = (testing::small().only_process(0), testing::small().only_process(0));
        after.rows[0].inuse = testing::sums(60, 4_096, 524_288);
        let found = diff(&before, &after, &DiffOptions::default());
        let text = table(&found, &TableOptions { width: 60, color: false, top: 20, stacks: false });
        let row = text.lines().skip_while(|line| !line.contains("grew, sure")).take(2).collect::<Vec<_>>();
        assert!(row.len() == 2 && !row[0].contains("grow json.c") && row[1].contains("grow json.c:31"), "{text}");
        assert!(!text.contains("FUNCTION"), "{text}");
    }

    /// Stacks are shown as a report shows them.
    #[test]
    fn stacks_begin_with_the_programs_own_call_and_keep_their_lines() {
        let profile = testing::small();
        let found = diff(&profile, &profile, &DiffOptions::default());
        let chains: Vec<String> = found.stacks.iter().map(chain).collect();
        assert!(
            chains.iter().any(|chain| chain.starts_with("server · grow json.c:31 ← parse_value json.c:99 ← ")),
            "{chains:?}"
        );
        assert!(chains.iter().all(|chain| !chain.contains("malloc") && !chain.contains('(')), "{chains:?}");
    }

    #[test]
    fn probabilities_are_as_long_as_they_need_to_be() {
        for (value, text) in [(1.0, "1.00"), (0.187, "0.19"), (0.0042, "0.0042"), (3.14e-7, "3.1e-7")] {
            assert_eq!(probability(value), text);
        }
    }
}

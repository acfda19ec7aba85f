//! What changed between two profiles, as a text table.

use super::text::{Column, Style, Table, wrap};
use super::units;
use crate::profile::diff::{Change, Diff, StackChange};
use crate::sampling::estimate::Estimate;

/// How the comparison is shown.
#[derive(Clone, Copy, Debug)]
pub struct DiffTableOptions {
    /// Columns of the terminal.
    pub width: usize,
    /// Whether to use colours.
    pub color: bool,
    /// Most stacks shown.
    pub top: usize,
}

/// The comparison as text.
pub fn table(diff: &Diff, options: &DiffTableOptions) -> String {
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
    let significant = diff.stacks.iter().filter(|stack| stack.figures.significant).count();
    lines.push(match significant {
        0 => format!("No stack grew by more than chance explains ({} compared).", diff.stacks.len()),
        1 => format!("1 stack of {} grew by more than chance explains:", diff.stacks.len()),
        n => format!("{n} stacks of {} grew by more than chance explains:", diff.stacks.len()),
    });
    lines.push(String::new());
    let mut table = Table::new(vec![
        Column::right("#", Style::Dim),
        Column::right("BEFORE", Style::Plain),
        Column::right("AFTER", Style::Plain),
        Column::left("CHANGE", Style::Bold),
        Column::right("Q-VALUE", Style::Plain),
    ]);
    let shown = &diff.stacks[..diff.stacks.len().min(options.top)];
    for (number, stack) in (1..).zip(shown) {
        let figures = &stack.figures;
        table.row(vec![
            format!("{number}{}", if figures.significant { " *" } else { "" }),
            figure(figures, &figures.before),
            figure(figures, &figures.after),
            bounded(figures, &figures.change),
            figures.q_value.map_or_else(|| "-".into(), |q| format!("{q:.2e}")),
        ]);
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
    if diff.stacks.len() > shown.len() {
        lines.push(format!("… and {} more", diff.stacks.len() - shown.len()));
    }
    lines.push(format!(
        "* q-value up to {}: of the stacks so marked, at most that share is expected to be chance",
        diff.false_discovery_rate
    ));
    lines.extend(diff.notes.iter().map(|note| format!("! {note}")));
    lines.push(String::new());
    lines.join("\n")
}

fn chain(stack: &StackChange) -> String {
    let names: Vec<&str> = stack.frames.iter().map(|frame| frame.name.as_str()).collect();
    format!("{} · {} ← {}", stack.group, stack.function, names.join(" ← "))
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

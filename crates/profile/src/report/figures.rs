//! The table columns of figures and intervals, shared by stacks and functions.

use std::collections::BTreeSet;

use super::Context;
use crate::estimates::{Pool, SOME_NOT_FOLLOWED};
use crate::report::figure::FigureText;
use crate::report::text::{Column, Style, Table, wrap};
use crate::units;
use crate::value::Value;

/// Share of samples with an incomplete stack above which it is shown with a row, 0 to 1. Such samples lack callers, so
/// these callers' rows are too small.
const LEAST_INCOMPLETE: f64 = 0.05;
/// Maximum number of rows with which it is shown.
const MOST_INCOMPLETE: usize = 3;

/// A table of pools: number, share, up to five figures, and further columns from the caller.
pub(super) struct FigureTable {
    table: Table,
    rows: usize,
    /// Whether rows have numbers.
    numbered: bool,
    /// Whether some figures in use or at exit cover only some of the processes.
    partial: bool,
    /// Whether some figures have an interval.
    has_intervals: bool,
    /// Reasons why figures have no interval.
    reasons: BTreeSet<&'static str>,
    /// Which of the caller's columns has the name of a row.
    name: Option<usize>,
    /// Rows many of whose samples have incomplete stacks: name, and share of such samples.
    incomplete: Vec<(String, f64)>,
}

fn values(context: &Context) -> &'static [Value] {
    if !context.profile.header.live {
        return &[Value::AllocSpace, Value::AllocObjects];
    }
    match context.sort {
        Value::AtExitSpace | Value::AtExitObjects => {
            &[Value::AtExitSpace, Value::AtExitObjects, Value::AllocSpace, Value::AllocObjects]
        }
        Value::SwappedSpace => &[Value::SwappedSpace, Value::ResidentSpace, Value::InuseSpace, Value::InuseObjects],
        Value::ResidentSpace => {
            &[Value::ResidentSpace, Value::InuseSpace, Value::InuseObjects, Value::AllocSpace, Value::AllocObjects]
        }
        _ if context.is_partly_in_memory() => {
            &[Value::InuseSpace, Value::ResidentSpace, Value::InuseObjects, Value::AllocSpace, Value::AllocObjects]
        }
        _ => &[Value::InuseSpace, Value::InuseObjects, Value::AllocSpace, Value::AllocObjects],
    }
}

impl FigureTable {
    /// A table without rows. `numbered`: its rows will have numbers.
    pub(super) fn new(context: &Context, numbered: bool, more: &[Column]) -> Self {
        let mut columns = Vec::from_iter(numbered.then(|| Column::right("#", Style::Dim).gap(1)));
        columns.push(Column::right("SHARE", Style::Bold));
        let live = context.profile.header.live;
        for &value in values(context) {
            // On narrow terminals, intervals of counts are dropped first, then counts, then intervals of bytes.
            let (title, style, rank) = match value {
                Value::InuseSpace => ("IN USE", Style::Bold, 0),
                Value::AtExitSpace => ("AT EXIT", Style::Bold, 0),
                Value::ResidentSpace => ("IN MEMORY", Style::Plain, 1),
                Value::SwappedSpace => ("SWAPPED", Style::Plain, 1),
                Value::InuseObjects | Value::AtExitObjects => ("OBJECTS", Style::Plain, 5),
                Value::AllocSpace if live => ("ALLOCATED", Style::Plain, 1),
                Value::AllocSpace => ("ALLOCATED", Style::Bold, 0),
                Value::AllocObjects => ("CALLS", Style::Plain, 3),
            };
            columns.push(Column::right(title, style).dispensable(rank));
            columns.push(Column::left("", Style::Dim).gap(1).dispensable(rank + 1));
        }
        columns.extend(more.iter().cloned());
        let name = more.iter().position(|column| column.style == Style::Name);
        let (table, reasons, incomplete) = (Table::new(columns), BTreeSet::new(), Vec::new());
        Self { table, rows: 0, numbered, partial: false, has_intervals: false, reasons, name, incomplete }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, context: &Context, pool: &Pool, more: Vec<String>) {
        self.rows += 1;
        let total = context.whole.total(context.sort);
        let known = pool.knows(context.profile, context.sort);
        let share = if total > 0.0 && known { units::share(pool.total(context.sort) / total) } else { String::new() };
        let mut cells = if self.numbered { vec![self.rows.to_string(), share] } else { vec![share] };
        for &value in values(context) {
            let FigureText { figure, bounds, unbounded } =
                context.figure(pool, value).quiet_if_unseen(context.profile, pool, value);
            self.partial |= pool.is_partial(context.profile, value);
            self.has_intervals |= bounds.starts_with('[');
            self.reasons.extend(unbounded);
            cells.extend([figure, bounds]);
        }
        let name = self.name.and_then(|at| more.get(at)).filter(|_| pool.incomplete_share() > LEAST_INCOMPLETE);
        self.incomplete.extend(name.map(|name| (name.trim().to_owned(), pool.incomplete_share())));
        cells.extend(more);
        self.table.row(cells);
    }

    /// What a heading says about the intervals; empty if no figure has one.
    pub(super) fn about_intervals(&self, context: &Context) -> String {
        let text = || format!(" · [{} confidence intervals]", units::percent(context.options.confidence));
        if self.has_intervals { text() } else { String::new() }
    }

    /// The header and the rows.
    pub(super) fn lines(&self, context: &Context) -> (String, Vec<String>) {
        self.table.lines(context.width, context.options.color)
    }

    /// Remarks about the intervals and the stacks.
    pub(super) fn notes(&self, context: &Context) -> Vec<String> {
        let mut notes = Vec::new();
        if self.partial {
            let name = if context.sort.is_at_exit() { "at exit" } else { "in use" };
            notes.push(format!("{name}: {SOME_NOT_FOLLOWED}"));
        }
        if !self.reasons.is_empty() {
            let reasons: Vec<&str> = self.reasons.iter().copied().collect();
            notes.push(format!("~ no error bar: {}", reasons.join("; or: ")));
        }
        if context.whole.incomplete_share() > LEAST_INCOMPLETE && !self.incomplete.is_empty() {
            let shown = self.incomplete.iter().take(MOST_INCOMPLETE);
            let shown: Vec<String> =
                shown.map(|(name, share)| format!("{} of {name}", units::percent(*share))).collect();
            let more = if self.incomplete.len() > MOST_INCOMPLETE { ", …" } else { "" };
            notes.push(format!("samples whose stacks lack callers: {}{more}", shown.join(", ")));
        }
        let lines = notes.iter().flat_map(|note| wrap(note, context.width));
        lines.map(|line| context.paint(Style::Dim, &line)).collect()
    }
}

//! The processes, one line each, with estimates and exact counts.

use super::Context;
use crate::estimates::{Pool, exact};
use crate::group::process_name;
use crate::report::figure::FigureText;
use crate::report::text::{Column, Style, Table, clip};
use crate::units;
use crate::value::Value;
use heapbpf_statistics::calibrate::{SELF_CHECK_CONFIDENCE, SelfCheck, self_check};
use heapbpf_statistics::interval::Interval;

/// Most processes in the table.
const MOST: usize = 10;

/// Compares the estimate with the exact count, for bytes, or for calls if only their number has an interval (the
/// criterion `allocations`). `None` if there is no exact count or no interval.
pub(super) fn checked(context: &Context, process: usize, pool: &Pool) -> Option<SelfCheck> {
    let profile = context.profile;
    if !profile.header.samples_known || profile.header.interval == 0 {
        return None;
    }
    [Value::AllocSpace, Value::AllocObjects].into_iter().find_map(|value| {
        let counted = exact(profile, Some(process), value)? as f64;
        // Samples of allocations that were counted after the time of the samples are treated as missing.
        let later = &profile.processes[process].slack;
        let found = pool.raw_estimate_with(profile, value, SELF_CHECK_CONFIDENCE, later);
        let five_sigma = Interval { low: found.low?, high: found.high? };
        Some(self_check(pool.raw_total(value), pool.variance(value), five_sigma, counted))
    })
}

/// The pool of each process.
pub(super) fn pools(context: &Context) -> Vec<Pool> {
    let mut pools: Vec<Pool> = (0..context.profile.processes.len()).map(Pool::of_process).collect();
    for row in &context.profile.rows {
        if let Some(pool) = pools.get_mut(row.key.process) {
            pool.add(row);
        }
    }
    // A process without samples is bounded as well.
    for (index, pool) in pools.iter_mut().enumerate() {
        pool.allow_for(&context.intervals);
        pool.cover([index]);
    }
    pools
}

/// Lines of the section; empty if there is a single process and nothing to compare.
pub(super) fn section(context: &Context) -> Vec<String> {
    let profile = context.profile;
    let counted = profile.processes.iter().any(|process| process.exact_alloc_bytes.is_some());
    if profile.processes.is_empty() || (profile.processes.len() == 1 && !counted) {
        return Vec::new();
    }
    let pools = pools(context);
    let mut order: Vec<usize> = (0..pools.len()).collect();
    order.sort_by(|&a, &b| pools[b].total(context.sort).total_cmp(&pools[a].total(context.sort)).then(a.cmp(&b)));

    let mut columns = vec![Column::left("PROCESS", Style::Name).gap(2)];
    let mut figure = |title, rank| {
        columns.push(Column::right(title, Style::Bold));
        columns.push(Column::left("", Style::Dim).gap(1).dispensable(rank));
    };
    if profile.header.live {
        figure("IN USE", 4);
    }
    let has_at_exit = profile.has_at_exit();
    if has_at_exit {
        figure("AT EXIT", 4);
    }
    figure("ALLOCATED", 2);
    columns.push(Column::right("COUNTED EXACTLY", Style::Plain).dispensable(1));
    columns.push(Column::right("DIFFERS BY", Style::Plain).dispensable(3));
    columns.push(Column::right("HOOKED FOR", Style::Plain).dispensable(5));
    let mut table = Table::new(columns);
    for &index in order.iter().take(MOST) {
        let (process, pool) = (&profile.processes[index], &pools[index]);
        let ended = if process.ended { " ended" } else { "" };
        let mut cells = vec![clip(&process_name(process), context.width / 3) + ended];
        let values = [
            profile.header.live.then_some(Value::InuseSpace),
            has_at_exit.then_some(Value::AtExitSpace),
            Some(Value::AllocSpace),
        ];
        for value in values.into_iter().flatten() {
            // A process that has not ended has no figures at exit.
            let figure = match value {
                Value::AtExitSpace if !profile.may_hold_at_exit(index) && pool.total(value) == 0.0 => {
                    FigureText::default()
                }
                // A process that has ended has nothing in use.
                Value::InuseSpace if profile.may_hold_at_exit(index) => {
                    context.figure(pool, value).quiet_if_unseen(context.profile, pool, value)
                }
                value => context.figure(pool, value),
            };
            cells.extend([figure.figure, figure.bounds]);
        }
        cells.push(match (process.exact_alloc_bytes, process.exact_alloc_objects) {
            (Some(bytes), Some(calls)) => {
                format!("{} in {} calls", units::bytes(bytes as f64), units::count(calls as f64))
            }
            (Some(bytes), None) => units::bytes(bytes as f64),
            _ => "not counted".into(),
        });
        let sigmas = checked(context, index, pool).and_then(|check| check.z);
        cells.push(sigmas.map_or_else(String::new, |sigmas| format!("{sigmas:+.1} σ")));
        cells.push(units::percent(process.coverage));
        table.row(cells);
    }
    let title = if pools.len() == 1 { "Estimated and counted" } else { "Processes" };
    let (header, rows) = table.lines(context.width, context.options.color);
    let mut lines = vec![context.heading(title), header];
    lines.extend(rows);
    if order.len() > MOST {
        let rest = format!("  and {} more", units::count((order.len() - MOST) as f64));
        lines.push(context.paint(Style::Dim, &rest));
    }
    lines
}

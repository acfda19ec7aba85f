//! Draws the details of the selected row.

use heapbpf_profile::group::Groups;
use heapbpf_profile::report::chain::{Call, Chain, lines as chain_lines};
use heapbpf_profile::report::change_text;
use heapbpf_profile::report::text::{clip, clip_middle, clip_start};
use heapbpf_profile::{Process, units};
use ratatui_core::style::Style;

use super::canvas::Canvas;
use super::texts::joined;
use crate::details::{others, sparkline};
use crate::top::Top;
use crate::view::{Entry, RowId};
use crate::world::World;

impl Top {
    /// Draws everything about the selected row.
    pub(super) fn selection(&self, canvas: &mut Canvas, world: &World, entry: &Entry, first: usize, end: usize) {
        let theme = self.options.theme;
        let Some(details) = self.details.get(&entry.id) else { return };
        let [blocks, allocated, calls] = others(world, &self.leaves_of_row(world, entry)).map(|figure| figure.text());
        let rule = "─".repeat(canvas.width);
        canvas.put(0, first - 1, &rule, canvas.width, theme.dim());
        let columns = canvas.width - 1;
        let mut facts = Vec::new();
        if world.is_live() {
            facts.push(format!("in use {} in {blocks} blocks", details.size.text()));
        }
        facts.push(format!("allocated {allocated} in {calls} calls"));
        let mut more = Vec::new();
        if world.is_live() {
            let median = self.median(&entry.id).map(|seconds| format!("median lifetime {}", units::seconds(seconds)));
            more.push(median.unwrap_or_else(|| "median lifetime not known or longer".into()));
            let trend = sparkline(&details.series, 13);
            more.extend((!trend.is_empty()).then(|| format!("last minute {trend}")));
            more.extend(self.last_hour(world, entry));
        }
        more.extend(self.since_mark(world, entry));
        facts.extend(more);
        let mut lines: Vec<(String, Style)> =
            joined(&facts, columns - 1).into_iter().map(|line| (line, theme.plain())).collect();
        let left = end.saturating_sub(first + lines.len());
        lines.extend(self.places(world, entry, columns, left));
        for (line, (text, style)) in lines.into_iter().enumerate() {
            if first + line < end {
                canvas.put(1, first + line, &text, columns, style);
            }
        }
    }

    /// What a program had in use during the last hour, if a service remembers it.
    fn last_hour(&self, world: &World, entry: &Entry) -> Option<String> {
        let RowId::Program(program) = &entry.id else { return None };
        // Usually there is nothing to look for.
        (!self.past.is_empty() && !self.apart).then_some(())?;
        let process = process_of(world, *program)?;
        let is_other = |it: &Process| it.comm == process.comm && it.exe != process.exe;
        let series = self.past.get(&process.comm).filter(|_| !world.now.profile.processes.iter().any(is_other))?;
        let trend = sparkline(series, series.len());
        (!trend.is_empty()).then(|| format!("last hour {trend}"))
    }

    fn since_mark(&self, world: &World, entry: &Entry) -> Option<String> {
        let change = world.marked.as_ref()?.change(&entry.id)?;
        let (figure, bounds) = change_text(&change.change);
        let bounds = if bounds.is_empty() { bounds } else { format!(" {bounds}") };
        let judged = match (change.significant, change.q_value, change.reason) {
            (true, Some(_), _) => "significant",
            (false, Some(_), _) => "may be chance",
            (_, None, reason) => reason.unwrap_or("not tested"),
        };
        Some(format!("since the mark {figure}{bounds}: {judged}"))
    }

    /// The calls of the selected row with their source lines.
    fn places(&self, world: &World, entry: &Entry, columns: usize, most: usize) -> Vec<(String, Style)> {
        let theme = self.options.theme;
        let leaves = &world.leaves;
        let places = |function| (clip_start(&leaves.places(function).join(", "), columns), theme.dim());
        match &entry.id {
            RowId::Leaf(leaf) => {
                let stack = leaves.stack_of(*leaf);
                let calls = stack.calls.iter().map(|(call, repeated)| (leaves.get_call(*call).clone(), *repeated));
                let chain: Chain = calls.collect();
                if self.large {
                    let line = |(call, _): &(Call, bool)| clip(&format!("{}  {}", call.name, call.place), columns);
                    return chain.iter().take(most).map(line).map(|text| (text, theme.name())).collect();
                }
                let lead = leaves.program_name(leaves.program(*leaf));
                let limits = (most.max(1), most);
                let lines = chain_lines(&chain, lead, stack.cut.as_deref(), columns.saturating_sub(1), limits, false);
                lines.into_iter().map(|text| (text, theme.name())).collect()
            }
            RowId::Program(program) => {
                let name = leaves.program_name(*program);
                let exe = |process: &Process| format!("{} · {}", process.exe, process.allocators.join(", "));
                let exe = process_of(world, *program).map(exe);
                std::iter::once((name.to_owned(), theme.name())).chain(exe.map(|exe| (exe, theme.dim()))).collect()
            }
            RowId::Function(function) => {
                let name = clip_middle(leaves.function_name(*function), columns);
                vec![(name, theme.name()), places(*function)]
            }
            RowId::Path(path) => {
                let names: Vec<&str> = path.iter().map(|function| leaves.function_name(*function)).collect();
                let names = (clip_start(&names.join(" › "), columns), theme.name());
                std::iter::once(names).chain(path.last().map(|function| places(*function))).collect()
            }
        }
    }
}

/// The first process of a program.
fn process_of(world: &World, program: u32) -> Option<&Process> {
    let (name, profile) = (world.leaves.program_name(program), &*world.now.profile);
    let shown = Groups::new(profile, world.leaves.by());
    let is_of = |index: &usize| shown.of_process(*index) == name;
    (0..profile.processes.len()).find(is_of).map(|index| &profile.processes[index])
}

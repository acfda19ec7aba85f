//! The result of `heapbpf doctor` as text: the kernel, then each process with what is hooked and what is missed.

use std::collections::BTreeMap;

use heapbpf_audit::Missing;
use heapbpf_profile::report::text::{Column, Style, Table, clip, wrap};
use heapbpf_profile::units;
use heapbpf_record::cost::measure::Measured;

use crate::doctor::{Check, Diagnosis, InlineAudit, ProcessAudit, Symbols, Unwinding};

/// The whole text.
#[must_use]
pub fn diagnosis(diagnosis: &Diagnosis, width: usize, color: bool) -> String {
    let mut lines = summary(diagnosis, width, color);
    lines.push(Style::Bold.paint(&format!("Kernel {}", clip(&diagnosis.kernel.release, 60)), color));
    lines.extend(diagnosis.kernel.checks.iter().flat_map(|check| check_lines(check, width, color)));
    if let Some(costs) = &diagnosis.costs {
        lines.push(String::new());
        lines.extend(cost_lines(costs, width, color));
    }
    let is_short = diagnosis.processes.len() <= MOST_WHOLE;
    let (shown, omitted): (Vec<_>, Vec<_>) = diagnosis
        .processes
        .iter()
        .partition(|process| is_short || !process.missing.is_empty() || process.may_hide_memory());
    for process in shown {
        lines.push(String::new());
        lines.extend(process_lines(process, width, color));
    }
    lines.push(String::new());
    if !omitted.is_empty() {
        let text = format!(
            "{} more processes, of which nothing would be missed: --pid PID or --json shows them",
            omitted.len()
        );
        lines.extend(wrap(&text, width));
    }
    for missing in &diagnosis.missing {
        lines.extend(remark("!", missing, width).map(|line| Style::Warning.paint(&line, color)));
    }
    let unaccounted: u64 = diagnosis.processes.iter().filter_map(|process| process.unaccounted_bytes).sum();
    let is_unread = diagnosis.processes.iter().any(|process| process.memory_unread);
    lines.push(if diagnosis.ok && unaccounted > 0 {
        let much = units::bytes(unaccounted as f64);
        format!(
            "No call would be missed, but {much} of anonymous memory is in no known heap: see the lines marked with –"
        )
    } else if diagnosis.ok && is_unread {
        "No call would be missed, but not all memory could be read: see the lines marked with –".to_owned()
    } else if diagnosis.ok {
        "Nothing would be missed.".to_owned()
    } else {
        Style::Warning.paint("Something would be missed: see the lines marked with !", color)
    });
    lines.join("\n") + "\n"
}

/// Maximum number of processes for which those without remarks are listed as well.
const MOST_WHOLE: usize = 3;

/// Maximum number of processes and reasons in the summary.
const MOST: usize = 5;

/// For several processes, says before all details how many would be recorded completely, and what would be missed.
fn summary(diagnosis: &Diagnosis, width: usize, color: bool) -> Vec<String> {
    let processes = &diagnosis.processes;
    if processes.len() < 2 {
        return Vec::new();
    }
    let mut lines = vec![Style::Bold.paint(&format!("{} processes", processes.len()), color)];
    let (partly, whole): (Vec<_>, Vec<_>) = processes.iter().partition(|process| !process.missing.is_empty());
    let without = whole.iter().filter(|process| process.allocators.is_empty()).count();
    let hooked = || whole.iter().filter(|process| !process.allocators.is_empty());
    let unaccounted = hooked().filter(|process| process.unaccounted_bytes.is_some()).count();
    let unread = hooked().filter(|process| process.memory_unread).count();
    lines.push(format!("  ✓ {} complete", whole.len() - without - unaccounted - unread));
    if unaccounted > 0 {
        lines.push(format!("  – {unaccounted} with much memory in no known heap"));
    }
    if unread > 0 {
        lines.push(format!("  – {unread} whose memory could not be read"));
    }
    if without > 0 {
        lines.push(format!("  – {without} without an allocator to hook"));
    }
    if !partly.is_empty() {
        let text = format!("  ! {} of which something would be missed", partly.len());
        lines.push(Style::Warning.paint(&text, color));
    }
    let mut of_reason: BTreeMap<(&str, &str), Vec<&ProcessAudit>> = BTreeMap::new();
    for process in partly {
        for Missing { what, why } in &process.missing {
            of_reason.entry((what, why)).or_default().push(process);
        }
    }
    let mut reasons: Vec<_> = of_reason.into_iter().collect();
    reasons.sort_by_key(|(_, processes)| std::cmp::Reverse(processes.len()));
    for ((what, why), processes) in reasons.iter().take(MOST) {
        let name = |process: &&ProcessAudit| match process.pid {
            Some(pid) => format!("{} ({pid})", clip(&process.comm, 20)),
            None => clip(&process.comm, 20),
        };
        let mut names: Vec<String> = processes.iter().take(MOST).map(name).collect();
        if let Some(more @ 1..) = processes.len().checked_sub(MOST) {
            names.push(format!("{more} more"));
        }
        let missing = Missing::new(*what, format!("{why}: {}", names.join(", ")));
        lines.extend(remark("!", &missing, width).map(|line| Style::Warning.paint(&line, color)));
    }
    if let Some(more @ 1..) = reasons.len().checked_sub(MOST) {
        lines.push(format!("    and {more} more reasons (see below)"));
    }
    lines.push(String::new());
    lines
}

fn check_lines(check: &Check, width: usize, color: bool) -> Vec<String> {
    const NAME: usize = 24;
    let mark = match (check.ok, check.needed) {
        (true, _) => "✓",
        (false, true) => "!",
        (false, false) => "–",
    };
    let style = if check.ok || !check.needed { Style::Plain } else { Style::Warning };
    let text = wrap(&check.detail, width.saturating_sub(NAME + 6).max(20));
    let name = format!("  {mark} {:NAME$}", check.name);
    let indent = " ".repeat(NAME + 4);
    text.iter()
        .enumerate()
        .map(|(i, line)| {
            let begin = if i == 0 { &name } else { &indent };
            style.paint(format!("{begin}{line}").trim_end(), color)
        })
        .collect()
}

fn cost_lines(costs: &Measured, width: usize, color: bool) -> Vec<String> {
    let mut table = Table::new(vec![Column::left("WHAT", Style::Name), Column::right("NS", Style::Plain)]);
    let mut row = |what: &str, ns: f64| table.row(vec![what.to_owned(), format!("{ns:.0}")]);
    row(&format!("an allocation that is not sampled ({})", costs.allocation_kind), costs.costs.allocation_ns);
    row(&format!("a free of a block that is not tracked ({})", costs.free_kind), costs.costs.free_ns);
    if let Some(ns) = costs.inline_pair_ns {
        table.row(vec![
            "an allocation and its free, not sampled, with inline hooks".to_owned(),
            inline_ns(ns, costs.inline_is_bound),
        ]);
    }
    let mut row = |what: &str, ns: f64| table.row(vec![what.to_owned(), format!("{ns:.0}")]);
    row("what a sample adds, with its block's free", costs.costs.sample_ns);
    for (kind, ns) in &costs.nothing_ns {
        row(&format!("a probe that does nothing, {kind}"), *ns);
    }
    let (header, rows) = table.lines(width, color);
    let title = format!("What probes cost here ({}; CPU time of the target per call)", clip(&costs.allocator, 40));
    let mut lines = vec![Style::Bold.paint(&title, color), header];
    lines.extend(rows);
    if !costs.is_plausible() {
        let text = "something disturbed the measurement: try again with --measure";
        lines.push(Style::Warning.paint(&format!("  ! {text}"), color));
    }
    lines
}

/// Formats what inline hooks add to a pair. `is_bound`: the cost is below this figure and too small to measure.
pub(super) fn inline_ns(ns: f64, is_bound: bool) -> String {
    format!("{}{ns:.1}", if is_bound { "under " } else { "" })
}

fn process_lines(process: &ProcessAudit, width: usize, color: bool) -> Vec<String> {
    let comm = clip(&process.comm, 60);
    let title = process.pid.map_or_else(|| format!("Command {comm}"), |pid| format!("Process {pid} ({comm})"));
    let mut lines = vec![Style::Bold.paint(&title, color)];
    let allocators = if process.allocators.is_empty() { "none".into() } else { process.allocators.join(", ") };
    lines.push(format!("  allocators  {}", clip(&allocators, width.saturating_sub(14))));
    lines.extend(attached(process, width, color));
    for missing in &process.missing {
        lines.extend(remark("!", missing, width).map(|line| Style::Warning.paint(&line, color)));
    }
    for limit in &process.limits {
        lines.extend(remark("–", limit, width).map(|line| Style::Dim.paint(&line, color)));
    }
    for inline in &process.inline {
        let text = wrap(&inline_text(inline), width.saturating_sub(14).max(20));
        let begin = |index| if index == 0 { "  inline      " } else { "              " };
        lines.extend(text.iter().enumerate().map(|(index, line)| format!("{}{line}", begin(index))));
    }
    if !process.modules.is_empty() {
        lines.push(format!("  stacks      {}", stacks(process)));
        lines.push(format!("  names       {}", names(process)));
    }
    lines
}

/// Says what hooking the process inline would do and cost, or why it is not possible.
fn inline_text(inline: &InlineAudit) -> String {
    let file = clip(inline.file.rsplit('/').next().unwrap_or(&inline.file), 40);
    if let Some(why) = &inline.why_not {
        return format!("{file} would use probes, not inline hooks: {why}");
    }
    let replaced = units::bytes(inline.replaced_bytes as f64);
    let mut text =
        format!("{} functions in {file} would get inline hooks: {replaced} of code are replaced", inline.functions);
    if let (Some(pair), Some(probes)) = (inline.pair_ns, inline.probe_pair_ns) {
        text.push_str(&format!(
            "; malloc and free take {} ns more, with probes {probes:.0} ns",
            inline_ns(pair, inline.pair_is_bound)
        ));
    }
    if inline.has_seccomp_filter {
        text.push_str("; its seccomp filter may forbid that (checked while hooking)");
    }
    text
}

fn attached(process: &ProcessAudit, width: usize, color: bool) -> Vec<String> {
    if process.attach.is_empty() {
        return Vec::new();
    }
    let mut table = Table::new(vec![
        Column::left("FUNCTION", Style::Name),
        Column::left("PROBE", Style::Plain),
        Column::left("LINK", Style::Plain),
        Column::left("FILE", Style::Dim).dispensable(2),
        Column::left("WHERE", Style::Dim).dispensable(1),
    ]);
    for entry in &process.attach {
        let file = entry.file.rsplit('/').next().unwrap_or(&entry.file);
        table.row(vec![
            clip(&entry.function, 40),
            entry.kind.to_string(),
            entry.link.to_string(),
            clip(file, 40),
            clip(&entry.reason, 60),
        ]);
    }
    let (header, rows) = table.lines(width, color);
    std::iter::once(header).chain(rows).collect()
}

fn remark(mark: &str, remark: &Missing, width: usize) -> impl Iterator<Item = String> {
    let text = wrap(&format!("{}: {}", remark.what, remark.why), width.saturating_sub(4).max(20));
    let mark = mark.to_owned();
    text.into_iter().enumerate().map(move |(i, line)| format!("  {} {line}", if i == 0 { &mark } else { " " }))
}

fn stacks(process: &ProcessAudit) -> String {
    let by = |unwinding| process.modules.iter().filter(|module| module.unwinding == unwinding).count();
    let modules = by(Unwinding::CallFrames);
    let s = if modules == 1 { "" } else { "s" };
    let mut text = format!("{modules} module{s} by call frame information");
    let without: Vec<&str> = process
        .modules
        .iter()
        .filter(|module| module.unwinding != Unwinding::CallFrames)
        .map(|module| module.module.rsplit('/').next().unwrap_or(&module.module))
        .collect();
    if !without.is_empty() {
        text.push_str(&format!("; {} without it ({})", without.len(), clip(&without.join(", "), 80)));
    }
    if let Some(version) = &process.python {
        text.push_str(&format!("; functions of Python {version}"));
    }
    if let Some(version) = &process.java {
        text.push_str(&format!("; methods of Java {version}"));
    }
    text
}

fn names(process: &ProcessAudit) -> String {
    let mut counts: BTreeMap<Symbols, usize> = BTreeMap::new();
    process.modules.iter().for_each(|module| *counts.entry(module.symbols).or_default() += 1);
    let text = |(symbols, count): (&Symbols, &usize)| match symbols {
        Symbols::Lines => format!("{count} with lines"),
        Symbols::Functions => format!("{count} with functions"),
        Symbols::Exported => format!(
            "{count} with exported functions only (stripped: install debug symbols, or name a directory with --debug-dir)"
        ),
        Symbols::None => format!("{count} without names"),
    };
    counts.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use heapbpf_audit::{AttachEntry, LinkKind, ProbeKind};
    use heapbpf_record::cost::probe_costs::ProbeCosts;

    use super::*;
    use crate::doctor::{KernelAudit, ModuleAudit};

    /// With many processes, the summary comes first: how many are complete, and which miss what. Complete ones are not
    /// listed.
    #[test]
    fn many_processes_begin_with_a_summary() {
        let process = |pid, comm: &str, missing: Vec<Missing>| ProcessAudit {
            pid: Some(pid),
            comm: comm.into(),
            allocators: vec!["glibc 2.36".into()],
            missing,
            ..ProcessAudit::default()
        };
        let ifunc = || vec![Missing::new("valloc", "an IFUNC")];
        let mut processes: Vec<ProcessAudit> = (0..8).map(|pid| process(pid, "worker", ifunc())).collect();
        processes.extend((20..30).map(|pid| process(pid, "whole", Vec::new())));
        processes.push(ProcessAudit { allocators: Vec::new(), ..process(40, "static", Vec::new()) });
        processes.push(ProcessAudit { unaccounted_bytes: Some(30 << 20), ..process(50, "cache", Vec::new()) });
        processes.push(ProcessAudit { memory_unread: true, ..process(60, "sealed", Vec::new()) });
        let kernel = KernelAudit { release: "6.1.0".into(), link: None, checks: Vec::new() };
        let text = diagnosis(&Diagnosis::new(kernel, processes), 200, false);
        let expected = "21 processes\n  ✓ 10 complete\n  – 1 with much memory in no known heap\n  \
                        – 1 whose memory could not be read\n  – 1 without an allocator to hook\n  \
                        ! 8 of which something would be missed\n  \
                        ! valloc: an IFUNC: worker (0), worker (1), worker (2), worker (3), worker (4), 3 more\n\nKernel 6.1.0\n";
        assert!(text.starts_with(expected), "{text}");
        assert_eq!(text.matches("\nProcess ").count(), 10, "what is marked follows: {text}");
        assert!(text.contains("\n11 more processes, of which nothing would be missed: "), "{text}");
    }

    /// A process whose memory could not be read is not said to be recorded as a whole.
    #[test]
    fn memory_that_was_not_read_may_be_missed() {
        let last = |memory_unread| {
            let kernel = KernelAudit { release: "6.1.0".into(), link: None, checks: Vec::new() };
            let process = ProcessAudit { memory_unread, ..ProcessAudit::default() };
            diagnosis(&Diagnosis::new(kernel, vec![process]), 200, false).lines().next_back().map(str::to_owned)
        };
        assert_eq!(last(false).as_deref(), Some("Nothing would be missed."));
        assert!(last(true).is_some_and(|line| line.contains("not all memory could be read")));
    }

    #[test]
    fn what_is_missed_stands_out() {
        let check = |name, ok, needed, detail: &str| Check { name, ok, needed, detail: detail.into() };
        let kernel = KernelAudit {
            release: "6.1.0".into(),
            link: Some(LinkKind::Perf),
            checks: vec![check("BTF", true, true, ""), check("session links", false, false, "not before Linux 6.13")],
        };
        let process = ProcessAudit {
            pid: Some(12),
            comm: "ser\u{1b}ver".into(),
            allocators: vec!["glibc 2.36".into()],
            attach: vec![AttachEntry {
                file: "/lib/libc.so.6".into(),
                allocator: "glibc 2.36".into(),
                function: "malloc".into(),
                offset: 1,
                kind: ProbeKind::Emulated,
                link: LinkKind::Perf,
                reason: "+0x0 push".into(),
            }],
            missing: vec![Missing { what: "valloc".into(), why: "an IFUNC".into() }],
            inline: vec![
                InlineAudit {
                    file: "/lib/libc.so.6".into(),
                    functions: 14,
                    replaced_bytes: 24 << 10,
                    ..InlineAudit::default()
                },
                InlineAudit {
                    file: "/lib/x.so".into(),
                    why_not: Some("it is traced".into()),
                    ..InlineAudit::default()
                },
            ],
            python: Some("3.11".into()),
            java: Some("17.0.15".into()),
            modules: vec![ModuleAudit {
                module: "/lib/libc.so.6".into(),
                unwinding: Unwinding::CallFrames,
                symbols: Symbols::Exported,
                debug_file: None,
            }],
            ..ProcessAudit::default()
        };
        let costs = Measured {
            no_ops: None,
            identity: String::new(),
            allocator: "glibc 2.36".into(),
            allocation_kind: "emulated".into(),
            free_kind: "stepped".into(),
            bare_pair_ns: 8.0,
            costs: ProbeCosts { allocation_ns: 551.0, free_ns: 9000.0, sample_ns: 2500.0 },
            inline_pair_ns: Some(1.26),
            inline_is_bound: false,
            nothing_ns: [("emulated".to_owned(), 500.0), ("stepped".to_owned(), 500.0)].into(),
        };
        let bound = Measured { inline_is_bound: true, ..costs.clone() };
        let unsure = Diagnosis::new(kernel.clone(), vec![process.clone()]).with_costs(Some(bound));
        assert!(diagnosis(&unsure, 200, false).contains("take under 1.3 ns more"));
        let text = diagnosis(&Diagnosis::new(kernel, vec![process]).with_costs(Some(costs)), 80, false);
        for part in [
            "Kernel 6.1.0\n  ✓ BTF\n  – session links",
            "an allocation that is not sampled (emulated)",
            "551\n",
            "  ! something disturbed the measurement",
            "Process 12 (ser\\u{1b}ver)\n  allocators  glibc 2.36\n",
            "malloc    emulated  perf",
            "  ! valloc: an IFUNC\n",
            "an allocation and its free, not sampled, with inline hooks   1.3\n",
            "  inline      14 functions in libc.so.6 would get inline hooks: 24.0 KiB of code\n              are replaced; malloc \
             and free take 1.3 ns more, with probes 9551\n              ns\n",
            "  inline      x.so would use probes, not inline hooks: it is traced\n",
            "  stacks      1 module by call frame information; functions of Python 3.11; methods of Java \
             17.0.15\n",
            "1 with exported functions only",
            "Something would be missed",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }
}

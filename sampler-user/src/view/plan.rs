//! What each sampling interval observes and costs, as a text table.

use heapbpf_profile::model::Profile;
use heapbpf_profile::report::subject;
use heapbpf_profile::report::text::{Column, Style, Table, wrap};
use heapbpf_profile::units;
use heapbpf_statistics::plan::{Automatic, ClassPlan, Costs, PlanRow, Workload, automatic, rows};
use serde::Serialize;

use super::TableOptions;
use super::doctor::inline_ns;

/// A plan; `heapbpf plan --json` serializes it.
#[derive(Clone, Debug, Serialize)]
pub struct Preview {
    /// What the profile describes.
    pub subject: String,
    /// Estimated allocations per second.
    pub allocations_per_second: f64,
    /// Sites (stacks) observed in the profile.
    pub sites: usize,
    /// Length of the recording that the intervals are evaluated for, seconds.
    pub seconds: f64,
    /// Share of the allocations that the processes would count themselves (inline hooks); the others would trap.
    pub inline_share: f64,
    /// Costs of hooks and samples.
    pub costs: Costs,
    /// Origin of these costs.
    pub costs_from: CostsFrom,
    /// Whether the cost of inline hooks is an upper bound.
    pub inline_is_bound: bool,
    /// One row per interval.
    pub intervals: Vec<PlanRow>,
    /// The interval that `--interval auto` would choose. `None` if the profile does not say how much CPU time the
    /// processes used.
    pub automatic: Option<Automatic>,
    /// The best intervals by size class, for the same number of samples.
    pub classes: ClassPlan,
}

/// What hooks and samples cost, and who is hooked inline.
#[derive(Clone, Copy, Debug)]
pub struct Priced {
    /// The costs.
    pub costs: Costs,
    /// Their origin.
    pub from: CostsFrom,
    /// Whether the cost of inline hooks is an upper bound.
    pub inline_is_bound: bool,
    /// Whether processes are hooked inline unless they refuse that.
    pub hooks_inline: bool,
}

/// Origin of the costs of hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CostsFrom {
    /// The user gave them.
    User,
    /// They were measured on this machine.
    Machine,
    /// The same, except for that of inline hooks.
    Partly,
    /// They were measured on heapbpf's reference machines.
    Elsewhere,
}

impl Preview {
    /// The plan for a workload that was derived from a profile.
    pub fn new(profile: &Profile, workload: &Workload, priced: Priced, classes: &ClassPlan) -> Self {
        let Priced { costs, from: costs_from, inline_is_bound, .. } = priced;
        Self {
            subject: subject(profile),
            allocations_per_second: workload.classes.iter().map(|class| class.allocations).sum::<f64>() + 0.0,
            sites: workload.sites.len(),
            seconds: workload.seconds,
            inline_share: workload.inline_share,
            costs,
            costs_from,
            inline_is_bound,
            intervals: rows(workload, costs),
            automatic: automatic(workload, costs, None),
            classes: classes.clone(),
        }
    }
}

/// What hooks take, whatever the interval.
fn of_hooks(preview: &Preview) -> String {
    let Some(row) = preview.intervals.first() else { return String::new() };
    let inline = format!("inline hooks take {} of a CPU", units::at_most(row.inline_cpus, preview.inline_is_bound));
    let probes = format!("probes take {} of a CPU", units::percent(row.probe_cpus));
    if preview.inline_share <= 0.0 {
        probes
    } else if preview.inline_share < 1.0 {
        format!("{inline}, and {probes} where inline hooks were refused")
    } else {
        inline
    }
}

/// What `--interval auto` would choose.
fn of_automatic(preview: &Preview) -> String {
    let Some(Automatic { interval, .. }) = preview.automatic else {
        return "--interval auto depends on the CPU time of the processes, which this profile lacks: plan from running \
                processes (--pid PID), or from the .json of a recording with inline hooks."
            .into();
    };
    let of = if preview.inline_share > 0.5 { "the processes' CPU time" } else { "the probes" };
    let interval = units::bytes(interval as f64);
    format!("{interval}: the smallest interval whose samples cost under 1 % of {of} (--interval auto).")
}

/// What a call and a sample cost.
fn of_costs(preview: &Preview) -> String {
    let Preview { costs, inline_share, .. } = preview;
    let inline = inline_ns(costs.inline_ns, preview.inline_is_bound);
    let inline = (*inline_share > 0.0).then(|| format!("{inline} ns for inline hooks on an allocation and its free, "));
    let probes = units::count(costs.probe_ns);
    let probes = (*inline_share < 1.0).then(|| format!("{probes} ns for the probes of an allocation and its free, "));
    let from = match preview.costs_from {
        CostsFrom::User => "as given",
        CostsFrom::Machine => "as measured on this machine",
        CostsFrom::Partly => "as measured on this machine, except for inline hooks (on another virtual machine)",
        CostsFrom::Elsewhere => {
            "as measured on other virtual machines, because they could not be measured here (that needs root); set \
             yours with --inline-ns, --probe-ns and --sample-ns"
        }
    };
    let sample = units::count(costs.sample_ns);
    format!("Costs: {}{}{sample} ns for a sample, {from}.", inline.unwrap_or_default(), probes.unwrap_or_default())
}

/// The plan as text.
pub fn text(preview: &Preview, options: TableOptions) -> String {
    let calls = units::count(preview.allocations_per_second);
    let mut lines = vec![Style::Bold.paint(&preview.subject, options.color)];
    let hooks = format!("{calls} allocations a second: {}, whatever the interval", of_hooks(preview));
    lines.extend(wrap(&hooks, options.width));
    lines.push(String::new());
    let mut table = Table::new(vec![
        Column::right("INTERVAL", Style::Bold),
        Column::right("SAMPLES/S", Style::Plain),
        Column::right("CPU", Style::Plain),
        Column::right("SEEN FROM", Style::Plain),
        Column::right("UNSEEN AT MOST", Style::Plain).dispensable(3),
        Column::right("WITHIN 20 % FROM", Style::Plain).dispensable(2),
        Column::right("STACKS SEEN", Style::Plain).dispensable(1),
        Column::right("BYTES SEEN", Style::Plain),
    ]);
    let share = |share: Option<f64>| share.map_or_else(|| "-".into(), units::percent);
    for row in &preview.intervals {
        table.row(vec![
            units::bytes(row.interval as f64),
            units::count(row.samples_per_second),
            units::percent(row.sample_cpus),
            units::bytes(row.seen_from_bytes),
            units::bytes(row.unseen_at_most_bytes),
            units::bytes(row.within_fifth_from_bytes),
            share(row.sites_seen),
            share(row.bytes_seen),
        ]);
    }
    let (head, rows) = table.lines(options.width, options.color);
    lines.push(head);
    lines.extend(rows);
    lines.push(String::new());
    let mut say = |text: String| lines.extend(wrap(&text, options.width));
    say(format!(
        "SEEN FROM: a stack that allocates this much in {} s is seen with 95 % probability. STACKS and BYTES refer to \
         the {} stacks in the profile. CPU is what samples add.",
        units::count(preview.seconds),
        units::count(preview.sites as f64)
    ));
    say(of_automatic(preview));
    say(format!(
        "The best intervals by size class would reduce the variance of bytes in use to {} of that at one sample per {}, \
         with as many samples (--classes FILE writes them).",
        units::percent(preview.classes.variance_ratio),
        units::bytes(preview.classes.compared_with_interval_bytes as f64)
    ));
    say(of_costs(preview));
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::model::CPU_NS;
    use heapbpf_profile::testing;
    use heapbpf_profile::workload::workload;

    use super::*;

    /// A plan of the small profile. A third of its allocations were counted inline, the others by probes because their
    /// process refused inline hooks.
    fn preview(hooks_inline: bool, from: CostsFrom, cpu_ns: Option<u64>) -> Preview {
        let mut profile = testing::small();
        profile.counters.extend(cpu_ns.map(|ns| (CPU_NS.to_owned(), ns)));
        let workload = workload(&profile, hooks_inline);
        let classes = ClassPlan::best(&workload, 512 << 10, heapbpf_record::sampling::size_classes::first_size_like);
        let costs = Costs { probe_ns: 1_000.0, inline_ns: 1.26, sample_ns: 2_000.0 };
        Preview::new(&profile, &workload, Priced { costs, from, inline_is_bound: true, hooks_inline }, &classes)
    }

    fn has(preview: &Preview, parts: &[&str]) -> String {
        let shown = text(preview, TableOptions { width: 120, ..TableOptions::default() });
        // Lines are wrapped.
        let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in parts {
            assert!(words.contains(part), "{part:?} is missing in\n{shown}");
        }
        assert!(shown.lines().all(|line| heapbpf_profile::report::text::width(line) <= 120));
        words
    }

    #[test]
    fn the_plan_of_the_small_profile() {
        let plan = preview(false, CostsFrom::Elsewhere, None);
        let parts = [
            "64.0 MiB",
            "512 KiB",
            "SEEN FROM",
            "cost under 1 % of the probes (--interval auto)",
            "1,000 ns for the probes of an allocation",
            "--probe-ns",
            "--classes",
        ];
        let words = has(&plan, &parts);
        assert!(!words.contains("inline hooks"), "{words}");
        let given = Preview { costs_from: CostsFrom::User, ..plan };
        assert!(!has(&given, &[]).contains("--probe-ns"));
        let json = serde_json::to_value(&given).expect("plain data");
        assert_eq!(json["intervals"].as_array().map(Vec::len), Some(8));
    }

    #[test]
    fn inline_hooks_are_planned_for_where_they_were_not_refused() {
        let plan = preview(true, CostsFrom::Machine, Some(30_500_000_000));
        assert!(plan.inline_share > 0.0 && plan.inline_share < 1.0, "{plan:?}");
        let cost = "Costs: under 1.3 ns for inline hooks on an allocation";
        has(&plan, &["inline hooks take <0.1 % of a CPU, and probes take", cost]);
        let mostly = Preview { inline_share: 0.9, ..plan };
        has(&mostly, &["cost under 1 % of the processes' CPU time (--interval auto)"]);
        let unknown = Preview { automatic: None, ..mostly };
        has(&unknown, &["--interval auto depends on the CPU time of the processes, which this profile lacks"]);
        assert!(serde_json::to_value(&unknown).expect("plain data")["automatic"].is_null());
    }
}

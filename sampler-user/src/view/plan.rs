//! What each sampling interval observes and costs, as a text table.

use heapbpf_profile::model::Profile;
use heapbpf_profile::report::subject;
use heapbpf_profile::report::text::{Column, Style, Table, wrap};
use heapbpf_profile::units;
use heapbpf_statistics::plan::{Automatic, ClassPlan, Costs, PlanRow, Workload, automatic, rows};
use serde::Serialize;

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
    /// Costs of probes and samples.
    pub costs: Costs,
    /// Origin of these costs.
    pub costs_from: CostsFrom,
    /// One row per interval.
    pub intervals: Vec<PlanRow>,
    /// The smallest interval whose samples cost less than 1 % of the probes.
    pub automatic: Automatic,
    /// The best intervals by size class, for the same number of samples.
    pub classes: ClassPlan,
}

/// Origin of the costs of probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CostsFrom {
    /// The user gave them.
    User,
    /// They were measured on this machine.
    Machine,
    /// They were measured on heapbpf's reference machine.
    Elsewhere,
}

/// Options of the plan's table.
#[derive(Clone, Copy, Debug)]
pub struct PreviewOptions {
    /// Columns of the terminal.
    pub width: usize,
    /// Whether to use colours.
    pub color: bool,
}

impl Preview {
    /// The plan for a workload that was derived from a profile.
    pub fn new(
        profile: &Profile,
        workload: &Workload,
        costs: Costs,
        costs_from: CostsFrom,
        classes: &ClassPlan,
    ) -> Self {
        Self {
            subject: subject(profile),
            allocations_per_second: workload.classes.iter().map(|class| class.allocations).sum::<f64>() + 0.0,
            sites: workload.sites.len(),
            seconds: workload.seconds,
            costs,
            costs_from,
            intervals: rows(workload, costs),
            automatic: automatic(workload, costs, None),
            classes: classes.clone(),
        }
    }
}

/// The plan as text.
pub fn text(preview: &Preview, options: &PreviewOptions) -> String {
    let calls = units::count(preview.allocations_per_second);
    let probes = preview.intervals.first().map_or(0.0, |row| row.probe_cpus);
    let mut lines = vec![
        Style::Bold.paint(&preview.subject, options.color),
        format!("{calls} allocations a second: probes take {} of a CPU, whatever the interval", units::percent(probes)),
        String::new(),
    ];
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
         the {} stacks in the profile. CPU is what samples add to the probes.",
        units::count(preview.seconds),
        units::count(preview.sites as f64)
    ));
    say(format!(
        "{}: the smallest interval whose samples cost under 1 % of the probes (--hook probe --interval auto).",
        units::bytes(preview.automatic.interval as f64)
    ));
    say(format!(
        "The best intervals by size class would reduce the variance of bytes in use to {} of that at one sample per {}, \
         with as many samples (--classes FILE writes them).",
        units::percent(preview.classes.variance_ratio),
        units::bytes(preview.classes.compared_with_interval_bytes as f64)
    ));
    let from = match preview.costs_from {
        CostsFrom::User => "as given",
        CostsFrom::Machine => "as measured on this machine",
        CostsFrom::Elsewhere => {
            "as measured on an AMD EPYC under a hypervisor, because they could not be measured here (that needs root); \
             set yours with --probe-ns and --sample-ns"
        }
    };
    say(format!(
        "Costs: {} ns for the probes of an allocation and its free, {} ns for a sample, {from}.",
        units::count(preview.costs.probe_ns),
        units::count(preview.costs.sample_ns)
    ));
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::testing;
    use heapbpf_profile::workload::workload;

    use super::*;

    #[test]
    fn the_plan_of_the_small_profile() {
        let profile = testing::small();
        let workload = workload(&profile);
        let classes = ClassPlan::best(&workload, 512 << 10, heapbpf_record::sampling::size_classes::first_size_like);
        let costs = Costs { probe_ns: 1_000.0, sample_ns: 2_000.0 };
        let preview = Preview::new(&profile, &workload, costs, CostsFrom::Elsewhere, &classes);
        let shown = text(&preview, &PreviewOptions { width: 120, color: false });
        for expected in ["64.0 MiB", "512 KiB", "SEEN FROM", "--interval auto", "--probe-ns", "--classes"] {
            assert!(shown.contains(expected), "{expected:?} is missing in\n{shown}");
        }
        assert!(shown.lines().all(|line| heapbpf_profile::report::text::width(line) <= 120));
        let given = Preview { costs_from: CostsFrom::User, ..preview };
        assert!(!text(&given, &PreviewOptions { width: 120, color: false }).contains("--probe-ns"));
        let json = serde_json::to_value(&given).expect("plain data");
        assert_eq!(json["intervals"].as_array().map(Vec::len), Some(8));
    }
}

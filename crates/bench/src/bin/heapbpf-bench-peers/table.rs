//! The table of all profilers and workloads, in Markdown.

use std::collections::HashMap;

use heapbpf_bench::quantiles;

use super::peers::Peer;
use super::run::Measured;
use super::workloads::{WORKLOADS, Workload};

/// Results by profiler and workload: one for each successful round, and the last failure.
#[derive(Default)]
pub struct Results {
    runs: HashMap<(&'static str, &'static str), Vec<(usize, Measured)>>,
    failures: Vec<(&'static str, &'static str, String)>,
}

impl Results {
    /// Adds the result of a successful run.
    pub fn add(&mut self, peer: &Peer, workload: &Workload, round: usize, measured: Measured) {
        self.runs.entry((peer.name, workload.name)).or_default().push((round, measured));
    }

    /// Records that a run failed. A profiler and workload that failed before are recorded once.
    pub fn fail(&mut self, peer: &'static str, workload: &'static str, why: String) {
        if !self.failures.iter().any(|(failed, on, _)| (*failed, *on) == (peer, workload)) {
            self.failures.push((peer, workload, why));
        }
    }

    fn all(&self, peer: &str, workload: &str) -> &[(usize, Measured)] {
        let key = self.runs.keys().find(|(name, on)| *name == peer && *on == workload);
        key.map_or(&[], |key| self.runs[key].as_slice())
    }

    /// Median over the rounds.
    pub fn median(&self, peer: &str, workload: &str, of: impl Fn(&Measured) -> Option<f64>) -> Option<f64> {
        median(self.all(peer, workload).iter().filter_map(|(_, measured)| of(measured)).collect())
    }

    /// Median over the rounds of a comparison with another profiler in the same round.
    pub fn compared(
        &self,
        peer: &str,
        other: &str,
        workload: &str,
        of: impl Fn(&Measured, f64) -> f64,
        figure: impl Fn(&Measured) -> f64,
    ) -> Option<f64> {
        let others = self.all(other, workload);
        let values = self.all(peer, workload).iter().filter_map(|(round, measured)| {
            let same = others.iter().filter(|(at, _)| at == round).map(|(_, other)| figure(other)).collect();
            Some(of(measured, median(same)?))
        });
        median(values.collect())
    }

    /// The table, with failures below it.
    pub fn markdown(&self, peers: &[&Peer], workloads: &[&Workload]) -> String {
        let mut head = vec!["profiler".to_owned()];
        for workload in workloads {
            let added = if workload.paced { "% of a core" } else { "ns" };
            head.push(format!("{}: slow-down", workload.name));
            head.push(format!("+ {added} per {}", if workload.paced { "target" } else { workload.unit }));
        }
        let further = [
            "own CPU %",
            "own memory, MiB",
            "target's, MiB",
            "start, s",
            "events lost",
            "error: allocated",
            "in use",
            "leak",
        ];
        head.extend(further.map(str::to_owned));
        let mut lines = vec![head];
        for peer in peers {
            let mut line = vec![peer.name.to_owned()];
            for workload in workloads {
                let cpu = |measured: &Measured| measured.cpu_ns;
                let slow = self.compared(peer.name, "bare", workload.name, |own, bare| own.cpu_ns / bare, cpu);
                line.push(slow.map_or("–".into(), |slow| format!("{}×", figures(slow))));
                let added = if workload.paced {
                    let share = |measured: &Measured| measured.cpu_share;
                    self.compared(
                        peer.name,
                        peer.against,
                        workload.name,
                        |own, bare| 100.0 * (own.cpu_share - bare),
                        share,
                    )
                } else {
                    self.compared(peer.name, peer.against, workload.name, |own, bare| own.cpu_ns - bare, cpu)
                };
                let added = added.filter(|_| peer.name != peer.against && !peer.name.ends_with("no profiler"));
                line.push(added.map_or("–".into(), figures));
            }
            line.extend(self.further(peer.name));
            lines.push(line);
        }
        let mut text = String::new();
        for (at, line) in lines.iter().enumerate() {
            text += &format!("| {} |\n", line.join(" | "));
            if at == 0 {
                text += &format!("|{}\n", "---|".repeat(line.len()));
            }
        }
        for (peer, workload, why) in &self.failures {
            let why = why.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "/");
            text += &format!("\nFailed: {peer} on {workload}: {}\n", why.chars().take(200).collect::<String>());
        }
        text
    }

    /// The columns that do not depend on a workload.
    fn further(&self, peer: &str) -> Vec<String> {
        let dash = || "–".to_owned();
        let mib = |bytes: f64| figures(bytes / f64::from(1 << 20));
        let percent = |share: f64| format!("{} %", figures(100.0 * share));
        let some = |value: f64| (value > 0.0).then_some(value);
        let own = self.median(peer, "paced", |measured| some(measured.own_bytes as f64).map(|_| measured.own_share));
        let memory = self.median(peer, "mix", |measured| some(measured.own_bytes as f64));
        let target = self.median(peer, "mix", |measured| Some(measured.target_bytes as f64));
        let start = self.median(peer, "mix", |measured| some(measured.start_seconds));
        let lost: Vec<u64> = WORKLOADS
            .iter()
            .flat_map(|workload| self.all(peer, workload.name))
            .filter_map(|(_, measured)| measured.lost)
            .collect();
        let says_nothing = if memory.is_some() { "says nothing".to_owned() } else { dash() };
        vec![
            own.map_or_else(dash, |share| figures(100.0 * share)),
            memory.map_or_else(dash, mib),
            target.map_or_else(dash, mib),
            start.map_or_else(dash, figures),
            if lost.is_empty() { says_nothing } else { lost.iter().sum::<u64>().to_string() },
            self.median(peer, "mix", |measured| measured.allocated_error).map_or_else(dash, percent),
            self.median(peer, "mix", |measured| measured.in_use_error).map_or_else(dash, percent),
            self.median(peer, "leak", |measured| measured.leak_error).map_or_else(dash, percent),
        ]
    }
}

/// The median; `None` if there are no values.
pub fn median(values: Vec<f64>) -> Option<f64> {
    (!values.is_empty()).then(|| quantiles::median(&values))
}

/// A number with three significant digits, and thousands separated.
pub fn figures(value: f64) -> String {
    let size = value.abs();
    let digits = match size {
        _ if size >= 100.0 => {
            let digits = format!("{size:.0}");
            let grouped: Vec<&str> =
                digits.as_bytes().rchunks(3).rev().filter_map(|group| std::str::from_utf8(group).ok()).collect();
            grouped.join(",")
        }
        _ if size >= 10.0 => format!("{size:.1}"),
        _ if size == 0.0 => "0".into(),
        _ => format!("{size:.2}"),
    };
    format!("{}{digits}", if value < 0.0 { "−" } else { "" })
}

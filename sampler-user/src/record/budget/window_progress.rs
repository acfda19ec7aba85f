//! Progress of targets in time windows and in the pauses between them: reads their CPU clocks, and weights windows by
//! it.

use std::collections::HashMap;

use sampler_ebpf::abi::{Counters, ProcessKey};

use crate::cost::budget::IN_PROGRAMS;
use crate::cost::cpu_time::{self, Thread};
use crate::heap::windows::Weights;
use heapbpf_profile::units;
use heapbpf_statistics::window_weights::{CPU_BOUND_SHARE, Observed, Progress, own_share};

/// CPU time of processes in seconds, and when it was read (CLOCK_MONOTONIC).
#[derive(Debug, Default)]
struct Clocks {
    cpu: HashMap<ProcessKey, f64>,
    at_ns: u64,
}

impl Clocks {
    fn read<'a>(processes: impl Iterator<Item = &'a ProcessKey>, at_ns: u64) -> Self {
        let cpu = processes.filter_map(|process| Some((*process, cpu_time::of_process(process.tgid)?)));
        Self { cpu: cpu.collect(), at_ns }
    }
}

/// Most threads examined in each window for being CPU-bound. Two files are read for each.
const MOST_THREADS: usize = 512;

/// A thread is CPU-bound if it gives up the CPU voluntarily no more often than this in a pause and a window. Attaching
/// probes makes it wait, too.
const MOST_RESTS: u64 = 5;

/// A process when a window began, in seconds: CPU time used in the pause, its CPU clock, and its probe time up to then.
#[derive(Debug)]
struct Begun {
    pause_cpu: f64,
    cpu: f64,
    probes: f64,
}

/// Share of a process's CPU time that CPU-bound threads used from `then` to now, a time of `seconds`.
fn cpu_bound_share(process: &ProcessKey, then: &HashMap<u32, Thread>, seconds: f64) -> f64 {
    if then.is_empty() {
        return 0.0;
    }
    let (mut cpu_bound, mut all) = (0.0, 0.0);
    for (id, now) in cpu_time::threads(process.tgid, MOST_THREADS) {
        let Some(then) = then.get(&id) else { continue };
        let ran = now.ran - then.ran;
        all += ran;
        if now.voluntary_switches <= then.voluntary_switches + MOST_RESTS
            || ran + now.waited - then.waited > CPU_BOUND_SHARE * seconds
        {
            cpu_bound += ran;
        }
    }
    if all > 0.0 { cpu_bound / all } else { 0.0 }
}

/// Progress of all targets.
#[derive(Debug, Default)]
pub struct WindowProgress {
    /// CPU clocks when the probes had been detached.
    detached: Clocks,
    /// Threads at that time, of the processes that call most.
    threads: HashMap<ProcessKey, HashMap<u32, Thread>>,
    /// CPU clocks right before the probes were attached again.
    paused: Clocks,
    begun: HashMap<ProcessKey, Begun>,
    processes: HashMap<ProcessKey, Progress>,
    /// Progress of all processes whose clocks were read, taken together. It stands for processes that started in
    /// between.
    together: Progress,
    /// CPU time and probe time of slowed processes in windows, in seconds.
    slowed_cpu: f64,
    slowed_probes: f64,
}

impl WindowProgress {
    /// Notes that the probes have been detached.
    pub fn detached(&mut self, counts: &HashMap<ProcessKey, Counters>, now_ns: u64) {
        self.detached = Clocks::read(counts.keys(), now_ns);
        let mut processes: Vec<&ProcessKey> = self.detached.cpu.keys().collect();
        processes.sort_by_key(|process| std::cmp::Reverse(counts.get(process).map_or(0, Counters::hits)));
        let mut room = MOST_THREADS;
        let threads = processes.into_iter().map_while(|process| {
            let threads = (room > 0).then(|| cpu_time::threads(process.tgid, room))?;
            room -= threads.len();
            Some((*process, threads))
        });
        self.threads = threads.collect();
    }

    /// Notes that the probes are about to be attached again.
    pub fn before_window(&mut self, now_ns: u64) {
        self.paused = Clocks::read(self.detached.cpu.keys(), now_ns);
    }

    /// Notes that the probes are attached. `probe_seconds`: probe time of counts; `pause_seconds`: length of the whole
    /// pause, including attaching and detaching.
    pub fn begin_window(
        &mut self,
        counts: &HashMap<ProcessKey, Counters>,
        probe_seconds: impl Fn(&Counters) -> f64,
        pause_seconds: f64,
    ) {
        let read_ns = self.paused.at_ns.saturating_sub(self.detached.at_ns).max(1);
        let all_of_it = pause_seconds / (read_ns as f64 * 1e-9);
        let begun = self.paused.cpu.iter().filter_map(|(process, cpu)| {
            let used = (cpu - self.detached.cpu.get(process)?).max(0.0);
            let probes = counts.get(process).map_or(0.0, &probe_seconds);
            let cpu = cpu_time::of_process(process.tgid)?;
            Some((*process, Begun { pause_cpu: used * all_of_it, cpu, probes }))
        });
        self.begun = begun.collect();
    }

    /// Ends the window and returns its weights.
    pub fn end_window(
        &mut self,
        counts: &HashMap<ProcessKey, Counters>,
        probe_seconds: impl Fn(&Counters) -> f64,
        (pause, window): (f64, f64),
    ) -> Weights {
        let length = Observed { pause, window, ..Observed::default() };
        let (mut all, mut known) = (length, HashMap::new());
        for (process, begun) in std::mem::take(&mut self.begun) {
            let Some(cpu) = cpu_time::of_process(process.tgid) else { continue };
            let probes = counts.get(&process).map_or(0.0, &probe_seconds) - begun.probes;
            let window_cpu = (cpu - begun.cpu).max(0.0);
            let threads = self.threads.get(&process).filter(|_| probes > 0.0);
            let cpu_bound = threads.map_or(0.0, |then| cpu_bound_share(&process, then, pause + window));
            let seen = Observed {
                pause_cpu: begun.pause_cpu,
                window_cpu,
                bound_cpu: cpu_bound * window_cpu,
                probes: probes.max(0.0),
                ..length
            };
            all = all.and(&seen);
            let progress = self.processes.entry(process).or_default();
            known.insert(process, progress.factor(&seen));
            if seen.is_slowed() {
                self.slowed_cpu += seen.window_cpu;
                self.slowed_probes += seen.probes;
            }
        }
        self.processes.retain(|process, _| known.contains_key(process));
        Weights { others: if known.is_empty() { length.by_time() } else { self.together.factor(&all) }, known }
    }

    /// Ends the recording in a pause. Returns how many more times its own length the last window stands for. `by_time`:
    /// the same by the clock.
    pub fn end(&mut self, pause: f64, by_time: f64) -> Weights {
        let known = self.processes.iter_mut().map(|(process, progress)| {
            let now = cpu_time::of_process(process.tgid).zip(self.detached.cpu.get(process));
            (*process, progress.more(pause, now.map(|(now, then)| (now - then).max(0.0)), by_time))
        });
        Weights { known: known.collect(), others: self.together.more(pause, None, by_time) }
    }

    /// A note for the user.
    pub fn note(&self) -> Option<String> {
        if self.slowed_cpu <= 0.0 {
            return None;
        }
        let share = self.slowed_probes / self.slowed_cpu;
        let [less, usual, more] = IN_PROGRAMS;
        // Figures are divided by the share of CPU time that is left to the targets.
        let times = |cost: f64| own_share(share) / (1.0 - share * cost / usual);
        let most = if share * more / usual < 0.95 {
            format!("{:.2} times that", times(more))
        } else {
            "many times that, which only a larger budget can tell".into()
        };
        Some(format!(
            "in those windows probes took some {} of the CPU time of targets that they slow down: what was seen of these \
             is weighed by the CPU time that was left to them. A probe costs {less} to {more} times what it does in a \
             loop, depending on the program: what is given may have been {:.2} times that, or {most}",
            units::percent(share.min(1.0)),
            times(less)
        ))
    }
}

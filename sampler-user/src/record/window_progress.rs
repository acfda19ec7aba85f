//! What targets get done in time windows and in the pauses between them: reads their clocks, and weighs windows by it.

use std::collections::HashMap;

use sampler_ebpf::abi::{Counters, ProcessKey};

use crate::cost::budget::IN_PROGRAMS;
use crate::cost::cpu_time::{self, Thread};
use crate::heap::windows::Weights;
use crate::sampling::window_weights::{Observed, Progress, RESTLESS};
use crate::view::units;

/// CPU time of processes, seconds, and when it was read, CLOCK_MONOTONIC.
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

/// Threads that are asked whether they have time to spare, in each window: two files are read for each.
const MOST_THREADS: usize = 512;

/// A thread that gives up the processor by itself no more often than this in a pause and a window has no time to spare:
/// putting probes on makes it wait, too.
const MOST_RESTS: u64 = 5;

/// A process when a window began: CPU time used in the pause, on its clock, and the probes' up to then, seconds.
#[derive(Debug)]
struct Begun {
    pause_cpu: f64,
    cpu: f64,
    probes: f64,
}

/// The share of a process's CPU time that threads without time to spare used, from `then` to now, in `seconds`.
fn restless_share(process: &ProcessKey, then: &HashMap<u32, Thread>, seconds: f64) -> f64 {
    if then.is_empty() {
        return 0.0;
    }
    let (mut restless, mut all) = (0.0, 0.0);
    for (id, now) in cpu_time::threads(process.tgid, MOST_THREADS) {
        let Some(then) = then.get(&id) else { continue };
        let ran = now.ran - then.ran;
        all += ran;
        if now.rests <= then.rests + MOST_RESTS || ran + now.waited - then.waited > RESTLESS * seconds {
            restless += ran;
        }
    }
    if all > 0.0 { restless / all } else { 0.0 }
}

/// Progress of all targets.
#[derive(Debug, Default)]
pub struct WindowProgress {
    /// When the probes were gone.
    detached: Clocks,
    /// Threads of processes then, of those that call most.
    threads: HashMap<ProcessKey, HashMap<u32, Thread>>,
    /// When they were about to be put on again.
    paused: Clocks,
    begun: HashMap<ProcessKey, Begun>,
    processes: HashMap<ProcessKey, Progress>,
    /// Of those together whose clocks were read: it stands for the others, which came in between.
    together: Progress,
    /// CPU time and probe time of slowed processes in windows.
    slowed_cpu: f64,
    slowed_probes: f64,
}

impl WindowProgress {
    /// The probes are gone.
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

    /// They are about to be put on again.
    pub fn before_window(&mut self, now_ns: u64) {
        self.paused = Clocks::read(self.detached.cpu.keys(), now_ns);
    }

    /// They are in place. `probe_seconds`: of counts; `pause_seconds`: the pause in all, putting on and taking off included.
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

    /// The window ends: what it stands for.
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
            let restless = threads.map_or(0.0, |then| restless_share(&process, then, pause + window));
            let seen = Observed {
                pause_cpu: begun.pause_cpu,
                window_cpu,
                restless_cpu: restless * window_cpu,
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

    /// The recording ends in a pause: how many times itself more the last window stands for. `by_time`: by the clock.
    pub fn end(&mut self, pause: f64, by_time: f64) -> Weights {
        let known = self.processes.iter_mut().map(|(process, progress)| {
            let now = cpu_time::of_process(process.tgid).zip(self.detached.cpu.get(process));
            (*process, progress.more(pause, now.map(|(now, then)| (now - then).max(0.0)), by_time))
        });
        Weights { known: known.collect(), others: self.together.more(pause, None, by_time) }
    }

    /// What the user must know.
    pub fn note(&self) -> Option<String> {
        if self.slowed_cpu <= 0.0 {
            return None;
        }
        let share = self.slowed_probes / self.slowed_cpu;
        let [less, usual, more] = IN_PROGRAMS;
        // What is seen is divided by what is left.
        let times = |cost: f64| (1.0 - share) / (1.0 - share * cost / usual);
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

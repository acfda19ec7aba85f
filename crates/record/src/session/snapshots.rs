//! Snapshots of a running recording, for clients and for numbered files, and its current status.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_attach::inline::InlineHooks;
use heapbpf_host::clock::thread_cpu_time;
use heapbpf_host::processes::GenerationId;
use heapbpf_kernel::mappings::MappingProbes;
use heapbpf_kernel::totals;
use heapbpf_profile::model::Process;
use sampler_ebpf::abi::{Counters, LivingThread, ProcessKey};

use super::cut::Cut;
use super::errors::Step;
use super::state::Session;
use crate::attaching::runtimes::GoProcess;
use crate::budget::activity::CpuTime;
use crate::intake::counters::DaemonCounters;
use crate::outputs::files::SnapshotFiles;
use crate::outputs::status_line::Status;
use crate::profiles::accounting::{self, Missing, Remedies};
use crate::profiles::capture::Parts;
use crate::profiles::requests::{Request, Unanswered};
use crate::profiles::snapshot::{Content, Detail, GoTarget, Measured, Snapshot};
use crate::stats::Stats;

/// The note of a profile whose counters could not be read.
const WITHOUT_COUNTERS: &str = "the kernel's counters could not be read at the end: there are no exact totals, and what \
                                was lost is unknown";

/// The note of a profile with processes whose frees are, or last were, hidden by inline hooks of another heapbpf.
const HIDDEN_IN_USE: &str =
    "memory in use is unknown for processes that another recording counts: their frees are not recorded";

/// Number of blocks, of all processes together, whose place in memory is read: for a profile that is requested again
/// and again, and for any other.
const BLOCKS_OF_A_REFRESH: usize = 4096;
const BLOCKS_OF_A_FILE: usize = 32_768;

impl Session {
    /// Takes a snapshot as of now, if that is possible at this time.
    fn snapshot(&mut self, detail: Detail, marks: &[Duration], often: bool) -> Option<Snapshot> {
        let (begun, cpu_before) = (Instant::now(), thread_cpu_time());
        let mut snapshot =
            self.with_cut(|session, cut| session.snapshot_of(cut, detail, marks, often, false, begun))?;
        snapshot.cpu = thread_cpu_time().saturating_sub(cpu_before);
        Some(snapshot)
    }

    /// Processes that have a line for the program that they run. Programs that are over and have no line may have been
    /// missed.
    fn seen(&mut self, with_lines: &[ProcessKey], last: bool) -> HashSet<u32> {
        let doubtful = &self.attaching.executed.doubtful;
        for program in if last { Vec::from_iter(doubtful.iter().copied()) } else { Vec::new() } {
            let comm = self.descriptions.comm(program);
            self.attaching.program_was_counted(program, with_lines.contains(&program), comm);
        }
        let current = with_lines.iter().filter(|key| self.attaching.is_current_program(**key));
        current.map(|key| key.tgid).collect()
    }

    /// Takes the snapshot of a cut. `marks`: moments that divide the blocks in use by age, as times since the start;
    /// `often`: see [`Often`](crate::profiles::snapshot::Often); `last`: the recording ends with it; `begun`: when the
    /// cut was begun.
    pub(super) fn snapshot_of(
        &mut self,
        cut: &Cut,
        detail: Detail,
        marks: &[Duration],
        often: bool,
        last: bool,
        begun: Instant,
    ) -> Snapshot {
        let threads = if often { None } else { self.note_activity() };
        let total = if last { cut.total } else { without_calls_under_way(cut.total) };
        let mappings = self.attaching.hooks.mappings.as_ref();
        let daemon = DaemonCounters {
            errors: self.errors.count(),
            inline_incomplete: self.attaching.inline.as_ref().map_or(0, |inline| inline.counted.incomplete()),
            modules: self.host.modules().count() as u64,
            modules_open: self.host.modules().open_files as u64,
            lifecycle: self.attaching.programs.lifecycle.skipped().unwrap_or_default(),
            mapping_calls_skipped: mappings.map_or(Ok(0), MappingProbes::runs_skipped).unwrap_or_default(),
            waited_ns: self.attaching.inline.as_ref().and_then(InlineHooks::waited_ns).unwrap_or_default(),
            ..self.recorder.daemon_counters()
        };
        let slack = cut.slack.values().map(|blocks| blocks.samples).sum();
        let missing = Missing::of(total.submitted, daemon.allocations_taken_in, slack, cut.unread.is_some());
        self.learn_costs(&cut.counts, &total);
        let (cpu, cpu_remark) = self.cpu_time().unzip();
        let stats = self.stats(&total, missing, &daemon, cpu);
        let go = self.go_targets();
        // For some of them nothing was observed; their lines say why, and show their memory.
        let mut also = self.silent_targets(threads);
        also.extend(self.attaching.inline.iter().flat_map(|inline| inline.counted.distrusted_now()));
        also.extend(go.iter().map(|target| target.process));
        let started_ns = self.schedule.started_ns;
        let marks_ns = marks.iter().map(|mark| started_ns.saturating_add(mark.as_nanos() as u64)).collect();
        let emptied = if often { self.worker.emptied() } else { Vec::new() };
        let measures = !often || detail == Detail::Lifetimes;
        let most = if often || detail == Detail::Totals { BLOCKS_OF_A_REFRESH } else { BLOCKS_OF_A_FILE };
        let most_blocks = measures.then_some(most);
        let parts = self.parts(&cut.counts, (&cut.slack, &cut.unseen));
        let Content { keys, mut processes, rows, mut measured, facts } =
            Parts { also, marks_ns, most_blocks, emptied, ..parts }.take(detail, cut.time_ns);
        if !cut.has_counters {
            // Losses of processes that had not ended are unknown.
            let unknown = keys.iter().zip(&mut processes).filter(|(key, _)| self.exited.counts.get(key).is_none());
            unknown.for_each(|(_, process)| process.losses.unbounded = true);
        }
        self.add_tracked_since(&keys, &mut processes);
        let seen = self.seen(&keys, last);
        let idle = if measures { self.idle(&seen, processes.len(), &mut measured) } else { Vec::new() };
        let silence = || accounting::without_samples(&total, &self.plan.sampling, self.plan.targets.follow, &measured);
        let is_open = last && go.is_empty() && !self.attaching.explains_silence(&seen);
        let mut notes: Vec<String> = if is_open { silence().into_iter().collect() } else { Vec::new() };
        notes.extend(self.notes(cut, &total, &daemon, &seen));
        notes.extend(self.unmatched().into_iter().chain(cpu_remark.flatten()));
        notes.extend(accounting::waits(daemon.waited_ns, stats.targets_cpu_seconds));
        notes.extend(accounting::runtimes(processes.iter().chain(&idle)));
        notes.extend(accounting::early_objects(&processes).into_iter().chain(accounting::announcements(&processes)));
        let is_hidden = |process: &Process| process.was_unseen() && process.inuse_unknown;
        notes.extend((self.plan.sampling.live && processes.iter().any(is_hidden)).then(|| HIDDEN_IN_USE.to_owned()));
        notes.extend((!cut.has_counters).then(|| WITHOUT_COUNTERS.to_owned()));
        notes.extend(self.unfinished.killed_by.iter().map(|signal| format!("the command was ended: {signal}")));
        notes.extend(self.unfinished.ended_early.iter().map(|why| format!("the recording ended early: {why}")));
        let (schedule, controller) = (&self.schedule, &self.overhead.controller);
        let growth_since = self.recorder.heap.growth_since(cut.time_ns);
        let growth_over = growth_since.map(|since_ns| Duration::from_nanos(cut.time_ns.saturating_sub(since_ns)));
        Snapshot {
            detail,
            marks: marks.to_vec(),
            live: controller.tracking.frees,
            started: schedule.started,
            duration: Duration::from_nanos(cut.time_ns.saturating_sub(schedule.started_ns)),
            growth_over,
            unread: cut.unread,
            keys,
            processes,
            idle,
            rows,
            measured,
            unhooked: None,
            often: None,
            facts,
            go,
            stats,
            notes,
            begun,
            cost: begun.elapsed(),
            cpu: Duration::ZERO,
        }
    }

    /// Targets in which nothing was counted. The memory of those that run is to be measured as well; `first` is the
    /// number of the first of them.
    fn idle(&mut self, counted: &HashSet<u32>, first: usize, measured: &mut Vec<Measured>) -> Vec<Process> {
        let idle = self.attaching.idle_targets(&mut self.host, counted);
        measured.extend(idle.iter().zip(first..).map(|((process, start_ns, began_ns), number)| Measured {
            process: number,
            key: ProcessKey { start_ns: *start_ns, tgid: process.pid, exec_id: 0 },
            blocks: Vec::new(),
            share: 1.0,
            at_attach: self.attaching.targets.at_attach(process.pid).of_program(*began_ns),
        }));
        let ended = self.attaching.without_allocator.iter().filter(|process| !counted.contains(&process.pid)).cloned();
        idle.into_iter().map(|(process, ..)| process).chain(ended).collect()
    }

    /// The message that no process has been a target so far, if that is so.
    pub(super) fn unmatched(&mut self) -> Option<String> {
        let rules = self.plan.targets.rules_to_match()?;
        let is_so = self.recorder.processes.is_empty() && !self.attaching.has_targets(&mut self.host);
        is_so.then(|| format!("no process matches {rules}"))
    }

    /// CPU time of the targets, where they are hooked one by one, and a remark about how much of it was counted.
    fn cpu_time(&mut self) -> Option<(CpuTime, Option<String>)> {
        let ended = self.kernel.totals.progress().ok()?;
        let cpu = self.attaching.cpu_time(&mut self.host, &ended)?;
        Some((cpu, self.attaching.cpu_remark(cpu, &ended)))
    }

    /// Running targets that are listed even if they have not allocated: those that the user named, those that are
    /// hooked one by one, and those that another recording had hooked inline for a while. `threads`: all of the host,
    /// if they have just been read.
    fn silent_targets(&mut self, threads: Option<Vec<LivingThread>>) -> Vec<ProcessKey> {
        let mut silent = self.attaching.hidden_targets(&mut self.host);
        if self.plan.targets.are_named() {
            silent.extend(&self.attaching.targets.named_alive);
        } else if self.attaching.takes_in() {
            silent.extend(self.attaching.targets.hooked_alive());
        }
        if silent.is_empty() {
            return Vec::new();
        }
        let living: Vec<ProcessKey> = match threads {
            Some(threads) => threads.into_iter().map(|thread| thread.process).collect(),
            None => totals::living(&self.attaching.programs).unwrap_or_else(|error| {
                log::info!("processes that did not allocate are not listed: {error}");
                Vec::new()
            }),
        };
        living.into_iter().filter(|process| silent.contains(&process.tgid)).collect()
    }

    /// Adds to processes whose frees were not tracked all the time since when they have been tracked again.
    pub(super) fn add_tracked_since(&self, keys: &[ProcessKey], processes: &mut [Process]) {
        for (key, process) in keys.iter().zip(processes) {
            let since_ns = self.recorder.heap.tracked_since(key);
            let after = since_ns.map(|since_ns| since_ns.saturating_sub(self.schedule.started_ns));
            process.inuse_since = after.map(|after_ns| self.schedule.started + Duration::from_nanos(after_ns));
        }
    }

    /// The accounting, without what is known once the profile is made. `cpu`: CPU time of the targets, if it is known.
    fn stats(&self, total: &Counters, missing: Missing, daemon: &DaemonCounters, cpu: Option<CpuTime>) -> Stats {
        let estimated = self.recorder.heap.estimated().alloc_bytes;
        let audits = self.attaching.hooks.audit();
        let controller = &self.overhead.controller;
        let probe_seconds = controller.costs().map(|_| self.overhead.spent.seconds);
        Stats {
            probe_costs: controller.measured().cloned(),
            targets_cpu_seconds: cpu.map(CpuTime::seconds),
            ..accounting::stats(total, missing, daemon, estimated, probe_seconds, &audits)
        }
    }

    /// Notes for the user beside the figures. `seen`: processes with a line in the profile.
    fn notes(&self, cut: &Cut, total: &Counters, daemon: &DaemonCounters, seen: &HashSet<u32>) -> Vec<String> {
        let inline = self.attaching.inline.as_ref();
        let sets_full = inline.map(|inline| inline.counted.sets_full(&cut.counts)).unwrap_or_default();
        let can_wait = inline.is_some() && !self.plan.kernel.lossless;
        let remedies = Remedies { sampling: &self.plan.sampling, can_wait, sets_full: &sets_full };
        let mut notes = accounting::remarks(total, daemon, &remedies);
        notes.extend(self.attaching.remarks(seen));
        notes.extend(accounting::merged_rows(daemon.stacks_merged));
        notes.extend(self.recorder.pythons.notes());
        notes.extend(self.recorder.javas.notes());
        notes.extend(self.plan.sampling.note());
        notes.extend(self.overhead.controller.notes.iter().cloned());
        notes.extend(self.overhead.slowed.notes.iter().cloned());
        notes.extend(self.errors.notes());
        notes
    }

    /// Answers the oldest request with a profile as of now. If no snapshot can be taken at this time, the request
    /// waits.
    pub(super) fn answer(&mut self) {
        // Clients may have gone away while waiting.
        self.unfinished.requests.retain(|request| !request.reply.is_closed());
        let Some(request) = self.unfinished.requests.front() else { return };
        if request.detail != Detail::Totals && self.worker.is_behind() {
            if let Some(request) = self.unfinished.requests.pop_front() {
                let _ = request.reply.send(Err(Unanswered::Busy));
            }
            return;
        }
        let (detail, marks, often) = (request.detail, request.marks.clone(), request.often.is_some());
        if let Some(snapshot) = self.snapshot(detail, &marks, often)
            && let Some(Request { often, reply, .. }) = self.unfinished.requests.pop_front()
        {
            self.worker.make(Snapshot { often, ..snapshot }, |made| drop(reply.send(Ok(made))));
        }
    }

    /// Takes and queues a numbered snapshot, if one is wanted and none is being written.
    pub(super) fn write_snapshot(&mut self, files: &mut SnapshotFiles) {
        if !self.may_try(Step::Counters) {
            return;
        }
        let Some((turn, why)) = files.next() else { return };
        let Some(mut snapshot) = self.snapshot(Detail::Lifetimes, &[], false) else { return files.put_back(turn, why) };
        log::info!("a snapshot, taken {why}");
        snapshot.notes.push(format!("a snapshot, taken {why}"));
        self.worker.make(snapshot, move |made| {
            if let Err(error) = turn.write(&made.profile) {
                log::warn!("a snapshot was not written: {error}");
            }
        });
    }

    /// The status of the recording; the sample rate and the losses are not filled in.
    pub(super) fn status(&self, elapsed: Duration) -> Status {
        let estimated = self.recorder.heap.estimated();
        let controller = &self.overhead.controller;
        Status {
            elapsed,
            duration: self.plan.duration,
            samples: estimated.samples,
            processes: self.recorder.processes.len(),
            inuse_bytes: controller.tracking.frees.then_some(estimated.inuse_bytes),
            inuse_is_partial: self.recorder.heap.tracks_some_again(),
            alloc_bytes: estimated.alloc_bytes,
            overhead: controller.share().map(|share| (if self.is_all_inside() { "samples" } else { "probes" }, share)),
            ..Status::default()
        }
    }

    /// Hits and samples that were lost. This is slow: it reads the state of every thread of the host.
    pub(super) fn lost(&self) -> u64 {
        let counted = self.kernel_counts();
        counted.map_or(0, |(_, total)| total.lost_ring_full + total.lost_abandoned + total.lost_no_thread_state)
    }

    /// The Go programs whose heaps belong in a snapshot that is taken now.
    pub(super) fn go_targets(&mut self) -> Vec<GoTarget> {
        if !self.plan.sampling.live {
            return Vec::new();
        }
        let processes = self.attaching.go_targets(&mut self.host);
        self.forget_go(&processes.iter().map(|process| process.generation).collect());
        if processes.iter().any(|process| !self.go.contains_key(&process.generation)) {
            let living = totals::living(&self.attaching.programs).unwrap_or_else(|error| {
                log::info!("Go programs are not read: {error}");
                Vec::new()
            });
            let key_of: HashMap<u32, ProcessKey> = living.into_iter().map(|process| (process.tgid, process)).collect();
            for process in &processes {
                if let Some(key) = key_of.get(&process.generation.pid) {
                    self.go.entry(process.generation).or_insert(*key);
                }
            }
        }
        let target = |process: GoProcess| {
            let key = *self.go.get(&process.generation)?;
            let memory = File::open(format!("/proc/{}/mem", key.tgid)).ok().map(Arc::new);
            Some(GoTarget { process: key, program: process.program, mapping: process.mapping, memory })
        };
        processes.into_iter().filter_map(target).collect()
    }

    /// Forgets Go programs that no longer run. Those without samples are known only from here.
    fn forget_go(&mut self, running: &HashSet<GenerationId>) {
        let ended: Vec<ProcessKey> =
            self.go.extract_if(|generation, _| !running.contains(generation)).map(|(_, key)| key).collect();
        for key in ended {
            if !self.recorder.processes.contains_key(&key) && self.exited.counts.get(&key).is_none() {
                self.descriptions.forget_one(key);
            }
        }
    }
}

/// Counters without the calls in flight, which are neither losses yet, nor hits that could be accounted for.
fn without_calls_under_way(total: Counters) -> Counters {
    Counters {
        calls: total.calls.saturating_sub(total.lost_in_flight + total.lost_undecided),
        sampled: total.sampled.saturating_sub(total.lost_in_flight),
        lost_in_flight: 0,
        lost_undecided: 0,
        ..total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_in_flight_is_neither_a_hit_nor_a_loss_on_the_way() {
        let total = Counters {
            calls: 10,
            unsampled: 4,
            sampled: 5,
            submitted: 3,
            lost_in_flight: 2,
            lost_undecided: 1,
            ..Counters::default()
        };
        let on_the_way = without_calls_under_way(total);
        assert_eq!(on_the_way, Counters { calls: 7, sampled: 3, lost_in_flight: 0, lost_undecided: 0, ..total });
        assert_eq!(on_the_way.hits(), 7);
        // Read while threads run: there may be more calls in flight than samples counted.
        let torn = Counters { sampled: 1, lost_in_flight: 2, ..Counters::default() };
        assert_eq!(without_calls_under_way(torn).sampled, 0);
    }
}

//! Cuts: every record up to a moment is taken in, and none after it. If records were lost before that moment, the heap
//! is reconciled with the kernel's live map.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_heap::live::AfterCut;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::priority::RaisedPriority;
use heapbpf_kernel::totals::Counts;
use heapbpf_profile::model::{LossBound, Unread};
use heapbpf_remote::Maps;
use heapbpf_unwind::raw::RawStack;
use sampler_ebpf::abi::{Counters, LiveKey, LiveValue, ProcessKey};

use super::errors::Step;
use super::state::Session;
use crate::intake::lives::{Census, End};
use crate::intake::losses::LossLedger;

/// Sampled blocks, by process.
pub(super) type Blocks = HashMap<ProcessKey, LossBound>;

/// A moment of the recording, and the figures at that moment.
#[derive(Clone)]
pub(super) struct Cut {
    /// CLOCK_MONOTONIC. Everything up to this time has been taken in, and nothing after it.
    pub(super) time_ns: u64,
    /// Whether the counters could be read. If not, `counts` is empty and `total` is from earlier.
    pub(super) has_counters: bool,
    /// Counters at that moment. Each thread's were read within [`Counts::read_ns`], which starts at that moment.
    pub(super) counts: Counts,
    /// Sum of these counters and of those that have left the kernel.
    pub(super) total: Counters,
    /// Sampled allocations after the moment that the counters may include.
    pub(super) slack: Blocks,
    /// Sampled blocks that may have been in use at the moment and that no record reports.
    pub(super) unseen: Blocks,
    /// Records sent by the chosen moment that could not be read in time. If there are any, `time_ns` is an earlier
    /// moment.
    pub(super) unread: Option<Unread>,
}

/// A cut whose moment has been chosen, but may not have been reached.
pub(super) struct BegunCut {
    /// Records lost before the moment, over all processes.
    pub(super) records_lost: u64,
    /// Counters at the moment, and their sum.
    pub(super) counts: Counts,
    pub(super) total: Counters,
    /// The live map after the moment, if records were lost.
    pub(super) reading: Option<Reading>,
    /// The processes that lived right before the moment, if an end may not have been reported.
    pub(super) census: Option<Census>,
    /// Position up to which the events ring has to be read.
    pub(super) reserved: u64,
}

/// The kernel's live map as read after a cut's moment.
pub(super) struct Reading {
    /// Blocks from before the cut that were unknown when the scan found them.
    pub(super) unknown: Vec<(LiveKey, LiveValue)>,
    /// Counters before the cut, and after the map was read.
    pub(super) before: Counts,
    pub(super) after: Counts,
    /// Samples found by a second scan of the map, if one was needed.
    pub(super) put_back: HashSet<u64>,
    /// Address ranges that are mapped, by address space, where unmappings were lost.
    pub(super) mapped: HashMap<ProcessKey, Vec<(u64, u64)>>,
}

/// State kept from cut to cut.
#[derive(Default)]
pub(super) struct Cuts {
    /// How lost records may have changed figures.
    pub(super) ledger: LossLedger,
    /// The cut that nothing blocks on.
    pub(super) waiting: Option<BegunCut>,
    /// Sum of the counters as last read.
    pub(super) last_total: Counters,
    /// A census that belongs to no cut, until the records up to it have been taken in.
    pub(super) census: Option<Census>,
    /// Placeholder for the stacks of samples whose records were lost.
    pub(super) lost_stack: Option<Arc<RawStack>>,
}

impl Reading {
    /// Blocks and mappings, by process, whose free records were lost between the cut and the reading. Which ones they
    /// were is unknown.
    pub(super) fn frees_lost(&self) -> Blocks {
        let mut lost = Blocks::new();
        for (process, now) in &self.after.processes {
            let then = self.before.processes.get(process).copied().unwrap_or_default();
            let counts = |it: &Counters| [(it.unmaps_lost, it.unmaps_lost_bytes), (it.frees_lost, it.frees_lost_bytes)];
            for (now, then) in counts(now).into_iter().zip(counts(&then)).filter(|(now, then)| now.0 > then.0) {
                let blocks = LossBound { samples: now.0 - then.0, sampled_bytes: now.1.saturating_sub(then.1) };
                lost.entry(*process).or_default().add(&blocks);
            }
        }
        lost
    }
}

/// How many of the records that `total` counts could not be read in time.
pub(super) fn unread(total: &Counters, taken_in: u64) -> Unread {
    // A free may be counted as lost before it is counted as matched: a running thread's counters are not from a single
    // moment.
    let of = (total.submitted + total.frees_matched).saturating_sub(total.frees_lost);
    Unread { records: of.saturating_sub(taken_in), of }
}

/// Longest time to read the rings up to a cut's moment. When it runs out, the cut is incomplete and the profile says
/// so.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// The same for the last cut: no later cut can make up for what it leaves out.
const LONGEST_LAST_WAIT: Duration = Duration::from_secs(10);
/// Minimum time for which ends of lives are remembered, for a record that comes after the census that found the end.
const REMEMBER_ENDS_NS: u64 = 10_000_000_000;
/// Pause before reading a ring again whose next record is still being written.
const LOOK_AGAIN: Duration = Duration::from_micros(100);

impl Session {
    /// Takes in everything up to now, calls `then` with the recording as it was at that moment, and goes on. `None` if
    /// the counters cannot be read at this time.
    pub(super) fn with_cut<R>(&mut self, then: impl FnOnce(&mut Self, &Cut) -> R) -> Option<R> {
        if !self.may_try(Step::Counters) {
            return None;
        }
        // The cut must not make the recording longer.
        let left = self.schedule.until_end(monotonic_ns()).filter(|left| !left.is_zero()).unwrap_or(LONGEST_WAIT);
        let cut = self.cut(LONGEST_WAIT.min(left));
        let cut = self.errors.note(Step::Counters, cut, monotonic_ns());
        let result = cut.map(|cut| then(self, &cut));
        self.recorder.join.queue.end_cut();
        result
    }

    /// The same at the end of the recording. If the counters cannot be read in time, the cut does without them.
    pub(super) fn with_last_cut<R>(&mut self, then: impl FnOnce(&mut Self, &Cut) -> R) -> R {
        let deadline = Instant::now() + LONGEST_WAIT;
        let mut pause = LOOK_AGAIN;
        let cut = loop {
            let cut = self.cut(LONGEST_LAST_WAIT);
            if let Some(cut) = self.errors.note(Step::Counters, cut, monotonic_ns()) {
                break cut;
            }
            if Instant::now() >= deadline {
                break self.cut_without_counters();
            }
            std::thread::sleep(pause);
            pause *= 2;
        };
        let result = then(self, &cut);
        self.recorder.join.queue.end_cut();
        result
    }

    /// A cut now, with the sum of the counters as last read.
    fn cut_without_counters(&mut self) -> Cut {
        let time_ns = monotonic_ns();
        self.recorder.join.queue.cut_at(time_ns);
        let counts = Counts { read_ns: (time_ns, time_ns), ..Counts::default() };
        let records_lost = self.cuts.ledger.records_lost;
        let reserved = self.kernel.events.reserved_up_to();
        let begun =
            BegunCut { records_lost, counts, total: self.cuts.last_total, reading: None, census: None, reserved };
        let whole = self.take_in_until(Instant::now() + LONGEST_LAST_WAIT, |session| session.has_reached(&begun));
        Cut { has_counters: false, ..self.complete(begun, whole) }
    }

    fn cut(&mut self, longest: Duration) -> anyhow::Result<Cut> {
        let _priority = RaisedPriority::begin();
        let deadline = Instant::now() + longest;
        // This cut finds everything that the waiting one would find.
        if self.cuts.waiting.take().is_some() {
            self.recorder.heap.abandon_reconciliation();
        }
        let begun = self.begin_cut()?;
        let whole = self.take_in_until(deadline, |session| session.has_reached(&begun));
        Ok(self.complete(begun, whole))
    }

    /// Chooses the cut's moment. Nothing after it is taken in until the cut ends. An error leaves no cut.
    fn begin_cut(&mut self) -> anyhow::Result<BegunCut> {
        let begun = self.choose_moment();
        if begun.is_err() {
            self.recorder.join.queue.end_cut();
        }
        begun
    }

    fn choose_moment(&mut self) -> anyhow::Result<BegunCut> {
        let records_lost = self.kernel.totals.records_lost()?;
        let is_lossy =
            self.plan.sampling.live && records_lost > self.cuts.ledger.records_lost && self.may_try(Step::LiveMap);
        let census = if is_lossy || self.may_lack_ends() { self.read_census() } else { None };
        // Frees lost while the counters are read may come after the cut. Counters read before that bound their number.
        let before = if is_lossy { Some(self.counts()?.0) } else { None };
        let (counts, total) = self.counts()?;
        let time_ns = counts.read_ns.0;
        log::debug!("cut: counters read in {} µs", (counts.read_ns.1 - time_ns) / 1_000);
        self.recorder.join.queue.cut_at(time_ns);
        self.cuts.last_total = total;
        // Read at once, before more records are lost.
        let reading = before.and_then(|before| {
            let reading = self.read_live_map(time_ns, before, &total);
            let reading = self.errors.note(Step::LiveMap, reading, monotonic_ns());
            if reading.is_none() {
                // The losses stay unsettled until the next reading.
                self.recorder.heap.abandon_reconciliation();
            }
            reading
        });
        let reserved = self.kernel.events.reserved_up_to();
        Ok(BegunCut { records_lost, counts, total, reading, census, reserved })
    }

    /// Whether everything up to the cut has been taken in, as have all records that the reading of the live map relies
    /// on.
    fn has_reached(&self, begun: &BegunCut) -> bool {
        self.recorder.join.queue.is_at_cut() && self.kernel.events.read_up_to() >= begun.reserved
    }

    /// Completes a cut. `whole`: whether its moment was reached.
    fn complete(&mut self, begun: BegunCut, whole: bool) -> Cut {
        let BegunCut { records_lost, counts, total, reading, census, .. } = begun;
        let (time_ns, counted_ns) = counts.read_ns;
        let mut unseen = Blocks::new();
        match reading {
            Some(reading) if whole => {
                unseen = self.reconcile(reading, time_ns);
                // The live map holds nothing any more of address spaces that ended before the cut.
                self.lives.forget(time_ns.min(monotonic_ns().saturating_sub(REMEMBER_ENDS_NS)));
                self.cuts.ledger.reconciled(records_lost, counts.clone());
            }
            Some(_) => self.recorder.heap.abandon_reconciliation(),
            None => {}
        }
        if let Some(census) = census.filter(|_| whole) {
            self.settle_ends(&census);
        }
        let unread = (!whole).then(|| unread(&total, self.recorder.records_taken_in()));
        let time_ns = if whole { time_ns } else { self.recorder.join.queue.handed_out_up_to_ns() };
        let slack = self.recorder.allocations_beyond_cut(counted_ns);
        Cut { time_ns, has_counters: true, counts, total, slack, unseen, unread }
    }

    /// Takes in records until `done` returns true. Returns `false` if it has not by the deadline.
    fn take_in_until(&mut self, deadline: Instant, mut done: impl FnMut(&Self) -> bool) -> bool {
        loop {
            let records = self.take_in();
            if done(self) {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            if records == 0 {
                std::thread::sleep(LOOK_AGAIN);
            }
        }
    }

    /// Reads the kernel's live map right after a cut's moment.
    fn read_live_map(&mut self, cut_ns: u64, before: Counts, at_cut: &Counters) -> anyhow::Result<Reading> {
        self.recorder.heap.begin_reconciliation();
        let (recorder, events) = (&mut self.recorder, &mut self.kernel.events);
        let mut unknown: Vec<(LiveKey, LiveValue)> = Vec::new();
        self.kernel.live_map.scan(|entries| {
            let unknown_here = |(key, value): &(LiveKey, LiveValue)| {
                let is_live = value.time_ns <= cut_ns && value.sample != LiveValue::FREED;
                is_live && !recorder.heap.observe(&key.space, value.sample)
            };
            unknown.extend(entries.filter(unknown_here));
            // The rings fill up during the scan.
            recorder.read_events(events);
        })?;
        let (after, total) = self.counts()?;
        // A realloc that failed during the scan has put its old block back, perhaps in a part already scanned.
        let mut put_back = HashSet::new();
        if total.failed + total.unsampled_failed != at_cut.failed + at_cut.unsampled_failed {
            self.kernel.live_map.scan(|entries| put_back.extend(entries.map(|(_, value)| value.sample)))?;
        }
        let mapped = self.read_mappings(&before);
        Ok(Reading { unknown, before, after, put_back, mapped })
    }

    /// Reads what is mapped, by address space, if unmappings were lost since the last reconciliation.
    fn read_mappings(&self, counts: &Counts) -> HashMap<ProcessKey, Vec<(u64, u64)>> {
        let mut spaces = self.cuts.ledger.with_lost_unmaps(counts);
        if !spaces.is_empty() {
            // A vfork child unmaps in its parent's address space.
            spaces.extend(self.recorder.heap.mapped_spaces());
        }
        let mapped = |space: ProcessKey| {
            let maps = Maps::read(File::open(format!("/proc/{}/maps", space.tgid)).ok()?, 0).ok()?;
            let ranges: Vec<_> = maps.as_slice().iter().map(|it| (it.range.start, it.range.end)).collect();
            // There are none once the process has no memory any more.
            (!ranges.is_empty()).then_some((space, ranges))
        };
        spaces.into_iter().filter_map(mapped).collect()
    }

    /// Removes mappings that are no longer mapped. What was unmapped after the cut stays until its record is taken in.
    fn reconcile_mappings(
        &mut self,
        mapped: HashMap<ProcessKey, Vec<(u64, u64)>>,
        after_cut: &mut AfterCut,
        cut_ns: u64,
    ) {
        for (space, mut ranges) in mapped {
            if after_cut.ended.contains(&space) || self.lives.end_of(&space).is_some() {
                continue;
            }
            ranges.extend(after_cut.unmapped.remove(&space).unwrap_or_default());
            ranges.sort_unstable();
            let found = self.recorder.heap.keep_mapped(space, &ranges, cut_ns);
            self.recorder.counters.mappings_reconciled += found.samples;
            self.cuts.ledger.found_unmapped(space, found.sampled_bytes, cut_ns);
        }
    }

    /// Works out what the lost records were about, after everything up to the cut has been taken in. Returns, by
    /// process, the blocks that may still have been in use at the cut: those freed between the cut and the reading that
    /// no record identifies.
    fn reconcile(&mut self, reading: Reading, cut_ns: u64) -> Blocks {
        let mut unseen = reading.frees_lost();
        let Reading { unknown, after, put_back, mapped, .. } = reading;
        let stack = Arc::clone(self.cuts.lost_stack.get_or_insert_with(|| self.recorder.intern(RawStack::lost())));
        // If an address space has ended in the meantime, its known blocks were removed from the live map.
        let is_new = |(key, value): &&(LiveKey, LiveValue)| {
            !self.recorder.heap.ignores(&key.space, value.time_ns)
                && (self.lives.end_of(&key.space).is_none()
                    || self.kernel.live_entries.get(*key).is_some_and(|there| there.sample == value.sample))
        };
        let new: Vec<_> = unknown.iter().filter(is_new).collect();
        let samples: Vec<_> =
            new.into_iter().map(|(key, value)| self.recorder.without_record(*key, value, &stack)).collect();
        samples.iter().for_each(|sample| self.recorder.note_process(sample.key.process, sample.time_ns));
        self.note_new_lives();
        let beyond = self.recorder.join.queue.beyond();
        let mut after_cut = AfterCut::of(beyond.map(|(_, record)| &record[..]));
        // A realloc in flight has taken its old block out of the map; the threads' state lists such blocks.
        after_cut.outside_map.extend(after.reallocated);
        after_cut.outside_map.extend(put_back);
        self.reconcile_mappings(mapped, &mut after_cut, cut_ns);
        let entries = &self.kernel.live_entries;
        let sample_at = |space: &ProcessKey, address| Some(entries.get(LiveKey { space: *space, address })?.sample);
        let (found, freed) = self.recorder.heap.reconcile(samples, after_cut, sample_at);
        for (space, blocks) in freed {
            unseen.entry(space).or_default().add(&blocks);
        }
        self.recorder.counters.frees_reconciled += found.frees;
        self.recorder.counters.allocations_reconciled += found.allocations;
        log::debug!("{} frees and {} allocations of lost records found", found.frees, found.allocations);
        self.purge(unknown.iter().map(|(key, _)| key.space).collect());
        unseen
    }

    /// Ends the blocks that reconciliation found in address spaces that had already ended.
    fn purge(&mut self, spaces: HashSet<ProcessKey>) {
        for space in spaces {
            let Some((how, known_ns)) = self.lives.end_of(&space) else { continue };
            match how {
                End::Exit => self.end_heap(space, known_ns),
                End::Exec => self.replace_heap(space, known_ns),
            }
            if self.plan.keeps_running {
                self.exited.retiring.insert(space);
            }
        }
    }

    /// Begins a cut if records were lost; called once a second. This bounds memory and keeps figures close to the truth
    /// even if no profile is requested. Nothing blocks on this cut: it completes once the rings have been read that
    /// far.
    pub(super) fn reconcile_if_lossy(&mut self) {
        if self.cuts.waiting.is_some() {
            return;
        }
        let lost = if self.plan.sampling.live {
            if ![Step::Losses, Step::Counters, Step::LiveMap].into_iter().all(|step| self.may_try(step)) {
                return;
            }
            let lost = self.kernel.totals.records_lost();
            let Some(lost) = self.errors.note(Step::Losses, lost, monotonic_ns()) else { return };
            lost
        } else {
            self.cuts.ledger.records_lost
        };
        if lost == self.cuts.ledger.records_lost {
            // Every block in the live map is known; only late records may still mention address spaces that have ended.
            self.lives.forget(monotonic_ns().saturating_sub(REMEMBER_ENDS_NS));
            return;
        }
        let _priority = RaisedPriority::begin();
        let begun = self.begin_cut();
        self.cuts.waiting = self.errors.note(Step::Counters, begun, monotonic_ns());
    }

    /// Completes the waiting cut, if its moment has been reached.
    pub(super) fn complete_waiting_cut(&mut self) {
        if let Some(begun) = self.cuts.waiting.take() {
            if self.has_reached(&begun) {
                self.complete(begun, true);
                self.recorder.join.queue.end_cut();
            } else {
                self.cuts.waiting = Some(begun);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 1, tgid, exec_id: 0 }
    }

    fn counts(counters: &[(u32, u64, u64)]) -> Counts {
        let processes = counters.iter().map(|(tgid, frees_lost, frees_lost_bytes)| {
            let counters =
                Counters { frees_lost: *frees_lost, frees_lost_bytes: *frees_lost_bytes, ..Counters::default() };
            (key(*tgid), counters)
        });
        Counts { processes: processes.collect(), ..Counts::default() }
    }

    #[test]
    fn frees_lost_during_the_reading_are_those_counted_since() {
        let reading = Reading {
            unknown: Vec::new(),
            before: counts(&[(1, 3, 300), (2, 5, 50)]),
            after: counts(&[(1, 7, 340), (2, 5, 50), (3, 2, 9)]),
            put_back: HashSet::new(),
            mapped: HashMap::new(),
        };
        let lost = reading.frees_lost();
        assert_eq!(lost.len(), 2);
        assert_eq!((lost[&key(1)].samples, lost[&key(1)].sampled_bytes), (4, 40));
        assert_eq!((lost[&key(3)].samples, lost[&key(3)].sampled_bytes), (2, 9));
    }

    #[test]
    fn unread_records_are_those_sent_and_not_taken_in() {
        let total = Counters { submitted: 10, frees_matched: 6, frees_lost: 1, ..Counters::default() };
        let unread_of = |taken_in| {
            let Unread { records, of } = unread(&total, taken_in);
            (records, of)
        };
        assert_eq!(unread_of(12), (3, 15));
        assert_eq!(unread_of(16), (0, 15), "some may have been sent since");
        let torn = Counters { frees_lost: 1, ..Counters::default() };
        assert_eq!(unread(&torn, 0).of, 0, "the loss was counted, and the free not yet");
    }
}

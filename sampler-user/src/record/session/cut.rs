//! Cuts: everything up to a moment is taken in, and nothing after it. Reconciliation with the kernel's live map where
//! records were lost before.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sampler_ebpf::abi::{Counters, LiveKey, LiveValue, ProcessKey};

use super::Session;
use super::hurry::Hurry;
use crate::heap::live::LostBlocks;
use crate::host::events::monotonic_ns;
use crate::kernel::totals::Counts;
use crate::profile::model::Unread;
use crate::unwind::raw::RawStack;

/// A ring that cannot be read past a moment within this time is left as it is, and that is told.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// So long before its end a recording goes before others on the CPU.
const LAST_MOMENTS: Duration = Duration::from_millis(50);
/// Time between two looks at a ring whose next record is still being written.
const LOOK_AGAIN: Duration = Duration::from_micros(100);

/// A moment of the recording.
pub(super) struct Cut {
    /// CLOCK_MONOTONIC: what happened up to then has been taken in, and nothing that happened later.
    pub(super) time_ns: u64,
    /// Counters of that moment: each thread's were read within [`Counts::read_ns`], which begins with it.
    pub(super) counts: Counts,
    /// Their sum, with those of processes whose counters have left the kernel.
    pub(super) total: Counters,
    /// Sampled allocations that may be in the counters and come after the moment.
    pub(super) slack: HashMap<ProcessKey, LostBlocks>,
    /// Sampled blocks that may have been in use then and that no record tells of.
    pub(super) unseen: HashMap<ProcessKey, LostBlocks>,
    /// What had been sent by then and could not be read in time; then the moment is an earlier one.
    pub(super) unread: Option<Unread>,
}

/// A cut whose moment has been chosen, and that has perhaps not been reached.
pub(super) struct BegunCut {
    /// Before the moment, over all processes.
    records_lost: u64,
    counts: Counts,
    total: Counters,
    /// The live map after it, if records were lost.
    reading: Option<Reading>,
    /// The events ring has to be read up to here.
    reserved: u64,
}

/// The kernel's live map as it was after a cut's moment.
struct Reading {
    /// Blocks from before the cut that were not known when they were seen.
    unknown: Vec<(LiveKey, LiveValue)>,
    /// Counters before the cut, and after the map was read.
    before: Counts,
    after: Counts,
    /// Samples that were in the map when it was read once more, if that was necessary.
    put_back: HashSet<u64>,
}

/// How an address space came to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Its process ended.
    Exit,
    /// Its process replaced its program.
    Exec,
}

impl Session {
    /// Takes in everything up to now, lets `then` look at the recording as it stood at that moment, and goes on.
    pub(super) fn with_cut<R>(&mut self, then: impl FnOnce(&mut Self, &Cut) -> anyhow::Result<R>) -> anyhow::Result<R> {
        let result = self.cut().and_then(|cut| then(self, &cut));
        self.recorder.end_cut();
        result
    }

    fn cut(&mut self) -> anyhow::Result<Cut> {
        let _hurry = Hurry::begin();
        // One on the way does not make the recording longer; the last one has the time that it needs.
        let left = self.until_end().filter(|left| !left.is_zero()).unwrap_or(LONGEST_WAIT);
        let deadline = Instant::now() + LONGEST_WAIT.min(left);
        // What the one that waits would find out, this one does.
        if self.waiting_cut.take().is_some() {
            self.recorder.heap.abandon_reconciliation();
        }
        let begun = self.begin_cut()?;
        let whole = self.take_in_until(deadline, |session| session.has_reached(&begun));
        Ok(self.complete(begun, whole))
    }

    /// Chooses the moment. From here on nothing after it is taken in.
    fn begin_cut(&mut self) -> anyhow::Result<BegunCut> {
        let records_lost = self.totals.records_lost()?;
        let is_lossy = self.plan.live && records_lost > self.ledger.records_lost();
        // What is lost while the counters are read may have happened after the cut.
        let before = if is_lossy { Some(self.counts()?.0) } else { None };
        let (counts, total) = self.counts()?;
        let time_ns = counts.read_ns.0;
        log::debug!("cut: counters read in {} µs", (counts.read_ns.1 - time_ns) / 1_000);
        self.recorder.cut_at(time_ns);
        // Read at once, before anything else is lost.
        let reading = match before {
            Some(before) => Some(self.read_live_map(time_ns, before, &total)?),
            None => None,
        };
        Ok(BegunCut { records_lost, counts, total, reading, reserved: self.events.reserved_up_to() })
    }

    /// Whether everything up to the moment has been taken in, and all that the reading of the live map relies on is known.
    fn has_reached(&self, begun: &BegunCut) -> bool {
        self.recorder.is_at_cut() && self.events.read_up_to() >= begun.reserved
    }

    /// `whole`: it has been reached.
    fn complete(&mut self, begun: BegunCut, whole: bool) -> Cut {
        let BegunCut { records_lost, counts, total, reading, .. } = begun;
        let (time_ns, counted_ns) = counts.read_ns;
        let mut unseen = HashMap::new();
        match reading {
            Some(reading) if whole => {
                unseen = self.reconcile(reading);
                // Of those that ended before the cut, the map has nothing any more.
                self.gone.retain(|_, (_, heard_ns)| *heard_ns > time_ns);
                self.ledger.reconciled(records_lost, counts.clone());
            }
            Some(_) => self.recorder.heap.abandon_reconciliation(),
            None => {}
        }
        let unread = (!whole).then(|| {
            let of = total.submitted + total.frees_matched - total.frees_lost;
            Unread { records: of.saturating_sub(self.recorder.records_taken_in()), of }
        });
        let time_ns = if whole { time_ns } else { self.recorder.taken_in_up_to_ns() };
        let slack = self.recorder.allocations_beyond_cut(counted_ns);
        Cut { time_ns, counts, total, slack, unseen, unread }
    }

    /// Takes in records until something is so; `false` if it is not by then.
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

    /// Reads the kernel's live map, right after a cut's moment.
    fn read_live_map(&mut self, cut_ns: u64, before: Counts, at_cut: &Counters) -> anyhow::Result<Reading> {
        self.recorder.heap.begin_reconciliation();
        let (recorder, events) = (&mut self.recorder, &mut self.events);
        let mut unknown: Vec<(LiveKey, LiveValue)> = Vec::new();
        self.live_map.scan(|entries| {
            let unknown_here = |(key, value): &(LiveKey, LiveValue)| {
                value.time_ns <= cut_ns && !recorder.heap.observe(&key.space, value.sample)
            };
            unknown.extend(entries.filter(unknown_here));
            // The rings fill up meanwhile.
            recorder.read_events(events);
        })?;
        let (after, total) = self.counts()?;
        // A realloc that failed meanwhile has put its old block back, perhaps where the reading had been already.
        let mut put_back = HashSet::new();
        if total.failed + total.unsampled_failed != at_cut.failed + at_cut.unsampled_failed {
            self.live_map.scan(|entries| put_back.extend(entries.map(|(_, value)| value.sample)))?;
        }
        Ok(Reading { unknown, before, after, put_back })
    }

    /// Finds out what lost records were about, when everything up to the cut has been taken in. Returns what may have been in use at the cut all the same, by process: what was freed between the cut and the
    /// reading, of which no record tells what it was.
    fn reconcile(&mut self, reading: Reading) -> HashMap<ProcessKey, LostBlocks> {
        let Reading { unknown, before, after, put_back } = reading;
        let mut unseen: HashMap<ProcessKey, LostBlocks> = HashMap::new();
        for (process, now) in &after.processes {
            let then = before.processes.get(process).copied().unwrap_or_default();
            if now.frees_lost > then.frees_lost {
                unseen.entry(*process).or_default().add(LostBlocks {
                    samples: now.frees_lost - then.frees_lost,
                    bytes: now.frees_lost_bytes.saturating_sub(then.frees_lost_bytes),
                });
            }
        }
        let stack = Arc::clone(self.lost_stack.get_or_insert_with(|| self.recorder.intern(RawStack::lost())));
        // Of an address space that has gone meanwhile, what was known has been taken out of the map.
        let is_new = |(key, value): &&(LiveKey, LiveValue)| {
            !self.recorder.heap.has_left(&key.space)
                && (!self.gone.contains_key(&key.space)
                    || self.live_entries.get(*key).is_some_and(|there| there.sample == value.sample))
        };
        let samples: Vec<_> = unknown
            .iter()
            .filter(is_new)
            .map(|(key, value)| self.recorder.without_record(*key, value, &stack))
            .collect();
        for sample in &samples {
            self.recorder.processes.entry(sample.process).or_insert(sample.time_ns);
        }
        let mut afterwards = self.recorder.beyond_cut();
        // A realloc that has not returned has taken its old block out of the map: threads tell of those.
        afterwards.elsewhere.extend(after.reallocated);
        afterwards.elsewhere.extend(put_back);
        let entries = &self.live_entries;
        let there_now = |space: &ProcessKey, address| Some(entries.get(LiveKey { space: *space, address })?.sample);
        let (found, freed) = self.recorder.heap.reconcile(samples, afterwards, there_now);
        for (space, blocks) in freed {
            unseen.entry(space).or_default().add(blocks);
        }
        self.recorder.counters.frees_reconciled += found.frees;
        self.recorder.counters.allocations_reconciled += found.allocations;
        log::debug!("{} frees and {} allocations of lost records found", found.frees, found.allocations);
        self.purge(unknown.iter().map(|(key, _)| key.space).collect());
        unseen
    }

    /// Of address spaces that are gone, what the live map had besides what was known when they went.
    fn purge(&mut self, spaces: HashSet<ProcessKey>) {
        for space in spaces {
            match self.gone.get(&space) {
                None => {}
                Some((End::Exit, _)) => self.end_heap(space),
                Some((End::Exec, _)) => self.replace_heap(space),
            }
            if self.gone.contains_key(&space) && self.plan.keeps_running() {
                self.retiring.insert(space);
            }
        }
    }

    /// Blocks of a process that ended leave the live map and are in use as of its end.
    pub(super) fn end_heap(&mut self, space: ProcessKey) {
        let entries = &mut self.live_entries;
        let was_live = |address| entries.remove(LiveKey { space, address });
        self.recorder.counters.frees_reconciled += self.recorder.heap.end(space, was_live);
    }

    /// Blocks of a program that was replaced leave the live map, and are in use no more.
    pub(super) fn replace_heap(&mut self, space: ProcessKey) {
        for address in self.recorder.heap.replace(space) {
            self.live_entries.remove(LiveKey { space, address });
        }
    }

    /// Time until the recording is over, if that is known.
    pub fn until_end(&self) -> Option<Duration> {
        self.ends_ns.map(until)
    }

    /// Whether the recording's time is over.
    pub fn has_ended(&self) -> bool {
        self.until_end().is_some_and(|left| left.is_zero())
    }

    /// Time until the recording's last moments, if that is known and they have not come.
    pub fn until_last_moments(&self) -> Option<Duration> {
        self.until_end().filter(|_| self.last_hurry.is_none()).map(|left| left.saturating_sub(LAST_MOMENTS))
    }

    /// The recording ends soon: on a busy host, too, its end comes when it should.
    pub fn last_moments(&mut self) {
        if self.until_last_moments().is_some_and(|left| left.is_zero()) {
            self.last_hurry = Some(Hurry::begin());
        }
    }

    /// Once a second: while records are being lost, memory stays bounded and figures near the truth without anybody asking.
    /// Nobody waits for this cut, either: it is complete when the rings have been read so far.
    pub(super) fn reconcile_if_lossy(&mut self) -> anyhow::Result<()> {
        if self.waiting_cut.is_some() {
            return Ok(());
        }
        if !self.plan.live || self.totals.records_lost()? == self.ledger.records_lost() {
            // Every block in the live map is known: ends need not be remembered for those that are not.
            self.gone.clear();
            return Ok(());
        }
        let _hurry = Hurry::begin();
        self.waiting_cut = Some(self.begin_cut()?);
        Ok(())
    }

    /// Completes the cut that waits, if it has been reached.
    pub(super) fn complete_waiting_cut(&mut self) {
        if let Some(begun) = self.waiting_cut.take() {
            if self.has_reached(&begun) {
                self.complete(begun, true);
                self.recorder.end_cut();
            } else {
                self.waiting_cut = Some(begun);
            }
        }
    }
}

/// Time until a time (CLOCK_MONOTONIC) comes; zero if it has come.
fn until(time_ns: u64) -> Duration {
    Duration::from_nanos(time_ns.saturating_sub(monotonic_ns()))
}

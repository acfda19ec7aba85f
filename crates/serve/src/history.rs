//! Totals of a recording over time: of all processes, and of the largest ones. All samples of the last hour are kept,
//! and one for each minute of the day before that, within a bound on memory. Where samples are missing, there is a gap.

mod kept;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use heapbpf_profile::estimates::{Pool, exact};
use heapbpf_profile::model::{Placement, Process, Profile};
use heapbpf_profile::process_pools::pools_of_processes;
use heapbpf_profile::units::unix_ms;
use heapbpf_profile::value::Value;
use heapbpf_record::requests::FinishedProfile;
use heapbpf_statistics::estimate::Estimate;
use sampler_ebpf::abi::ProcessKey;
use serde::{Deserialize, Serialize};

pub use self::kept::KeptHistory;
use super::page::{CONFIDENCE, ClientView};

/// Time between samples, if they do not cost too much.
pub const EVERY: Duration = Duration::from_secs(10);
/// Age up to which all samples are kept, in milliseconds.
const RECENT_MS: u64 = 3_600_000;
/// Minimum time between older samples, in milliseconds: a minute, less what samples may come early or late.
const APART_MS: u64 = 55_000;
/// Age up to which older samples are kept, in milliseconds.
const LONGEST_MS: u64 = 86_400_000;
/// Maximum number of processes in a sample: those with the most in use.
const MOST_PROCESSES: usize = 100;
/// Maximum size of the history, in bytes. Beyond it, the oldest samples are dropped.
const MOST_BYTES: usize = 16 << 20;
/// Size of an entry in the set of processes and of the counts of its pointer, in bytes.
const ENTRY_BYTES: usize = 32;
/// Maximum number of programs in an answer: those with the most in use at any time.
const MOST_PROGRAMS: usize = 50;

/// Figures of one or several processes, in bytes. NaN stands for what is not known.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Figures {
    #[serde(with = "whole_bytes")]
    inuse: f64,
    #[serde(with = "whole_bytes")]
    low: f64,
    #[serde(with = "whole_bytes")]
    high: f64,
    /// What was allocated since the start of the recording.
    #[serde(with = "whole_bytes")]
    alloc: f64,
    /// Whether `alloc` is known to be an exact total. Otherwise it is an estimate.
    counted: bool,
}

impl Figures {
    const UNKNOWN: Self = Self { inuse: f64::NAN, low: f64::NAN, high: f64::NAN, alloc: 0.0, counted: false };

    /// The figures of a pool: that of a process (by its index), or of all.
    fn of(profile: &Profile, pool: &Pool, process: Option<usize>) -> Self {
        let exact = exact(profile, process, Value::AllocSpace).map(|bytes| bytes as f64);
        let (alloc, counted) = (exact.unwrap_or_else(|| pool.total(Value::AllocSpace)), exact.is_some());
        // Without any sample, 0 would be an estimate from nothing.
        if profile.rows.is_empty() || !pool.knows(profile, Value::InuseSpace) {
            return Self { alloc, counted, ..Self::UNKNOWN };
        }
        let Estimate { estimate, low, high, .. } = pool.estimate(profile, Value::InuseSpace, CONFIDENCE);
        Self { inuse: estimate, low: low.unwrap_or(f64::NAN), high: high.unwrap_or(f64::NAN), alloc, counted }
    }

    /// The sum over processes, without those whose memory in use is not known. Processes are sampled independently, so
    /// the squares of the distances to the ends of their intervals add (G. Y. Zou and A. Donner, Statistics in Medicine
    /// 27, 2008, 1693). `lossy`: the ends also cover losses, which are not random; then the distances themselves add.
    fn sum<'a>(parts: impl Iterator<Item = &'a Self>, lossy: bool) -> Self {
        let (mut sum, mut below, mut above) = (Self::UNKNOWN, 0.0, 0.0);
        let term = |distance: f64| if lossy { distance } else { distance * distance };
        for part in parts {
            sum.alloc += part.alloc;
            if !part.inuse.is_nan() {
                add(&mut sum.inuse, part.inuse);
                below += term(part.inuse - part.low);
                above += term(part.high - part.inuse);
            }
        }
        let distance = |terms: f64| if lossy { terms } else { terms.sqrt() };
        Self { low: sum.inuse - distance(below), high: sum.inuse + distance(above), ..sum }
    }
}

/// Adds a figure to a sum; NaN stands for what is not known.
fn add(sum: &mut f64, figure: f64) {
    if sum.is_nan() {
        *sum = figure;
    } else if !figure.is_nan() {
        *sum += figure;
    }
}

/// A process generation, and what filters ask about it.
#[derive(Debug, PartialEq, Eq, Hash)]
struct KnownProcess {
    key: ProcessKey,
    pid: u32,
    comm: String,
    cgroup: String,
    placement: Placement,
}

impl KnownProcess {
    /// Its size, in bytes.
    fn bytes(&self) -> usize {
        let Placement { container, pod, unit } = &self.placement;
        let texts = [&self.comm, &self.cgroup, container, pod, unit];
        size_of::<Self>() + ENTRY_BYTES + texts.iter().map(|text| text.len()).sum::<usize>()
    }

    fn is_seen(&self, seen: &ClientView) -> bool {
        let Self { pid, comm, cgroup, placement, .. } = self;
        [&seen.scope, &seen.filter].iter().all(|filter| filter.admits(*pid, comm, cgroup, placement))
    }
}

/// Totals at one time.
#[derive(Debug)]
struct Sample {
    /// Unix time in milliseconds.
    time_ms: u64,
    /// Whether samples are missing before it.
    after_gap: bool,
    /// Whether an earlier run took it.
    is_earlier: bool,
    /// Whether losses may have affected one of the largest processes.
    lossy: bool,
    /// Whether there were more processes than the largest.
    more: bool,
    whole: Figures,
    largest: Vec<(Arc<KnownProcess>, Figures)>,
}

impl Sample {
    /// Its size without the processes themselves, in bytes.
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.largest.len() * size_of::<(Arc<KnownProcess>, Figures)>()
    }

    /// Bytes that each of its processes, and all of them, allocated per second since an earlier sample. A process that
    /// is not among the largest of both has no rate, and neither have an exact total and an estimate.
    fn rates(&self, before: Option<&Self>) -> (Vec<f64>, f64) {
        let Some(before) = before else { return (vec![f64::NAN; self.largest.len()], f64::NAN) };
        let seconds = self.time_ms.saturating_sub(before.time_ms) as f64 / 1e3;
        let rate = |now: &Figures, before: &Figures| {
            if now.counted == before.counted { (now.alloc - before.alloc).max(0.0) / seconds } else { f64::NAN }
        };
        let earlier: HashMap<*const KnownProcess, &Figures> =
            before.largest.iter().map(|(known, figures)| (Arc::as_ptr(known), figures)).collect();
        let of_process = |(known, figures): &(Arc<KnownProcess>, Figures)| {
            earlier.get(&Arc::as_ptr(known)).map_or(f64::NAN, |&before| rate(figures, before))
        };
        (self.largest.iter().map(of_process).collect(), rate(&self.whole, &before.whole))
    }
}

/// The samples, and the processes in them.
#[derive(Debug, Default)]
pub struct History {
    /// Samples of more than an hour ago.
    older: VecDeque<Sample>,
    recent: VecDeque<Sample>,
    known: HashSet<Arc<KnownProcess>>,
    bytes: usize,
    /// Whether it has samples of this run. Those before them are of earlier runs.
    has_begun: bool,
    keeper: Option<kept::Keeper>,
}

impl History {
    /// Adds the totals of a moment. `pause`: the planned time since the last ones. If more than twice that has passed,
    /// there is a gap.
    pub fn add(&mut self, made: &FinishedProfile, pause: Duration) {
        let profile = &made.profile;
        let time_ms = unix_ms(profile.header.time);
        let last_ms = self.samples().next_back().map(|last| last.time_ms);
        if last_ms.is_some_and(|last| last >= time_ms) {
            return;
        }
        let longest_ms = 2 * pause.as_millis() as u64;
        let pools = pools_of_processes(profile).into_iter().enumerate();
        let mut pools: Vec<(usize, Pool)> = pools.take(made.keys.len()).collect();
        let size = |(_, pool): &(usize, Pool)| [Value::InuseSpace, Value::AllocSpace].map(|value| pool.total(value));
        pools.sort_by(|a, b| {
            let (a, b) = (size(a), size(b));
            b[0].total_cmp(&a[0]).then(b[1].total_cmp(&a[1]))
        });
        let more = pools.len() > MOST_PROCESSES;
        pools.truncate(MOST_PROCESSES);
        let mut largest = Vec::with_capacity(pools.len());
        for (index, pool) in &pools {
            let known = self.known(made.keys[*index], &profile.processes[*index]);
            largest.push((known, Figures::of(profile, pool, Some(*index))));
        }
        // Earlier runs counted from other starts.
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        let sample = Sample {
            time_ms,
            after_gap: is_first || last_ms.is_none_or(|last| time_ms - last > longest_ms),
            is_earlier: false,
            lossy: pools.iter().any(|(_, pool)| pool.is_touched(profile, Value::InuseSpace)),
            more,
            whole: Figures::of(profile, &Pool::whole(profile), None),
            largest,
        };
        if let Some(keeper) = &mut self.keeper
            && !profile.rows.is_empty()
        {
            keeper.offer(&sample);
        }
        self.keep(sample);
    }

    /// What a client sees of the samples from `from_ms` to `to_ms` (Unix time in milliseconds, both included).
    pub fn answer(&self, from_ms: u64, to_ms: u64, seen: &ClientView) -> Past {
        let (mut past, programs) = self.columns(from_ms, to_ms, seen);
        let mut programs: Vec<(&str, Vec<Entry>)> = programs.into_iter().collect();
        programs.sort_by_cached_key(|(_, entries)| Reverse(entries.iter().map(|entry| entry.inuse).max().flatten()));
        programs.truncate(MOST_PROGRAMS);
        let count = past.time_ms.len();
        past.programs = programs.into_iter().map(|(comm, entries)| Program::new(comm, &entries, count)).collect();
        past
    }

    /// The columns of an answer without programs, and the entries of each command name.
    fn columns(&self, from_ms: u64, to_ms: u64, seen: &ClientView) -> (Past, BTreeMap<&str, Vec<Entry>>) {
        let mut past = Past { confidence: CONFIDENCE, ..Past::default() };
        let mut programs = BTreeMap::new();
        // Before a restart of the machine, a PID belonged to another process.
        let present = seen.scope.has_pid().then(|| self.present());
        let mut last: Option<&Sample> = None;
        for sample in self.samples().take_while(|sample| sample.time_ms <= to_ms) {
            let before = last.replace(sample).filter(|_| !sample.after_gap);
            if sample.time_ms >= from_ms {
                past.add(sample, before, seen, present.as_ref(), &mut programs);
            }
        }
        (past, programs)
    }

    /// The processes in samples of this run.
    fn present(&self) -> HashSet<ProcessKey> {
        let own = self.samples().filter(|sample| !sample.is_earlier);
        own.flat_map(|sample| &sample.largest).map(|(known, _)| known.key).collect()
    }

    /// All samples, oldest first.
    fn samples(&self) -> impl DoubleEndedIterator<Item = &Sample> {
        self.older.iter().chain(&self.recent)
    }

    /// The one entry of a process.
    fn known(&mut self, key: ProcessKey, process: &Process) -> Arc<KnownProcess> {
        let Process { pid, comm, cgroup, placement, .. } = process;
        let (comm, cgroup, placement) = (comm.clone(), cgroup.clone(), placement.clone());
        let known = KnownProcess { key, pid: *pid, comm, cgroup, placement };
        if let Some(known) = self.known.get(&known) {
            return Arc::clone(known);
        }
        self.bytes += known.bytes();
        let known = Arc::new(known);
        self.known.insert(Arc::clone(&known));
        known
    }

    /// Keeps a sample, and drops others as their age and the bounds require.
    fn keep(&mut self, sample: Sample) {
        let now_ms = sample.time_ms;
        self.bytes += sample.bytes();
        self.recent.push_back(sample);
        while let Some(sample) = older_than(&mut self.recent, RECENT_MS, now_ms) {
            if self.older.back().is_none_or(|last| last.time_ms + APART_MS <= sample.time_ms) {
                self.older.push_back(sample);
            } else {
                if let Some(next) = self.recent.front_mut() {
                    next.after_gap |= sample.after_gap;
                }
                self.forget(sample);
            }
        }
        while let Some(sample) = older_than(&mut self.older, LONGEST_MS, now_ms) {
            self.forget(sample);
        }
        while self.bytes > MOST_BYTES && self.older.len() + self.recent.len() > 1 {
            let Some(sample) = self.older.pop_front().or_else(|| self.recent.pop_front()) else { break };
            self.forget(sample);
        }
    }

    /// Forgets a sample, and the processes that are in no other one.
    fn forget(&mut self, sample: Sample) {
        self.bytes -= sample.bytes();
        for (known, _) in sample.largest {
            // This pointer, and that of the set.
            if Arc::strong_count(&known) == 2 {
                self.bytes -= known.bytes();
                self.known.remove(&*known);
            }
        }
    }
}

/// Adds the totals at the end of a run, and waits up to a second until they are on disk, if samples are kept there.
/// `pause`: the longest planned time since the last totals.
pub fn end(history: &Mutex<History>, last: &FinishedProfile, pause: Duration) {
    let mut locked = history.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(keeper) = &mut locked.keeper {
        // Also if the last minute has one.
        keeper.last_ms = None;
    }
    locked.add(last, pause);
    let keeper = locked.keeper.take();
    drop(locked);
    if let Some(keeper) = keeper {
        keeper.finish();
    }
}

/// Takes the first sample if it is older than `age_ms`.
fn older_than(samples: &mut VecDeque<Sample>, age_ms: u64, now_ms: u64) -> Option<Sample> {
    samples.front().filter(|first| first.time_ms + age_ms < now_ms)?;
    samples.pop_front()
}

/// What a client sees of the history, as columns. All figures are in bytes; `None` stands for what is not known.
#[derive(Debug, Default, Serialize)]
pub struct Past {
    confidence: f64,
    /// Unix time in milliseconds.
    time_ms: Vec<u64>,
    /// 1 if samples are missing before this one.
    after_gap: Vec<u8>,
    inuse: Vec<Option<i64>>,
    low: Vec<Option<i64>>,
    high: Vec<Option<i64>>,
    /// Since the sample before.
    alloc_per_second: Vec<Option<i64>>,
    programs: Vec<Program>,
    /// Times of the profiles that are kept and can be compared, Unix time in milliseconds.
    pub profiles_ms: Vec<u64>,
}

/// Figures of all processes with the same command name in one sample. Targets choose their names, so a name takes
/// memory only where it occurs.
struct Entry {
    /// Number of the sample in the answer.
    at: usize,
    inuse: Option<i64>,
    alloc_per_second: Option<i64>,
}

/// Figures of all processes with the same command name, at the times of the samples.
#[derive(Debug, Serialize)]
struct Program {
    comm: String,
    inuse: Vec<Option<i64>>,
    alloc_per_second: Vec<Option<i64>>,
}

impl Program {
    /// Columns of `count` samples. Where there is no entry, the program does not occur.
    fn new(comm: &str, entries: &[Entry], count: usize) -> Self {
        let mut program = Self { comm: comm.to_owned(), inuse: vec![None; count], alloc_per_second: vec![None; count] };
        for entry in entries {
            program.inuse[entry.at] = entry.inuse;
            program.alloc_per_second[entry.at] = entry.alloc_per_second;
        }
        program
    }
}

impl Past {
    /// `present`: if given, what earlier runs know of other processes is left out.
    fn add<'a>(
        &mut self,
        sample: &'a Sample,
        before: Option<&Sample>,
        seen: &ClientView,
        present: Option<&HashSet<ProcessKey>>,
        programs: &mut BTreeMap<&'a str, Vec<Entry>>,
    ) {
        let (rates, mut rate) = sample.rates(before);
        let present = present.filter(|_| sample.is_earlier);
        let is_seen = |known: &Arc<KnownProcess>| {
            known.is_seen(seen) && present.is_none_or(|present| present.contains(&known.key))
        };
        let largest = sample.largest.iter().zip(rates).filter(|((known, _), _)| is_seen(known));
        let largest: Vec<(&'a KnownProcess, &Figures, f64)> =
            largest.map(|((known, figures), rate)| (&**known, figures, rate)).collect();
        let mut sums: BTreeMap<&'a str, (f64, f64)> = BTreeMap::new();
        for &(known, figures, rate) in &largest {
            let (inuse, per_second) = sums.entry(&known.comm).or_insert((f64::NAN, f64::NAN));
            add(inuse, figures.inuse);
            add(per_second, rate);
        }
        let mut whole = sample.whole;
        if !seen.is_everything() {
            whole = Figures::sum(largest.iter().map(|(_, figures, _)| *figures), sample.lossy);
            if sample.more {
                // Processes that are not in the sample may belong to the part.
                whole.high = f64::NAN;
            }
            rate = f64::NAN;
            largest.iter().for_each(|(.., of_process)| add(&mut rate, *of_process));
        }
        for (comm, (inuse, per_second)) in sums {
            let (inuse, alloc_per_second) = (bytes(inuse), bytes(per_second));
            programs.entry(comm).or_default().push(Entry { at: self.time_ms.len(), inuse, alloc_per_second });
        }
        self.time_ms.push(sample.time_ms);
        self.after_gap.push(u8::from(sample.after_gap));
        self.inuse.push(bytes(whole.inuse));
        self.low.push(bytes(whole.low));
        self.high.push(bytes(whole.high));
        self.alloc_per_second.push(bytes(rate));
    }
}

/// A figure in whole bytes, if it is known.
fn bytes(figure: f64) -> Option<i64> {
    figure.is_finite().then(|| figure.round() as i64)
}

/// A figure on disk: whole bytes, or nothing if it is not known.
mod whole_bytes {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(super) fn serialize<S: Serializer>(figure: &f64, to: S) -> Result<S::Ok, S::Error> {
        super::bytes(*figure).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        Ok(Option::<i64>::deserialize(from)?.map_or(f64::NAN, |bytes| bytes as f64))
    }
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;

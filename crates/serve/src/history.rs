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
use serde::Serialize;

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
#[derive(Clone, Copy, Debug)]
struct Figures {
    inuse: f64,
    low: f64,
    high: f64,
    /// What was allocated since the start of the recording.
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

#[cfg(test)]
mod tests {
    use std::time::{Instant, UNIX_EPOCH};

    use heapbpf_access::filter::Filter;
    use heapbpf_profile::testing;

    use super::*;

    pub(super) fn everything() -> ClientView {
        ClientView { scope: Filter::default(), filter: Filter::default() }
    }

    /// What a token with this scope sees.
    pub(super) fn scoped(key: &str, value: &str) -> ClientView {
        let mut scope = Filter::default();
        assert_eq!(scope.set(key, value), Ok(true));
        ClientView { scope, ..everything() }
    }

    /// A profile at some second, with so many samples in use, and megabytes allocated, in its first process.
    pub(super) fn made(second: u64, samples: u64) -> FinishedProfile {
        let mut profile = testing::small();
        profile.header.time = UNIX_EPOCH + Duration::from_secs(second);
        profile.rows[0].inuse = testing::sums(samples, 70_000, 524_288);
        profile.processes[0].exact_alloc_bytes = Some(samples * 1_000_000);
        profile.processes[1].exact_alloc_bytes = Some(0);
        let keys = profile.processes.iter().map(|process| key(process.pid)).collect();
        let (stats, recent) = Default::default();
        FinishedProfile {
            profile,
            stats,
            keys,
            recent,
            begun: Instant::now(),
            cost: Duration::ZERO,
            cpu: Duration::ZERO,
        }
    }

    fn key(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 5, tgid, exec_id: 0 }
    }

    /// Keeps a sample of these processes: PID, in use, allocated.
    pub(super) fn keep(
        history: &mut History,
        second: u64,
        after_gap: bool,
        processes: &[(u32, f64, f64)],
        cgroup: &str,
    ) {
        let mut largest = Vec::with_capacity(processes.len());
        for &(pid, inuse, alloc) in processes {
            let process = Process { pid, comm: format!("p{}", pid % 10), cgroup: cgroup.into(), ..Process::default() };
            largest.push((history.known(key(pid), &process), figures(inuse, alloc)));
        }
        keep_largest(history, second, after_gap, largest);
    }

    fn figures(inuse: f64, alloc: f64) -> Figures {
        Figures { inuse, low: inuse, high: inuse, alloc, counted: true }
    }

    fn keep_largest(history: &mut History, second: u64, after_gap: bool, largest: Vec<(Arc<KnownProcess>, Figures)>) {
        let whole = Figures::sum(largest.iter().map(|(_, figures)| figures), false);
        let (is_earlier, lossy, more) = (false, false, false);
        history.keep(Sample { time_ms: second * 1000, after_gap, is_earlier, lossy, more, whole, largest });
    }

    /// Size of a history, counted anew.
    fn size(history: &History) -> usize {
        history.samples().map(Sample::bytes).sum::<usize>() + history.known.iter().map(|it| it.bytes()).sum::<usize>()
    }

    #[test]
    fn an_hour_is_kept_whole_and_a_day_by_minutes() {
        const LAST: u64 = 100_000;
        let mut history = History::default();
        for second in (0..=LAST).step_by(10) {
            // This sample is not the first of its minute.
            keep(&mut history, second, second == 50_010, &[], "");
        }
        let times: Vec<u64> = history.samples().map(|sample| sample.time_ms / 1000).collect();
        assert_eq!(times.last(), Some(&LAST));
        let (older, recent) = times.split_at(history.older.len());
        assert_eq!((recent[0], recent.len()), (LAST - 3_600, 361));
        assert!(recent.windows(2).all(|pair| pair[1] - pair[0] == 10));
        assert!(older.windows(2).all(|pair| pair[1] - pair[0] == 60), "{older:?}");
        assert!((LAST - 86_400..LAST - 86_340).contains(&older[0]) && recent[0] - older[older.len() - 1] <= 60);
        let gaps: Vec<u64> = history.samples().filter(|it| it.after_gap).map(|it| it.time_ms / 1000).collect();
        assert_eq!(gaps, [50_040], "a gap stays one when the sample after it is dropped");
        assert_eq!(history.bytes, size(&history));
    }

    #[test]
    fn what_is_missing_is_a_gap_and_has_no_rate() {
        let mut history = History::default();
        for (second, samples) in [(100, 1), (110, 2), (120, 5), (120, 9), (141, 6), (151, 6)] {
            history.add(&made(second, samples), EVERY);
        }
        let past = history.answer(0, u64::MAX, &everything());
        assert_eq!(past.time_ms, [100_000, 110_000, 120_000, 141_000, 151_000]);
        assert_eq!(past.after_gap, [1, 0, 0, 1, 0]);
        assert_eq!(past.alloc_per_second, [None, Some(100_000), Some(300_000), None, Some(0)]);
        let mut ends = past.low.iter().zip(&past.inuse).zip(&past.high);
        assert!(ends.all(|((low, inuse), high)| low < inuse && inuse < high), "{past:?}");
        // An answer that begins later has the rate since the sample before.
        let part = history.answer(110_001, 120_000, &everything());
        assert_eq!((&*part.time_ms, &*part.alloc_per_second), (&[120_000][..], &[Some(300_000)][..]));
        let slower = Duration::from_secs(25);
        history.add(&made(200, 6), slower);
        assert!(!history.recent[5].after_gap, "a longer pause was planned");
    }

    #[test]
    fn before_the_first_sample_memory_in_use_is_not_known() {
        let mut history = History::default();
        let mut empty = made(100, 1);
        empty.profile.rows.clear();
        history.add(&empty, EVERY);
        history.add(&made(110, 1), EVERY);
        let past = history.answer(0, u64::MAX, &everything());
        assert_eq!((past.inuse[0], past.low[0], past.high[0]), (None, None, None));
        assert!(past.inuse[1].is_some() && past.low[1].is_some(), "{past:?}");
        assert!(past.programs.iter().all(|program| program.inuse[0].is_none() && program.inuse[1].is_some()));
        assert_eq!(past.alloc_per_second, [None, Some(0)], "what was counted is known");
    }

    #[test]
    fn a_token_sees_what_its_scope_admits() {
        let mut history = History::default();
        [(100, 10), (110, 20)].iter().for_each(|&(second, samples)| history.add(&made(second, samples), EVERY));
        let names = |seen: &ClientView| -> Vec<String> {
            history.answer(0, u64::MAX, seen).programs.into_iter().map(|program| program.comm).collect()
        };
        assert_eq!(names(&everything()), ["server", "worker \"x\""], "the largest first");
        assert_eq!(names(&scoped("pid", "4242")), ["server"]);
        assert_eq!(names(&scoped("comm", "work*")), ["worker \"x\""]);
        assert_eq!(names(&scoped("cgroup", "/system.slice")), ["server"]);
        assert_eq!(names(&ClientView { filter: scoped("pid", "4300").scope, ..scoped("pid", "4242") }), [""; 0]);
        let [all, own] = [everything(), scoped("pid", "4242")].map(|seen| history.answer(0, u64::MAX, &seen));
        assert_eq!(own.inuse, own.programs[0].inuse);
        assert!(own.inuse[1] < all.inuse[1] && own.low[1] < own.inuse[1] && own.inuse[1] < own.high[1], "{own:?}");
        assert_eq!((own.alloc_per_second[1], all.alloc_per_second[1]), (Some(1_000_000), Some(1_000_000)));
        let nobody = history.answer(0, u64::MAX, &scoped("pid", "1"));
        assert_eq!((&*nobody.inuse, &*nobody.alloc_per_second), (&[None, None][..], &[None, None][..]));
        let json = serde_json::to_value(&nobody).unwrap();
        assert!(json["programs"] == serde_json::json!([]) && json["low"][0].is_null(), "{json}");
    }

    #[test]
    fn processes_come_and_go() {
        let mut history = History::default();
        keep(&mut history, 10, true, &[(1, 5.0, 100.0), (2, 7.0, 900.0)], "");
        keep(&mut history, 20, false, &[(1, 5.0, 200.0), (11, 2.0, 1e9)], "");
        keep(&mut history, 30, false, &[(3, 1.0, 50.0)], "");
        let past = history.answer(0, u64::MAX, &scoped("cgroup", "/"));
        assert_eq!(past.inuse, [None; 3], "a cgroup that is not known is below none");
        let past = history.answer(0, u64::MAX, &scoped("comm", "p*"));
        assert_eq!(past.inuse, [Some(12), Some(7), Some(1)]);
        assert_eq!(past.alloc_per_second, [None, Some(10), None], "what a process had allocated before is not new");
        let program = |comm: &str| past.programs.iter().find(|program| program.comm == comm).unwrap();
        assert_eq!(program("p1").inuse, [Some(5), Some(7), None]);
        assert_eq!(program("p2").inuse, [Some(7), None, None]);
        assert_eq!(program("p3").inuse, [None, None, Some(1)]);
        assert_eq!((history.known.len(), history.bytes), (4, size(&history)));
        keep(&mut history, 200_000, true, &[(3, 1.0, 50.0)], "");
        assert_eq!((history.known.len(), history.bytes), (1, size(&history)), "only what is left is known");
    }

    #[test]
    fn exact_totals_and_estimates_are_not_compared() {
        let mut history = History::default();
        for (second, counted) in [(100, true), (110, false), (120, false), (130, true), (140, true)] {
            let mut made = made(second, 1);
            if !counted {
                made.profile.processes[0].exact_alloc_bytes = None;
            }
            history.add(&made, EVERY);
        }
        let rates = [None, None, Some(0), None, Some(0)];
        assert_eq!(history.answer(0, u64::MAX, &everything()).alloc_per_second, rates);
        let own = history.answer(0, u64::MAX, &scoped("pid", "4242"));
        assert_eq!(own.alloc_per_second, rates);
        assert_eq!(own.programs[0].alloc_per_second, rates);
    }

    #[test]
    fn a_part_that_may_have_more_processes_has_no_upper_end() {
        let mut history = History::default();
        let mut made = made(100, 10);
        for (second, count) in [(100, MOST_PROCESSES), (110, MOST_PROCESSES + 1)] {
            made.profile.header.time = UNIX_EPOCH + Duration::from_secs(second);
            for pid in 5000 + made.profile.processes.len() as u32..5000 + count as u32 {
                let process = Process { pid, ..made.profile.processes[1].clone() };
                made.profile.processes.push(process);
                made.keys.push(key(pid));
            }
            history.add(&made, EVERY);
        }
        let [all, own] = [everything(), scoped("pid", "4242")].map(|seen| history.answer(0, u64::MAX, &seen));
        assert!(all.high[0].is_some() && all.high[1].is_some(), "{all:?}");
        assert!(own.high[0].is_some() && own.high[1].is_none(), "{own:?}");
        assert!(own.inuse[0] == own.inuse[1] && own.low[0] == own.low[1] && own.low[1].is_some(), "{own:?}");
    }

    #[test]
    fn a_name_takes_memory_only_where_it_occurs() {
        let mut history = History::default();
        for turn in 0..100 {
            let mut largest = Vec::new();
            for pid in turn * 100..(turn + 1) * 100 {
                let process = Process { pid, comm: pid.to_string(), ..Process::default() };
                largest.push((history.known(key(pid), &process), figures(f64::from(pid), 0.0)));
            }
            keep_largest(&mut history, u64::from(turn) * 10, false, largest);
        }
        let (_, names) = history.columns(0, u64::MAX, &everything());
        assert_eq!((names.len(), names.values().map(Vec::len).sum::<usize>()), (10_000, 10_000));
        let past = history.answer(0, u64::MAX, &everything());
        let kept: Vec<&str> = past.programs.iter().map(|program| &*program.comm).collect();
        let largest: Vec<String> = (9_950..10_000).rev().map(|pid: u32| pid.to_string()).collect();
        assert_eq!(kept, largest, "the largest first");
        let inuse = &past.programs[0].inuse;
        assert_eq!((inuse.len(), inuse[99]), (100, Some(9_999)));
        assert!(inuse[..99].iter().all(Option::is_none));
    }

    #[test]
    fn memory_is_bounded_whatever_targets_do() {
        let (mut history, long) = (History::default(), "/".repeat(4000));
        for turn in 0..100 {
            let processes: Vec<_> = (0..MOST_PROCESSES as u32).map(|it| (turn * 1000 + it, 1.0, 1.0)).collect();
            keep(&mut history, u64::from(turn) * 10, turn == 0, &processes, &long);
            assert!(history.bytes <= MOST_BYTES, "{} bytes", history.bytes);
        }
        assert_eq!(history.bytes, size(&history));
        assert!((10..100).contains(&history.recent.len()), "the oldest are dropped: {}", history.recent.len());
        assert_eq!(history.recent.back().map(|last| last.time_ms), Some(990_000));
        // Processes that stay need no more than their figures.
        let mut usual = History::default();
        let processes: Vec<_> = (0..MOST_PROCESSES as u32).map(|pid| (pid, 1.0, 1.0)).collect();
        for minute in 0..1500 {
            keep(&mut usual, minute * 60, false, &processes, "/system.slice/some.service");
        }
        assert_eq!((usual.samples().count(), usual.known.len()), (1441, MOST_PROCESSES), "a day");
        assert!(usual.bytes < MOST_BYTES / 2, "{} bytes", usual.bytes);
    }

    #[test]
    fn intervals_of_independent_figures_add_up() {
        let part = |low, inuse, high| Figures { inuse, low, high, ..figures(inuse, 1.0) };
        let parts = [part(70.0, 100.0, 140.0), Figures { alloc: 1.0, ..Figures::UNKNOWN }, part(60.0, 100.0, 130.0)];
        let sum = |lossy, count| Figures::sum(parts.iter().take(count), lossy);
        let ends = |it: Figures| [it.low, it.inuse, it.high, it.alloc];
        assert_eq!(ends(sum(false, 3)), [150.0, 200.0, 250.0, 3.0]);
        assert_eq!(ends(sum(true, 3)), [130.0, 200.0, 270.0, 3.0], "bounds on losses add");
        assert_eq!(ends(sum(false, 2))[..3], [70.0, 100.0, 140.0]);
        let unbounded = Figures::sum([part(f64::NAN, 100.0, f64::NAN), parts[0]].iter(), false);
        assert!(unbounded.inuse == 200.0 && unbounded.low.is_nan() && unbounded.high.is_nan());
        assert!(Figures::sum([].iter(), false).inuse.is_nan());
    }
}

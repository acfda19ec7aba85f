//! Resident memory of the targets, measured when a profile is made: for all of them by the kernel's own sums; and by
//! purpose where there is CPU time to read mappings, the largest process first. Where glibc is the allocator, its
//! arenas are read before the mappings.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use heapbpf_host::arenas::{ArenaReader, ArenaRequest};
use heapbpf_host::cgroup::Cgroup;
use heapbpf_host::clock::{monotonic_ns, thread_cpu_time};
use heapbpf_host::process::Stat;
use heapbpf_host::processes::starts_agree;
use heapbpf_host::resident;
use heapbpf_profile::model::{Glibc, Process, PythonArenas, Resident, glibc_version};
use sampler_ebpf::abi::ProcessKey;

use super::snapshot::Measured;
use crate::attaching::arenas::ResidentAt;

/// CPU time for reading mappings for a profile that is requested again and again (`top`, the page, scrapers): first that
/// for processes in which something was counted, then that for the others. A host has thousands of the latter.
const OF_A_REFRESH: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(5)];
/// The same for any other profile, for all processes together.
const OF_A_FILE: Duration = Duration::from_millis(500);
/// Time limit for reading arenas for a file, for all processes together.
const ARENAS_OF_A_FILE: Duration = Duration::from_secs(3);
/// Unspent time adds up to at most this much, for processes that take longer.
const MOST_SAVED: Duration = Duration::from_millis(500);
/// CPU time that reading mappings is expected to take if it was not measured: per process, and per page.
const FOR_A_PROCESS: Duration = Duration::from_micros(500);
const FOR_A_PAGE: Duration = Duration::from_nanos(12);
/// CPU time that walking over the blocks of arenas is expected to take per MiB.
const FOR_A_MIB: Duration = Duration::from_micros(700);
const PAGE_BYTES: u64 = 4096;
/// Maximum number of a process's blocks that are looked up in its mappings, to tell heaps from other memory.
const MOST_BLOCKS: usize = 4096;
/// Maximum number of processes whose last readings are kept.
const MOST_LAST: usize = 4096;
/// Processes that may end are read again after this many times the CPU time that it took.
const LOOK_SELDOM: u32 = 100;
/// Mappings are read again if the process's memory has changed by more than one part in this many.
const CHANGED: u64 = 64;
/// A refresh does not read sums again within this time: its arenas and its mappings both depend on them. For other
/// profiles, heapbpf's hooks are removed in between.
const FRESH: Duration = Duration::from_millis(100);
/// Maximum number of idle processes that have ended and are still shown, and for how long.
const MOST_ENDED: usize = 64;
const SHOWN_ENDED: Duration = Duration::from_secs(3600);

/// Time between the readings of a process from which growth is measured, ns.
const GROWTH_OVER_NS: u64 = 60_000_000_000;
/// Shortest time over which growth is measured, ns.
const SHORTEST_GROWTH_NS: u64 = 1_000_000_000;

/// Earlier readings of a process's resident memory.
#[derive(Clone, Copy)]
struct Earlier {
    /// [`AtAttach::since_ns`](crate::attaching::arenas::AtAttach::since_ns) of the program that was read.
    since_ns: u64,
    /// The one from which growth is measured: the first one, and later one that is one to two minutes old.
    from: ResidentAt,
    /// The one that replaces it.
    next: ResidentAt,
}

impl Earlier {
    /// Notes a reading. Returns the growth up to it, in bytes per minute; `None` if too little time has passed.
    fn growth_per_minute(&mut self, now: ResidentAt) -> Option<i64> {
        if now.at_ns.saturating_sub(self.next.at_ns) >= GROWTH_OVER_NS {
            self.from = std::mem::replace(&mut self.next, now);
        }
        growth_per_minute(self.from, now)
    }
}

/// Growth between two readings in bytes per minute; `None` if too little time has passed.
fn growth_per_minute(from: ResidentAt, to: ResidentAt) -> Option<i64> {
    let ns = Some(to.at_ns.saturating_sub(from.at_ns)).filter(|ns| *ns >= SHORTEST_GROWTH_NS)?;
    let per_minute = (to.bytes as f64 - from.bytes as f64) * 60e9 / ns as f64;
    Some(per_minute.round() as i64)
}

/// What the mappings of a process showed.
struct Reading {
    /// The kernel's sum at that time.
    sum_bytes: u64,
    resident: Resident,
    /// CPU time that reading them took.
    took: Duration,
}

impl Reading {
    /// Whether it is still close enough for a refresh: `bytes` is the kernel's sum now.
    fn is_of(&self, bytes: u64) -> bool {
        self.sum_bytes.abs_diff(bytes) <= bytes / CHANGED
    }
}

/// The kernel's own sums of a process.
struct Sums {
    /// When they were last found to hold.
    at: Instant,
    /// Its sizes then, which change whenever the sums do.
    sizes: String,
    resident: Resident,
}

/// Measures memory, and keeps the results for profiles that do not measure it.
#[derive(Default)]
pub struct MemoryReader {
    readings: HashMap<ProcessKey, Reading>,
    sums: HashMap<ProcessKey, Sums>,
    /// What each process had before, by the kernel's own sums.
    earlier: HashMap<ProcessKey, Earlier>,
    arenas: ArenaReader,
    /// What the arenas showed, until mappings are read.
    heaps: HashMap<ProcessKey, heapbpf_glibc::Heap>,
    /// Processes whose memory did not answer; their arenas are not read again.
    silent: HashSet<ProcessKey>,
    /// For processes that may end before the next profile: what was last read of each; and below, when they were read,
    /// and the CPU time that it took.
    last: HashMap<ProcessKey, Resident>,
    looked: Option<(Instant, Duration)>,
    /// CPU time that refreshes have left, as in [`OF_A_REFRESH`].
    saved: [Duration; 2],
    /// What the last profile showed for each process.
    shown: HashMap<ProcessKey, Option<Resident>>,
    idle: Vec<Process>,
    /// The running idle processes of the last profile that measured memory.
    running: HashMap<ProcessKey, Process>,
    /// Idle processes that have ended, with what was read of them last, and when that was noticed; the oldest first.
    ended: VecDeque<(Instant, Process)>,
}

impl MemoryReader {
    /// Measures processes. `measured` has their numbers, those of `idle` after those of `processes`. `is_refresh`: the
    /// profile is one of many, and is made within little CPU time.
    pub fn measure(
        &mut self,
        measured: Vec<Measured>,
        processes: &mut [Process],
        idle: &mut Vec<Process>,
        is_refresh: bool,
    ) {
        let mut cgroups: HashMap<String, Option<u64>> = HashMap::new();
        let at_ns = monotonic_ns();
        let mut sums: Vec<(Measured, Resident)> =
            measured.into_iter().filter_map(|it| self.sums_of(it.key, is_refresh).map(|sums| (it, sums))).collect();
        sums.sort_by_cached_key(|(_, sums)| std::cmp::Reverse(sums.total_bytes()));
        self.saved = self.with_next_refresh();
        let mut left = if is_refresh { self.saved } else { [OF_A_FILE; 2] };
        let keys: HashSet<ProcessKey> = sums.iter().map(|(it, _)| it.key).collect();
        self.readings.retain(|key, _| keys.contains(key));
        self.sums.retain(|key, _| keys.contains(key));
        // An idle process has no `exec_id` until it is counted.
        for key in keys.iter().filter(|key| key.exec_id != 0) {
            if let Some(idle) = self.earlier.remove(&ProcessKey { exec_id: 0, ..*key }) {
                self.earlier.entry(*key).or_insert(idle);
            }
        }
        self.earlier.retain(|key, _| keys.contains(key));
        self.silent.retain(|key| keys.contains(key));
        let mut idle_keys: Vec<(ProcessKey, usize)> = Vec::new();
        for (it, sums) in sums {
            let (number, at_attach) = (it.process, it.at_attach);
            idle_keys.extend(number.checked_sub(processes.len()).map(|number| (it.key, number)));
            let (process, left) = match number.checked_sub(processes.len()) {
                None => (&mut processes[number], &mut left[0]),
                Some(number) => (&mut idle[number], &mut left[usize::from(is_refresh)]),
            };
            let now = ResidentAt { at_ns, bytes: sums.total_bytes() };
            let first = at_attach.resident.unwrap_or(now);
            let begun = Earlier { since_ns: at_attach.since_ns, from: first, next: first };
            let earlier = self.earlier.entry(it.key).or_insert(begun);
            // The key of an idle process stays the same at an exec.
            if earlier.since_ns != at_attach.since_ns {
                *earlier = begun;
            }
            let growth_per_minute = earlier.growth_per_minute(now);
            let found = self.read(it, &sums, is_refresh, left).unwrap_or(sums);
            let of_glibc = |glibc| Glibc {
                at_attach_blocks: at_attach.inuse.map(|it| it.blocks),
                at_attach_bytes: at_attach.inuse.map(|it| it.bytes),
                ..glibc
            };
            let glibc = found.glibc.map(of_glibc);
            let found = Resident { at_attach_bytes: at_attach.anonymous_bytes, glibc, ..found };
            let cgroup_bytes = match cgroups.get(&process.cgroup) {
                Some(known) => *known,
                None => *cgroups.entry(process.cgroup.clone()).or_insert(Cgroup::memory_bytes(&process.cgroup)),
            };
            process.resident = Some(Resident { cgroup_bytes, growth_per_minute, ..found });
        }
        if is_refresh {
            self.saved = left;
        }
        let running = idle_keys.into_iter().map(|(key, number)| (key, idle[number].clone())).collect();
        self.note_running(&keys, processes, running);
        // The process has ended, or has no memory.
        idle.retain(|process| process.resident.is_some_and(|resident| resident.total_bytes() > 0));
        let is_listed = |ended: &&Process| idle.iter().any(|it| it.ended && it.pid == ended.pid);
        let ended = self.ended.iter().map(|(_, process)| process).filter(|process| !is_listed(process));
        let ended: Vec<Process> = ended.cloned().collect();
        idle.extend(ended);
    }

    /// Notes which idle processes run now, and which have ended since the last time. `keys`: all processes that run;
    /// `counted`: those in which something was counted.
    fn note_running(&mut self, keys: &HashSet<ProcessKey>, counted: &[Process], running: HashMap<ProcessKey, Process>) {
        let starts: HashSet<(u32, u64)> = keys.iter().map(|key| (key.tgid, key.start_ns)).collect();
        let counted: HashSet<u32> = counted.iter().map(|process| process.pid).collect();
        for (key, process) in std::mem::replace(&mut self.running, running) {
            // It may be counted by now, or be no target any more.
            if starts.contains(&(key.tgid, key.start_ns)) || counted.contains(&key.tgid) || runs(key) {
                continue;
            }
            let resident = process.resident.map(|last| Resident { is_before_end: true, ..last });
            self.ended.push_back((Instant::now(), Process { ended: true, resident, ..process }));
        }
        let excess = self.ended.len().saturating_sub(MOST_ENDED);
        self.ended.drain(..excess);
        // One may have been counted after all, right before its end.
        let is_shown =
            |(since, process): &(Instant, Process)| since.elapsed() < SHOWN_ENDED && !counted.contains(&process.pid);
        self.ended.retain(is_shown);
    }

    /// CPU time for a refresh: what earlier ones have left, and its own.
    fn with_next_refresh(&self) -> [Duration; 2] {
        std::array::from_fn(|of| (self.saved[of] + OF_A_REFRESH[of]).min(MOST_SAVED))
    }

    /// The kernel's own sums. Most processes of a host do nothing, so a shorter file tells whether they have changed.
    fn sums_of(&mut self, key: ProcessKey, is_refresh: bool) -> Option<Resident> {
        let known = self.sums.get(&key);
        if let Some(known) = known.filter(|known| is_refresh && known.at.elapsed() < FRESH) {
            return Some(known.resident);
        }
        let sizes = resident::sizes(key.tgid)?;
        let resident = match known.filter(|known| known.sizes == sizes) {
            Some(known) => known.resident,
            None => resident::rough(key.tgid)?,
        };
        self.sums.insert(key, Sums { at: Instant::now(), sizes, resident });
        Some(resident)
    }

    /// The memory of a process by purpose: as last read if it has not changed much since, or as read now if there is
    /// CPU time left for that.
    fn read(&mut self, it: Measured, sums: &Resident, is_refresh: bool, left: &mut Duration) -> Option<Resident> {
        let sum_bytes = sums.total_bytes();
        let last = self.readings.get(&it.key);
        if let Some(last) = last.filter(|last| is_refresh && last.is_of(sum_bytes)) {
            return Some(last.resident);
        }
        let pages = u32::try_from(sum_bytes / PAGE_BYTES).unwrap_or(u32::MAX);
        let expected = last.map_or_else(|| FOR_A_PROCESS + FOR_A_PAGE.saturating_mul(pages), |last| last.took);
        if expected > *left {
            return None;
        }
        let heap = self.heaps.remove(&it.key);
        let ranges = heap.as_ref().map(heapbpf_glibc::Heap::ranges).unwrap_or_default();
        let begun = thread_cpu_time();
        let addresses = it.blocks.iter().take(MOST_BLOCKS).map(|block| block.address).collect();
        let resident = resident::of(it.key.tgid, it.key.start_ns, addresses, &ranges);
        let took = thread_cpu_time().saturating_sub(begun);
        *left = left.saturating_sub(took);
        let python = heap.as_ref().and_then(|heap| heap.python.as_ref()).map(python_of);
        let resident = Resident { glibc: heap.as_ref().map(glibc_of), python, ..resident? };
        self.readings.insert(it.key, Reading { sum_bytes, resident, took });
        Some(resident)
    }

    /// Reads the memory of processes that may have ended when a profile is made, unless the last reading took too large
    /// a share of the time since then.
    pub fn look(&mut self, measured: Vec<Measured>) {
        if self.looked.is_some_and(|(at, took)| at.elapsed() < took.saturating_mul(LOOK_SELDOM)) {
            return;
        }
        if self.last.len() >= MOST_LAST {
            // Processes that still run are read again now.
            self.last.clear();
        }
        let begun = thread_cpu_time();
        for it in measured {
            let addresses = it.blocks.iter().map(|block| block.address).collect();
            if let Some(resident) = resident::of(it.key.tgid, it.key.start_ns, addresses, &[]) {
                let at_attach_bytes = it.at_attach.anonymous_bytes;
                let now = ResidentAt { at_ns: monotonic_ns(), bytes: resident.total_bytes() };
                let growth_per_minute = it.at_attach.resident.and_then(|first| growth_per_minute(first, now));
                let last = Resident { at_attach_bytes, growth_per_minute, is_before_end: true, ..resident };
                self.last.insert(it.key, last);
            }
        }
        self.looked = Some((Instant::now(), thread_cpu_time().saturating_sub(begun)));
    }

    /// Gives processes that have ended their last readings. [`MemoryReader::measure`] may replace them by newer ones. Of
    /// `idle` ones only the process id is known: a reading of a program in `keys` is not theirs.
    pub fn give_last(&self, keys: &[ProcessKey], processes: &mut [Process], idle: &mut [Process]) {
        let ended = keys.iter().zip(processes).filter(|(_, process)| process.ended);
        ended.for_each(|(key, process)| process.resident = self.last.get(key).copied());
        for process in idle.iter_mut().filter(|process| process.ended) {
            let of_pid = self.last.iter().filter(|(key, _)| key.tgid == process.pid && !keys.contains(key));
            let last = of_pid.max_by_key(|(key, _)| (key.start_ns, key.exec_id));
            process.resident = last.map(|(_, resident)| *resident);
        }
    }

    /// Reads the arenas of processes as far as there is time: of those that were counted and then of idle ones, the
    /// largest first. This should happen as soon as possible after the moment of the profile, because later allocations
    /// would look as if they were from before the recording. The results wait for [`MemoryReader::measure`].
    pub fn read_arenas(&mut self, measured: &[Measured], processes: &[Process], idle: &[Process], is_refresh: bool) {
        self.heaps.clear();
        let wanted = self.with_arenas(measured, processes, idle, is_refresh);
        let mut left = if is_refresh { self.with_next_refresh() } else { [ARENAS_OF_A_FILE; 2] };
        for (is_idle, bytes, key, version) in wanted {
            let of = usize::from(is_refresh && is_idle);
            let left = &mut left[of];
            // At worst, all of its private memory is read.
            let of_blocks = FOR_A_MIB.saturating_mul(u32::try_from(bytes >> 20).unwrap_or(u32::MAX));
            if left.is_zero() || is_refresh && FOR_A_PROCESS + of_blocks > *left {
                continue;
            }
            let (pid, start_ns, asked) = (key.tgid, key.start_ns, Instant::now());
            match self.arenas.read(ArenaRequest { pid, start_ns, version, longest: *left, with_python: true }) {
                Ok((heap, took)) => {
                    if is_refresh {
                        self.saved[of] = self.saved[of].saturating_sub(took);
                    }
                    self.heaps.extend(heap.map(|heap| (key, heap)));
                }
                Err(_) => {
                    self.silent.insert(key);
                }
            }
            *left = left.saturating_sub(asked.elapsed());
        }
    }

    /// Processes whose arenas are to be read, in order: whether they are idle, their private memory in bytes, and the
    /// version of their glibc.
    fn with_arenas(
        &mut self,
        measured: &[Measured],
        processes: &[Process],
        idle: &[Process],
        is_refresh: bool,
    ) -> Vec<(bool, u64, ProcessKey, u32)> {
        let wanted = |it: &Measured| {
            let counted = processes.get(it.process);
            let process = counted.or_else(|| idle.get(it.process.checked_sub(processes.len())?))?;
            let version = glibc_version(process.allocators.iter().map(String::as_str))?;
            let sums = if self.silent.contains(&it.key) { None } else { self.sums_of(it.key, is_refresh) };
            let (all, anonymous) = sums.map(|sums| (sums.total_bytes(), sums.undivided_bytes))?;
            let is_known = is_refresh && self.readings.get(&it.key).is_some_and(|last| last.is_of(all));
            (anonymous > 0 && !is_known).then_some((counted.is_none(), anonymous, it.key, version))
        };
        let mut wanted: Vec<_> = measured.iter().filter_map(wanted).collect();
        wanted.sort_by_key(|(is_idle, bytes, ..)| (*is_idle, std::cmp::Reverse(*bytes)));
        wanted
    }

    /// Keeps a profile's memory figures if they were measured; otherwise gives it the kept ones.
    pub fn keep_or_give(
        &mut self,
        keys: &[ProcessKey],
        processes: &mut [Process],
        idle: &mut Vec<Process>,
        is_measured: bool,
    ) {
        if is_measured {
            self.shown = keys.iter().copied().zip(processes.iter().map(|process| process.resident)).collect();
            self.idle.clone_from(idle);
            return;
        }
        keys.iter().zip(processes).for_each(|(key, process)| process.resident = self.shown.get(key).copied().flatten());
        let counted: HashSet<u32> = keys.iter().map(|key| key.tgid).collect();
        *idle = self.idle.iter().filter(|process| !counted.contains(&process.pid)).cloned().collect();
    }
}

/// Whether a process runs that started at this time. One that nobody has waited for has no memory left.
fn runs(key: ProcessKey) -> bool {
    Stat::read(key.tgid).is_ok_and(|stat| starts_agree(stat.start_ns, key.start_ns))
        && resident::rough(key.tgid).is_some()
}

fn glibc_of(heap: &heapbpf_glibc::Heap) -> Glibc {
    Glibc {
        arenas: heap.arenas,
        blocks: heap.inuse_blocks,
        large_blocks: heap.mapped.len() as u64,
        inuse_bytes: heap.inuse_bytes,
        absent_bytes: heap.absent_bytes,
        free_bytes: heap.free_bytes,
        free_resident_bytes: heap.free_resident_bytes,
        cached_bytes: heap.cached_bytes,
        trimmable_bytes: heap.trimmable_bytes,
        resident_bytes: heap.resident_bytes,
        doubtful_bytes: heap.doubtful_bytes,
        unread_bytes: heap.absent_unread_bytes,
        inconsistent_bytes: heap.inconsistent_bytes,
        exact: heap.is_exact(),
        at_attach_blocks: None,
        at_attach_bytes: None,
    }
}

fn python_of(arenas: &heapbpf_glibc::PythonArenas) -> PythonArenas {
    let heapbpf_glibc::Pools { inuse_blocks, inuse_bytes, inconsistent_bytes, .. } = arenas.pools;
    PythonArenas { blocks: inuse_blocks, inuse_bytes, inconsistent_bytes, resident_bytes: arenas.resident_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attaching::arenas::AtAttach;

    fn own() -> Measured {
        let start_ns = heapbpf_host::process::Stat::read(std::process::id()).expect("our own state").start_ns;
        let key = ProcessKey { start_ns, tgid: std::process::id(), exec_id: 0 };
        Measured {
            process: 0,
            key,
            blocks: Vec::new(),
            share: 1.0,
            at_attach: AtAttach { anonymous_bytes: Some(7), ..AtAttach::default() },
        }
    }

    #[test]
    fn refreshes_read_mappings_within_their_time_and_others_have_the_kernels_sums() {
        let mut reader = MemoryReader::default();
        let of = |reader: &mut MemoryReader, is_refresh| {
            let mut process = [Process::default()];
            reader.measure(vec![own()], &mut process, &mut Vec::new(), is_refresh);
            process[0].resident.expect("memory was measured")
        };
        let first = of(&mut reader, true);
        assert!(first.undivided_bytes == 0 && first.heap_bytes > 0 && first.pss_bytes.is_some(), "{first:?}");
        assert_eq!(first.at_attach_bytes, Some(7));
        // No time is left, and its memory has changed.
        reader.saved = [Duration::ZERO; 2];
        reader.readings.values_mut().for_each(|it| (it.sum_bytes, it.took) = (1, Duration::from_secs(1)));
        let rough = of(&mut reader, true);
        assert!(rough.undivided_bytes > 0 && rough.heap_bytes == 0 && rough.at_attach_bytes == Some(7), "{rough:?}");
        reader.readings.values_mut().for_each(|it| it.took = Duration::from_millis(1));
        assert_eq!(of(&mut reader, false).undivided_bytes, 0, "a file has more time");
    }

    /// Both have saved nothing, and reading takes more than idle processes have.
    #[test]
    fn idle_processes_are_read_within_less_time_at_a_refresh() {
        let undivided_bytes = |counted: usize, idle: usize| {
            let mut reader = MemoryReader::default();
            let measure = |reader: &mut MemoryReader| {
                let (mut processes, mut idle) = (vec![Process::default(); counted], vec![Process::default(); idle]);
                reader.measure(vec![own()], &mut processes, &mut idle, true);
                processes.iter().chain(&idle).find_map(|it| it.resident).expect("it was measured").undivided_bytes
            };
            assert_eq!(measure(&mut reader), 0, "its mappings were read");
            reader.saved = [Duration::ZERO; 2];
            reader.readings.values_mut().for_each(|it| (it.sum_bytes, it.took) = (1, 2 * OF_A_REFRESH[1]));
            measure(&mut reader)
        };
        assert_eq!(undivided_bytes(1, 0), 0);
        assert!(undivided_bytes(0, 1) > 0);
    }

    #[test]
    fn sums_are_read_once_for_a_profile_and_anew_for_a_later_one() {
        let mut reader = MemoryReader::default();
        let files_bytes = |reader: &mut MemoryReader| reader.sums_of(own().key, true).map(|sums| sums.files_bytes);
        assert!(files_bytes(&mut reader) > Some(7));
        let now = Instant::now();
        for sums in reader.sums.values_mut() {
            // However long the test is held up, they were read a moment ago.
            (sums.at, sums.sizes, sums.resident.files_bytes) = (now + Duration::from_secs(3600), String::new(), 7);
        }
        assert_eq!(files_bytes(&mut reader), Some(7));
        let earlier = now.checked_sub(FRESH).expect("the machine has run for longer");
        reader.sums.values_mut().for_each(|sums| sums.at = earlier);
        assert!(files_bytes(&mut reader) > Some(7), "their sizes have changed");
    }

    /// A single profile has the growth since the process joined the recording; a service, that of the last one to two
    /// minutes.
    #[test]
    fn growth_is_measured_from_a_bounded_series() {
        let at = |seconds: u64, bytes| ResidentAt { at_ns: seconds * 1_000_000_000, bytes };
        let mut earlier = Earlier { since_ns: 0, from: at(100, 5_000), next: at(100, 5_000) };
        assert_eq!(earlier.growth_per_minute(at(100, 9_000)), None, "no time has passed");
        assert_eq!(earlier.growth_per_minute(at(400, 10_000)), Some(1_000), "over five minutes");
        assert_eq!(earlier.growth_per_minute(at(401, 10_000)), Some(997), "since the first reading");
        assert_eq!(earlier.growth_per_minute(at(460, 4_000)), Some(-6_000), "since the reading a minute ago");
        assert_eq!(earlier.growth_per_minute(at(490, 10_000)), Some(0));
        // An idle process has its growth, too: in the second profile, or at once if it was read when it joined.
        let mut reader = MemoryReader::default();
        let of = |reader: &mut MemoryReader, resident| {
            let mut measured = own();
            measured.at_attach.resident = resident;
            let mut idle = vec![Process::default()];
            reader.measure(vec![measured], &mut [], &mut idle, true);
            idle[0].resident.and_then(|resident| resident.growth_per_minute)
        };
        assert_eq!(of(&mut reader, None), None);
        let minute_ago = monotonic_ns().saturating_sub(GROWTH_OVER_NS);
        reader.earlier.values_mut().for_each(|it| it.from = ResidentAt { at_ns: minute_ago, bytes: 0 });
        assert!(of(&mut reader, None) > Some(0));
        let first = ResidentAt { at_ns: minute_ago, bytes: 0 };
        assert!(of(&mut MemoryReader::default(), Some(first)) > Some(0));
        let mut idle = vec![Process::default()];
        let at_attach = own().at_attach.of_program(1);
        reader.measure(vec![Measured { at_attach, ..own() }], &mut [], &mut idle, true);
        assert_eq!(idle[0].resident.and_then(|it| it.growth_per_minute), None, "another program");
    }

    #[test]
    fn growth_goes_on_when_an_idle_process_is_counted_unless_it_runs_another_program() {
        let growth = |reader: &mut MemoryReader, exec_id, since_ns| {
            let at_attach = AtAttach { since_ns, ..own().at_attach };
            let measured = Measured { key: ProcessKey { exec_id, ..own().key }, at_attach, ..own() };
            let mut process = [Process::default()];
            reader.measure(vec![measured], &mut process, &mut Vec::new(), true);
            process[0].resident.and_then(|resident| resident.growth_per_minute)
        };
        let minute_ago = monotonic_ns().saturating_sub(GROWTH_OVER_NS);
        for (since_ns, goes_on) in [(5, true), (6, false)] {
            let mut reader = MemoryReader::default();
            assert_eq!(growth(&mut reader, 0, 5), None, "it was not read before");
            reader.earlier.values_mut().for_each(|it| it.from = ResidentAt { at_ns: minute_ago, bytes: 0 });
            assert_eq!(growth(&mut reader, 3, since_ns).is_some_and(|bytes| bytes > 0), goes_on);
        }
    }

    #[test]
    fn a_process_that_has_ended_has_what_was_read_of_it_last() {
        let mut reader = MemoryReader::default();
        reader.look(vec![own()]);
        let of = |reader: &MemoryReader, key, ended| {
            let mut process = [Process { ended, ..Process::default() }];
            reader.give_last(&[key], &mut process, &mut []);
            process[0].resident
        };
        let last = of(&reader, own().key, true).expect("it was read");
        assert!(last.is_before_end && last.total_bytes() > 0 && last.at_attach_bytes == Some(7), "{last:?}");
        assert_eq!(of(&reader, own().key, false), None, "it runs");
        // Nothing was counted in one without an allocator. If it was not read, it has no line.
        let without_allocator = |pid| Process { pid, ended: true, ..Process::default() };
        let mut idle = vec![without_allocator(own().key.tgid), without_allocator(u32::MAX)];
        reader.give_last(&[own().key], &mut [Process::default()], &mut idle);
        assert_eq!(idle[0].resident, None, "it was the program before");
        reader.give_last(&[], &mut [], &mut idle);
        reader.measure(Vec::new(), &mut [], &mut idle, false);
        assert_eq!(idle.iter().map(|process| process.resident).collect::<Vec<_>>(), [Some(last)]);
        assert_eq!(of(&reader, ProcessKey { exec_id: 1, ..own().key }, true), None, "another program");
        // It is not read again before a hundred times the CPU time that it took has passed.
        reader.last.clear();
        reader.looked = Some((Instant::now(), Duration::from_secs(1)));
        reader.look(vec![own()]);
        assert!(reader.last.is_empty());
        // Its growth is known if it was read before.
        reader.looked = None;
        let first = ResidentAt { at_ns: monotonic_ns().saturating_sub(GROWTH_OVER_NS), bytes: 0 };
        reader.look(vec![Measured { at_attach: AtAttach { resident: Some(first), ..own().at_attach }, ..own() }]);
        let growth = of(&reader, own().key, true).and_then(|last| last.growth_per_minute);
        assert!(last.growth_per_minute.is_none() && growth > Some(0), "{growth:?}");
    }

    #[test]
    fn an_idle_process_that_has_ended_keeps_its_line_within_a_bound() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        let start_ns = Stat::read(child.id()).expect("it runs").start_ns;
        let key = ProcessKey { start_ns, tgid: child.id(), exec_id: 0 };
        let mut reader = MemoryReader::default();
        let of = |reader: &mut MemoryReader, is_target: bool| {
            let measured: Vec<Measured> = is_target.then(|| Measured { key, ..own() }).into_iter().collect();
            let mut idle = vec![Process { pid: key.tgid, ..Process::default() }; measured.len()];
            reader.measure(measured, &mut [], &mut idle, true);
            idle
        };
        assert!(!of(&mut reader, true)[0].ended);
        assert_eq!(of(&mut reader, false), [], "it runs, but is no target any more");
        of(&mut reader, true);
        child.kill().expect("our own child");
        child.wait().expect("our own child");
        let ended = of(&mut reader, false);
        assert!(ended.len() == 1 && ended[0].ended && ended[0].pid == key.tgid, "{ended:?}");
        assert!(ended[0].resident.is_some_and(|last| last.is_before_end && last.total_bytes() > 0), "{ended:?}");
        assert_eq!(of(&mut reader, false), ended, "the line stays");
        let mut counted = [Process { pid: key.tgid, ..Process::default() }];
        let mut idle = Vec::new();
        reader.measure(Vec::new(), &mut counted, &mut idle, true);
        assert_eq!(idle, [], "its last allocations have arrived");
        let gone = |pid| (ProcessKey { start_ns: 1, tgid: pid, exec_id: 0 }, Process { pid, ..Process::default() });
        reader.running = (u32::MAX - 100..u32::MAX).map(gone).collect();
        assert_eq!(of(&mut reader, false).len(), MOST_ENDED);
    }

    /// The arenas of idle processes show what they have in use, too.
    #[test]
    fn arenas_of_idle_processes_are_read_after_those_of_counted_ones() {
        let mut reader = MemoryReader::default();
        let of = |version: u32| Process { allocators: vec![format!("glibc 2.{version}")], ..Process::default() };
        let (counted, idle) = ([of(36), Process::default()], [of(37), of(38)]);
        let measured = || -> Vec<Measured> {
            // The third of the idle ones is not in the list.
            [3, 2, 0, 1, 4].map(|process| Measured { process, ..own() }).into()
        };
        let wanted = |reader: &mut MemoryReader| reader.with_arenas(&measured(), &counted, &idle, true);
        let found = wanted(&mut reader);
        assert!(found.iter().all(|(_, bytes, key, _)| *bytes > 0 && *key == own().key), "{found:?}");
        assert_eq!(found.iter().map(|(is_idle, ..)| *is_idle).collect::<Vec<_>>(), [false, true, true]);
        let mut versions: Vec<u32> = found.into_iter().map(|(.., version)| version).collect();
        assert_eq!(versions.remove(0), 36);
        versions.sort_unstable();
        assert_eq!(versions, [37, 38]);
        reader.silent.insert(own().key);
        assert!(wanted(&mut reader).is_empty(), "they did not answer");
    }

    #[test]
    fn idle_processes_without_memory_are_left_out() {
        let mut reader = MemoryReader::default();
        let mut idle = vec![Process::default(), Process { pid: 1, ..Process::default() }];
        let gone = Measured { process: 1, key: ProcessKey { tgid: u32::MAX, ..own().key }, ..own() };
        reader.measure(vec![own(), gone], &mut [], &mut idle, false);
        assert_eq!(idle.iter().map(|process| process.pid).collect::<Vec<_>>(), [0]);
        reader.keep_or_give(&[], &mut [], &mut idle, true);
        let mut given = Vec::new();
        reader.keep_or_give(&[], &mut [], &mut given, false);
        assert_eq!(given, idle);
        reader.keep_or_give(&[ProcessKey { tgid: 0, ..own().key }], &mut [Process::default()], &mut given, false);
        assert!(given.is_empty(), "it allocated");
    }
}

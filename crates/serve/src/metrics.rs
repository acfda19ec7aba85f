//! `/metrics`: totals in Prometheus' text format, with a bounded number of series.
//!
//! A process gets its own series if a slot is free, and keeps them until it ends. After that, or if no slot was free,
//! it is counted among the "other" processes. So no counter falls while its series exists, and the sum of the series is
//! always the total.
//!
//! Memory that processes held when they ended is reported per program. One series for each process that ever ended
//! would be unbounded.

mod families;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::UNIX_EPOCH;

use heapbpf_access::filter::Filter;
use heapbpf_host::resident::bytes_of;
use heapbpf_profile::diff::growth::{Grown, growth_of_processes};
use heapbpf_profile::estimates::Pool;
use heapbpf_profile::model::{LOST_PREFIX, Placement, Process, Profile, Resident, Row};
use heapbpf_profile::process_pools::pools_of_processes;
use heapbpf_profile::report::Growing;
use heapbpf_profile::value::Value;
use heapbpf_record::requests::FinishedProfile;
use heapbpf_statistics::estimate::Estimate;
use sampler_ebpf::abi::ProcessKey;

use self::families::{Estimated, Family, escaped, number, single};
use super::page::CONFIDENCE;
use super::push::Counts;

/// Maximum number of processes with their own series.
pub const MOST_PROCESSES: usize = 500;

/// Maximum number of programs with their own series of memory held at exit.
pub const MOST_PROGRAMS: usize = 500;

/// Maximum number of leak suspects with their own series.
pub const MOST_SUSPECTS: usize = 20;

/// Maximum length of a function's name in a label, in characters.
const LONGEST_NAME: usize = 1_000;

/// Name of the gauge that counts processes missing from the exact totals.
const UNCOUNTED_PROCESSES: &str = "heapbpf_uncounted_processes";

/// Sizes of accounting tables, which are gauges: name, name of the gauge, and help.
const SIZES: [(&str, &str, &str); 2] = [
    ("modules", "heapbpf_modules", "Files that are or were mapped as code."),
    ("modules_open", "heapbpf_modules_open", "Of these files, those that heapbpf has open."),
];

/// The server's counts of its own work.
#[derive(Clone, Debug, Default)]
pub struct Serving {
    /// Answers given.
    pub answered: u64,
    /// Answers refused because too many were in progress.
    pub refused: u64,
    /// Delivery status of pushed profiles.
    pub push: Vec<(String, Counts)>,
    /// Functions that may leak, of all that the client may see: their labels, and their growth in bytes per second.
    pub suspects: Vec<(String, Estimate)>,
    /// Functions that are full: their labels, and their bytes in use.
    pub full: Vec<(String, Estimate)>,
}

/// One figure of each function that grows or grew in a profile and has this figure. Functions that also do so in a
/// process that is not visible are left out.
pub fn growing_series(
    profile: &Profile,
    growing: &[Growing],
    visible: impl Fn(&Process) -> bool,
    figure: impl Fn(&Growing) -> Option<Estimate>,
) -> Vec<(String, Estimate)> {
    let series = |it: &Growing| {
        let figure = figure(it)?;
        let processes: Vec<&Process> = it.processes.iter().filter_map(|&at| profile.processes.get(at)).collect();
        let program = common_labels(&processes)?;
        // The name that is shown depends on what else grows; a series keeps its labels.
        let name: String = it.function.name.chars().take(LONGEST_NAME).collect();
        let labels = program.strip_suffix('}').unwrap_or(&program);
        let (name, module) = (escaped(&name), escaped(&it.function.home));
        let labels = format!("{labels},function=\"{name}\",module=\"{module}\"}}");
        let is_visible = processes.into_iter().all(&visible);
        is_visible.then_some((labels, figure))
    };
    growing.iter().filter_map(series).collect()
}

/// State that persists between scrapes. It keeps the highest value so far of each counter: a sampled call that turns
/// out to fail is subtracted again, and a counter must not fall.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Bytes and calls of each process with its own series.
    slots: HashMap<ProcessKey, (u64, u64)>,
    /// Processes that got no slot. They never get one later, because the counters of the others would fall.
    others: HashSet<ProcessKey>,
    /// Programs, by their labels, with their own series of memory held at exit.
    programs: HashSet<String>,
    totals: HashMap<&'static str, u64>,
    status: OwnStatus,
}

/// Writes what processes without their own series have allocated (bytes and calls), and what they have in use if that
/// is known.
fn write_others(out: &mut String, bytes: u64, calls: u64, inuse: Option<f64>) {
    let help = "Bytes requested by processes that have ended or have no series of their own (limit reached).";
    single(out, "heapbpf_other_alloc_bytes_total", "counter", help, bytes);
    let help = "Allocations of processes that have ended or have no series of their own (limit reached).";
    single(out, "heapbpf_other_allocs_total", "counter", help, calls);
    if let Some(inuse) = inuse {
        let help =
            "Bytes in use by processes without series of their own (limit reached), as far as frees are tracked.";
        single(out, "heapbpf_other_inuse_bytes", "gauge", help, number(inuse));
    }
}

impl Metrics {
    /// Returns the text for a client that may see the processes that pass all `filters`. Only a client that may see
    /// everything gets the metrics of the daemon and of pushing.
    pub fn write(&mut self, made: &FinishedProfile, filters: &[&Filter], serving: Serving) -> String {
        self.assign(made);
        let visible = |process: &Process| filters.iter().all(|filter| filter.matches(process));
        let mut out = String::new();
        self.processes(made, &visible, &mut out);
        self.growth(made, &visible, &mut out);
        let help = "Growth of bytes in use of a function that may leak, as of the last profile that was kept.";
        Self::growing("heapbpf_suspect_growth", "bytes_per_second", help, &serving.suspects, &mut out);
        let help = "Bytes in use of a function that grew and is full, as of the last profile that was kept.";
        Self::growing("heapbpf_full_inuse", "bytes", help, &serving.full, &mut out);
        self.resident(made, &visible, &mut out);
        if made.profile.header.live && made.profile.header.ended_apart {
            self.at_exit(&made.profile, &visible, &mut out);
        }
        if filters.iter().all(|filter| filter.is_everything()) {
            self.daemon(made, &serving, &mut out);
            pushing(&serving.push, &mut out);
        }
        out
    }

    /// Assigns slots to new processes. If a PID has had several process generations, only the last can have a slot: the
    /// others have ended.
    fn assign(&mut self, made: &FinishedProfile) {
        let mut last: HashMap<u32, ProcessKey> = HashMap::new();
        for (key, process) in made.keys.iter().zip(&made.profile.processes) {
            let known = last.entry(key.tgid).or_insert(*key);
            if (key.start_ns, key.exec_id) > (known.start_ns, known.exec_id) {
                *known = *key;
            }
            if process.ended {
                last.remove(&key.tgid);
            }
        }
        self.slots.retain(|key, _| last.get(&key.tgid) == Some(key));
        self.others.retain(|key| last.get(&key.tgid) == Some(key));
        for key in made.keys.iter().filter(|key| last.get(&key.tgid) == Some(key)) {
            if !self.slots.contains_key(key) && !self.others.contains(key) {
                if self.slots.len() < MOST_PROCESSES {
                    self.slots.insert(*key, (0, 0));
                } else {
                    self.others.insert(*key);
                }
            }
        }
    }

    fn processes(&mut self, made: &FinishedProfile, visible: &dyn Fn(&Process) -> bool, out: &mut String) {
        let profile = &made.profile;
        let pools = pools_of_processes(profile);
        let help = "Bytes requested by a process, counted exactly.";
        let mut bytes = Family::new("heapbpf_process_alloc_bytes_total", "counter", help);
        let help = "Allocations of a process, counted exactly.";
        let mut calls = Family::new("heapbpf_process_allocs_total", "counter", help);
        let mut inuse = Estimated::new("heapbpf_process_inuse", "bytes", "Bytes in use, estimated from samples.");
        let help = "Of the bytes in use, those resident in memory.";
        let mut resident = Estimated::new("heapbpf_process_inuse_resident", "bytes", help);
        let help = "Blocks in use, estimated from samples.";
        let mut objects = Family::new("heapbpf_process_inuse_objects", "gauge", help);
        let help = "Time since which blocks count as in use, if frees were not tracked before; Unix time.";
        let mut since = Family::new("heapbpf_process_inuse_since_timestamp_seconds", "gauge", help);
        let mut samples = Family::new("heapbpf_process_samples_total", "counter", "Samples taken of a process.");
        let help =
            "How calls of a process are counted: by probes of the kernel, or inline, in the process itself; always 1.";
        let mut hooks = Family::new("heapbpf_process_hook", "gauge", help);
        let (mut other_bytes, mut other_calls, mut other_inuse, mut other_seen) = (0u64, 0u64, 0.0, false);
        let mut uncounted = 0u64;
        for (index, process) in profile.processes.iter().enumerate().filter(|(_, process)| visible(process)) {
            let pool = &pools[index];
            let exact = process.exact_alloc_bytes.zip(process.exact_alloc_objects);
            uncounted = uncounted.saturating_add(if exact.is_none() { process.count() } else { 0 });
            let Some(slot) = made.keys.get(index).and_then(|key| self.slots.get_mut(key)) else {
                let (exact_bytes, exact_calls) = exact.unwrap_or_default();
                other_bytes = other_bytes.saturating_add(exact_bytes);
                other_calls = other_calls.saturating_add(exact_calls);
                other_inuse += pool.total(Value::InuseSpace);
                other_seen = true;
                continue;
            };
            let labels = labels(process);
            if let Some((exact_bytes, exact_calls)) = exact {
                *slot = (slot.0.max(exact_bytes), slot.1.max(exact_calls));
                bytes.add(&labels, slot.0);
                calls.add(&labels, slot.1);
            }
            if let Some(hook) = process.hook {
                let labels = labels.strip_suffix('}').unwrap_or(&labels);
                hooks.add(&format!("{labels},hook=\"{hook}\"}}"), 1);
            }
            samples.add(&labels, pool.samples(Value::AllocSpace));
            if profile.knows_inuse(index) {
                inuse.add(&labels, &pool.estimate(profile, Value::InuseSpace, CONFIDENCE));
                if pool.knows(profile, Value::ResidentSpace) {
                    resident.add(&labels, &pool.estimate(profile, Value::ResidentSpace, CONFIDENCE));
                }
                objects.add(&labels, number(pool.total(Value::InuseObjects)));
                let moment = process.inuse_since.and_then(|since| since.duration_since(UNIX_EPOCH).ok());
                moment.iter().for_each(|moment| since.add(&labels, format!("{:.3}", moment.as_secs_f64())));
            }
        }
        let families = [bytes, calls, samples].into_iter().chain(inuse.0).chain(resident.0);
        families.chain([objects, since, hooks]).for_each(|family| family.write(out));
        let help = "Processes (ended ones included) that are not counted exactly; exact totals leave them out.";
        single(out, UNCOUNTED_PROCESSES, "gauge", help, uncounted);
        if other_seen {
            write_others(out, other_bytes, other_calls, profile.header.live.then_some(other_inuse));
        }
    }

    /// Writes how fast processes with their own series grow.
    fn growth(&self, made: &FinishedProfile, visible: &dyn Fn(&Process) -> bool, out: &mut String) {
        let help = "Growth of bytes in use of a process over the second half of the recording, estimated from samples.";
        let mut growth = Estimated::new("heapbpf_process_growth", "bytes_per_second", help);
        let grown = growth_of_processes(&made.profile, CONFIDENCE);
        for ((key, process), grown) in made.keys.iter().zip(&made.profile.processes).zip(grown) {
            let Some(Grown { per_second, .. }) = grown.filter(|_| self.slots.contains_key(key) && visible(process))
            else {
                continue;
            };
            growth.add(&labels(process), &per_second);
        }
        growth.0.iter().for_each(|family| family.write(out));
    }

    /// Writes a figure of functions that grow or grew.
    fn growing(what: &str, unit: &str, help: &str, functions: &[(String, Estimate)], out: &mut String) {
        let mut families = Estimated::new(what, unit, help);
        let mut written = HashSet::new();
        for (labels, figure) in functions.iter().take(MOST_SUSPECTS) {
            // A name that was shortened may equal another one.
            if written.insert(labels) {
                families.add(labels, figure);
            }
        }
        families.0.iter().for_each(|family| family.write(out));
    }

    /// Writes the resident memory of processes with their own series, and of the largest processes in which nothing was
    /// counted.
    fn resident(&self, made: &FinishedProfile, visible: &dyn Fn(&Process) -> bool, out: &mut String) {
        let help = "Resident memory of a process by use; the parts add up. Parts that are not known are absent.";
        let mut family = Family::new("heapbpf_process_resident_bytes", "gauge", help);
        let with_series = made.keys.iter().zip(&made.profile.processes).filter(|(key, _)| self.slots.contains_key(key));
        let idle = made.profile.idle.iter().filter(|process| !process.ended && visible(process));
        let mut idle: Vec<&Process> = idle.collect();
        idle.sort_by_cached_key(|process| std::cmp::Reverse(process.resident.map_or(0, |it| it.total_bytes())));
        idle.truncate(MOST_PROCESSES.saturating_sub(self.slots.len()));
        let mut swapped = Family::new("heapbpf_process_swapped_bytes", "gauge", "Memory of a process in swap space.");
        let help = "Share of a process's anonymous memory, without stacks, in heaps whose allocations are counted.";
        let mut covered = Family::new("heapbpf_process_memory_coverage", "gauge", help);
        let mut of_cgroups: BTreeMap<&str, u64> = BTreeMap::new();
        for process in with_series.map(|(_, process)| process).filter(|process| visible(process)).chain(idle) {
            let labels = labels(process);
            of_cgroups.extend(process.resident.and_then(|it| Some((process.cgroup.as_str(), it.cgroup_bytes?))));
            process.resident.iter().for_each(|resident| swapped.add(&labels, resident.swapped_bytes));
            process.memory_coverage().iter().for_each(|share| covered.add(&labels, number(*share)));
            let labels = labels.strip_suffix('}').unwrap_or(&labels);
            for (part, bytes) in process.resident.iter().flat_map(Resident::known_parts) {
                // Use the name that JSON and the documentation use.
                let part = part.replace(' ', "_").to_lowercase();
                family.add(&format!("{labels},part=\"{part}\"}}"), bytes);
            }
        }
        let help = "All memory that the kernel charges to a control group of these processes.";
        let mut cgroups = Family::new("heapbpf_cgroup_memory_bytes", "gauge", help);
        for (cgroup, bytes) in of_cgroups {
            cgroups.add(&format!("{{cgroup=\"{}\"}}", escaped(cgroup)), bytes);
        }
        [family, swapped, covered, cgroups].iter().for_each(|family| family.write(out));
    }

    /// Writes memory held at exit, per program. The first programs have their own series and keep them. The others
    /// share one.
    fn at_exit(&mut self, profile: &Profile, visible: &dyn Fn(&Process) -> bool, out: &mut String) {
        let mut pools: BTreeMap<String, Pool> = BTreeMap::new();
        let mut other: Option<Pool> = None;
        // In process order, so that the first program to appear gets the first series.
        let mut rows: HashMap<usize, Vec<&Row>> = HashMap::new();
        for row in profile.rows.iter().filter(|row| row.at_exit.objects != 0.0) {
            rows.entry(row.key.process).or_default().push(row);
        }
        for (index, process) in profile.processes.iter().enumerate().filter(|(index, _)| profile.knows_inuse(*index)) {
            let Some(of_process) = rows.remove(&index) else { continue };
            let labels = program_labels(process);
            let has_space = self.programs.len() < MOST_PROGRAMS;
            let own = self.programs.contains(&labels) || has_space && self.programs.insert(labels.clone());
            if !visible(process) {
                continue;
            }
            let pool = if own { pools.entry(labels).or_default() } else { other.get_or_insert_default() };
            of_process.into_iter().for_each(|row| pool.add(row));
        }
        let help =
            "Bytes that processes held when they ended, estimated from samples; all since the start, by program.";
        let mut bytes = Estimated::new("heapbpf_at_exit", "bytes", help);
        let help =
            "Blocks that processes held when they ended, estimated from samples; all since the start, by program.";
        let mut objects = Family::new("heapbpf_at_exit_objects", "gauge", help);
        for (labels, pool) in &pools {
            bytes.add(labels, &pool.estimate(profile, Value::AtExitSpace, CONFIDENCE));
            objects.add(labels, number(pool.total(Value::AtExitObjects)));
        }
        bytes.0.into_iter().chain([objects]).for_each(|family| family.write(out));
        if let Some(other) = other {
            let help = "Bytes held at exit by processes of programs without series of their own (limit reached).";
            single(out, "heapbpf_other_at_exit_bytes", "gauge", help, number(other.total(Value::AtExitSpace)));
            let help = "Blocks held at exit by processes of programs without series of their own (limit reached).";
            single(out, "heapbpf_other_at_exit_objects", "gauge", help, number(other.total(Value::AtExitObjects)));
        }
    }

    fn daemon(&mut self, made: &FinishedProfile, serving: &Serving, out: &mut String) {
        let (stats, profile) = (&made.stats, &made.profile);
        // Leaves out processes that are not counted and reports their number instead: a counter must not come and go.
        let exact =
            |of: fn(&Process) -> Option<u64>| profile.processes.iter().filter_map(of).fold(0, u64::saturating_add);
        let (bytes, calls) = (exact(|p| p.exact_alloc_bytes), exact(|p| p.exact_alloc_objects));
        let counters = [
            ("heapbpf_alloc_bytes_total", "Bytes requested by processes that are counted exactly.", bytes),
            ("heapbpf_allocs_total", "Allocations of processes that are counted exactly.", calls),
            ("heapbpf_hits_total", "Outermost allocation calls of the targets.", stats.hits),
            ("heapbpf_unsampled_total", "Hits that were not sampled.", stats.unsampled),
            ("heapbpf_samples_total", "Samples that reached the profile.", stats.submitted),
            ("heapbpf_failed_total", "Sampled calls that returned NULL.", stats.failed),
            ("heapbpf_inner_calls_total", "Calls that allocators made into themselves.", stats.reentrant),
            (
                "heapbpf_frees_seen_total",
                "Calls of functions that free, including those that allocators make into themselves. In processes \
                 counted from inside, only those that free sampled blocks.",
                stats.frees_seen,
            ),
            (
                "heapbpf_frees_matched_total",
                "Sampled blocks that were freed or reallocated. May exceed heapbpf_frees_seen_total, which does \
                 not count reallocations.",
                stats.frees_matched,
            ),
            ("heapbpf_scrapes_total", "Answers given.", serving.answered),
            ("heapbpf_scrapes_refused_total", "Answers refused because too many were in progress.", serving.refused),
        ];
        for (name, help, value) in counters {
            let highest = self.totals.entry(name).or_default();
            *highest = value.max(*highest);
            single(out, name, "counter", help, *highest);
        }
        let mut lost = Family::new("heapbpf_lost_total", "counter", "Hits that were lost, by reason.");
        for (reason, count) in &stats.lost {
            let reason = reason.strip_prefix(LOST_PREFIX).unwrap_or(reason);
            // A call in flight counts as lost only if it never completes.
            if reason != "in_flight" {
                lost.add(&format!("{{reason=\"{}\"}}", escaped(reason)), count);
            }
        }
        lost.write(out);
        let mut other = Family::new("heapbpf_events_total", "counter", "Other counters of the accounting, by name.");
        for (name, count) in stats.other.iter().filter(|(name, _)| !SIZES.iter().any(|(size, ..)| size == name)) {
            other.add(&format!("{{name=\"{}\"}}", escaped(name)), count);
        }
        other.write(out);
        for (size, name, help) in SIZES {
            single(out, name, "gauge", help, stats.other.get(size).copied().unwrap_or_default());
        }
        if let Some(seconds) = stats.probe_seconds {
            single(out, "heapbpf_probe_seconds_total", "counter", "Time spent in probes.", number(seconds));
        }
        let seconds = number(stats.daemon_cpu_seconds);
        single(out, "heapbpf_daemon_cpu_seconds_total", "counter", "CPU time of heapbpf itself.", seconds);
        let help = "Peak memory of heapbpf itself.";
        single(out, "heapbpf_daemon_peak_resident_bytes", "gauge", help, stats.daemon_peak_rss_bytes);
        if let Some(resident) = self.status.resident_bytes() {
            single(out, "heapbpf_daemon_resident_bytes", "gauge", "Memory of heapbpf itself.", resident);
        }
        let help = "How long the last snapshot delayed the processing of events.";
        single(out, "heapbpf_snapshot_seconds", "gauge", help, number(made.cost.as_secs_f64()));
        let help = "Mean trials between samples (bytes by default).";
        single(out, "heapbpf_sampling_interval", "gauge", help, profile.header.interval);
        single(out, "heapbpf_processes", "gauge", "Processes with at least one hit.", with_hits(&made.profile));
        let mut info = Family::new("heapbpf_build_info", "gauge", "Version.");
        info.add(&format!("{{version=\"{}\"}}", escaped(&profile.header.version)), 1);
        info.write(out);
    }
}

fn pushing(destinations: &[(String, Counts)], out: &mut String) {
    type Get = fn(&Counts) -> u64;
    let families: [(_, _, _, Get); 6] = [
        ("heapbpf_push_delivered_total", "counter", "Profiles delivered.", |it| it.delivered),
        ("heapbpf_push_dropped_total", "counter", "Profiles dropped for lack of space.", |it| it.dropped),
        ("heapbpf_push_rejected_total", "counter", "Profiles that the destination rejected.", |it| it.rejected),
        ("heapbpf_push_failures_total", "counter", "Attempts that failed.", |it| it.failures),
        ("heapbpf_push_waiting", "gauge", "Profiles waiting to be delivered.", |it| it.waiting),
        ("heapbpf_push_waiting_bytes", "gauge", "Bytes waiting to be delivered.", |it| it.waiting_bytes),
    ];
    for (name, kind, help, value) in families {
        let mut family = Family::new(name, kind, help);
        for (destination, counts) in destinations {
            family.add(&format!("{{destination=\"{}\"}}", escaped(destination)), value(counts));
        }
        family.write(out);
    }
}

fn labels(process: &Process) -> String {
    let (pid, comm, cgroup) = (process.pid, escaped(&process.comm), escaped(&process.cgroup));
    format!("{{pid=\"{pid}\",comm=\"{comm}\",cgroup=\"{cgroup}\"{}}}", placement_labels(&process.placement))
}

/// Returns the labels of what a process runs in. Unknown labels are left out.
fn placement_labels(placement: &Placement) -> String {
    placement.known().map(|(name, value)| format!(",{name}=\"{}\"", escaped(value))).collect()
}

fn program_labels(process: &Process) -> String {
    let (comm, cgroup) = (escaped(&process.comm), escaped(&process.cgroup));
    format!("{{comm=\"{comm}\",cgroup=\"{cgroup}\"{}}}", placement_labels(&process.placement))
}

/// Returns the labels of a program of which these are processes, without those in which they differ. `None` if there
/// are none.
fn common_labels(processes: &[&Process]) -> Option<String> {
    let (first, others) = processes.split_first()?;
    let has_one_cgroup = others.iter().all(|process| process.cgroup == first.cgroup);
    let cgroup = if has_one_cgroup { format!(",cgroup=\"{}\"", escaped(&first.cgroup)) } else { String::new() };
    let mut placement = first.placement.clone();
    others.iter().for_each(|process| placement.keep_common(&process.placement));
    Some(format!("{{comm=\"{}\"{cgroup}{}}}", escaped(&first.comm), placement_labels(&placement)))
}

/// `/proc/self/status`, opened before the server drops the right to open files.
#[derive(Debug)]
struct OwnStatus(Option<File>);

impl Default for OwnStatus {
    fn default() -> Self {
        Self(File::open("/proc/self/status").ok())
    }
}

impl OwnStatus {
    /// Resident memory of this process, in bytes.
    fn resident_bytes(&self) -> Option<u64> {
        let mut bytes = [0; 8 << 10];
        let length = self.0.as_ref()?.read_at(&mut bytes, 0).ok()?;
        bytes_of(&String::from_utf8_lossy(bytes.get(..length)?), "VmRSS")
    }
}

/// Returns the number of processes with at least one counted or sampled call.
fn with_hits(profile: &Profile) -> usize {
    let sampled: HashSet<usize> = profile.rows.iter().map(|row| row.key.process).collect();
    let has_hit = |(number, process): &(usize, &Process)| {
        sampled.contains(number) || process.exact_alloc_objects.is_some_and(|calls| calls > 0)
    };
    profile.processes.iter().enumerate().filter(has_hit).count()
}

#[cfg(test)]
mod tests;

//! Why a process is larger than its profile: its resident memory in parts that add up, and what is known about its
//! heap.

use indexmap::IndexSet;
use serde::Serialize;

use super::processes::{Entry, entries};
use super::{Context, FigureText, ReportOptions};
use crate::estimates::{NOT_COUNTED, Pool};
use crate::group::GroupBy;
use crate::model::{HEAP, JIT_CODE, OTHER, Process, Profile, Resident, UNDIVIDED};
use crate::report::text::{Style, wrap};
use crate::units;
use crate::value::Value;

/// Maximum number of programs or processes shown.
const MOST: usize = 3;
/// What names of heaps of runtimes have in common.
const OWN_HEAP: &str = "own heap";
/// The runtime whose objects lie in executable memory.
const IN_CODE: &str = "SBCL";
/// The name of Python's object allocator.
const PYTHONS: &str = "Python objects";

/// Placeholder for a non-breaking space between a number and its unit.
const TOGETHER: char = '\u{e000}';

/// How the resident memory of a program or process is used.
#[derive(Serialize)]
pub struct ResidentText {
    /// Indices of its processes.
    #[serde(skip)]
    pub processes: Vec<usize>,
    /// Indices of its idle processes in the list of idle ones.
    #[serde(skip)]
    pub idle: Vec<usize>,
    /// Name of the program or process.
    #[serde(skip)]
    pub name: String,
    /// Total in bytes.
    pub bytes: u64,
    /// Its growth in bytes per minute; `None` if unknown.
    pub growth_per_minute: Option<i64>,
    /// Memory in no known heap, in bytes; `None` if it was not divided into parts.
    pub not_seen: Option<u64>,
    /// The total as a sum: `1.2 GiB = heap 1 GiB + files 200 MiB`.
    pub parts: String,
    /// How much of its heap is in use.
    pub heap: String,
}

/// How the resident memory of each measured group of processes is used, in the words of the report.
pub fn resident_texts(profile: &Profile, by: GroupBy, confidence: f64) -> Vec<ResidentText> {
    let options = ReportOptions { confidence, ..ReportOptions::default() };
    let context = Context::new(profile, &options);
    let text = |(entry, resident): (Entry, Resident)| ResidentText {
        bytes: resident.total_bytes(),
        growth_per_minute: resident.growth_per_minute,
        not_seen: (resident.undivided_bytes == 0).then_some(resident.not_seen_bytes()),
        parts: parts(&context, &entry, &resident).replace(TOGETHER, " "),
        heap: heap(&context, &entry, &resident).replace(TOGETHER, " "),
        processes: entry.processes,
        idle: entry.idle,
        name: entry.name,
    };
    measured(&context, by).into_iter().map(text).collect()
}

/// The programs or processes whose memory was measured, the largest first.
fn measured(context: &Context, by: GroupBy) -> Vec<(Entry, Resident)> {
    let mut measured: Vec<(Entry, Resident)> = entries(context, by)
        .into_iter()
        .filter_map(|entry| of(context.profile, &entry).map(|resident| (entry, resident)))
        .collect();
    measured.sort_by_key(|(_, resident)| std::cmp::Reverse(resident.total_bytes()));
    measured
}

/// Lines of the section; empty if no memory was measured.
pub(super) fn section(context: &Context) -> Vec<String> {
    let by = if context.group_by == GroupBy::Process { GroupBy::Process } else { GroupBy::Program };
    let measured = measured(context, by);
    if measured.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![context.paint(Style::Bold, "Resident memory")];
    for (entry, resident) in measured.iter().take(MOST) {
        let sum = format!("{} resident: {}", entry.name, parts(context, entry, resident));
        for (first, text) in [("  ", sum), ("    ", heap(context, entry, resident))] {
            let wrapped = wrap(&text, context.width.saturating_sub(first.len() + 2));
            let indented = wrapped.iter().enumerate();
            let line = |(k, line): (usize, &String)| {
                format!("{first}{}{}", if k == 0 { "" } else { "  " }, line.replace(TOGETHER, " "))
            };
            lines.extend(indented.map(line));
        }
    }
    lines
}

/// The resident memory of a single program, with what of its heap is older if that is much; and the free memory that
/// its allocators hold. Empty if it was not measured.
pub(super) fn brief(context: &Context) -> Vec<String> {
    let measured = measured(context, GroupBy::Program);
    let [(entry, resident)] = measured.as_slice() else { return Vec::new() };
    let older = |glibc| super::glibc::older(context, entry, resident, glibc);
    let about_heap = resident.glibc.as_ref().map(older).unwrap_or_default();
    let mut parts = large_parts(resident, &[(HEAP, about_heap), about_own_heap(context, entry, resident)]);
    parts += when(context, entry, resident);
    let mut lines = context.titled("resident", &parts, Style::Plain, usize::MAX);
    if let Some(free) = super::glibc::free_inside(resident, with_memory(context.profile, entry).count() as u64) {
        lines.extend(context.titled("free", &free, Style::Plain, 2));
    }
    lines.into_iter().map(|line| line.replace(TOGETHER, " ")).collect()
}

/// The resident memory of all programs together on one line; empty if none was measured. That of processes that have
/// ended is added only if nothing is resident any more.
pub(super) fn of_all(context: &Context) -> Vec<String> {
    let measured = measured(context, GroupBy::Program);
    let has_present = measured.iter().any(|(_, resident)| !resident.is_before_end);
    let mut counted = measured.iter().map(|(_, resident)| *resident).filter(|it| it.is_before_end != has_present);
    let Some(mut sum) = counted.next() else { return Vec::new() };
    counted.for_each(|resident| sum.add(&resident));
    let once = sum.pss_bytes.filter(|pss| sum.is_much(sum.total_bytes().saturating_sub(*pss) as f64));
    let once = once.map_or_else(String::new, |pss| format!("; {} if shared pages count once", bytes(pss as f64)));
    let when = if has_present { "" } else { ", of each shortly before it ended" };
    let lines = context.titled("resident", &(large_parts(&sum, &[]) + &once + when), Style::Plain, 1);
    lines.into_iter().map(|line| line.replace(TOGETHER, " ")).collect()
}

/// The processes whose memory an entry has. Idle ones that have ended count only if nothing else of the program is left.
pub(super) fn with_memory<'a>(profile: &'a Profile, entry: &'a Entry) -> impl Iterator<Item = &'a Process> {
    let has_ended = entry.has_ended(profile);
    let idle = entry.idle.iter().map(|&process| &profile.idle[process]);
    let counted = entry.processes.iter().map(|&process| &profile.processes[process]);
    counted.chain(idle.filter(move |process| has_ended || !process.ended))
}

/// The total memory of an entry's processes; `None` if it was not measured for a process that has not ended.
pub(super) fn of(profile: &Profile, entry: &Entry) -> Option<Resident> {
    Process::resident_of_all(with_memory(profile, entry))
}

/// Anonymous resident memory that neither the heap of a known allocator nor a recorded block explains, in bytes: at
/// least the first figure; and in other programs at most the second, because nothing bounds what they have in use or
/// what their allocators hold free, or because their memory was not divided into parts. Programs with a known runtime
/// are left out: the report names that runtime's heap.
pub(super) fn unaccounted_bytes(context: &Context) -> (f64, f64) {
    let profile = context.profile;
    let (mut at_least, mut at_most) = (0.0, 0.0);
    for (entry, resident) in measured(context, GroupBy::Program) {
        // A service reports what there is now.
        let is_past = profile.header.ended_apart && resident.is_before_end;
        if is_past || own_heaps(context, &entry, &resident).next().is_some() {
            continue;
        }
        let (in_memory, high) = if entry.is_idle() {
            (0.0, Some(0.0))
        } else {
            let estimate = entry.pool.estimate(profile, Value::InuseSpace, context.options.confidence);
            let is_known = entry.processes.iter().all(|&process| profile.knows_inuse(process));
            (least_in_memory(context, &entry.pool), estimate.high.filter(|_| is_known))
        };
        // Other allocators than glibc may hold free memory in mappings that nothing marks.
        let has_others = entry.members(profile).any(|process| process.other_allocators().next().is_some());
        let high = high.filter(|_| !has_others);
        let unknown = with_memory(profile, &entry).filter(|process| process.lacks_allocator());
        let unknown = unknown.filter_map(|process| Some(process.resident?.heap_bytes)).fold(0, u64::saturating_add);
        let other = resident.not_seen_bytes().saturating_add(unknown) as f64;
        let least = high.map_or(0.0, |high| other - high);
        let unbounded = if high.is_none() { other } else { 0.0 };
        // Where memory was divided into parts, recorded blocks are in the heap's.
        let recorded = if resident.heap_bytes == 0 { in_memory } else { 0.0 };
        let most = unbounded + resident.undivided_bytes as f64 - recorded;
        if resident.is_much(least) {
            at_least += least;
        } else if resident.is_much(most) {
            at_most += most;
        }
    }
    (at_least, at_most)
}

/// Lower end of what recorded blocks have in memory, bytes. Blocks in use need not be in memory.
fn least_in_memory(context: &Context, pool: &Pool) -> f64 {
    let profile = context.profile;
    let is_known = pool.knows(profile, Value::ResidentSpace);
    let low = is_known.then(|| pool.estimate(profile, Value::ResidentSpace, context.options.confidence).low);
    low.flatten().unwrap_or(0.0)
}

/// Parts below this share are added to "other" in the one-line form.
const LARGE: f64 = 0.05;

/// The resident memory as a sum, with small parts added to "other". `about` follows the parts that it names.
fn large_parts(resident: &Resident, about: &[(&str, String)]) -> String {
    let least = resident.total_bytes() as f64 * LARGE;
    let is_large = |(name, size): &(&str, u64)| *name == UNDIVIDED || *name != OTHER && *size as f64 >= least;
    let (mut large, rest): (Vec<_>, Vec<_>) = resident.parts().into_iter().partition(is_large);
    large.push((OTHER, rest.iter().map(|(_, size)| size).sum()));
    sum_of(resident, &large, about)
}

/// `1.2 GiB = heap 1 GiB + files 200 MiB`.
fn parts(context: &Context, entry: &Entry, resident: &Resident) -> String {
    let sum = sum_of(resident, &resident.parts(), &[about_own_heap(context, entry, resident)]);
    sum + &shared_once(context, entry, resident) + when(context, entry, resident)
}

/// Whether an entry has the memory of a single process.
fn is_one(context: &Context, entry: &Entry) -> bool {
    with_memory(context.profile, entry).map(Process::count).sum::<u64>() <= 1
}

/// How much it is without counting pages once for each process that shares them, if that is much less.
fn shared_once(context: &Context, entry: &Entry, resident: &Resident) -> String {
    let is_much = |pss: &u64| resident.is_much(resident.total_bytes().saturating_sub(*pss) as f64);
    let pss = resident.pss_bytes.filter(|pss| !is_one(context, entry) && is_much(pss));
    let text = |pss: u64| format!("; {} if pages that processes share are divided among them", bytes(pss as f64));
    pss.map_or_else(String::new, text)
}

/// Of which moment the memory of processes is that have ended.
fn when(context: &Context, entry: &Entry, resident: &Resident) -> &'static str {
    match (resident.is_before_end, is_one(context, entry)) {
        (false, _) => "",
        (true, true) => ", shortly before it ended",
        (true, false) if entry.has_ended(context.profile) => ", of each shortly before it ended",
        (true, false) => ", of those that have ended shortly before that",
    }
}

/// Whose heap other memory may be, if it is much and a runtime is known: ` (perhaps Java's own heap)`, or nothing.
fn about_own_heap(context: &Context, entry: &Entry, resident: &Resident) -> (&'static str, String) {
    let heaps = || own_heaps(context, entry, resident);
    let is_in_code = |what: &&str| resident.jit_code_bytes > resident.not_seen_bytes() && what.starts_with(IN_CODE);
    let (part, size, heap) = match heaps().find(is_in_code) {
        Some(heap) => (JIT_CODE, resident.jit_code_bytes, Some(heap)),
        None => (OTHER, resident.other_bytes, heaps().next()),
    };
    // Details follow in parentheses.
    let name = heap.filter(|_| resident.is_much(size as f64)).and_then(|what| what.split(" (").next());
    (part, name.map_or_else(String::new, |name| format!(" (perhaps {name})")))
}

/// The heaps of runtimes that may be in other memory. Python's is not if its arenas were found.
fn own_heaps<'p>(context: &'p Context, entry: &'p Entry, resident: &Resident) -> impl Iterator<Item = &'p str> {
    let has_python = resident.python.is_some();
    let missing = entry.members(context.profile).flat_map(|process| &process.missing).map(|missing| &*missing.what);
    missing.filter(move |what| what.contains(OWN_HEAP) && !(has_python && what.starts_with("Python")))
}

fn sum_of(resident: &Resident, parts: &[(&str, u64)], about: &[(&str, String)]) -> String {
    let part = |(name, size): &(&str, u64)| {
        let about = about.iter().find(|(part, _)| part == name).map_or("", |(_, text)| text);
        format!("{name}{TOGETHER}{}{about}", bytes(*size as f64))
    };
    let parts: Vec<String> = parts.iter().filter(|(_, size)| *size > 0).map(part).collect();
    let beside = [("swapped", resident.swapped_bytes), ("in huge pages", resident.hugetlb_bytes)];
    let beside = beside.into_iter().filter(|(_, size)| *size > 0);
    let beside: String = beside.map(|(name, size)| format!("; {} {name}", bytes(size as f64))).collect();
    format!("{} = {}{beside}", bytes(resident.total_bytes() as f64), parts.join(" + "))
}

/// What the heap's memory is used for.
fn heap(context: &Context, entry: &Entry, resident: &Resident) -> String {
    let profile = context.profile;
    if let Some(glibc) = &resident.glibc {
        return super::glibc::heap(context, entry, resident, glibc);
    }
    if entry.is_idle() || entry.members(profile).all(Process::lacks_allocator) {
        let others = of_other_allocators(context, entry, resident);
        return others.map_or_else(|| NOT_COUNTED.into(), |others| format!("{NOT_COUNTED}; {others}"));
    }
    let known = entry.processes.iter().all(|&process| profile.knows_inuse(process));
    if resident.is_before_end {
        return "how much of the heap was in use then is not known".into();
    }
    if !known {
        return "how much of the heap is in use is not known (frees were not tracked)".into();
    }
    if resident.undivided_bytes > 0 {
        return "how much of the heap is in use is not known: only the kernel's sums were read".into();
    }
    // They are not in the heap, and allocators' own figures tell nothing about them.
    if entry.pool.has_mapped || entry.members(profile).any(Process::lacks_exact_mappings) {
        return "how much of the heap is in use is not known: mappings (--mmap) are recorded with it".into();
    }
    // Some blocks in use may have been allocated unobserved.
    let had_gap = |process: usize| {
        profile.processes.get(process).is_some_and(|process| process.inuse_since.is_some() || process.was_unseen())
    };
    let has_gap = entry.processes.iter().any(|&process| had_gap(process));
    let resident = &Resident { at_attach_bytes: resident.at_attach_bytes.filter(|_| !has_gap), ..*resident };
    let pool = entry.pool.without_go();
    // Blocks in memory need not be in mappings that are known as a heap.
    let in_memory = least_in_memory(context, &pool);
    let in_heap = (in_memory - resident.not_seen_bytes() as f64).max(0.0);
    let inuse = pool.estimate(profile, Value::InuseSpace, context.options.confidence).high.unwrap_or(f64::INFINITY);
    let (least, mut most) = resident.unused_bytes((in_heap, inuse));
    // Nor is a mapping in which nothing was sampled, unless it is glibc's.
    let all = resident.heap_bytes.saturating_add(resident.not_seen_bytes());
    if entry.members(profile).any(|process| process.other_allocators().next().is_some()) {
        most = most.max(all as f64 - in_memory);
    }
    let before = match resident.at_attach_bytes {
        Some(0) => "nothing is older than the recording".to_owned(),
        Some(older) => {
            // Large blocks, and heaps in which nothing was sampled, are not recognized as such.
            match older.min(all) {
                0 => "what was there before the recording is not in memory".to_owned(),
                most => format!("at most {} was there before the recording", bytes(most as f64)),
            }
        }
        None if has_gap => "how much else is in use is unknown".to_owned(),
        None => "how much is older than the recording is unknown".to_owned(),
    };
    let held = "is held by the allocator but not in use";
    let unused = if least > 0.0 {
        format!("; between {} and {} {held}", bytes(least), bytes(most))
    } else if most >= 1.0 {
        format!("; at most {} {held}", bytes(most))
    } else {
        String::new()
    };
    let recorded = together(context.figure(&pool, Value::InuseSpace));
    format!("of the heap, {recorded} is in recorded blocks; {before}{unused}")
}

/// A figure with its interval. Its number and its unit stay on one line.
pub(super) fn together(figure: FigureText) -> String {
    FigureText { figure: figure.figure.replace(' ', &TOGETHER.to_string()), ..figure }.text()
}

/// How large the heaps of other allocators than glibc may be in processes in which nothing was counted: neither their
/// names nor sampled blocks tell their mappings from other memory. `None` if there are no such allocators, or if the
/// memory was not divided into parts.
pub(super) fn of_other_allocators(context: &Context, entry: &Entry, resident: &Resident) -> Option<String> {
    let of_glibc = resident.glibc.map_or(0, |glibc| glibc.resident_bytes);
    let of_python = resident.python.map_or(0, |python| python.resident_bytes);
    let rest = resident.heap_bytes.saturating_sub(of_glibc).saturating_sub(of_python);
    let most = rest.saturating_add(resident.not_seen_bytes());
    let names: IndexSet<&str> = entry.members(context.profile).flat_map(Process::other_allocators).collect();
    let is_divided = |name: &str| name == PYTHONS && resident.python.is_some();
    let names: Vec<&str> = names.into_iter().filter(|name| !is_divided(name)).collect();
    let is_known = most > 0 && resident.undivided_bytes == 0 && !names.is_empty();
    is_known.then(|| format!("{} has at most {} of the heap and of other memory", names.join(", "), bytes(most as f64)))
}

/// A size whose number and unit stay on one line.
pub(super) fn bytes(value: f64) -> String {
    units::bytes(value).replace(' ', &TOGETHER.to_string())
}

//! Why a process is larger than its profile: its resident memory in parts that add up, and what is known about its
//! heap.

use indexmap::IndexSet;
use serde::Serialize;

use super::processes::{Entry, entries};
use super::{Context, ReportOptions};
use crate::estimates::NOT_COUNTED;
use crate::group::GroupBy;
use crate::model::{HEAP, OTHER, Process, Profile, Resident, UNDIVIDED};
use crate::report::text::{Style, wrap};
use crate::units;
use crate::value::Value;

/// Maximum number of programs or processes shown.
const MOST: usize = 3;
/// What names of heaps of runtimes have in common.
const OWN_HEAP: &str = "own heap";
/// The name of Python's object allocator.
const PYTHONS: &str = "Python objects";

/// Placeholder for a non-breaking space between a number and its unit.
pub(super) const TOGETHER: char = '\u{e000}';

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

/// The resident memory of a single program, with what of its heap is free or older if that is much. Empty if it was not
/// measured.
pub(super) fn brief(context: &Context) -> Vec<String> {
    let measured = measured(context, GroupBy::Program);
    let [(entry, resident)] = measured.as_slice() else { return Vec::new() };
    let of_heap = |glibc| super::glibc::not_recorded(context, entry, resident, glibc);
    let about_heap = resident.glibc.as_ref().map(of_heap).unwrap_or_default();
    let about_other = about_other(context, entry, resident);
    let wrapped = wrap(&large_parts(resident, (&about_heap, &about_other)), context.width - 13);
    let begin = |k: usize| if k == 0 { "  resident   " } else { "             " };
    wrapped.iter().enumerate().map(|(k, line)| format!("{}{}", begin(k), line.replace(TOGETHER, " "))).collect()
}

/// The total memory of an entry's processes; `None` if it was not measured for a process that has not ended.
pub(super) fn of(profile: &Profile, entry: &Entry) -> Option<Resident> {
    let sum = entry.members(profile).try_fold(None, |sum: Option<Resident>, process| match process.resident {
        Some(resident) => {
            let mut all = resident;
            sum.iter().for_each(|sum| all.add(sum));
            Some(Some(all))
        }
        None => process.ended.then_some(sum),
    });
    sum.flatten().filter(|resident| resident.total_bytes() > 0)
}

/// Unaccounted memory is reported from this size and this share of the resident memory.
const MUCH_BYTES: f64 = (8 << 20) as f64;
const MUCH: f64 = 0.1;

/// Anonymous resident memory that neither an allocator's heap nor a recorded block explains, in bytes: at least the
/// first figure; and in other programs at most the second, because nothing bounds what they have in use or what their
/// allocators hold free, or because their memory was not divided into parts. Programs with a known runtime are left out:
/// the report names that runtime's heap.
pub(super) fn unaccounted_bytes(context: &Context) -> (f64, f64) {
    let profile = context.profile;
    let (mut at_least, mut at_most) = (0.0, 0.0);
    for (entry, resident) in measured(context, GroupBy::Program) {
        if own_heap(context, &entry, &resident).is_some() {
            continue;
        }
        let is_much = |bytes: f64| bytes >= MUCH_BYTES.max(MUCH * resident.total_bytes() as f64);
        let (inuse, high) = if entry.is_idle() {
            (0.0, Some(0.0))
        } else {
            let estimate = entry.pool.estimate(profile, Value::InuseSpace, context.options.confidence);
            let is_known = entry.processes.iter().all(|&process| profile.knows_inuse(process));
            (estimate.estimate, estimate.high.filter(|_| is_known))
        };
        // Other allocators than glibc may hold free memory in mappings that nothing marks.
        let has_others = entry.members(profile).any(|process| process.other_allocators().next().is_some());
        let high = high.filter(|_| !has_others);
        let other = resident.other_bytes as f64;
        let least = high.map_or(0.0, |high| other - high);
        let unbounded = if high.is_none() { other } else { 0.0 };
        let most = unbounded + resident.undivided_bytes as f64 - inuse;
        if is_much(least) {
            at_least += least;
        } else if is_much(most) {
            at_most += most;
        }
    }
    (at_least, at_most)
}

/// Parts below this share are added to "other" in the one-line form.
const LARGE: f64 = 0.05;

/// The resident memory as a sum, with small parts added to "other". `about` follows the heap and "other".
fn large_parts(resident: &Resident, about: (&str, &str)) -> String {
    let least = resident.total_bytes() as f64 * LARGE;
    let is_large = |(name, size): &(&str, u64)| *name == UNDIVIDED || *name != OTHER && *size as f64 >= least;
    let (mut large, rest): (Vec<_>, Vec<_>) = resident.parts().into_iter().partition(is_large);
    large.push((OTHER, rest.iter().map(|(_, size)| size).sum()));
    sum_of(resident, &large, about)
}

/// `1.2 GiB = heap 1 GiB + files 200 MiB`.
fn parts(context: &Context, entry: &Entry, resident: &Resident) -> String {
    sum_of(resident, &resident.parts(), ("", &about_other(context, entry, resident)))
}

/// Whose heap other memory may be, if it is much and a runtime is known: ` (perhaps Java's own heap)`, or nothing.
fn about_other(context: &Context, entry: &Entry, resident: &Resident) -> String {
    let is_much = resident.other_bytes as f64 >= MUCH_BYTES.max(MUCH * resident.total_bytes() as f64);
    // Details follow in parentheses.
    let name = own_heap(context, entry, resident).filter(|_| is_much).and_then(|what| what.split(" (").next());
    name.map_or_else(String::new, |name| format!(" (perhaps {name})"))
}

/// The heap of a runtime that may be in other memory. Python's is not if its arenas were found.
fn own_heap<'p>(context: &'p Context, entry: &'p Entry, resident: &Resident) -> Option<&'p str> {
    let is_known = |what: &str| resident.python.is_some() && what.starts_with("Python");
    let missing = entry.members(context.profile).flat_map(|process| &process.missing);
    missing.map(|missing| &*missing.what).find(|what| what.contains(OWN_HEAP) && !is_known(what))
}

fn sum_of(resident: &Resident, parts: &[(&str, u64)], (about_heap, about_other): (&str, &str)) -> String {
    let part = |(name, size): &(&str, u64)| {
        let about = match *name {
            HEAP => about_heap,
            OTHER => about_other,
            _ => "",
        };
        format!("{name}{TOGETHER}{}{about}", bytes(*size as f64))
    };
    let parts: Vec<String> = parts.iter().filter(|(_, size)| *size > 0).map(part).collect();
    let beside = [("swapped", resident.swapped_bytes), ("in huge pages", resident.hugetlb_bytes)];
    let beside = beside.into_iter().filter(|(_, size)| *size > 0);
    let beside: String = beside.map(|(name, size)| format!("; {} {name}", bytes(size as f64))).collect();
    let when = if resident.is_before_end { ", shortly before it ended" } else { "" };
    format!("{} = {}{beside}{when}", bytes(resident.total_bytes() as f64), parts.join(" + "))
}

/// What the heap's memory is used for.
fn heap(context: &Context, entry: &Entry, resident: &Resident) -> String {
    let profile = context.profile;
    if let Some(glibc) = &resident.glibc {
        return super::glibc::heap(context, entry, resident, glibc);
    }
    if entry.is_idle() {
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
    let estimate = |value| pool.estimate(profile, value, context.options.confidence);
    // Blocks in use need not be in memory, nor in mappings that are known as a heap.
    let in_memory = pool.knows(profile, Value::ResidentSpace).then(|| estimate(Value::ResidentSpace).low).flatten();
    let in_memory = in_memory.unwrap_or(0.0);
    let in_heap = (in_memory - resident.other_bytes as f64).max(0.0);
    let inuse = estimate(Value::InuseSpace).high.unwrap_or(f64::INFINITY);
    let (least, mut most) = resident.unused_bytes((in_heap, inuse));
    // Nor is a mapping in which nothing was sampled, unless it is glibc's.
    if entry.members(profile).any(|process| process.other_allocators().next().is_some()) {
        most = most.max(resident.heap_bytes.saturating_add(resident.other_bytes) as f64 - in_memory);
    }
    let figure = context.figure(&pool, Value::InuseSpace);
    let bounds = if figure.bounds.is_empty() { String::new() } else { format!(" {}", figure.bounds) };
    let before = match resident.at_attach_bytes {
        Some(0) => "nothing is older than the recording".to_owned(),
        Some(older) => {
            // Large blocks, and heaps in which nothing was sampled, are not recognized as such.
            match older.min(resident.heap_bytes.saturating_add(resident.other_bytes)) {
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
    format!(
        "of the heap, {}{bounds} is in recorded blocks; {before}{unused}",
        figure.figure.replace(' ', &TOGETHER.to_string())
    )
}

/// How large the heaps of other allocators than glibc may be in processes in which nothing was counted: neither their
/// names nor sampled blocks tell their mappings from other memory. `None` if there are no such allocators, or if the
/// memory was not divided into parts.
pub(super) fn of_other_allocators(context: &Context, entry: &Entry, resident: &Resident) -> Option<String> {
    let of_glibc = resident.glibc.map_or(0, |glibc| glibc.resident_bytes);
    let of_python = resident.python.map_or(0, |python| python.resident_bytes);
    let rest = resident.heap_bytes.saturating_sub(of_glibc).saturating_sub(of_python);
    let most = rest.saturating_add(resident.other_bytes);
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

//! How a heap is divided into memory in use and free memory, if glibc's arenas were read; the parts add up.

use super::processes::Entry;
use super::resident::{bytes, together, with_memory};
use super::{Context, plural};
use crate::model::{Before, Glibc, Recorded, Resident};
use crate::units;
use crate::value::Value;

/// From this amount and share of the heap, a remedy is suggested for free memory.
const MUCH_BYTES: u64 = 16 << 20;
const MUCH: f64 = 0.1;
/// More arenas than this per process are considered many; a single-threaded program has one.
const MANY_ARENAS: u64 = 4;
/// From this share of the resident memory, the brief report names older blocks.
const MUCH_OLDER: f64 = 1.0 / 3.0;
/// From this size and share of the resident memory, the brief report names free memory.
const FREE_BYTES: u64 = 1 << 20;
const MUCH_FREE: f64 = 0.1;
/// From this size and share, the report names other memory in the heap's mappings, or memory added between the two
/// readings.
const OTHER_BYTES: f64 = (1 << 20) as f64;
const OTHER: f64 = 0.02;

/// What the heap's memory is used for.
pub(super) fn heap(context: &Context, entry: &Entry, resident: &Resident, glibc: &Glibc) -> String {
    let mut said = match recorded(context, entry) {
        Some(recorded) => parts(context, entry, resident, glibc, &recorded),
        None => {
            let (least, most) = glibc.inuse_bounds();
            let amount =
                if least < most { format!("between {} and {}", bytes(least), bytes(most)) } else { bytes(most) };
            let (blocks, free) = (plural(glibc.blocks, "block"), free(glibc));
            if entry.is_idle() || resident.python.is_some() {
                let rest = signed(rest(without_python(resident), glibc, glibc.inuse_bytes as f64));
                let python = of_python(resident);
                format!("the heap = {amount} in use in {blocks} + {free} free inside glibc{python}{rest}")
            } else {
                format!("of glibc's heap, {amount} is in use in {blocks}; {free} is free inside glibc")
            }
        }
    };
    for (size, what) in [
        (glibc.doubtful_bytes, "counted as in use may be in thread caches"),
        (glibc.unread_bytes, "of its arenas was not read (swapped out, or reading took too long)"),
        (glibc.inconsistent_bytes, "of its arenas is not consistent"),
    ] {
        if size > 0 {
            said += &format!("; {} {what}", bytes(size as f64));
        }
    }
    if !glibc.exact && glibc.inuse_bounds() == (glibc.inuse_bytes as f64, glibc.inuse_bytes as f64) {
        said += "; it changed while it was read, or its large blocks could not be checked";
    }
    if entry.is_idle() {
        let others = super::resident::of_other_allocators(context, entry, resident);
        said += &others.map_or_else(String::new, |others| format!("; {others}"));
    }
    if let Some(remedy) = remedy(glibc, resident, with_memory(context.profile, entry).count().max(1) as u64) {
        said += &format!("; {remedy}");
    }
    said
}

/// What of the heap is in older blocks, if it is a large part of the resident memory: ` (53.0 MiB in older blocks)`, or
/// nothing.
pub(super) fn older(context: &Context, entry: &Entry, resident: &Resident, glibc: &Glibc) -> String {
    let before = recorded(context, entry).map_or(0.0, |recorded| glibc.before(&recorded).estimate);
    // Some of the blocks in use are not in memory; these may be older ones.
    let before = before - glibc.absent_bytes as f64;
    let is_large = before >= resident.total_bytes() as f64 * MUCH_OLDER;
    if is_large { format!(" ({} in older blocks)", bytes(before)) } else { String::new() }
}

/// The free memory that allocators hold, if it is much, with what gives it back: `180 MiB inside glibc; malloc_trim(0)
/// would release …`.
pub(super) fn free_inside(resident: &Resident, processes: u64) -> Option<String> {
    let of_glibc = resident.glibc.map_or(0, |glibc| glibc.free_resident_bytes);
    let of_python = resident.python.map_or(0, |python| {
        python.resident_bytes.saturating_sub(python.inuse_bytes).saturating_sub(python.inconsistent_bytes)
    });
    let all = of_glibc.saturating_add(of_python);
    if all < FREE_BYTES || (all as f64) < MUCH_FREE * resident.total_bytes() as f64 {
        return None;
    }
    let [sum, glibc, python] = [all, of_glibc, of_python].map(|size| bytes(size as f64));
    let mut said = match (of_glibc, of_python) {
        (_, 0) => format!("{sum} inside glibc"),
        (0, _) => format!("{sum} inside Python's arenas"),
        _ => format!("{sum} inside allocators: {python} Python's arenas, {glibc} glibc"),
    };
    if let Some(remedy) = resident.glibc.and_then(|glibc| remedy(&glibc, resident, processes.max(1))) {
        said += &format!("; {remedy}");
    }
    if of_python >= all / 4 {
        said += "; Python returns an arena only when all of it is free";
    }
    Some(said)
}

/// What was recorded, if all of it is in glibc's heaps, and no block is missing in any process.
fn recorded(context: &Context, entry: &Entry) -> Option<Recorded> {
    let profile = context.profile;
    let is_followed = |&process: &usize| {
        profile.knows_inuse(process) && profile.processes.get(process).is_some_and(|it| it.is_followed_in_glibc())
    };
    if entry.is_idle() || !entry.processes.iter().all(is_followed) {
        return None;
    }
    entry.pool.recorded(profile, context.options.confidence)
}

/// `the heap = 8.00 MiB in recorded blocks + 24.0 MiB in older blocks + 8.10 MiB free inside glibc + …`.
fn parts(context: &Context, entry: &Entry, resident: &Resident, glibc: &Glibc, recorded: &Recorded) -> String {
    let figure = together(context.figure(&entry.pool.without_go(), Value::InuseSpace));
    let before = glibc.before(recorded);
    let rest = rest(without_python(resident), glibc, recorded.bytes.estimate + before.estimate);
    format!(
        "the heap = {figure} in recorded blocks + {} in older blocks + {} free inside glibc{}{}",
        with_bounds(&before),
        free(glibc),
        of_python(resident),
        signed(rest)
    )
}

/// What Python's arenas are used for: two parts that add up to their resident memory; empty if there are none.
fn of_python(resident: &Resident) -> String {
    let Some(python) = resident.python.filter(|python| python.resident_bytes > 0) else { return String::new() };
    let inuse = python.inuse_bytes.min(python.resident_bytes);
    let [inuse, free] = [inuse, python.resident_bytes - inuse].map(|size| bytes(size as f64));
    let unread = if python.inconsistent_bytes > 0 { " or inconsistent" } else { "" };
    format!(" + {inuse} in {} of Python + {free} free{unread} in its arenas", plural(python.blocks, "object"))
}

/// Resident memory of the heap without Python's arenas, bytes.
fn without_python(resident: &Resident) -> f64 {
    resident.heap_bytes as f64 - resident.python.map_or(0.0, |python| python.resident_bytes as f64)
}

/// The parts that are not 0, each with its sign.
fn signed(parts: [(f64, &'static str); 4]) -> String {
    let part = |(size, what): (f64, &str)| match size.abs() {
        much if much < 1.0 => String::new(),
        much => format!(" {} {} {what}", if size < 0.0 { '\u{2212}' } else { '+' }, bytes(much)),
    };
    parts.map(part).concat()
}

/// What the heap's resident memory is besides blocks in use and free memory. `inuse` is the size of the blocks in use.
/// All sizes are in bytes, and together with these two they add up to `heap`.
fn rest(heap: f64, glibc: &Glibc, inuse: f64) -> [(f64, &'static str); 4] {
    let (resident, absent) = (glibc.resident_bytes as f64, glibc.absent_bytes as f64);
    let other = heap - resident;
    let other = if other > OTHER_BYTES.max(OTHER * heap) { other } else { 0.0 };
    // The heap's mappings were read slightly later.
    let rounding = heap - other + absent - inuse - glibc.free_resident_bytes as f64;
    [
        (rounding.max(0.0), "rounding of blocks and pages"),
        (other, "other memory in its mappings, or newer"),
        (-absent, "in use but not in memory"),
        (rounding.min(0.0), "released meanwhile"),
    ]
}

/// The size with its bounds, unless they show the same number.
fn with_bounds(before: &Before) -> String {
    let estimate = before.estimate;
    let unit = units::ByteUnit::of(estimate.max(before.high));
    let low = before.low.unwrap_or(0.0);
    let [low, of, high] = [low, estimate, before.high].map(|size| unit.figure(size));
    if low == of && of == high { bytes(estimate) } else { format!("{} [{low}, {high}]", bytes(estimate)) }
}

/// Free memory that is resident.
fn free(glibc: &Glibc) -> String {
    bytes(glibc.free_resident_bytes as f64)
}

/// Suggestions if there is much free memory.
fn remedy(glibc: &Glibc, resident: &Resident, processes: u64) -> Option<String> {
    let free = glibc.free_resident_bytes;
    if free < MUCH_BYTES || (free as f64) < MUCH * resident.heap_bytes as f64 {
        return None;
    }
    let mut ways = Vec::new();
    if glibc.trimmable_bytes >= free / 2 {
        ways.push(format!("malloc_trim(0) would release {} of the free memory", bytes(glibc.trimmable_bytes as f64)));
    }
    let arenas = glibc.arenas / processes;
    if arenas > MANY_ARENAS {
        ways.push(format!("MALLOC_ARENA_MAX=2 would leave fewer than {arenas} arenas"));
    }
    (!ways.is_empty()).then(|| ways.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = 1_048_576.0;

    #[test]
    fn the_parts_of_a_heap_add_up_to_it() {
        let mib = |mib: u64| mib << 20;
        let glibc =
            Glibc { resident_bytes: mib(100), absent_bytes: mib(4), free_resident_bytes: mib(30), ..Glibc::default() };
        // The mappings are as large as the arenas, somewhat larger, much larger, and smaller.
        for (heap, expected) in [
            (100.0, [3.0, 0.0, -4.0, 0.0]),
            (101.0, [4.0, 0.0, -4.0, 0.0]),
            (120.0, [3.0, 20.0, -4.0, 0.0]),
            (90.0, [0.0, 0.0, -4.0, -7.0]),
        ] {
            let parts = rest(heap * MIB, &glibc, 71.0 * MIB).map(|(size, _)| size / MIB);
            assert_eq!(parts, expected, "{heap}");
            assert_eq!(71.0 + 30.0 + parts.iter().sum::<f64>(), heap);
        }
        assert_eq!(rest(0.0, &Glibc::default(), 0.0).map(|(size, _)| size), [0.0; 4]);
    }
}

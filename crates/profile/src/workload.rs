//! The workload of a profile, for planning the next recording.

use std::collections::HashMap;
use std::sync::Arc;

use super::model::{CPU_NS, PROBE_NS, Process, Profile};
use heapbpf_audit::Hook;
use heapbpf_statistics::optimum::ClassUse;
use heapbpf_statistics::plan::Workload;
use sampler_ebpf::trials::size_class;

/// The rates and call sites of a profile, for a recording of the same length. The allocations of each stack count with
/// their mean size, because a profile stores nothing else about their sizes. Live blocks are those in use at the end
/// (at exit for an ended process) or at the peak, whichever is more, because many programs free everything when they
/// end. If frees were not followed, live blocks are the allocated ones.
///
/// `hooks_inline`: the next recording hooks processes inline, except those that refused that in this one.
pub fn workload(profile: &Profile, hooks_inline: bool) -> Workload {
    let seconds = profile.header.duration.as_secs_f64();
    let per_second = if seconds > 0.0 { 1.0 / seconds } else { 1.0 };
    // Allocated objects, allocated bytes and live objects by size class.
    let mut classes: HashMap<usize, (f64, f64, f64)> = HashMap::new();
    let mut sites: HashMap<(*const u8, Arc<str>), f64> = HashMap::new();
    let refuses = |process: &Process| process.hook == Some(Hook::Probe) && process.not_inline.is_some();
    let (mut inside, mut all) = (0.0, 0.0);
    for row in &profile.rows {
        let (objects, bytes) = (row.alloc.objects, row.alloc.bytes);
        if objects.is_nan() || objects <= 0.0 {
            continue;
        }
        let is_inside = hooks_inline && !profile.processes.get(row.key.process).is_some_and(refuses);
        inside += if is_inside { objects } else { 0.0 };
        all += objects;
        let class = classes.entry(size_class((bytes / objects).max(1.0) as u64)).or_default();
        class.0 += objects;
        class.1 += bytes;
        let peak = row.peak.map_or(0.0, |peak| peak.objects);
        class.2 += if profile.knows_inuse(row.key.process) {
            (row.inuse.objects + row.at_exit.objects).max(peak)
        } else {
            objects
        };
        let site = (Arc::as_ptr(&row.key.stack).cast::<u8>(), Arc::clone(&row.key.function));
        *sites.entry(site).or_default() += bytes;
    }
    let mut classes: Vec<ClassUse> = classes
        .into_values()
        .map(|(objects, bytes, live)| ClassUse {
            size_bytes: (bytes / objects).max(1.0),
            allocations: objects * per_second,
            live,
        })
        .collect();
    classes.sort_by(|a, b| a.size_bytes.total_cmp(&b.size_bytes));
    let sites = sites.into_values().map(|bytes| bytes * per_second).collect();
    let inline_share = if all > 0.0 { inside / all } else { 0.0 };
    let seconds_of = |name: &str| profile.counters.get(name).map(|ns| *ns as f64 * 1e-9);
    let work = seconds_of(CPU_NS).map(|cpu| (cpu - seconds_of(PROBE_NS).unwrap_or(0.0)).max(0.0));
    let work_cpus = work.map(|work| work * per_second);
    Workload { classes, sites, seconds: if seconds > 0.0 { seconds } else { 1.0 }, inline_share, work_cpus }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use heapbpf_statistics::plan::samples_per_second;

    /// Memory that ended processes held was live, whether it counts as in use or not.
    #[test]
    fn what_was_held_at_exit_was_live() {
        let live = |profile| workload(&profile, true).classes.iter().map(|class| class.live).collect::<Vec<_>>();
        assert_eq!(live(testing::ended_apart()), live(testing::small()));
    }

    /// A plan for the profile's own sampling interval predicts its number of samples within 10 %.
    #[test]
    fn a_profile_plans_itself() {
        let mut profile = testing::small();
        profile.rows.retain(|row| row.key.interval == profile.header.interval);
        let workload = workload(&profile, true);
        let samples: u64 = profile.rows.iter().map(|row| row.alloc.samples).sum();
        let planned = samples_per_second(&workload, profile.header.interval) * workload.seconds;
        assert!((planned / samples as f64 - 1.0).abs() < 0.1, "{planned} {samples}");
        assert!(!workload.sites.is_empty() && workload.classes.iter().any(|class| class.live > 0.0));
    }

    #[test]
    fn nothing_allocated() {
        let mut profile = testing::small();
        profile.rows.clear();
        profile.header.duration = std::time::Duration::ZERO;
        assert_eq!(workload(&profile, true), Workload { seconds: 1.0, ..Workload::default() });
    }

    #[test]
    fn who_refused_inline_hooks_traps_and_the_own_work_is_what_probes_left() {
        let mut profile = testing::small();
        let objects = |process: Option<usize>| -> f64 {
            let rows = profile.rows.iter().filter(|row| process.is_none_or(|process| row.key.process == process));
            rows.map(|row| row.alloc.objects).sum()
        };
        // The second process has probes, because it refused inline hooks.
        let share = objects(Some(0)) / objects(None);
        let found = workload(&profile, true);
        assert!((found.inline_share - share).abs() < 1e-9 && share < 1.0, "{share} {}", found.inline_share);
        assert_eq!((workload(&profile, false).inline_share, found.work_cpus), (0.0, None));
        profile.counters.extend([(CPU_NS.to_owned(), 30_500_000_000), (PROBE_NS.to_owned(), 15_250_000_000)]);
        let work = workload(&profile, true).work_cpus.expect("it is counted");
        assert!((work - 15.25 / profile.header.duration.as_secs_f64()).abs() < 1e-9, "{work}");
    }
}

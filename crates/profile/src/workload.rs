//! The workload of a profile, for planning the next recording.

use std::collections::HashMap;
use std::sync::Arc;

use super::model::Profile;
use heapbpf_statistics::optimum::ClassUse;
use heapbpf_statistics::plan::Workload;
use sampler_ebpf::trials::size_class;

/// The rates and call sites of a profile, for a recording of the same length. The allocations of each stack count with
/// their mean size, because a profile stores nothing else about their sizes. Live blocks are those in use at the end
/// (at exit for an ended process) or at the peak, whichever is more, because many programs free everything when they
/// end. If frees were not followed, live blocks are the allocated ones.
pub fn workload(profile: &Profile) -> Workload {
    let seconds = profile.header.duration.as_secs_f64();
    let per_second = if seconds > 0.0 { 1.0 / seconds } else { 1.0 };
    // Allocated objects, allocated bytes and live objects by size class.
    let mut classes: HashMap<usize, (f64, f64, f64)> = HashMap::new();
    let mut sites: HashMap<(*const u8, Arc<str>), f64> = HashMap::new();
    for row in &profile.rows {
        let (objects, bytes) = (row.alloc.objects, row.alloc.bytes);
        if objects.is_nan() || objects <= 0.0 {
            continue;
        }
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
    Workload { classes, sites, seconds: if seconds > 0.0 { seconds } else { 1.0 } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use heapbpf_statistics::plan::samples_per_second;

    /// Memory that ended processes held was live, whether it counts as in use or not.
    #[test]
    fn what_was_held_at_exit_was_live() {
        let live = |profile| workload(&profile).classes.iter().map(|class| class.live).collect::<Vec<_>>();
        assert_eq!(live(testing::ended_apart()), live(testing::small()));
    }

    /// A plan for the profile's own sampling interval predicts its number of samples within 10 %.
    #[test]
    fn a_profile_plans_itself() {
        let mut profile = testing::small();
        profile.rows.retain(|row| row.key.interval == profile.header.interval);
        let workload = workload(&profile);
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
        assert_eq!(workload(&profile), Workload { seconds: 1.0, ..Workload::default() });
    }
}

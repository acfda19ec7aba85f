//! A profile as a workload to plan the next recording for.

use std::collections::HashMap;
use std::sync::Arc;

use super::model::Profile;
use crate::sampling::optimum::ClassUse;
use crate::sampling::plan::Workload;
use sampler_ebpf::trials::size_class;

/// Rates and sites of a profile, for a recording of the same length. Each stack's allocations count with their mean size,
/// which is all that a profile keeps of them. What is live is taken from what was in use at the end (of a process that
/// ended, at its own end) or at the peak, whichever is more (many programs free all at their end); without frees followed, from what was allocated.
pub fn workload(profile: &Profile) -> Workload {
    let seconds = profile.duration.as_secs_f64();
    let per_second = if seconds > 0.0 { 1.0 / seconds } else { 1.0 };
    // Allocated objects and bytes, live objects, by size class.
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
        class.2 += if profile.knows_inuse(row.process) {
            (row.inuse.objects + row.at_exit.objects).max(peak)
        } else {
            objects
        };
        let site = (Arc::as_ptr(&row.stack).cast::<u8>(), Arc::clone(&row.function));
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
    use crate::profile::testing;
    use crate::sampling::plan::samples_per_second;

    /// Where what ended processes held stands does not matter: it was live all the same.
    #[test]
    fn what_was_held_at_exit_was_live() {
        let live = |profile| workload(&profile).classes.iter().map(|class| class.live).collect::<Vec<_>>();
        assert_eq!(live(testing::ended_apart()), live(testing::small()));
    }

    /// The plan for a profile's own interval is about what the profile itself has.
    #[test]
    fn a_profile_plans_itself() {
        let mut profile = testing::small();
        profile.rows.retain(|row| row.interval == profile.interval);
        let workload = workload(&profile);
        let samples: u64 = profile.rows.iter().map(|row| row.alloc.samples).sum();
        let planned = samples_per_second(&workload, profile.interval) * workload.seconds;
        assert!((planned / samples as f64 - 1.0).abs() < 0.1, "{planned} {samples}");
        assert!(!workload.sites.is_empty() && workload.classes.iter().any(|class| class.live > 0.0));
    }

    #[test]
    fn nothing_allocated() {
        let mut profile = testing::small();
        profile.rows.clear();
        profile.duration = std::time::Duration::ZERO;
        assert_eq!(workload(&profile), Workload { seconds: 1.0, ..Workload::default() });
    }
}

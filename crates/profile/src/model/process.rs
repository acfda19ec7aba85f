//! A process in a profile.

use std::sync::Arc;
use std::time::SystemTime;

use heapbpf_audit::{FileAudit, Hook, Missing};

use super::losses::{LossBound, Losses};
use super::resident::Resident;
use super::row::Row;

/// What is missing of a process in which Python's small objects are not counted.
const PYTHONS_HEAP: &str = "Python's own heap";

/// A process in a profile, or several processes of one program whose rows were merged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Process {
    /// Process id, in the initial pid namespace.
    pub pid: u32,
    /// Process id inside its own pid namespace, if it differs.
    pub namespace_pid: Option<u32>,
    /// Name of the main thread.
    pub comm: String,
    /// Path of the executable as the process sees it.
    pub exe: String,
    /// cgroup v2 path; empty if unknown.
    pub cgroup: String,
    /// Where it runs: container, pod, systemd unit.
    pub placement: Placement,
    /// Allocators that were found, for example `glibc 2.36`.
    pub allocators: Vec<String>,
    /// How its calls were counted; `None` if nothing in it was hooked, if that is unknown, or if the merged processes
    /// differ.
    pub hook: Option<Hook>,
    /// Why it has probes although inline hooks were requested.
    pub not_inline: Option<String>,
    /// For a process with probes, whether its links serve only this process (otherwise every process); `None` if
    /// unknown.
    pub own_links: Option<bool>,
    /// Audit of each of its files that contain an allocator: what was hooked, at which instruction, and what was not.
    pub audit: Vec<Arc<FileAudit>>,
    /// What else in its files was not hooked, and why.
    pub missing: Vec<Missing>,
    /// Share of the process's time in the recording during which its allocators were hooked, 0 to 1.
    pub coverage: f64,
    /// Share of its CPU time in the recording during which its calls were counted, 0 to 1; `None` if that was not
    /// measured.
    pub cpu_coverage: Option<f64>,
    /// Whether it ended during the recording. What it held at exit counts as in use, or is separate
    /// ([`Header::ended_apart`](super::Header::ended_apart)).
    pub ended: bool,
    /// Whether its memory in use is unknown although the recording followed frees. Either its frees were no longer
    /// followed, to keep the overhead budget, or another recording's inline hooks hide them. Its rows then have nothing
    /// in use, and totals over processes do not include it.
    pub inuse_unknown: bool,
    /// When following its frees resumed, after it had stopped to keep the overhead budget or the frees had been hidden.
    /// Its figures in use, at exit and at the peak cover only blocks allocated since then. `None`: they cover all
    /// blocks of the recording.
    pub inuse_since: Option<SystemTime>,
    /// Exact count of bytes requested; `None` if they could not be counted.
    pub exact_alloc_bytes: Option<u64>,
    /// Exact count of allocation calls.
    pub exact_alloc_objects: Option<u64>,
    /// Bounds on the effect of lost events on its figures.
    pub losses: Losses,
    /// Upper bound of what was counted after the time of the samples; exact counts may be too large by this much.
    pub slack: LossBound,
    /// Where its memory was when the profile was taken, if that was measured.
    pub resident: Option<Resident>,
    /// Number of processes that it stands for, if it is more than one; see [`Process::count`].
    pub stands_for: u64,
    /// The processes whose rows were merged into this entry, as far as they are still distinguished; otherwise empty.
    pub members: Vec<Member>,
}

/// Where a process runs, as far as its cgroups tell. Each text is empty if there is none or if it is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placement {
    /// Full ID of its innermost container, as the container engine shows it.
    pub container: String,
    /// UID of its Kubernetes pod.
    pub pod: String,
    /// Its systemd unit, for example `nginx.service`.
    pub unit: String,
}

impl Placement {
    /// Names and values of what is known, in a fixed order.
    pub fn known(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [("container", &*self.container), ("pod", &*self.pod), ("unit", &*self.unit)];
        all.into_iter().filter(|(_, value)| !value.is_empty())
    }

    /// Keeps only what `other` agrees with: what several processes have in common.
    pub fn keep_common(&mut self, other: &Self) {
        for (own, other) in
            [(&mut self.container, &other.container), (&mut self.pod, &other.pod), (&mut self.unit, &other.unit)]
        {
            if own != other {
                own.clear();
            }
        }
    }
}

/// A process whose rows were merged with those of others.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// The process.
    pub process: Process,
    /// Its totals: rows without a stack, one per sampling interval.
    pub totals: Vec<Row>,
}

impl Process {
    /// Whether the process was not observed for some time, because another recording had hooked it inline. Its
    /// allocations in that time are in no figure, and no figure of allocation has a valid interval.
    pub fn was_unseen(&self) -> bool {
        self.missing.iter().any(|missing| missing.what == Missing::UNSEEN)
    }

    /// Whether it has no exact totals because only sampled mappings are told from an allocator's own.
    pub fn lacks_exact_mappings(&self) -> bool {
        self.missing.iter().any(|missing| missing.what == Missing::EXACT_MAPPINGS)
    }

    /// Whether all recorded blocks are glibc's and none is missing, so that its arenas tell what else is in use. Beside
    /// inline hooks, mappings (`--mmap`) are recorded, too, and are not in its heap.
    pub fn is_followed_in_glibc(&self) -> bool {
        let has_gap = self.inuse_since.is_some() || self.was_unseen() || self.lacks_exact_mappings();
        !has_gap && !self.allocators.is_empty() && self.other_allocators().next().is_none()
    }

    /// Whether no allocator was found in it, so that nothing of its memory is accounted for.
    pub fn lacks_allocator(&self) -> bool {
        self.hook.is_none() && self.allocators.is_empty()
    }

    /// Names of its allocators with heaps of their own beside glibc's, in which nothing marks an unused mapping.
    pub fn other_allocators(&self) -> impl Iterator<Item = &str> {
        let is_other = |name: &&str| !name.starts_with("glibc ") && *name != "Rust global allocator";
        self.allocators.iter().flat_map(|names| names.split(", ")).filter(is_other)
    }

    /// Share of its anonymous memory, without stacks, that lies in heaps of allocators whose calls are counted. `None`
    /// if that was not measured, or if its runtime's own heap is read.
    pub fn memory_coverage(&self) -> Option<f64> {
        let resident = self.resident.filter(|_| self.hook != Some(Hook::GoRuntime))?;
        let counted = self.counted_heap_bytes() as f64 / resident.heap_bytes.max(1) as f64;
        Some(resident.heap_share()? * counted)
    }

    /// Resident memory in heaps of allocators whose calls are counted, bytes; 0 if it was not measured.
    pub fn counted_heap_bytes(&self) -> u64 {
        let Some(resident) = self.resident.filter(|_| self.hook.is_some()) else { return 0 };
        let is_uncounted = self.missing.iter().any(|missing| missing.what.starts_with(PYTHONS_HEAP));
        let uncounted = resident.python.filter(|_| is_uncounted).map_or(0, |python| python.resident_bytes);
        resident.heap_bytes.saturating_sub(uncounted)
    }

    /// The memory of several processes. `None` if that of a process that has not ended is unknown, or if there is none.
    pub fn resident_of_all<'p>(mut processes: impl Iterator<Item = &'p Self>) -> Option<Resident> {
        let sum = processes.try_fold(None, |sum: Option<Resident>, process| match process.resident {
            Some(mut all) => {
                sum.iter().for_each(|sum| all.add(sum));
                Some(Some(all))
            }
            None => process.ended.then_some(sum),
        });
        sum.flatten().filter(|all| all.total_bytes() > 0)
    }

    /// Number of processes that it stands for: 1, unless processes were merged.
    pub fn count(&self) -> u64 {
        self.stands_for.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unknown_is_left_out_and_what_differs_is_dropped() {
        let one = Placement { container: "c".into(), pod: String::new(), unit: "a.service".into() };
        assert_eq!(one.known().collect::<Vec<_>>(), [("container", "c"), ("unit", "a.service")]);
        let mut common = one.clone();
        common.keep_common(&one);
        assert_eq!(common, one);
        common.keep_common(&Placement { unit: "b.service".into(), ..one });
        assert_eq!(common.known().collect::<Vec<_>>(), [("container", "c")]);
    }
}

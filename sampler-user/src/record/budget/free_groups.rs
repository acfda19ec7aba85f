//! Groups of processes whose frees are tracked by the same links, with their cost and their memory in use.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use sampler_ebpf::abi::{Counters, ProcessKey};

use crate::attach::hooks::Served;
use crate::cost::free_groups::FreeGroup;
use crate::heap::live::Heap;
use crate::host::Host;
use crate::kernel::totals::Counts;
use crate::record::attaching::probes::Attaching;

/// Most links in a group's name.
const MOST_NAMES: usize = 3;

/// Which groups are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Those whose frees are tracked. Their frees are those since the last look.
    Tracked,
    /// Those whose frees were given up. Their frees are those to be expected: what is allocated is freed sooner or later.
    GivenUp,
}

/// Calls by process: of functions that free, and of functions that allocate.
#[derive(Default)]
pub struct Calls(HashMap<ProcessKey, [u64; 2]>);

impl Calls {
    /// Counts up to now.
    pub fn of(counts: &Counts) -> Self {
        Self(counts.processes.iter().map(|(process, counters)| (*process, calls(counters))).collect())
    }

    /// Calls since then that frees are to be judged by.
    fn since(&self, process: &ProcessKey, counters: &Counters, which: Which) -> u64 {
        let before = self.0.get(process).copied().unwrap_or_default();
        let [frees, allocations] = [0, 1].map(|index| calls(counters)[index].saturating_sub(before[index]));
        if which == Which::Tracked { frees } else { allocations }
    }
}

fn calls(counters: &Counters) -> [u64; 2] {
    [counters.frees_seen, counters.hits() + counters.reentrant]
}

/// Groups of live processes whose frees are tracked, or of those whose frees were given up.
pub fn groups(
    which: Which,
    counts: &Counts,
    before: &Calls,
    attaching: &Attaching,
    host: &Host,
    heap: &Heap,
) -> Vec<FreeGroup<Served>> {
    let mut processes = Vec::new();
    for (process, counters) in &counts.processes {
        let Some(incarnation) =
            host.processes().current(process.tgid).filter(|_| attaching.is_current_program(*process))
        else {
            continue;
        };
        let given_up = which == Which::GivenUp;
        let serving = attaching.serving(incarnation).into_iter();
        let serving = serving.filter(|it| attaching.hooks.stopped_tracking_frees_of(*it) == given_up);
        let serving: BTreeSet<Served> = serving.collect();
        if !serving.is_empty() {
            processes.push((*process, serving, before.since(process, counters, which), &incarnation.info.comm));
        }
    }
    let links: Vec<&BTreeSet<Served>> = processes.iter().map(|(_, serving, ..)| serving).collect();
    let mut groups = Vec::new();
    for members in connected(&links) {
        let members = || members.iter().map(|&index| &processes[index]);
        let links: BTreeSet<Served> = members().flat_map(|(_, serving, ..)| serving).copied().collect();
        let name_of = |served: &Served| match served {
            Served::File(key) => attaching.hooks.files.path(*key).unwrap_or("a file").to_owned(),
            Served::Process(pid) => {
                let comm = members().find(|(process, ..)| process.tgid == *pid).map_or("", |(.., comm)| comm);
                format!("{comm} ({pid})")
            }
        };
        let mut name = links.iter().take(MOST_NAMES).map(name_of).collect::<Vec<_>>().join(", ");
        if links.len() > MOST_NAMES {
            name.push_str(", …");
        }
        groups.push(FreeGroup {
            name,
            frees: members().map(|(_, _, frees, _)| *frees as f64).sum(),
            inuse_bytes: members().map(|(process, ..)| heap.inuse_bytes_of(process)).sum(),
            links: links.into_iter().collect(),
        });
    }
    groups
}

/// Groups of sets that have an element in common, directly or through other sets: the indices of each group.
fn connected(sets: &[&BTreeSet<Served>]) -> Vec<Vec<usize>> {
    let mut group_of: BTreeMap<Served, usize> = BTreeMap::new();
    let mut groups: Vec<(Vec<usize>, BTreeSet<Served>)> = Vec::new();
    for (index, set) in sets.iter().enumerate() {
        let known: BTreeSet<usize> = set.iter().filter_map(|it| group_of.get(it)).copied().collect();
        let mut joined = (vec![index], (*set).clone());
        for group in known {
            let (members, links) = std::mem::take(&mut groups[group]);
            joined.0.extend(members);
            joined.1.extend(links);
        }
        group_of.extend(joined.1.iter().map(|it| (*it, groups.len())));
        groups.push(joined);
    }
    groups.into_iter().map(|(members, _)| members).filter(|members| !members.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_process_has_of_two_makes_them_one() {
        let set = |pids: &[u32]| pids.iter().map(|pid| Served::Process(*pid)).collect::<BTreeSet<_>>();
        let sets = [set(&[1]), set(&[2, 3]), set(&[4]), set(&[1, 4]), set(&[3])];
        let mut groups = connected(&sets.iter().collect::<Vec<_>>());
        groups.iter_mut().for_each(|group| group.sort_unstable());
        groups.sort();
        assert_eq!(groups, [vec![0, 2, 3], vec![1, 4]]);
        assert!(connected(&[]).is_empty());
    }
}

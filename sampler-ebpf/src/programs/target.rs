//! Which processes are targets.

use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::generated::bpf_get_current_ancestor_cgroup_id;
use sampler_ebpf::abi::{link_kind, target_rule};
use sampler_ebpf::glob;

use crate::config::config;
use crate::counters::count_process_event_lost;
use crate::maps::TARGETS;
use crate::memory::read_kernel;
use crate::process::current_task;

/// Whether the current task's process is a target.
#[inline(always)]
pub fn is_target(tgid: u32) -> bool {
    kind_of(tgid).is_some()
}

/// Which links count the calls of the current task's process, one of [`link_kind`]; `None` if it is not a target.
#[inline(always)]
pub fn kind_of(tgid: u32) -> Option<u32> {
    if tgid == config!(self_tgid) {
        return None;
    }
    let rules = config!(target_rules);
    // SAFETY: the value is an aligned u32, which changes as a whole. If it has just been removed, the process was a
    // target until now.
    if let Some(kind) = unsafe { TARGETS.get(tgid) } {
        return Some(match *kind {
            link_kind::OWN | link_kind::AWAITED => link_kind::OWN,
            link_kind::ANNOUNCED => link_kind::ANNOUNCED,
            _ => link_kind::SHARED,
        });
    }
    if rules & target_rule::ALL != 0 {
        return Some(link_kind::SHARED);
    }
    if rules & target_rule::CGROUP != 0 {
        let level = config!(cgroup_level) as i32;
        // SAFETY: the helper takes an integer, which it checks, and returns an integer.
        if unsafe { bpf_get_current_ancestor_cgroup_id(level) } == config!(cgroup_id) {
            return Some(link_kind::SHARED);
        }
    }
    (rules & target_rule::COMM != 0 && comm_matches()).then_some(link_kind::SHARED)
}

/// Whether the process was listed: by the daemon, by a parent's fork, or because it matched a rule.
#[inline(always)]
pub fn listed(tgid: u32) -> bool {
    TARGETS.get_ptr(tgid).is_some()
}

/// Whether children of targets become targets, unless every process is a target anyway.
#[inline(always)]
pub fn follows() -> bool {
    config!(follow) != 0 && config!(target_rules) & target_rule::ALL == 0
}

/// Lists a process that matches a name or a cgroup. It stays a target even if its name changes, and its children are
/// targets.
#[inline(always)]
pub fn list_by_rule(tgid: u32) {
    if follows() && config!(target_rules) != 0 && !listed(tgid) {
        let _ = list(tgid);
    }
}

/// From now on, links that serve every process count this process. Its own links do not see a thread other than the
/// first after an exec: they are bound to the task of the first one, which has ended by then.
#[inline(always)]
pub fn leave_own_links(tgid: u32) {
    if let Some(kind) = TARGETS.get_ptr_mut(tgid) {
        // SAFETY: the pointer is to the map's value, an aligned u32.
        unsafe { *kind = link_kind::SHARED };
    }
}

/// From now on, links that serve every process count this process, unless it has its own links or will get them. It has
/// executed another program, so it no longer announces its samples or has its parent's inline hooks. Returns whether it
/// announced its samples.
#[inline(always)]
pub fn begin_anew(tgid: u32) -> bool {
    let Some(kind) = TARGETS.get_ptr_mut(tgid) else { return false };
    // SAFETY: the pointer is to the map's value, an aligned u32.
    unsafe {
        let before = *kind;
        if before != link_kind::OWN && before != link_kind::AWAITED {
            *kind = link_kind::SHARED;
        }
        before == link_kind::ANNOUNCED
    }
}

/// Whether a process is counted by its own links, and these have been made.
#[inline(always)]
pub fn has_own_links(tgid: u32) -> bool {
    // SAFETY: the value is an aligned u32, which changes as a whole.
    unsafe { TARGETS.get(tgid) }.is_some_and(|kind| *kind == link_kind::OWN)
}

/// Whether a process announces its samples, so that its children do, too.
#[inline(always)]
pub fn announces(tgid: u32) -> bool {
    // SAFETY: the value is an aligned u32, which changes as a whole.
    unsafe { TARGETS.get(tgid) }.is_some_and(|kind| *kind == link_kind::ANNOUNCED)
}

/// Lists a process that is counted by links that serve every process. Returns `false`, and counts that, if there is no
/// space.
#[inline(always)]
pub fn list(tgid: u32) -> bool {
    list_as(tgid, link_kind::SHARED)
}

/// Lists a process that is counted by links of this kind. Returns `false`, and counts that, if there is no space.
#[inline(always)]
pub fn list_as(tgid: u32, kind: u32) -> bool {
    let has_space = TARGETS.insert(tgid, kind, u64::from(BPF_ANY)).is_ok();
    if !has_space {
        count_process_event_lost();
    }
    has_space
}

#[inline(always)]
fn comm_matches() -> bool {
    let task = current_task();
    let leader: u64 = read_kernel(task + config!(offsets.task_group_leader));
    let comm: [u8; 16] = read_kernel(leader + config!(offsets.task_comm));
    let pattern = config!(comm_pattern);
    glob::matches(&pattern, &comm)
}

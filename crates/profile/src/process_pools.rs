//! Pools of processes.

use heapbpf_audit::Hook;

use crate::estimates::{Pool, intervals_used};
use crate::model::Profile;

/// The pool of each process, with its losses. Figures of a process without a sample have an upper end from the
/// intervals in use.
pub fn pools_of_processes(profile: &Profile) -> Vec<Pool> {
    let mut pools: Vec<Pool> = (0..profile.processes.len()).map(Pool::of_process).collect();
    for row in &profile.rows {
        if let Some(pool) = pools.get_mut(row.key.process) {
            pool.add(row);
        }
    }
    let intervals = intervals_used(profile);
    for (index, (pool, process)) in pools.iter_mut().zip(&profile.processes).enumerate() {
        // Nothing is hooked in a program that allocates only on Go's heap.
        if process.hook != Some(Hook::GoRuntime) {
            pool.allow_for_others(&intervals);
        }
        pool.cover([index]);
    }
    pools
}

//! Pools of processes.

use heapbpf_audit::Hook;

use crate::estimates::{Pool, intervals_used};
use crate::model::{Profile, Row};

/// The pool of each process, with its losses. Figures of a process without a sample have an upper end from the
/// intervals in use.
pub fn pools_of_processes(profile: &Profile) -> Vec<Pool> {
    let intervals = intervals_used(profile);
    let rows = profile.rows_of_processes().into_iter().enumerate();
    let pool = |(index, rows): (usize, Vec<&Row>)| {
        let mut pool = Pool::of_process(index);
        rows.into_iter().for_each(|row| pool.add(row));
        // Nothing is hooked in a program that allocates only on Go's heap.
        if profile.processes[index].hook != Some(Hook::GoRuntime) {
            pool.allow_for_others(&intervals);
        }
        pool.cover([index]);
        pool
    };
    rows.map(pool).collect()
}

//! Where the sampled blocks in use are: in memory, swapped out, or not backed by memory yet. This is read from running
//! processes when a profile is made, a moment after its figures.

use std::ops::Range;
use std::time::Duration;

use heapbpf_host::clock::thread_cpu_time;
use heapbpf_host::in_memory;
use heapbpf_profile::model::{InMemory, Process};
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::weight::inclusion;

use super::snapshot::{Measured, SnapshotRow};

/// CPU time limit for reading it, for all processes together.
const LONGEST: Duration = Duration::from_millis(50);

/// Adds to rows where their blocks are. Rows of processes that could not be read, or for which there was no time, stay
/// without.
pub fn add(measured: &[Measured], rows: &mut [SnapshotRow], processes: &[Process]) {
    let until = thread_cpu_time() + LONGEST;
    // The share of the blocks that was checked.
    let mut is_read = vec![None; processes.len()];
    for it in measured.iter().filter(|it| !it.blocks.is_empty()) {
        let left = until.saturating_sub(thread_cpu_time());
        let ranges: Vec<Range<u64>> =
            it.blocks.iter().map(|block| block.address..block.address.saturating_add(block.size_bytes)).collect();
        let Some(found) = in_memory::of(it.key.tgid, &ranges, left) else {
            log::debug!("it was not read where the blocks of process {} are", it.key.tgid);
            continue;
        };
        for (block, found) in it.blocks.iter().zip(found) {
            let row = &mut rows[block.row];
            let Some(inclusion) = inclusion(block.trials, row.key.interval) else { continue };
            let inclusion = inclusion.thinned(it.share);
            let sums = row.in_memory.get_or_insert_default();
            let add = |sums: &mut SampleSums, bytes: u64| {
                if bytes > 0 {
                    sums.record_included(bytes, 0, &inclusion);
                }
            };
            add(&mut sums.resident, found.resident_bytes);
            add(&mut sums.swapped, found.swapped_bytes);
        }
        is_read[it.process] = Some(it.share);
    }
    let is_any_read = is_read.iter().any(Option::is_some);
    for row in rows.iter_mut().filter(|row| row.inuse.samples > 0) {
        let (process, largest) = (row.key.process, row.key.interval.max(row.inuse.largest_bytes));
        match is_read[process] {
            Some(share) if share < 1.0 => row.in_memory.get_or_insert_default().most_bytes = largest as f64 / share,
            Some(_) => _ = row.in_memory.get_or_insert_default(),
            // A process that has ended has nothing in memory.
            None if is_any_read && processes[process].ended => row.in_memory = Some(Box::new(InMemory::NONE)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use heapbpf_heap::live::LiveBlock;
    use heapbpf_profile::model::RowKey;
    use sampler_ebpf::abi::ProcessKey;

    use super::*;
    use crate::attaching::arenas::AtAttach;

    const R: u64 = 16 << 20;

    fn row(process: usize) -> SnapshotRow {
        let mut inuse = SampleSums::default();
        inuse.record(R, R, 0, R);
        let key = RowKey { process, thread: Arc::from("t"), function: Arc::from("malloc"), interval: R, stack: None };
        let none = SampleSums::default();
        SnapshotRow {
            key,
            alloc: inuse,
            inuse,
            in_memory: None,
            at_exit: none,
            peak: none,
            by_mark: Vec::new(),
            ages: None,
            growth: None,
        }
    }

    /// Half of a block is in memory in a running process (our own). For a process that is gone nothing is known, and
    /// one that ended has nothing.
    #[test]
    fn what_is_in_memory_is_weighted_like_the_blocks() {
        let mut memory: Vec<u8> = Vec::with_capacity(4 * R as usize);
        memory.extend(std::iter::repeat_n(1, 2 * R as usize));
        let address = memory.as_ptr() as u64;
        let key = |tgid| ProcessKey { start_ns: 0, tgid, exec_id: 0 };
        let block = LiveBlock { row: 0, address: address + R, size_bytes: 2 * R, trials: R };
        let measured = |process, pid, row, share| Measured {
            process,
            key: key(pid),
            blocks: vec![LiveBlock { row, ..block }],
            share,
            at_attach: AtAttach::default(),
        };
        let ended = Process { ended: true, ..Process::default() };
        let processes = [Process::default(), Process::default(), ended];
        let of = |share| {
            let mut rows: Vec<SnapshotRow> = (0..3).map(row).collect();
            let read = [measured(0, std::process::id(), 0, share), measured(1, u32::MAX, 1, share)];
            add(&read, &mut rows, &processes);
            rows
        };
        let rows = of(1.0);
        let resident = rows[0].in_memory.as_ref().expect("our own memory").resident;
        let all = inclusion(R, R).expect("trials");
        // Memory that was written to may end within a huge page.
        let bytes = resident.sampled_bytes;
        assert!(bytes.abs_diff(R) <= 2 << 20, "{bytes}");
        assert_eq!((resident.samples, resident.bytes), (1, bytes as f64 * all.weight));
        assert_eq!(resident.bytes_variance, all.estimated_variance(bytes as f64));
        assert_eq!(rows[1].in_memory, None, "nobody can tell");
        assert_eq!(rows[2].in_memory.as_deref(), Some(&InMemory::NONE));
        let half = of(0.5)[0].in_memory.as_ref().expect("our own memory").resident;
        assert!((half.bytes / resident.bytes - 2.0).abs() < 1e-12);
        assert_eq!(of(0.5)[0].in_memory.as_ref().map(|it| it.most_bytes), Some(2.0 * R as f64));
    }
}

//! Where the sampled blocks in use are: in memory, swapped out, or not backed by memory yet. This is read from running
//! processes when a profile is made, a moment after its figures. Of a mapping (`--mmap`), what is in memory or swapped
//! out is in use; the rest is only reserved.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::time::Duration;

use heapbpf_heap::live::LiveBlock;
use heapbpf_host::clock::thread_cpu_time;
use heapbpf_host::in_memory::{self, PartsOfBlock};
use heapbpf_profile::model::{InMemory, Process};
use heapbpf_profile::units;
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::weight::{Inclusion, inclusion};

use super::snapshot::{Measured, SnapshotRow};

/// CPU time limit for reading it, for all processes together. The mappings of each get at most half of what is left if
/// anything else is to be read.
const LONGEST: Duration = Duration::from_millis(50);

/// Adds to rows where their blocks are, and limits what is in use of mappings to what is somewhere. Rows of processes
/// that could not be read, or for which there was no time, stay as they are. `whole`: blocks that are no mappings are
/// looked up, too. Returns a remark if mappings stay as they are.
pub fn add(measured: &[Measured], rows: &mut [SnapshotRow], processes: &[Process], whole: bool) -> Option<String> {
    let until = thread_cpu_time() + LONGEST;
    let unread = add_mappings(measured, rows, processes, until, whole);
    if whole {
        add_blocks(measured, rows, processes, until);
    }
    let who = if unread == 1 { "1 process".to_owned() } else { format!("{} processes", units::count(unread as f64)) };
    (unread > 0).then(|| {
        format!(
            "mappings of {who} count as in use with all of their address space: which of their pages are in memory \
             could not be read"
        )
    })
}

/// A sampled mapping. Parts of it may have been unmapped.
struct Mapping {
    row: usize,
    trials: u64,
    parts: PartsOfBlock,
}

/// Does it for mappings. Returns how many processes could not be read. `whole`: blocks are looked up after them.
fn add_mappings(
    measured: &[Measured],
    rows: &mut [SnapshotRow],
    processes: &[Process],
    until: Duration,
    whole: bool,
) -> usize {
    // A process that has ended has nothing in memory.
    let mut is_known: Vec<bool> = processes.iter().map(|process| process.ended).collect();
    let mut touched: HashMap<usize, SampleSums> = HashMap::new();
    let has_mappings = |it: &Measured| it.blocks.iter().any(|block| block.mapping.is_some());
    let mut to_come = measured.iter().filter(|it| has_mappings(it)).count();
    for it in measured {
        let Some(is_known) = is_known.get_mut(it.process) else { continue };
        to_come -= usize::from(has_mappings(it));
        let left = until.saturating_sub(thread_cpu_time());
        // One process with large mappings must not use up the time of all others.
        let longest = if to_come > 0 || whole { left / 2 } else { left };
        let Some(mappings) = mappings_of(it, longest) else { continue };
        *is_known = true;
        for Mapping { row, trials, parts } in mappings {
            let Some(inclusion) = inclusion(trials, rows[row].key.interval) else { continue };
            let sums = rows[row].in_memory.get_or_insert_default();
            record(&mut sums.resident, parts.resident_bytes, &inclusion);
            record(&mut sums.swapped, parts.swapped_bytes, &inclusion);
            record(touched.entry(row).or_default(), parts.resident_bytes + parts.swapped_bytes, &inclusion);
        }
    }
    let mut unread = BTreeSet::new();
    for (number, row) in rows.iter_mut().enumerate().filter(|(_, row)| row.mapped && row.inuse.samples > 0) {
        if !is_known[row.key.process] {
            unread.insert(row.key.process);
            continue;
        }
        row.in_memory.get_or_insert_default().reserved = row.inuse;
        row.inuse = part_of(&row.inuse, &touched.get(&number).copied().unwrap_or_default());
    }
    unread.len()
}

/// Where the mappings of a process are; `None` if that could not be read within `longest`.
fn mappings_of(it: &Measured, longest: Duration) -> Option<Vec<Mapping>> {
    let pieces: Vec<(u64, &LiveBlock)> = it.blocks.iter().filter_map(|block| Some((block.mapping?, block))).collect();
    if pieces.is_empty() {
        return Some(Vec::new());
    }
    let ranges: Vec<Range<u64>> = pieces.iter().map(|(_, piece)| range_of(piece)).collect();
    let found = in_memory::of(it.key.tgid, &ranges, longest)?;
    // The pieces of a mapping are one sample.
    let mut mappings: HashMap<u64, Mapping> = HashMap::new();
    for ((sample, piece), found) in pieces.into_iter().zip(found) {
        let new = || Mapping { row: piece.row, trials: piece.trials, parts: PartsOfBlock::default() };
        let parts = &mut mappings.entry(sample).or_insert_with(new).parts;
        parts.resident_bytes += found.resident_bytes;
        parts.swapped_bytes += found.swapped_bytes;
    }
    Some(mappings.into_values().collect())
}

/// The sums of the `touched` bytes of mappings. Each mapping is still one object, of the size that was sampled.
fn part_of(mappings: &SampleSums, touched: &SampleSums) -> SampleSums {
    SampleSums {
        zero_byte_samples: mappings.samples.saturating_sub(touched.samples),
        sampled_bytes: touched.sampled_bytes,
        offset_sum: SampleSums::offset_sum_of(touched.samples, None),
        bytes: touched.bytes,
        bytes_variance: touched.bytes_variance,
        ..*mappings
    }
}

fn range_of(block: &LiveBlock) -> Range<u64> {
    block.address..block.address.saturating_add(block.size_bytes)
}

/// Adds the bytes of a block that are in one place.
fn record(sums: &mut SampleSums, bytes: u64, inclusion: &Inclusion) {
    if bytes > 0 {
        sums.record_included(bytes, 0, inclusion);
    }
}

/// Does it for the blocks of allocators.
fn add_blocks(measured: &[Measured], rows: &mut [SnapshotRow], processes: &[Process], until: Duration) {
    // The share of the blocks that was checked.
    let mut is_read = vec![None; processes.len()];
    for it in measured.iter().filter(|it| !it.blocks.is_empty()) {
        let left = until.saturating_sub(thread_cpu_time());
        let blocks: Vec<&LiveBlock> = it.blocks.iter().filter(|block| block.mapping.is_none()).collect();
        let ranges: Vec<Range<u64>> = blocks.iter().map(|block| range_of(block)).collect();
        let Some(found) = in_memory::of(it.key.tgid, &ranges, left) else {
            log::debug!("it was not read where the blocks of process {} are", it.key.tgid);
            continue;
        };
        for (block, found) in blocks.into_iter().zip(found) {
            let row = &mut rows[block.row];
            let Some(inclusion) = inclusion(block.trials, row.key.interval) else { continue };
            let inclusion = inclusion.thinned(it.share);
            let sums = row.in_memory.get_or_insert_default();
            record(&mut sums.resident, found.resident_bytes, &inclusion);
            record(&mut sums.swapped, found.swapped_bytes, &inclusion);
        }
        is_read[it.process] = Some(it.share);
    }
    let is_any_read = is_read.iter().any(Option::is_some);
    for row in rows.iter_mut().filter(|row| !row.mapped && row.inuse.samples > 0) {
        let (process, largest) = (row.key.process, row.key.interval.max(row.inuse.largest_bytes));
        match is_read[process] {
            Some(share) if share < 1.0 => row.in_memory.get_or_insert_default().most_bytes = largest as f64 / share,
            Some(_) => _ = row.in_memory.get_or_insert_default(),
            None if is_any_read && processes[process].ended => row.in_memory = Some(Box::new(InMemory::NONE)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use heapbpf_profile::model::RowKey;
    use sampler_ebpf::abi::ProcessKey;

    use super::*;
    use crate::attaching::arenas::AtAttach;

    const R: u64 = 16 << 20;

    fn row(process: usize) -> SnapshotRow {
        let mut inuse = SampleSums::default();
        inuse.record(R, R, 0, R);
        let key = RowKey { process, thread: Arc::from("t"), function: Arc::from("malloc"), interval: R, stack: None };
        SnapshotRow { key, alloc: inuse, inuse, ..SnapshotRow::default() }
    }

    /// Half of a block is in memory in a running process (our own). For a process that is gone nothing is known, and
    /// one that ended has nothing.
    #[test]
    fn what_is_in_memory_is_weighted_like_the_blocks() {
        let mut memory: Vec<u8> = Vec::with_capacity(4 * R as usize);
        memory.extend(std::iter::repeat_n(1, 2 * R as usize));
        let address = memory.as_ptr() as u64;
        let key = |tgid| ProcessKey { start_ns: 0, tgid, exec_id: 0 };
        let block = LiveBlock { row: 0, address: address + R, size_bytes: 2 * R, trials: R, mapping: None };
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
            assert_eq!(add(&read, &mut rows, &processes, true), None);
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

    /// Half of a mapping of four pieces was written to, and nothing of another one.
    #[test]
    fn of_mappings_what_was_written_to_is_in_use() {
        let mut memory: Vec<u8> = Vec::with_capacity(4 * R as usize);
        memory.extend(std::iter::repeat_n(1, 2 * R as usize));
        let address = memory.as_ptr() as u64;
        let key = |tgid| ProcessKey { start_ns: 0, tgid, exec_id: 0 };
        let piece =
            |row, sample, address, size_bytes| LiveBlock { row, address, size_bytes, trials: R, mapping: Some(sample) };
        // Nothing was written to in the second half of the memory.
        let (half, far) = (R / 2, address + 3 * R);
        let blocks = vec![
            piece(0, 7, address, half),
            piece(0, 7, address + R, half),
            piece(0, 8, far, half),
            piece(0, 7, far + half, half / 2),
            piece(0, 7, far + half + half / 2, half / 2),
        ];
        let measured = |process, pid, blocks| Measured {
            process,
            key: key(pid),
            blocks,
            share: 0.1,
            at_attach: AtAttach::default(),
        };
        let ended = Process { ended: true, ..Process::default() };
        let processes = [Process::default(), Process::default(), ended];
        let mut rows: Vec<SnapshotRow> = (0..3).map(|process| SnapshotRow { mapped: true, ..row(process) }).collect();
        rows[0].inuse.record(R, R, 0, R);
        let whole = rows[0].inuse;
        let read = [measured(0, std::process::id(), blocks), measured(1, u32::MAX, vec![piece(1, 9, address, R)])];
        let remark = add(&read, &mut rows, &processes, false).expect("one process is unknown");
        assert!(remark.starts_with("mappings of 1 process count"), "{remark}");
        let weight = inclusion(R, R).expect("trials");
        let (inuse, in_memory) = (rows[0].inuse, rows[0].in_memory.as_deref().expect("our own memory"));
        assert_eq!((inuse.samples, inuse.zero_byte_samples, inuse.sampled_bytes), (2, 1, R));
        assert_eq!((inuse.bytes, inuse.objects), (R as f64 * weight.weight, whole.objects));
        assert_eq!(inuse.bytes_variance, weight.estimated_variance(R as f64), "its pieces are one sample");
        assert_eq!((inuse.unskipped(), in_memory.reserved), (None, whole));
        assert_eq!((in_memory.resident.sampled_bytes, in_memory.resident.samples), (R, 1));
        assert_eq!((rows[1].in_memory.as_ref(), rows[1].inuse.sampled_bytes), (None, R), "nobody can tell");
        let gone = rows[2].in_memory.as_deref().expect("it has ended");
        assert_eq!((rows[2].inuse.bytes, rows[2].inuse.objects > 0.0, gone.reserved.sampled_bytes), (0.0, true, R));
    }
}

//! The recorder: decodes records from the rings, finds their stacks and adds them to the heap. This is the hot path of
//! the daemon.

mod stacks;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use heapbpf_heap::event::{Event, decode, decode_crash};
use heapbpf_heap::live::Heap;
use heapbpf_heap::sample::{Sample, SampleKey};
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::AddressSpace;
use heapbpf_host::{Host, HostError};
use heapbpf_kernel::rings::Ring;
use heapbpf_probes::{ANNOUNCED, ANNOUNCED_MMAP, BRK, MMAP, MREMAP};
use heapbpf_profile::model::{ByAddress, LossBound};
use heapbpf_symbols::runtime_functions::{RuntimeFunctions, number_of};
use heapbpf_unwind::dwarf::Unwinder;
use heapbpf_unwind::raw::{RawStack, Reason};
use sampler_ebpf::abi::{AllocationRecord, CrashRecord, LiveKey, LiveValue, ProcessKey, mapping, stack_kind};

pub use self::stacks::AllocatorCode;
use super::announced::AnnouncedIntervals;
use super::counters::DaemonCounters;
use super::java::Javas;
use super::join::{Join, MOST_WAITING};
use super::outer_stacks::OuterStacks;
use super::python::Pythons;
use super::stack_limits::StackLimits;

/// Longest time spent on the rings before other work gets its turn.
pub const LONGEST_DRAIN_NS: u64 = 20_000_000;
/// The same while targets wait for their records to be taken in.
pub const LONGEST_DRAIN_IF_AWAITED_NS: u64 = 2_000_000;
/// Number of records between two reads of the clock.
const LOOK_AT_CLOCK_EVERY: u32 = 256;

/// Limit on cached thread names. A target can make any number. A full cache is cleared and filled again.
const MOST_THREAD_NAMES: usize = 1 << 16;

/// Number of records for which memory is kept when idle.
const RECORDS_CAPACITY: usize = 1024;

/// Takes records in and adds them to the heap.
pub struct Recorder {
    /// The heap so far.
    pub heap: Heap,
    /// The daemon's own counters.
    pub counters: DaemonCounters,
    /// Processes seen in samples, with the time of their first sample (CLOCK_MONOTONIC).
    pub processes: HashMap<ProcessKey, u64>,
    /// How much is copied of stacks whose top is unknown.
    pub stack_limits: StackLimits,
    /// What is copied of the outer frames of stacks.
    pub outer_stacks: OuterStacks,
    /// The intervals of samples that processes announce.
    pub announced: AnnouncedIntervals,
    /// Functions of language runtimes.
    names: Arc<RuntimeFunctions>,
    /// Python frames.
    pub pythons: Pythons,
    /// Java frames.
    pub javas: Javas,
    /// The code of allocators, if the stacks of mappings tell who made them.
    pub allocators: Option<AllocatorCode>,
    /// By process, the sampled mappings of which they do not tell it.
    undecided: HashMap<ProcessKey, LossBound>,
    unwinder: Unwinder,
    /// Addresses of the stack with an ID that the kernel walked by frame pointers, innermost first; empty if there is
    /// none.
    traces: Box<dyn Fn(i32) -> Vec<u64>>,
    max_depth: usize,
    functions: Vec<u16>,
    thread_names: HashMap<[u8; 16], Arc<str>>,
    /// Records on their way to the heap.
    pub join: Join,
    /// Number of records of frees of tracked samples taken in.
    frees: u64,
    /// Stacks that were not copied, by address space, caller, `stack_kind`, which gives the reason, and the ID of the
    /// kernel's walk.
    without_copies: HashMap<(ProcessKey, u64, u32, i32), Arc<RawStack>>,
    /// Empty address space, for processes that are unknown.
    nowhere: AddressSpace,
    /// Whether the last drain left records in the rings.
    pub behind: bool,
    /// Processes that died of a fault, until they are taken.
    pub crashes: Vec<CrashRecord>,
    /// Bytes of the longest stack copy since that was last taken.
    pub longest_copy_bytes: u64,
    /// Processes that were seen to run JIT code.
    jit_processes: HashSet<ProcessKey>,
    /// Those that have not been taken yet, with the time of that sample.
    pub new_jit_processes: Vec<(ProcessKey, u64)>,
    /// The last error while following the host, until it is taken.
    pub host_error: Option<HostError>,
    /// Process generations with a first sample, in them or in their address space, and the time of that sample, until
    /// they are taken. The owner of another process's address space is listed each time.
    pub new_lives: Vec<(ProcessKey, u64)>,
}

impl Recorder {
    /// Creates a recorder that adds to `heap`, which must be empty. `traces`: the addresses of a stack that the kernel
    /// walked, by its ID; `max_depth`: the maximum number of frames of such stacks.
    pub fn new(
        unwinder: Unwinder,
        traces: impl Fn(i32) -> Vec<u64> + 'static,
        max_depth: usize,
        heap: Heap,
        names: Arc<RuntimeFunctions>,
    ) -> Self {
        Self {
            heap,
            counters: DaemonCounters::default(),
            processes: HashMap::new(),
            stack_limits: StackLimits::default(),
            outer_stacks: OuterStacks::default(),
            announced: AnnouncedIntervals::default(),
            pythons: Pythons::new(Arc::clone(&names)),
            javas: Javas::new(Arc::clone(&names)),
            names,
            allocators: None,
            undecided: HashMap::new(),
            unwinder,
            traces: Box::new(traces),
            max_depth,
            functions: Vec::new(),
            thread_names: HashMap::new(),
            join: Join::default(),
            frees: 0,
            without_copies: HashMap::new(),
            nowhere: AddressSpace::default(),
            behind: false,
            crashes: Vec::new(),
            longest_copy_bytes: 0,
            jit_processes: HashSet::new(),
            new_jit_processes: Vec::new(),
            host_error: None,
            new_lives: Vec::new(),
        }
    }

    /// Sets the function of each probe site, as a row of the table of allocators, by the site's index.
    pub fn set_functions(&mut self, functions: &[u16]) {
        self.functions.clear();
        self.functions.extend_from_slice(functions);
    }

    /// Takes in records from the rings until `until_ns` (CLOCK_MONOTONIC). Adds events of processes to `processes`, for
    /// the session to act on. Returns the number of records.
    pub fn drain(
        &mut self,
        events: &mut Ring,
        stacks: &mut Ring,
        host: &mut Host,
        processes: &mut Vec<Event>,
        until_ns: u64,
    ) -> usize {
        let mut records = 0;
        loop {
            // The events ring first, and all of it: its small records must never be lost because the ring is full.
            records += self.read_events(events);
            let copies = self.drain_stacks(stacks, host);
            let in_time = self.work_off(copies == 0, until_ns, host, processes);
            records += copies;
            // If samples arrive faster than they are processed, this loop must still end.
            self.behind = !in_time || copies > 0 && monotonic_ns() > until_ns;
            if copies == 0 || self.behind {
                return records;
            }
        }
    }

    /// Frees space in the events ring: reads the records reserved so far, to be taken in later. Returns the number of
    /// records.
    pub fn read_events(&mut self, events: &mut Ring) -> usize {
        let before = self.join.queue.len();
        if before >= MOST_WAITING {
            return 0;
        }
        // The time is read before the position, so every record with a time up to it was reserved before that position.
        let position = self.join.queue.read_up_to(|| (monotonic_ns(), events.reserved_up_to()));
        let Self { join, crashes, .. } = self;
        let mut take = |record: Bytes| match decode_crash(&record) {
            // A crash does not wait for its turn.
            Some(crash) => crashes.push(crash),
            None => join.queue.push(record),
        };
        while events.read_up_to() < position && events.drain(&mut take) > 0 {}
        self.join.queue.has_read_up_to(events.read_up_to());
        self.join.queue.len() - before
    }

    /// Number of records of allocations and frees taken in.
    pub fn records_taken_in(&self) -> u64 {
        self.counters.allocations_taken_in + self.frees
    }

    /// Interns a stack: equal stacks share one allocation.
    pub fn intern(&mut self, stack: RawStack) -> Arc<RawStack> {
        self.unwinder.stacks.intern(stack)
    }

    /// Sampled allocations that wait behind the cut, with a time up to `until_ns`: their number and bytes, by process.
    pub fn allocations_beyond_cut(&self, until_ns: u64) -> HashMap<ProcessKey, LossBound> {
        let mut found: HashMap<ProcessKey, LossBound> = HashMap::new();
        for (_, record) in self.join.queue.beyond().filter(|(time_ns, _)| *time_ns <= until_ns) {
            if let Some(Event::Allocation(record)) = decode(record) {
                let block = LossBound { samples: 1, sampled_bytes: record.size_bytes };
                found.entry(record.process).or_default().add(&block);
            }
        }
        found
    }

    /// A sample for a block in the kernel's live map whose record was lost. Its stack is unknown, and of its process
    /// only the address space is known.
    pub fn without_record(&mut self, key: LiveKey, value: &LiveValue, stack: &Arc<RawStack>) -> Sample {
        let function = self.function_at(value.site);
        let drawn = (u64::from(value.interval), value.trials);
        let (interval, trials) = self.drawn(key.space, function, value.size_bytes, drawn);
        Sample {
            id: value.sample,
            key: SampleKey {
                process: key.space,
                thread: "".into(),
                function,
                interval,
                stack: ByAddress(Arc::clone(stack)),
            },
            space: key.space,
            time_ns: value.time_ns,
            address: key.address,
            size_bytes: value.size_bytes,
            trials,
            offset: u64::from(value.offset),
            tracked: true,
            mapped: false,
        }
    }

    /// Takes in records in order, up to the first whose stack may still arrive. `drained`: whether the stacks ring has
    /// handed out all that it can for now. Returns whether it finished before `until_ns`.
    fn work_off(&mut self, drained: bool, until_ns: u64, host: &mut Host, processes: &mut Vec<Event>) -> bool {
        let mut worked: u32 = 0;
        while self.join.queue.front().is_some() {
            worked = worked.wrapping_add(1);
            if worked.is_multiple_of(LOOK_AT_CLOCK_EVERY) && monotonic_ns() > until_ns {
                return false;
            }
            let Some((event, stack)) = self.join.next(drained, monotonic_ns) else { break };
            match event {
                Some(Event::Allocation(record)) => {
                    self.counters.allocations_taken_in += 1;
                    self.allocate(&record, stack, host);
                }
                Some(Event::Free(record)) => {
                    self.frees += 1;
                    self.heap.free(record.space, record.sample, record.time_ns, record.temporary != 0);
                }
                Some(Event::Unmap(record)) => {
                    self.heap.unmap(record.space, record.start, record.end, record.time_ns);
                }
                Some(event) => processes.push(event),
                None => self.counters.records_unknown += 1,
            }
        }
        true
    }

    fn allocate(&mut self, record: &AllocationRecord, arrived: Option<Arc<RawStack>>, host: &mut Host) {
        self.note_process(record.process, record.time_ns);
        if record.space != record.process {
            self.new_lives.push((record.space, record.time_ns));
        }
        let stack = arrived.unwrap_or_else(|| {
            let reason = match record.stack_kind {
                stack_kind::FRAME_POINTERS => None,
                stack_kind::COPIED => Some(Reason::CopyMissing),
                stack_kind::LOST_NO_SPACE => Some(Reason::StackRingFull),
                stack_kind::LOST_TABLE_FULL => Some(Reason::StackTableFull),
                _ => Some(Reason::NoStack),
            };
            self.counters.stacks_missing += u64::from(record.stack_kind == stack_kind::COPIED);
            self.without_copy(record, reason, host)
        });
        let thread = self.thread_name(&record.thread_name);
        let function = match record.site {
            mapping::MMAP => MMAP,
            mapping::MREMAP => MREMAP,
            mapping::BRK => BRK,
            site => self.function_at(site),
        };
        if matches!(function, MMAP | MREMAP | BRK) && self.leaves_out(record, &stack, host) {
            return;
        }
        let drawn = (record.interval, record.trials);
        let (interval, trials) = self.drawn(record.process, function, record.size_bytes, drawn);
        self.heap.allocate(Sample {
            id: record.sample,
            key: SampleKey { process: record.process, thread, function, interval, stack: ByAddress(stack) },
            space: record.space,
            time_ns: record.time_ns,
            address: record.address,
            size_bytes: record.size_bytes,
            trials,
            offset: record.offset,
            tracked: record.untracked == 0,
            mapped: matches!(function, MMAP | MREMAP | BRK | ANNOUNCED_MMAP),
        });
    }

    /// Interval and trials of a sample, from the kernel side's figures for both. The kernel side's trials of an
    /// announced sample are the bytes that it stands for; its own trials are its size.
    fn drawn(&mut self, process: ProcessKey, function: u16, size_bytes: u64, drawn: (u64, u64)) -> (u64, u64) {
        if function != ANNOUNCED {
            return drawn;
        }
        (self.announced.interval(process, size_bytes, drawn.1), size_bytes.max(1))
    }

    fn function_at(&self, site: u32) -> u16 {
        self.functions.get(site as usize).copied().unwrap_or(u16::MAX)
    }

    fn runs_jit_code(&mut self, process: ProcessKey, time_ns: u64) {
        if self.jit_processes.insert(process) {
            self.new_jit_processes.push((process, time_ns));
        }
    }

    /// Notes a sample of a process.
    pub fn note_process(&mut self, process: ProcessKey, time_ns: u64) {
        if let Entry::Vacant(new) = self.processes.entry(process) {
            new.insert(time_ns);
            self.new_lives.push((process, time_ns));
        }
    }

    /// Updates `host` with all process events so far. Addresses of a process whose /proc files cannot be read resolve
    /// to nothing.
    pub fn poll(&mut self, host: &mut Host) {
        loop {
            match host.poll() {
                Ok(polled) => {
                    self.counters.host_events_lost += polled.lost;
                    if !polled.more {
                        return;
                    }
                }
                Err(error) => {
                    self.host_error = Some(error);
                    return;
                }
            }
        }
    }

    fn thread_name(&mut self, name: &[u8; 16]) -> Arc<str> {
        if self.thread_names.len() >= MOST_THREAD_NAMES {
            self.thread_names.clear();
        }
        Arc::clone(self.thread_names.entry(*name).or_insert_with(|| {
            let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
            String::from_utf8_lossy(&name[..end]).into()
        }))
    }

    /// Drops cached stacks and unwinding state of exited processes.
    pub fn forget_stacks(&mut self, ended: &HashSet<ProcessKey>) {
        if ended.is_empty() {
            return;
        }
        self.jit_processes.retain(|process| !ended.contains(process));
        self.without_copies.retain(|(process, ..), _| !ended.contains(process));
        self.unwinder.stacks.forget(ended);
        self.stack_limits.forget(ended);
        self.outer_stacks.forget(ended);
        self.pythons.forget(ended);
        self.javas.forget(ended);
    }

    /// Releases memory taken up by a burst of records.
    pub fn shrink(&mut self) {
        self.join.shrink_to(RECORDS_CAPACITY);
        self.without_copies.shrink_to_fit();
        self.unwinder.stacks.sweep();
        self.forget_functions();
    }

    /// Forgets functions of language runtimes that are on no stack, and that no process has which is still known.
    fn forget_functions(&mut self) {
        if self.names.are_many() {
            let on_stacks = self.unwinder.stacks.interned().flat_map(|stack| stack.frames.iter()).filter_map(number_of);
            let needed: HashSet<u32> =
                on_stacks.chain(self.pythons.functions()).chain(self.javas.functions()).collect();
            self.names.keep_only(&needed);
        }
    }

    /// Drops unwind sections that were not used since the last call.
    pub fn drop_unused(&mut self) {
        self.unwinder.drop_unused();
    }

    /// Drops exited processes.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        self.processes.retain(|process, _| !ended.contains(process));
        self.undecided.retain(|process, _| !ended.contains(process));
        self.announced.forget(ended);
        self.heap.forget_processes(ended);
    }

    /// The daemon's counters, including those of the unwinder.
    pub fn daemon_counters(&self) -> DaemonCounters {
        let unwinding = self.unwinder.statistics();
        // Stacks that arrived ahead of their records are not in use yet.
        let used = unwinding.stacks.saturating_sub(self.join.stacks_ahead() as u64);
        DaemonCounters {
            stacks_unwound: used,
            stacks_repeated: unwinding.repeated.min(used),
            stacks_complete: unwinding.complete.min(used),
            stacks_merged: self.heap.merged_rows(),
            ..self.counters
        }
    }
}

#[cfg(test)]
#[path = "recorder_tests.rs"]
mod tests;

//! From records of the rings to the heap: decode, find the stack, add to the sums. The hot path of the daemon.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sampler_ebpf::abi::{AllocationRecord, LiveKey, LiveValue, ProcessKey, mapping, stack_kind};

use super::accounting::DaemonCounters;
use super::queue::RecordQueue;
use crate::attach::table::{BRK, MMAP, MREMAP};
use crate::heap::event::{Event, decode, decode_stack};
use crate::heap::live::{Afterwards, Heap, LostBlocks, Sample};
use crate::host::Host;
use crate::host::events::monotonic_ns;
use crate::host::mappings::AddressSpace;
use crate::kernel::rings::Ring;
use crate::kernel::stack_traces::StackTraces;
use crate::unwind::dwarf::{Capture, Unwinder};
use crate::unwind::frame_pointer;
use crate::unwind::raw::{AtTime, RawStack};

/// Records that are read ahead of their turn, and stacks that wait for theirs. What is more stays in the rings, where it may
/// be lost: what waits has to be worked off before a moment is known.
const MOST_WAITING: usize = 1 << 18;

/// Longest time spent on the rings before other things get their turn, and records between two looks at the clock.
const LONGEST_DRAIN_NS: u64 = 20_000_000;
const LOOK_AT_CLOCK_EVERY: u32 = 256;

/// Thread names, and stacks that were not walked by us, that are kept: a target can make any number of either. Beyond it
/// they are forgotten and found again.
const MOST_THREAD_NAMES: usize = 1 << 16;
const MOST_STACKS: usize = 1 << 16;

/// Records that there is room for while nothing much happens.
const ROOM_FOR_RECORDS: usize = 1024;

/// A stack that has not arrived so long after its sample never will.
const LONGEST_WAIT_NS: u64 = 1_000_000_000;

/// What happened to processes, for the session to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// A target forked.
    Forked {
        /// The parent.
        parent: ProcessKey,
        /// The child's process id.
        child: u32,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
    },
    /// A process replaced its program.
    Replaced {
        /// The life that ended.
        ended: ProcessKey,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
    },
    /// A process ended.
    Ended {
        /// Which.
        process: ProcessKey,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
    },
}

/// Turns records into sums.
pub struct Recorder {
    /// The heap so far.
    pub heap: Heap,
    /// What the daemon counts.
    pub counters: DaemonCounters,
    /// Processes seen in samples, with the time of their first.
    pub processes: HashMap<ProcessKey, u64>,
    unwinder: Unwinder,
    traces: StackTraces,
    max_depth: usize,
    functions: Vec<u16>,
    thread_names: HashMap<[u8; 16], Arc<str>>,
    queue: RecordQueue,
    /// Allocations whose records were taken in.
    allocations: u64,
    /// Frees of tracked samples whose records were taken in.
    frees: u64,
    arrived: HashMap<u64, Arc<RawStack>>,
    walked: HashMap<(ProcessKey, i32, u64), Arc<RawStack>>,
    callers: HashMap<(ProcessKey, u64), Arc<RawStack>>,
    /// The address space of a process that nothing is known of.
    nowhere: AddressSpace,
    behind: bool,
    /// Processes that run code of their own making.
    code_makers: HashSet<ProcessKey>,
    new_code_makers: Vec<(ProcessKey, u64)>,
}

impl Recorder {
    /// Adds to `heap`, which is empty.
    pub fn new(unwinder: Unwinder, traces: StackTraces, max_depth: usize, heap: Heap) -> Self {
        Self {
            heap,
            counters: DaemonCounters::default(),
            processes: HashMap::new(),
            unwinder,
            traces,
            max_depth,
            functions: Vec::new(),
            thread_names: HashMap::new(),
            queue: RecordQueue::default(),
            allocations: 0,
            frees: 0,
            arrived: HashMap::new(),
            walked: HashMap::new(),
            callers: HashMap::new(),
            nowhere: AddressSpace::default(),
            behind: false,
            code_makers: HashSet::new(),
            new_code_makers: Vec::new(),
        }
    }

    /// Tells which function (row of the table of allocators) each probe site is in, by the site's index.
    pub fn set_functions(&mut self, functions: &[u16]) {
        self.functions.clear();
        self.functions.extend_from_slice(functions);
    }

    /// Takes what is in the rings, for as long as [`LONGEST_DRAIN_NS`], and until `latest_ns` (CLOCK_MONOTONIC) if that comes
    /// first. Returns the number of records.
    pub fn drain(
        &mut self,
        events: &mut Ring,
        stacks: &mut Ring,
        host: &mut Host,
        lives: &mut Vec<Life>,
        latest_ns: u64,
    ) -> usize {
        let mut records = 0;
        let until_ns = (monotonic_ns() + LONGEST_DRAIN_NS).min(latest_ns);
        loop {
            // Small records first and all of them: they must never be lost for want of room.
            records += self.read_events(events);
            let copies = self.drain_stacks(stacks, host);
            let in_time = self.work_off(copies == 0, until_ns, host, lives);
            records += copies;
            // A host that samples faster than we work must not keep us here for ever.
            self.behind = !in_time || copies > 0 && monotonic_ns() > until_ns;
            if copies == 0 || self.behind {
                return records;
            }
        }
    }

    /// Makes room in the events ring: what has been reserved by now is read, and taken in later. Returns the number of
    /// records.
    pub fn read_events(&mut self, events: &mut Ring) -> usize {
        let before = self.queue.len();
        if before >= MOST_WAITING {
            return 0;
        }
        // The time first: what has a time up to it was reserved before the position was read.
        let position = self.queue.read_up_to(|| (monotonic_ns(), events.reserved_up_to()));
        while events.read_up_to() < position && events.drain(|record| self.queue.push(record)) > 0 {}
        self.queue.has_read_up_to(events.read_up_to());
        self.queue.len() - before
    }

    /// From here on, what happened after that time (CLOCK_MONOTONIC, not in the future) waits.
    pub fn cut_at(&mut self, time_ns: u64) {
        self.queue.cut_at(time_ns);
    }

    /// Whether everything up to the cut has been taken in, and nothing after it.
    pub fn is_at_cut(&self) -> bool {
        self.queue.is_at_cut()
    }

    /// The cut has been made.
    pub fn end_cut(&mut self) {
        self.queue.end_cut();
    }

    /// Everything up to this time (CLOCK_MONOTONIC) has been taken in.
    pub fn taken_in_up_to_ns(&self) -> u64 {
        self.queue.handed_out_up_to_ns()
    }

    /// Records of allocations and frees that were taken in.
    pub fn records_taken_in(&self) -> u64 {
        self.allocations + self.frees
    }

    /// The stack that stands for all that are equal to it.
    pub fn intern(&mut self, stack: RawStack) -> Arc<RawStack> {
        self.unwinder.intern(stack)
    }

    /// Sampled allocations that were read and wait behind the cut, of those with a time up to `until_ns`: number and bytes
    /// by process.
    pub fn allocations_beyond_cut(&self, until_ns: u64) -> HashMap<ProcessKey, LostBlocks> {
        let mut found: HashMap<ProcessKey, LostBlocks> = HashMap::new();
        for (_, record) in self.queue.beyond().filter(|(time_ns, _)| *time_ns <= until_ns) {
            if let Some(Event::Allocation(record)) = decode(record) {
                let blocks = found.entry(record.process).or_default();
                blocks.samples += 1;
                blocks.bytes = blocks.bytes.saturating_add(record.size_bytes);
            }
        }
        found
    }

    /// Frees and sampled allocations that were read and wait behind the cut.
    pub fn beyond_cut(&self) -> Afterwards {
        let mut afterwards = Afterwards::default();
        for (_, record) in self.queue.beyond() {
            match decode(record) {
                Some(Event::Free(record)) => afterwards.freed.push(record),
                Some(Event::Allocation(record)) => drop(afterwards.allocated.insert(record.sample)),
                _ => {}
            }
        }
        afterwards
    }

    /// A block that the kernel's live map tells of, as a sample whose stack is not known. Whose it is, is known of its
    /// address space alone.
    pub fn without_record(&self, key: LiveKey, value: &LiveValue, stack: &Arc<RawStack>) -> Sample {
        Sample {
            id: value.sample,
            process: key.space,
            space: key.space,
            time_ns: value.time_ns,
            address: key.address,
            size_bytes: value.size_bytes,
            trials: value.trials,
            offset: u64::from(value.offset),
            interval: u64::from(value.interval),
            thread: "".into(),
            function: self.function_at(value.site),
            stack: Arc::clone(stack),
            tracked: true,
            mapped: false,
        }
    }

    /// Unwinds one slab's worth of stack copies.
    fn drain_stacks(&mut self, stacks: &mut Ring, host: &mut Host) -> usize {
        let mut copies = Vec::new();
        let count = stacks.drain(|record| copies.push(record));
        if count > 0 {
            // What was mapped before these stacks were taken is known after this.
            self.poll(host);
        }
        for copy in copies {
            let Some((head, bytes)) = decode_stack(&copy) else {
                self.counters.records_unknown += 1;
                continue;
            };
            let capture = Capture { registers: &head.registers, stack: bytes, awaited: &head.awaited };
            let (lives, modules) = host.split();
            let space = lives.at(head.space.tgid, head.time_ns).map_or(&self.nowhere, |life| &life.space);
            let at = AtTime::new(space, head.time_ns);
            let stack = self.unwinder.unwind(modules, &at.view(head.space), capture);
            if !self.unwinder.was_repeated() && stack.has_own_code(modules) {
                self.makes_code(head.space, head.time_ns);
            }
            // Each has a small record, but one that came too late has been done without: those would stay.
            if self.arrived.len() >= MOST_WAITING {
                self.arrived.clear();
            }
            self.arrived.insert(head.sample, stack);
        }
        count
    }

    /// Works on records in order, up to the first whose stack is still to come: the stacks ring hands nothing out
    /// past a record that another CPU is still writing. `drained`: it has handed out all that it can for now. Returns
    /// whether that was done by `until_ns`.
    fn work_off(&mut self, drained: bool, until_ns: u64, host: &mut Host, lives: &mut Vec<Life>) -> bool {
        let mut worked: u32 = 0;
        while let Some((_, record)) = self.queue.front() {
            worked = worked.wrapping_add(1);
            if worked.is_multiple_of(LOOK_AT_CLOCK_EVERY) && monotonic_ns() > until_ns {
                return false;
            }
            match decode(record) {
                Some(Event::Allocation(record)) => {
                    let arrived = self.arrived.remove(&record.sample);
                    let awaited = arrived.is_none() && record.stack_kind == stack_kind::COPIED;
                    if awaited && !(drained && monotonic_ns().saturating_sub(record.time_ns) > LONGEST_WAIT_NS) {
                        return true;
                    }
                    self.allocations += 1;
                    self.allocate(&record, arrived, host);
                }
                Some(Event::Free(record)) => {
                    self.frees += 1;
                    self.heap.free(record.space, record.sample, record.time_ns, record.temporary != 0);
                }
                Some(Event::Unmap(record)) => {
                    self.heap.unmap(record.space, record.start, record.end, record.time_ns);
                }
                Some(Event::Fork(record)) => lives.push(Life::Forked {
                    parent: record.process,
                    child: record.child_tgid,
                    time_ns: record.time_ns,
                }),
                Some(Event::Exec(record)) => {
                    lives.push(Life::Replaced { ended: record.process, time_ns: record.time_ns });
                }
                Some(Event::Exit(record)) => {
                    lives.push(Life::Ended { process: record.process, time_ns: record.time_ns })
                }
                None => self.counters.records_unknown += 1,
            }
            self.queue.pop_front();
        }
        true
    }

    fn allocate(&mut self, record: &AllocationRecord, arrived: Option<Arc<RawStack>>, host: &mut Host) {
        self.processes.entry(record.process).or_insert(record.time_ns);
        let stack = match (record.stack_kind, arrived) {
            (_, Some(stack)) => stack,
            (stack_kind::FRAME_POINTERS, None) => self.walked(record, host),
            (stack_kind::COPIED, None) => {
                self.counters.stacks_missing += 1;
                self.caller(record, host)
            }
            _ => self.caller(record, host),
        };
        let thread = self.thread_name(&record.thread_name);
        self.heap.allocate(Sample {
            id: record.sample,
            process: record.process,
            space: record.space,
            time_ns: record.time_ns,
            address: record.address,
            size_bytes: record.size_bytes,
            trials: record.trials,
            offset: record.offset,
            interval: record.interval,
            thread,
            function: match record.site {
                mapping::MMAP => MMAP,
                mapping::MREMAP => MREMAP,
                mapping::BRK => BRK,
                site => self.function_at(site),
            },
            stack,
            tracked: record.untracked == 0,
            mapped: matches!(record.site, mapping::MMAP | mapping::MREMAP | mapping::BRK),
        });
    }

    fn function_at(&self, site: u32) -> u16 {
        self.functions.get(site as usize).copied().unwrap_or(u16::MAX)
    }

    /// The stack of the kernel's own walk, resolved once for each (address space, id, caller).
    fn walked(&mut self, record: &AllocationRecord, host: &mut Host) -> Arc<RawStack> {
        let key = (record.space, record.stack_id, record.caller);
        if let Some(stack) = self.walked.get(&key) {
            return Arc::clone(stack);
        }
        let addresses = self.traces.read(record.stack_id);
        self.poll(host);
        let at = self.at_time(record, host);
        let stack = frame_pointer::from_kernel(&at.view(record.space), record.caller, &addresses, self.max_depth);
        let stack = self.unwinder.intern(stack);
        if stack.has_own_code(host.modules()) {
            self.makes_code(record.space, record.time_ns);
        }
        bounded(&mut self.walked).insert(key, Arc::clone(&stack));
        stack
    }

    fn makes_code(&mut self, process: ProcessKey, time_ns: u64) {
        if self.code_makers.insert(process) {
            self.new_code_makers.push((process, time_ns));
        }
    }

    /// Processes that were seen to run code of their own making, with the time, since the last call.
    pub fn take_code_makers(&mut self) -> Vec<(ProcessKey, u64)> {
        std::mem::take(&mut self.new_code_makers)
    }

    /// A stack of the caller alone.
    fn caller(&mut self, record: &AllocationRecord, host: &mut Host) -> Arc<RawStack> {
        let key = (record.space, record.caller);
        if let Some(stack) = self.callers.get(&key) {
            return Arc::clone(stack);
        }
        self.poll(host);
        let stack = RawStack::caller_only(&self.at_time(record, host).view(record.space), record.caller);
        let stack = self.unwinder.intern(stack);
        bounded(&mut self.callers).insert(key, Arc::clone(&stack));
        stack
    }

    /// The address space of a record at its time.
    fn at_time<'a>(&'a self, record: &AllocationRecord, host: &'a Host) -> AtTime<'a> {
        let life = host.lives().at(record.space.tgid, record.time_ns);
        AtTime::new(life.map_or(&self.nowhere, |life| &life.space), record.time_ns)
    }

    /// Learns what happened to processes up to now. A process whose /proc cannot be read resolves to nothing.
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
                    log::warn!("{error}");
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

    /// Whether the last drain left something in the rings.
    pub const fn is_behind(&self) -> bool {
        self.behind
    }

    /// Drops what was kept to find the next stacks of processes that have ended.
    pub fn forget_places(&mut self, ended: &HashSet<ProcessKey>) {
        if ended.is_empty() {
            return;
        }
        self.code_makers.retain(|process| !ended.contains(process));
        self.walked.retain(|(process, ..), _| !ended.contains(process));
        self.callers.retain(|(process, _), _| !ended.contains(process));
        self.unwinder.forget(ended);
    }

    /// Gives back the room that a storm of records took.
    pub fn shrink(&mut self) {
        self.queue.shrink_to(ROOM_FOR_RECORDS);
        self.arrived.shrink_to(ROOM_FOR_RECORDS);
        self.walked.shrink_to_fit();
        self.callers.shrink_to_fit();
        self.unwinder.sweep();
    }

    /// Drops processes that have ended.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        self.processes.retain(|process, _| !ended.contains(process));
        self.heap.forget_left(ended);
    }

    /// The daemon's counters, those of unwinding included.
    pub fn daemon_counters(&self) -> DaemonCounters {
        let unwinding = self.unwinder.statistics();
        // Some are ahead of their samples.
        let used = unwinding.stacks.saturating_sub(self.arrived.len() as u64);
        DaemonCounters {
            stacks_unwound: used,
            stacks_repeated: unwinding.repeated.min(used),
            stacks_complete: unwinding.complete.min(used),
            stacks_put_together: self.heap.merged_rows(),
            ..self.counters
        }
    }
}

/// Room for one more.
fn bounded<K, V>(stacks: &mut HashMap<K, V>) -> &mut HashMap<K, V> {
    if stacks.len() >= MOST_STACKS {
        stacks.clear();
    }
    stacks
}

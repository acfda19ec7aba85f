//! Processes over time: every process generation, from fork or exec to exec or exit, with its address space. Pure,
//! except that the module table opens files.

use std::collections::HashMap;
use std::sync::Arc;

use super::mappings::{AddressSpace, Inserted, Mapping, ModuleId};
use super::modules::{ModuleKind, ModuleTable};
use super::process::ProcessInfo;
use super::record::{HostEvent, MapEvent};
use super::replaced_text::replaces_text;

/// Capacity that the list of changes keeps when it is empty.
const CHANGES_CAPACITY: usize = 1024;

/// Identifies one process generation. It is the counterpart of the kernel's [`sampler_ebpf::abi::ProcessKey`]. Never
/// reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GenerationId {
    /// Process id.
    pub pid: u32,
    /// Unique among all process generations.
    number: u64,
}

/// One process generation: from a fork or exec to the next exec or the exit.
#[derive(Clone, Debug, Default)]
pub struct Generation {
    /// Its id.
    pub id: GenerationId,
    /// CLOCK_MONOTONIC when it began. 0 if it predates the recording.
    pub since_ns: u64,
    /// CLOCK_MONOTONIC when it ended.
    pub until_ns: Option<u64>,
    /// What is known of the process. If it ended before [`Host::describe`](super::Host::describe) could read /proc,
    /// this is what it inherited from its parent, updated by events.
    pub info: Arc<ProcessInfo>,
    /// Executable mappings.
    pub space: AddressSpace,
    /// Whether `info` was read from /proc during this generation.
    pub(super) described: bool,
    /// Whether the executable has not been mapped yet.
    exe_pending: bool,
    /// CLOCK_MONOTONIC of the last read of /proc. Older events are already reflected in it.
    known_at_ns: u64,
    threads: u32,
    leader_ended: bool,
    sampled: bool,
}

/// A change that a user of the host may have to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostChange {
    /// A process was forked or found in /proc.
    Started(GenerationId),
    /// A process replaced its program (exec): the first generation ended, the second began.
    Replaced(GenerationId, GenerationId),
    /// A process ended.
    Ended(GenerationId),
    /// A process mapped a file, or was found in /proc with the file mapped. Not reported for mappings that a fork
    /// inherits.
    Mapped {
        /// The process generation.
        generation: GenerationId,
        /// The file.
        module: ModuleId,
        /// Whether no process had mapped it before.
        first: bool,
    },
}

/// All known process generations by PID, in order of time.
#[derive(Debug, Default)]
pub struct Processes {
    by_pid: HashMap<u32, Vec<Generation>>,
    next_number: u64,
    changes: Vec<HostChange>,
}

impl Processes {
    /// The generation of process `pid` at `time_ns`. A generation that has ended is still returned until the next one
    /// begins.
    #[must_use]
    pub fn at(&self, pid: u32, time_ns: u64) -> Option<&Generation> {
        self.by_pid.get(&pid)?.iter().rev().find(|generation| generation.since_ns <= time_ns)
    }

    /// The generation that ended with the exec whose completion was reported at `time_ns`. The kernel's event for the
    /// exec comes slightly earlier, so the next generation has already begun by then.
    #[must_use]
    pub fn replaced_at(&self, pid: u32, time_ns: u64) -> Option<&Generation> {
        let next = self.at(pid, time_ns)?;
        let before_ns = next.since_ns.saturating_sub(1);
        // If that event was lost, there is only one generation.
        self.at(pid, before_ns).or(Some(next))
    }

    /// The generation with this id, if it is still kept.
    #[must_use]
    pub fn get(&self, id: GenerationId) -> Option<&Generation> {
        self.by_pid.get(&id.pid)?.iter().find(|generation| generation.id == id)
    }

    /// The running generation of process `pid`.
    #[must_use]
    pub fn current(&self, pid: u32) -> Option<&Generation> {
        self.by_pid.get(&pid)?.last().filter(|generation| generation.until_ns.is_none())
    }

    /// All generations that are kept, including ended ones.
    pub fn iter(&self) -> impl Iterator<Item = &Generation> {
        self.by_pid.values().flatten()
    }

    /// Moves the changes since the last call to `out`.
    pub fn drain_changes(&mut self, out: &mut Vec<HostChange>) {
        out.append(&mut self.changes);
    }

    /// Notes that a generation has samples. Its mappings are then needed after its end.
    pub fn note_sampled(&mut self, id: GenerationId) {
        if let Some(generation) = self.get_mut(id) {
            generation.sampled = true;
        }
    }

    /// Forgets generations that ended before `before_ns`, or before `sampled_before_ns` if they have samples. All
    /// samples up to these times must have been resolved. Returns the number of generations forgotten.
    pub fn expire(&mut self, before_ns: u64, sampled_before_ns: u64) -> usize {
        let before = |generation: &Generation| if generation.sampled { sampled_before_ns } else { before_ns };
        let mut expired = 0;
        self.by_pid.retain(|_, generations| {
            let known = generations.len();
            generations.retain(|generation| generation.until_ns.is_none_or(|until| until >= before(generation)));
            expired += known - generations.len();
            !generations.is_empty()
        });
        if self.by_pid.capacity() > 4 * self.by_pid.len() + 1024 {
            self.by_pid.shrink_to_fit();
        }
        self.changes.shrink_to(CHANGES_CAPACITY);
        expired
    }

    /// Applies an event. `suspended_ns` is how far CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC.
    pub fn apply(&mut self, event: &HostEvent, suspended_ns: u64, modules: &mut ModuleTable) {
        match event {
            HostEvent::Fork { time_ns, pid, parent_pid, .. } if pid == parent_pid => {
                if let Some(generation) = self.current_before(*pid, *time_ns) {
                    generation.threads += 1;
                }
            }
            HostEvent::Fork { time_ns, pid, parent_pid, .. } => {
                self.fork(*pid, *parent_pid, *time_ns, time_ns + suspended_ns);
            }
            HostEvent::Comm { time_ns, pid, comm, exec: true, .. } => {
                self.exec(*pid, comm_text(comm), *time_ns, modules);
            }
            HostEvent::Comm { time_ns, pid, tid, comm, .. } if pid == tid => {
                if let Some(generation) = self.current_before(*pid, *time_ns) {
                    Arc::make_mut(&mut generation.info).comm = comm_text(comm).into();
                }
            }
            HostEvent::Exit { time_ns, pid, tid } => self.exit(*pid, *tid, *time_ns),
            HostEvent::Map(map) => self.map(map, modules),
            HostEvent::Comm { .. } | HostEvent::Lost { .. } => {}
        }
    }

    /// Updates a process from /proc. `info` and `maps` were read after `time_ns`; the process began at `since_ns`.
    pub fn found(
        &mut self,
        info: ProcessInfo,
        maps: &[MapEvent],
        since_ns: u64,
        time_ns: u64,
        modules: &mut ModuleTable,
    ) {
        let pid = info.pid;
        let same_process = |generation: &Generation| starts_agree(generation.info.start_ns, info.start_ns);
        let known = self.current(pid).filter(|generation| same_process(generation));
        // A lost exec event shows only as a different executable.
        let replaced = known.is_some_and(|generation| generation.described && generation.info.exe != info.exe);
        match known {
            Some(_) if replaced => self.exec(pid, &info.comm, time_ns, modules),
            Some(_) => {}
            None => {
                self.end(pid, time_ns);
                self.begin(pid, since_ns, info.clone());
            }
        }
        let Some(generation) = self.by_pid.get_mut(&pid).and_then(|generations| generations.last_mut()) else {
            return;
        };
        generation.known_at_ns = generation.known_at_ns.max(time_ns);
        if generation.info.start_ns == 0 {
            // So far only a mapping event of it was known.
            generation.since_ns = generation.since_ns.min(since_ns);
        }
        generation.threads = info.threads.max(1);
        (generation.described, generation.exe_pending, generation.leader_ended) = (true, false, false);
        generation.info = Arc::new(info);
        let id = generation.id;
        let mut mappings = Vec::with_capacity(maps.len());
        for map in maps {
            let (module, first) = modules.intern(map, false);
            let mapping = mapping_of(map, module, modules);
            let kept = generation.space.current();
            let at = kept.partition_point(|known| known.end <= mapping.start);
            if !kept.get(at).is_some_and(|known| known.module == module && known.contains(mapping.start)) {
                self.changes.push(HostChange::Mapped { generation: id, module, first });
            }
            mappings.push(Mapping { since_ns: 0, ..mapping });
        }
        generation.space.replace_all(mappings, time_ns, &|module| modules.kind_of_mappings(module));
    }

    /// Whether mappings of a file are missing in process `pid` because it has too many.
    pub(super) fn lacks(&self, pid: u32, module: ModuleId) -> bool {
        self.current(pid).is_some_and(|generation| generation.space.files_only().binary_search(&module).is_ok())
    }

    /// Adds the mappings of a file with an allocator that process `pid` lacks. `maps` were read from /proc.
    pub(super) fn keep(&mut self, pid: u32, module: ModuleId, maps: &[MapEvent], modules: &mut ModuleTable) {
        let Some(generation) = self.current_mut(pid) else { return };
        // They may have existed since its beginning.
        let since_ns = generation.since_ns;
        let of_file: Vec<&MapEvent> = maps.iter().filter(|map| modules.intern(map, false).0 == module).collect();
        let mappings = of_file.into_iter().map(|map| Mapping { since_ns, ..mapping_of(map, module, modules) });
        generation.space.keep(module, mappings, &|module| modules.kind_of_mappings(module));
    }

    /// Ends the running generation of process `pid`, if there is one.
    pub fn end(&mut self, pid: u32, time_ns: u64) {
        if let Some(generation) = self.current_mut(pid) {
            generation.until_ns = Some(time_ns);
            let id = generation.id;
            self.changes.push(HostChange::Ended(id));
        }
    }

    /// Replaces what is known of a generation with what was just read from /proc.
    pub(super) fn describe(&mut self, id: GenerationId, info: ProcessInfo) {
        if let Some(generation) =
            self.get_mut(id).filter(|generation| starts_agree(generation.info.start_ns, info.start_ns))
        {
            generation.info = Arc::new(info);
            generation.described = true;
        }
    }

    /// Processes whose main thread has exited while other threads still run, as far as the events show.
    pub(super) fn headless(&self) -> Vec<u32> {
        let headless = self.iter().filter(|generation| generation.leader_ended && generation.until_ns.is_none());
        headless.map(|generation| generation.id.pid).collect()
    }

    fn fork(&mut self, pid: u32, parent_pid: u32, time_ns: u64, start_ns: u64) {
        if self.current(pid).is_some_and(|generation| time_ns <= generation.known_at_ns) {
            return;
        }
        self.end(pid, time_ns);
        let parent = self.at(parent_pid, time_ns);
        let inherited = parent.map(|parent| (parent.info.clone(), parent.space.clone()));
        let (info, space) = inherited.unwrap_or_default();
        let info = ProcessInfo { pid, namespace_pid: None, parent_pid, start_ns, threads: 1, ..(*info).clone() };
        let generation = self.begin(pid, time_ns, info);
        generation.space = space;
    }

    fn exec(&mut self, pid: u32, comm: &str, time_ns: u64, modules: &ModuleTable) {
        let (mut old, mut info) = (None, ProcessInfo { pid, ..ProcessInfo::default() });
        // The mappings of the new program may be reported before the exec, by the ring of another CPU.
        let mut ahead: Vec<Mapping> = Vec::new();
        if let Some(generation) = self.current_mut(pid) {
            if time_ns <= generation.known_at_ns {
                return;
            }
            generation.until_ns = Some(time_ns);
            (old, info) = (Some(generation.id), (*generation.info).clone());
            ahead.extend(generation.space.current().iter().filter(|mapping| mapping.since_ns > time_ns));
        }
        ahead.sort_unstable_by_key(|mapping| mapping.since_ns);
        let is_file = |mapping: &Mapping| modules.get(mapping.module).filter(|it| it.kind == ModuleKind::File);
        let program = ahead.iter().find_map(is_file);
        if let Some(program) = program {
            info.exe = program.path.clone();
        }
        (info.comm, info.threads, info.exe_deleted) = (comm.into(), 1, program.is_some_and(|it| it.deleted));
        let generation = self.begin(pid, time_ns, info);
        generation.exe_pending = program.is_none();
        for mapping in &ahead {
            generation.space.insert(*mapping, &|module| modules.kind_of_mappings(module));
        }
        let new = generation.id;
        if let (Some(old), Some(last)) = (old, self.changes.last_mut()) {
            *last = HostChange::Replaced(old, new);
            for change in &mut self.changes {
                if let HostChange::Mapped { generation, module, .. } = change
                    && *generation == old
                    && ahead.iter().any(|mapping| mapping.module == *module)
                {
                    *generation = new;
                }
            }
        }
    }

    fn exit(&mut self, pid: u32, tid: u32, time_ns: u64) {
        let Some(generation) = self.current_before(pid, time_ns) else { return };
        generation.threads = generation.threads.saturating_sub(1);
        generation.leader_ended |= tid == pid;
        if generation.threads == 0 {
            self.end(pid, time_ns);
        }
    }

    fn map(&mut self, map: &MapEvent, modules: &mut ModuleTable) {
        if self.current(map.pid).is_none() {
            // The fork event was lost.
            self.begin(map.pid, map.time_ns, ProcessInfo { pid: map.pid, ..ProcessInfo::default() });
        } else if self.current_before(map.pid, map.time_ns).is_none() {
            return;
        }
        if replaces_text(map) && self.current(map.pid).is_some_and(|known| has_files_at(&known.space, map, modules)) {
            // It is the same code as before.
            return;
        }
        let (module, first) = modules.intern(map, true);
        let mapping = modules.only_code(mapping_of(map, module, modules));
        let Some(generation) = self.current_mut(map.pid) else { return };
        let inserted = generation.space.insert(mapping, &|module| modules.kind_of_mappings(module));
        // A library that is unloaded and loaded again at the same place has lost what was written into its pages.
        let is_known_allocator = inserted == Inserted::Known && modules.has_allocator(module);
        if !matches!(inserted, Inserted::New | Inserted::FileOnly) && !is_known_allocator {
            return;
        }
        let id = generation.id;
        if let Some(program) =
            modules.get(module).filter(|module| generation.exe_pending && module.kind == ModuleKind::File)
        {
            generation.exe_pending = false;
            let info = Arc::make_mut(&mut generation.info);
            (info.exe, info.exe_deleted) = (program.path.clone(), program.deleted);
        }
        self.changes.push(HostChange::Mapped { generation: id, module, first });
    }

    fn begin(&mut self, pid: u32, since_ns: u64, info: ProcessInfo) -> &mut Generation {
        self.next_number += 1;
        let id = GenerationId { pid, number: self.next_number };
        self.changes.push(HostChange::Started(id));
        // Most short-lived processes have two generations: before and after an exec.
        let generations = self.by_pid.entry(pid).or_insert_with(|| Vec::with_capacity(2));
        let threads = info.threads.max(1);
        generations.push(Generation { id, since_ns, threads, info: Arc::new(info), ..Generation::default() });
        let last = generations.len() - 1;
        &mut generations[last]
    }

    fn get_mut(&mut self, id: GenerationId) -> Option<&mut Generation> {
        self.by_pid.get_mut(&id.pid)?.iter_mut().find(|generation| generation.id == id)
    }

    fn current_mut(&mut self, pid: u32) -> Option<&mut Generation> {
        self.by_pid.get_mut(&pid)?.last_mut().filter(|generation| generation.until_ns.is_none())
    }

    /// The running generation of process `pid`, unless an event at `time_ns` is already reflected in what was read from
    /// /proc.
    fn current_before(&mut self, pid: u32, time_ns: u64) -> Option<&mut Generation> {
        self.current_mut(pid).filter(|generation| time_ns > generation.known_at_ns)
    }
}

/// Whether two start times (from an event, or rounded by /proc; 0 is unknown) can belong to the same process. A PID is
/// not reused within a second, because the kernel hands PIDs out in sequence.
#[must_use]
pub fn starts_agree(one_ns: u64, other_ns: u64) -> bool {
    one_ns == 0 || other_ns == 0 || one_ns.abs_diff(other_ns) < 1_000_000_000
}

/// Whether files are mapped at all addresses of `map`.
fn has_files_at(space: &AddressSpace, map: &MapEvent, modules: &ModuleTable) -> bool {
    let end = map.address.saturating_add(map.length);
    let first = space.current().partition_point(|mapping| mapping.end <= map.address);
    let is_file = |mapping: &&Mapping| modules.get(mapping.module).is_some_and(|it| it.kind == ModuleKind::File);
    let reached = space.current()[first..].iter().take_while(is_file).try_fold(map.address, |reached, mapping| {
        if mapping.start <= reached && reached < end { Ok(mapping.end) } else { Err(reached) }
    });
    reached.unwrap_or_else(|reached| reached) >= end
}

fn mapping_of(map: &MapEvent, module: ModuleId, modules: &ModuleTable) -> Mapping {
    let anonymous = modules.get(module).is_some_and(|module| module.kind == ModuleKind::Anonymous);
    // Anonymous memory has no meaningful file offset. With the address in its place, parts of one region agree.
    let file_offset = if anonymous { map.address } else { map.file_offset };
    let end = map.address.saturating_add(map.length);
    Mapping { start: map.address, end, file_offset, module, since_ns: map.time_ns }
}

fn comm_text(comm: &[u8; 16]) -> &str {
    let end = comm.iter().position(|byte| *byte == 0).unwrap_or(comm.len());
    // A name need not be UTF-8. It is cut at the first invalid byte, because replacement characters would make it
    // longer.
    let valid = comm[..end].utf8_chunks().next().map_or("", |chunk| chunk.valid());
    if valid.is_empty() && end > 0 { "?" } else { valid }
}

#[cfg(test)]
mod tests;

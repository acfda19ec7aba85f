//! Processes over time: each life (from fork or exec to exec or exit) with its address space. Pure, but for the
//! files that the module table opens.

use std::collections::HashMap;
use std::sync::Arc;

use super::mappings::{AddressSpace, Inserted, Mapping, ModuleId};
use super::modules::{ModuleKind, ModuleTable};
use super::process::ProcessInfo;
use super::record::{HostEvent, MapEvent};

/// Changes that there is room for while nothing much happens.
const ROOM_FOR_CHANGES: usize = 1024;

/// One life of a process: what [`sampler_ebpf::abi::ProcessKey`] names in the kernel. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LifeId {
    /// Process id.
    pub pid: u32,
    /// Unique number.
    number: u64,
}

/// A process between fork or exec and exec or exit.
#[derive(Clone, Debug)]
pub struct Life {
    /// Its id.
    pub id: LifeId,
    /// CLOCK_MONOTONIC when it began; 0 if it was there before the recording.
    pub since_ns: u64,
    /// CLOCK_MONOTONIC when it ended.
    pub until_ns: Option<u64>,
    /// What is known of the process; for one that ended before it was asked for, what it inherited and events told.
    pub info: Arc<ProcessInfo>,
    /// Executable mappings.
    pub space: AddressSpace,
    /// Whether `info` was read from /proc in this life.
    pub(super) described: bool,
    /// The program has not been mapped yet.
    exe_pending: bool,
    /// Events up to then are contained in what was read from /proc.
    known_at_ns: u64,
    threads: u32,
    leader_ended: bool,
    sampled: bool,
}

/// Something that a user of the host may have to act upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostChange {
    /// A process is there: forked, or found in /proc.
    Started(LifeId),
    /// A process runs another program: the first life ended, the second began.
    Replaced(LifeId, LifeId),
    /// A process ended.
    Ended(LifeId),
    /// A process mapped a file (also: found in /proc with it). Not reported for what a fork inherits.
    Mapped {
        /// Where.
        life: LifeId,
        /// What.
        module: ModuleId,
        /// Whether no process had it before.
        first: bool,
    },
}

/// All lives that are known, by process id, in order of time.
#[derive(Debug, Default)]
pub struct Lives {
    by_pid: HashMap<u32, Vec<Life>>,
    next_number: u64,
    changes: Vec<HostChange>,
}

impl Lives {
    /// The life that process `pid` had at `time_ns`. One that has just ended still answers until the next begins.
    #[must_use]
    pub fn at(&self, pid: u32, time_ns: u64) -> Option<&Life> {
        self.by_pid.get(&pid)?.iter().rev().find(|life| life.since_ns <= time_ns)
    }

    /// The life that ended in the exec whose end was reported at `time_ns`: by then the next one has begun, as an exec's
    /// event comes a little before.
    #[must_use]
    pub fn replaced_at(&self, pid: u32, time_ns: u64) -> Option<&Life> {
        let next = self.at(pid, time_ns)?;
        let before_ns = next.since_ns.saturating_sub(1);
        // Without that event there is one life only.
        self.at(pid, before_ns).or(Some(next))
    }

    /// A life.
    #[must_use]
    pub fn get(&self, id: LifeId) -> Option<&Life> {
        self.by_pid.get(&id.pid)?.iter().find(|life| life.id == id)
    }

    /// The life that process `pid` has now.
    #[must_use]
    pub fn current(&self, pid: u32) -> Option<&Life> {
        self.by_pid.get(&pid)?.last().filter(|life| life.until_ns.is_none())
    }

    /// Every life that is kept, also ended ones.
    pub fn iter(&self) -> impl Iterator<Item = &Life> {
        self.by_pid.values().flatten()
    }

    /// Number of lives kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_pid.values().map(Vec::len).sum()
    }

    /// Whether none are kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_pid.is_empty()
    }

    /// Moves what has changed since the last call to `out`.
    pub fn drain_changes(&mut self, out: &mut Vec<HostChange>) {
        out.append(&mut self.changes);
    }

    /// There are samples of a life: its mappings are still of use after its end.
    pub fn note_sampled(&mut self, id: LifeId) {
        if let Some(life) = self.get_mut(id) {
            life.sampled = true;
        }
    }

    /// Forgets lives that ended before `before_ns`, those with samples if they ended before `sampled_before_ns`: call it
    /// with times up to which every sample has been resolved. Returns how many there were.
    pub fn expire(&mut self, before_ns: u64, sampled_before_ns: u64) -> usize {
        let before = |life: &Life| if life.sampled { sampled_before_ns } else { before_ns };
        let mut expired = 0;
        self.by_pid.retain(|_, lives| {
            let known = lives.len();
            lives.retain(|life| life.until_ns.is_none_or(|until| until >= before(life)));
            expired += known - lives.len();
            !lives.is_empty()
        });
        if self.by_pid.capacity() > 4 * self.by_pid.len() + 1024 {
            self.by_pid.shrink_to_fit();
        }
        self.changes.shrink_to(ROOM_FOR_CHANGES);
        expired
    }

    /// Applies an event. `suspended_ns` is how far CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC.
    pub fn apply(&mut self, event: &HostEvent, suspended_ns: u64, modules: &mut ModuleTable) {
        match event {
            HostEvent::Fork { time_ns, pid, parent_pid, .. } if pid == parent_pid => {
                if let Some(life) = self.current_before(*pid, *time_ns) {
                    life.threads += 1;
                }
            }
            HostEvent::Fork { time_ns, pid, parent_pid, .. } => {
                self.fork(*pid, *parent_pid, *time_ns, time_ns + suspended_ns);
            }
            HostEvent::Comm { time_ns, pid, comm, exec: true, .. } => {
                self.exec(*pid, comm_text(comm), *time_ns, modules);
            }
            HostEvent::Comm { time_ns, pid, tid, comm, .. } if pid == tid => {
                if let Some(life) = self.current_before(*pid, *time_ns) {
                    Arc::make_mut(&mut life.info).comm = comm_text(comm).into();
                }
            }
            HostEvent::Exit { time_ns, pid, tid } => self.exit(*pid, *tid, *time_ns),
            HostEvent::Map(map) => self.map(map, modules),
            HostEvent::Comm { .. } | HostEvent::Lost { .. } => {}
        }
    }

    /// Takes in what /proc says about a process: `info` and `maps`, read after `time_ns`; it began at `since_ns`.
    pub fn found(
        &mut self,
        info: ProcessInfo,
        maps: &[MapEvent],
        since_ns: u64,
        time_ns: u64,
        modules: &mut ModuleTable,
    ) {
        let pid = info.pid;
        let same_process = |life: &Life| starts_agree(life.info.start_ns, info.start_ns);
        let known = self.current(pid).filter(|life| same_process(life));
        // An exec that we did not hear of shows in the executable alone.
        let replaced = known.is_some_and(|life| life.described && life.info.exe != info.exe);
        match known {
            Some(_) if replaced => self.exec(pid, &info.comm, time_ns, modules),
            Some(_) => {}
            None => {
                self.end(pid, time_ns);
                self.begin(pid, since_ns, info.clone());
            }
        }
        let Some(life) = self.by_pid.get_mut(&pid).and_then(|lives| lives.last_mut()) else { return };
        life.known_at_ns = life.known_at_ns.max(time_ns);
        if life.info.start_ns == 0 {
            // It was known from a mapping alone.
            life.since_ns = life.since_ns.min(since_ns);
        }
        life.threads = info.threads.max(1);
        (life.described, life.exe_pending, life.leader_ended) = (true, false, false);
        life.info = Arc::new(info);
        let id = life.id;
        let mut mappings = Vec::with_capacity(maps.len());
        for map in maps {
            let (module, first) = modules.intern(map, false);
            let mapping = mapping_of(map, module, modules);
            let kept = life.space.current();
            let at = kept.partition_point(|known| known.end <= mapping.start);
            if !kept.get(at).is_some_and(|known| known.module == module && known.contains(mapping.start)) {
                self.changes.push(HostChange::Mapped { life: id, module, first });
            }
            mappings.push(Mapping { since_ns: 0, ..mapping });
        }
        life.space.replace_all(mappings, time_ns);
    }

    /// Ends the life that process `pid` has, if any.
    pub fn end(&mut self, pid: u32, time_ns: u64) {
        if let Some(life) = self.current_mut(pid) {
            life.until_ns = Some(time_ns);
            let id = life.id;
            self.changes.push(HostChange::Ended(id));
        }
    }

    /// Replaces what is known of a life by what was just read from /proc.
    pub(super) fn describe(&mut self, id: LifeId, info: ProcessInfo) {
        if let Some(life) = self.get_mut(id).filter(|life| starts_agree(life.info.start_ns, info.start_ns)) {
            life.info = Arc::new(info);
            life.described = true;
        }
    }

    /// Processes whose first thread has ended while others had not, as far as we know.
    pub(super) fn headless(&self) -> Vec<u32> {
        let headless = self.iter().filter(|life| life.leader_ended && life.until_ns.is_none());
        headless.map(|life| life.id.pid).collect()
    }

    fn fork(&mut self, pid: u32, parent_pid: u32, time_ns: u64, start_ns: u64) {
        if self.current(pid).is_some_and(|life| time_ns <= life.known_at_ns) {
            return;
        }
        self.end(pid, time_ns);
        let parent = self.at(parent_pid, time_ns);
        let inherited = parent.map(|parent| (parent.info.clone(), parent.space.clone()));
        let (info, space) = inherited.unwrap_or_default();
        let info = ProcessInfo { pid, namespace_pid: None, parent_pid, start_ns, threads: 1, ..(*info).clone() };
        let life = self.begin(pid, time_ns, info);
        life.space = space;
    }

    fn exec(&mut self, pid: u32, comm: &str, time_ns: u64, modules: &ModuleTable) {
        let (mut old, mut info) = (None, ProcessInfo { pid, ..ProcessInfo::default() });
        // What it maps may be heard of first, from another processor.
        let mut ahead: Vec<Mapping> = Vec::new();
        if let Some(life) = self.current_mut(pid) {
            if time_ns <= life.known_at_ns {
                return;
            }
            life.until_ns = Some(time_ns);
            (old, info) = (Some(life.id), (*life.info).clone());
            ahead.extend(life.space.current().iter().filter(|mapping| mapping.since_ns > time_ns));
        }
        ahead.sort_unstable_by_key(|mapping| mapping.since_ns);
        let is_file = |mapping: &Mapping| modules.get(mapping.module).filter(|it| it.kind == ModuleKind::File);
        let program = ahead.iter().find_map(is_file);
        if let Some(program) = program {
            info.exe = program.path.clone();
        }
        (info.comm, info.threads, info.exe_deleted) = (comm.into(), 1, program.is_some_and(|it| it.deleted));
        let life = self.begin(pid, time_ns, info);
        life.exe_pending = program.is_none();
        for mapping in &ahead {
            life.space.insert(*mapping);
        }
        let new = life.id;
        if let (Some(old), Some(last)) = (old, self.changes.last_mut()) {
            *last = HostChange::Replaced(old, new);
            for change in &mut self.changes {
                if let HostChange::Mapped { life, module, .. } = change
                    && *life == old
                    && ahead.iter().any(|mapping| mapping.module == *module)
                {
                    *life = new;
                }
            }
        }
    }

    fn exit(&mut self, pid: u32, tid: u32, time_ns: u64) {
        let Some(life) = self.current_before(pid, time_ns) else { return };
        life.threads = life.threads.saturating_sub(1);
        life.leader_ended |= tid == pid;
        if life.threads == 0 {
            self.end(pid, time_ns);
        }
    }

    fn map(&mut self, map: &MapEvent, modules: &mut ModuleTable) {
        if self.current(map.pid).is_none() {
            // Its fork was lost.
            self.begin(map.pid, map.time_ns, ProcessInfo { pid: map.pid, ..ProcessInfo::default() });
        } else if self.current_before(map.pid, map.time_ns).is_none() {
            return;
        }
        let (module, first) = modules.intern(map, true);
        let mapping = mapping_of(map, module, modules);
        let Some(life) = self.current_mut(map.pid) else { return };
        if life.space.insert(mapping) != Inserted::New {
            return;
        }
        let id = life.id;
        if let Some(program) = modules.get(module).filter(|module| life.exe_pending && module.kind == ModuleKind::File)
        {
            life.exe_pending = false;
            let info = Arc::make_mut(&mut life.info);
            (info.exe, info.exe_deleted) = (program.path.clone(), program.deleted);
        }
        self.changes.push(HostChange::Mapped { life: id, module, first });
    }

    fn begin(&mut self, pid: u32, since_ns: u64, info: ProcessInfo) -> &mut Life {
        self.next_number += 1;
        let id = LifeId { pid, number: self.next_number };
        self.changes.push(HostChange::Started(id));
        // Most processes that come and go have two lives: up to an exec, and after it.
        let lives = self.by_pid.entry(pid).or_insert_with(|| Vec::with_capacity(2));
        lives.push(Life {
            id,
            since_ns,
            until_ns: None,
            space: AddressSpace::default(),
            described: false,
            exe_pending: false,
            known_at_ns: 0,
            threads: info.threads.max(1),
            leader_ended: false,
            sampled: false,
            info: Arc::new(info),
        });
        let last = lives.len() - 1;
        &mut lives[last]
    }

    fn get_mut(&mut self, id: LifeId) -> Option<&mut Life> {
        self.by_pid.get_mut(&id.pid)?.iter_mut().find(|life| life.id == id)
    }

    fn current_mut(&mut self, pid: u32) -> Option<&mut Life> {
        self.by_pid.get_mut(&pid)?.last_mut().filter(|life| life.until_ns.is_none())
    }

    /// The life that process `pid` has now, if an event of `time_ns` is news to it.
    fn current_before(&mut self, pid: u32, time_ns: u64) -> Option<&mut Life> {
        self.current_mut(pid).filter(|life| time_ns > life.known_at_ns)
    }
}

/// Whether two start times (of an event, or rounded by /proc; 0 is unknown) can be of one process. A process id is not
/// used again within a second: the kernel hands them out in turn.
fn starts_agree(one_ns: u64, other_ns: u64) -> bool {
    one_ns == 0 || other_ns == 0 || one_ns.abs_diff(other_ns) < 1_000_000_000
}

fn mapping_of(map: &MapEvent, module: ModuleId, modules: &ModuleTable) -> Mapping {
    let anonymous = modules.get(module).is_some_and(|module| module.kind == ModuleKind::Anonymous);
    // Without a file the offset says nothing; the address makes parts of one region agree.
    let file_offset = if anonymous { map.address } else { map.file_offset };
    let end = map.address.saturating_add(map.length);
    Mapping { start: map.address, end, file_offset, module, since_ns: map.time_ns }
}

fn comm_text(comm: &[u8; 16]) -> &str {
    let end = comm.iter().position(|byte| *byte == 0).unwrap_or(comm.len());
    // Names need not be UTF-8; what is not is cut off rather than made longer than the kernel's.
    let valid = comm[..end].utf8_chunks().next().map_or("", |chunk| chunk.valid());
    if valid.is_empty() && end > 0 { "?" } else { valid }
}

#[cfg(test)]
#[path = "lives_tests.rs"]
mod tests;

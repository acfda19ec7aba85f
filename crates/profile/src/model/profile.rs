//! A profile: its header, processes, rows, modules and accounting.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use super::header::Header;
use super::process::Process;
use super::row::Row;
use super::stack::{Frame, Module, SharedFrames, Stack};

/// The result of a recording: a heap profile.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Facts about the recording as a whole.
    pub header: Header,
    /// Processes with at least one hit, and other processes that were counted.
    pub processes: Vec<Process>,
    /// Further targets in which nothing was counted: idle ones, and those without a known allocator. They have no rows,
    /// and no figures except those of their memory.
    pub idle: Vec<Process>,
    /// One row per process, thread, allocator function, stack and sampling interval.
    pub rows: Vec<Row>,
    /// Modules that frames refer to.
    pub modules: Vec<Module>,
    /// Counters of the recording by name, in display order.
    pub counters: BTreeMap<String, u64>,
    /// Notes that must accompany the figures: losses, coverage, changes of the sampling interval.
    pub notes: Vec<String>,
}

impl Profile {
    /// A profile without processes and rows.
    pub const fn new(header: Header) -> Self {
        Self {
            header,
            processes: Vec::new(),
            idle: Vec::new(),
            rows: Vec::new(),
            modules: Vec::new(),
            counters: BTreeMap::new(),
            notes: Vec::new(),
        }
    }

    /// The rows of each process.
    pub fn rows_of_processes(&self) -> Vec<Vec<&Row>> {
        let mut rows: Vec<Vec<&Row>> = vec![Vec::new(); self.processes.len()];
        for row in &self.rows {
            if let Some(of_process) = rows.get_mut(row.key.process) {
                of_process.push(row);
            }
        }
        rows
    }

    /// The module of a frame, if it is known.
    pub fn module_of(&self, frame: &Frame) -> Option<&Module> {
        self.modules.get(frame.module?)
    }

    /// The targets: those that were counted, and idle ones that have not ended.
    pub fn targets(&self) -> impl Iterator<Item = &Process> {
        self.processes.iter().chain(self.idle.iter().filter(|process| !process.ended))
    }

    /// Number of targets, whether they were counted or not; if all were idle and have ended, of these.
    pub fn number_of_targets(&self) -> u64 {
        let number: u64 = self.targets().map(Process::count).sum();
        if number > 0 { number } else { self.idle.len() as u64 }
    }

    /// Number of processes that were counted; merged processes count individually.
    pub fn number_of_processes(&self) -> u64 {
        self.processes.iter().map(Process::count).sum()
    }

    /// Whether figures of allocation have intervals.
    pub const fn errors_known(&self) -> bool {
        self.header.samples_known && !self.header.time_windows
    }

    /// Whether the memory in use of a process (by its index) is known.
    pub fn knows_inuse(&self, process: usize) -> bool {
        self.header.live && !self.processes.get(process).is_some_and(|process| process.inuse_unknown)
    }

    /// Whether the growth of a process (by its index) is known. It is not if its frees were not tracked all the time.
    pub fn knows_growth(&self, process: usize) -> bool {
        let is_late = self.processes.get(process).is_some_and(|process| process.inuse_since.is_some());
        self.header.growth_over.is_some() && self.knows_inuse(process) && !is_late
    }

    /// Whether the memory in use of any process is known.
    pub fn knows_some_inuse(&self) -> bool {
        self.header.live && (self.processes.is_empty() || self.processes.iter().any(|process| !process.inuse_unknown))
    }

    /// Number of processes that figures in use leave out because their memory in use is unknown.
    pub fn without_inuse(&self) -> usize {
        let unknown = self.processes.iter().filter(|process| self.header.live && process.inuse_unknown);
        unknown.map(|process| process.count() as usize).sum()
    }

    /// Number of processes whose figures in use cover only blocks since some point in the recording, and the latest of
    /// these points; `None` if there are no such processes.
    pub fn inuse_since(&self) -> Option<(u64, SystemTime)> {
        let late = self.processes.iter().filter(|process| self.header.live && !process.inuse_unknown);
        let late = late.filter_map(|process| Some((process.count(), process.inuse_since?)));
        late.reduce(|(number, last), (more, since)| (number + more, last.max(since)))
    }

    /// Whether the location of any blocks in use is known. Mappings do not matter: all that is in use of them is in
    /// memory or swapped out.
    pub fn knows_in_memory(&self) -> bool {
        self.rows.iter().any(|row| row.in_memory.is_some() && row.inuse.samples > 0 && !row.is_of_mappings())
    }

    /// Whether a process (by its index) may have held memory at exit that is separate from what is in use.
    pub fn may_hold_at_exit(&self, process: usize) -> bool {
        self.header.ended_apart && self.processes.get(process).is_some_and(|process| process.ended)
    }

    /// Whether an ended process is known to have held memory at exit that is separate from what is in use.
    pub fn has_at_exit(&self) -> bool {
        self.header.live && self.rows.iter().any(|row| row.at_exit.objects != 0.0)
    }

    /// The profile without its processes and rows.
    #[must_use]
    pub fn without_processes(&self) -> Self {
        Self {
            modules: self.modules.clone(),
            counters: self.counters.clone(),
            notes: self.notes.clone(),
            ..Self::new(self.header.clone())
        }
    }

    /// The part of the profile that concerns one process (by its index).
    pub fn only_process(&self, process: usize) -> Self {
        let rows = self.rows.iter().filter(|row| row.key.process == process);
        Self {
            header: Header { live: self.knows_inuse(process), ..self.header.clone() },
            processes: self.processes.get(process).cloned().into_iter().collect(),
            rows: rows.map(|row| row.clone().with_process(0)).collect(),
            ..self.without_processes()
        }
    }

    /// The profile without modules that none of its frames refers to. Their paths belong to programs that the profile
    /// says nothing about.
    #[must_use]
    pub fn without_unused_modules(mut self) -> Self {
        let used: BTreeSet<usize> =
            self.rows.iter().flat_map(|row| &row.key.stack.frames).filter_map(|f| f.module).collect();
        let index_of: HashMap<usize, usize> = used.iter().enumerate().map(|(new, old)| (*old, new)).collect();
        // Rows share stacks.
        let mut moved: HashMap<*const Stack, Arc<Stack>> = HashMap::new();
        let mut shared = SharedFrames::default();
        let index = |frame: &mut Frame| frame.module = frame.module.and_then(|module| index_of.get(&module).copied());
        let olds: Vec<Arc<Stack>> = self.rows.iter().map(|row| Arc::clone(&row.key.stack)).collect();
        for (row, old) in self.rows.iter_mut().zip(&olds) {
            let stack = moved.entry(Arc::as_ptr(old));
            let stack = stack.or_insert_with(|| Arc::new(old.with_frames(&mut shared, index)));
            row.key.stack = Arc::clone(stack);
        }
        self.modules = used.iter().filter_map(|index| self.modules.get(*index).cloned()).collect();
        self
    }

    /// Address of a frame where its module was mapped in the first process that had it, so that a place in a file has
    /// the same address in all processes. If the module or the file offset is unknown, the frame's own address.
    pub fn address_in_first_process(&self, frame: &Frame) -> u64 {
        let module = self.module_of(frame);
        module
            .zip(frame.file_offset)
            .and_then(|(module, offset)| module.start.checked_add(offset.checked_sub(module.file_offset)?))
            .filter(|address| module.is_some_and(|module| (module.start..module.end).contains(address)))
            .unwrap_or(frame.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn what_is_known_of_memory_in_use_is_told_by_process() {
        let mut profile = testing::partly_followed();
        assert!(profile.knows_some_inuse() && profile.knows_inuse(0) && !profile.knows_inuse(1));
        assert_eq!(profile.without_inuse(), 1);
        assert!(!profile.only_process(1).header.live && profile.only_process(0).header.live);
        profile.processes.iter_mut().for_each(|process| process.inuse_unknown = true);
        assert!(!profile.knows_some_inuse());
        profile.header.live = false;
        assert!(!profile.knows_inuse(0) && profile.without_inuse() == 0);
    }

    #[test]
    fn modules_without_a_frame_can_be_left_out() {
        let whole = testing::small();
        let names = |profile: &Profile| -> Vec<Vec<Option<Arc<str>>>> {
            let path = |module: Option<usize>| module.map(|module| Arc::clone(&profile.modules[module].path));
            let stack = |row: &Row| row.key.stack.frames.iter().map(|frame| path(frame.module)).collect();
            profile.rows.iter().map(stack).collect()
        };
        let mut more = whole.clone();
        let mut shared = SharedFrames::default();
        for row in &mut more.rows {
            let up = |frame: &mut Frame| frame.module = frame.module.map(|module| module + 1);
            row.key.stack = Arc::new(row.key.stack.with_frames(&mut shared, up));
        }
        more.modules.insert(0, Module { path: "/of/another".into(), ..Module::default() });
        more.modules.push(Module { path: "/of/a/third".into(), ..Module::default() });
        let pruned = more.without_unused_modules();
        assert_eq!(names(&pruned), names(&whole));
        assert!(!pruned.modules.is_empty() && pruned.modules.iter().all(|module| !module.path.starts_with("/of/")));
    }
}

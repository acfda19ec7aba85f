//! Programs that targets execute: which of them were over before they were counted.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use heapbpf_host::Host;
use sampler_ebpf::abi::ProcessKey;

use super::probes::Attaching;

/// What is known about programs that targets execute.
#[derive(Debug, Default)]
pub(crate) struct ExecutedPrograms {
    /// The last program of a process that was over.
    pub(crate) last: HashMap<u32, ProcessKey>,
    /// Programs that will not be counted, for a reason that is reported.
    pub(super) refused: HashSet<ProcessKey>,
    /// Programs that were hooked inline before they ran.
    pub(super) whole: HashSet<ProcessKey>,
    /// Programs that are over, and count as missed unless calls of them were counted.
    pub(crate) doubtful: HashSet<ProcessKey>,
}

impl ExecutedPrograms {
    /// Whether it is known why nothing was counted of a program that is over, if nothing was.
    fn explain(&mut self, program: &ProcessKey) -> bool {
        let was_whole = self.whole.remove(program);
        self.refused.remove(program) || was_whole
    }
}

impl Attaching {
    /// Handles the end of a program that may have been counted: its process executed another one, or ended.
    pub(crate) fn program_is_over(&mut self, program: ProcessKey) {
        let is_own = self.is_own_program(program);
        let is_explained = self.executed.explain(&program);
        if is_own && !is_explained {
            self.executed.doubtful.insert(program);
        }
    }

    /// Handles the end of a program that nothing counted.
    pub(crate) fn program_was_missed(&mut self, program: ProcessKey, time_ns: u64, host: &Host) {
        let is_after = self.targets.detached_ns.is_some_and(|at_ns| at_ns < time_ns);
        let is_explained = self.executed.explain(&program) || is_after;
        if self.is_own_program(program) && !is_explained {
            self.activity.iter_mut().for_each(|activity| activity.missed(program));
            let known = host.processes().at(program.tgid, time_ns.saturating_sub(1));
            let comm = known.map(|known| Arc::clone(&known.info.comm));
            self.missed.note_program(comm.unwrap_or_default());
        }
    }

    /// Whether every program that targets execute is to be counted. The BPF programs then also report the end of those
    /// that were not.
    pub(super) fn judges_programs(&self) -> bool {
        self.takes_in() && !self.is_listed_by_all()
    }

    /// Notes that a program is over. Returns whether it was executed during the recording and its end is reported for
    /// the first time: then it is known whether it was missed.
    fn is_own_program(&mut self, program: ProcessKey) -> bool {
        if !self.judges_programs() {
            return false;
        }
        let before = self.executed.last.get(&program.tgid).filter(|before| before.start_ns == program.start_ns);
        let is_new = before.is_none_or(|before| *before != program);
        // The copy that a fork made is not a program of its own.
        let is_own = is_new && before.is_some();
        if is_new {
            self.executed.last.insert(program.tgid, program);
        }
        if is_own {
            self.missed.knows_programs_of(program.tgid);
        }
        is_own
    }

    /// Handles a program that is over and whose counts have all been taken in: without calls, it was missed.
    pub(crate) fn program_was_counted(&mut self, program: ProcessKey, has_calls: bool, comm: Arc<str>) {
        // If no record reported its end, this is still known.
        self.executed.explain(&program);
        if self.executed.doubtful.remove(&program) && !has_calls {
            self.missed.note_program(comm);
        }
    }
}

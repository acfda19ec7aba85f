//! Go programs among the targets, as a snapshot needs them.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;

use heapbpf_host::processes::GenerationId;
use heapbpf_kernel::totals;
use sampler_ebpf::abi::ProcessKey;

use super::state::Session;
use crate::profiles::snapshot::GoTarget;

impl Session {
    /// The Go programs whose heaps belong in a snapshot that is taken now.
    pub(super) fn go_targets(&mut self) -> Vec<GoTarget> {
        if !self.plan.sampling.live {
            return Vec::new();
        }
        let processes = self.attaching.go_targets(&mut self.host);
        self.forget_go(&processes.iter().map(|process| process.generation).collect());
        if processes.iter().any(|process| !self.go.contains_key(&process.generation)) {
            let living = totals::living(&self.attaching.programs).unwrap_or_else(|error| {
                log::info!("Go programs are not read: {error}");
                Vec::new()
            });
            let key_of: HashMap<u32, ProcessKey> = living.into_iter().map(|process| (process.tgid, process)).collect();
            for process in &processes {
                if let Some(key) = key_of.get(&process.generation.pid) {
                    self.go.entry(process.generation).or_insert(*key);
                }
            }
        }
        let target = |process: crate::attaching::go::GoProcess| {
            let key = *self.go.get(&process.generation)?;
            let memory = File::open(format!("/proc/{}/mem", key.tgid)).ok().map(Arc::new);
            Some(GoTarget { process: key, program: process.program, mapping: process.mapping, memory })
        };
        processes.into_iter().filter_map(target).collect()
    }

    /// Forgets Go programs that no longer run. Those without samples are known only from here.
    fn forget_go(&mut self, running: &HashSet<GenerationId>) {
        let ended: Vec<ProcessKey> =
            self.go.extract_if(|generation, _| !running.contains(generation)).map(|(_, key)| key).collect();
        for key in ended {
            if !self.recorder.processes.contains_key(&key) && self.exited.counts.get(&key).is_none() {
                self.descriptions.forget_one(key);
            }
        }
    }
}

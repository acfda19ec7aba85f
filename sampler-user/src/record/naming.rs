//! Names for stacks, when a profile is made: late, in batches, each place once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use sampler_ebpf::abi::ProcessKey;

use crate::host::Host;
use crate::host::mappings::ModuleId;
use crate::profile::model::{Module, Stack};
use crate::symbols::finish::Finisher;
use crate::symbols::perf_map::{Limits, PerfMap};
use crate::symbols::symbolizer::{Options, Symbolizer};
use crate::unwind::image::ModuleFiles;
use crate::unwind::raw::RawStack;

/// Finds names, and keeps them from snapshot to snapshot.
pub struct Naming {
    symbolizer: Symbolizer,
    enabled: bool,
    modules: Vec<Module>,
    numbers: HashMap<ModuleId, usize>,
    /// Finished stacks; the raw one is kept so that its address stays its own.
    finished: HashMap<*const RawStack, (Arc<RawStack>, Arc<Stack>)>,
}

/// A stack to be named, and whose it is.
pub struct Unnamed {
    /// Process.
    pub process: ProcessKey,
    /// CLOCK_MONOTONIC of a sample with it.
    pub time_ns: u64,
    /// The stack.
    pub stack: Arc<RawStack>,
}

/// What a process's own code is named by.
struct OwnCode {
    map: Option<PerfMap>,
    reason: Option<String>,
}

impl Naming {
    /// `enabled`: with names; else addresses alone.
    pub fn new(enabled: bool, options: Options) -> Self {
        Self {
            symbolizer: Symbolizer::new(options),
            enabled,
            modules: Vec::new(),
            numbers: HashMap::new(),
            finished: HashMap::new(),
        }
    }

    /// Names stacks; afterwards [`Naming::stack`] answers for each of them.
    pub fn name(&mut self, stacks: &[Unnamed], host: &mut Host) {
        let new: Vec<&Unnamed> =
            stacks.iter().filter(|unnamed| !self.finished.contains_key(&Arc::as_ptr(&unnamed.stack))).collect();
        if self.enabled {
            let places = new.iter().flat_map(|unnamed| &unnamed.stack.frames);
            let places = places.filter_map(|frame| Some((frame.module?, frame.file_offset)));
            self.symbolizer.symbolize(host.modules_mut(), places);
        }
        let mut own_code: HashMap<ProcessKey, OwnCode> = HashMap::new();
        for unnamed in new {
            self.number_modules(unnamed, host);
            let makes_code =
                self.enabled
                    && unnamed.stack.frames.iter().any(|frame| {
                        frame.module.is_none_or(|module| ModuleFiles::is_anonymous(host.modules(), module))
                    });
            if makes_code && !own_code.contains_key(&unnamed.process) {
                own_code.insert(unnamed.process, read_perf_map(unnamed, host));
            }
            let own = own_code.get(&unnamed.process);
            let finisher = Finisher {
                symbolizer: &self.symbolizer,
                modules: host.modules(),
                perf_map: own.and_then(|own| own.map.as_ref()),
                perf_map_reason: own.and_then(|own| own.reason.as_deref()),
            };
            let numbers = &self.numbers;
            let stack = finisher.finish(&unnamed.stack, &mut |module| numbers.get(&module).copied().unwrap_or(0));
            self.finished.insert(Arc::as_ptr(&unnamed.stack), (Arc::clone(&unnamed.stack), Arc::new(stack)));
        }
    }

    /// Gives a number to every module of a stack.
    fn number_modules(&mut self, unnamed: &Unnamed, host: &Host) {
        for frame in &unnamed.stack.frames {
            let Some(module) = frame.module.filter(|module| !self.numbers.contains_key(module)) else { continue };
            let life = host.lives().at(unnamed.process.tgid, unnamed.time_ns);
            // As it was then: it may be unmapped by now.
            let mapping = life.and_then(|life| life.space.resolve(frame.address, unnamed.time_ns));
            let mapping = mapping.filter(|mapping| mapping.module == module);
            self.numbers.insert(module, self.modules.len());
            self.modules.push(Module {
                path: ModuleFiles::path(host.modules(), module),
                build_id: ModuleFiles::build_id(host.modules(), module),
                start: mapping.map_or(0, |mapping| mapping.start),
                end: mapping.map_or(0, |mapping| mapping.end),
                file_offset: mapping.map_or(0, |mapping| mapping.file_offset),
            });
        }
    }

    /// A named stack.
    pub fn stack(&self, raw: &Arc<RawStack>) -> Arc<Stack> {
        self.finished.get(&Arc::as_ptr(raw)).map(|(_, stack)| Arc::clone(stack)).unwrap_or_default()
    }

    /// Modules that named stacks refer to.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }
}

/// The map of a process's own code, from inside its mount namespace.
fn read_perf_map(unnamed: &Unnamed, host: &mut Host) -> OwnCode {
    let pid = unnamed.process.tgid;
    let life = host.lives().at(pid, unnamed.time_ns).map(|life| life.id);
    let info = life.and_then(|life| host.describe(life));
    let namespace_pid = info.as_ref().and_then(|info| info.namespace_pid).unwrap_or(pid);
    let owner = info.map_or(0, |info| info.uid);
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    match PerfMap::read(&root, namespace_pid, owner, Limits::default()) {
        Ok(map) => OwnCode { map: Some(map), reason: None },
        Err(error) => OwnCode { map: None, reason: Some(error.to_string()) },
    }
}

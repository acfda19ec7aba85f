//! Names for stacks: late, in batches, each place once. Lives in the thread that makes profiles, and knows of the host
//! what snapshots bring.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use sampler_ebpf::abi::ProcessKey;

use super::own_code::{OwnCode, OwnCodeMaps};
use super::snapshot::Unnamed;
use crate::host::mappings::ModuleId;
use crate::profile::model::{Module, Stack};
use crate::symbols::finish::Finisher;
use crate::symbols::perf_map::PerfMap;
use crate::symbols::progress::Progress;
use crate::symbols::symbolizer::{Options, Symbolizer};
use crate::unwind::image::{Image, ModuleFiles};
use crate::unwind::raw::RawStack;

/// What naming must know of the modules and processes that new stacks refer to.
#[derive(Default)]
pub struct Facts {
    /// Modules.
    pub modules: HashMap<ModuleId, ModuleFacts>,
    /// Processes with code of their own making.
    pub own_code: HashMap<ProcessKey, OwnCode>,
}

/// A module, with its bytes.
pub struct ModuleFacts {
    /// Path as the process sees it.
    pub path: Arc<str>,
    /// GNU build ID.
    pub build_id: Option<Vec<u8>>,
    /// Whether it is memory without a file.
    pub is_anonymous: bool,
    /// Root of a process that has it, if it is another than ours.
    pub root: Option<PathBuf>,
    /// Its bytes, or why there are none.
    pub image: Result<Arc<dyn Image>, String>,
    /// Lowest address of its executable mapping in the process that it was first seen in.
    pub start: u64,
    /// End of that mapping.
    pub end: u64,
    /// File offset of that mapping.
    pub file_offset: u64,
}

/// Modules that snapshots told of. Bytes are given back after each batch: what is kept open is the host's to decide.
#[derive(Default)]
struct KnownModules(HashMap<ModuleId, ModuleFacts>);

impl ModuleFiles for KnownModules {
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        self.0.get(&module).map_or_else(|| Err("it is not known any more".into()), |facts| facts.image.clone())
    }

    fn path(&self, module: ModuleId) -> Arc<str> {
        self.0.get(&module).map_or_else(|| "?".into(), |facts| Arc::clone(&facts.path))
    }

    fn build_id(&self, module: ModuleId) -> Option<Vec<u8>> {
        self.0.get(&module)?.build_id.clone()
    }

    fn is_anonymous(&self, module: ModuleId) -> bool {
        self.0.get(&module).is_some_and(|facts| facts.is_anonymous)
    }

    fn root(&self, module: ModuleId) -> Option<PathBuf> {
        self.0.get(&module)?.root.clone()
    }
}

/// Finds names, and keeps them from snapshot to snapshot.
pub struct Naming {
    symbolizer: Symbolizer,
    enabled: bool,
    known: KnownModules,
    own_code: OwnCodeMaps,
    modules: Vec<Module>,
    numbers: HashMap<ModuleId, usize>,
    /// Finished stacks; the raw one is kept so that its address stays its own.
    finished: HashMap<*const RawStack, (Arc<RawStack>, Arc<Stack>)>,
}

/// What a process's own code is named by.
struct OwnNames {
    map: Option<PerfMap>,
    reason: Option<String>,
}

impl Naming {
    /// `enabled`: with names; else addresses alone. `progress` is told how far it has come.
    pub fn new(enabled: bool, options: Options, progress: Arc<Progress>) -> Self {
        Self {
            symbolizer: Symbolizer::telling(options, progress),
            enabled,
            known: KnownModules::default(),
            own_code: OwnCodeMaps::default(),
            modules: Vec::new(),
            numbers: HashMap::new(),
            finished: HashMap::new(),
        }
    }

    /// Names stacks; afterwards [`Naming::stack`] answers for each of them. `facts` tells of all that is new in them.
    pub fn name<'a>(&mut self, stacks: impl Iterator<Item = &'a Unnamed>, facts: Facts) {
        let mut modules: Vec<_> = facts.modules.into_iter().collect();
        modules.sort_unstable_by_key(|(module, _)| *module);
        for (module, facts) in modules {
            self.number(module, &facts);
            self.known.0.insert(module, facts);
        }
        let new: Vec<&Unnamed> =
            stacks.filter(|unnamed| !self.finished.contains_key(&Arc::as_ptr(&unnamed.stack))).collect();
        if self.enabled {
            let places = new.iter().flat_map(|unnamed| &unnamed.stack.frames);
            let places = places.filter_map(|frame| Some((frame.module?, frame.file_offset)));
            self.symbolizer.symbolize(&mut self.known, places);
        }
        let mut own_names: HashMap<ProcessKey, OwnNames> = HashMap::new();
        for unnamed in new {
            let own = facts.own_code.get(&unnamed.process).filter(|_| self.enabled);
            let read = |own: &OwnCode| match self.own_code.read(unnamed.process, *own) {
                Ok(map) => OwnNames { map: Some(map), reason: None },
                Err(error) => OwnNames { map: None, reason: Some(error.to_string()) },
            };
            let own = own.map(|own| &*own_names.entry(unnamed.process).or_insert_with(|| read(own)));
            let finisher = Finisher {
                symbolizer: &self.symbolizer,
                modules: &self.known,
                perf_map: own.and_then(|own| own.map.as_ref()),
                perf_map_reason: own.and_then(|own| own.reason.as_deref()),
            };
            let numbers = &self.numbers;
            let stack = finisher.finish(&unnamed.stack, &mut |module| numbers.get(&module).copied().unwrap_or(0));
            self.finished.insert(Arc::as_ptr(&unnamed.stack), (Arc::clone(&unnamed.stack), Arc::new(stack)));
        }
        for facts in self.known.0.values_mut() {
            facts.image = Err("it is not known any more".into());
        }
    }

    /// Makes sure of the names of a process's own code while it runs.
    pub fn open_own_code(&mut self, process: ProcessKey, own: OwnCode) {
        if self.enabled {
            self.own_code.open(process, own);
        }
    }

    /// Nothing more will be asked of these processes.
    pub fn forget_processes<'a>(&mut self, processes: impl IntoIterator<Item = &'a ProcessKey>) {
        self.own_code.close(processes);
    }

    fn number(&mut self, module: ModuleId, facts: &ModuleFacts) {
        self.numbers.entry(module).or_insert_with(|| {
            self.modules.push(Module {
                path: Arc::clone(&facts.path),
                build_id: facts.build_id.clone(),
                start: facts.start,
                end: facts.end,
                file_offset: facts.file_offset,
            });
            self.modules.len() - 1
        });
    }

    /// Forgets all stacks but these: those of processes that ended come never again.
    pub fn keep_only<'a>(&mut self, stacks: impl Iterator<Item = &'a Arc<RawStack>>) {
        let kept: HashSet<*const RawStack> = stacks.map(Arc::as_ptr).collect();
        if kept.len() < self.finished.len() {
            self.finished.retain(|stack, _| kept.contains(stack));
            self.finished.shrink_to(2 * kept.len());
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

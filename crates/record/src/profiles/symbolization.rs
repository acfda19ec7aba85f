//! Symbolization of stacks: deferred, in batches, each code location once. It runs in the profile worker and learns
//! about the host only from snapshots.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use heapbpf_host::mappings::ModuleId;
use heapbpf_profile::model::{Module, SharedFrames, Stack};
use heapbpf_symbols::finish::Finisher;
use heapbpf_symbols::options::Options;
use heapbpf_symbols::progress::Progress;
use heapbpf_symbols::runtime_functions::{RuntimeFunctions, is_of_runtime};
use heapbpf_symbols::symbolizer::Symbolizer;
use heapbpf_unwind::image::{Image, ModuleFiles};
use heapbpf_unwind::raw::RawStack;
use sampler_ebpf::abi::ProcessKey;

use super::jit_code::{JitCode, JitCodeMaps};

/// What symbolization needs to know about the modules and processes that new stacks refer to.
#[derive(Default)]
pub struct Facts {
    /// Modules on the stacks.
    pub modules: HashMap<ModuleId, ModuleFacts>,
    /// Processes with JIT code.
    pub jit_code: HashMap<ProcessKey, JitCode>,
}

/// A module and its contents.
pub struct ModuleFacts {
    /// The module as profiles list it.
    pub module: Module,
    /// Whether it is anonymous memory, without a file.
    pub is_anonymous: bool,
    /// Root directory of a process that maps it, if different from ours.
    pub root: Option<PathBuf>,
    /// Its contents, or the reason why they are unavailable.
    pub image: Result<Arc<dyn Image>, String>,
}

/// A stack to symbolize, and the process it belongs to.
#[derive(Clone)]
pub struct UnsymbolizedStack {
    /// Process that the stack belongs to.
    pub process: ProcessKey,
    /// The raw stack.
    pub stack: Arc<RawStack>,
}

impl UnsymbolizedStack {
    /// Whether it is the same stack of the same process, by the address of the raw stack.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.stack, &other.stack) && self.process == other.process
    }
}

/// Modules from snapshots. Their contents are released after each batch: the host decides which files stay open.
#[derive(Default)]
struct KnownModules(HashMap<ModuleId, ModuleFacts>);

impl ModuleFiles for KnownModules {
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        self.0.get(&module).map_or_else(|| Err("it is no longer known".into()), |facts| facts.image.clone())
    }

    fn path(&self, module: ModuleId) -> Arc<str> {
        self.0.get(&module).map_or_else(|| "?".into(), |facts| Arc::clone(&facts.module.path))
    }

    fn build_id(&self, module: ModuleId) -> Option<Vec<u8>> {
        self.0.get(&module)?.module.build_id.clone()
    }

    fn is_anonymous(&self, module: ModuleId) -> bool {
        self.0.get(&module).is_some_and(|facts| facts.is_anonymous)
    }

    fn root(&self, module: ModuleId) -> Option<PathBuf> {
        self.0.get(&module)?.root.clone()
    }
}

/// Symbolizes stacks, and keeps the results from snapshot to snapshot.
pub struct Symbolization {
    symbolizer: Symbolizer,
    options: Options,
    progress: Arc<Progress>,
    /// The functions of language runtimes.
    pub runtime_functions: Arc<RuntimeFunctions>,
    /// Whether addresses are symbolized.
    pub enabled: bool,
    known: KnownModules,
    jit_code: JitCodeMaps,
    modules: Vec<Module>,
    numbers: HashMap<ModuleId, usize>,
    /// Numbers of forgotten modules, for reuse.
    free: Vec<usize>,
    /// Frames of all symbolized stacks.
    frames: SharedFrames,
    /// Symbolized stacks, by the address of the raw stack.
    finished: HashMap<*const RawStack, Finished, foldhash::fast::RandomState>,
    /// Number of calls of [`Self::keep_only`].
    sweeps: u64,
}

/// The symbolized form of a raw stack, which processes share.
struct Finished {
    /// Kept so that its address is not reused.
    _raw: Arc<RawStack>,
    names: Names,
    /// The last sweep that kept it.
    kept_by: u64,
}

enum Names {
    /// All names come from files and are the same in every process.
    OfFiles(Arc<Stack>),
    /// There is JIT code on the stack. At equal addresses, each process has its own code.
    OfProcesses(HashMap<ProcessKey, Arc<Stack>>),
}

impl Names {
    fn get(&self, process: &ProcessKey) -> Option<&Arc<Stack>> {
        match self {
            Self::OfFiles(stack) => Some(stack),
            Self::OfProcesses(stacks) => stacks.get(process),
        }
    }
}

impl Symbolization {
    /// Creates a symbolization without stacks. `enabled`: whether addresses are symbolized. `progress` is updated as
    /// work advances.
    pub fn new(enabled: bool, options: Options, progress: Arc<Progress>) -> Self {
        Self {
            symbolizer: Symbolizer::reporting_to(options.clone(), Arc::clone(&progress)),
            options,
            progress,
            runtime_functions: Arc::default(),
            enabled,
            known: KnownModules::default(),
            jit_code: JitCodeMaps::default(),
            modules: Vec::new(),
            numbers: HashMap::new(),
            free: Vec::new(),
            frames: SharedFrames::default(),
            finished: HashMap::default(),
            sweeps: 0,
        }
    }

    /// Takes in the modules that new stacks refer to.
    pub fn learn(&mut self, modules: HashMap<ModuleId, ModuleFacts>) {
        let mut modules: Vec<_> = modules.into_iter().collect();
        modules.sort_unstable_by_key(|(module, _)| *module);
        for (module, facts) in modules {
            self.number(module, &facts);
            self.known.0.insert(module, facts);
        }
    }

    /// Symbolizes stacks. Afterwards [`Symbolization::stack`] returns each of them. `jit_code` describes the processes
    /// with JIT code. Without `names`, new stacks get only their modules and addresses.
    pub fn name<'a>(
        &mut self,
        stacks: impl Iterator<Item = &'a UnsymbolizedStack>,
        jit_code: &HashMap<ProcessKey, JitCode>,
        names: bool,
    ) {
        let names = names && self.enabled;
        let mut new: Vec<&UnsymbolizedStack> = stacks.filter(|stack| self.get(stack).is_none()).collect();
        if names {
            let places = new.iter().flat_map(|unsymbolized| &unsymbolized.stack.frames);
            let places = places
                .filter(|frame| !is_of_runtime(frame))
                .filter_map(|frame| Some((frame.module?, frame.file_offset)));
            self.symbolizer.symbolize(&mut self.known, places);
            for (module, number) in &self.numbers {
                self.modules[*number].reason = self.symbolizer.reason(*module).cloned();
            }
        }
        // Perf maps may be large: only that of one process is in memory.
        new.sort_by_key(|stack| stack.process);
        for of_process in new.chunk_by(|a, b| a.process == b.process) {
            let process = of_process[0].process;
            let code = jit_code.get(&process).filter(|_| names);
            let map = code.map(|code| self.jit_code.read(process, *code)).transpose();
            let reason = map.as_ref().err().map(ToString::to_string);
            for unsymbolized in of_process {
                let finisher = Finisher {
                    symbolizer: &self.symbolizer,
                    modules: &self.known,
                    runtime_functions: &self.runtime_functions,
                    perf_map: map.as_ref().ok().and_then(Option::as_ref),
                    perf_map_reason: reason.as_deref(),
                };
                let numbers = &self.numbers;
                let mut number = |module| numbers.get(&module).copied().unwrap_or(0);
                let stack = finisher.finish(&unsymbolized.stack, &mut number, &mut self.frames);
                self.finish(unsymbolized, stack);
            }
        }
    }

    /// Releases the contents of modules once the stacks of a batch have been symbolized.
    pub fn release_contents(&mut self) {
        self.known.0.values_mut().for_each(|facts| facts.image = Err("it is no longer known".into()));
    }

    /// Starts over after a panic, which may have left the caches of symbols incomplete. Finished stacks stay.
    pub fn begin_anew(&mut self) {
        self.symbolizer = Symbolizer::reporting_to(self.options.clone(), Arc::clone(&self.progress));
    }

    fn finish(&mut self, UnsymbolizedStack { process, stack: raw }: &UnsymbolizedStack, stack: Stack) {
        let stack = Arc::new(stack);
        let is_of_process = raw.has_jit_code(&self.known);
        let finished = self.finished.entry(Arc::as_ptr(raw)).or_insert_with(|| Finished {
            _raw: Arc::clone(raw),
            names: if is_of_process { Names::OfProcesses(HashMap::new()) } else { Names::OfFiles(Arc::clone(&stack)) },
            kept_by: 0,
        });
        if let Names::OfProcesses(stacks) = &mut finished.names {
            stacks.insert(*process, stack);
        }
    }

    fn get(&self, unsymbolized: &UnsymbolizedStack) -> Option<&Arc<Stack>> {
        self.finished.get(&Arc::as_ptr(&unsymbolized.stack))?.names.get(&unsymbolized.process)
    }

    /// Opens the perf map of a process that runs JIT code, so that its names can be read after it exits.
    pub fn open_jit_code(&mut self, process: ProcessKey, code: JitCode) {
        if self.enabled {
            self.jit_code.open(process, code);
        }
    }

    /// Releases what is kept for processes whose stacks are all symbolized.
    pub fn forget_processes<'a>(&mut self, processes: impl IntoIterator<Item = &'a ProcessKey>) {
        self.jit_code.close(processes);
    }

    fn number(&mut self, module: ModuleId, facts: &ModuleFacts) {
        self.numbers.entry(module).or_insert_with(|| {
            let number = self.free.pop().unwrap_or(self.modules.len());
            self.modules.resize(self.modules.len().max(number + 1), Module::default());
            self.modules[number] = facts.module.clone();
            number
        });
    }

    /// Forgets modules that contain no frame of its own stacks or of `others`.
    pub fn forget_modules(&mut self, others: &SharedFrames) {
        let used: HashSet<usize> = self.frames.iter().chain(others.iter()).filter_map(|frame| frame.module).collect();
        for (module, number) in self.numbers.extract_if(|_, number| !used.contains(number)) {
            self.known.0.remove(&module);
            self.modules[number] = Module::default();
            self.free.push(number);
        }
        self.symbolizer.forget(|module| !self.numbers.contains_key(module));
    }

    /// Forgets all stacks except these: stacks of exited processes never recur.
    pub fn keep_only<'a>(&mut self, stacks: impl Iterator<Item = &'a UnsymbolizedStack>) {
        self.sweeps += 1;
        let mut processes_of: HashMap<*const RawStack, HashSet<ProcessKey>> = HashMap::new();
        let mut kept = 0;
        for UnsymbolizedStack { process, stack } in stacks {
            let Some(finished) = self.finished.get_mut(&Arc::as_ptr(stack)) else { continue };
            kept += usize::from(std::mem::replace(&mut finished.kept_by, self.sweeps) != self.sweeps);
            if matches!(finished.names, Names::OfProcesses(_)) {
                processes_of.entry(Arc::as_ptr(stack)).or_default().insert(*process);
            }
        }
        for (stack, processes) in processes_of {
            if let Some(Finished { names: Names::OfProcesses(stacks), .. }) = self.finished.get_mut(&stack) {
                stacks.retain(|process, _| processes.contains(process));
            }
        }
        // Mostly nothing has gone.
        if kept < self.finished.len() {
            self.finished.retain(|_, finished| finished.kept_by == self.sweeps);
            self.finished.shrink_to(2 * kept);
        }
        self.frames.sweep();
    }

    /// The symbolized stack for a raw one; empty if it was not symbolized.
    pub fn stack(&self, unsymbolized: &UnsymbolizedStack) -> Arc<Stack> {
        self.get(unsymbolized).map(Arc::clone).unwrap_or_default()
    }

    /// Modules that symbolized stacks refer to.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use heapbpf_unwind::raw::{Completeness, RawFrame, UnwinderKind};

    use super::*;

    const FILE: ModuleId = ModuleId(0);
    const ANONYMOUS: ModuleId = ModuleId(1);

    fn facts(path: &str) -> ModuleFacts {
        ModuleFacts {
            module: Module { path: path.into(), ..Module::default() },
            is_anonymous: false,
            root: None,
            image: Err("there is none".into()),
        }
    }

    fn symbolization() -> Symbolization {
        let mut symbolization = Symbolization::new(true, Options::new(&[], 0), Arc::default());
        let modules = [(FILE, facts("?")), (ANONYMOUS, ModuleFacts { is_anonymous: true, ..facts("?") })];
        symbolization.learn(modules.into());
        symbolization
    }

    fn raw(modules: &[ModuleId]) -> Arc<RawStack> {
        let frames = modules.iter().map(|module| RawFrame { address: 0x1000, module: Some(*module), file_offset: 0 });
        Arc::new(RawStack {
            frames: frames.collect(),
            unwinder: UnwinderKind::Dwarf,
            completeness: Completeness::Complete,
        })
    }

    fn of(tgid: u32, stack: &Arc<RawStack>) -> UnsymbolizedStack {
        UnsymbolizedStack { process: ProcessKey { tgid, ..ProcessKey::default() }, stack: Arc::clone(stack) }
    }

    #[test]
    fn processes_share_names_of_files_but_not_of_jit_code() {
        let mut symbolization = symbolization();
        let (files, jit) = (raw(&[FILE, FILE]), raw(&[FILE, ANONYMOUS, FILE]));
        let all = [of(1, &files), of(2, &files), of(1, &jit), of(2, &jit)];
        symbolization.name(all.iter(), &HashMap::new(), true);
        let [a, b, c, d] = all.each_ref().map(|stack| symbolization.stack(stack));
        assert!([&a, &b, &c, &d].iter().all(|stack| !stack.frames.is_empty()));
        assert!(Arc::ptr_eq(&a, &b) && !Arc::ptr_eq(&c, &d));
    }

    /// Each process's stacks get the names of its own perf map, in whatever order they come.
    #[test]
    fn jit_code_is_named_by_the_perf_map_of_its_process() {
        let mut symbolization = symbolization();
        let mut jit_code = HashMap::new();
        let stacks: Vec<UnsymbolizedStack> =
            (0..6).map(|number| of(1 + number % 3, &raw(&vec![ANONYMOUS; 1 + number as usize]))).collect();
        for UnsymbolizedStack { process, .. } in &stacks[..2] {
            let mut map = tempfile::tempfile().expect("a file");
            writeln!(map, "1000 10 f{}", process.tgid).expect("our own");
            symbolization.jit_code.keep(*process, map);
            let code = JitCode { pid: u32::MAX, namespace_pid: u32::MAX, owner: 0, started: None };
            jit_code.insert(*process, code);
        }
        symbolization.name(stacks.iter(), &jit_code, true);
        let names = stacks.iter().map(|stack| symbolization.stack(stack).frames[0].function.clone());
        let names: Vec<Option<Arc<str>>> = names.collect();
        let expected = [Some("f1"), Some("f2"), None].repeat(2);
        assert_eq!(names.iter().map(Option::as_deref).collect::<Vec<_>>(), expected);
    }

    /// There are as many frames as code locations, however many stacks they are on.
    #[test]
    fn stacks_share_the_frames_of_a_code_location() {
        let mut symbolization = symbolization();
        let stacks: Vec<UnsymbolizedStack> = (1..=100).map(|depth| of(1, &raw(&vec![FILE; depth]))).collect();
        symbolization.name(stacks.iter(), &HashMap::new(), true);
        let named: Vec<Arc<Stack>> = stacks.iter().map(|stack| symbolization.stack(stack)).collect();
        assert!(named.iter().zip(1..).all(|(stack, depth)| stack.frames.len() == depth));
        let first = &named[0].frames[0];
        assert!(named.iter().flat_map(|stack| &stack.frames).all(|frame| Arc::ptr_eq(frame, first)));
        assert_eq!(symbolization.frames.iter().count(), 1);
        assert!(named.iter().all(|stack| stack.frames.capacity() == stack.frames.len()), "as long as needed");
        drop(named);
        symbolization.keep_only([].iter());
        assert_eq!(symbolization.frames.iter().count(), 0);
    }

    #[test]
    fn modules_that_no_frame_is_in_are_forgotten_and_their_numbers_are_for_others() {
        let mut symbolization = symbolization();
        let all = [of(1, &raw(&[FILE])), of(1, &raw(&[ANONYMOUS]))];
        symbolization.name(all.iter(), &HashMap::new(), true);
        symbolization.keep_only(all[..1].iter());
        let kept = symbolization.stack(&all[0]);
        symbolization.forget_modules(&SharedFrames::default());
        let number = kept.frames[0].module.expect("it is in a file");
        assert_eq!((symbolization.numbers.len(), &*symbolization.modules[number].path), (1, "?"));
        symbolization.learn([(ModuleId(2), facts("new"))].into());
        let paths: Vec<&str> = symbolization.modules().iter().map(|module| &*module.path).collect();
        assert_eq!(paths, if number == 0 { ["?", "new"] } else { ["new", "?"] });
        symbolization.learn([(ANONYMOUS, facts("again"))].into());
        assert_eq!(&*symbolization.modules()[2].path, "again");
    }

    #[test]
    fn jit_code_of_ended_processes_is_forgotten_while_others_have_the_same_stack() {
        let mut symbolization = symbolization();
        let (files, jit) = (raw(&[FILE]), raw(&[ANONYMOUS]));
        let all = [of(1, &jit), of(2, &jit), of(3, &files)];
        symbolization.name(all.iter(), &HashMap::new(), true);
        symbolization.keep_only(all[1..2].iter());
        let kept = all.map(|stack| !symbolization.stack(&stack).frames.is_empty());
        assert_eq!(kept, [false, true, false]);
    }
}

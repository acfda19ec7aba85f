//! The Python interpreters, JVMs and Go programs that targets map.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_host::mappings::{Mapping, ModuleId};
use heapbpf_host::processes::GenerationId;
use heapbpf_probes::ObjectTable;
use heapbpf_python::{Runtime, Unsupported};
use heapbpf_symbols::go::GoProgram;
use sampler_ebpf::abi::Site;

/// The interpreters that targets map.
#[derive(Default)]
pub(super) struct Interpreters {
    pub(super) known: HashMap<ModuleId, Option<Arc<Runtime>>>,
    pub(super) new: Vec<(ModuleId, Arc<Runtime>)>,
    pub(super) refused: BTreeMap<ModuleId, Unsupported>,
    /// Interpreters whose table of allocators the loader has not filled in yet, and until when to wait for it.
    pub(super) unled: Vec<(GenerationId, ModuleId, Instant)>,
    /// The interpreter that is being checked again.
    pub(super) retried: Option<(GenerationId, ModuleId, Instant)>,
}

impl Interpreters {
    /// Until when to wait for an interpreter's table, if the interpreter is being checked again.
    pub(super) fn awaited(&self, generation: GenerationId, module: ModuleId) -> Option<Instant> {
        self.retried.filter(|(of, its, _)| (*of, *its) == (generation, module)).map(|(.., until)| until)
    }

    /// Whether a table of allocators must be checked again.
    pub(super) const fn has_unled(&self) -> bool {
        !self.unled.is_empty()
    }
}

/// The object allocator of an interpreter, and the interpreter's file.
pub(super) type TableOfFile = (Arc<ObjectTable>, Arc<File>);

/// What is known about object allocators.
#[derive(Default)]
pub(super) struct Objects {
    /// The object allocator of each interpreter, with the interpreter's file.
    pub(super) known: HashMap<ModuleId, Option<TableOfFile>>,
    /// Names of the functions, and their sites in the kernel's table.
    pub(super) sites: Vec<(String, Site)>,
    /// Interpreters that may still fill in their table again.
    pub(super) young: HashMap<u32, Young>,
}

/// An interpreter whose table leads to the mapped code.
pub(super) struct Young {
    pub(super) table: Arc<ObjectTable>,
    pub(super) bias: u64,
    pub(super) until: Instant,
    pub(super) next: Instant,
}

impl Objects {
    /// Time until a table must be checked again.
    pub(super) fn until_look(&self) -> Option<Duration> {
        let next = self.young.values().map(|young| young.next).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Forgets a process that has ended or runs another program.
    pub(super) fn forget(&mut self, pid: u32) {
        self.young.remove(&pid);
    }
}

/// The JVMs that targets map.
#[derive(Default)]
pub(super) struct Jvms {
    pub(super) looked_at: HashSet<ModuleId>,
    pub(super) refused: BTreeMap<ModuleId, heapbpf_java::Unsupported>,
}

/// A process that runs a Go program.
#[derive(Clone, Debug)]
pub struct GoProcess {
    /// The process.
    pub generation: GenerationId,
    /// The program.
    pub program: Arc<GoProgram>,
    /// Where its code is mapped.
    pub mapping: Mapping,
}

/// The Go programs that processes run.
#[derive(Default)]
pub(super) struct GoPrograms {
    pub(super) known: HashMap<ModuleId, Option<Arc<GoProgram>>>,
    pub(super) processes: HashMap<u32, GoProcess>,
}

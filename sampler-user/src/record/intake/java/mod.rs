//! Java frames of samples: leaves frames of a JVM's code while a stack is unwound, and names what runs in them.

mod notes;
mod process;
mod reader;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sampler_ebpf::abi::ProcessKey;

use heapbpf_java::frames::{NotLeft, Registers, Runs, leave, leave_otherwise};
use heapbpf_java::{ReadError, Tables, Vm};
use heapbpf_unwind::memory::{Memory, Missing};
use heapbpf_unwind::raw::{RawFrame, SpaceView};
use heapbpf_unwind::runtime::{Left, RuntimeCode, RuntimeFrame};

use crate::symbols::python::{PythonNames, UNKNOWN_FUNCTION, raw_frame};
use notes::Outcomes;
use process::{Code, Process};
use reader::{Failed, JavaReader};

/// Most processes whose JVM is known.
const MOST_PROCESSES: usize = 1 << 14;

/// Name of the code by which native code calls Java.
const CALL_STUB: &str = "call_stub";

const GONE: &str = "code of the JVM that was freed before it could be read";
const UNREADABLE: &str = "the memory of the JVM could not be read";
const NO_ANSWER: &str = "reading the memory of the JVM took too long";
const IMPLAUSIBLE: &str = "a frame of the JVM is not understood";
const NOWHERE: &str = "a frame of the JVM leads to no code";
const NO_METHOD: &str = "an interpreted frame of the JVM has no method";

/// The Java side of the intake.
pub struct Javas {
    names: Arc<PythonNames>,
    tables: HashMap<u32, Tables>,
    processes: HashMap<ProcessKey, Process>,
    reader: JavaReader,
    outcomes: Outcomes,
}

impl Javas {
    /// No JVM is known yet. New methods are added to `names`.
    pub fn new(names: Arc<PythonNames>) -> Self {
        Self {
            names,
            tables: HashMap::new(),
            processes: HashMap::new(),
            reader: JavaReader::default(),
            outcomes: Outcomes::default(),
        }
    }

    /// Adds a process that has mapped a JVM.
    pub fn learn(&mut self, pid: u32, tables: Tables) {
        // A process id may be that of the next program already, so that ended ones are told by lack of room alone.
        if self.tables.len() >= MOST_PROCESSES {
            let living: HashSet<u32> = self.processes.keys().map(|key| key.tgid).collect();
            self.tables.retain(|pid, _| living.contains(pid));
        }
        self.tables.insert(pid, tables);
    }

    /// Drops what is kept of processes that have ended.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        self.processes.retain(|process, _| !ended.contains(process));
    }

    /// Notes for the user: how many stacks end in a JVM's code, and why.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        self.outcomes.notes()
    }

    fn stuck(&mut self, why: &'static str) -> Left {
        self.outcomes.count(why);
        Left::Stuck(why)
    }
}

fn why(failed: Failed) -> &'static str {
    match failed {
        Failed::NoAnswer => NO_ANSWER,
        Failed::Read(ReadError::Unreadable) => UNREADABLE,
        Failed::Read(ReadError::Malformed) => GONE,
    }
}

/// What a frame needs of a process.
struct At<'a> {
    process: &'a mut Process,
    reader: &'a mut JavaReader,
    names: &'a PythonNames,
    vm: Arc<Vm>,
    space: &'a SpaceView<'a>,
}

/// Why a frame cannot be left.
enum Why {
    Missing(Missing),
    Stuck(&'static str),
}

impl At<'_> {
    fn code(&mut self, pc: u64) -> Result<Code, Why> {
        let code = self.process.code(self.reader, self.names, &self.vm, pc);
        code.map_err(|failed| Why::Stuck(why(failed)))?.ok_or(Why::Stuck(GONE))
    }

    /// Whether code is where a call would have come from.
    fn leads_to_code(&self, caller: &Registers) -> bool {
        let call = caller.ip.wrapping_sub(1);
        self.space.find(call).is_some() || self.vm.heap(call).is_some()
    }

    fn leave(&mut self, at: Registers, memory: &mut dyn Memory, frames: &mut Vec<RawFrame>) -> Result<Registers, Why> {
        let code = self.code(at.ip)?;
        let mut read = |address| memory.read(address);
        let not_left = |error| match error {
            NotLeft::Stack(missing) => Why::Missing(missing),
            NotLeft::Implausible => Why::Stuck(IMPLAUSIBLE),
        };
        let (runs, mut caller) = leave(&self.vm, &code.blob, at, &mut read).map_err(not_left)?;
        if !self.leads_to_code(&caller) && runs == Runs::Stub {
            caller = leave_otherwise(&code.blob, at, &mut read).map_err(not_left)?;
        }
        if !self.leads_to_code(&caller) {
            return Err(Why::Stuck(NOWHERE));
        }
        match runs {
            Runs::Interpreted { method, bytecode } => {
                let frame = self.process.interpreted(self.reader, self.names, &self.vm, (method, bytecode));
                frames.push(frame.map_err(|failed| match failed {
                    Failed::Read(ReadError::Malformed) => Why::Stuck(NO_METHOD),
                    other => Why::Stuck(why(other)),
                })?);
            }
            Runs::Compiled { pc } if pc != at.ip => match self.code(pc) {
                Ok(original) => frames.extend_from_slice(&original.frames),
                Err(_) => frames.extend_from_slice(&code.frames),
            },
            Runs::Compiled { .. } => frames.extend_from_slice(&code.frames),
            Runs::CallStub => frames.push(self.stub(CALL_STUB)),
            Runs::Stub => frames.push(self.stub(&code.blob.name)),
        }
        Ok(caller)
    }

    fn stub(&self, name: &str) -> RawFrame {
        raw_frame(self.names.number(name, "").unwrap_or(UNKNOWN_FUNCTION), 0)
    }
}

impl RuntimeCode for Javas {
    fn leave(
        &mut self,
        space: &SpaceView,
        at: RuntimeFrame,
        memory: &mut dyn Memory,
        frames: &mut Vec<RawFrame>,
    ) -> Left {
        let key = space.key;
        let Some(tables) = self.tables.get(&key.tgid) else { return Left::NotMine };
        let process = self.processes.entry(key).or_insert_with(|| Process::open(key, tables.clone()));
        let vm = match process.vm(&mut self.reader) {
            Ok(Some(vm)) => vm,
            Ok(None) => return Left::NotMine,
            Err(refused) => {
                log::info!("Java frames of process {} are not read: {refused}", key.tgid);
                self.outcomes.refuse(key.tgid, &refused.to_string());
                return Left::NotMine;
            }
        };
        if vm.heap(at.ip).is_none() {
            return Left::NotMine;
        }
        let registers = Registers { ip: at.ip, sp: at.sp, fp: at.fp };
        let mut around = At { process, reader: &mut self.reader, names: &self.names, vm, space };
        match around.leave(registers, memory, frames) {
            Ok(Registers { ip, sp, fp }) => Left::To(RuntimeFrame { ip, sp, fp }),
            Err(Why::Missing(missing)) => Left::Missing(missing),
            Err(Why::Stuck(why)) => self.stuck(why),
        }
    }
}

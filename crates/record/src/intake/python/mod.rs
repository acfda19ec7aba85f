//! Python frames of samples: joins the frames that the kernel side found with the native stack of the same sample.

mod merge;
mod notes;
mod reader;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;

use heapbpf_host::reader_thread::ReaderThread;
use heapbpf_python::code::CodeError;
use heapbpf_python::{Code, Frame, Layout, Runtime, invocations};
use heapbpf_symbols::runtime_functions::{RuntimeFunctions, UNKNOWN_FUNCTION, raw_frame};
use heapbpf_unwind::mapping::ModuleId;
use heapbpf_unwind::raw::{Completeness, RawFrame, RawStack};
use merge::Parts;
use notes::{Outcomes, Why};
use sampler_ebpf::abi::{ProcessKey, PythonCodeRecord, PythonFrame, PythonRecord, StackRecord, python_walk};

/// Maximum number of samples whose Python frames wait for their stack copy, which either follows at once or was lost.
const MOST_WAITING: usize = 4096;
/// Maximum number of copied code objects that wait for the stack that shows them, which either follows at once or was
/// lost.
const MOST_COPIES: usize = 4096;
/// Maximum number of bytes of a process's code objects. Beyond it, they are dropped before the next stack, and read
/// again. If they cannot be, they are kept, and further ones are not.
const MOST_BYTES_OF_PROCESS: usize = 32 << 20;
/// The same for all processes together.
const MOST_BYTES: usize = 64 << 20;
/// What a code object takes besides the size that it states, bytes, roughly.
const ENTRY_BYTES: usize = 256;
/// What a line that was looked up takes, bytes, roughly.
const LINE_BYTES: isize = 16;
/// Maximum number of remembered forks, and how many generations of parents are searched for code objects.
const MOST_PARENTS: usize = 1 << 16;
const GENERATIONS: usize = 4;
/// Maximum number of lines that are kept per function.
const MOST_LINES: usize = 256;

/// What the kernel side found for one stack.
#[derive(Default)]
struct Walked {
    frames: Vec<PythonFrame>,
    walk: u32,
}

/// A code object.
struct CodeObject {
    check: u64,
    /// `None` if it could not be read.
    function: Option<(u32, Code)>,
    /// Lines by offset of the instruction.
    lines: HashMap<u32, u32>,
}

/// A process that runs Python.
struct Process {
    /// `None` if it cannot be read.
    memory: Option<Arc<File>>,
    /// Whether a read of it took too long, so that there will be no other.
    gave_up: bool,
    codes: HashMap<u64, CodeObject>,
    /// Memory that they use, bytes.
    held_bytes: usize,
}

impl Process {
    fn open(key: ProcessKey) -> Self {
        Self {
            memory: File::open(format!("/proc/{}/mem", key.tgid)).ok().map(Arc::new),
            gave_up: false,
            codes: HashMap::new(),
            held_bytes: 0,
        }
    }

    /// Whether this code object was read, or is known to be unreadable.
    fn knows(&self, address: u64, check: u64) -> bool {
        self.codes.get(&address).is_some_and(|known| known.check == check)
    }

    /// Keeps a code object, or the fact that it is unreadable.
    fn keep(&mut self, address: u64, check: u64, function: Option<(u32, Code)>) {
        self.held_bytes += ENTRY_BYTES + function.as_ref().map_or(0, |(_, code)| code.held_bytes());
        self.codes.insert(address, CodeObject { check, function, lines: HashMap::new() });
    }

    /// Drops all code objects, unless they cannot be read again.
    fn drop_codes(&mut self) {
        if self.memory.is_some() {
            (self.codes, self.held_bytes) = (HashMap::new(), 0);
        }
    }
}

/// The Python side of the intake.
#[derive(Default)]
pub struct Pythons {
    names: Arc<RuntimeFunctions>,
    runtimes: HashMap<ModuleId, Arc<Runtime>>,
    waiting: HashMap<u64, Walked>,
    /// Code objects as the kernel side copied them, by process and address.
    copies: HashMap<(ProcessKey, u64), Box<PythonCodeRecord>>,
    processes: HashMap<ProcessKey, Process>,
    /// Parents of forked processes, by process id.
    parents: HashMap<u32, ProcessKey>,
    reader: ReaderThread,
    outcomes: Outcomes,
}

impl Pythons {
    /// Creates it without any known interpreter. New functions are added to `names`.
    pub fn new(names: Arc<RuntimeFunctions>) -> Self {
        Self { names, ..Self::default() }
    }

    /// Adds an interpreter.
    pub fn learn(&mut self, module: ModuleId, runtime: Arc<Runtime>) {
        self.runtimes.insert(module, runtime);
    }

    /// Notes a fork: if the child has ended and can no longer be read, its parent may be.
    pub fn forked(&mut self, parent: ProcessKey, child: u32) {
        if self.runtimes.is_empty() {
            return;
        }
        if self.parents.len() >= MOST_PARENTS {
            self.parents.clear();
        }
        self.parents.insert(child, parent);
        self.processes.entry(parent).or_insert_with(|| Process::open(parent));
    }

    /// Takes in a record of frames, which comes before the copy of the same stack.
    pub fn take_in(&mut self, record: &PythonRecord) {
        if self.waiting.len() >= MOST_WAITING {
            self.waiting.clear();
        }
        let walked = self.waiting.entry(record.sample).or_default();
        let count = (record.count as usize).min(record.frames.len());
        walked.frames.extend_from_slice(&record.frames[..count]);
        walked.walk = record.walk;
    }

    /// Takes in a copy of a code object, which comes before the copy of the first stack that shows it.
    pub fn take_in_code(&mut self, record: &PythonCodeRecord) {
        if self.copies.len() >= MOST_COPIES {
            self.copies.clear();
        }
        self.copies.insert((record.space, record.head.address), Box::new(*record));
    }

    /// The stack of a sample with its Python frames; `None` if it has none, or they are not credible.
    pub fn merged(
        &mut self,
        head: &StackRecord,
        native: &RawStack,
        is_jit_code: &dyn Fn(ModuleId) -> bool,
    ) -> Option<RawStack> {
        // If no process runs Python, nothing is looked up.
        if self.runtimes.is_empty() && self.waiting.is_empty() {
            return None;
        }
        let walked = self.waiting.remove(&head.sample);
        let module = native.frames.iter().find_map(|frame| frame.module.filter(|it| self.runtimes.contains_key(it)));
        let module = module?;
        let runtime = Arc::clone(self.runtimes.get(&module)?);
        let has_loop =
            native.frames.iter().any(|frame| frame.module == Some(module) && runtime.is_loop(frame.file_offset));
        let Some(walked) = walked else {
            if has_loop {
                self.outcomes.count(Some(notes::NOT_READ));
            }
            return None;
        };
        if !has_loop && walked.frames.is_empty() {
            // Interpreter code without a Python function: it is starting, or this is another of its threads.
            return None;
        }
        let merged = self.frames_of(head.space, &walked, &runtime).and_then(|python| {
            let parts = Parts {
                native: &native.frames,
                native_is_whole: native.completeness == Completeness::Complete,
                runtime: (module, &runtime),
                python: &python,
                python_is_whole: walked.walk == python_walk::COMPLETE,
                is_jit_code,
            };
            parts.merge()
        });
        self.outcomes.count(merged.as_ref().err().copied());
        let frames = merged.ok()?.into();
        Some(RawStack { frames, unwinder: native.unwinder, completeness: native.completeness.clone() })
    }

    /// The Python frames, by invocation of the interpreter's loop.
    fn frames_of(&mut self, space: ProcessKey, walked: &Walked, runtime: &Runtime) -> Result<Vec<Vec<RawFrame>>, Why> {
        if let Some(why) = notes::why_of_walk(walked.walk) {
            return Err(why);
        }
        let layout = &runtime.layout;
        let invocations = invocations(layout, &walked.frames, walked.walk == python_walk::COMPLETE);
        self.read_new(space, layout, invocations.iter().flatten())?;
        let process = self.processes.get_mut(&space).ok_or(notes::UNREADABLE)?;
        let (mut readable, mut new_lines) = (0, 0);
        let mut all = Vec::with_capacity(invocations.len());
        for invocation in &invocations {
            let mut frames = Vec::with_capacity(invocation.len());
            for frame in invocation {
                let known = process.codes.get_mut(&frame.code).filter(|known| known.check == frame.check);
                let Some(CodeObject { function: Some((function, code)), lines, .. }) = known else {
                    // Its code object has been freed since, as happens to those of `exec`.
                    frames.push(raw_frame(UNKNOWN_FUNCTION, 0));
                    continue;
                };
                readable += 1;
                if frame.is_shown(layout, code.first_traceable) {
                    frames.push(raw_frame(*function, line_of(lines, code, layout, frame, &mut new_lines)));
                }
            }
            all.push(frames);
        }
        process.held_bytes = process.held_bytes.saturating_add_signed(new_lines * LINE_BYTES);
        // If none can be read, these are probably no frames.
        if readable == 0 && !walked.frames.is_empty() { Err(notes::UNREADABLE) } else { Ok(all) }
    }

    /// Reads the code objects that are not known yet: from the kernel side's copies, otherwise from the process.
    fn read_new<'f>(
        &mut self,
        space: ProcessKey,
        layout: &Layout,
        frames: impl Iterator<Item = &'f Frame>,
    ) -> Result<(), Why> {
        // What is dropped is read again when a stack needs it.
        let droppable = self.processes.values().filter(|process| process.memory.is_some());
        if droppable.map(|process| process.held_bytes).sum::<usize>() > MOST_BYTES {
            self.processes.values_mut().for_each(Process::drop_codes);
        }
        let process = self.processes.entry(space).or_insert_with(|| Process::open(space));
        if process.held_bytes > MOST_BYTES_OF_PROCESS {
            process.drop_codes();
        }
        let mut wanted: Vec<(u64, u64)> =
            frames.map(|it| (it.code, it.check)).filter(|(code, check)| !process.knows(*code, *check)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        self.read_copies(space, layout, &mut wanted);
        let process = self.processes.get(&space).ok_or(notes::UNREADABLE)?;
        if process.gave_up {
            let all = wanted.iter().all(|(code, check)| process.knows(*code, *check));
            return if all { Ok(()) } else { Err(notes::NO_ANSWER) };
        }
        let mut asked = Some(space);
        for _ in 0..=GENERATIONS {
            let Some(from) = asked.filter(|_| !wanted.is_empty()) else { break };
            let found = self.ask(from, layout, &wanted)?;
            let mut left = Vec::new();
            for ((address, check), code) in wanted.into_iter().zip(found) {
                match code {
                    Ok(code) => self.keep(space, address, check, code),
                    Err(_) => left.push((address, check)),
                }
            }
            wanted = left;
            asked = self.parents.get(&from.tgid).copied();
        }
        let Some(process) = self.processes.get_mut(&space) else { return Ok(()) };
        for (address, check) in wanted {
            if !process.knows(address, check) {
                log::debug!("code object {address:#x} of process {} cannot be read", space.tgid);
                process.keep(address, check, None);
            }
        }
        Ok(())
    }

    /// Reads wanted code objects from the copies. Leaves in `wanted` what must be read in the process: what was not
    /// copied, or not whole.
    fn read_copies(&mut self, space: ProcessKey, layout: &Layout, wanted: &mut Vec<(u64, u64)>) {
        let mut left = Vec::new();
        for (address, check) in wanted.drain(..) {
            let copy = self.copies.remove(&(space, address)).filter(|copy| copy.check == check);
            let code = copy.and_then(|copy| Code::read(&*copy, layout, address, check).ok());
            if code.as_ref().is_none_or(|code| code.is_cut) {
                left.push((address, check));
            }
            if let Some(code) = code {
                self.keep(space, address, check, code);
            }
        }
        *wanted = left;
    }

    /// Reads code objects in the memory of one process.
    fn ask(
        &mut self,
        from: ProcessKey,
        layout: &Layout,
        wanted: &[(u64, u64)],
    ) -> Result<Vec<Result<Code, CodeError>>, Why> {
        let unreadable = || wanted.iter().map(|_| Err(CodeError::Unreadable)).collect();
        let Some(process) = self.processes.get_mut(&from) else { return Ok(unreadable()) };
        let Some(memory) = &process.memory else { return Ok(unreadable()) };
        reader::read(&mut self.reader, memory, layout, wanted.to_vec()).map_err(|_| {
            (process.memory, process.gave_up) = (None, true);
            notes::NO_ANSWER
        })
    }

    fn keep(&mut self, space: ProcessKey, address: u64, check: u64, code: Code) {
        let may_hold_more = |it: &&mut Process| it.memory.is_some() || it.held_bytes <= MOST_BYTES_OF_PROCESS;
        if let Some(process) = self.processes.get_mut(&space).filter(may_hold_more) {
            let number = self.names.number(&code.name, &code.file);
            process.keep(address, check, Some((number, code)));
        }
    }

    /// Drops what is kept about processes that have ended.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        self.processes.retain(|process, _| !ended.contains(process));
        self.copies.retain(|(space, _), _| !ended.contains(space));
        let pids: HashSet<u32> = ended.iter().map(|process| process.tgid).collect();
        self.parents.retain(|child, parent| !pids.contains(child) && !ended.contains(parent));
    }

    /// Numbers of the functions of all processes that are known.
    pub fn functions(&self) -> impl Iterator<Item = u32> {
        let codes = self.processes.values().flat_map(|process| process.codes.values());
        codes.filter_map(|known| known.function.as_ref().map(|(number, _)| *number))
    }

    /// Notes for the user: how many stacks show native frames instead of Python's, and why.
    pub fn notes(&self) -> Option<String> {
        self.outcomes.note()
    }
}

/// The line that a frame is at; 0 if it is unknown. Adds to `new` by how many `lines` grew.
fn line_of(lines: &mut HashMap<u32, u32>, code: &Code, layout: &Layout, frame: &Frame, new: &mut isize) -> u32 {
    let Some(offset) = frame.instruction else { return code.first_line };
    if lines.len() >= MOST_LINES {
        *new -= lines.len().cast_signed();
        lines.clear();
    }
    *lines.entry(offset).or_insert_with(|| {
        *new += 1;
        code.line(layout, offset).unwrap_or(0)
    })
}

#[cfg(test)]
mod tests {
    use heapbpf_python::Version;
    use heapbpf_unwind::raw::UnwinderKind;

    use super::reader::tests::{layout, with_codes};
    use super::*;

    #[test]
    fn a_stack_of_the_interpreters_loop_without_a_record_is_told() {
        let mut pythons = Pythons::new(Arc::default());
        let version = Version::three(11);
        let layout = Layout::of_version(version).expect("known");
        let loops = vec![100..200, 500..510];
        let runtime = Runtime { version, layout, address: 0, loops, is_alone: true, segments: vec![] };
        let stack = |file_offset| RawStack {
            frames: [RawFrame { address: 1, module: Some(ModuleId(1)), file_offset }].into(),
            unwinder: UnwinderKind::Dwarf,
            completeness: Completeness::Complete,
        };
        assert_eq!(pythons.merged(&StackRecord::default(), &stack(150), &|_| false), None);
        assert_eq!(pythons.notes(), None, "not known to be an interpreter");
        pythons.learn(ModuleId(1), Arc::new(runtime));
        assert_eq!(pythons.merged(&StackRecord::default(), &stack(300), &|_| false), None);
        assert_eq!(pythons.notes(), None, "the interpreter, but none of its programs");
        assert_eq!(pythons.merged(&StackRecord::default(), &stack(150), &|_| false), None);
        let note = pythons.notes().expect("a note");
        assert!(note.ends_with("only native frames: the interpreter was not known yet, or its frames were lost (1)"));
    }

    /// An interpreter that is [`layout`]'s.
    fn runtime() -> Runtime {
        let (version, layout) = (Version::three(12), layout());
        Runtime { version, layout, address: 0, loops: vec![], is_alone: true, segments: vec![] }
    }

    /// What the kernel side finds for a stack of these code objects.
    fn walked(codes: &[(u64, u64)]) -> Walked {
        let frame = |&(code, check): &(u64, u64)| PythonFrame { code, check, instruction: 192, flags: 0 };
        Walked { frames: codes.iter().map(frame).collect(), walk: python_walk::COMPLETE }
    }

    /// Code objects with long line tables are dropped and read again, and each stack has its names and lines.
    #[test]
    fn code_objects_are_bounded_in_bytes() {
        const DEPTH: usize = 20;
        let (memory, codes) = with_codes(100, 1 << 20);
        let (runtime, mut pythons) = (runtime(), Pythons::new(Arc::default()));
        let spaces = [1, 2, 3].map(|number| ProcessKey { tgid: u32::MAX - number, ..ProcessKey::default() });
        for space in spaces {
            pythons.processes.insert(space, Process { memory: Some(Arc::clone(&memory)), ..Process::open(space) });
            for stack in codes.chunks(DEPTH) {
                assert_eq!(pythons.frames_of(space, &walked(stack), &runtime), Ok(vec![vec![raw_frame(0, 8); DEPTH]]));
                let kept = |process: &Process| process.codes.len() << 20;
                let of_stack = DEPTH << 20;
                assert!(pythons.processes.values().all(|it| kept(it) <= MOST_BYTES_OF_PROCESS + of_stack));
                assert!(pythons.processes.values().map(kept).sum::<usize>() <= MOST_BYTES + of_stack);
            }
        }
        pythons.forget(&HashSet::from(spaces));
        assert!(pythons.processes.is_empty());
    }

    /// More than one process may hold, and then all together.
    #[test]
    fn code_objects_that_cannot_be_read_again_are_kept() {
        const DEPTH: usize = 20;
        let (memory, codes) = with_codes(60, 1 << 20);
        let (runtime, mut pythons) = (runtime(), Pythons::new(Arc::default()));
        let spaces = [1, 2].map(|number| ProcessKey { tgid: u32::MAX - number, ..ProcessKey::default() });
        let read = |pythons: &mut Pythons, space, at: usize| {
            pythons.frames_of(space, &walked(&codes[at..at + DEPTH]), &runtime)
        };
        let frames: Result<_, Why> = Ok(vec![vec![raw_frame(0, 8); DEPTH]]);
        for space in spaces {
            pythons.processes.insert(space, Process { memory: Some(Arc::clone(&memory)), ..Process::open(space) });
            assert_eq!([0, DEPTH].map(|at| read(&mut pythons, space, at)), [frames.clone(), frames.clone()]);
            let process = pythons.processes.get_mut(&space).expect("it was added");
            (process.memory, process.gave_up) = (None, true);
        }
        for space in spaces {
            assert_eq!([0, DEPTH].map(|at| read(&mut pythons, space, at)), [frames.clone(), frames.clone()]);
            assert_eq!(read(&mut pythons, space, 2 * DEPTH), Err(notes::NO_ANSWER));
        }
        // There is no space for copies of further ones.
        let (wanted, held_bytes) = (codes[2 * DEPTH], pythons.processes[&spaces[0]].held_bytes);
        let mut answer = reader::read(&mut pythons.reader, &memory, &layout(), vec![wanted]).expect("a file answers");
        pythons.keep(spaces[0], wanted.0, wanted.1, answer.remove(0).expect("it is whole"));
        assert_eq!(pythons.processes[&spaces[0]].held_bytes, held_bytes);
        pythons.forget(&HashSet::from(spaces));
        assert!(pythons.processes.is_empty());
    }
}

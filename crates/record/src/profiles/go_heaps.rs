//! Heaps of Go programs in a profile: what is in use, by the samples of the Go runtime.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_audit::Hook;
use heapbpf_go::functions::shown;
use heapbpf_go::{Bucket, Heap, Moments, Places, Unread};
use heapbpf_host::reader_thread::{NoAnswer, ProcessMemory, ReaderThread};
use heapbpf_probes::Runtime;
use heapbpf_profile::model::{Frame, GO_RUNTIME, Module, Process, Profile, Row, RowKey, SharedFrames, Stack};
use heapbpf_profile::units;
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::weight::{inclusion, poisson_inclusion};
use heapbpf_symbols::go::{GoNames, GoProgram};
use heapbpf_unwind::mapping::Mapping;
use sampler_ebpf::abi::ProcessKey;

use super::accounting::names_of;
use super::snapshot::{Detail, GoTarget};

/// The function that Go programs allocate with.
const ALLOCATOR: &str = "runtime.mallocgc";
/// Time limit for all heaps of one profile.
const LONGEST: Duration = Duration::from_secs(10);

/// Reads heaps of Go programs, and keeps names from profile to profile.
#[derive(Default)]
pub struct GoHeaps {
    reader: ReaderThread,
    names: GoNames,
    /// Processes whose memory did not answer; they are not read again.
    silent: HashSet<ProcessKey>,
}

impl GoHeaps {
    /// Adds what Go programs have in use. `keys`: the profile's first processes. Without `named`, frames have only
    /// addresses.
    pub fn add(
        &mut self,
        profile: &mut Profile,
        targets: Vec<GoTarget>,
        keys: &[ProcessKey],
        detail: Detail,
        named: bool,
    ) {
        self.silent.retain(|silent| targets.iter().any(|target| target.process == *silent));
        let deadline = Instant::now() + LONGEST;
        let mut read: BTreeMap<(u64, bool), BTreeSet<String>> = BTreeMap::new();
        for target in targets {
            let Some(index) = keys.iter().position(|key| *key == target.process) else { continue };
            match self.read(&target, deadline) {
                Ok(heap) => {
                    let rows = match detail {
                        Detail::Totals => vec![total(index, &heap)],
                        Detail::Stacks | Detail::Lifetimes => self.rows(profile, index, &target, &heap, named),
                    };
                    profile.rows.extend(rows);
                    let process = &mut profile.processes[index];
                    is_read(process);
                    let of_one_moment = heap.moments == Moments::One;
                    read.entry((heap.rate, of_one_moment)).or_default().insert(process.comm.clone());
                }
                Err(why) => is_not_read(&mut profile.processes[index], &why),
            }
        }
        let included = |((rate, of_one_moment), names)| included(rate, of_one_moment, names);
        profile.notes.extend(read.into_iter().map(included));
        profile.notes.extend(not_included(&profile.processes));
    }

    fn read(&mut self, target: &GoTarget, deadline: Instant) -> Result<Heap, String> {
        let memory = target.memory.as_ref().ok_or("its memory cannot be opened")?;
        if Instant::now() >= deadline {
            return Err("reading the heaps of other Go programs took too long".into());
        }
        let unanswered = || "its memory did not answer".to_owned();
        if self.silent.contains(&target.process) {
            return Err(unanswered());
        }
        read(&mut self.reader, memory, &target.program, &target.mapping).unwrap_or_else(|_| {
            self.silent.insert(target.process);
            Err(unanswered())
        })
    }

    /// A row for each stack.
    fn rows(&mut self, profile: &mut Profile, process: usize, target: &GoTarget, heap: &Heap, named: bool) -> Vec<Row> {
        let module = module_of(profile, target);
        let mut shared = SharedFrames::default();
        let mut sums_of: BTreeMap<&[u64], SampleSums> = BTreeMap::new();
        heap.buckets.iter().for_each(|bucket| sums_of.entry(&bucket.stack).or_default().add(&sums(bucket, heap.rate)));
        let rows = sums_of.into_iter().map(|(stack, inuse)| {
            let frames = self.frames(target, &heap.places, stack, named).into_iter();
            let in_module = |frame| shared.share(in_module(frame, module, &target.mapping));
            let stack = Stack { frames: frames.map(in_module).collect(), unwinder: GO_RUNTIME, cut: None };
            let key = RowKey {
                process,
                thread: "".into(),
                function: ALLOCATOR.into(),
                interval: heap.rate,
                stack: stack.into(),
            };
            Row { inuse, ..Row::new(key) }
        });
        rows.collect()
    }

    fn frames(&mut self, target: &GoTarget, places: &Places, stack: &[u64], named: bool) -> Vec<Frame> {
        if !named {
            let frame = |address: &u64| Frame { address: address.saturating_sub(1), ..Frame::default() };
            return stack.iter().map(frame).collect();
        }
        let mut frames: Vec<Frame> =
            stack.iter().map(|address| self.names.frame(&target.program, places, *address)).collect();
        let range = shown(frames.iter().map(|frame| frame.function.as_deref().unwrap_or_default()));
        frames.truncate(range.end);
        frames.drain(..range.start);
        frames
    }
}

/// Notes that a process was read: nothing of its Go heap is missing.
fn is_read(process: &mut Process) {
    process.missing.retain(|missing| missing.what != Runtime::Go.heap());
    if process.hook.is_none() {
        (process.hook, process.coverage) = (Some(Hook::GoRuntime), 1.0);
    }
}

fn is_not_read(process: &mut Process, why: &str) {
    for missing in process.missing.iter_mut().filter(|missing| missing.what == Runtime::Go.heap()) {
        missing.why = why.to_owned();
    }
}

/// The note about the included heaps, of programs with these names.
fn included(rate: u64, of_one_moment: bool, names: BTreeSet<String>) -> String {
    let how = match rate {
        1 => "every object".to_owned(),
        rate => format!("one object per {} on average", units::bytes(rate as f64)),
    };
    let when = if of_one_moment { "" } else { ", from different moments, because they changed while they were read" };
    format!(
        "Go's own heap is included ({}): memory in use since the process started, from the samples of Go's runtime \
         ({how}), which are up to two garbage collections old{when}; its allocations are not",
        names_of(&names)
    )
}

/// Notes about the heaps that are not included, with the reason.
fn not_included(processes: &[Process]) -> Vec<String> {
    let mut names_by_reason: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for process in processes {
        for missing in process.missing.iter().filter(|missing| missing.what == Runtime::Go.heap()) {
            names_by_reason.entry(&missing.why).or_default().insert(process.comm.clone());
        }
    }
    let note = |(why, names)| {
        let why = str::strip_prefix(why, "not included, as ").unwrap_or(why);
        format!("{} is not included ({}): {why}", Runtime::Go.heap(), names_of(&names))
    };
    names_by_reason.into_iter().map(note).collect()
}

/// The module of a program in the profile; adds it if it is new.
fn module_of(profile: &mut Profile, target: &GoTarget) -> usize {
    let GoTarget { program, mapping, .. } = target;
    let is_it = |module: &Module| module.path == program.path && module.build_id == program.build_id;
    profile.modules.iter().position(is_it).unwrap_or_else(|| {
        profile.modules.push(Module {
            path: Arc::clone(&program.path),
            build_id: program.build_id.clone(),
            start: mapping.start,
            end: mapping.end,
            file_offset: mapping.file_offset,
            reason: None,
        });
        profile.modules.len() - 1
    })
}

fn in_module(frame: Frame, module: usize, mapping: &Mapping) -> Frame {
    if !mapping.contains(frame.address) {
        return frame;
    }
    let file_offset = mapping.file_offset.checked_add(frame.address - mapping.start);
    Frame { module: Some(module), file_offset, ..frame }
}

/// The total of what a process has in use.
fn total(process: usize, heap: &Heap) -> Row {
    let stack = Arc::new(Stack { unwinder: GO_RUNTIME, ..Stack::default() });
    let mut inuse = SampleSums::default();
    heap.buckets.iter().for_each(|bucket| inuse.add(&sums(bucket, heap.rate)));
    Row { inuse, ..Row::new(RowKey::total(process, heap.rate, stack)) }
}

/// Sums of the sampled objects of a bucket. An object of n bytes is sampled with the probability 1 − e^(−n/rate), as in
/// Go; with rate 1, all objects are.
fn sums(bucket: &Bucket, rate: u64) -> SampleSums {
    let inclusion = if rate == 1 { inclusion(bucket.size, 1) } else { poisson_inclusion(bucket.size, rate) };
    let Some(inclusion) = inclusion else { return SampleSums::default() };
    let (count, size) = (bucket.objects as f64, bucket.size as f64);
    SampleSums {
        samples: bucket.objects,
        sampled_bytes: bucket.objects.saturating_mul(bucket.size),
        bytes: count * size * inclusion.weight,
        bytes_variance: count * inclusion.estimated_variance(size),
        objects: count * inclusion.weight,
        objects_variance: count * inclusion.estimated_variance(1.0),
        smallest_bytes: bucket.size,
        largest_bytes: bucket.size,
        ..SampleSums::default()
    }
}

/// How long to wait for the answer of a process.
const LONGEST_WAIT: Duration = Duration::from_secs(6);
/// Time limit for reading a heap that answers: once for all attempts to read it at one moment, and once for reading one
/// stack after the other.
const LONGEST_READ: Duration = Duration::from_secs(2);
/// Maximum number of attempts to read a heap that changes during the read, and the pause between them.
const ATTEMPTS: usize = 8;
const PAUSE: Duration = Duration::from_millis(10);

/// Reads the heap of a process, or the reason why that is not possible.
///
/// # Errors
/// [`NoAnswer`] in time: this process should not be read again.
fn read(
    reader: &mut ReaderThread,
    memory: &Arc<File>,
    program: &Arc<GoProgram>,
    mapping: &Mapping,
) -> Result<Result<Heap, String>, NoAnswer> {
    let (memory, program, mapping) = (ProcessMemory(Arc::clone(memory)), Arc::clone(program), *mapping);
    reader.ask("go", LONGEST_WAIT, move || read_heap(&memory, &program, &mapping))
}

fn read_heap(memory: &ProcessMemory, program: &GoProgram, mapping: &Mapping) -> Result<Heap, String> {
    let known = program.program().map_err(|why| why.to_string())?;
    let bias = known.bias(mapping.start, mapping.file_offset).ok_or("its code is not where its file has it")?;
    let mut heap = Err(Unread::Torn);
    let deadline = Instant::now() + LONGEST_READ;
    for _ in 0..ATTEMPTS {
        heap = Heap::read(known, bias, memory, Moments::One, deadline);
        if heap != Err(Unread::Torn) {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    if matches!(heap, Err(Unread::Torn | Unread::Slow)) {
        heap = Heap::read(known, bias, memory, Moments::OnePerStack, Instant::now() + LONGEST_READ);
    }
    heap.map_err(|why| why.to_string())
}

#[cfg(test)]
mod tests {
    use heapbpf_unwind::mapping::ModuleId;

    use super::*;

    /// `scaleHeapSample` of runtime/pprof.
    fn scaled(count: f64, bytes: f64, rate: f64) -> (f64, f64) {
        let scale = 1.0 / (1.0 - (-(bytes / count) / rate).exp());
        (count * scale, bytes * scale)
    }

    #[test]
    fn samples_stand_for_as_much_as_go_says() {
        for (size, objects, rate) in [(16, 3, 524_288), (5_000, 40, 524_288), (1 << 20, 2, 524_288), (64, 9, 100)] {
            let sums = sums(&Bucket { size, objects, stack: Vec::new() }, rate);
            let (count, bytes) = scaled(objects as f64, (objects * size) as f64, rate as f64);
            assert!((sums.objects / count - 1.0).abs() < 1e-9 && (sums.bytes / bytes - 1.0).abs() < 1e-9, "{sums:?}");
            // The variance of the number of all objects, n (1 − p) / p², with n sampled ones.
            let p = objects as f64 / count;
            let variance = objects as f64 * (1.0 - p) / (p * p);
            assert!((sums.objects_variance / variance - 1.0).abs() < 1e-6, "{sums:?}");
        }
        let all = sums(&Bucket { size: 48, objects: 5, stack: Vec::new() }, 1);
        assert_eq!((all.objects, all.bytes, all.bytes_variance), (5.0, 240.0, 0.0));
    }

    #[test]
    fn notes_name_the_programs_and_the_reason() {
        let go = |comm: &str, why: &str| Process {
            comm: comm.into(),
            missing: vec![heapbpf_audit::Missing::new(Runtime::Go.heap(), why)],
            ..Process::default()
        };
        let mut processes = vec![go("a", "not included, as x"), go("b", "y"), go("c", "y")];
        let notes = not_included(&processes);
        assert_eq!(notes, ["Go's own heap is not included (a): x", "Go's own heap is not included (b, c): y"]);
        processes.iter_mut().for_each(is_read);
        assert!(not_included(&processes).is_empty() && processes[0].hook == Some(Hook::GoRuntime));
        assert!(included(1, true, BTreeSet::from(["a".to_owned()])).contains("every object"));
        assert!(included(512 << 10, false, BTreeSet::new()).contains("per 512 KiB"));
    }

    fn nothing() -> (Arc<File>, Arc<GoProgram>, Mapping) {
        let file = Arc::new(File::open("/proc/self/exe").expect("it is there"));
        let program = GoProgram::new(ModuleId(0), "/exe".into(), None, Arc::clone(&file));
        let mapping = Mapping { start: 0x1000, end: 0x2000, file_offset: 0, module: ModuleId(0), since_ns: 0 };
        (file, Arc::new(program), mapping)
    }

    #[test]
    fn a_program_that_is_not_gos_is_an_answer() {
        let (memory, program, mapping) = nothing();
        let answer = read(&mut ReaderThread::default(), &memory, &program, &mapping).expect("an answer");
        assert!(answer.is_err_and(|why| why.contains("table of functions")));
    }
}

//! Runs displaced instructions, and the ones behind them that are copied as well, both where they were and where a plan
//! puts them, from the same registers, flags and memory. Afterwards everything must be equal, and control must have
//! gone to the same place.
//!
//! There is no code except these instructions: they lead to breakpoints. A child process, stopped before and after,
//! runs them. A fault is as good an end as any other, if it is the same one.

#![cfg(target_arch = "x86_64")]

mod batch;
mod made_up;
mod traced;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use heapbpf_elf::{Elf, ElfFile, Symbols};
use heapbpf_inline::abi::{MAX_FUNCTIONS, NO_ARGUMENT, TEXT_BYTES};
use heapbpf_inline::{Code, Entries, Inputs, Plan, Settings, Text, WantedFunction};
use iced_x86::{FlowControl, Instruction, Mnemonic};
use sampler_ebpf::abi::Site;

use batch::{Batch, Relocated, left_out};
use traced::{Area, Child, State, Stop};

/// Addresses of the code and of the data that it refers to: as far apart as in a library.
const TEXT: u64 = 0x2000_0000_0000;
const TEXT_SPAN: usize = 16 << 20;
/// Address of the blob: far away, but within reach.
const BLOB: u64 = TEXT - (1 << 30);
const STACK: u64 = 0x2100_0000_0000;
const STACK_BYTES: usize = 16 << 10;
/// Memory that most registers point into.
const SCRATCH: u64 = 0x2200_0000_0000;
const SCRATCH_BYTES: usize = 16 << 10;
/// Bytes that are compared where an instruction refers to.
const REFERRED_BYTES: usize = 64;
const BREAKPOINT: u8 = 0xcc;
/// Message if other memory was written.
const WRITTEN: &str = "something was written where no instruction refers to";

/// Libraries whose entries are run; those that are not installed are left out.
const LIBRARIES: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu/libc.so.6",
    "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
    "/usr/lib/x86_64-linux-gnu/libcrypto.so.3",
    "/usr/lib/x86_64-linux-gnu/libm.so.6",
    "/usr/bin/python3",
];
/// Environment variable for the number of made-up functions.
const FUNCTIONS: &str = "HEAPBPF_TEST_PROLOGUES";
/// Environment variable for the seed that selects them.
const SEED: &str = "HEAPBPF_TEST_SEED";

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

/// A function of a batch, whose displaced instructions are run.
struct Original {
    address: u64,
    bytes: Vec<u8>,
}

/// Counts for the report.
#[derive(Debug, Default)]
struct ReportCounts {
    functions: u64,
    /// Functions that were run with more than the displaced instructions, and the number of such instructions.
    with_copies: [u64; 2],
    refused: BTreeMap<String, u64>,
    /// Runs by kind of end.
    ends: BTreeMap<&'static str, u64>,
    /// Functions that were not run.
    left_out: BTreeMap<&'static str, u64>,
}

struct Machine {
    text: Area,
    blob: Area,
    stack: Area,
    scratch: Area,
    child: Child,
    at_rest: State,
    /// Random words; memory begins with a piece of them.
    words: Vec<u8>,
    /// Dropped last.
    _only: MutexGuard<'static, ()>,
}

/// Held by the only machine of this process, because all machines use the same addresses.
static ONLY: Mutex<()> = Mutex::new(());

impl Machine {
    fn new() -> Self {
        let only = ONLY.lock().unwrap_or_else(PoisonError::into_inner);
        let (text, blob) = (Area::map(TEXT, TEXT_SPAN), Area::map(BLOB, TEXT_BYTES as usize));
        let (stack, scratch) = (Area::map(STACK, STACK_BYTES), Area::map(SCRATCH, SCRATCH_BYTES));
        let child = Child::fork(&[&text, &blob]);
        let at_rest = child.state();
        Self { text, blob, stack, scratch, child, at_rest, words: words(256 << 10), _only: only }
    }

    /// Random registers: mostly pointers into the scratch memory, as arguments are.
    fn registers(&self) -> State {
        let mut state = self.at_rest;
        let value = || match fastrand::u8(..10) {
            0..6 => SCRATCH + 8 * fastrand::u64(..SCRATCH_BYTES as u64 / 8),
            6 | 7 => fastrand::u64(..64),
            8 => fastrand::u64(..),
            _ => fastrand::i64(-64..0).cast_unsigned(),
        };
        let registers = &mut state.registers;
        for register in [
            &mut registers.rax,
            &mut registers.rbx,
            &mut registers.rcx,
            &mut registers.rdx,
            &mut registers.rsi,
            &mut registers.rdi,
            &mut registers.rbp,
            &mut registers.r8,
            &mut registers.r9,
            &mut registers.r10,
            &mut registers.r11,
            &mut registers.r12,
            &mut registers.r13,
            &mut registers.r14,
            &mut registers.r15,
        ] {
            *register = value();
        }
        // Carry, parity, adjust, zero, sign, overflow; and the bit that is always set.
        registers.eflags = 0x202 | fastrand::u64(..) & 0x8d5;
        registers.rsp = STACK + STACK_BYTES as u64 - 2048 - 8;
        registers.fs_base = SCRATCH + SCRATCH_BYTES as u64 / 2;
        registers.gs_base = registers.fs_base;
        // No system call is to be restarted.
        registers.orig_rax = u64::MAX;
        state.vectors.xmm_space.fill_with(|| fastrand::u32(..));
        state
    }

    fn any(&self, bytes: usize) -> Vec<u8> {
        let from = 8 * fastrand::usize(..(self.words.len() - bytes) / 8);
        self.words[from..from + bytes].to_vec()
    }

    fn load(&mut self, memory: &Memory) {
        self.stack.bytes().copy_from_slice(&memory.stack);
        self.scratch.bytes().copy_from_slice(&memory.scratch);
        for (address, bytes) in &memory.referred {
            self.text.at(*address, bytes.len()).copy_from_slice(bytes);
        }
    }

    fn saved(&mut self, referred: &[u64]) -> Memory {
        let text = &mut self.text;
        let referred = referred.iter().map(|address| (*address, text.at(*address, REFERRED_BYTES).to_vec())).collect();
        Memory { stack: self.stack.bytes().to_vec(), scratch: self.scratch.bytes().to_vec(), referred }
    }
}

#[derive(PartialEq, Eq)]
struct Memory {
    stack: Vec<u8>,
    scratch: Vec<u8>,
    /// Bytes in the text's data, by address.
    referred: Vec<(u64, Vec<u8>)>,
}

/// Bytes that are mostly addresses of the scratch memory.
fn words(bytes: usize) -> Vec<u8> {
    let word = |_| match fastrand::u8(..4) {
        0 => fastrand::u64(..),
        _ => SCRATCH + fastrand::u64(..SCRATCH_BYTES as u64),
    };
    (0..bytes / 8).map(word).flat_map(u64::to_le_bytes).collect()
}

fn plan(originals: &[Original]) -> Plan {
    let entries = Entries {
        allocation_ends_countdown: 0,
        allocation: 0,
        reallocation: 0,
        free: 0,
        refused: 0,
        claim: 0,
        draw: 0,
        site_result: 0,
        site_freeing: 0,
        site_reallocating: 0,
        site_unseen: 0,
        framed: 0,
        framed_end: 0,
    };
    let code = Code { bytes: &[0x90; 64], entries };
    let site =
        Site { times_argument: NO_ARGUMENT, old_argument: NO_ARGUMENT, out_argument: NO_ARGUMENT, ..Site::default() };
    let wanted = |original: &Original| {
        let (address, length) = (original.address, original.bytes.len() as u64);
        WantedFunction { name: "f", address, length, site, twin: None }
    };
    let wanted: Vec<WantedFunction<'_>> = originals.iter().map(wanted).collect();
    let texts: Vec<Text<'_>> =
        originals.iter().map(|original| Text { address: original.address, bytes: &original.bytes }).collect();
    let none = HashMap::new();
    let settings = Settings { criterion: 0, set_log2: 12, has_rdrand: false, file: [0; 3] };
    let inputs = Inputs {
        texts: &texts,
        wanted: &wanted,
        inner: &[],
        stubs: &none,
        slots: &none,
        objects: &[],
        jumps: None,
        base: BLOB,
    };
    Plan::new(&code, &settings, &inputs).expect("the first function can be hooked")
}

/// Everything that must be equal at the end: registers, and where control went.
fn outcome(state: &State, stop: Stop) -> ([u64; 18], Vec<u32>, Stop) {
    let r = &state.registers;
    let general = [
        r.rax,
        r.rbx,
        r.rcx,
        r.rdx,
        r.rsi,
        r.rdi,
        r.rbp,
        r.rsp,
        r.r8,
        r.r9,
        r.r10,
        r.r11,
        r.r12,
        r.r13,
        r.r14,
        r.r15,
        // Without the flag that the processor sets when it resumes after a fault.
        r.eflags & !0x1_0000,
        r.rip,
    ];
    (general, state.vectors.xmm_space.to_vec(), stop)
}

fn end(stop: Stop, rip: u64) -> &'static str {
    match stop.signal {
        libc::SIGTRAP => "at a breakpoint",
        libc::SIGSEGV if stop.address == rip => "where nothing can be executed",
        libc::SIGSEGV => "a fault",
        libc::SIGILL => "an instruction that the processor does not have",
        _ => "another signal",
    }
}

/// Runs a function's displaced instructions in both places.
fn compare(machine: &mut Machine, batch: &Batch, function: &Relocated, seen: &mut ReportCounts) {
    let Relocated { at, instructions, .. } = function;
    let reached = batch.reached(function.entry());
    let is_referred =
        |instruction: &&Instruction| instruction.is_ip_rel_memory_operand() && instruction.mnemonic() != Mnemonic::Lea;
    let referred: BTreeSet<u64> = reached.iter().filter(is_referred).map(Instruction::ip_rel_memory_address).collect();
    let referred: Vec<u64> = referred.into_iter().collect();
    let entry = function.entry();
    let mut start = machine.registers();
    let before =
        Memory { stack: machine.any(STACK_BYTES), scratch: machine.any(SCRATCH_BYTES), ..machine.saved(&referred) };
    let mut run = |from: u64| {
        start.registers.rip = from;
        machine.load(&before);
        let (state, stop) = machine.child.run(&start);
        let memory = machine.saved(&referred);
        (state, stop, memory)
    };
    let (original, stop, memory) = run(entry);
    let (mut moved, moved_stop, moved_memory) = run(*at);
    machine.load(&before);
    // A fault in the middle: at the same instruction, elsewhere.
    let rip = moved.registers.rip;
    moved.registers.rip = batch.places.get(&rip).copied().unwrap_or(rip);
    let is_call =
        |instruction: &Instruction| matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall);
    if reached.iter().any(|instruction| is_call(instruction) && instruction.ip() == original.registers.rip) {
        // The stack pointer has moved already.
        assert_eq!(stop.signal, moved_stop.signal);
        *seen.ends.entry("a fault of a call, before it pushes").or_default() += 1;
        return;
    }
    *seen.ends.entry(end(stop, original.registers.rip)).or_default() += 1;
    let (expected, found) = (outcome(&original, stop), outcome(&moved, moved_stop));
    let listing: Vec<String> = instructions.iter().map(ToString::to_string).collect();
    assert!(expected == found, "{entry:#x} {listing:?}:\n{expected:x?}\nin the blob ({rip:#x}):\n{found:x?}");
    assert!(memory == moved_memory, "{entry:#x} {listing:?}: other bytes in memory");
}

/// Relocates the functions, and runs each `times` times in both places.
fn compare_batch(machine: &mut Machine, originals: &[Original], times: usize, seen: &mut ReportCounts) {
    let plan = plan(originals);
    machine.blob.bytes().copy_from_slice(&plan.file);
    let batch = Batch::of(&plan, originals);
    seen.functions += originals.len() as u64;
    for (_, refusal) in &plan.refused {
        *seen.refused.entry(refusal.to_string()).or_default() += 1;
    }
    let displaced = |original: &Original| {
        let length = batch.hooked.get(&original.address)?.instructions.iter().map(Instruction::len).sum();
        Some((original.address, original.bytes[..length].to_vec()))
    };
    let displaced: Vec<(u64, Vec<u8>)> = originals.iter().filter_map(displaced).collect();
    for (address, bytes) in &displaced {
        machine.text.at(*address, bytes.len()).copy_from_slice(bytes);
    }
    for function in batch.hooked.values() {
        if let Some(why) = left_out(&batch, &batch.reached(function.entry())) {
            *seen.left_out.entry(why).or_default() += 1;
            continue;
        }
        let copied = function.copied as u64;
        seen.with_copies = [seen.with_copies[0] + u64::from(copied > 0), seen.with_copies[1] + copied];
        (0..times).for_each(|_| compare(machine, &batch, function, seen));
    }
    for (address, bytes) in &displaced {
        machine.text.at(*address, bytes.len()).fill(BREAKPOINT);
    }
}

/// A function that can be hooked whatever else is in its batch.
fn plain(address: u64) -> Original {
    Original { address, bytes: vec![0x41, 0x54, 0x55, 0x53, 0x48, 0x89, 0xfb, 0xc3] }
}

#[test]
fn made_up_prologues_do_the_same_elsewhere() {
    fastrand::seed(setting(SEED, 1));
    let (mut machine, mut seen) = (Machine::new(), ReportCounts::default());
    let (code, data) = (TEXT..TEXT + (8 << 20), TEXT + (8 << 20)..TEXT + TEXT_SPAN as u64);
    machine.text.at(code.start, (code.end - code.start) as usize).fill(BREAKPOINT);
    let random = words((data.end - data.start) as usize);
    machine.text.at(data.start, random.len()).copy_from_slice(&random);
    let pristine = machine.text.bytes().to_vec();
    for _ in 0..setting(FUNCTIONS, 4000).div_ceil(MAX_FUNCTIONS as u64) {
        let first = TEXT + (4 << 20) + fastrand::u64(..1 << 20);
        let addresses: Vec<u64> =
            (0..MAX_FUNCTIONS as u64).map(|index| first + index * made_up::BYTES as u64).collect();
        let mut originals = vec![plain(addresses[0])];
        for address in &addresses[1..] {
            let mut bytes = made_up::function(*address, &data, &addresses);
            bytes.resize(made_up::BYTES, BREAKPOINT);
            originals.push(Original { address: *address, bytes });
        }
        compare_batch(&mut machine, &originals, 3, &mut seen);
    }
    assert!(machine.text.bytes() == pristine, "{WRITTEN}");
    println!("{seen:#?}");
    let runs: u64 = seen.ends.values().sum();
    assert!(runs > seen.functions, "most can be relocated");
    assert!(seen.ends.get("at a breakpoint").is_some_and(|runs| *runs > seen.functions));
}

/// The functions that a file exports, at addresses from [`TEXT`] on, and the ranges of its code.
fn exported(path: &Path) -> Option<(Vec<Original>, Vec<Range<u64>>)> {
    let image = std::fs::read(path).ok()?;
    let elf = Elf::read(&image).ok()?;
    let lowest = elf.segments.iter().filter(|segment| segment.is_loaded()).map(|segment| segment.address).min()?;
    let bias = TEXT - lowest;
    let mut symbols = Symbols::default();
    symbols.add_dynamic(&image, &ElfFile::parse(image.as_slice()).ok()?);
    let mut found = BTreeMap::new();
    for (_, symbol) in symbols.iter() {
        let Some(offset) = elf.offset_of_address(symbol.address) else { continue };
        let length = symbol.size.min(4096) as usize;
        if let Some(bytes) = image.get(offset as usize..offset as usize + length) {
            found.insert(bias + symbol.address, bytes.to_vec());
        }
    }
    let originals = found.into_iter().map(|(address, bytes)| Original { address, bytes }).collect();
    let executable = elf.segments.iter().filter(|segment| segment.is_executable());
    let code = executable.map(|segment| bias + segment.addresses().start..bias + segment.addresses().end).collect();
    Some((originals, code))
}

mod long {
    use super::*;

    #[test]
    fn entries_of_real_libraries_do_the_same_elsewhere() {
        fastrand::seed(setting(SEED, 1));
        let mut all = 0;
        for path in LIBRARIES {
            let Some((originals, code)) = exported(Path::new(path)) else {
                println!("{path} is not there");
                continue;
            };
            let (mut machine, mut seen) = (Machine::new(), ReportCounts::default());
            let data = words(TEXT_SPAN);
            machine.text.bytes().copy_from_slice(&data);
            for range in &code {
                machine.text.at(range.start, (range.end - range.start) as usize).fill(BREAKPOINT);
            }
            let end = TEXT + TEXT_SPAN as u64 - 64;
            machine.text.at(end, 64).fill(BREAKPOINT);
            let pristine = machine.text.bytes().to_vec();
            let mut originals = originals.into_iter().peekable();
            while originals.peek().is_some() {
                let batch: Vec<Original> =
                    [plain(end)].into_iter().chain(originals.by_ref().take(MAX_FUNCTIONS - 1)).collect();
                compare_batch(&mut machine, &batch, 1, &mut seen);
            }
            assert!(machine.text.bytes() == pristine, "{path}: {WRITTEN}");
            println!("{path}: {seen:#?}");
            all += seen.ends.values().sum::<u64>();
        }
        assert!(all > 1000, "the C library alone has as many: {all}");
    }
}

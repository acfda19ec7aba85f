//! Random walks: they start at random instructions of real libraries, with made-up registers and a made-up stack. Each
//! step is compared with framehop's.
//!
//! The made-up stack holds return addresses into the libraries, addresses of the stack, and addresses where nothing is
//! mapped. A walk that arrives at one of the last kind ends there, and the stack pointer and the frame pointer are
//! compared as well. Every return address is different, so equal ones were read in the same place.
//!
//! Both must agree unless [`excuse`] says why framehop differs by design.

mod code;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use framehop::{CacheNative, FrameAddress, MayAllocateDuringUnwind, UnwindRegsNative, Unwinder as _};
use gimli::{CfaRule, RegisterRule, X86_64};
use heapbpf_testing::own_process::{Library, Random};
use heapbpf_unwind::dwarf::{Capture, Flaws, Limits, Unwinder};
use heapbpf_unwind::memory::{Memory, word};
use heapbpf_unwind::raw::{Completeness, RawFrame, RawStack, Reason, SpaceView};
use heapbpf_unwind::runtime::{Left, RuntimeCode, RuntimeFrame};
use heapbpf_unwind::{AddressBits, ProcessKey, Registers};

use code::{Module, Modules, Theirs};

/// Libraries with code from many compilers and languages. Those that are not installed are left out.
const LIBRARIES: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu/libc.so.6",
    "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
    "/usr/lib/x86_64-linux-gnu/libcrypto.so.3",
    "/usr/lib/x86_64-linux-gnu/libgcc_s.so.1",
    "/usr/lib64/ld-linux-x86-64.so.2",
    "/usr/bin/python3",
];
/// Sets the number of walks.
const WALKS: &str = "HEAPBPF_TEST_WALKS";
/// Sets the random seed.
const SEED: &str = "HEAPBPF_TEST_SEED";

/// Address of the made-up stacks, and an address range where nothing is mapped.
const STACK: u64 = 0x7ffc_0000_0000;
const NOWHERE: u64 = 0x1000_0000_0000;
const STACK_WORDS: usize = 32 << 10;
/// Size of the stack that a walk can read, bytes.
const COPY_BYTES: usize = 64 << 10;
/// Number of walks per stack.
const WALKS_OF_STACK: usize = 500;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

fn stack(modules: &Modules, random: &mut Random) -> Vec<u8> {
    let word = |index: usize| {
        let above = (STACK_WORDS - index).min(1024);
        match random.below(100) {
            0..60 => modules.any_code(random) + 1,
            60..85 => STACK + 8 * (index + random.below(above)) as u64,
            85..97 => NOWHERE + 16 * random.next_u64().rotate_right(32) as u32 as u64 + 1,
            97 => 0,
            _ => random.next_u64() >> random.below(64),
        }
        .to_le_bytes()
    };
    (0..STACK_WORDS).flat_map(word).collect()
}

fn registers(modules: &Modules, random: &mut Random) -> Registers {
    let at = random.below(STACK_WORDS - COPY_BYTES / 8);
    let fp = match random.below(10) {
        0 => random.next_u64() >> random.below(64),
        1 => STACK + 8 * random.below(at + 1) as u64,
        2..5 => STACK + 8 * (at + random.below(8)) as u64,
        _ => STACK + 8 * (at + random.below(512)) as u64,
    };
    Registers { ip: modules.any_code(random), sp: STACK + 8 * at as u64, fp, lr: 0 }
}

/// Ends walks at addresses where nothing is mapped, and records their registers.
#[derive(Default)]
struct Nowhere(Option<RuntimeFrame>);

impl RuntimeCode for Nowhere {
    fn leave(&mut self, _: &SpaceView, at: RuntimeFrame, _: &mut dyn Memory, _: &mut Vec<RawFrame>) -> Left {
        if at.ip == 0 {
            return Left::NotMine;
        }
        self.0 = Some(at);
        Left::Stuck("nowhere")
    }
}

/// What follows a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// A caller, with its stack pointer and frame pointer where they are known.
    Caller { ip: u64, sp: Option<u64>, fp: Option<u64> },
    /// The thread's entry.
    Entry,
    /// Unknown.
    Stuck,
}

impl Next {
    /// Returns the result of our walk after its frame `index`.
    fn ours(modules: &Modules, stack: &RawStack, index: usize, nowhere: Option<RuntimeFrame>) -> Self {
        if let Some(RawFrame { address, .. }) = stack.frames.get(index + 1) {
            let before = address.saturating_sub(1);
            let is_signal = modules.at(before).and_then(|module| module.with_row(before, |_, is_signal| is_signal));
            // The address of a signal frame is the return address itself.
            let ip = if is_signal == Some(true) { *address } else { address + 1 };
            return Self::Caller { ip, sp: None, fp: None };
        }
        match (&stack.completeness, nowhere) {
            (Completeness::Truncated(Reason::Runtime(_)), Some(RuntimeFrame { ip, sp, fp })) => {
                Self::Caller { ip, sp: Some(sp), fp }
            }
            // framehop treats a return address of zero as the entry.
            (Completeness::Complete | Completeness::Truncated(Reason::NullReturnAddress), _) => Self::Entry,
            _ => Self::Stuck,
        }
    }

    fn agrees_with(self, theirs: Self) -> bool {
        let known = |ours: Option<u64>, theirs| ours.is_none() || ours == theirs;
        match (self, theirs) {
            (Self::Caller { ip, sp, fp }, Self::Caller { ip: their_ip, sp: their_sp, fp: their_fp }) => {
                // If the stack pointer is known, so is everything that our walk knows about the frame pointer.
                ip == their_ip && known(sp, their_sp) && (sp.is_none() || fp == their_fp)
            }
            _ => self == theirs,
        }
    }
}

/// The state before a step.
#[derive(Clone, Copy, Debug)]
struct At {
    /// An address in the function.
    lookup: u64,
    is_first: bool,
    sp: u64,
    fp: u64,
}

/// Whether a row cannot restore the caller's frame pointer from the known part of the stack. framehop then fails, or
/// keeps the callee's.
fn loses_frame_pointer(
    row: &gimli::UnwindTableRow<usize>,
    at: At,
    read: &mut impl FnMut(u64) -> Result<u64, ()>,
) -> bool {
    match (row.register(X86_64::RBP), row.cfa()) {
        (None | Some(RegisterRule::SameValue), _) => false,
        (Some(RegisterRule::Offset(saved)), CfaRule::RegisterAndOffset { register, offset }) => {
            let base = if *register == X86_64::RSP { at.sp } else { at.fp };
            read(base.wrapping_add_signed(*offset).wrapping_add_signed(saved)).is_err()
        }
        _ => true,
    }
}

/// Why framehop may differ at this step. `lost`: this step or an earlier one [loses the frame
/// pointer](loses_frame_pointer).
fn excuse(module: Option<&Module>, at: At, lost: bool) -> Option<&'static str> {
    let by_row = |row: &gimli::UnwindTableRow<usize>, is_signal: bool| {
        let known = |rule: Option<&RegisterRule<usize>>| {
            matches!(rule, None | Some(RegisterRule::SameValue | RegisterRule::Offset(_)))
        };
        let by_frame_pointer = |register: &gimli::Register| *register == X86_64::RBP;
        match row.cfa() {
            _ if is_signal => Some("the frame of a signal"),
            CfaRule::Expression(_) => Some("the canonical frame address is an expression"),
            CfaRule::RegisterAndOffset { register, .. } if ![X86_64::RSP, X86_64::RBP].contains(register) => {
                Some("by a register that framehop does not follow")
            }
            _ if matches!(row.register(X86_64::RA), Some(RegisterRule::Register(_))) => {
                Some("the return address is in a register, as in vfork")
            }
            _ if !known(row.register(X86_64::RBP).as_ref()) => Some("a rule for the frame pointer that is no place"),
            _ if row.register(X86_64::RSP).is_some() => Some("a rule for the stack pointer"),
            CfaRule::RegisterAndOffset { register, .. } if by_frame_pointer(register) && at.fp == 0 => {
                Some("a frame pointer of zero, which is an end to framehop")
            }
            CfaRule::RegisterAndOffset { register, offset }
                if by_frame_pointer(register) && at.is_first && at.fp.wrapping_add_signed(*offset) <= at.sp =>
            {
                Some("the first frame goes backwards, which framehop follows")
            }
            _ if lost => Some("the frame pointer is not to be told from the copy"),
            _ => None,
        }
    };
    match module.and_then(|module| module.with_row(at.lookup, by_row)) {
        Some(excuse) => excuse,
        None => Some("no call frame information"),
    }
}

/// Counts of steps.
#[derive(Debug, Default)]
struct StepCounts {
    steps: u64,
    equal: u64,
    /// Steps after which all registers were compared.
    whole: u64,
    entries: u64,
    stuck: u64,
    excused: BTreeMap<&'static str, u64>,
}

/// Compares one walk.
fn compare(
    (modules, theirs, cache): (&Modules, &Theirs, &mut CacheNative<MayAllocateDuringUnwind>),
    (registers, copy): (&Registers, &[u8]),
    (stack, nowhere): (&RawStack, Option<RuntimeFrame>),
    seen: &mut StepCounts,
) {
    let in_copy = |address: u64| address.checked_sub(registers.sp).and_then(|at| u32::try_from(at).ok());
    let mut read = |address: u64| in_copy(address).and_then(|at| word(copy, at)).ok_or(());
    let mut state = UnwindRegsNative::new(registers.ip, registers.sp, registers.fp);
    let mut address = FrameAddress::from_instruction_pointer(registers.ip);
    let mut lost = false;
    for index in 0..stack.frames.len() {
        let lookup = address.address_for_lookup();
        let at = At { lookup, is_first: index == 0, sp: state.sp(), fp: state.bp() };
        let module = modules.at(lookup);
        let loses = |module: &Module| module.with_row(lookup, |row, _| loses_frame_pointer(row, at, &mut read));
        lost |= module.and_then(loses).unwrap_or(false);
        let next = match theirs.unwind_frame(address, &mut state, cache, &mut read) {
            // A return address of zero.
            Ok(None | Some(0)) => Next::Entry,
            Ok(Some(ip)) => Next::Caller { ip, sp: Some(state.sp()), fp: Some(state.bp()) },
            Err(_) => Next::Stuck,
        };
        let ours = Next::ours(modules, stack, index, nowhere);
        seen.steps += 1;
        if !ours.agrees_with(next) {
            let Some(excuse) = excuse(module, at, lost) else {
                let path = module.map_or("?", |module| &module.path);
                let stated = lookup - module.map_or(0, |module| module.bias);
                panic!("step {index} at {stated:#x} of {path}: {ours:x?}, framehop {next:x?} from {at:x?}; {stack:x?}");
            };
            *seen.excused.entry(excuse).or_default() += 1;
            return;
        }
        seen.equal += 1;
        match ours {
            Next::Caller { ip, sp: None, .. } => address = FrameAddress::from_return_address(ip).expect("not zero"),
            Next::Caller { .. } => seen.whole += 1,
            Next::Entry => seen.entries += 1,
            Next::Stuck => seen.stuck += 1,
        }
    }
}

#[test]
fn random_walks_agree_with_framehop() {
    let own = std::env::current_exe().expect("a path");
    let compiled: Vec<Library> = [&["-O0"][..], &["-O2", "-fomit-frame-pointer"], &["-O2", "-mstackrealign"]]
        .into_iter()
        .filter_map(|flags| Library::compile(include_str!("truth.c"), flags))
        .collect();
    let compiled: Vec<PathBuf> = compiled.iter().map(|library| library.path.clone()).collect();
    let paths = LIBRARIES.iter().map(Path::new).chain([own.as_path()]).chain(compiled.iter().map(PathBuf::as_path));
    let mut modules = Modules::read(paths);
    let mappings = modules.mappings();
    let (theirs, mut cache) = (modules.framehop(), CacheNative::new());
    let space = SpaceView { key: ProcessKey::default(), generation: Some(1), mappings: &mappings };
    let mut unwinder = Unwinder::new(Limits::default(), AddressBits::default());
    let mut random = Random(setting(SEED, 1));
    let (walks, mut seen, mut words) = (setting(WALKS, 6000) as usize, StepCounts::default(), Vec::new());
    for walk in 0..walks {
        if walk % WALKS_OF_STACK == 0 {
            words = stack(&modules, &mut random);
        }
        let registers = registers(&modules, &mut random);
        let copy = &words[(registers.sp - STACK) as usize..][..COPY_BYTES];
        let mut nowhere = Nowhere::default();
        let capture = Capture { registers: &registers, stack: copy.into(), in_flight: &[], flaws: Flaws::default() };
        let stack = unwinder.unwind_with(&mut modules, &mut nowhere, &space, capture);
        compare((&modules, &theirs, &mut cache), (&registers, copy), (&stack, nowhere.0), &mut seen);
    }
    let paths: Vec<(&str, usize)> = modules.0.iter().map(|module| (&*module.path, module.functions.len())).collect();
    println!("{walks} walks in {paths:?}: {seen:#?}");
    let excused: u64 = seen.excused.values().sum();
    assert!(seen.steps >= 3 * walks as u64 / 2, "walks are long enough to say something: {seen:?}");
    assert!(seen.whole * 5 > walks as u64, "many end where all registers are compared: {seen:?}");
    assert!(excused * 20 < seen.steps, "framehop agrees in all but a twentieth of the steps: {seen:?}");
}

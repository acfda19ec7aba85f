//! Plans for a made-up allocator, with a shared code of no-ops.

use iced_x86::{Code as Op, Decoder, DecoderOptions, Instruction};
use zerocopy::FromBytes as _;

use super::*;
use crate::abi::{CODE, CRITERION_ALLOCATIONS, CRITERION_BYTES, Entries, HEADER, Header, MAX_SET_LOG2};

const TEXT: u64 = 0x5555_0000_1000;
const BASE: u64 = 0x5554_f000_0000;
const SETTINGS: Settings = Settings { criterion: CRITERION_BYTES, set_log2: 12, has_rdrand: false, file: [8, 9, 10] };
const PROLOGUE: [u8; 8] = [0x41, 0x54, 0x55, 0x53, 0x48, 0x89, 0xfb, 0x90];

fn entries() -> Entries {
    Entries {
        allocation_ends_countdown: 0,
        allocation: 16,
        reallocation: 32,
        free: 48,
        refused: 64,
        claim: 80,
        draw: 96,
        site_result: 104,
        site_freeing: 112,
        site_reallocating: 120,
        site_unseen: 128,
        framed: 136,
        framed_end: 150,
    }
}

/// Functions 64 bytes apart, with a common prologue: malloc, realloc, free, calloc, posix_memalign, operator new and
/// its twin, and a reallocation that throws.
struct TestFunctions {
    text: Vec<u8>,
    wanted: Vec<WantedFunction<'static>>,
    inner: Vec<[u64; 2]>,
    stubs: HashMap<u64, usize>,
    slots: HashMap<u64, usize>,
}

fn at(index: u64) -> u64 {
    TEXT + 64 * index
}

fn made() -> TestFunctions {
    let none = NO_ARGUMENT;
    let site = |size_argument, times_argument, old_argument, out_argument, flags| Site {
        function: 77,
        size_argument,
        times_argument,
        old_argument,
        out_argument,
        flags,
        ..Site::default()
    };
    let functions = [
        ("malloc", site(0, none, none, none, 0)),
        ("realloc", site(1, none, 0, none, SITE_ZERO_FREES)),
        ("free", site(none, none, 0, none, SITE_FREES)),
        ("calloc", site(1, 0, none, none, 0)),
        ("posix_memalign", site(2, none, none, 0, 0)),
        ("operator new", site(0, none, none, none, SITE_THROWS)),
        ("operator new(nothrow)", site(0, none, none, none, 0)),
        ("mi_new_realloc", site(1, none, 0, none, SITE_THROWS)),
    ];
    let mut text = vec![0xc3; 64 * 16];
    let wanted = functions.into_iter().enumerate().map(|(i, (name, site))| {
        text[64 * i..][..8].copy_from_slice(&PROLOGUE);
        let twin = (name == "operator new").then_some((6, TwinArguments::WithReference(1)));
        WantedFunction { name, address: at(i as u64), length: 64, site, twin }
    });
    let wanted = wanted.collect();
    TestFunctions { text, wanted, inner: Vec::new(), stubs: HashMap::new(), slots: HashMap::new() }
}

impl TestFunctions {
    fn write(&mut self, address: u64, bytes: &[u8]) {
        self.text[(address - TEXT) as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Writes an instruction that consists of an opcode and a distance.
    fn branch(&mut self, from: u64, opcode: &[u8], to: u64) {
        let distance = to.wrapping_sub(from + opcode.len() as u64 + 4) as u32;
        self.write(from, &[opcode, &distance.to_le_bytes()].concat());
    }

    fn plan_with(&self, settings: &Settings) -> Result<Plan, BuildError> {
        let bytes = vec![0x90; 256];
        let code = Code { bytes: &bytes, entries: entries() };
        let texts = [Text { address: TEXT, bytes: &self.text }];
        let Self { wanted, inner, stubs, slots, .. } = self;
        Plan::new(
            &code,
            settings,
            &Inputs { texts: &texts, wanted, inner, stubs, slots, objects: &[], jumps: None, base: BASE },
        )
    }

    fn plan(&self) -> Plan {
        self.plan_with(&SETTINGS).unwrap()
    }
}

fn function(plan: &Plan, index: usize) -> Function {
    let at = HEADER as usize + size_of::<Header>() + index * size_of::<Function>();
    Function::read_from_prefix(&plan.file[at..]).unwrap().0
}

/// Instructions at an offset of the blob.
fn decoded(plan: &Plan, offset: u64, count: usize) -> Vec<Instruction> {
    let bytes = &plan.file[offset as usize..];
    Decoder::with_ip(64, bytes, BASE + offset, DecoderOptions::NONE).into_iter().take(count).collect()
}

fn patch_at(plan: &Plan, address: u64) -> Instruction {
    let patch = plan.patches.iter().find(|p| p.address == address).expect("a patch");
    Decoder::with_ip(64, &patch.after, address, DecoderOptions::NONE).decode()
}

#[test]
fn each_entry_leads_to_its_stub_and_back() {
    let plan = made().plan();
    assert_eq!(plan.refused, [(7, Refusal::ThrowingReallocation)]);
    assert_eq!(plan.hooked, [0, 1, 2, 3, 4, 5, 6]);
    for index in 0..7 {
        let stub = BASE + STUBS + index * STUB_BYTES;
        assert_eq!(patch_at(&plan, at(index)).near_branch_target(), stub);
        let described = function(&plan, index as usize);
        assert_eq!((described.number, described.displaced), (77 | (index as u32) << 16, 7));
        // The displaced instructions, and those that follow up to the end.
        let original = decoded(&plan, u64::from(described.original), 6);
        assert_eq!(original[0].code(), Op::Push_r64);
        assert_eq!([original[4].code(), original[5].code()], [Op::Nopd, Op::Retnq]);
        assert_eq!(plan.originals[index as usize], BASE + u64::from(described.original)..original[5].next_ip());
        assert!(plan.moved.contains(&(at(index) + 2, BASE + u64::from(described.original) + 2)));
    }
    // The rest of the displaced bytes is never run.
    assert_eq!(plan.patches[0].after[5..], [0xcc, 0xcc]);
    let flags: Vec<u32> = (0..7).map(|i| function(&plan, i).flags).collect();
    let new = FUNCTION_THROWS | FUNCTION_REFERENCE_SECOND;
    assert_eq!(flags, [0, FUNCTION_ZERO_FREES, 0, 0, FUNCTION_OUT, new, 0]);
    assert_eq!(function(&plan, 5).twin, function(&plan, 6).original);
    assert_eq!(plan.file.len() as u64, crate::abi::TEXT_BYTES);
}

#[test]
fn stubs_count_as_their_function_is_called() {
    let codes = |plan: &Plan, index: u64| -> Vec<Op> {
        let original = u64::from(function(plan, index as usize).original);
        let stub = STUBS + index * STUB_BYTES;
        decoded(plan, stub, 64).iter().filter(|i| i.ip() < BASE + original).map(Instruction::code).collect()
    };
    let plan = made().plan();
    assert!(codes(&plan, 0).contains(&Op::Sub_rm64_r64));
    assert!(codes(&plan, 3).contains(&Op::Jo_rel32_64), "the product may not fit");
    assert_eq!(codes(&plan, 2).last(), Some(&Op::Jne_rel32_64), "a free is not counted");
    assert!(codes(&plan, 1).len() > codes(&plan, 0).len() + 5, "a realloc looks at its block");
    let by_call = made().plan_with(&Settings { criterion: CRITERION_ALLOCATIONS, ..SETTINGS }).unwrap();
    assert!(codes(&by_call, 0).contains(&Op::Sub_rm64_imm8));
}

#[test]
fn inner_calls_lead_to_originals() {
    let mut made = made();
    let helper = at(10);
    made.inner.push([helper, helper + 64]);
    made.stubs.insert(at(12), 0);
    made.slots.insert(TEXT + 0x2000, 2);
    // realloc calls malloc, and jumps there; posix_memalign calls it through a stub.
    made.branch(at(1) + 16, &[0xe8], at(0));
    made.branch(at(1) + 24, &[0x0f, 0x84], at(0));
    made.branch(at(4) + 16, &[0xe9], at(12));
    // A helper calls free, through its slot, and jumps there.
    made.branch(helper, &[0xff, 0x15], TEXT + 0x2000);
    made.branch(helper + 8, &[0xff, 0x25], TEXT + 0x2000);
    // So does code that is not the allocator's.
    made.branch(at(14), &[0xe8], at(0));
    let plan = made.plan();
    let original = |index| BASE + u64::from(function(&plan, index).original);
    for (from, code, to) in [
        (at(1) + 16, Op::Call_rel32_64, original(0)),
        (at(1) + 24, Op::Je_rel32_64, original(0)),
        (at(4) + 16, Op::Jmp_rel32_64, original(0)),
        (helper, Op::Call_rel32_64, original(2)),
        (helper + 8, Op::Jmp_rel32_64, original(2)),
    ] {
        let patched = patch_at(&plan, from);
        assert_eq!((patched.code(), patched.near_branch_target()), (code, to), "{from:x}");
        let before = plan.patches.iter().find(|patch| patch.address == from).expect("a patch").before.len();
        assert!(code != Op::Call_rel32_64 || patched.len() == before, "{from:x}: it returns elsewhere");
    }
    assert!(!plan.patches.iter().any(|p| p.address == at(14)));
    assert!(plan.patches.iter().all(|p| p.before.len() == p.after.len()));
}

#[test]
fn a_displaced_jump_to_a_hooked_function_leads_to_its_original() {
    let mut made = made();
    made.branch(at(3), &[0xe9], at(0));
    let plan = made.plan();
    let moved = decoded(&plan, u64::from(function(&plan, 3).original), 1);
    assert_eq!(moved[0].near_branch_target(), BASE + u64::from(function(&plan, 0).original));
}

#[test]
fn functions_that_cannot_be_hooked_are_left_out() {
    // A jump leads into malloc's first instructions; calloc jumps back to its entry by a short jump; two functions
    // overlap; free's code is missing.
    let mut made = made();
    made.branch(at(14), &[0x0f, 0x85], at(0) + 2);
    made.write(at(3) + 16, &[0xeb, 0xee]);
    made.wanted[6].address = at(5) + 4;
    made.wanted[2].address = TEXT + 0x10_0000;
    let plan = made.plan();
    let mut refused = plan.refused.clone();
    refused.sort_unstable_by_key(|r| r.0);
    let expected = [
        (0, Refusal::JumpedInto),
        (2, Refusal::TooShort),
        (3, Refusal::ShortInnerJump),
        (6, Refusal::Overlaps),
        (7, Refusal::ThrowingReallocation),
    ];
    assert_eq!(refused, expected);
    assert_eq!(plan.hooked, [1, 4, 5]);
    // operator new's twin is gone: its results will not be seen.
    assert_eq!((function(&plan, 2).flags, function(&plan, 2).twin), (FUNCTION_THROWS, 0));
    assert_eq!(function(&plan, 2).number, 77 | 2 << 16);
}

#[test]
fn what_is_out_of_reach_is_refused() {
    let made = made();
    let bytes = vec![0x90; 256];
    let code = Code { bytes: &bytes, entries: entries() };
    let texts = [Text { address: TEXT, bytes: &made.text }];
    let TestFunctions { wanted, inner, stubs, slots, .. } = &made;
    let far = Inputs { texts: &texts, wanted, inner, stubs, slots, objects: &[], jumps: None, base: TEXT + (3 << 30) };
    assert_eq!(Plan::new(&code, &SETTINGS, &far).unwrap_err(), BuildError::NothingToHook);
}

#[test]
fn impossible_settings_are_refused() {
    let made = made();
    let error = made.plan_with(&Settings { set_log2: MAX_SET_LOG2 + 1, ..SETTINGS }).unwrap_err();
    assert_eq!(error, BuildError::SetSize(25));
    let many = TestFunctions { wanted: vec![made.wanted[0]; MAX_FUNCTIONS + 1], ..made };
    let error = many.plan_with(&SETTINGS).unwrap_err();
    assert_eq!(error, BuildError::TooManyFunctions(MAX_FUNCTIONS + 1));
    assert!(error.to_string().contains("space for"));
    let long = vec![0x90; 0x2000];
    let code = Code { bytes: &long, entries: entries() };
    let texts = [Text { address: TEXT, bytes: &many.text }];
    let TestFunctions { wanted, inner, stubs, slots, .. } = &many;
    let inputs =
        Inputs { texts: &texts, wanted: &wanted[..1], inner, stubs, slots, objects: &[], jumps: None, base: BASE };
    assert_eq!(Plan::new(&code, &SETTINGS, &inputs).unwrap_err(), BuildError::CodeTooLong(0x2000));
}

#[test]
fn pages_are_replaced_whole() {
    let mut made = made();
    made.text.resize(5 * 4096, 0xc3);
    made.wanted[3].address = TEXT + 3 * 4096;
    made.write(TEXT + 3 * 4096, &PROLOGUE);
    let plan = made.plan();
    let read = |address: u64, bytes: &mut [u8]| {
        let from = (address - TEXT) as usize;
        made.text.get(from..from + bytes.len()).is_some_and(|source| {
            bytes.copy_from_slice(source);
            true
        })
    };
    let apart = plan.runs(1, &read).unwrap();
    assert_eq!(
        apart.iter().map(|(address, bytes)| (*address, bytes.len())).collect::<Vec<_>>(),
        [(TEXT, 4096), (TEXT + 12288, 4096)]
    );
    assert_eq!((apart[0].1[0], apart[1].1[0], apart[1].1[8]), (0xe9, 0xe9, 0xc3));
    let joined = plan.runs(2, &read).unwrap();
    assert_eq!(joined.iter().map(|(address, bytes)| (*address, bytes.len())).collect::<Vec<_>>(), [(TEXT, 4 * 4096)]);
    assert_eq!(plan.runs(1, &|_, _| false), None);
    // The file has changed since.
    assert_eq!(
        plan.runs(1, &|_, bytes| {
            bytes.fill(0);
            true
        }),
        None
    );
}

#[test]
fn the_shared_code_is_where_the_layout_says() {
    let plan = made().plan();
    assert_eq!(plan.file[CODE as usize..][..256], [0x90; 256]);
    assert!(plan.file.starts_with(b"\x7fELF"));
}

/// Whatever the file's code is, there is a plan or a reason, and each patch fits the code.
#[test]
fn any_code_is_planned_or_refused() {
    let mut state = sampler_ebpf::rng::seed(5, 0);
    let mut hooked = 0;
    for round in 0..4000u64 {
        let mut made = made();
        let mut random = || sampler_ebpf::rng::next(&mut state);
        for byte in &mut made.text {
            let random = random();
            // Many of the bytes that calls, jumps and prologues are made of.
            *byte = [random as u8, 0xe8, 0x0f, 0x53, 0x48, 0, 0xff]
                [(random >> 8) as usize % if round % 2 == 0 { 1 } else { 7 }];
        }
        for wanted in &mut made.wanted {
            wanted.address = TEXT.wrapping_add(random() % 1100);
            wanted.length = random() >> (random() & 63);
        }
        made.wanted[0].address = random();
        made.inner.push([TEXT + random() % 1000, TEXT + random() % 1024]);
        made.inner.push([random(), random()]);
        made.slots.insert(TEXT + random() % 5000, 1);
        let Ok(plan) = made.plan_with(&SETTINGS) else { continue };
        hooked += plan.hooked.len();
        let text = Text { address: TEXT, bytes: &made.text };
        for patch in &plan.patches {
            let end = patch.address + patch.before.len() as u64;
            assert_eq!(text.range(patch.address, end), Some(&*patch.before));
            assert_eq!(patch.before.len(), patch.after.len());
        }
        let overlap = plan.patches.windows(2).any(|two| two[0].address + two[0].after.len() as u64 > two[1].address);
        assert!(!overlap, "round {round}");
    }
    assert!(hooked > 500, "{hooked}");
    let mut made = made();
    made.wanted.truncate(1);
    let bytes = vec![0x90; 256];
    let texts = [Text { address: u64::MAX - 100, bytes: &made.text }];
    let TestFunctions { wanted, inner, stubs, slots, .. } = &made;
    let high = Inputs { texts: &texts, wanted, inner, stubs, slots, objects: &[], jumps: None, base: BASE };
    let code = Code { bytes: &bytes, entries: entries() };
    assert_eq!(Plan::new(&code, &SETTINGS, &high).unwrap_err(), BuildError::NothingToHook);
}

/// The kernel recognises a thread in a restartable sequence by its address, so no code of such a file runs elsewhere.
#[test]
fn code_of_a_file_with_restartable_sequences_stays_where_it_is() {
    let copied = |made: TestFunctions| {
        let plan = made.plan();
        decoded(&plan, u64::from(function(&plan, 0).original), 6)[5].code()
    };
    assert_eq!(copied(made()), Op::Retnq);
    let mut restarts = made();
    restarts.text[64 * 15..][..8].copy_from_slice(&[0x0f, 0xb9, 0x3d, 0x53, 0x30, 0x05, 0x53, 0x90]);
    assert_ne!(copied(restarts), Op::Retnq);
    let mut registers = made();
    registers.text[64 * 15..][..6].copy_from_slice(&[0x41, 0xba, 0x53, 0x30, 0x05, 0x53]);
    assert_eq!(copied(registers), Op::Retnq, "a C library registers itself with the kernel");
}

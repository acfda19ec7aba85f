//! Plans for whole libraries, and the mapped file.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::HashMap;
use std::fs::File;

use heapbpf_inline::abi::{CODE, DESCRIPTION, MAX_FUNCTIONS};
use heapbpf_inline::read::CheckedBlob;
use heapbpf_inline::{ForeignBlob, Inputs, Plan, Settings, Text, WantedFunction, site_offsets};
use heapbpf_probes::{Table, inline_functions};
use heapbpf_testing::skipped;
use object::{Object as _, ObjectSymbol as _};

const SETTINGS: Settings = Settings { criterion: 0, set_log2: 16, has_rdrand: true, file: [1, 2, 3] };

/// The plan for the file at `path`, as if it were mapped at the addresses that it states, plus a gibibyte.
fn plan(path: &str) -> Option<(Plan, Vec<String>)> {
    let Ok(file) = File::open(path) else {
        skipped(format!("{path} is not installed"));
        return None;
    };
    let bias = 1 << 30;
    let found = inline_functions(&file, path, &Table::default()).unwrap();
    let texts: Vec<Text<'_>> = found.code.iter().map(|c| Text { address: c.address + bias, bytes: &c.bytes }).collect();
    let inner: Vec<[u64; 2]> = found.inner.iter().map(|[s, e]| [s + bias, e + bias]).collect();
    let wanted: Vec<WantedFunction<'_>> = found
        .functions
        .iter()
        .map(|f| WantedFunction {
            name: &f.name,
            address: f.address + bias,
            length: f.length,
            site: f.site,
            twin: f.twin,
        })
        .collect();
    let stubs = found.slots.iter().filter(|s| s.stub != s.slot).map(|s| (s.stub + bias, s.function)).collect();
    let slots = found.slots.iter().map(|s| (s.slot + bias, s.function)).collect();
    let base = 1 << 29;
    let inputs = Inputs {
        texts: &texts,
        wanted: &wanted,
        inner: &inner,
        stubs: &stubs,
        slots: &slots,
        objects: &[],
        jumps: None,
        base,
    };
    let plan = Plan::new(&heapbpf_inline_blob::code().unwrap(), &SETTINGS, &inputs).unwrap();
    Some((plan, found.functions.into_iter().map(|f| f.name).collect()))
}

/// Tools find the blob's sites by name, and its frames.
#[test]
fn the_file_has_symbols_and_frames() {
    let Some((plan, _)) = plan("/lib/x86_64-linux-gnu/libc.so.6") else { return };
    let file = object::File::parse(&*plan.file).unwrap();
    let symbols: HashMap<&str, u64> = file.dynamic_symbols().map(|s| (s.name().unwrap(), s.address())).collect();
    let code = heapbpf_inline_blob::code().unwrap();
    let names = ["heapbpf_result", "heapbpf_freeing", "heapbpf_reallocating", "heapbpf_unseen"];
    for (name, offset) in names.into_iter().zip(site_offsets(&code)) {
        assert_eq!(symbols[name], offset, "{name}");
        assert_eq!(plan.file[offset as usize..][..5], [0x90, 0x0f, 0x1f, 0x40, 0], "{name}");
        assert_eq!(offset % 8, 0, "it must not cross a page");
    }
    assert!(symbols.contains_key("heapbpf_inline:malloc"));
    use object::ObjectSection as _;
    let section = file.section_by_name(".eh_frame").unwrap();
    let frames = gimli::EhFrame::new(section.data().unwrap(), gimli::LittleEndian);
    let cfa_at =
        |address: u64| frame_at(&frames, section.address(), address).expect("a distance from the stack pointer")[0];
    let framed = CODE + u64::from(code.entries.framed);
    let framed_end = CODE + u64::from(code.entries.framed_end);
    assert_eq!((cfa_at(framed - 1), cfa_at(framed), cfa_at(framed_end - 1), cfa_at(framed_end)), (8, 112, 112, 8));
    assert_eq!(cfa_at(DESCRIPTION - 1), 8);
}

/// The registers that a function must preserve.
const PRESERVED: [gimli::Register; 6] = [
    gimli::X86_64::RBX,
    gimli::X86_64::RBP,
    gimli::X86_64::R12,
    gimli::X86_64::R13,
    gimli::X86_64::R14,
    gimli::X86_64::R15,
];

/// Where the return address and the caller's registers are, if they are on the stack at fixed distances from its
/// pointer.
fn frame_at(
    frames: &gimli::EhFrame<gimli::EndianSlice<'_, gimli::LittleEndian>>,
    at: u64,
    address: u64,
) -> Option<Vec<i64>> {
    use gimli::UnwindSection as _;
    let bases = gimli::BaseAddresses::default().set_eh_frame(at);
    let mut context = gimli::UnwindContext::new();
    let row = frames.unwind_info_for_address(&bases, &mut context, address, gimli::EhFrame::cie_from_offset).ok()?;
    let gimli::CfaRule::RegisterAndOffset { register, offset } = row.cfa() else { return None };
    if *register != gimli::X86_64::RSP {
        return None;
    }
    let place = |register| match row.register(register) {
        Some(gimli::RegisterRule::Offset(offset)) => offset,
        _ => 0,
    };
    Some([*offset].into_iter().chain(PRESERVED.map(place)).collect())
}

/// The unwind rows of copied instructions agree with the library's own.
#[test]
fn frames_of_copied_instructions_are_those_of_the_library() {
    use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};
    let code = heapbpf_inline_blob::code().unwrap();
    let mut all = 0;
    for path in [
        "/lib/x86_64-linux-gnu/libc.so.6",
        "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2",
        "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
        "/usr/lib/x86_64-linux-gnu/libmimalloc.so.2",
    ] {
        use object::ObjectSection as _;
        let Some((plan, _)) = plan(path) else { continue };
        let library = std::fs::read(path).unwrap();
        let (library, blob) = (object::File::parse(&*library).unwrap(), object::File::parse(&*plan.file).unwrap());
        let sections = [&library, &blob].map(|file| file.section_by_name(".eh_frame").unwrap());
        let frames = sections.each_ref().map(|it| gimli::EhFrame::new(it.data().unwrap(), gimli::LittleEndian));
        let mut compared = 0;
        for function in CheckedBlob::check(&plan.file, &code).unwrap().functions {
            let address = function.address - (1 << 30);
            let holds = |section: &object::Section<'_, '_>| {
                (section.address()..section.address() + section.size()).contains(&address)
            };
            let section = library.sections().find(holds).unwrap();
            let bytes = &section.data().unwrap()[(address - section.address()) as usize..];
            let original = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
            let copied = &plan.file[function.original as usize..];
            let copied = Decoder::with_ip(64, copied, u64::from(function.original), DecoderOptions::NONE);
            let goes_on = |one: &Instruction| {
                !matches!(one.flow_control(), FlowControl::Return | FlowControl::UnconditionalBranch)
            };
            let pairs = original.into_iter().zip(copied);
            for (original, copied) in
                pairs.take_while(|(one, other)| one.mnemonic() == other.mnemonic() && goes_on(one))
            {
                let [expected, found] = [(0, original.ip()), (1, copied.ip())]
                    .map(|(of, ip)| frame_at(&frames[of], sections[of].address(), ip));
                let Some(mut expected) = expected else { continue };
                // GCC does not describe that a register was popped: its value is also still below the stack pointer.
                let depth = expected[0];
                expected[1..].iter_mut().filter(|place| **place < -depth).for_each(|place| *place = 0);
                assert_eq!(found, Some(expected), "{path}: {:#x}: {original}", original.ip());
                compared += 1;
            }
        }
        println!("{path}: {compared} instructions");
        assert!(compared > 50, "{path}: {compared}");
        all += compared;
    }
    assert!(all > 0);
}

#[test]
fn a_blob_of_ours_is_recognized_and_another_is_not() {
    let Some((plan, names)) = plan("/lib/x86_64-linux-gnu/libc.so.6") else { return };
    let code = heapbpf_inline_blob::code().unwrap();
    let found = CheckedBlob::check(&plan.file, &code).unwrap();
    assert_eq!((found.functions.len(), found.header.file), (names.len(), [1, 2, 3]));
    assert!(found.functions.iter().all(|f| f.original > 0x5000 && f.displaced >= 5));
    let changed = |at: usize, to: u8| {
        let mut text = plan.file.clone();
        text[at] = to;
        CheckedBlob::check(&text, &code).unwrap_err()
    };
    assert_eq!(CheckedBlob::check(&plan.file[..0x4000], &code).unwrap_err(), ForeignBlob::Truncated);
    assert_eq!(changed(0x1000, 0), ForeignBlob::Magic);
    assert_eq!(changed(0x1008, 9), ForeignBlob::Version(9));
    assert_eq!(changed(0x100c, 2), ForeignBlob::Nonsense);
    assert_eq!(changed(0x1010, 0), ForeignBlob::OtherCode);
    assert_eq!(changed(0x1018, 99), ForeignBlob::Nonsense);
    assert_eq!(changed(0x101d, 0xff), ForeignBlob::Nonsense);
    assert_eq!(changed(CODE as usize + 100, 0xff), ForeignBlob::OtherCode);
    const { assert!(MAX_FUNCTIONS > 120) };
}

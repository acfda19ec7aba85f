//! The plan of inline hooks for any code, and a blob's memory with any content.

use std::collections::HashMap;

use heapbpf_inline::read::{CheckedBlob, Counts, control};
use heapbpf_inline::{Code, Entries, Inputs, Jumps, Plan, Settings, Text, WantedFunction};
use sampler_ebpf::abi::Site;

const TEXT: u64 = 0x5555_0000_0000;
/// Maximum code of one input: a few hundred instructions for each function. More takes longer and finds nothing new.
const MOST_CODE: usize = 2048;

/// Checks an input, both as code and as a blob's memory.
pub fn check(data: &[u8]) {
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
    let _ = (CheckedBlob::check(data, &code), Counts::of(data), control(data));
    let data = &data[..data.len().min(MOST_CODE)];
    let site = Site { times_argument: 0xff, old_argument: 0xff, out_argument: 0xff, ..Site::default() };
    let wanted: Vec<WantedFunction<'_>> = (0..4)
        .map(|i| WantedFunction { name: "f", address: TEXT + 64 * i, length: data.len() as u64 / 4, site, twin: None })
        .collect();
    let none = HashMap::new();
    let settings = Settings { criterion: 0, set_log2: 12, has_rdrand: false, file: [0; 3] };
    let texts = [Text { address: TEXT, bytes: data }];
    let inner = [[TEXT, TEXT + data.len() as u64]];
    let inputs = Inputs {
        texts: &texts,
        wanted: &wanted,
        inner: &inner,
        stubs: &none,
        slots: &none,
        objects: &[],
        jumps: None,
        base: TEXT - (1 << 28),
    };
    let plan = Plan::new(&code, &settings, &inputs);
    // The same plan with jumps found in the file, wherever it is mapped.
    let jumps =
        Jumps::new(&[Text { address: 0, bytes: data }], wanted.iter().map(|wanted| wanted.address - TEXT).collect());
    let again = Plan::new(&code, &settings, &Inputs { jumps: Some(&jumps.moved(TEXT)), ..inputs });
    assert!(plan == again, "{jumps:?}");
    let Ok(plan) = plan else { return };
    for patch in &plan.patches {
        assert_eq!(texts[0].range(patch.address, patch.address + patch.before.len() as u64), Some(&*patch.before));
    }
}

//! What the BPF programs tell of a process that is about to go over from probes to inline hooks: the blocks that they sample from then
//! on, and the calls that they have begun to count. Needs root, and the BPF object.

#![expect(clippy::unwrap_used, reason = "what fails ends the case")]

mod on_functions;

use std::sync::atomic::Ordering;

use on_functions::*;
use sampler_ebpf::abi::ProcessKey;
use sampler_ebpf::abi::inline::HANDOVER_BLOCKS;
use sampler_user::kernel::totals;

const BLOCK: u64 = 4096;

fn own(kernel: &Kernel) -> ProcessKey {
    let living = totals::living(&kernel.programs).unwrap();
    living.into_iter().find(|process| process.tgid == std::process::id()).unwrap()
}

#[test]
fn blocks_are_listed_from_when_the_process_is_named_and_of_no_other() {
    let Some(mut kernel) = Kernel::start(&EVERY_CALL) else { return };
    let seen = kernel.handover.seen();
    allocate(100, BLOCK, RETURNS);
    kernel.handover.list_blocks_of(std::process::id()).unwrap();
    assert_eq!(seen.blocks(), Some(vec![]), "what was sampled before is in the live map");
    allocate(100, 2 * BLOCK, RETURNS);
    // One that is freed again stays: its free is told once more, and the programs find no block.
    allocate(100, 3 * BLOCK, RETURNS);
    release(3 * BLOCK);
    reallocate(2 * BLOCK, 200, 4 * BLOCK);
    assert_eq!(seen.blocks(), Some(vec![2 * BLOCK, 3 * BLOCK, 4 * BLOCK]));
    // Whoever names it before he reads the map misses nothing.
    assert_eq!(kernel.live(), [BLOCK, 4 * BLOCK]);
    kernel.handover.list_blocks_of(1).unwrap();
    allocate(100, 5 * BLOCK, RETURNS);
    assert_eq!(seen.blocks(), Some(vec![]), "another process is named");
    kernel.handover.list_blocks_of(0).unwrap();
    allocate(100, 6 * BLOCK, RETURNS);
    assert_eq!(seen.blocks(), Some(vec![]), "none is named");
}

#[test]
fn a_list_that_was_too_short_says_so() {
    let Some(mut kernel) = Kernel::start(&Setting { events_bytes: 1 << 12, ..EVERY_CALL }) else { return };
    let seen = kernel.handover.seen();
    kernel.handover.list_blocks_of(std::process::id()).unwrap();
    // The same addresses again and again, as the live map has room for fewer.
    let some = |count: usize| (0..count as u64).for_each(|at| _ = allocate(100, (at % 64 + 1) * BLOCK, RETURNS));
    some(HANDOVER_BLOCKS);
    assert_eq!(seen.blocks().map(|blocks| blocks.len()), Some(HANDOVER_BLOCKS), "all fit");
    some(1);
    assert_eq!(seen.blocks(), None, "one does not");
    kernel.handover.list_blocks_of(std::process::id()).unwrap();
    assert_eq!(seen.blocks(), Some(vec![]), "it is read again from the start");
}

#[test]
fn a_call_is_begun_until_it_has_returned() {
    let Some(kernel) = Kernel::start(&EVERY_CALL) else { return };
    let (seen, process) = (kernel.handover.seen(), own(&kernel));
    allocate(100, BLOCK, RETURNS);
    assert_eq!(seen.begun(process).unwrap(), [], "it has returned");
    HELD.store(1, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let waiting = WAITING.load(Ordering::SeqCst);
        scope.spawn(|| allocate(100, 2 * BLOCK, WAITS));
        while WAITING.load(Ordering::SeqCst) == waiting {
            std::thread::yield_now();
        }
        let begun = seen.begun(process).unwrap();
        let other = ProcessKey { start_ns: process.start_ns + 1, ..process };
        let of_another = seen.begun(other).unwrap();
        HELD.store(0, Ordering::SeqCst);
        assert!(begun.len() == 1 && begun[0].tid != std::process::id() && begun[0].in_flight != 0, "{begun:?}");
        assert_eq!(of_another, [], "of another life of this id");
    });
    assert_eq!(seen.begun(process).unwrap(), []);
}

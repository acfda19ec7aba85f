//! A host whose memory is not overcommitted: what one process maps, the others cannot.

use heapbpf_tests::environment::{Setting, skipped, turn};
use heapbpf_tests::inline::{Hook, counted_exactly, is_probed, record};
use heapbpf_tests::program::program;
use heapbpf_tests::target::Target;
use procfs::{Current as _, Meminfo};

/// Never overcommit.
const NEVER: u64 = 2;

/// Hook memory counts against the host's limit, of which a sixteenth must stay free.
#[test]
fn a_process_of_a_host_with_little_memory_left_is_probed() {
    let case = "a_process_of_a_host_with_little_memory_left_is_probed";
    let Some(_turn) = turn(case) else { return };
    let memory = Meminfo::current().expect("the kernel tells it");
    let limit = memory.commit_limit.expect("every kernel has it");
    let left = limit.saturating_sub(memory.committed_as);
    // Nothing is ever written to it, so it takes only of what may be mapped.
    let Some(bytes) = left.checked_sub(limit / 20).and_then(|bytes| usize::try_from(bytes).ok()) else {
        return skipped(case, "others have mapped too much");
    };
    let mapped = std::hint::black_box(Vec::<u8>::with_capacity(bytes));
    let Some(_never) = Setting::raise("/proc/sys/vm/overcommit_memory", NEVER) else {
        return skipped(case, "vm.overcommit_memory cannot be changed here");
    };
    is_probed(Target::start(&program("mix"), ["2000"]), "vm.overcommit_memory");
    drop(mapped);
    let (_, stats, truth) = record(&program("mix"), &["2000"], Hook::Inline, 1, &[]);
    counted_exactly(&stats, &truth);
}

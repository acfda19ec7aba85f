//! A host whose memory is not overcommitted: what one process maps, the others cannot.

use std::process::{Command, Stdio};

use heapbpf_tests::environment::{Setting, skipped, turn};
use heapbpf_tests::inline::{Hook, counted_exactly, is_probed, record};
use heapbpf_tests::program::program;
use heapbpf_tests::target::{Target, status_bytes, until};
use procfs::{Current as _, Meminfo};

/// Never overcommit.
const NEVER: u64 = 2;

/// The memory of hooks counts against the host's limit. A sixteenth of that limit must stay free.
#[test]
fn a_process_of_a_host_with_little_memory_left_is_probed() {
    let case = "a_process_of_a_host_with_little_memory_left_is_probed";
    let Some(_turn) = turn(case) else { return };
    let memory = Meminfo::current().expect("the kernel tells it");
    let limit = memory.commit_limit.expect("every kernel has it");
    let left = limit.saturating_sub(memory.committed_as);
    let Some(bytes) = left.checked_sub(limit / 20) else { return skipped(case, "others have mapped too much") };
    let Some(_never) = Setting::raise("/proc/sys/vm/overcommit_memory", NEVER) else {
        return skipped(case, "vm.overcommit_memory cannot be changed here");
    };
    // Its buffer takes only of what may be mapped: nothing is ever read into it.
    let mut command = Command::new("dd");
    command.args([format!("bs={bytes}"), "of=/dev/null".into()]).stdin(Stdio::piped()).stderr(Stdio::null());
    let mut mapping = command.spawn().expect("every machine has it");
    until("it has mapped them", || status_bytes(mapping.id(), "VmSize").is_some_and(|mapped| mapped > bytes));
    is_probed(Target::start(&program("mix"), ["2000"]), "vm.overcommit_memory");
    drop(mapping.stdin.take());
    assert!(mapping.wait().expect("our child").success());
    let (_, stats, truth) = record(&program("mix"), &["2000"], Hook::Inline, 1, &[]);
    counted_exactly(&stats, &truth);
}

//! Recordings of one process with inline hooks, and what a debugger does to such a process.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use procfs::process::{MemoryMap, Process};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::checks::{self, Compare};
use crate::output::{Profile, Stats};
use crate::recorder::{Recorder, Recording};
use crate::target::{PATIENCE, Target, file_of, mappings, of_process, processes, status_bytes};
use crate::truth::Truth;

/// A way of hooking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// A probe on every call.
    Probe,
    /// Code inside the process that counts.
    Inline,
}

/// Mappings of our memory in a process.
///
/// # Panics
/// If it has ended.
pub fn mapped(pid: u32) -> Vec<MemoryMap> {
    let mut mapped = mappings(pid);
    mapped.retain(|map| blob_of(map).is_some());
    mapped
}

/// The addresses of the blob that a mapping of ours belongs to, as its name says.
pub fn blob_of(map: &MemoryMap) -> Option<Range<u64>> {
    let mut numbers = file_of(map).strip_prefix("/memfd:heapbpf-inline-")?.split(['-', ' ']);
    let [base, bytes] = [(); 2].map(|()| u64::from_str_radix(numbers.next()?, 16).ok());
    Some(base?..base? + bytes?)
}

/// Whether pages of a process jump to code of inline hooks. The code itself stays mapped.
pub fn is_hooked(pid: u32) -> bool {
    !hooked_files(pid).is_empty()
}

/// Offset in the blob of the code that all hooked functions share.
pub const BLOB_CODE: u64 = 0x3000;

/// Address of the blob in a process: its code is the first mapping with this name.
///
/// # Panics
/// If it is not mapped.
pub fn base(pid: u32) -> u64 {
    mapped(pid).first().and_then(blob_of).expect("it is mapped").start
}

/// Where a debugger makes a thread continue, and with which registers.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The instruction pointer.
    pub ip: u64,
    /// The first argument; `u64::MAX`: a place on the stack. If there is none, all registers are useless.
    pub argument: Option<u64>,
    /// A signal to send to the thread there.
    pub sent: i32,
}

impl Place {
    /// An address, with useless registers.
    pub const fn at(ip: u64) -> Self {
        Self { ip, argument: None, sent: 0 }
    }
}

/// Makes the first thread of a process continue elsewhere, as a debugger would, and detaches.
///
/// # Panics
/// If the kernel refuses.
#[cfg(target_arch = "x86_64")]
pub fn goes_on_at(pid: u32, place: &Place) {
    let pid = pid.cast_signed();
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the calls read and write the registers of a process that the test has started, in a structure of their
    // type.
    unsafe {
        assert_eq!(libc::ptrace(libc::PTRACE_ATTACH, pid, none, none), 0, "it can be traced");
        assert_eq!(libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL), pid, "it stops");
        let mut registers: libc::user_regs_struct = std::mem::zeroed();
        assert_eq!(libc::ptrace(libc::PTRACE_GETREGS, pid, none, &raw mut registers), 0);
        if let Some(argument) = place.argument {
            // Set up the stack as at a call.
            registers.rsp = ((registers.rsp - 1024) & !15) - 8;
            registers.rdi = argument;
            if argument == u64::MAX {
                // No block is there, but what looks like the size of a small one.
                registers.rdi = registers.rsp + 64;
                let at = std::ptr::without_provenance_mut::<libc::c_void>(registers.rdi as usize - 8);
                let size = std::ptr::without_provenance_mut::<libc::c_void>(0x21);
                assert_eq!(libc::ptrace(libc::PTRACE_POKEDATA, pid, at, size), 0);
            }
        } else {
            let before = registers;
            registers = std::mem::zeroed();
            (registers.cs, registers.ss, registers.eflags) = (before.cs, before.ss, before.eflags);
            (registers.fs_base, registers.gs_base) = (before.fs_base, before.gs_base);
        }
        // It is no longer in a system call.
        (registers.rip, registers.orig_rax) = (place.ip, u64::MAX);
        assert_eq!(libc::ptrace(libc::PTRACE_SETREGS, pid, none, &raw mut registers), 0);
        assert_eq!(libc::kill(pid, place.sent), 0);
        assert_eq!(libc::ptrace(libc::PTRACE_DETACH, pid, none, none), 0);
    }
}

/// The files whose functions jump to code of inline hooks in a process, sorted.
pub fn hooked_files(pid: u32) -> Vec<String> {
    hooked_files_in(&mappings(pid))
}

/// Processes with pages that jump to code of inline hooks.
pub fn hooked_processes() -> Vec<u32> {
    let is_hooked = |pid: &u32| of_process(*pid, Process::maps).is_ok_and(|maps| !hooked_files_in(&maps.0).is_empty());
    processes().filter(is_hooked).collect()
}

fn hooked_files_in(all: &[MemoryMap]) -> Vec<String> {
    let files: BTreeSet<&str> = all.iter().filter_map(|page| original(page, all)).collect();
    files.into_iter().map(str::to_owned).collect()
}

/// The file whose pages were at a mapping before they were replaced, if they were. The original pages are where the
/// memfd's name says.
fn original<'a>(page: &MemoryMap, all: &'a [MemoryMap]) -> Option<&'a str> {
    let blob = blob_of(page)?;
    let kept = blob.start + page.offset;
    let file = all.iter().find(|map| (map.address.0..map.address.1).contains(&kept))?;
    (!blob.contains(&page.address.0)).then(|| file_of(file))
}

/// A recording of one process at a fixed interval, hooked in one way.
pub fn recorder(pid: u32, hook: Hook, interval: u64) -> Recorder {
    let hook = if hook == Hook::Inline { "inline" } else { "probe" };
    Recorder::of(pid, interval).option("--hook", hook).flag("--no-follow")
}

/// Records a program from READY to its report, with further options.
///
/// # Panics
/// If it is not hooked as requested, or still hooked at the end.
pub fn record(program: &Path, arguments: &[&str], hook: Hook, interval: u64, options: &[[&str; 2]]) -> Recorded {
    let start = || Target::start(program, arguments);
    let (mut target, recording) = begin(&start, hook, "", interval, options);
    let pid = target.pid();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    assert!(!is_hooked(pid), "the original pages are back");
    (profile, stats, truth)
}

/// Starts a target and a recording of it. With inline hooks, at least one file whose path contains `file` must be
/// hooked.
///
/// # Panics
/// If it is not hooked as requested.
pub fn begin(
    start: &dyn Fn() -> Target,
    hook: Hook,
    file: &str,
    interval: u64,
    options: &[[&str; 2]],
) -> (Target, Recording) {
    for _ in 0..attempts() {
        let target = start();
        let pid = target.pid();
        let recorder = options.iter().fold(recorder(pid, hook, interval), |it, [name, value]| it.option(name, value));
        let recording = recorder.start();
        if hooked_files(pid).iter().any(|path| path.contains(file)) == (hook == Hook::Inline) {
            return (target, recording);
        }
        println!("not hooked as wanted, and begun again: {}", recording.stop().stderr);
    }
    panic!("not hooked as wanted: {hook:?}")
}

/// Number of attempts to hook. On a busy machine, stopping a process may take too long, and on an emulated one,
/// stopping many threads usually does. There is one attempt per 24 seconds of the tests' timeout.
fn attempts() -> u64 {
    PATIENCE.as_secs() / 24
}

/// Results of a recording, and the truth.
pub type Recorded = (Profile, Stats, Truth);

/// Checks that totals equal the target's own counts, and hits equal its calls.
///
/// # Panics
/// If they do not.
pub fn counted_exactly(stats: &Stats, truth: &Truth) {
    assert_eq!(stats.hits, truth.allocs() + truth.failed + truth.abandoned, "{stats:?}");
    assert_eq!(stats.exact_alloc_objects, truth.allocs(), "{stats:?}");
    assert_eq!(stats.exact_alloc_bytes, truth.bytes(), "{stats:?}");
    assert_eq!(stats.lost(), 0, "{stats:?}");
}

/// Limits a process's address space to what it has now plus `more_bytes`. If that is less than what heapbpf maps into a
/// process (some 2 MiB), the process is not hooked inline.
///
/// # Panics
/// If it has ended.
pub fn limit_addresses(pid: u32, more_bytes: u64) {
    let most = Some(status_bytes(pid, "VmSize").expect("the target runs") + more_bytes);
    let limit = Rlimit { current: most, maximum: most };
    prlimit(Pid::from_raw(pid.cast_signed()), Resource::As, limit).expect("the target is ours");
}

/// Records a program with probes, because it must not get inline hooks for this reason.
///
/// # Panics
/// If it gets inline hooks, is refused for another reason, or comes to harm.
pub fn is_probed(mut target: Target, why: &str) {
    let recording = recorder(target.pid(), Hook::Inline, 1).start();
    assert!(!is_hooked(target.pid()), "{}", recording.said());
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    assert!(stats.hooks[0].not_inline.as_ref().is_some_and(|reason| reason.contains(why)), "{:?}", stats.hooks);
    checks::sites(&profile, &truth, 1, Compare::All);
    assert!(target.end().success(), "it came to harm");
}

//! The helper processes that undo what heapbpf has done if it is killed: the guardian holds its links, and the cleaner
//! removes inline hooks.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt as _;

use procfs::process::{MMPermissions, MemoryMap};

use crate::target::{file_of, mappings, processes, status};

/// The processes with this name and task that serve this heapbpf process.
fn serving(heapbpf: u32, [name, task]: [&str; 2]) -> Vec<u32> {
    let wanted = [name, task, &heapbpf.to_string()].map(|word| word.as_bytes().to_vec());
    let serves = |process: &u32| {
        let words = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).take(wanted.len()).eq(&wanted)
    };
    processes().filter(serves).collect()
}

/// The guardians of a running or ended heapbpf: none, one, or another one while costs are measured.
pub fn guardians_of(heapbpf: u32) -> Vec<u32> {
    serving(heapbpf, ["heapbpf-guardian", "hold-probes"])
}

/// The threads of a process; none if it has ended.
pub fn threads_of(process: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok()).collect()
}

/// The cleaners of a running or ended heapbpf: one if it hooks processes inline. Leaves out their children, which stop
/// processes and may have ended by now.
pub fn cleaners_of(heapbpf: u32) -> Vec<u32> {
    let all = serving(heapbpf, ["heapbpf-cleaner", "take-out-hooks"]);
    // One that has ended by now may have been a child.
    let is_cleaner = |process: &&u32| {
        let parent = status(**process, "PPid").and_then(|parent| parent.parse().ok());
        parent.is_some_and(|parent: u32| !all.contains(&parent))
    };
    all.iter().filter(is_cleaner).copied().collect()
}

/// The process that demangles names for a running heapbpf.
pub fn demanglers_of(heapbpf: u32) -> Vec<u32> {
    serving(heapbpf, ["heapbpf-demangler", "demangle-names"])
}

/// Kills processes (SIGKILL), in this order.
pub fn kill(processes: impl IntoIterator<Item = u32>) {
    signal(libc::SIGKILL, processes);
}

/// Sends a signal to processes, in this order.
pub fn signal(signal: libc::c_int, processes: impl IntoIterator<Item = u32>) {
    for process in processes {
        // SAFETY: `kill` takes plain integers. Tests pass processes that they have started and not waited for.
        unsafe { libc::kill(process.cast_signed(), signal) };
    }
}

/// Kills a heapbpf and its guardian, after its cleaner, so that no helper removes inline hooks.
pub fn kill_all_of(heapbpf: u32) {
    kill(cleaners_of(heapbpf));
    kill(guardians_of(heapbpf).into_iter().chain([heapbpf]));
}

/// Lines of the kernel's log about probes that it could not remove for one of these threads.
///
/// # Panics
/// If the log cannot be read.
pub fn leaks(by: &BTreeSet<u32>) -> Vec<String> {
    const READ_ALL: libc::c_int = 3;
    const SIZE: libc::c_int = 10;
    // SAFETY: this action takes no buffer.
    let size = unsafe { libc::klogctl(SIZE, std::ptr::null_mut(), 0) };
    let mut log = vec![0_u8; usize::try_from(size).expect("the kernel's log can be read")];
    // SAFETY: the buffer has as many bytes as the size says.
    let read = unsafe { libc::klogctl(READ_ALL, log.as_mut_ptr().cast(), size) };
    log.truncate(usize::try_from(read).expect("the kernel's log can be read"));
    let is_of = |line: &str| {
        let before = line.split(" failed to ").next().unwrap_or_default();
        before.rsplit(':').next().and_then(|pid| pid.parse().ok()).is_some_and(|pid| by.contains(&pid))
    };
    let log = String::from_utf8_lossy(&log);
    log.lines().filter(|line| line.contains("leaking uprobe") && is_of(line)).map(Into::into).collect()
}

/// Number of bytes of a process's C library code that differ from the file: probes, or what inline hooks left. Code
/// that moves while it is read differs. `None` if it has no C library, as in the middle of an exec.
///
/// # Panics
/// If its mappings or the file cannot be read.
pub fn changed_bytes_of_libc(pid: u32) -> Option<usize> {
    let mut code = mappings(pid);
    code.retain(|map| map.perms.contains(MMPermissions::EXECUTE) && file_of(map).contains("/libc.so"));
    // Pages that were replaced and moved back may be separate mappings.
    (!code.is_empty()).then(|| code.iter().map(|map| changed_bytes(pid, map)).sum())
}

/// Number of bytes of a mapping that differ from its file.
fn changed_bytes(pid: u32, map: &MemoryMap) -> usize {
    let (start, end) = map.address;
    let read = |path: &str, at: u64| {
        let mut bytes = vec![0; (end - start) as usize];
        std::fs::File::open(path).and_then(|file| file.read_exact_at(&mut bytes, at)).map(|()| bytes)
    };
    let file = read(file_of(map), map.offset).expect("the file can be read");
    let Ok(now) = read(&format!("/proc/{pid}/mem"), start) else { return file.len() };
    now.iter().zip(file).filter(|(now, file)| **now != *file).count()
}

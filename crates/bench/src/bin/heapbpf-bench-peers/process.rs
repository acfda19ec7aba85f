//! Facts about processes from `/proc`: memory, CPU time, and breakpoints in a library's code.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use heapbpf_record::cost::cpu_time;
use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};

/// Largest resident memory so far, bytes; 0 if the process has exited.
pub fn peak_bytes(pid: u32) -> u64 {
    let status = Process::new(pid.cast_signed()).and_then(|process| process.status());
    status.ok().and_then(|status| status.vmhwm).unwrap_or(0) * 1024
}

/// Resident memory, bytes, without mapped BPF maps, which [`map_bytes`] counts.
pub fn resident_bytes(pid: u32) -> u64 {
    let maps = Process::new(pid.cast_signed()).and_then(|process| process.smaps());
    let is_counted = |map: &MemoryMap| !matches!(&map.pathname, MMapPath::Path(path) if path.ends_with("bpf-map"));
    let counted = maps.into_iter().flatten().filter(is_counted);
    counted.filter_map(|map| map.extension.map.get("Rss").copied()).sum()
}

/// The children of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let tasks = Process::new(pid.cast_signed()).and_then(|process| process.tasks());
    tasks.into_iter().flatten().flatten().filter_map(|task| task.children().ok()).flatten().collect()
}

/// Whether a process is gone or a zombie.
pub fn is_dead(pid: u32) -> bool {
    let stat = Process::new(pid.cast_signed()).and_then(|process| process.stat());
    stat.map_or(true, |stat| ['Z', 'X'].contains(&stat.state))
}

/// CPU time of a process, seconds; 0 if it has ended.
pub fn cpu_seconds(pid: u32) -> f64 {
    cpu_time::of_process(pid).unwrap_or(0.0)
}

/// Memory of the BPF maps that a process holds, bytes.
pub fn map_bytes(pid: u32) -> u64 {
    let mut seen = std::collections::HashMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let number = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        if let (Some(id), Some(bytes)) = (number("map_id:"), number("memlock:")) {
            seen.insert(id, bytes);
        }
    }
    seen.values().sum()
}

/// The file of a process's library with this name.
pub fn library(pid: u32, name: &str) -> Option<PathBuf> {
    code(pid, name).map(|(_, _, path)| path)
}

/// The executable mapping of a library: addresses, file offset, file.
fn code(pid: u32, name: &str) -> Option<(std::ops::Range<u64>, u64, PathBuf)> {
    let maps = Process::new(pid.cast_signed()).and_then(|process| process.maps()).ok()?;
    maps.into_iter().find_map(|map| match map.pathname {
        MMapPath::Path(path) if map.perms.contains(MMPermissions::EXECUTE) && path.file_name()? == name => {
            Some((map.address.0..map.address.1, map.offset, path))
        }
        _ => None,
    })
}

/// How many bytes of a library's code in a process differ from its file: the kernel's breakpoints.
pub fn changed_code_bytes(pid: u32, library: &str) -> Option<usize> {
    let (range, offset, path) = code(pid, library)?;
    let bytes = usize::try_from(range.end - range.start).ok()?;
    let (mut file, mut memory) = (vec![0; bytes], vec![0; bytes]);
    let read = File::open(path).ok()?.read_at(&mut file, offset).ok()?;
    File::open(format!("/proc/{pid}/mem")).ok()?.read_exact_at(&mut memory[..read], range.start).ok()?;
    Some(file[..read].iter().zip(&memory[..read]).filter(|(a, b)| a != b).count())
}

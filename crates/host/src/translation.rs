//! Detects programs that another program runs by binary translation: the translator reads their code once and executes
//! its own version of it. It also translates jumps and breakpoints that are written into that code. They lead to
//! addresses where the translator knows no code, or end the program with an unexpected signal.

use std::path::Path;

use super::proc_maps;
use super::process::all_pids;

/// Which program translates the code of a process. `None` if the process executes it directly or has exited. Intel's
/// SDE is based on Pin, Dr. Memory on DynamoRIO. QEMU does not map its guest's code as code: what is found in its
/// process is its own.
#[must_use]
pub fn translator_of(pid: u32) -> Option<&'static str> {
    let mapped = proc_maps::read(pid).ok()?;
    mapped.iter().find_map(|file| translator_in(std::str::from_utf8(&file.path).ok()?))
}

/// Which translator a mapped file belongs to.
fn translator_in(path: &str) -> Option<&'static str> {
    let name = Path::new(path).file_name()?.to_str()?;
    if name.starts_with("vgpreload_") || path.contains("/valgrind/") {
        return Some("valgrind");
    }
    if name.starts_with("libdynamorio.so") {
        return Some("DynamoRIO");
    }
    (name == "pinbin").then_some("Pin")
}

/// The processes whose code is translated, with the name of the translator. This includes QEMU: it reads its guest's
/// files through private mappings, and the kernel puts the breakpoints of a file into all of these.
#[must_use]
pub fn translated() -> Vec<(u32, &'static str)> {
    let of = |pid: u32| translator_of(pid).or_else(|| is_qemu(pid).then_some("QEMU"));
    all_pids().unwrap_or_default().into_iter().filter_map(|pid| Some((pid, of(pid)?))).collect()
}

/// Whether a process is QEMU in user mode. Its programs are called `qemu-ARCHITECTURE` or `qemu-ARCHITECTURE-static`.
fn is_qemu(pid: u32) -> bool {
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let name = program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("qemu-") && !name.starts_with("qemu-system-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn translators_are_known_by_their_files() {
        let of = translator_in;
        assert_eq!(of("/usr/libexec/valgrind/memcheck-amd64-linux"), Some("valgrind"));
        assert_eq!(of("/opt/vg/lib/vgpreload_core-amd64-linux.so"), Some("valgrind"));
        assert_eq!(of("/opt/DynamoRIO/lib64/release/libdynamorio.so.10.0"), Some("DynamoRIO"));
        assert_eq!(of("/opt/pin/intel64/bin/pinbin"), Some("Pin"));
        assert_eq!((of("/usr/lib/libc.so.6"), of("/usr/bin/valgrind"), of("")), (None, None, None));
        assert_eq!(translator_of(std::process::id()), None);
    }
}

//! Trial links to a function of heapbpf itself, because some kernels load programs that they cannot link, or run them
//! for fewer threads than they should.

use std::ffi::CString;
use std::io;
use std::os::fd::AsFd;

use aya::maps::{Array, MapData};

use super::guardian::Guardian;
use super::loader::{Loader, ProgramKind};
use super::{KernelError, sys};

/// The target of trial links: a function that only the trial calls.
#[inline(never)]
extern "C" fn trial_site() -> u32 {
    std::hint::black_box(1)
}

/// The path and file offset of [`trial_site`].
///
/// # Errors
/// It is not found in our own mappings.
pub fn location() -> Result<(CString, u64), KernelError> {
    own_location(trial_site as *const () as u64).ok_or_else(|| KernelError::Link {
        what: "heapbpf's own program file".into(),
        source: io::Error::from_raw_os_error(libc::ENOENT),
    })
}

/// The path and file offset of heapbpf's own code at an address.
pub fn own_location(address: u64) -> Option<(CString, u64)> {
    let maps = procfs::process::Process::myself().ok()?.maps().ok()?;
    let map = maps.iter().find(|map| (map.address.0..map.address.1).contains(&address))?;
    let path = CString::new("/proc/self/exe").ok()?;
    Some((path, address - map.address.0 + map.offset))
}

/// Whether a multi link to one process runs its program for threads other than the main thread. Linux 6.6 to 6.9
/// compare the PID with the thread's id; 6.10 fixed that.
///
/// # Errors
/// The link cannot be made, or its runs cannot be read.
pub fn sees_all_threads(loader: &Loader, guardian: &Guardian) -> Result<bool, KernelError> {
    let program = loader.program("count_run", ProgramKind::UprobeMulti)?;
    let runs: Array<MapData, u64> = loader.typed_map("TRIAL_RUNS")?;
    let before = runs.get(&0, 0)?;
    let (path, offset) = location()?;
    let pid = Some(std::process::id());
    let target = sys::UprobeTarget { path: &path, offsets: &[offset], cookies: &[0], semaphores: &[], pid };
    let refused = |source| KernelError::Link { what: "heapbpf's own program file".into(), source };
    let link = guardian.link_uprobe(program.as_fd(), sys::How::multi(false), &target).map_err(refused)?;
    std::thread::scope(|scope| std::thread::Builder::new().spawn_scoped(scope, || trial_site()).map(drop))
        .map_err(refused)?;
    drop(link);
    Ok(runs.get(&0, 0)? > before)
}

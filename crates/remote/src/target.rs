//! A process that is examined before it is stopped.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::error::{Busy, Error, Refusal};
use crate::found::{self, FoundBlob, left_open, link_left_open};
use crate::frame::{Gadgets, Search};
use crate::interrupted::Sleeping;
use crate::maps::{Mapping, Maps};
use crate::memory::Memory;
use crate::remote::MAX_TRIES;
use crate::stack;
use crate::status::{Status, start_and_heap};
use crate::sys::{self, Registers};
use crate::work::{FileId, Request, Work};

/// Most bytes of code that are searched for instructions we can use.
const MAX_CODE_BYTES: u64 = 128 << 20;
/// Bytes of code that are read at a time, and how many of them are read again with the next piece. C libraries have the
/// instructions near the beginning.
const PIECE: usize = 64 << 10;
const OVERLAP: usize = 16;
/// How often to start over if the process runs another program before the examination ends, and the pause if that
/// program is not there yet.
const MAX_LOOKS: usize = 4;
const EXEC_PAUSE: Duration = Duration::from_millis(5);
/// More than the size of a signal frame with all existing vector registers.
const MAX_FRAME_BYTES: u64 = 16 << 10;

impl FileId {
    /// The file of exactly this mapping.
    pub(crate) fn of(pid: i32, mapping: &Range<u64>) -> Option<Self> {
        let path = format!("/proc/{pid}/map_files/{:x}-{:x}", mapping.start, mapping.end);
        let data = sys::known_metadata(&path).ok()?;
        let device = libc::makedev(data.stx_dev_major, data.stx_dev_minor);
        Some(Self { device, inode: data.stx_ino })
    }
}

/// A process that may be stopped: nothing was found that forbids it.
#[derive(Debug)]
pub struct Target {
    pid: i32,
    handle: OwnedFd,
    start: u64,
    pub(crate) memory: Arc<Memory>,
    maps: Arc<Maps>,
    /// What [`Target::found`] returns, once it was called: it looks at all descriptors of the process.
    found: OnceLock<Vec<FoundBlob>>,
    pub(crate) gadgets: Gadgets,
    /// Per thread, whether it had a seccomp filter.
    filtered: HashMap<i32, bool>,
    /// Whether the process is left alone while a thread is in a call that would return a part of its work.
    pub(crate) spares_calls: bool,
}

impl Target {
    /// Examines a process. Nothing is done to it.
    ///
    /// # Errors
    /// The process cannot be examined, or must not be stopped.
    pub fn look(pid: u32) -> Result<Self, Refusal> {
        if pid == std::process::id() {
            return Err(Refusal::Own);
        }
        for _ in 0..MAX_LOOKS {
            match Self::look_once(pid)? {
                Some(target) if target.memory.is_there() => return Ok(target),
                // The results mix two programs, or the process has ended, and the next attempt will show which.
                Some(_) => {}
                None => std::thread::sleep(EXEC_PAUSE),
            }
        }
        Err(Refusal::Ended)
    }

    /// `None` if it has ended, or is in the middle of an exec.
    fn look_once(pid: u32) -> Result<Option<Self>, Refusal> {
        let number = i32::try_from(pid).map_err(|_| Refusal::NoProcess(pid))?;
        let status = status_of(pid, None).map_err(|error| gone(pid, "its status", error))?;
        check_status(pid, &status)?;
        let handle = sys::open_process(number).map_err(|error| gone(pid, "the process", error))?;
        let memory = Arc::new(Memory::open(number).map_err(|error| gone(pid, "its memory", error))?);
        let (start, heap) = start_of(pid).map_err(|error| gone(pid, "its start time", error))?;
        if !has_program(pid)? {
            return Ok(None);
        }
        let filtered = check_threads(pid)?;
        check_memory(number)?;
        let maps = File::open(format!("/proc/{pid}/maps")).and_then(|file| Maps::read(file, heap));
        let maps = maps.map_err(|error| gone(pid, "its mappings", error))?;
        let gadgets = find_gadgets(number, &maps).ok_or(Refusal::NoSystemCall)?;
        let (maps, found) = (Arc::new(maps), OnceLock::new());
        Ok(Some(Self { pid: number, handle, start, memory, maps, found, gadgets, filtered, spares_calls: true }))
    }

    /// Allows stops at any moment, even while a thread is in a call that would return a part of its work
    /// ([`Busy::InCall`]).
    #[must_use]
    pub fn at_any_moment(mut self) -> Self {
        self.spares_calls = false;
        self
    }

    /// The process's id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether every thread of the process has a seccomp filter. If such a filter kills for a system call that we have
    /// the process make, then the process may end if the injector dies during that call.
    #[must_use]
    pub fn is_filtered(&self) -> bool {
        self.filtered.values().all(|is_filtered| *is_filtered)
    }

    /// Whether the process still runs the program that it ran when it was examined.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.memory.is_there()
    }

    /// What is mapped, as of [`Target::look`].
    #[must_use]
    pub fn maps(&self) -> &Maps {
        &self.maps
    }

    /// What earlier runs mapped into the process, as of the first call.
    #[must_use]
    pub fn found(&self) -> Vec<FoundBlob> {
        let look = || {
            let mut found = found::find(&self.maps);
            found::add_open(&mut found, left_open(self.pid.unsigned_abs()).map(|(_, link)| link));
            found
        };
        self.found.get_or_init(look).clone()
    }

    /// Memory that is read for any work: the instructions we use, and where a signal frame may go below the stacks of
    /// waiting threads.
    pub(crate) fn needed(&self) -> Vec<Range<u64>> {
        let code = [self.gadgets.system_call, self.gadgets.restorer].map(|start| start..start + 1);
        let stacks = self.threads().into_iter().take(MAX_TRIES).filter_map(|tid| {
            let pointer = Sleeping::look(self.pid, tid)?.stack_pointer;
            Some(pointer.saturating_sub(MAX_FRAME_BYTES)..pointer)
        });
        code.into_iter().chain(stacks).collect()
    }

    /// A copy for the thread that stops the process.
    pub(crate) fn copy(&self) -> Result<Self, Refusal> {
        let handle = self.handle.try_clone().map_err(|source| Refusal::Look { what: "the process".into(), source })?;
        let (memory, maps, filtered) = (Arc::clone(&self.memory), Arc::clone(&self.maps), self.filtered.clone());
        let Self { pid, start, gadgets, spares_calls, .. } = *self;
        Ok(Self { pid, handle, start, memory, maps, found: OnceLock::new(), gadgets, filtered, spares_calls })
    }

    /// The request to a helper process to do this work.
    pub(crate) fn request<'a>(&self, work: &'a Work, limit: Duration) -> Request<&'a Work> {
        let Gadgets { system_call, restorer, restorer_code } = self.gadgets;
        let filtered = self.filtered.iter().map(|(tid, is_filtered)| (*tid, *is_filtered)).collect();
        let (pid, start, restorer_code) = (self.pid, self.start, restorer_code.to_vec());
        let spares_calls = self.spares_calls;
        Request { pid, start, system_call, restorer, restorer_code, filtered, spares_calls, limit, work }
    }

    /// The descriptors that go with a request.
    pub(crate) fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        let [content, pages] = self.memory.descriptors();
        [self.handle.as_fd(), content, pages]
    }

    /// The target of a request. Its mappings are read anew.
    ///
    /// # Errors
    /// The process has ended, or is another one.
    pub(crate) fn of(request: &Request<Work>, [handle, content, pages]: [OwnedFd; 3]) -> Result<Self, Error> {
        let pid = request.pid.unsigned_abs();
        let changed = Error::Busy { why: Busy::Changed, stopped: Duration::ZERO };
        let (start, heap) = start_of(pid).map_err(|error| gone(pid, "its start time", error))?;
        let maps = File::open(format!("/proc/{pid}/maps")).and_then(|file| Maps::read(file, heap));
        let maps = maps.map_err(|error| gone(pid, "its mappings", error))?;
        let gadgets = Gadgets::again(request.system_call, request.restorer, &request.restorer_code);
        let Some(gadgets) = gadgets.filter(|_| start == request.start) else { return Err(changed) };
        let (memory, filtered) = (Arc::new(Memory::of(content, pages)), request.filtered.iter().copied().collect());
        let Request { pid, spares_calls, .. } = *request;
        let (maps, found) = (Arc::new(maps), OnceLock::new());
        Ok(Self { pid, handle, start, memory, maps, found, gadgets, filtered, spares_calls })
    }

    /// Whether the process still runs the same program, and its id has not been reused.
    pub(crate) fn is_same_program(&self) -> bool {
        self.memory.is_there() && start_of(self.pid.unsigned_abs()).is_ok_and(|(start, _)| start == self.start)
    }

    /// Whether a thread of the process is on the stack that it was given, with space down to `lowest`.
    pub(crate) fn has_given(&self, tid: i32, registers: &Registers, lowest: u64) -> bool {
        stack::is_given(&self.maps, registers, tid == self.pid, lowest)
    }

    /// The threads when the process was examined, those without a seccomp filter first.
    pub(crate) fn threads(&self) -> Vec<i32> {
        let mut threads: Vec<_> = self.filtered.iter().map(|(tid, is_filtered)| (*is_filtered, *tid)).collect();
        threads.sort_unstable();
        threads.into_iter().map(|(_, tid)| tid).collect()
    }

    /// Whether the thread may have a seccomp filter.
    pub(crate) fn may_be_filtered(&self, tid: i32) -> bool {
        self.filtered.get(&tid).copied().unwrap_or(true)
    }

    /// A descriptor of the process, with the access that the process itself has.
    pub(crate) fn take_descriptor(&self, fd: u64) -> io::Result<OwnedFd> {
        let fd = i32::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
        sys::take_descriptor(&self.handle, fd)
    }

    /// Descriptors of a blob's memfd, which an injector that died left open.
    pub(crate) fn descriptors_of(&self, found: &FoundBlob) -> Vec<u64> {
        let link = found.link();
        left_open(self.pid.unsigned_abs()).filter(|(_, other)| *other == link).map(|(fd, _)| fd).collect()
    }

    /// Whether this still is such a descriptor.
    pub(crate) fn is_descriptor_of(&self, found: &FoundBlob, fd: u64) -> bool {
        link_left_open(self.pid.unsigned_abs(), fd) == Some(found.link())
    }
}

fn status_of(pid: u32, tid: Option<i32>) -> io::Result<Status> {
    let path = tid.map_or_else(|| format!("/proc/{pid}/status"), |tid| format!("/proc/{pid}/task/{tid}/status"));
    Status::read(&path)
}

/// Start time, and beginning of the heap.
fn start_of(pid: u32) -> io::Result<(u64, u64)> {
    let stat = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat"))?).into_owned();
    start_and_heap(&stat).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

fn gone(pid: u32, what: &'static str, source: io::Error) -> Refusal {
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => Refusal::NoProcess(pid),
        Some(libc::EACCES | libc::EPERM) if is_tracing_forbidden() => Refusal::TracingForbidden,
        _ => Refusal::Look { what: what.into(), source },
    }
}

/// Whether the host's settings (Yama's `ptrace_scope`) let nobody trace, whatever privileges they have.
fn is_tracing_forbidden() -> bool {
    fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() == "3")
}

fn check_status(pid: u32, status: &Status) -> Result<(), Refusal> {
    if status.process != pid {
        return Err(Refusal::Thread { thread: pid, process: status.process });
    }
    if status.is_dead() {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        return Err(if threads > 1 { Refusal::MainThreadEnded } else { Refusal::Ended });
    }
    if !status.has_memory {
        return Err(if status.is_of_kernel() { Refusal::KernelThread } else { Refusal::Ended });
    }
    if status.tracer != 0 {
        return Err(traced_by(status.tracer));
    }
    if status.state == 'T' {
        return Err(Refusal::JobControl);
    }
    Ok(())
}

/// Why a process that this thread traces is left alone.
pub(crate) fn traced_by(tid: u32) -> Refusal {
    // The process that the thread belongs to.
    let tracer = status_of(tid, None).map_or(tid, |status| status.process);
    // The helper process that stops others runs the same program.
    let program = fs::read_link(format!("/proc/{tracer}/exe")).unwrap_or_default();
    let is_heapbpf = program.file_name().is_some_and(|name| name == "heapbpf" || name == "heapbpf (deleted)");
    if is_heapbpf { Refusal::Heapbpf(tracer) } else { Refusal::Traced(tracer) }
}

/// Checks by the auxiliary vector that a process runs a 64-bit program. The program's file is not read, because its
/// server may not answer. Returns whether there is a program.
fn has_program(pid: u32) -> Result<bool, Refusal> {
    let mut word = [0; 8];
    let read = File::open(format!("/proc/{pid}/auxv")).and_then(|mut vector| vector.read(&mut word));
    read.map_err(|error| gone(pid, "its program", error))?;
    is_of_program(u64::from_le_bytes(word))
}

/// Whether a program has this first word of the auxiliary vector, which is zero in the middle of an exec, and if the
/// process has no memory any more.
const fn is_of_program(word: u64) -> Result<bool, Refusal> {
    // A 32-bit program has two numbers there.
    if word >> 32 == 0 { Ok(word != 0) } else { Err(Refusal::NotNative) }
}

/// Checks each thread, because a single one may forbid a stop. Returns which threads have a seccomp filter.
fn check_threads(pid: u32) -> Result<HashMap<i32, bool>, Refusal> {
    let mut filtered = HashMap::new();
    let list = fs::read_dir(format!("/proc/{pid}/task")).map_err(|error| gone(pid, "its threads", error))?;
    for tid in list.map_while(Result::ok).filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
        let Ok(status) = status_of(pid, Some(tid)) else { continue };
        if status.tracer != 0 {
            return Err(traced_by(status.tracer));
        }
        if status.has_shadow_stack {
            return Err(Refusal::ShadowStack);
        }
        if status.seccomp == 1 {
            return Err(Refusal::StrictSeccomp);
        }
        filtered.insert(tid, status.seccomp != 0);
    }
    Ok(filtered)
}

/// Checks that no other process runs in the same memory: it would not be stopped, and a parent in vfork(2) does not
/// stop at all. The other process may be anybody's child by now. One comparison takes a microsecond, so all processes
/// are compared.
fn check_memory(pid: i32) -> Result<(), Refusal> {
    sharer(pid, sys::KCMP_VM)?.map_or(Ok(()), |other| Err(Refusal::SharedMemory(other)))
}

/// Checks that no other process shares the descriptors. It is not stopped either, and would see one of ours, and get
/// another number for one of its own.
pub(crate) fn check_files(pid: i32) -> Result<(), Refusal> {
    sharer(pid, sys::KCMP_FILES)?.map_or(Ok(()), |other| Err(Refusal::SharedFiles(other)))
}

fn sharer(pid: i32, what: libc::c_int) -> Result<Option<u32>, Refusal> {
    let all = fs::read_dir("/proc").map_err(|source| Refusal::Look { what: "the list of processes".into(), source })?;
    let mut others = all.map_while(Result::ok).filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(others.find(|other: &i32| *other != pid && sys::shares(pid, *other, what) == Some(true)).map(i32::unsigned_abs))
}

/// Searches the C library's code first, and the pages with which we replaced others last. The blobs themselves are
/// skipped: pages that were set aside there are about to be put back, and their original place has the same code before
/// and afterwards.
fn find_gadgets(pid: i32, maps: &Maps) -> Option<Gadgets> {
    let is_code = |mapping: &&Mapping| mapping.is_executable && mapping.is_readable && mapping.inode != 0;
    let mut code: Vec<&Mapping> = maps.as_slice().iter().filter(is_code).collect();
    code.sort_by_key(|mapping| {
        let file = mapping.name.rsplit('/').next().unwrap_or_default();
        let is_ours = found::parse_name(&mapping.name).is_some();
        (
            is_ours,
            !(file.starts_with("libc.") || file.starts_with("libc-") || file.starts_with("ld-musl")),
            mapping.bytes(),
        )
    });
    let ours: Vec<Range<u64>> = found::find(maps).into_iter().map(|found| found.range).collect();
    code.retain(|mapping| !ours.iter().any(|range| range.contains(&mapping.range.start)));
    let mut search = Search::default();
    let mut left = MAX_CODE_BYTES;
    let mut piece = vec![0; PIECE];
    for mapping in code {
        let mut at = mapping.range.start;
        while at < mapping.range.end && left > 0 {
            let bytes = (mapping.range.end - at).min(PIECE as u64) as usize;
            let read = sys::read_memory(pid, at, &mut piece[..bytes]).unwrap_or(0);
            search.look(at, &piece[..read]);
            if let Some(gadgets) = search.found() {
                return Some(gadgets);
            }
            left = left.saturating_sub(bytes as u64);
            if read < PIECE {
                break;
            }
            at += (PIECE - OVERLAP) as u64;
        }
    }
    search.found_at_last()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_in_the_middle_of_an_exec_has_not_ended() {
        // Empty; `AT_SYSINFO_EHDR` of a 64-bit program; the same of a 32-bit one, with its value.
        let of = [0, 33, 33 | 0xf7f0_0000 << 32].map(is_of_program);
        assert!(matches!(of, [Ok(false), Ok(true), Err(Refusal::NotNative)]), "{of:?}");
    }
}

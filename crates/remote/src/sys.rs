//! The system calls of the injector, each behind a function that is safe to call.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, MemfdFlags, SealFlags, Statx, StatxFlags, fcntl_add_seals, memfd_create, statx};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// A thread's general registers.
pub(crate) type Registers = libc::user_regs_struct;

const NT_X86_XSTATE: usize = 0x202;
const SECCOMP_GET_FILTER: u32 = 0x420c;
/// Most instructions of a filter that the kernel accepts, and most filters that are read.
const MAX_FILTER: usize = 4096;
const MAX_FILTERS: usize = 256;
pub(crate) const KCMP_VM: libc::c_int = 1;
pub(crate) const KCMP_FILES: libc::c_int = 2;
const SIGNAL_SET_BYTES: usize = 8;
const SHORTEST_PAUSE: Duration = Duration::from_micros(3);
const LONGEST_PAUSE: Duration = Duration::from_micros(300);

fn result(value: libc::c_long) -> io::Result<libc::c_long> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// # Safety
/// `data` is what the request wants: a number, or a pointer to memory that the request may read or write.
unsafe fn ptrace(request: u32, tid: i32, address: usize, data: *mut c_void) -> io::Result<libc::c_long> {
    // SAFETY: promised by the caller; the kernel checks everything else.
    result(unsafe { libc::ptrace(request, tid, address as *mut c_void, data) })
}

fn ptrace_plain(request: u32, tid: i32, data: usize) -> io::Result<()> {
    // SAFETY: the requests of the callers below take a number.
    unsafe { ptrace(request, tid, 0, data as *mut c_void) }.map(drop)
}

/// Has the kernel end this process after `time`, unless a later call sets another time. It sends SIGKILL, which also
/// ends a stopped process.
///
/// # Errors
/// The user already has as many timers and signals queued as allowed.
pub(crate) fn end_after(time: Duration) -> io::Result<()> {
    /// The process that owns the timer, and the timer: children do not inherit it.
    static TIMER: Mutex<Option<(u32, usize)>> = Mutex::new(None);
    let mut known = TIMER.lock().unwrap_or_else(PoisonError::into_inner);
    let own = std::process::id();
    let timer = match *known {
        Some((pid, timer)) if pid == own => timer,
        _ => {
            // SAFETY: zero is a valid value of each field.
            let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
            (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_SIGNAL, libc::SIGKILL);
            let mut timer: libc::timer_t = std::ptr::null_mut();
            // SAFETY: both are valid for the call, which writes the timer's name.
            let made = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
            result(made.into())?;
            known.insert((own, timer as usize)).1
        }
    };
    let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Zero would mean never.
    let first = libc::timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: i64::from(time.subsec_nanos().max(1)) };
    let when = libc::itimerspec { it_interval: none, it_value: first };
    // SAFETY: the timer is this process's, and the kernel reads the time.
    result(unsafe { libc::timer_settime(timer as libc::timer_t, 0, &raw const when, std::ptr::null_mut()) }.into())
        .map(drop)
}

/// Becomes the tracer of a thread, without stopping it.
pub(crate) fn seize(tid: i32, options: i32) -> io::Result<()> {
    ptrace_plain(libc::PTRACE_SEIZE, tid, options as usize)
}

/// Changes the options of a stopped thread.
pub(crate) fn set_options(tid: i32, options: i32) -> io::Result<()> {
    ptrace_plain(libc::PTRACE_SETOPTIONS, tid, options as usize)
}

/// Asks a traced thread to stop.
pub(crate) fn interrupt(tid: i32) -> io::Result<()> {
    ptrace_plain(libc::PTRACE_INTERRUPT, tid, 0)
}

/// Lets a stopped thread go on; `signal` is delivered if the thread stopped for it.
pub(crate) fn cont(tid: i32, signal: i32) -> io::Result<()> {
    ptrace_plain(libc::PTRACE_CONT, tid, signal as usize)
}

/// Lets a stopped thread go on to the next entry of a system call, or return from one.
pub(crate) fn cont_to_system_call(tid: i32) -> io::Result<()> {
    ptrace_plain(libc::PTRACE_SYSCALL, tid, 0)
}

/// Stops tracing a stopped thread, which goes on; `signal` is delivered if the thread stopped for it.
pub(crate) fn detach(tid: i32, signal: i32) -> io::Result<()> {
    ptrace_plain(libc::PTRACE_DETACH, tid, signal as usize)
}

/// The registers of a stopped thread.
pub(crate) fn registers(tid: i32) -> io::Result<Registers> {
    let mut registers = MaybeUninit::<Registers>::uninit();
    // SAFETY: the kernel writes a whole `user_regs_struct`.
    unsafe { ptrace(libc::PTRACE_GETREGS, tid, 0, registers.as_mut_ptr().cast()) }?;
    // SAFETY: the call succeeded.
    Ok(unsafe { registers.assume_init() })
}

/// Sets the registers of a stopped thread.
pub(crate) fn set_registers(tid: i32, registers: &Registers) -> io::Result<()> {
    // SAFETY: the kernel only reads.
    unsafe { ptrace(libc::PTRACE_SETREGS, tid, 0, std::ptr::from_ref(registers).cast_mut().cast()) }.map(drop)
}

/// Signals that a stopped thread blocks. During a call such as ppoll: those that it blocks again afterwards.
pub(crate) fn signal_mask(tid: i32) -> io::Result<u64> {
    let mut mask = 0u64;
    let at = std::ptr::from_mut(&mut mask).cast();
    // SAFETY: the kernel writes eight bytes.
    unsafe { ptrace(libc::PTRACE_GETSIGMASK, tid, SIGNAL_SET_BYTES, at) }?;
    Ok(mask)
}

/// Sets the signals that a stopped thread blocks.
pub(crate) fn set_signal_mask(tid: i32, mask: u64) -> io::Result<()> {
    let mut mask = mask;
    let at = std::ptr::from_mut(&mut mask).cast();
    // SAFETY: the kernel reads eight bytes.
    unsafe { ptrace(libc::PTRACE_SETSIGMASK, tid, SIGNAL_SET_BYTES, at) }.map(drop)
}

/// Floating-point and vector registers of a stopped thread, in the standard form of XSAVE.
pub(crate) fn extended_state(tid: i32) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0u8; 32 << 10];
    let mut io = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: the kernel writes at most `iov_len` bytes, and how many it wrote.
    unsafe { ptrace(libc::PTRACE_GETREGSET, tid, NT_X86_XSTATE, std::ptr::from_mut(&mut io).cast()) }?;
    bytes.truncate(io.iov_len);
    Ok(bytes)
}

/// Whether a stopped thread may turn its own system calls into signals (syscall user dispatch). Kernels that cannot say
/// do not have it in a form that programs use.
pub(crate) fn has_system_call_dispatch(tid: i32) -> bool {
    let mut config = [0u64; 4];
    let at = std::ptr::from_mut(&mut config).cast();
    // SAFETY: the kernel writes 32 bytes, the size that is passed.
    let got = unsafe { ptrace(libc::PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, tid, size_of_val(&config), at) };
    got.is_ok() && config[0] != 0
}

/// The seccomp filters of a stopped thread; empty if it has none.
pub(crate) fn seccomp_filters(tid: i32) -> io::Result<Vec<Vec<libc::sock_filter>>> {
    let mut filters = Vec::new();
    loop {
        let number = filters.len();
        // SAFETY: without a pointer, the kernel only says how long the filter is.
        let length = unsafe { ptrace(SECCOMP_GET_FILTER, tid, number, std::ptr::null_mut()) };
        let length = match length {
            Ok(length) => usize::try_from(length).unwrap_or(0).min(MAX_FILTER),
            // No more filters; no filters at all.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(filters),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && number == 0 => return Ok(filters),
            Err(error) => return Err(error),
        };
        let nothing = libc::sock_filter { code: 0, jt: 0, jf: 0, k: 0 };
        let mut program = vec![nothing; MAX_FILTER];
        // SAFETY: the kernel writes as many instructions as it said, and none is longer than the buffer.
        unsafe { ptrace(SECCOMP_GET_FILTER, tid, number, program.as_mut_ptr().cast()) }?;
        program.truncate(length);
        filters.push(program);
        if number >= MAX_FILTERS {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
    }
}

/// A thread's area for restartable sequences, in which it announces that it is in one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RseqArea {
    /// Its address.
    pub(crate) address: u64,
    /// The value in front of the code to which the kernel sends a thread that was interrupted in a sequence.
    pub(crate) signature: u32,
}

/// A stopped thread's area for restartable sequences, if it has one.
pub(crate) fn rseq_area(tid: i32) -> Option<RseqArea> {
    // Pointer; size and signature, 32 bits each; flags and padding.
    let mut config = [0u64; 3];
    let at = std::ptr::from_mut(&mut config).cast();
    // SAFETY: the kernel writes 24 bytes, the size that is passed.
    unsafe { ptrace(libc::PTRACE_GET_RSEQ_CONFIGURATION, tid, size_of_val(&config), at) }.ok()?;
    let [address, size_and_signature, _] = config;
    (address != 0).then_some(RseqArea { address, signature: (size_and_signature >> 32) as u32 })
}

/// Writes eight bytes of a stopped thread's memory, even where the thread itself may not write. The write is not
/// divisible: all bytes are written, or none.
pub(crate) fn poke(tid: i32, address: u64, bytes: [u8; 8]) -> io::Result<()> {
    // SAFETY: the data is a number.
    unsafe { ptrace(libc::PTRACE_POKETEXT, tid, address as usize, usize::from_le_bytes(bytes) as *mut c_void) }
        .map(drop)
}

/// What a traced thread did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// It ended.
    Ended,
    /// It stopped because it was asked to.
    Interrupted,
    /// It stopped with its process, by job control.
    JobControl,
    /// It stopped at the entry of, or the return from, a system call.
    SystemCall,
    /// It stopped before this signal is delivered.
    Signal(i32),
}

impl Report {
    /// Decodes a status of waitpid(2).
    fn of(status: i32) -> Self {
        if !libc::WIFSTOPPED(status) {
            return Self::Ended;
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        match (event, signal) {
            (libc::PTRACE_EVENT_STOP, libc::SIGTRAP) => Self::Interrupted,
            (libc::PTRACE_EVENT_STOP, _) => Self::JobControl,
            (0, signal) if signal == libc::SIGTRAP | 0x80 => Self::SystemCall,
            (_, signal) => Self::Signal(signal),
        }
    }
}

/// What happened to a traced process that is about to exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Nothing so far.
    None,
    /// It has called exec, and is stopped before the new program's first instruction.
    Exec,
    /// It is stopped before this signal is delivered; 0 for none.
    Signal(i32),
    /// It ended. Its parent will be notified.
    Ended,
}

/// What happened to a process of ours that the calling thread traces. This takes no report from its parent, which may
/// be another thread.
pub(crate) fn event(pid: i32) -> io::Result<Event> {
    let flags = libc::WEXITED | libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    // SAFETY: the kernel writes the information.
    let failed = unsafe { libc::waitid(libc::P_PID, pid as libc::id_t, info.as_mut_ptr(), flags) } != 0;
    if failed {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EINTR) => Ok(Event::None),
            Some(libc::ECHILD) => Ok(Event::Ended),
            _ => Err(error),
        };
    }
    // SAFETY: all zeros is a valid value, and the fields read are those that waitid(2) sets.
    let (about, code, status) = unsafe {
        let info = info.assume_init();
        (info.si_pid(), info.si_code, info.si_status())
    };
    if about == 0 {
        return Ok(Event::None);
    }
    Ok(match code {
        libc::CLD_TRAPPED | libc::CLD_STOPPED if status >> 8 == libc::PTRACE_EVENT_EXEC => Event::Exec,
        libc::CLD_TRAPPED | libc::CLD_STOPPED if status >> 8 == 0 => Event::Signal(status),
        libc::CLD_TRAPPED | libc::CLD_STOPPED => Event::Signal(0),
        _ => Event::Ended,
    })
}

/// What `tid` did, or, if it is −1, any thread that the calling thread traces. `None`: nothing so far, or there is no
/// such thread any more.
pub(crate) fn look(tid: i32) -> io::Result<Option<(i32, Report)>> {
    let flags = libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG;
    loop {
        let mut status = 0;
        // SAFETY: the kernel writes the status.
        let got = unsafe { libc::waitpid(tid, &raw mut status, flags) };
        match got {
            0 => return Ok(None),
            got if got > 0 => return Ok(Some((got, Report::of(status)))),
            _ => {}
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ECHILD) => return Ok(None),
            _ => return Err(error),
        }
    }
}

/// Reaps a thread that another of our threads traces, if it has ended; never a child of ours (`__WCLONE`). waitid(2)
/// also reports that a traced thread stopped, whatever the flags ask for, and that report belongs to the tracer. So
/// this first peeks: a thread that has ended reports nothing else any more.
pub(crate) fn reap(tid: i32) {
    let wait = |flags| {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::__WCLONE | flags;
        // SAFETY: the kernel writes the information, and all zeros is a valid value.
        unsafe {
            libc::waitid(libc::P_PID, tid as libc::id_t, info.as_mut_ptr(), flags);
            info.assume_init()
        }
    };
    if matches!(wait(libc::WNOWAIT).si_code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED) {
        wait(0);
    }
}

/// Reads memory that the process itself may read. Returns the number of bytes before the first that it may not read.
pub(crate) fn read_memory(pid: i32, address: u64, bytes: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: bytes.len() };
    // SAFETY: the kernel writes at most `bytes.len()` bytes there.
    result(unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) } as libc::c_long)
        .map(|read| read as usize)
}

/// Writes memory that the thread itself may write. If the id has been reused, this writes to its new owner.
pub(crate) fn write_memory(tid: i32, address: u64, bytes: &[u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: bytes.len() };
    // SAFETY: the kernel only reads `bytes`.
    let written = unsafe { libc::process_vm_writev(tid, &raw const local, 1, &raw const remote, 1, 0) };
    if result(written as libc::c_long)? as usize == bytes.len() {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EFAULT))
    }
}

/// Whether two processes share their memory ([`KCMP_VM`]) or descriptor table ([`KCMP_FILES`]); `None` if the kernel
/// does not say.
pub(crate) fn shares(pid: i32, other: i32, what: libc::c_int) -> Option<bool> {
    // SAFETY: no pointers.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, pid, other, what, 0, 0) };
    (order >= 0).then_some(order == 0)
}

/// What the kernel knows about a file, without asking its server.
pub(crate) fn known_metadata(path: &str) -> io::Result<Statx> {
    Ok(statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?)
}

/// Forbids for good that a memfd is written or resized.
pub(crate) fn seal(file: &File) -> io::Result<()> {
    Ok(fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?)
}

/// Flags of memfd_create(2), as far as this kernel accepts them, for a memfd that can be sealed, is closed by exec and
/// cannot be executed.
pub(crate) fn memfd_flags() -> u32 {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL;
    let is_accepted = memfd_create(c"heapbpf-trial", flags).is_ok();
    let flags = if is_accepted { flags } else { MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING };
    flags.bits()
}

/// Sends a signal to a process.
pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: no pointers.
    let _ = unsafe { libc::kill(pid, signal) };
}

/// Sleeps between two polls of a thread that has been waited for since `since`, longer and longer: the caller runs
/// before all ordinary threads, and would keep the very thread it waits for off the CPU.
pub(crate) fn pause(since: Instant) {
    std::thread::sleep((since.elapsed() / 4).clamp(SHORTEST_PAUSE, LONGEST_PAUSE));
}

/// Opens a handle of a process that stays bound to it if the id is reused.
pub(crate) fn open_process(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Duplicates a descriptor of a process, with the access rights that it has there.
pub(crate) fn take_descriptor(process: &OwnedFd, fd: i32) -> io::Result<OwnedFd> {
    Ok(pidfd_getfd(process, fd, PidfdGetfdFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The process that stops others may be stopped itself, and its targets would stay stopped. Only SIGKILL ends a
    /// stopped process.
    #[test]
    fn a_process_that_is_stopped_is_ended_after_its_time_as_well() {
        // SAFETY: the child only makes system calls, with memory of its own.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_set = end_after(Duration::from_secs(3600)).and_then(|()| end_after(Duration::from_millis(20)));
            // SAFETY: no pointers. Neither call returns.
            unsafe {
                if is_set.is_ok() {
                    libc::raise(libc::SIGSTOP);
                }
                libc::_exit(1);
            }
        }
        assert!(child > 0, "a child");
        let mut status = 0;
        // SAFETY: our child, and a status of ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
    }
}

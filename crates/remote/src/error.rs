//! Why a process is left alone, and what can go wrong once it is stopped.

use std::borrow::Cow;
use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::wire::os_error;

/// Why a process is left alone. Nothing was done to it.
#[derive(Debug, Deserialize, Serialize, thiserror::Error)]
pub enum Refusal {
    /// Remote system calls are only implemented for x86-64.
    #[error("this machine is not supported: mapping code into running processes needs x86-64 Linux")]
    Machine,
    /// No process has this id.
    #[error("there is no process {0}")]
    NoProcess(u32),
    /// The id belongs to a thread.
    #[error("{thread} is a thread of process {process}")]
    Thread {
        /// The id that was given.
        thread: u32,
        /// The process it belongs to.
        process: u32,
    },
    /// The process is the calling one.
    #[error("a process cannot stop itself")]
    Own,
    /// A kernel thread has no memory of its own.
    #[error("it is a kernel thread")]
    KernelThread,
    /// The process has ended, or is about to.
    #[error("it has ended")]
    Ended,
    /// The main thread has ended while others run: `/proc` shows nothing of such a process.
    #[error("its main thread has ended while other threads run, so its memory cannot be read")]
    MainThreadEnded,
    /// A debugger, or a similar tool, traces it.
    #[error("it is traced by process {0} (a debugger or strace)")]
    Traced(u32),
    /// Another heapbpf traces it, which takes milliseconds.
    #[error("another heapbpf (process {0}) has stopped it for a moment")]
    Heapbpf(u32),
    /// Nobody may trace here. This cannot be changed until the host restarts.
    #[error(
        "this host lets nobody stop or read other processes, not even root (kernel.yama.ptrace_scope is 3); only a \
         restart with another value changes that"
    )]
    TracingForbidden,
    /// None of its threads runs until its control group is thawed.
    #[error("its control group is frozen (docker pause, or cgroup.freeze); thaw it first")]
    Frozen,
    /// Mapped data has protection key 0, like all memory for which the process chose no key.
    #[error("its thread {0} may not use memory without a protection key of its own (pkeys), so hooks would end it")]
    ProtectionKeys(u32),
    /// Stopped by a signal, such as Ctrl-Z.
    #[error("it is stopped by a signal (SIGSTOP or Ctrl-Z); continue it first (kill -CONT)")]
    JobControl,
    /// Some of them would run on while others are stopped.
    #[error("it has too many threads to stop all of them at once")]
    Threads,
    /// Not 64-bit code.
    #[error("it is not a 64-bit program for this machine")]
    NotNative,
    /// Strict mode allows four system calls.
    #[error("one of its threads runs under strict seccomp, which allows only read, write and exit")]
    StrictSeccomp,
    /// A seccomp filter that would end the process for a call we need, ask another process about it, or keep our signal
    /// frame from being left.
    #[error(
        "its seccomp filter {answer} {call}: heapbpf would suspend it for this call, but if heapbpf were killed at \
         that moment, the filter would apply"
    )]
    Seccomp {
        /// Name of the system call.
        call: Cow<'static, str>,
        /// What the filter does.
        answer: String,
    },
    /// Its filters cannot be read.
    #[error(
        "its seccomp filter cannot be read: {0} (this needs CAP_SYS_ADMIN, and heapbpf itself must run without a \
         seccomp filter)"
    )]
    UnknownSeccomp(#[serde(with = "os_error")] io::Error),
    /// Return addresses are checked by the processor.
    #[error("it runs with shadow stacks")]
    ShadowStack,
    /// Another process runs in the same memory. Its threads would not be stopped.
    #[error("it shares its memory with process {0} (vfork, or clone with CLONE_VM)")]
    SharedMemory(u32),
    /// Another process shares its descriptor table: it would see one of our descriptors, and get another number for one
    /// of its own.
    #[error("it shares its file descriptors with process {0} (clone with CLONE_FILES)")]
    SharedFiles(u32),
    /// It has no code that makes a system call and returns, or none that leaves a signal frame.
    #[error(
        "no code was found in it that makes a system call and returns, or that returns from a signal handler (is its \
         C library unusual?)"
    )]
    NoSystemCall,
    /// Reading something about it failed.
    #[error("{what} cannot be read: {source}; run as root, or with CAP_SYS_PTRACE")]
    Look {
        /// What was to be read.
        what: Cow<'static, str>,
        /// What the kernel said.
        #[serde(with = "os_error")]
        source: io::Error,
    },
}

/// Why another attempt may succeed. The process was released.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum Busy {
    /// A thread did not stop in time: it waits for a disk, or (vfork) for a child, or no CPU was free.
    #[error("a thread did not stop in time")]
    Slow,
    /// The steps took longer than the limit, so not all were done. What was done is harmless, and may still be there.
    #[error("the time limit was reached before everything was done")]
    Late,
    /// Job control stopped the process in the meantime.
    #[error("a signal stopped it (SIGSTOP or Ctrl-Z)")]
    JobControl,
    /// Memory has changed since the plan was made, or the process runs another program now.
    #[error("its memory has changed since it was examined")]
    Changed,
    /// A thread is in the middle of an instruction that is to be replaced.
    #[error("a thread is in the middle of code that would be replaced")]
    Position,
    /// The caller's check said that this is not the moment.
    #[error("a call that probes are counting is still in progress, or another process uses its memory")]
    NotNow,
    /// A thread is in a call that may have done part of its work. A stop would make it return early.
    #[error("a thread is in a system call that a stop might cut short (such as a write to a full pipe)")]
    InCall,
    /// No thread can make system calls for us: the memory below its stack pointer cannot take a signal frame, it
    /// redirects its system calls (syscall user dispatch), or it is in a restartable sequence that cannot be aborted.
    #[error("none of its threads can make a system call for heapbpf")]
    NoThread,
}

/// Why a stop achieved nothing.
#[derive(Debug, Deserialize, Serialize, thiserror::Error)]
pub enum Error {
    /// It was not stopped.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Another attempt may succeed.
    #[error("{why} (stopped for {} µs)", stopped.as_micros())]
    Busy {
        /// Why.
        why: Busy,
        /// How long it was stopped.
        stopped: Duration,
    },
    /// The kernel refused a system call of the target. What had been done was undone.
    #[error("the kernel refused {call} in the process: {source}")]
    Call {
        /// Name of the system call.
        call: Cow<'static, str>,
        /// What the kernel said.
        #[serde(with = "os_error")]
        source: io::Error,
    },
    /// It ended during the stop.
    #[error("it ended while it was stopped")]
    Ended,
    /// A ptrace request failed in a way that the kernel does not document.
    #[error("{what} failed: {source}")]
    Trace {
        /// What was tried.
        what: Cow<'static, str>,
        /// What the kernel said.
        #[serde(with = "os_error")]
        source: io::Error,
    },
    /// A kernel request about the process does not return (another process may handle its page faults). A helper
    /// process that waits for it is ended, and the target goes on.
    #[error("a kernel request about it did not return within {} ms; it was released", .0.as_millis())]
    Stuck(Duration),
    /// The process or another tool has written into the replaced pages, and may keep what it found there. Nothing was
    /// done.
    #[error("its code at {0:#x} has since been changed by the process or another tool; it is left as it is")]
    Patched(u64),
    /// What was found cannot be removed: it is not laid out as its name says. Nothing was done.
    #[error("the mapping at {0:#x} is not laid out as its name says; it is left as it is")]
    Damaged(u64),
}

/// An [`Error`] before the length of the stop is known.
#[derive(Debug)]
pub(crate) enum Failure {
    Busy(Busy),
    Refused(Refusal),
    Call(&'static str, io::Error),
    Ended,
    Trace(&'static str, io::Error),
    Patched(u64),
}

impl Failure {
    /// Adds the time that the process was stopped.
    pub(crate) fn stopped(self, stopped: Duration) -> Error {
        match self {
            Self::Refused(why) => Error::Refused(why),
            Self::Busy(why) => Error::Busy { why, stopped },
            Self::Call(call, source) => Error::Call { call: call.into(), source },
            Self::Ended => Error::Ended,
            Self::Trace(what, source) => Error::Trace { what: what.into(), source },
            Self::Patched(address) => Error::Patched(address),
        }
    }
}

//! A child process that is always stopped, except while it runs a piece of code with given registers.
//!
//! Its memory is shared with this process, at the same addresses, so that reading it needs no system call.

use std::io::Error;
use std::ptr;

use libc::{PROT_EXEC, PROT_READ, PROT_WRITE, c_int, c_void, pid_t, user_fpregs_struct, user_regs_struct};

/// Bytes of memory at a fixed address.
pub struct Area {
    address: u64,
    bytes: usize,
}

impl Area {
    /// Maps zeros at `address`, which child processes will share.
    ///
    /// # Panics
    /// If something is mapped there.
    pub fn map(address: u64, bytes: usize) -> Self {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping, where nothing was: MAP_FIXED_NOREPLACE.
        let mapped = unsafe { libc::mmap(address as *mut c_void, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) };
        assert_eq!(mapped as u64, address, "{}", Error::last_os_error());
        Self { address, bytes }
    }

    /// Its bytes. The child, which writes to them too, must be stopped.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped by `map`, never unmapped while this lives. The child does not run: `Child::run` returns when
        // it has stopped, and borrows nothing.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }

    /// The bytes from `address` on.
    pub fn at(&mut self, address: u64, length: usize) -> &mut [u8] {
        let from = (address - self.address) as usize;
        &mut self.bytes()[from..from + length]
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`; no reference to it outlives this.
        unsafe { libc::munmap(self.address as *mut c_void, self.bytes) };
    }
}

/// The registers with which a piece of code begins, or has ended.
#[derive(Clone, Copy)]
pub struct State {
    pub registers: user_regs_struct,
    pub vectors: user_fpregs_struct,
}

/// How a piece of code ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    pub signal: c_int,
    /// Address of the fault, for signals that have one.
    pub address: u64,
}

/// The child process. It is killed when this is dropped.
pub struct Child(pid_t);

/// Seconds of CPU time after which a piece of code is assumed to loop forever.
const SECONDS: u64 = 120;

impl Child {
    /// Forks a child that may execute everything in `code`.
    pub fn fork(code: &[&Area]) -> Self {
        // SAFETY: between fork and its end the child only makes system calls, which hold no lock.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "{}", Error::last_os_error());
        if pid == 0 {
            Self::wait_to_be_run(code);
        }
        let child = Self(pid);
        assert_eq!(child.wait(), libc::SIGSTOP);
        child
    }

    fn wait_to_be_run(code: &[&Area]) -> ! {
        for area in code {
            // SAFETY: the area's own range.
            unsafe {
                libc::mprotect(area.address as *mut c_void, area.bytes, PROT_READ | PROT_WRITE | PROT_EXEC);
            }
        }
        let limit = libc::rlimit { rlim_cur: SECONDS, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: system calls that get no memory except `limit`. Nothing of this process is used afterwards: its
        // parent sets all registers before it goes on.
        unsafe {
            libc::setrlimit(libc::RLIMIT_CPU, &limit);
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
            libc::_exit(1)
        }
    }

    /// Waits until the child stops, and returns the signal.
    fn wait(&self) -> c_int {
        let mut status = 0;
        // SAFETY: only writes to `status`.
        let waited = unsafe { libc::waitpid(self.0, &mut status, 0) };
        assert!(waited == self.0 && libc::WIFSTOPPED(status), "the child has ended: {waited} {status:#x}");
        libc::WSTOPSIG(status)
    }

    fn request(&self, request: libc::c_uint, data: *mut c_void) {
        // SAFETY: of the requests used here, those that write do so to `data`, which their callers give as a structure
        // of the request's type.
        let result = unsafe { libc::ptrace(request, self.0, ptr::null_mut::<c_void>(), data) };
        assert_eq!(result, 0, "{request}: {}", Error::last_os_error());
    }

    /// The child's registers.
    pub fn state(&self) -> State {
        // SAFETY: plain numbers, for which zeros are valid.
        let mut state: State = unsafe { std::mem::zeroed() };
        self.request(libc::PTRACE_GETREGS, (&raw mut state.registers).cast());
        self.request(libc::PTRACE_GETFPREGS, (&raw mut state.vectors).cast());
        state
    }

    /// Runs the child from `state` until a signal: a breakpoint, or a fault.
    pub fn run(&self, state: &State) -> (State, Stop) {
        let mut state = *state;
        self.request(libc::PTRACE_SETREGS, (&raw mut state.registers).cast());
        self.request(libc::PTRACE_SETFPREGS, (&raw mut state.vectors).cast());
        self.request(libc::PTRACE_CONT, ptr::null_mut());
        let signal = self.wait();
        assert_ne!(signal, libc::SIGXCPU, "a piece of code does not end: from {:#x}", state.registers.rip);
        // SAFETY: as above.
        let mut information: libc::siginfo_t = unsafe { std::mem::zeroed() };
        self.request(libc::PTRACE_GETSIGINFO, (&raw mut information).cast());
        let has_address = [libc::SIGSEGV, libc::SIGBUS].contains(&signal);
        // SAFETY: these signals have the field.
        let address = if has_address { unsafe { information.si_addr() as u64 } } else { 0 };
        (self.state(), Stop { signal, address })
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: our own child, which was not waited for yet.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, ptr::null_mut(), 0);
        }
    }
}

//! Simulates other kernels: some do not know certain kinds of links, some have links to one process that miss threads,
//! and some have system calls that fail for a while. heapbpf runs under a seccomp filter whose listener answers instead
//! of the kernel, or changes the request.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::descriptors::take_descriptor;
use crate::map_calls::{COMMANDS, ITERATOR, Operation};

/// `BPF_TRACE_UPROBE_MULTI`.
pub const UPROBE_MULTI: u32 = 48;
/// `BPF_TRACE_UPROBE_SESSION`.
pub const UPROBE_SESSION: u32 = 57;
/// `BPF_LINK_CREATE`.
const LINK_CREATE: u32 = 28;
/// Offset of the attach type in the attributes of `BPF_LINK_CREATE`.
const ATTACH_TYPE_AT: u64 = 8;
/// Offset of the process id in the attributes of uprobe multi and session links.
const PID_AT: u64 = 56;

/// How a kernel makes links.
#[derive(Clone, Copy, Debug, Default)]
pub struct Linking {
    /// Attach types that the kernel refuses.
    pub refused: &'static [u32],
    /// Whether a link to one process sees none of the threads that matter. (Linux 6.6 sees the first one.)
    pub misses_threads: bool,
}

impl Linking {
    /// Whether the kernel refuses a `bpf(2)` call that makes a link. Otherwise may change the call's attributes.
    fn refuses(&self, call: &libc::seccomp_notif) -> io::Result<bool> {
        let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{}/mem", call.pid))?;
        let word = |at| {
            let mut word = [0; 4];
            memory.read_exact_at(&mut word, call.data.args[1] + at).map(|()| u32::from_ne_bytes(word))
        };
        let kind = word(ATTACH_TYPE_AT)?;
        if self.refused.contains(&kind) {
            return Ok(true);
        }
        if self.misses_threads && [UPROBE_MULTI, UPROBE_SESSION].contains(&kind) && word(PID_AT)? != 0 {
            // The test process, none of whose threads ever calls the function.
            memory.write_all_at(&std::process::id().to_ne_bytes(), call.data.args[1] + PID_AT)?;
        }
        Ok(false)
    }

    /// Whether it differs from this kernel.
    pub const fn is_other(&self) -> bool {
        !self.refused.is_empty() || self.misses_threads
    }
}

/// Makes the command's links behave as on that kernel, until the command and all its descendants have exited. Refused
/// calls fail with EINVAL.
///
/// # Errors
/// The kernel does not support seccomp filters with listeners.
pub fn run_on(linking: Linking, command: &mut Command) -> io::Result<()> {
    answer_instead(command, vec![Kind::bpf(LINK_CREATE)], move |call| {
        linking.refuses(call).is_ok_and(|yes| yes).then_some(libc::EINVAL)
    })
}

/// A kind of system call: a number, and the value of an argument.
#[derive(Clone, Copy, Debug)]
struct Kind {
    number: libc::c_long,
    argument: usize,
    value: u32,
}

impl Kind {
    const fn bpf(command: u32) -> Self {
        Self { number: libc::SYS_bpf, argument: 0, value: command }
    }
}

/// System calls of some kinds, which fail with ENOMEM as often as a test wants.
#[derive(Debug)]
pub struct Faults {
    kinds: Vec<Kind>,
    /// Only calls on this map fail. `None` means any map.
    map: Option<String>,
    /// One of this many calls fails on average. With 0, none fails.
    one_in: AtomicUsize,
    /// This many of the next calls fail, whatever `one_in` says.
    next: AtomicUsize,
    calls: AtomicUsize,
    failed: AtomicU64,
    /// If requested, the map operations that were seen, and how often.
    seen: Option<Mutex<BTreeMap<Operation, u64>>>,
}

impl Faults {
    fn of_kinds(kinds: Vec<Kind>) -> Self {
        let number = || AtomicUsize::new(0);
        let failed = AtomicU64::new(0);
        Self { kinds, map: None, one_in: number(), next: number(), calls: number(), failed, seen: None }
    }

    /// Faults of one `bpf` command. No call fails yet.
    pub fn of(command: u32) -> Arc<Self> {
        Arc::new(Self::of_kinds(vec![Kind::bpf(command)]))
    }

    /// Faults of one operation on a map. No call fails yet.
    pub fn of_operation(operation: &Operation) -> Arc<Self> {
        let map = (operation.command != ITERATOR).then(|| operation.map.clone());
        Arc::new(Self { map, ..Self::of_kinds(vec![Kind::bpf(operation.command)]) })
    }

    /// Faults of the calls that map shared memory, as for rings.
    pub fn of_shared_mappings() -> Arc<Self> {
        let flags = libc::MAP_SHARED.cast_unsigned();
        Arc::new(Self::of_kinds(vec![Kind { number: libc::SYS_mmap, argument: 3, value: flags }]))
    }

    /// Faults of the calls that add a descriptor to epoll.
    pub fn of_watching() -> Arc<Self> {
        let add = libc::EPOLL_CTL_ADD.cast_unsigned();
        Arc::new(Self::of_kinds(vec![Kind { number: libc::SYS_epoll_ctl, argument: 1, value: add }]))
    }

    /// No call fails. Map operations are noted.
    pub fn noting() -> Arc<Self> {
        let kinds = COMMANDS.map(Kind::bpf).to_vec();
        Arc::new(Self { seen: Some(Mutex::default()), ..Self::of_kinds(kinds) })
    }

    /// From now on, one in this many calls fails. Calls are picked by a scrambled count, so that no regular pattern of
    /// calls can meet a fault every time. With 1 every call fails, with 0 none.
    pub fn fail_one_in(&self, calls: usize) {
        self.one_in.store(calls, Ordering::SeqCst);
    }

    /// Makes this many of the next calls fail.
    pub fn fail_next(&self, calls: usize) {
        self.next.store(calls, Ordering::SeqCst);
    }

    /// Number of calls that have failed.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::SeqCst)
    }

    /// The operations that were noted since the last call of this function, and how often each occurred.
    pub fn take_seen(&self) -> BTreeMap<Operation, u64> {
        let seen = self.seen.as_ref().map(|seen| seen.lock().unwrap_or_else(PoisonError::into_inner));
        seen.map(|mut seen| std::mem::take(&mut *seen)).unwrap_or_default()
    }

    fn decide(&self, call: &libc::seccomp_notif) -> Option<i32> {
        if let Some(seen) = &self.seen {
            if let Ok(operation) = Operation::of(call) {
                *seen.lock().unwrap_or_else(PoisonError::into_inner).entry(operation).or_default() += 1;
            }
            return None;
        }
        let one_in = self.one_in.load(Ordering::SeqCst);
        if one_in == 0 && self.next.load(Ordering::SeqCst) == 0 {
            return None;
        }
        if let Some(map) = &self.map
            && Operation::of(call).is_ok_and(|operation| operation.map != *map)
        {
            return None;
        }
        // Only the listener's thread decrements it.
        let next = self.next.load(Ordering::SeqCst);
        if next > 0 {
            self.next.store(next - 1, Ordering::SeqCst);
        } else if !scattered(self.calls.fetch_add(1, Ordering::SeqCst)).is_multiple_of(one_in) {
            return None;
        }
        self.failed.fetch_add(1, Ordering::SeqCst);
        Some(libc::ENOMEM)
    }
}

/// Turns a count into a number that looks random (the finalizer of SplitMix64).
const fn scattered(count: usize) -> usize {
    let mixed = (count as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) as usize
}

/// Makes the command's calls fail when `faults` says so.
///
/// # Errors
/// As [`run_on`].
pub fn fail_calls(command: &mut Command, faults: Arc<Faults>) -> io::Result<()> {
    answer_instead(command, faults.kinds.clone(), move |call| faults.decide(call))
}

/// Lets `decide` answer every call of some kinds: with an error number, or by passing it on to the kernel.
fn answer_instead(
    command: &mut Command,
    kinds: Vec<Kind>,
    decide: impl Fn(&libc::seccomp_notif) -> Option<i32> + Send + 'static,
) -> io::Result<()> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut filter = filter_of(&kinds);
    // SAFETY: between fork and exec the closure only makes system calls on its own memory and descriptors, and does not
    // allocate.
    unsafe {
        command.pre_exec(move || {
            let listener = install_filter(&mut filter)?;
            let mut theirs = &theirs;
            // Passes the descriptor's number, and keeps it open until it has been copied.
            theirs.write_all(&std::process::id().to_le_bytes())?;
            theirs.write_all(&listener.as_raw_fd().to_le_bytes())?;
            theirs.read_exact(&mut [0])
        });
    }
    std::thread::spawn(move || -> io::Result<()> {
        let mut word = [0; 4];
        ours.read_exact(&mut word)?;
        let pid = i32::from_le_bytes(word);
        ours.read_exact(&mut word)?;
        let listener = take_descriptor(pid, i32::from_le_bytes(word))?;
        ours.write_all(&[1])?;
        while let Some(call) = next_call(&listener)? {
            answer(&listener, &call, decide(&call));
        }
        Ok(())
    });
    Ok(())
}

/// A seccomp filter under which every call of these kinds waits for the listener's answer.
fn filter_of(kinds: &[Kind]) -> Vec<libc::sock_filter> {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let end = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let argument = |number: usize| (offset_of!(libc::seccomp_data, args) + 8 * number) as u32;
    let mut filter = Vec::new();
    for kind in kinds {
        filter.extend([
            step(load, offset_of!(libc::seccomp_data, nr) as u32, 0, 0),
            step(equal, kind.number as u32, 0, 3),
            step(load, argument(kind.argument), 0, 0),
            step(equal, kind.value, 0, 1),
            step(end, libc::SECCOMP_RET_USER_NOTIF, 0, 0),
        ]);
    }
    filter.push(step(end, libc::SECCOMP_RET_ALLOW, 0, 0));
    filter
}

/// Installs the filter and returns its listener.
fn install_filter(filter: &mut [libc::sock_filter]) -> io::Result<OwnedFd> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: `program` and the instructions it points to outlive the calls; the returned descriptor has no other
    // owner.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
        let fd = libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as i32)) }
    }
}

/// The next call to answer, or `None` when no process under the filter is left.
fn next_call(listener: &OwnedFd) -> io::Result<Option<libc::seccomp_notif>> {
    loop {
        let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` gets one entry, as its count says, and the ioctl writes to the zeroed notification only.
        unsafe {
            if libc::poll(&raw mut poll, 1, -1) < 0 {
                return Err(io::Error::last_os_error());
            }
            if poll.revents & libc::POLLIN == 0 {
                return Ok(None);
            }
            let mut call: libc::seccomp_notif = std::mem::zeroed();
            if libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) == 0 {
                return Ok(Some(call));
            }
        }
    }
}

fn answer(listener: &OwnedFd, call: &libc::seccomp_notif, error: Option<i32>) {
    let (error, flags) = error.map_or((0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32), |error| (-error, 0));
    let mut response = libc::seccomp_notif_resp { id: call.id, val: 0, error, flags };
    // SAFETY: the ioctl only reads the response. If the caller has exited in the meantime, the answer is dropped.
    unsafe {
        libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut response);
    }
}

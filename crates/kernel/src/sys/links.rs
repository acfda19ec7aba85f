//! Links: uprobes, tracepoints, iterators.

use std::ffi::{CStr, CString};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use aya_obj::generated::{bpf_attach_type, bpf_cmd};

use super::{call_fd, zeroed};

/// `BPF_TRACE_UPROBE_MULTI`.
pub const ATTACH_UPROBE_MULTI: u32 = 48;
/// `BPF_TRACE_UPROBE_SESSION`.
pub const ATTACH_UPROBE_SESSION: u32 = 57;
/// `BPF_F_UPROBE_MULTI_RETURN`.
pub const MULTI_RETURN: u32 = 1;

/// The target of a uprobe link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UprobeTarget<'a> {
    /// Path of the file. The kernel attaches to its inode.
    pub path: &'a CStr,
    /// File offsets of the instructions.
    pub offsets: &'a [u64],
    /// A cookie for each offset.
    pub cookies: &'a [u64],
    /// For each offset, the file offset of its semaphore, a counter of listeners, or 0 for none. The kernel adds one to
    /// the counter while the link exists. Empty if no instruction has one.
    pub semaphores: &'a [u64],
    /// The process to attach to. `None`: every process that maps the file.
    pub pid: Option<u32>,
}

impl UprobeTarget<'_> {
    /// The targets of the links that it takes: one, or one for each instruction.
    pub fn parts(&self, how: How) -> impl Iterator<Item = Self> {
        let most = if matches!(how, How::Perf { .. }) { 1 } else { self.offsets.len().max(1) };
        let parts = self.offsets.chunks(most).zip(self.cookies.chunks(most)).enumerate();
        parts.map(move |(at, (offsets, cookies))| {
            let semaphores = self.semaphores.chunks(most).nth(at).unwrap_or_default();
            Self { offsets, cookies, semaphores, ..*self }
        })
    }

    /// Checks that each instruction has a cookie, and that all or none have an entry for a semaphore.
    ///
    /// # Errors
    /// `InvalidInput` if the numbers differ.
    pub fn check(&self) -> io::Result<()> {
        let count = self.offsets.len();
        let fits = count == self.cookies.len() && (self.semaphores.is_empty() || count == self.semaphores.len());
        if fits { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }
}

/// How to link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// By `uprobe_multi` (kernel 6.6; sessions 6.13): several instructions at once.
    Multi {
        /// `BPF_TRACE_UPROBE_*`.
        attach_type: u32,
        /// Flags of the link.
        flags: u32,
    },
    /// By a perf event (kernel 5.15 for the cookie): one instruction.
    Perf {
        /// Type of the kernel's performance monitoring unit for uprobes.
        pmu: u32,
        /// Whether to probe the return of the function that begins there.
        on_return: bool,
    },
}

impl How {
    /// By a multi link without sessions.
    pub const fn multi(on_return: bool) -> Self {
        Self::Multi { attach_type: ATTACH_UPROBE_MULTI, flags: if on_return { MULTI_RETURN } else { 0 } }
    }

    /// By a perf event.
    ///
    /// # Errors
    /// The kernel has no performance monitoring unit for uprobes.
    pub fn perf(on_return: bool) -> io::Result<Self> {
        let pmu = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
        let pmu = pmu.trim().parse().map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
        Ok(Self::Perf { pmu, on_return })
    }
}

/// A link, and the perf event that it belongs to.
pub type LinkFds = (OwnedFd, Option<OwnedFd>);

/// Links a program to instructions of a file.
///
/// # Errors
/// `InvalidInput` if the numbers of cookies, semaphores and offsets do not fit, otherwise the kernel's error.
pub fn link_uprobe(program: BorrowedFd<'_>, how: How, target: &UprobeTarget<'_>) -> io::Result<LinkFds> {
    target.check()?;
    let mut attr = zeroed();
    // SAFETY: all variants of the union are integers, and all its bytes are initialised (zero).
    let link = unsafe { &mut attr.link_create };
    link.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    let event = match how {
        How::Multi { attach_type, flags } => {
            link.attach_type = attach_type;
            // SAFETY: as above.
            let multi = unsafe { &mut link.__bindgen_anon_3.uprobe_multi };
            multi.path = target.path.as_ptr() as u64;
            multi.offsets = target.offsets.as_ptr() as u64;
            multi.cookies = target.cookies.as_ptr() as u64;
            multi.ref_ctr_offsets = if target.semaphores.is_empty() { 0 } else { target.semaphores.as_ptr() as u64 };
            multi.cnt = target.offsets.len() as u32;
            multi.flags = flags;
            multi.pid = target.pid.unwrap_or(0);
            None
        }
        How::Perf { pmu, on_return } => {
            let event = perf_event(pmu, on_return, target)?;
            link.__bindgen_anon_2.target_fd = event.as_raw_fd() as u32;
            link.attach_type = bpf_attach_type::BPF_PERF_EVENT as u32;
            link.__bindgen_anon_3.perf_event.bpf_cookie = target.cookies[0];
            Some(event)
        }
    };
    // SAFETY: with a perf event, the command takes no pointers. Otherwise it reads a NUL-terminated path, and `cnt`
    // offsets, cookies and semaphores: the slices have that many. It returns a new descriptor.
    let link = unsafe { call_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr) }?;
    Ok((link, event))
}

/// Opens a perf event of an instruction.
fn perf_event(pmu: u32, on_return: bool, target: &UprobeTarget<'_>) -> io::Result<OwnedFd> {
    use perf_event_open_sys as perf;
    let [offset] = *target.offsets else { return Err(io::ErrorKind::InvalidInput.into()) };
    let semaphore = target.semaphores.first().copied().unwrap_or(0);
    let semaphore = u32::try_from(semaphore).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut event = perf::bindings::perf_event_attr {
        size: size_of::<perf::bindings::perf_event_attr>() as u32,
        type_: pmu,
        // The format of the uprobe PMU: bit 0 selects a return probe, and the upper half is the semaphore.
        config: u64::from(on_return) | u64::from(semaphore) << 32,
        ..Default::default()
    };
    event.__bindgen_anon_3.uprobe_path = target.path.as_ptr() as u64;
    event.__bindgen_anon_4.probe_offset = offset;
    let (pid, cpu) = match target.pid {
        Some(pid) => (pid.cast_signed(), -1),
        None => (-1, 0),
    };
    // SAFETY: `event` is initialised and states its own size. Its type makes the kernel read a path from it, which is
    // NUL-terminated and outlives the call.
    let fd = unsafe { perf::perf_event_open(&mut event, pid, cpu, -1, perf::bindings::PERF_FLAG_FD_CLOEXEC.into()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns yet.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Attaches a program to a raw tracepoint.
pub fn open_raw_tracepoint(program: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    let mut attr = zeroed();
    attr.raw_tracepoint.name = name.as_ptr() as u64;
    attr.raw_tracepoint.prog_fd = program.as_raw_fd() as u32;
    // SAFETY: the command reads a NUL-terminated name that outlives the call. It returns a new descriptor.
    unsafe { call_fd(bpf_cmd::BPF_RAW_TRACEPOINT_OPEN, &mut attr) }
}

/// Attaches a program to the tracepoint that it was loaded for.
pub fn link_tracing(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.raw_tracepoint.prog_fd = program.as_raw_fd() as u32;
    // SAFETY: the command takes no pointers for programs of this type (the name is null). It returns a new descriptor.
    unsafe { call_fd(bpf_cmd::BPF_RAW_TRACEPOINT_OPEN, &mut attr) }
}

/// Links an iterator program.
pub fn link_iterator(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    // SAFETY: all variants of the union are integers, and all its bytes are initialised (zero).
    let link = unsafe { &mut attr.link_create };
    link.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    link.attach_type = bpf_attach_type::BPF_TRACE_ITER as u32;
    // SAFETY: the command takes no pointers for this attach type (none was set) and returns a new descriptor.
    unsafe { call_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr) }
}

/// Runs an iterator once. Returns what its program wrote.
pub fn read_iterator(link: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut attr = zeroed();
    attr.iter_create.link_fd = link.as_raw_fd() as u32;
    // SAFETY: the command takes no pointers and returns a new descriptor.
    let mut reader = std::fs::File::from(unsafe { call_fd(bpf_cmd::BPF_ITER_CREATE, &mut attr) }?);
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes)?;
    Ok(bytes)
}

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

/// Links a program to several instructions of a file at once (`uprobe_multi`, kernel 6.6; sessions 6.13).
///
/// # Errors
/// `InvalidInput` if the numbers of cookies, semaphores and offsets differ, otherwise the kernel's error.
pub fn link_uprobe_multi(
    program: BorrowedFd<'_>,
    attach_type: u32,
    target: &UprobeTarget<'_>,
    flags: u32,
) -> io::Result<OwnedFd> {
    target.check()?;
    let mut attr = zeroed();
    // SAFETY: all variants of the union are integers, and all its bytes are initialised (zero).
    let link = unsafe { &mut attr.link_create };
    link.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
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
    // SAFETY: the command reads a NUL-terminated path, and `cnt` offsets, cookies and semaphores: the slices have that
    // many. It returns a new descriptor.
    unsafe { call_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr) }
}

/// The instruction that a perf event probes.
pub struct PerfPlace<'a> {
    /// Path of the file.
    pub path: &'a CStr,
    /// File offset of the instruction.
    pub offset: u64,
    /// The process. `None`: every process that maps the file.
    pub pid: Option<u32>,
    /// Whether the return of the function that begins there is probed.
    pub on_return: bool,
    /// File offset of its semaphore, or 0.
    pub semaphore: u64,
}

/// The type number of the kernel's performance monitoring unit for uprobes.
///
/// # Errors
/// The kernel has none.
pub fn uprobe_pmu() -> io::Result<u32> {
    let pmu = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
    pmu.trim().parse().map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))
}

/// Links a program to one instruction through a perf event (kernel 5.15 for the cookie) of this type ([`uprobe_pmu`]).
pub fn link_uprobe_perf(
    program: BorrowedFd<'_>,
    pmu: u32,
    place: &PerfPlace<'_>,
    cookie: u64,
) -> io::Result<(OwnedFd, OwnedFd)> {
    use perf_event_open_sys as perf;
    let semaphore = u32::try_from(place.semaphore).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut event = perf::bindings::perf_event_attr {
        size: size_of::<perf::bindings::perf_event_attr>() as u32,
        type_: pmu,
        // The format of the uprobe PMU: bit 0 selects a return probe, and the upper half is the semaphore.
        config: u64::from(place.on_return) | u64::from(semaphore) << 32,
        ..Default::default()
    };
    event.__bindgen_anon_3.uprobe_path = place.path.as_ptr() as u64;
    event.__bindgen_anon_4.probe_offset = place.offset;
    let (pid, cpu) = match place.pid {
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
    let event = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut attr = zeroed();
    // SAFETY: all variants of the union are integers, and all its bytes are initialised (zero).
    let link = unsafe { &mut attr.link_create };
    link.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    link.__bindgen_anon_2.target_fd = event.as_raw_fd() as u32;
    link.attach_type = bpf_attach_type::BPF_PERF_EVENT as u32;
    link.__bindgen_anon_3.perf_event.bpf_cookie = cookie;
    // SAFETY: the command takes no pointers for this attach type and returns a new descriptor.
    let link = unsafe { call_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr) }?;
    Ok((link, event))
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

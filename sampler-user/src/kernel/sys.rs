//! The `bpf(2)` and `perf_event_open(2)` calls, each behind a safe function.
//!
//! The loader library cannot load programs for uprobe sessions yet, so heapbpf talks to the kernel itself.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use aya_obj::generated::{bpf_attach_type, bpf_attr, bpf_cmd, bpf_prog_type};

/// `BPF_TRACE_UPROBE_MULTI`.
pub const ATTACH_UPROBE_MULTI: u32 = 48;
/// `BPF_TRACE_UPROBE_SESSION`.
pub const ATTACH_UPROBE_SESSION: u32 = 57;
/// `BPF_F_UPROBE_MULTI_RETURN`.
pub const MULTI_RETURN: u32 = 1;

fn zeroed() -> bpf_attr {
    // SAFETY: a union of plain integers, for which all zeros is a valid value and what the kernel wants in unused parts.
    unsafe { std::mem::zeroed() }
}

fn call(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i64> {
    // SAFETY: `attr` is initialised and of the size given; pointers inside it are the callers' and outlive the call.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command as libc::c_uint, std::ptr::from_mut(attr), size_of::<bpf_attr>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn call_fd(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    let fd = call(command, attr)?;
    let fd = RawFd::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn copy_name(target: &mut [std::ffi::c_char], name: &str) {
    let room = target.len() - 1;
    for (to, from) in target[..room].iter_mut().zip(name.bytes()) {
        // The kernel takes letters, digits, `_` and `.` only.
        let kept = if from.is_ascii_alphanumeric() || from == b'_' || from == b'.' { from } else { b'_' };
        // Signed on some machines, unsigned on others.
        *to = std::ffi::c_char::from_ne_bytes([kept]);
    }
}

fn log_text(log: &[u8]) -> String {
    CStr::from_bytes_until_nul(log).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Gives type information to the kernel. The error carries the kernel's log.
pub fn load_btf(btf: &[u8]) -> Result<OwnedFd, (io::Error, String)> {
    let mut log = vec![0_u8; 1 << 18];
    let mut attr = zeroed();
    attr.__bindgen_anon_7.btf = btf.as_ptr() as u64;
    attr.__bindgen_anon_7.btf_size = btf.len() as u32;
    match call_fd(bpf_cmd::BPF_BTF_LOAD, &mut attr) {
        Ok(fd) => Ok(fd),
        Err(error) => {
            attr.__bindgen_anon_7.btf_log_buf = log.as_mut_ptr() as u64;
            attr.__bindgen_anon_7.btf_log_size = log.len() as u32;
            attr.__bindgen_anon_7.btf_log_level = 1;
            call_fd(bpf_cmd::BPF_BTF_LOAD, &mut attr).map_err(|_| (error, log_text(&log)))
        }
    }
}

/// What a map is made of.
pub struct MapSpec<'a> {
    /// Shown by `bpftool map`.
    pub name: &'a str,
    /// `BPF_MAP_TYPE_*`.
    pub map_type: u32,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Bytes per value.
    pub value_bytes: u32,
    /// Entries (for ring buffers: bytes).
    pub max_entries: u32,
    /// `BPF_F_*`.
    pub flags: u32,
    /// Type information: descriptor, key type, value type.
    pub btf: Option<(BorrowedFd<'a>, u32, u32)>,
}

/// Makes a map.
pub fn create_map(spec: &MapSpec<'_>) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    // SAFETY: the variant of the union that BPF_MAP_CREATE reads.
    let create = unsafe { &mut attr.__bindgen_anon_1 };
    create.map_type = spec.map_type;
    create.key_size = spec.key_bytes;
    create.value_size = spec.value_bytes;
    create.max_entries = spec.max_entries;
    create.map_flags = spec.flags;
    copy_name(&mut create.map_name, spec.name);
    if let Some((btf, key, value)) = spec.btf {
        create.btf_fd = btf.as_raw_fd() as u32;
        create.btf_key_type_id = key;
        create.btf_value_type_id = value;
    }
    call_fd(bpf_cmd::BPF_MAP_CREATE, &mut attr)
}

/// Sets the single value of a data-section map and, if asked, freezes it.
pub fn set_section(map: BorrowedFd<'_>, data: &[u8], freeze: bool) -> io::Result<()> {
    let key = 0_u32;
    let mut attr = zeroed();
    // SAFETY: the variant that BPF_MAP_UPDATE_ELEM reads.
    let update = unsafe { &mut attr.__bindgen_anon_2 };
    update.map_fd = map.as_raw_fd() as u32;
    update.key = &raw const key as u64;
    update.__bindgen_anon_1.value = data.as_ptr() as u64;
    call(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr)?;
    if freeze {
        let mut attr = zeroed();
        attr.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
        call(bpf_cmd::BPF_MAP_FREEZE, &mut attr)?;
    }
    Ok(())
}

/// A batch of a hash map's entries.
pub struct Batch {
    /// Entries that were read.
    pub count: usize,
    /// Whether these were the last ones.
    pub last: bool,
}

/// Reads up to `room` entries of a hash map from `cursor` on (`None` at first), which it moves on.
pub fn lookup_batch(
    map: BorrowedFd<'_>,
    cursor: &mut Option<u32>,
    keys: &mut [u8],
    values: &mut [u8],
    room: usize,
) -> io::Result<Batch> {
    let mut next = 0_u32;
    let mut attr = zeroed();
    attr.batch.in_batch = cursor.as_ref().map_or(0, |at| std::ptr::from_ref(at) as u64);
    attr.batch.out_batch = &raw mut next as u64;
    attr.batch.keys = keys.as_mut_ptr() as u64;
    attr.batch.values = values.as_mut_ptr() as u64;
    attr.batch.count = room as u32;
    attr.batch.map_fd = map.as_raw_fd() as u32;
    let last = match call(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) {
        Ok(_) => false,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
        Err(error) => return Err(error),
    };
    *cursor = Some(next);
    // SAFETY: the kernel wrote the number of entries there.
    Ok(Batch { count: unsafe { attr.batch.count } as usize, last })
}

/// What a program is made of.
pub struct ProgramSpec<'a> {
    /// Shown by `bpftool prog`.
    pub name: &'a str,
    /// `BPF_PROG_TYPE_*`.
    pub program_type: bpf_prog_type,
    /// `BPF_*` attach type that it will be linked with, or 0.
    pub attach_type: u32,
    /// BTF id of the kernel function it is for (iterators), or 0.
    pub attach_btf_id: u32,
    /// Instructions.
    pub instructions: &'a [aya_obj::generated::bpf_insn],
    /// Type information.
    pub btf: BorrowedFd<'a>,
    /// Function information: bytes, count, record size.
    pub functions: (&'a [u8], u32, u32),
    /// Line information: bytes, count, record size.
    pub lines: (&'a [u8], u32, u32),
}

/// Loads a program. The error carries the verifier's log.
pub fn load_program(spec: &ProgramSpec<'_>) -> Result<OwnedFd, (io::Error, String)> {
    let mut attr = zeroed();
    // SAFETY: the variant that BPF_PROG_LOAD reads.
    let load = unsafe { &mut attr.__bindgen_anon_3 };
    copy_name(&mut load.prog_name, spec.name);
    load.prog_type = spec.program_type as u32;
    load.expected_attach_type = spec.attach_type;
    load.attach_btf_id = spec.attach_btf_id;
    load.insns = spec.instructions.as_ptr() as u64;
    load.insn_cnt = spec.instructions.len() as u32;
    load.license = c"Dual MIT/GPL".as_ptr() as u64;
    load.prog_btf_fd = spec.btf.as_raw_fd() as u32;
    load.func_info = spec.functions.0.as_ptr() as u64;
    load.func_info_cnt = spec.functions.1;
    load.func_info_rec_size = spec.functions.2;
    load.line_info = spec.lines.0.as_ptr() as u64;
    load.line_info_cnt = spec.lines.1;
    load.line_info_rec_size = spec.lines.2;
    match call_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr) {
        Ok(fd) => Ok(fd),
        Err(error) => {
            let mut log = vec![0_u8; 1 << 24];
            // SAFETY: as above.
            let load = unsafe { &mut attr.__bindgen_anon_3 };
            load.log_level = 1;
            load.log_buf = log.as_mut_ptr() as u64;
            load.log_size = log.len() as u32;
            call_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr).map_err(|_| (error, log_text(&log)))
        }
    }
}

/// Where a uprobe link goes.
pub struct UprobeTarget<'a> {
    /// Path of the file (its inode is what counts).
    pub path: &'a CStr,
    /// File offsets of the instructions.
    pub offsets: &'a [u64],
    /// A cookie for each.
    pub cookies: &'a [u64],
    /// Only this process; `None`: every process that maps the file.
    pub pid: Option<u32>,
}

/// Links a program to several instructions of a file at once (`uprobe_multi`, kernel 6.6; sessions 6.13).
pub fn link_uprobe_multi(
    program: BorrowedFd<'_>,
    attach_type: u32,
    target: &UprobeTarget<'_>,
    flags: u32,
) -> io::Result<OwnedFd> {
    debug_assert_eq!(target.offsets.len(), target.cookies.len());
    let mut attr = zeroed();
    // SAFETY: the variant that BPF_LINK_CREATE reads.
    let link = unsafe { &mut attr.link_create };
    link.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    link.attach_type = attach_type;
    // SAFETY: the variant for this attach type.
    let multi = unsafe { &mut link.__bindgen_anon_3.uprobe_multi };
    multi.path = target.path.as_ptr() as u64;
    multi.offsets = target.offsets.as_ptr() as u64;
    multi.cookies = target.cookies.as_ptr() as u64;
    multi.cnt = target.offsets.len() as u32;
    multi.flags = flags;
    multi.pid = target.pid.unwrap_or(0);
    call_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr)
}

/// Links a program to one instruction through a perf event (kernel 5.15 for the cookie).
pub fn link_uprobe_perf(
    program: BorrowedFd<'_>,
    path: &CStr,
    offset: u64,
    cookie: u64,
    pid: Option<u32>,
    on_return: bool,
) -> io::Result<(OwnedFd, OwnedFd)> {
    use perf_event_open_sys as perf;
    let pmu = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
    let pmu = pmu.trim().parse().map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
    let mut event = perf::bindings::perf_event_attr {
        size: size_of::<perf::bindings::perf_event_attr>() as u32,
        type_: pmu,
        // Bit 0 of the uprobe PMU's format: a return probe.
        config: u64::from(on_return),
        ..Default::default()
    };
    event.__bindgen_anon_3.uprobe_path = path.as_ptr() as u64;
    event.__bindgen_anon_4.probe_offset = offset;
    let (pid, cpu) = match pid {
        Some(pid) => (pid.cast_signed(), -1),
        None => (-1, 0),
    };
    // SAFETY: `event` is initialised; `path` outlives the call.
    let fd = unsafe { perf::perf_event_open(&mut event, pid, cpu, -1, perf::bindings::PERF_FLAG_FD_CLOEXEC.into()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    let event = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut attr = zeroed();
    // SAFETY: the variant that BPF_LINK_CREATE reads.
    let link = unsafe { &mut attr.link_create };
    link.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    link.__bindgen_anon_2.target_fd = event.as_raw_fd() as u32;
    link.attach_type = bpf_attach_type::BPF_PERF_EVENT as u32;
    link.__bindgen_anon_3.perf_event.bpf_cookie = cookie;
    let link = call_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr)?;
    Ok((link, event))
}

/// Attaches a program to a raw tracepoint.
pub fn open_raw_tracepoint(program: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    let mut attr = zeroed();
    attr.raw_tracepoint.name = name.as_ptr() as u64;
    attr.raw_tracepoint.prog_fd = program.as_raw_fd() as u32;
    call_fd(bpf_cmd::BPF_RAW_TRACEPOINT_OPEN, &mut attr)
}

/// Links an iterator program.
pub fn link_iterator(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    // SAFETY: the variant that BPF_LINK_CREATE reads.
    let link = unsafe { &mut attr.link_create };
    link.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    link.attach_type = bpf_attach_type::BPF_TRACE_ITER as u32;
    call_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr)
}

/// Starts one run of an iterator: a file to be read to its end.
pub fn start_iterator(link: BorrowedFd<'_>) -> io::Result<std::fs::File> {
    let mut attr = zeroed();
    attr.iter_create.link_fd = link.as_raw_fd() as u32;
    call_fd(bpf_cmd::BPF_ITER_CREATE, &mut attr).map(std::fs::File::from)
}

/// The id of a loaded program.
pub fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: plain integers, all zeros is a value.
    let mut info: aya_obj::generated::bpf_prog_info = unsafe { std::mem::zeroed() };
    let mut attr = zeroed();
    attr.info.bpf_fd = program.as_raw_fd() as u32;
    attr.info.info = &raw mut info as u64;
    attr.info.info_len = size_of_val(&info) as u32;
    call(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info.id)
}

//! Probes of other tools come and go while pages are replaced and put back.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use heapbpf_remote::{PAGE_BYTES, STOP_LIMIT};

use crate::program::{self, Program};

/// Commands of bpf(2) and what they need (linux/bpf.h).
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_PROG_TYPE_KPROBE: u32 = 2;
const BPF_TRACE_UPROBE_MULTI: u32 = 48;
/// `r0 = 0; exit`.
const PROGRAM: [u64; 2] = [0xb7, 0x95];
/// Enough mappings that the kernel takes some milliseconds to add or remove a probe.
const MAPPINGS: usize = 20_000;
const BREAKPOINT: u8 = 0xcc;

/// `union bpf_attr` for BPF_PROG_LOAD, as far as it is needed.
#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log: [u32; 6],
    name: [u64; 2],
    device: u32,
    attach_type: u32,
}

/// The same for BPF_LINK_CREATE.
#[repr(C)]
#[derive(Default)]
struct Link {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
    path: u64,
    offsets: u64,
    counters: u64,
    cookies: u64,
    count: u32,
    multi_flags: u32,
    pid: u32,
    padding: u32,
}

fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads the attributes and the data they point to, and makes a new descriptor, which only we
    // own.
    unsafe {
        let fd = libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>());
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as i32)) }
    }
}

/// A probe at an offset of a process's program, for that process. The kernel removes it when this is closed.
fn probe(pid: u32, offset: u64) -> io::Result<OwnedFd> {
    let (code, license) = (PROGRAM.as_ptr() as u64, c"GPL".as_ptr() as u64);
    let (kind, instructions, attach_type) = (BPF_PROG_TYPE_KPROBE, PROGRAM.len() as u32, BPF_TRACE_UPROBE_MULTI);
    let program = bpf(BPF_PROG_LOAD, &Load { kind, instructions, code, license, attach_type, ..Load::default() })?;
    let path = CString::new(format!("/proc/{pid}/exe"))?;
    let (path, offsets) = (path.as_ptr() as u64, std::ptr::from_ref(&offset) as u64);
    let program = program.as_raw_fd().cast_unsigned();
    bpf(BPF_LINK_CREATE, &Link { program, attach_type, path, offsets, count: 1, pid, ..Link::default() })
}

/// The program, and the offset in its file at which the hooked function begins.
fn start() -> (Program, u64) {
    let program = Program::start("torture", &["4", "1"]);
    let target = heapbpf_remote::Target::look(program.pid()).expect("it can be looked at");
    let mapping = target.maps().at(program.hooked).expect("the function is mapped").clone();
    let offset = program.hooked - mapping.range.start + mapping.offset;
    (program, offset)
}

/// Mappings of a page of a program's file into this process. The kernel walks through them for each probe there.
struct Mappings(Vec<*mut libc::c_void>);

impl Mappings {
    fn new(pid: u32, offset: u64) -> Self {
        let file = File::open(format!("/proc/{pid}/exe")).expect("it runs");
        let page = (offset - offset % PAGE_BYTES).cast_signed();
        let (bytes, access) = (PAGE_BYTES as usize, libc::PROT_READ | libc::PROT_EXEC);
        // SAFETY: new mappings, wherever there is space.
        let map =
            |_| unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_PRIVATE, file.as_raw_fd(), page) };
        let mapped: Vec<_> = (0..MAPPINGS).map(map).collect();
        assert!(!mapped.contains(&libc::MAP_FAILED));
        Self(mapped)
    }
}

impl Drop for Mappings {
    fn drop(&mut self) {
        for address in &self.0 {
            // SAFETY: mapped above, and not used any more.
            unsafe { libc::munmap(*address, PAGE_BYTES as usize) };
        }
    }
}

/// Whether memory has a breakpoint where the function begins.
fn has_breakpoint(program: &Program) -> bool {
    let memory = File::open(format!("/proc/{}/mem", program.pid())).expect("it runs");
    let mut byte = [0];
    memory.read_exact_at(&mut byte, program.hooked).expect("the function is mapped");
    byte[0] == BREAKPOINT
}

/// Whether the replaced pages are one mapping, and would be included in a core dump.
fn is_in_one_piece(program: &Program) -> bool {
    let pages = program.hooked - program.hooked % PAGE_BYTES;
    let target = heapbpf_remote::Target::look(program.pid()).expect("it can be looked at");
    let is_one = target.maps().at(pages).is_some_and(|mapping| mapping.covers(&(pages..pages + program::REPLACED)));
    let all = std::fs::read_to_string(format!("/proc/{}/smaps", program.pid())).expect("it runs");
    let flags = all.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    // By default only device memory is left out of dumps.
    is_one && !flags.filter(|flags| flags.contains(" ex ")).any(|flags| flags.contains(" dd "))
}

/// Sets the flag at the end of a scope, even after a panic.
struct EndsWith<'a>(&'a AtomicBool);

impl Drop for EndsWith<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The kernel lists the mappings of a file, and then removes the breakpoint from each. If the page has moved in
/// between, the breakpoint stays, and ends the process at the next call.
#[test]
pub fn a_probe_that_goes_while_pages_are_put_back_leaves_no_breakpoint() {
    let Some(_turn) = program::turn() else { return };
    let (program, offset) = start();
    if let Err(error) = probe(program.pid(), offset) {
        heapbpf_testing::skipped(format!("the kernel makes no such links of probes: {error}"));
        return;
    }
    let _mappings = Mappings::new(program.pid(), offset);
    let (is_over, probes, pid) = (AtomicBool::new(false), AtomicU64::new(0), program.pid());
    let cycles = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                drop(probe(pid, offset));
                probes.fetch_add(1, Ordering::Relaxed);
                // The next probe at this place would remove the breakpoint.
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let _ends = EndsWith(&is_over);
        let (start, time) = (Instant::now(), program::repeated(12));
        let mut cycles = 0;
        // With the shorter limits, many attempts end at some step, and others follow.
        let limits = [STOP_LIMIT, STOP_LIMIT / 8, STOP_LIMIT / 4, STOP_LIMIT / 2];
        while start.elapsed() < time {
            program.assert_runs();
            program::hook(program.pid(), program.hooked);
            let limit = limits[cycles % limits.len()];
            program::take_out_within(program.pid(), limit);
            assert!(is_in_one_piece(&program), "cycle {cycles}");
            cycles += 1;
        }
        cycles
    });
    eprintln!("{cycles} cycles, {} probes came and went", probes.load(Ordering::Relaxed));
    program::report_futile();
    assert!(!has_breakpoint(&program));
    program::assert_inert(program.pid());
    eprintln!("{}", program.finish().trim());
}

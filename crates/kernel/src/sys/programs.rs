//! Loading of programs and their type information.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use aya_obj::generated::{bpf_cmd, bpf_prog_info, bpf_prog_type};

use super::{call_fd, copy_name, log_text, object_info, zeroed};

/// Loads type information into the kernel. The error contains the kernel's log.
pub fn load_btf(btf: &[u8]) -> Result<OwnedFd, (io::Error, String)> {
    let mut log = vec![0_u8; 1 << 18];
    let mut attr = zeroed();
    attr.__bindgen_anon_7.btf = btf.as_ptr() as u64;
    attr.__bindgen_anon_7.btf_size = btf.len() as u32;
    // SAFETY: the command reads `btf_size` bytes at `btf`: the slice. There is no log buffer. It returns a new
    // descriptor.
    match unsafe { call_fd(bpf_cmd::BPF_BTF_LOAD, &mut attr) } {
        Ok(fd) => Ok(fd),
        Err(error) => {
            attr.__bindgen_anon_7.btf_log_buf = log.as_mut_ptr() as u64;
            attr.__bindgen_anon_7.btf_log_size = log.len() as u32;
            attr.__bindgen_anon_7.btf_log_level = 1;
            // SAFETY: as above. The command also writes at most `btf_log_size` bytes into `log`, which has that many.
            unsafe { call_fd(bpf_cmd::BPF_BTF_LOAD, &mut attr) }.map_err(|_| (error, log_text(&log)))
        }
    }
}

/// Records of one kind of type information about a program.
#[derive(Clone, Copy, Debug)]
pub struct Records<'a> {
    /// The records, one after another.
    pub bytes: &'a [u8],
    /// Bytes per record.
    pub record_bytes: usize,
}

impl Records<'_> {
    /// Number of whole records.
    fn count(&self) -> u32 {
        self.bytes.len().checked_div(self.record_bytes).and_then(|count| u32::try_from(count).ok()).unwrap_or(0)
    }
}

/// The properties of a program to load.
pub struct ProgramSpec<'a> {
    /// The name that `bpftool prog` shows.
    pub name: &'a str,
    /// `BPF_PROG_TYPE_*`.
    pub program_type: bpf_prog_type,
    /// `BPF_*` attach type that the program will be linked with, or 0.
    pub attach_type: u32,
    /// BTF ID of the kernel function that the program attaches to (iterators), or 0.
    pub attach_btf_id: u32,
    /// Instructions.
    pub instructions: &'a [aya_obj::generated::bpf_insn],
    /// Type information.
    pub btf: BorrowedFd<'a>,
    /// Function information.
    pub functions: Records<'a>,
    /// Line information.
    pub lines: Records<'a>,
}

/// How often a program is loaded at most. The verifier gives up with EAGAIN while the thread has a signal that it does
/// not block, or is to stop for a tracer, perhaps another heapbpf. libbpf tries as often.
const MOST_TRIES: usize = 5;

/// Loads a program. The error contains the verifier's log.
pub fn load_program(spec: &ProgramSpec<'_>) -> Result<OwnedFd, (io::Error, String)> {
    let mut attr = zeroed();
    // SAFETY: all variants of the union are integers, and all its bytes are initialised (zero).
    let load = unsafe { &mut attr.__bindgen_anon_3 };
    copy_name(&mut load.prog_name, spec.name);
    load.prog_type = spec.program_type as u32;
    load.expected_attach_type = spec.attach_type;
    load.attach_btf_id = spec.attach_btf_id;
    load.insns = spec.instructions.as_ptr() as u64;
    load.insn_cnt = spec.instructions.len() as u32;
    load.license = sampler_ebpf::abi::LICENSE.as_ptr() as u64;
    load.prog_btf_fd = spec.btf.as_raw_fd() as u32;
    load.func_info = spec.functions.bytes.as_ptr() as u64;
    load.func_info_cnt = spec.functions.count();
    load.func_info_rec_size = spec.functions.record_bytes as u32;
    load.line_info = spec.lines.bytes.as_ptr() as u64;
    load.line_info_cnt = spec.lines.count();
    load.line_info_rec_size = spec.lines.record_bytes as u32;
    let mut load = |log: &mut [u8]| {
        // SAFETY: all variants of the union are integers, and all its bytes are initialised.
        let load = unsafe { &mut attr.__bindgen_anon_3 };
        load.log_level = u32::from(!log.is_empty());
        load.log_buf = if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 };
        load.log_size = log.len() as u32;
        // SAFETY: the command reads `insn_cnt` instructions, `func_info_cnt` and `line_info_cnt` records of their
        // stated sizes, all of which lie inside the slices, and a NUL-terminated string. If there is a log buffer, it
        // writes at most `log_size` bytes into `log`, which has that many. It returns a new descriptor.
        unsafe { call_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr) }
    };
    without_signals(|| load_in_tries(&mut load))
}

/// Calls `load` until the verifier comes to an end, and once more for its log if it refuses the program.
fn load_in_tries<T>(mut load: impl FnMut(&mut [u8]) -> io::Result<T>) -> Result<T, (io::Error, String)> {
    let is_interrupted = |error: &io::Error| error.raw_os_error() == Some(libc::EAGAIN);
    let mut loaded = load(&mut []);
    for _ in 1..MOST_TRIES {
        if !loaded.as_ref().is_err_and(is_interrupted) {
            break;
        }
        loaded = load(&mut []);
    }
    loaded.or_else(|error| {
        let mut log = if is_interrupted(&error) { return Err((error, String::new())) } else { vec![0; 1 << 24] };
        load(&mut log).map_err(|_| (error, log_text(&log)))
    })
}

/// Calls `action` while this thread takes no signals.
fn without_signals<T>(action: impl FnOnce() -> T) -> T {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the first call writes the set `all`, from which the second reads; that writes the set `before`.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let result = action();
    // SAFETY: `before` was written above. Where the old set is to go, null is allowed.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    result
}

/// How many runs of a program the kernel skipped. It skips a program on a CPU on which another run of the same program
/// has been interrupted.
pub fn runs_skipped(program: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: the structure consists of integers. Its pointers are null, so the kernel writes nowhere else.
    let info: bpf_prog_info = unsafe { object_info(program) }?;
    Ok(info.recursion_misses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_records_are_given_to_the_kernel() {
        let count = |bytes: usize, record_bytes| Records { bytes: &vec![0; bytes], record_bytes }.count();
        assert_eq!((count(0, 8), count(7, 8), count(16, 8), count(23, 8), count(16, 0)), (0, 0, 2, 2, 0));
    }

    #[test]
    fn what_is_interrupted_is_tried_again_and_what_is_refused_is_asked_for_its_log() {
        // The answers to the first tries; later ones get the last. Whether a try had room for a log.
        let asked = |answers: &[i32]| {
            let mut tries = Vec::new();
            let result = load_in_tries(|log| {
                let answer = answers[tries.len().min(answers.len() - 1)];
                tries.push(!log.is_empty());
                if let Some(first) = log.first_mut() {
                    *first = b'x';
                }
                if answer == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(answer)) }
            });
            (result.map_err(|(error, log)| (error.raw_os_error(), log)), tries)
        };
        let failed = |number, log: &str| Err((Some(number), log.to_owned()));
        assert_eq!(asked(&[libc::EAGAIN]), (failed(libc::EAGAIN, ""), vec![false; 5]));
        assert_eq!(asked(&[libc::EAGAIN, libc::EAGAIN, 0]), (Ok(()), vec![false; 3]));
        assert_eq!(asked(&[libc::EINVAL]), (failed(libc::EINVAL, "x"), vec![false, true]));
    }

    #[test]
    fn a_signal_waits_until_the_program_is_loaded() {
        let pending = || {
            let mut set = MaybeUninit::uninit();
            // SAFETY: the first call writes the set, from which the second reads.
            unsafe { libc::sigpending(set.as_mut_ptr()) == 0 && libc::sigismember(set.as_ptr(), libc::SIGURG) == 1 }
        };
        let during = without_signals(|| {
            // SAFETY: without a handler, this signal does nothing.
            unsafe { libc::raise(libc::SIGURG) };
            pending()
        });
        assert_eq!((during, pending()), (true, false));
    }
}

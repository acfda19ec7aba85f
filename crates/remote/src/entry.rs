//! Makes a process that is about to exec wait at its entry point: its libraries are mapped there, and none of its code
//! has run.
//!
//! At the exec, a few instructions are written behind the end of the program's text, in its last page. The entry point
//! in the auxiliary vector, where the dynamic loader finds it, is changed to point to them. (A program without a loader
//! starts there directly.) The instructions sleep until they are told to go on, for about twenty seconds at most, and
//! then jump to the real entry point. So nothing has to trace the process while it waits, and it goes on by itself if
//! its holder is killed.
//!
//! `at_entry` does the same to a process whose exec was not awaited.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use crate::at_entry::Jumps;
use crate::interrupted::Sleeping;
use crate::maps::PAGE_BYTES;
use crate::status::Status;
use crate::sys::{self, Event};

/// How a process that was prepared at its exec waits: 20,000 rounds of about a millisecond.
const PACE: Pace = Pace { rounds: 20_000, nanoseconds: 1_000_000 };
/// Maximum time until a process calls exec.
const EXEC_LIMIT: Duration = Duration::from_secs(60);
/// Pause between two checks of a process that is about to exec.
const PAUSE: Duration = Duration::from_micros(200);
/// Code segment of 64-bit code.
const CODE_64: u64 = 0x33;
/// Upper bound of a program's addresses.
const MOST_ADDRESS: u64 = 1 << 56;
/// Maximum words of a new stack: arguments, environment and auxiliary vector.
const MAX_WORDS: usize = 1 << 20;
/// Bytes of a program header, and the most headers that are read.
const HEADER_BYTES: u64 = 56;
const MAX_HEADERS: u64 = 128;
/// Bytes of the jump to the entry point, and the most bytes of instructions that may be moved in front of it.
const JUMP_BYTES: usize = 6;
const MOST_MOVED: usize = 10;
/// The first bytes of an ELF file.
const ELF_MAGIC: u32 = u32::from_le_bytes(*b"\x7fELF");

/// Why a process does not wait at its entry point. It runs as usual.
#[derive(Debug, thiserror::Error)]
pub enum NotHeld {
    /// It cannot be traced, read or written.
    #[error("cannot hold it at its entry point: {0}")]
    System(#[from] io::Error),
    /// There was no exec.
    #[error("it has not executed the program")]
    NoExec,
    /// 32-bit code, or an ELF file unlike those that compilers make.
    #[error("it is not a 64-bit program for this machine, or has an unknown layout")]
    Layout,
    /// The text ends where its last page does.
    #[error("there is no space after its code for the instructions that hold it at its entry point")]
    NoSpace,
    /// Another process traces it, and decides when it goes on.
    #[error("it is traced by process {0}")]
    Traced(u32),
    /// A seccomp filter, which may end it for the system call that it waits in. Filters are not evaluated for that.
    #[error("it runs under a seccomp filter, which might end it for waiting at its entry point")]
    Filtered,
    /// It has ended, or its program is not mapped yet.
    #[error("it has ended, or its program is not mapped yet")]
    Gone,
    /// Its entry code does not begin like that of C libraries.
    #[error("its entry code does not begin like that of C libraries")]
    Entry,
}

/// A process whose next exec is awaited.
#[derive(Debug)]
pub struct Exec(Receiver<Result<Waiting, NotHeld>>);

impl Exec {
    /// Awaits the next exec of a process, from now on.
    ///
    /// # Errors
    /// It cannot be traced.
    pub fn of(pid: u32) -> Result<Self, NotHeld> {
        let tid = i32::try_from(pid).map_err(|_| NotHeld::NoExec)?;
        let (traced, is_traced) = mpsc::channel();
        let (sender, receiver) = mpsc::channel();
        // Only the thread that traces the process may stop and release it. If that thread ends, the kernel releases the
        // process.
        std::thread::spawn(move || {
            let result = sys::seize(tid, libc::PTRACE_O_TRACEEXEC);
            let failed = result.is_err();
            let _ = traced.send(result);
            if !failed {
                let _ = sender.send(at_exec(tid));
            }
        });
        is_traced.recv().map_err(|_| NotHeld::NoExec)??;
        Ok(Self(receiver))
    }

    /// Waits for the exec.
    ///
    /// # Errors
    /// The process runs as usual.
    pub fn wait(self) -> Result<Waiting, NotHeld> {
        self.0.recv().unwrap_or(Err(NotHeld::NoExec))
    }
}

/// A process that waits at its entry point, or will when it gets there. Dropping this lets it go on.
#[derive(Debug)]
pub struct Waiting {
    pub(crate) pid: i32,
    pub(crate) memory: File,
    pub(crate) code: Range<u64>,
    pub(crate) go: u64,
    /// The jumps that lead it there, if its auxiliary vector does not.
    pub(crate) jumps: Option<Jumps>,
}

impl Waiting {
    /// Whether the process waits at its entry point. Once it does, this also restores its text: no other thread can get
    /// there.
    pub fn is_there(&self) -> bool {
        let is_there = self.sleeps_at().is_some_and(|at| self.code.contains(&at));
        if let Some(jumps) = self.jumps.as_ref().filter(|_| is_there) {
            jumps.put_back(&self.memory);
        }
        is_there
    }

    /// Whether the process sleeps in a system call of its own. Then it was caught too late and has passed its entry
    /// point, or it has not reached it yet.
    pub fn sleeps_elsewhere(&self) -> bool {
        self.sleeps_at().is_some_and(|at| !self.code.contains(&at))
    }

    /// The address at which it sleeps in a system call.
    fn sleeps_at(&self) -> Option<u64> {
        let sleeping = Sleeping::look(self.pid, self.pid)?;
        sleeping.call.map(|_| sleeping.instruction_pointer)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(jumps) = &self.jumps {
            // The process may be on its way already.
            jumps.short.put_back(&self.memory);
        }
        // This may fail: the process may have ended, or run another program.
        let _ = self.memory.write_all_at(&[1], self.go);
    }
}

/// Waits for the exec of a traced process, and prepares it.
fn at_exec(pid: i32) -> Result<Waiting, NotHeld> {
    let since = Instant::now();
    while since.elapsed() < EXEC_LIMIT {
        match sys::event(pid)? {
            Event::None => std::thread::sleep(PAUSE),
            Event::Ended => return Err(NotHeld::NoExec),
            Event::Exec => {
                let waiting = prepare(pid);
                sys::detach(pid, 0)?;
                return waiting;
            }
            Event::Signal(signal) => sys::cont(pid, signal)?,
        }
    }
    Err(NotHeld::NoExec)
}

fn prepare(pid: i32) -> Result<Waiting, NotHeld> {
    let mut registers = sys::registers(pid)?;
    if registers.cs != CODE_64 {
        return Err(NotHeld::Layout);
    }
    if Status::read(&format!("/proc/{pid}/status"))?.seccomp != 0 {
        return Err(NotHeld::Filtered);
    }
    let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    let word = |address: u64| {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, address).ok().map(|()| u64::from_ne_bytes(bytes))
    };
    let vector = Vector::find(&word, registers.rsp).ok_or(NotHeld::Layout)?;
    let end = vector.end_of_text(&word).ok_or(NotHeld::Layout)?;
    let write = |end| write_code(&memory, end, PACE, (&[], vector.entry));
    let (code, go) = match (write(end), vector.end_of_interpreter(&word)) {
        (Err(NotHeld::NoSpace), Some(end)) => write(end)?,
        (written, _) => written?,
    };
    if registers.rip == vector.entry {
        registers.rip = code.start;
        sys::set_registers(pid, &registers)?;
    } else {
        memory.write_all_at(&code.start.to_ne_bytes(), vector.entry_at)?;
    }
    Ok(Waiting { pid, memory, code, go, jumps: None })
}

/// Writes the instructions behind the end of a program's text. Returns their addresses, and the address of the byte
/// that lets the process go on.
pub(crate) fn write_code(
    memory: &File,
    end: u64,
    pace: Pace,
    onward: (&[u8], u64),
) -> Result<(Range<u64>, u64), NotHeld> {
    let (start, page_end) = (end.next_multiple_of(16), end.next_multiple_of(PAGE_BYTES));
    let (code, go) = instructions(start, pace, onward);
    let range = start..start + code.len() as u64;
    if range.end > page_end {
        return Err(NotHeld::NoSpace);
    }
    memory.write_all_at(&code, start)?;
    Ok((range, go))
}

/// The auxiliary vector that the kernel gives to a new program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Vector {
    /// The entry point, and the address of the word that holds it.
    pub(crate) entry: u64,
    entry_at: u64,
    pub(crate) headers: u64,
    header_count: u64,
    /// Where the dynamic loader's file is mapped; 0 if there is none.
    interpreter: u64,
}

impl Vector {
    /// Finds the vector on a new stack.
    fn find(word: &dyn Fn(u64) -> Option<u64>, stack: u64) -> Option<Self> {
        let at = |index: usize| stack.checked_add(index as u64 * 8);
        let arguments = usize::try_from(word(stack)?).ok().filter(|count| *count < MAX_WORDS)?;
        // The environment and its end follow the arguments and their end.
        let mut index = arguments + 2;
        while word(at(index)?)? != 0 {
            index += 1;
            if index > MAX_WORDS {
                return None;
            }
        }
        Self::read(word, at(index + 1)?)
    }

    /// Reads the vector at `start`.
    pub(crate) fn read(word: &dyn Fn(u64) -> Option<u64>, start: u64) -> Option<Self> {
        let mut vector = Self::default();
        for pair in 0..256 {
            let name = start.checked_add(16 * pair)?;
            let value = word(name + 8)?;
            match word(name)? {
                libc::AT_NULL => break,
                libc::AT_ENTRY => (vector.entry, vector.entry_at) = (value, name + 8),
                libc::AT_PHDR => vector.headers = value,
                libc::AT_PHNUM => vector.header_count = value,
                libc::AT_BASE => vector.interpreter = value,
                _ => {}
            }
        }
        (vector.entry != 0 && vector.headers != 0).then_some(vector)
    }

    /// Where the dynamic loader's text ends; `None` if there is no loader, or this cannot be determined.
    fn end_of_interpreter(&self, word: &dyn Fn(u64) -> Option<u64>) -> Option<u64> {
        let at = |offset: u64| self.interpreter.checked_add(offset);
        let is_file = self.interpreter != 0 && word(self.interpreter)? as u32 == ELF_MAGIC;
        let (headers, count) = (word(at(32)?)?, word(at(56)?)? & 0xffff);
        let mut headers =
            (0..count.min(MAX_HEADERS)).filter_map(|index| at(headers.checked_add(index * HEADER_BYTES)?));
        let end = headers.find_map(|header| {
            let kind = word(header)?;
            let [start, in_file, in_memory] = [16, 32, 40].map(|offset| header.checked_add(offset).and_then(word));
            let is_text = kind as u32 == libc::PT_LOAD && (kind >> 32) as u32 & libc::PF_X != 0;
            (is_text && in_file == in_memory).then_some(())?;
            at(start?)?.checked_add(in_file?)
        });
        end.filter(|end| is_file && *end <= MOST_ADDRESS)
    }

    /// Where the program's text ends.
    pub(crate) fn end_of_text(&self, word: &dyn Fn(u64) -> Option<u64>) -> Option<u64> {
        let headers = (0..self.header_count.min(MAX_HEADERS)).map(|index| self.headers + index * HEADER_BYTES);
        let headers: Option<Vec<[u64; 5]>> = headers
            .map(|at| Some([word(at)?, word(at + 16)?, word(at + 32)?, word(at + 40)?, word(at + 8)?]))
            .collect();
        let headers = headers?;
        let kind = |header: &[u64; 5]| header[0] as u32;
        let own = headers.iter().find(|header| kind(header) == libc::PT_PHDR);
        // A static program has no PT_PHDR. Its program headers follow the ELF header, where the beginning of the file
        // is mapped.
        let file = self.headers & !(PAGE_BYTES - 1);
        let first = headers.iter().find(|header| kind(header) == libc::PT_LOAD && header[4] == 0);
        let is_file =
            word(file).is_some_and(|word| word as u32 == ELF_MAGIC) && word(file + 32) == Some(self.headers - file);
        let bias = match (own, first) {
            (Some(own), _) => self.headers.wrapping_sub(own[1]),
            (None, Some(first)) if is_file => file.wrapping_sub(first[1]),
            _ => 0,
        };
        let is_text = |header: &&[u64; 5]| {
            let start = bias.wrapping_add(header[1]);
            let is_executable = (header[0] >> 32) as u32 & libc::PF_X != 0;
            let has_entry = self.entry.checked_sub(start).is_some_and(|within| within < header[2]);
            kind(header) == libc::PT_LOAD && is_executable && has_entry && header[2] == header[3]
        };
        let text = headers.iter().find(is_text)?;
        bias.checked_add(text[1])?.checked_add(text[2]).filter(|end| *end <= MOST_ADDRESS)
    }
}

/// How long a process waits before it goes on by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// How often it checks whether it may go on.
    pub(crate) rounds: u32,
    /// Time between two checks.
    pub(crate) nanoseconds: u64,
}

/// Returns instructions at `start` that wait, then run the `moved` instructions (at most [`MOST_MOVED`] bytes), and
/// jump to `entry`, preserving all registers; and the address of the byte that lets them go on.
fn instructions(start: u64, pace: Pace, (moved, entry): (&[u8], u64)) -> (Vec<u8>, u64) {
    const CODE: [u8; 64] = [
        0x50, // push rax
        0x53, // push rbx
        0x51, // push rcx
        0x57, // push rdi
        0x56, // push rsi
        0x41, 0x53, // push r11
        0xbb, 0, 0, 0, 0, // mov ebx, rounds
        0x80, 0x3d, 0x45, 0, 0, 0, 0x00, // again: cmp byte ptr [rip + GO], 0
        0x75, 0x14, // jne out
        0x48, 0x8d, 0x3d, 0x24, 0, 0, 0, // lea rdi, [rip + TIME]
        0x31, 0xf6, // xor esi, esi
        0xb8, 0x23, 0, 0, 0, // mov eax, SYS_nanosleep
        0x0f, 0x05, // syscall
        0xff, 0xcb, // dec ebx
        0x75, 0xe3, // jnz again
        0x41, 0x5b, // out: pop r11
        0x5e, // pop rsi
        0x5f, // pop rdi
        0x59, // pop rcx
        0x5b, // pop rbx
        0x58, // pop rax
        // what was moved, and jmp [rip + ENTRY]
        0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc,
    ];
    const ROUNDS_AT: usize = 8;
    const END: usize = CODE.len() - JUMP_BYTES - MOST_MOVED;
    let mut code = CODE.to_vec();
    code[ROUNDS_AT..][..4].copy_from_slice(&pace.rounds.to_le_bytes());
    code[END..][..moved.len()].copy_from_slice(moved);
    let jump = &mut code[END + moved.len()..][..JUMP_BYTES];
    // ENTRY is 16 bytes behind CODE.
    jump.copy_from_slice(&[0xff, 0x25, (MOST_MOVED - moved.len() + 16) as u8, 0, 0, 0]);
    // TIME: seconds, nanoseconds; ENTRY; GO
    code.extend(0_u64.to_le_bytes());
    code.extend(pace.nanoseconds.to_le_bytes());
    code.extend(entry.to_le_bytes());
    code.push(0);
    (code, start + CODE.len() as u64 + 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STACK: u64 = 0x1000;
    const HEADERS: u64 = 0x5000;

    /// Memory that consists of words at the stack's and the headers' addresses.
    fn memory(stack: Vec<u64>, headers: Vec<u64>) -> impl Fn(u64) -> Option<u64> {
        move |address| {
            let at =
                |base: u64, words: &[u64]| Some(*words.get(usize::try_from(address.checked_sub(base)? / 8).ok()?)?);
            at(HEADERS, &headers).or_else(|| at(STACK, &stack))
        }
    }

    #[test]
    fn the_entry_point_and_the_end_of_the_text_are_found() {
        let vector =
            [6, 4096, libc::AT_PHDR, HEADERS, libc::AT_PHNUM, 2, libc::AT_ENTRY, 0x55_0000_1080, libc::AT_NULL, 0];
        let mut stack = vec![2, 0x7000, 0x7008, 0, 0x7010, 0];
        stack.extend(vector);
        let own = [u64::from(libc::PT_PHDR) | 4 << 32, 0x40, HEADERS.wrapping_sub(0x55_0000_0000), 0, 0x70, 0x70, 8];
        let text = [u64::from(libc::PT_LOAD) | 5 << 32, 0x1000, 0x1000, 0x1000, 0x2a5, 0x2a5, 0x1000];
        let word = memory(stack, [own, text].concat());
        let found = Vector::find(&word, STACK).expect("a vector");
        assert_eq!((found.entry, found.entry_at), (0x55_0000_1080, STACK + 13 * 8));
        assert_eq!(found.end_of_text(&word), Some(0x55_0000_12a5));
    }

    #[test]
    fn a_static_program_is_where_its_file_begins() {
        let vector =
            Vector { entry: 0x1080 + HEADERS, entry_at: 0, headers: HEADERS + 64, header_count: 2, interpreter: 0 };
        let load = |flags: u64, offset, bytes| {
            [u64::from(libc::PT_LOAD) | flags << 32, offset, offset, offset, bytes, bytes, 0x1000]
        };
        let file = [u64::from(ELF_MAGIC), 0, 0, 0, 64, 0, 0, 0];
        let word = memory(Vec::new(), [&file[..], &load(4, 0, 0x600), &load(5, 0x1000, 0x2a5)].concat());
        assert_eq!(vector.end_of_text(&word), Some(HEADERS + 0x12a5));
        // Without the ELF header the load bias is taken as 0, and the entry point is in no segment.
        let word = memory(Vec::new(), [&[0; 8][..], &load(4, 0, 0x600), &load(5, 0x1000, 0x2a5)].concat());
        assert_eq!(vector.end_of_text(&word), None);
    }

    #[test]
    fn the_end_of_the_loaders_text_is_found() {
        const BASE: u64 = 0x9000;
        let executable = u64::from(libc::PT_LOAD) | u64::from(libc::PF_X) << 32;
        let loader = |in_memory: u64| {
            move |address: u64| match address - BASE {
                0 => Some(u64::from(ELF_MAGIC)),
                32 => Some(64),
                // One header; the other bits are another field.
                56 => Some(0x7_0001),
                64 => Some(executable),
                80 => Some(0x1000),
                96 => Some(0x123),
                104 => Some(in_memory),
                _ => None,
            }
        };
        let vector = Vector { interpreter: BASE, ..Vector::default() };
        assert_eq!(vector.end_of_interpreter(&loader(0x123)), Some(BASE + 0x1123));
        assert_eq!(vector.end_of_interpreter(&loader(0x200)), None, "what is behind it is in use");
        assert_eq!(Vector::default().end_of_interpreter(&|_| Some(1)), None, "a static program");
    }

    #[test]
    fn a_stack_without_end_has_no_vector() {
        assert_eq!(Vector::find(&|_| Some(7), STACK), None);
        assert_eq!(Vector::find(&|_| None, STACK), None);
    }

    #[test]
    fn the_instructions_end_with_the_byte_that_is_written() {
        for (moved, distance) in [(&[][..], 26), (&[0x31, 0xed], 24)] {
            let (code, go) = instructions(0x1000, PACE, (moved, 0x42));
            assert_eq!(go, 0x1000 + code.len() as u64 - 1);
            assert_eq!(code[code.len() - 9..code.len() - 1], 0x42_u64.to_le_bytes());
            assert!(code[48..].starts_with(&[moved, &[0xff, 0x25, distance, 0, 0, 0]].concat()), "{code:x?}");
        }
    }
}

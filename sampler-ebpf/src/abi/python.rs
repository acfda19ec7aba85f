//! Python frames: where an interpreter stores them, and the records in which the programs report frames and functions.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{ProcessKey, StackRecord};

/// Maximum number of Python frames reported per stack.
pub const MOST_PYTHON_FRAMES: usize = 256;
/// Number of frames per record. A deeper stack takes several records.
pub const PYTHON_FRAMES_PER_RECORD: usize = 64;
/// Maximum number of an interpreter's threads that are searched for the calling one.
pub const MOST_PYTHON_THREADS: u32 = 512;
/// Maximum size of an interpreter's frame that is read, bytes.
pub const PYTHON_FRAME_BYTES: usize = 128;
/// Number of bytes that identify a code object: four pointers, among them the name and the line table.
pub const PYTHON_IDENTITY_BYTES: usize = 32;

/// Number of entries for marks of reported code objects. Two objects that share an entry are reported more than once.
pub const PYTHON_CODES: u32 = 1 << 13;
/// Maximum number of bytes copied of a code object itself.
pub const PYTHON_HEAD_BYTES: usize = 256;
/// Maximum number of bytes copied of a string, including its head.
pub const PYTHON_TEXT_BYTES: usize = 512;
/// Maximum number of bytes copied of a line table, including its head.
pub const PYTHON_LINES_BYTES: usize = 1024;

/// Where a process's interpreter stores its frames: a value of the `PYTHON` map. All offsets are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct PythonProcess {
    /// Address of `_PyRuntime` in the process.
    pub runtime: u64,
    /// Bits of a frame's code pointer that are not part of the address.
    pub code_tags: u64,
    /// In `_PyRuntime`: pointer to the newest interpreter.
    pub interpreters_head: u32,
    /// In an interpreter: pointer to the next older one.
    pub interpreter_next: u32,
    /// In an interpreter: pointer to its newest thread state.
    pub threads_head: u32,
    /// In an interpreter: pointer to its lock; [`ABSENT`](Self::ABSENT) if the runtime itself records the running
    /// thread.
    pub lock: u32,
    /// In the lock, or else in the runtime: pointer to the state of the running thread.
    pub running: u32,
    /// In a thread's state: pointer to the next one.
    pub thread_next: u32,
    /// In a thread's state: pointer to its interpreter.
    pub thread_interpreter: u32,
    /// In a thread's state: `pthread_self()` of its thread.
    pub thread_id: u32,
    /// In a thread's state: pointer to its newest frame, or to a structure that points to the frame.
    pub thread_frame: u32,
    /// In that structure: pointer to the newest frame; [`ABSENT`](Self::ABSENT) if there is no such structure.
    pub indirect_frame: u32,
    /// Number of bytes to read of a frame, at most [`PYTHON_FRAME_BYTES`].
    pub frame_bytes: u32,
    /// In a frame: pointer to its code object.
    pub frame_code: u32,
    /// In a frame: pointer to its caller's frame.
    pub frame_previous: u32,
    /// In a frame: address or index of its current instruction.
    pub frame_instruction: u32,
    /// 1 if that is a 32-bit index.
    pub instruction_is_index: u32,
    /// In a frame: byte that says who owns it; [`ABSENT`](Self::ABSENT) if there is none.
    pub frame_owner: u32,
    /// In a frame: byte that is 1 if C code called it; [`ABSENT`](Self::ABSENT) if there is none.
    pub frame_is_entry: u32,
    /// In a code object: the [`PYTHON_IDENTITY_BYTES`] that identify it.
    pub code_identity: u32,
    /// In a code object: its first line, 32 bits.
    pub code_first_line: u32,
    /// Size of the part of a code object that has all needed fields, fewer bytes than [`PYTHON_HEAD_BYTES`]; 0 if code
    /// objects are not copied.
    pub code_bytes: u32,
    /// In a code object: pointer to its name, a string.
    pub code_name: u32,
    /// In a code object: pointer to its file's path, a string.
    pub code_file: u32,
    /// In a code object: pointer to its line table, a bytes object.
    pub code_lines: u32,
    /// Zero.
    pub reserved: u32,
}

impl PythonProcess {
    /// There is no such member.
    pub const ABSENT: u32 = u32::MAX;
}

/// Outcome of a walk of Python frames.
pub mod python_walk {
    /// All frames were found.
    pub const COMPLETE: u32 = 0;
    /// There are more than [`MOST_PYTHON_FRAMES`](super::MOST_PYTHON_FRAMES).
    pub const TOO_DEEP: u32 = 1;
    /// Memory could not be read.
    pub const UNREADABLE: u32 = 2;
    /// The process has several interpreters.
    pub const SUBINTERPRETERS: u32 = 3;
    /// The interpreter does not know the calling thread.
    pub const NO_THREAD: u32 = 4;
    /// The interpreter has not started, or has ended.
    pub const NOT_RUNNING: u32 = 5;
}

/// A Python frame.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct PythonFrame {
    /// Address of its code object.
    pub code: u64,
    /// [`check`] of that code object.
    pub check: u64,
    /// Its current instruction: bytes from the code object's address, or an index.
    pub instruction: u32,
    /// The owner, in the lowest byte; whether C code called it, in the next one.
    pub flags: u32,
}

impl PythonFrame {
    /// The byte that says who owns the frame.
    #[must_use]
    pub const fn owner(&self) -> u8 {
        self.flags as u8
    }

    /// Whether C code called it, if frames record that.
    #[must_use]
    pub const fn is_entry(&self) -> bool {
        self.flags & 0x100 != 0
    }
}

/// A checksum that changes when another code object takes over an address. It covers the four pointers that identify
/// the object, and its first line.
#[inline(always)]
#[must_use]
pub const fn check(identity: [u64; PYTHON_IDENTITY_BYTES / 8], first_line: u32) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut sum = first_line as u64;
    let mut i = 0;
    while i < identity.len() {
        sum = (sum.rotate_left(17) ^ identity[i]).wrapping_mul(FACTOR);
        i += 1;
    }
    sum
}

/// A record of Python frames in the stacks ring, innermost frame first. It comes before the copy of the same stack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct PythonRecord {
    /// [`PythonRecord::MARK`], at the position of a stack copy's sample id.
    pub mark: u64,
    /// The sample's id.
    pub sample: u64,
    /// CLOCK_MONOTONIC, as in the allocation's record.
    pub time_ns: u64,
    /// The owner of the address space that the frames are in.
    pub space: ProcessKey,
    /// Number of frames in this record.
    pub count: u32,
    /// One of [`python_walk`].
    pub walk: u32,
    /// 1 if another record with more frames follows.
    pub continues: u32,
    /// Zero.
    pub reserved: u32,
    /// The programs' read buffer; the daemon ignores it.
    pub scratch: [u64; PYTHON_FRAME_BYTES / 8 + 1],
    /// The frames.
    pub frames: [PythonFrame; PYTHON_FRAMES_PER_RECORD],
}

impl PythonRecord {
    /// No sample has this id.
    pub const MARK: u64 = u64::MAX;
}

/// A copy of data in a process's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, Immutable, KnownLayout)]
pub struct PythonCopy<const BYTES: usize> {
    /// Its address.
    pub address: u64,
    /// Number of bytes to be copied, at most `BYTES`.
    pub asked: u32,
    /// 0 if they were copied; else the kernel's negative error number.
    pub status: i32,
    /// The bytes.
    pub bytes: [u8; BYTES],
}

/// A record of a code object in the stacks ring. It is sent when the programs first see the object in a stack, and
/// precedes the copy of that stack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, Immutable, KnownLayout)]
pub struct PythonCodeRecord {
    /// [`PythonCodeRecord::MARK`], at the position of a stack copy's sample id.
    pub mark: u64,
    /// The owner of the address space that it is in.
    pub space: ProcessKey,
    /// [`check`] of the object.
    pub check: u64,
    /// The code object, up to its instructions.
    pub head: PythonCopy<PYTHON_HEAD_BYTES>,
    /// Its name.
    pub name: PythonCopy<PYTHON_TEXT_BYTES>,
    /// Its file's path.
    pub file: PythonCopy<PYTHON_TEXT_BYTES>,
    /// Its line table.
    pub lines: PythonCopy<PYTHON_LINES_BYTES>,
}

impl PythonCodeRecord {
    /// No sample has this id.
    pub const MARK: u64 = u64::MAX - 1;
}

// The daemon distinguishes the records in the stacks ring by their first word.
const _: () = {
    assert!(core::mem::offset_of!(StackRecord, sample) == core::mem::offset_of!(PythonRecord, mark));
    assert!(core::mem::offset_of!(StackRecord, sample) == core::mem::offset_of!(PythonCodeRecord, mark));
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_depends_on_each_pointer_and_on_the_line() {
        let identity = [0x7f00_0000_1000, 0x7f00_0000_2000, 0x7f00_0000_3000, 0x7f00_0000_4000];
        let of = check(identity, 7);
        assert_ne!(of, check(identity, 8));
        for i in 0..identity.len() {
            let mut other = identity;
            other[i] += 16;
            assert_ne!(of, check(other, 7));
        }
        let swapped = [identity[1], identity[0], identity[2], identity[3]];
        assert_ne!(of, check(swapped, 7));
    }
}

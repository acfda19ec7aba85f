//! What a seccomp filter answers to a system call: classic BPF, run as the kernel runs it. Pure.
//!
//! Filters are suspended for the calls that we have a process make, but only as long as we live. If we are killed
//! during one, the filter decides about it. So a process whose filter would end it for such a call must be left alone.

use std::fmt;

use libc::{
    SECCOMP_RET_ACTION_FULL as ACTION, SECCOMP_RET_ALLOW as ALLOW, SECCOMP_RET_ERRNO as ERRNO,
    SECCOMP_RET_KILL_PROCESS as KILL_PROCESS, SECCOMP_RET_KILL_THREAD as KILL_THREAD, SECCOMP_RET_LOG as LOG,
    SECCOMP_RET_TRACE as TRACE, SECCOMP_RET_USER_NOTIF as USER_NOTIF,
};

/// An instruction of a filter.
pub(crate) type Instruction = libc::sock_filter;

/// x86-64 in `struct seccomp_data`.
const MACHINE: u32 = 0xc000_003e;
/// Bytes of `struct seccomp_data`.
const DATA_BYTES: u32 = 64;
/// Words of memory that a filter has.
const MEMORY_WORDS: usize = 16;

/// A system call as a filter sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Call {
    /// Its number.
    pub(crate) number: u32,
    /// The instruction after the one that makes it.
    pub(crate) next_instruction: u64,
    /// Its arguments.
    pub(crate) arguments: [u64; 6],
}

impl Call {
    /// A word of `struct seccomp_data`.
    fn word(&self, offset: u32) -> Option<u32> {
        let half = |value: u64| if offset.is_multiple_of(8) { value as u32 } else { (value >> 32) as u32 };
        match offset {
            offset if !offset.is_multiple_of(4) || offset >= DATA_BYTES => None,
            0 => Some(self.number),
            4 => Some(MACHINE),
            8 | 12 => Some(half(self.next_instruction)),
            offset => self.arguments.get((offset as usize - 16) / 8).map(|argument| half(*argument)),
        }
    }
}

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It is made.
    Made,
    /// It fails with an error.
    Fails,
    /// Another process is asked, and waits for such calls.
    Asks,
    /// The thread or the process ends. A signal (`SECCOMP_RET_TRAP`) ends it as well, because signals are blocked
    /// during our calls.
    Ends,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Made => "allows",
            Self::Fails => "refuses",
            Self::Asks => "asks another process about",
            Self::Ends => "ends the process for",
        })
    }
}

/// The filters of a thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Filters(Vec<Vec<Instruction>>);

impl Filters {
    /// Takes these programs, in any order.
    pub(crate) fn new(programs: Vec<Vec<Instruction>>) -> Self {
        Self(programs)
    }

    /// The filters' joint answer to a call: the strictest one counts.
    pub(crate) fn answer(&self, call: &Call) -> Answer {
        // The kernel compares the actions as signed numbers, so KILL_PROCESS is the lowest.
        // The other bits of an answer are data.
        let action = |program: &Vec<Instruction>| (run(program, call) & ACTION).cast_signed();
        match self.0.iter().map(action).fold(ALLOW.cast_signed(), i32::min).cast_unsigned() {
            ALLOW | LOG => Answer::Made,
            // Without a tracer that asked for these events, the call fails.
            ERRNO | TRACE => Answer::Fails,
            USER_NOTIF => Answer::Asks,
            // KILL_PROCESS, KILL_THREAD, TRAP, and all that the kernel does not know.
            _ => Answer::Ends,
        }
    }
}

/// The answer of one filter. An invalid one kills: the kernel would not have accepted it.
fn run(program: &[Instruction], call: &Call) -> u32 {
    Machine::default().run(program, call).unwrap_or(KILL_PROCESS)
}

/// The state of a running filter.
#[derive(Default)]
struct Machine {
    a: u32,
    x: u32,
    memory: [u32; MEMORY_WORDS],
}

impl Machine {
    /// Runs the program; `None` if it is not valid.
    fn run(&mut self, program: &[Instruction], call: &Call) -> Option<u32> {
        let mut at = 0usize;
        // All jumps lead forward, so this ends.
        while let Some(&instruction) = program.get(at) {
            let Instruction { code, jt, jf, k } = instruction;
            at += 1;
            let word = |k: u32| self.memory.get(k as usize).copied();
            match code {
                // ret k, ret a
                0x06 => return Some(k),
                0x16 => return Some(self.a),
                // ld [k], ld len, ld #k, ld M[k]; ldx len, ldx #k, ldx M[k]
                0x20 => self.a = call.word(k)?,
                0x80 => self.a = DATA_BYTES,
                0x00 => self.a = k,
                0x60 => self.a = word(k)?,
                0x81 => self.x = DATA_BYTES,
                0x01 => self.x = k,
                0x61 => self.x = word(k)?,
                // st, stx, tax, txa
                0x02 => *self.memory.get_mut(k as usize)? = self.a,
                0x03 => *self.memory.get_mut(k as usize)? = self.x,
                0x07 => self.x = self.a,
                0x87 => self.a = self.x,
                // ja
                0x05 => at = at.checked_add(k as usize)?,
                code if code & 7 == 5 => at += usize::from(if self.holds(code, k)? { jt } else { jf }),
                code if code & 7 == 4 => match self.computed(code, k)? {
                    Some(value) => self.a = value,
                    // The kernel ends a program that divides by zero, with the answer 0.
                    None => return Some(KILL_THREAD),
                },
                _ => return None,
            }
        }
        None
    }

    /// The second operand: `k`, or the index register.
    fn operand(&self, code: u16, k: u32) -> u32 {
        if code & 8 == 0 { k } else { self.x }
    }

    /// Evaluates a condition; `None` if the code is not valid.
    fn holds(&self, code: u16, k: u32) -> Option<bool> {
        let other = self.operand(code, k);
        match code & 0xf0 {
            0x10 => Some(self.a == other),
            0x20 => Some(self.a > other),
            0x30 => Some(self.a >= other),
            0x40 => Some(self.a & other != 0),
            _ => None,
        }
    }

    /// Evaluates arithmetic; `None` if the code is not valid, `Some(None)` for a division by zero.
    fn computed(&self, code: u16, k: u32) -> Option<Option<u32>> {
        let (a, other) = (self.a, self.operand(code, k));
        Some(match code & 0xf0 {
            0x00 => Some(a.wrapping_add(other)),
            0x10 => Some(a.wrapping_sub(other)),
            0x20 => Some(a.wrapping_mul(other)),
            0x30 => a.checked_div(other),
            0x40 => Some(a | other),
            0x50 => Some(a & other),
            // Only the last five bits of the distance count.
            0x60 => Some(a.wrapping_shl(other)),
            0x70 => Some(a.wrapping_shr(other)),
            0x80 => Some(a.wrapping_neg()),
            0xa0 => Some(a ^ other),
            _ => return None,
        })
    }
}

#[cfg(test)]
#[path = "seccomp_tests.rs"]
mod tests;

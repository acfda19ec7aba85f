//! The system call that a thread sleeps in, from `/proc/PID/task/TID/syscall`. Pure except for reading that file.

use std::ffi::c_long;

const IO_PGETEVENTS: c_long = 333;

/// Calls that, once part of the work is done, return that part to whatever wakes them.
const MAY_RETURN_A_PART: [c_long; 13] = [
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwritev2,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_vmsplice,
    libc::SYS_tee,
    libc::SYS_recvmmsg,
    libc::SYS_io_getevents,
    IO_PGETEVENTS,
];
/// The same for calls that wait for all data (MSG_WAITALL), with the index of the argument that holds the flags.
const MAY_WAIT_FOR_ALL: [(c_long, usize); 2] = [(libc::SYS_recvfrom, 3), (libc::SYS_recvmsg, 2)];

/// A sleeping thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sleeping {
    /// The system call that it is in, with its arguments; `None` if it waits for something else, such as a page.
    pub(crate) call: Option<(c_long, [u64; 6])>,
    pub(crate) stack_pointer: u64,
    pub(crate) instruction_pointer: u64,
}

impl Sleeping {
    /// Examines a thread; `None` if it runs, or is gone.
    pub(crate) fn look(pid: i32, tid: i32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_ascii_whitespace();
        let number: c_long = words.next()?.parse().ok()?;
        let words: Vec<u64> =
            words.map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()).collect::<Option<_>>()?;
        let (arguments, [stack_pointer, instruction_pointer]) = words.split_last_chunk()?;
        let call = arguments.try_into().ok().map(|arguments| (number, arguments));
        Some(Self { call, stack_pointer: *stack_pointer, instruction_pointer: *instruction_pointer })
    }

    /// Whether a stop may make its call return a part of its work, as any signal may. No restart could hide that.
    pub(crate) fn may_return_a_part(&self) -> bool {
        let Some((number, arguments)) = self.call else { return false };
        let waits_for_all = |(call, flags): &(c_long, usize)| {
            *call == number && arguments[*flags] & libc::MSG_WAITALL.cast_unsigned() as u64 != 0
        };
        MAY_RETURN_A_PART.contains(&number) || MAY_WAIT_FOR_ALL.iter().any(waits_for_all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Sleeping {
        Sleeping::parse(text).expect("it sleeps")
    }

    #[test]
    fn what_a_thread_sleeps_in() {
        let sleeping = parsed("1 0x4 0x7f00 0x100000 0x0 0x0 0x0 0x7ffe0010 0x401234\n");
        assert_eq!(sleeping.call, Some((libc::SYS_write, [4, 0x7f00, 0x10_0000, 0, 0, 0])));
        assert_eq!((sleeping.stack_pointer, sleeping.instruction_pointer), (0x7ffe_0010, 0x40_1234));
        let at_a_page = Sleeping { call: None, ..sleeping };
        assert_eq!(parsed("-1 0x7ffe0010 0x401234\n"), at_a_page);
        for text in ["running\n", "", "1 0x4\n", "1 4 5 6 7 8 9 10 11\n"] {
            assert_eq!(Sleeping::parse(text), None, "{text}");
        }
    }

    #[test]
    fn calls_that_return_a_part() {
        let call = |number, flags: [u64; 2]| Sleeping {
            call: Some((number, [3, 0, flags[0], flags[1], 0, 0])),
            stack_pointer: 0,
            instruction_pointer: 0,
        };
        let all = libc::MSG_WAITALL as u64;
        assert!(call(libc::SYS_write, [0; 2]).may_return_a_part());
        assert!(call(libc::SYS_recvfrom, [0, all | 1]).may_return_a_part());
        assert!(call(libc::SYS_recvmsg, [all, 0]).may_return_a_part());
        assert!(!call(libc::SYS_recvfrom, [all, 0]).may_return_a_part());
        assert!(!call(libc::SYS_read, [all; 2]).may_return_a_part());
        assert!(!parsed("-1 0x7ffe0010 0x401234").may_return_a_part());
    }
}

//! What threads were doing when a stop found them: the system call that they sleep in or that the stop interrupted, and
//! restartable sequences. Pure except for reading `/proc/PID/task/TID/syscall`.
//!
//! A stop interrupts a call as a signal does. The kernel restarts most calls by itself, because no handler ran. Some
//! calls return EINTR whatever woke them (signal(7)). For those the result is changed to ERESTARTNOHAND. When the
//! thread goes on, the kernel then decides as for all other calls: EINTR if a handler runs now, otherwise the call is
//! restarted. So no signal can be missed, and pending signals need not be checked.
//!
//! When a thread goes on, the kernel checks whether it was interrupted in a restartable sequence (rseq(2)), and if so
//! continues at the sequence's abort handler. A thread that makes calls for us first goes on elsewhere, so the kernel
//! sees no sequence and forgets it. Afterwards the thread would finish the sequence with what it had read before. So we
//! direct it to the handler as the kernel would (`kernel/rseq.c`).

use std::ffi::c_long;

use crate::sys::{Registers, RseqArea};

const ERESTARTSYS: u64 = (-512i64) as u64;
const ERESTARTNOINTR: u64 = (-513i64) as u64;
const ERESTARTNOHAND: u64 = (-514i64) as u64;
const ERESTART_RESTARTBLOCK: u64 = (-516i64) as u64;
const EINTR: u64 = (-(libc::EINTR as i64)) as u64;
/// Length of the instruction that makes a system call.
pub(crate) const SYSCALL_BYTES: u64 = 2;

const IO_PGETEVENTS: libc::c_long = 333;

/// Calls that return EINTR whatever wakes them, at least sometimes, and that may be made again when they do: they have
/// done nothing, or (fallocate of huge pages) nothing that they would not do again. Some do it only where a file server
/// (FUSE) answers EINTR. Left out on purpose: close (has done its work), ioctl (may mean anything), open (may have
/// created the file).
const RETURN_EINTR: [libc::c_long; 40] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_getdents64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_connect,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_io_getevents,
    IO_PGETEVENTS,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    // These restart by themselves only if the kernel can write the time that is left (`poll_select_finish`).
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_ppoll,
    libc::SYS_io_uring_enter,
    libc::SYS_flock,
];

/// Whether the thread was in a system call when it stopped.
fn is_in_call(registers: &Registers) -> bool {
    registers.orig_rax.cast_signed() >= 0
}

/// Makes the kernel restart a call that only the stop interrupted. Returns whether the registers changed.
pub(crate) fn repair(registers: &mut Registers) -> bool {
    let is_ours = is_in_call(registers)
        && registers.rax == EINTR
        && RETURN_EINTR.iter().any(|number| registers.orig_rax == number.cast_unsigned());
    if is_ours {
        begin_anew(registers);
    }
    is_ours
}

/// Makes the kernel start the call anew when the thread goes on, or end it with EINTR if a handler runs then.
pub(crate) fn begin_anew(registers: &mut Registers) {
    registers.rax = ERESTARTNOHAND;
}

/// Whether the kernel keeps state to restart the call, which it forgets when a signal frame is left.
pub(crate) fn has_restart_block(registers: &Registers) -> bool {
    is_in_call(registers) && registers.rax == ERESTART_RESTARTBLOCK
}

/// The state in which a thread goes on if its registers come from a signal frame, so that the kernel restarts nothing.
/// A call with a restart block starts anew and may take longer than it should. That is better than EINTR without a
/// signal, which many programs take for an error.
pub(crate) fn restarted_by_hand(registers: &Registers) -> Registers {
    let mut registers = *registers;
    let restarts = [ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK];
    if is_in_call(&registers) && restarts.contains(&registers.rax) {
        registers.rax = registers.orig_rax;
        registers.rip = registers.rip.wrapping_sub(SYSCALL_BYTES);
    }
    registers
}

/// Offset in a thread's area of the address of its sequence's descriptor (`struct rseq`).
const DESCRIPTOR_AT: u64 = 8;
/// The signature precedes the handler.
const SIGNATURE_BYTES: u64 = 4;

/// The kernel would not accept the thread's sequence.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Where a thread that was stopped at `ip` has to go on; `None` if it is not in a sequence.
pub(crate) fn abort_address(
    area: &RseqArea,
    ip: u64,
    read: impl Fn(u64, &mut [u8]) -> bool,
) -> Result<Option<u64>, Malformed> {
    // The address of the descriptor of the sequence that it has announced; it may have left the sequence since.
    let mut descriptor = [0; 8];
    if !read(area.address.wrapping_add(DESCRIPTOR_AT), &mut descriptor) {
        return Err(Malformed);
    }
    let descriptor = u64::from_le_bytes(descriptor);
    if descriptor == 0 {
        return Ok(None);
    }
    // `struct rseq_cs` of version 0.
    let mut words = [[0; 8]; 4];
    if !read(descriptor, words.as_flattened_mut()) {
        return Err(Malformed);
    }
    let [version_and_flags, start, length, handler] = words.map(u64::from_le_bytes);
    let is_within = |address: u64| address.wrapping_sub(start) < length;
    if !is_within(ip) {
        return Ok(None);
    }
    let mut signature = [0; SIGNATURE_BYTES as usize];
    let is_sound = version_and_flags == 0
        && !is_within(handler)
        && start.checked_add(length).is_some()
        && read(handler.wrapping_sub(SIGNATURE_BYTES), &mut signature)
        && u32::from_le_bytes(signature) == area.signature;
    if is_sound { Ok(Some(handler)) } else { Err(Malformed) }
}

/// Calls that, once part of the work is done, return that part to whatever wakes them.
const MAY_RETURN_A_PART: [c_long; 14] = [
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwritev2,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_copy_file_range,
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

    fn registers(orig_rax: i64, rax: i64) -> Registers {
        // SAFETY: a struct of integers.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        registers.orig_rax = orig_rax.cast_unsigned();
        registers.rax = rax.cast_unsigned();
        registers.rip = 0x1002;
        registers
    }

    #[test]
    fn eintr_of_the_stop_is_left_to_the_kernel() {
        let mut epoll = registers(libc::SYS_epoll_wait, -4);
        assert!(repair(&mut epoll));
        assert_eq!((epoll.rax.cast_signed(), epoll.rip, epoll.orig_rax), (-514, 0x1002, 232));
        let calls = [libc::SYS_fallocate, libc::SYS_pread64, libc::SYS_getdents64, libc::SYS_fsync];
        for call in calls.into_iter().chain([libc::SYS_select, libc::SYS_pselect6, libc::SYS_ppoll]) {
            assert!(repair(&mut registers(call, -4)), "{call}");
        }
        // Not ours: close, a result, another error, no system call (a signal frame was left), a call that restarts by
        // itself.
        for (orig_rax, rax) in [(libc::SYS_close, -4), (232, 1), (232, -22), (-1, -4), (0, -512), (0, 4)] {
            assert!(!repair(&mut registers(orig_rax, rax)), "{orig_rax} {rax}");
        }
    }

    #[test]
    fn a_frame_makes_the_call_again() {
        for error in [-512, -513, -514, -516] {
            let restarted = restarted_by_hand(&registers(0, error));
            assert_eq!((restarted.rax, restarted.rip), (0, 0x1000));
        }
        for (orig_rax, rax) in [(0, 5), (-1, -512), (0, -4)] {
            let same = restarted_by_hand(&registers(orig_rax, rax));
            assert_eq!((same.rax.cast_signed(), same.rip), (rax, 0x1002));
        }
        assert!(has_restart_block(&registers(35, -516)) && !has_restart_block(&registers(-1, -516)));
    }
}

#[cfg(test)]
mod sequence_tests {
    use super::*;

    const AREA: RseqArea = RseqArea { address: 0x1000, signature: 0x5305_3053 };

    /// A process with an area, a descriptor, and a handler at 0x5004.
    struct Memory {
        descriptor: u64,
        sequence: [u64; 4],
        signature: u32,
    }

    const SOUND: Memory = Memory { descriptor: 0x2000, sequence: [0, 0x4000, 0x20, 0x5004], signature: AREA.signature };

    impl Memory {
        fn abort_address(&self, ip: u64) -> Result<Option<u64>, Malformed> {
            super::abort_address(&AREA, ip, |address, to| {
                let from = match address {
                    0x1008 => self.descriptor.to_le_bytes().to_vec(),
                    0x2000 => self.sequence.iter().flat_map(|word| word.to_le_bytes()).collect(),
                    0x5000 => self.signature.to_le_bytes().to_vec(),
                    _ => return false,
                };
                to.copy_from_slice(&from);
                true
            })
        }
    }

    #[test]
    fn a_thread_in_a_sequence_goes_on_at_its_handler() {
        for (ip, handler) in [(0x3fff, None), (0x4000, Some(0x5004)), (0x401f, Some(0x5004)), (0x4020, None)] {
            assert_eq!(SOUND.abort_address(ip), Ok(handler), "{ip:#x}");
        }
        assert_eq!(Memory { descriptor: 0, ..SOUND }.abort_address(0x4000), Ok(None));
    }

    #[test]
    fn what_the_kernel_would_not_accept_is_refused() {
        for memory in [
            Memory { descriptor: 0x9000, ..SOUND },
            Memory { signature: 1, ..SOUND },
            Memory { sequence: [1, 0x4000, 0x20, 0x5004], ..SOUND },
            Memory { sequence: [1 << 32, 0x4000, 0x20, 0x5004], ..SOUND },
            Memory { sequence: [0, 0x4000, 0x2000, 0x5004], ..SOUND },
            Memory { sequence: [0, 0x4000, 0x20, 0x6000], ..SOUND },
            Memory { sequence: [0, 0x4000, u64::MAX - 0x20, 0x1004], ..SOUND },
        ] {
            assert_eq!(memory.abort_address(0x4010), Err(Malformed), "{:x?}", memory.sequence);
        }
    }

    #[test]
    fn a_descriptor_that_is_not_the_threads_place_any_more_says_nothing() {
        // The kernel checks the position first, and does not check what it does not need.
        assert_eq!(Memory { signature: 1, ..SOUND }.abort_address(0x7000), Ok(None));
    }
}

#[cfg(test)]
mod sleeping_tests {
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
        assert!(call(libc::SYS_copy_file_range, [0; 2]).may_return_a_part());
        assert!(call(libc::SYS_recvfrom, [0, all | 1]).may_return_a_part());
        assert!(call(libc::SYS_recvmsg, [all, 0]).may_return_a_part());
        assert!(!call(libc::SYS_recvfrom, [all, 0]).may_return_a_part());
        assert!(!call(libc::SYS_read, [all; 2]).may_return_a_part());
        assert!(!parsed("-1 0x7ffe0010 0x401234").may_return_a_part());
    }
}

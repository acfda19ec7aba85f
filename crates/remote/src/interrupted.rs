//! Adjusts registers of threads that a stop found in a system call. Pure.
//!
//! A stop interrupts a call as a signal does. The kernel restarts most calls by itself, because no handler ran. Some
//! calls return EINTR whatever woke them (signal(7)). For those the result is changed to ERESTARTNOHAND. When the
//! thread goes on, the kernel then decides as for all other calls: EINTR if a handler runs now, otherwise the call is
//! restarted. So no signal can be missed, and pending signals need not be checked.

use crate::sys::Registers;

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
const RETURN_EINTR: [libc::c_long; 37] = [
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
        for call in [libc::SYS_fallocate, libc::SYS_pread64, libc::SYS_getdents64, libc::SYS_fsync] {
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

//! The system calls that a recording drops, and those that its helpers and its client threads keep.

/// A list of system calls; after a semicolon, those that only x86-64 has.
macro_rules! calls {
    ($($name:ident)* $(; $($here:ident)*)?) => {
        &[$(libc::$name,)* $($(#[cfg(target_arch = "x86_64")] libc::$here,)*)?]
    };
}

/// What no recording does once its probes are in place: start programs, change mounts, load modules, change namespaces
/// or roots, set clocks, use keys, or write into the memory of other processes by system call.
pub(super) const REFUSED: &[i64] = calls![
    SYS_acct SYS_add_key SYS_adjtimex SYS_chroot SYS_clock_adjtime SYS_clock_settime SYS_delete_module SYS_execve
    SYS_execveat SYS_finit_module SYS_fsconfig SYS_fsmount SYS_fsopen SYS_fspick SYS_init_module SYS_io_uring_enter
    SYS_io_uring_register SYS_io_uring_setup SYS_kexec_file_load SYS_kexec_load SYS_keyctl SYS_mknodat SYS_mount
    SYS_mount_setattr SYS_move_mount SYS_open_by_handle_at SYS_open_tree SYS_personality SYS_pidfd_getfd
    SYS_pivot_root SYS_process_vm_writev SYS_ptrace SYS_quotactl SYS_reboot SYS_request_key SYS_setdomainname
    SYS_sethostname SYS_setns SYS_settimeofday SYS_swapoff SYS_swapon SYS_syslog SYS_umount2 SYS_unshare
    SYS_userfaultfd SYS_vhangup
    ; SYS_ioperm SYS_iopl SYS_mknod SYS_modify_ldt
];

/// The refused calls that are needed to stop a process.
pub(super) const STOPPING: &[i64] = calls![SYS_pidfd_getfd SYS_process_vm_writev SYS_ptrace];

/// The calls through which probes of this process itself return (uretprobe, uprobe), because heapbpf may be a target of
/// `--all`. Some kernels pass them through the filter.
pub(super) const OF_PROBES: &[i64] = if cfg!(target_arch = "x86_64") { &[335, 336] } else { &[] };

/// What the guardian needs: links and messages.
pub(super) const GUARDING: &[i64] = calls![
    SYS_bpf SYS_brk SYS_close SYS_exit_group SYS_futex SYS_mmap SYS_munmap SYS_perf_event_open SYS_ppoll SYS_recvmsg
    SYS_restart_syscall SYS_rt_sigreturn SYS_sendmsg SYS_sigaltstack
    ; SYS_poll
];

/// What demangling needs: its two pipes, memory, and the timer that ends it.
pub(super) const DEMANGLING: &[i64] = calls![
    SYS_brk SYS_exit_group SYS_futex SYS_gettid SYS_getpid SYS_getrandom SYS_madvise SYS_mmap SYS_mprotect SYS_mremap
    SYS_munmap SYS_read SYS_restart_syscall SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_setitimer
    SYS_sigaltstack SYS_tgkill SYS_write
];

/// What answering clients over connections needs: sockets that are already open, memory, threads, time.
pub(super) const ANSWERING: &[i64] = calls![
    SYS_accept4 SYS_brk SYS_clock_gettime SYS_clock_nanosleep SYS_clone SYS_clone3 SYS_close SYS_epoll_ctl
    SYS_epoll_pwait SYS_epoll_pwait2 SYS_exit SYS_exit_group SYS_fcntl SYS_futex SYS_getpeername SYS_getpid
    SYS_getrandom SYS_getsockname SYS_getsockopt SYS_gettid SYS_ioctl SYS_madvise SYS_mmap SYS_mprotect SYS_mremap
    SYS_munmap SYS_nanosleep SYS_ppoll SYS_prctl SYS_pread64 SYS_prlimit64 SYS_read SYS_readv SYS_recvfrom SYS_recvmsg
    SYS_restart_syscall SYS_rseq SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_sched_getaffinity
    SYS_sched_yield SYS_sendmsg SYS_sendto SYS_set_robust_list SYS_setsockopt SYS_shutdown SYS_sigaltstack SYS_tgkill
    SYS_write SYS_writev
    ; SYS_epoll_wait SYS_poll
];

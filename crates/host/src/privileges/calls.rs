//! The system calls that a recording drops, and those that its helpers and its client threads keep.

/// What no recording does once its probes are in place: start programs, change mounts, load modules, change namespaces
/// or roots, set clocks, use keys, or write into the memory of other processes by system call.
const REFUSED: &[i64] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_adjtimex,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mknodat,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_personality,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
];

/// The same, for calls that only this architecture has.
#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[i64] = &[libc::SYS_ioperm, libc::SYS_iopl, libc::SYS_mknod, libc::SYS_modify_ldt];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_HERE: &[i64] = &[];

/// The refused calls that are needed to stop a process.
pub(super) const STOPPING: &[i64] = &[libc::SYS_pidfd_getfd, libc::SYS_process_vm_writev, libc::SYS_ptrace];

/// The calls that the daemon drops.
pub(super) fn refused() -> Vec<i64> {
    [REFUSED, REFUSED_HERE].concat()
}

/// The calls through which probes of this process itself return (uretprobe, uprobe), because heapbpf may be a target of
/// `--all`. Some kernels pass them through the filter.
#[cfg(target_arch = "x86_64")]
const SYS_URETPROBE: i64 = 335;
#[cfg(target_arch = "x86_64")]
const SYS_UPROBE: i64 = 336;

/// What the guardian needs: links and messages.
pub(super) const GUARDING: &[i64] = &[
    libc::SYS_bpf,
    libc::SYS_brk,
    libc::SYS_close,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_perf_event_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigreturn,
    libc::SYS_sendmsg,
    libc::SYS_sigaltstack,
    #[cfg(target_arch = "x86_64")]
    SYS_UPROBE,
    #[cfg(target_arch = "x86_64")]
    SYS_URETPROBE,
];

/// What demangling needs: its two pipes, memory, and the timer that ends it.
pub(super) const DEMANGLING: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_setitimer,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    #[cfg(target_arch = "x86_64")]
    SYS_UPROBE,
    #[cfg(target_arch = "x86_64")]
    SYS_URETPROBE,
    libc::SYS_write,
];

/// What answering clients over connections needs: sockets that are already open, memory, threads, time.
pub(super) const ANSWERING: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_close,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_futex,
    libc::SYS_getpeername,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_ioctl,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_prlimit64,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    #[cfg(target_arch = "x86_64")]
    SYS_UPROBE,
    #[cfg(target_arch = "x86_64")]
    SYS_URETPROBE,
    libc::SYS_write,
    libc::SYS_writev,
];

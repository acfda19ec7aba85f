//! What `/proc/PID/status` and `/proc/PID/stat` say about whether a process may be stopped. Pure except for reading a
//! status file.

use std::{fs, io};

/// The content of a status file; a missing line counts as 0 or false.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// State letter; NUL if unknown.
    pub(crate) state: char,
    /// Process that the thread belongs to.
    pub process: u32,
    /// Parent of the process.
    pub(crate) parent: u32,
    /// Process that traces the thread; 0 if none.
    pub tracer: u32,
    /// Seccomp mode: 0 none, 1 strict, 2 filter.
    pub(crate) seccomp: u32,
    /// Whether CAP_SYS_ADMIN is effective.
    pub(crate) is_admin: bool,
    /// Whether shadow stacks are on.
    pub has_shadow_stack: bool,
    /// Whether it has memory: kernel threads and dead processes have none.
    pub(crate) has_memory: bool,
    /// Whether it is a kernel thread; only known from Linux 6.8 on.
    pub(crate) is_kernel_thread: Option<bool>,
    /// Signals that wait to be delivered to the thread or to its process, as a set.
    pending: u64,
}

/// The process that starts all other kernel threads.
const KTHREADD: u32 = 2;
/// The bit of CAP_SYS_ADMIN in a set of capabilities.
const ADMIN: u64 = 1 << 21;

impl Status {
    /// Reads the status file at `path`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: &str) -> io::Result<Self> {
        // The name may be in any encoding.
        fs::read(path).map(|text| Self::parse(&String::from_utf8_lossy(&text)))
    }

    /// Reads the text of a status file. The process's name is escaped there, so no line can be forged.
    pub(crate) fn parse(text: &str) -> Self {
        let mut status = Self::default();
        for (key, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            let number = || value.parse().unwrap_or(0);
            match key {
                "State" => status.state = value.chars().next().unwrap_or('\0'),
                "Tgid" => status.process = number(),
                "PPid" => status.parent = number(),
                "TracerPid" => status.tracer = number(),
                "Seccomp" => status.seccomp = number(),
                "CapEff" => status.is_admin = u64::from_str_radix(value, 16).is_ok_and(|set| set & ADMIN != 0),
                "x86_Thread_features" => status.has_shadow_stack = value.split(' ').any(|word| word == "shstk"),
                "VmSize" => status.has_memory = true,
                "Kthread" => status.is_kernel_thread = Some(number() != 0),
                "SigPnd" | "ShdPnd" => status.pending |= u64::from_str_radix(value, 16).unwrap_or(0),
                _ => {}
            }
        }
        status
    }

    /// Whether a SIGCONT waits to be delivered. It would have been discarded by a SIGSTOP that came after it.
    pub(crate) const fn is_continued(&self) -> bool {
        self.pending & (1 << (libc::SIGCONT - 1)) != 0
    }

    /// Whether it may read the seccomp filters of others, as far as it can tell.
    pub(crate) fn may_read_filters(&self) -> bool {
        self.is_admin && self.seccomp == 0
    }

    /// Whether it has ended.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// Whether it is a kernel thread and has no memory. A process that is just ending has no memory either.
    pub(crate) fn is_of_kernel(&self) -> bool {
        let is_by_descent = self.process == KTHREADD || self.parent == KTHREADD;
        !self.has_memory && self.is_kernel_thread.unwrap_or(is_by_descent)
    }
}

/// Two fields of a `stat` file, whose numbers start at 1: 22, the start time in ticks since boot, and 47, the beginning
/// of the heap.
pub(crate) fn start_and_heap(stat: &str) -> Option<(u64, u64)> {
    Some((field(stat, 22)?, field(stat, 47).unwrap_or(0)))
}

/// Whether the `stat` file is that of a worker or of the polling thread of io_uring. The kernel says so in the thread's
/// flags (field 9; `PF_IO_WORKER` has this value since Linux 5.12). A program can give any thread such a name.
pub(crate) fn is_io_worker(stat: &str) -> bool {
    const IO_WORKER: u64 = 0x10;
    field(stat, 9).is_some_and(|flags| flags & IO_WORKER != 0)
}

fn field(stat: &str, number: usize) -> Option<u64> {
    // The name is in parentheses, and may contain parentheses itself.
    stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().nth(number - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_known_by_its_flags_and_not_by_its_name() {
        let stat = |name: &str, flags: u64| format!("7 ({name}) S 1 2 3 0 -1 {flags} 0 0");
        assert!(is_io_worker(&stat("iou-wrk-7) R 1 2 3 0 -1 0", 0x40_0010)));
        assert!(!is_io_worker(&stat("iou-wrk-7", 0x40_0040)) && !is_io_worker("7 (x"));
    }

    #[test]
    fn a_signal_that_continues_a_process_waits_for_the_thread_or_for_the_process() {
        let is_continued = |text: &str| Status::parse(text).is_continued();
        assert!(is_continued("SigPnd:\t0000000000020000\nShdPnd:\t0000000000000000\n"));
        assert!(is_continued("SigPnd:\t0000000000000000\nShdPnd:\t0000000000020001\n"));
        assert!(!is_continued("SigPnd:\t0000000000040000\nShdPnd:\t000000000001ffff\n"));
        assert!(!is_continued("ShdPnd:\tx\n"));
    }

    #[test]
    fn a_status_file_tells_what_forbids_a_stop() {
        let text = "Name:\tx\\nState: Z\nState:\tt (tracing stop)\nTgid:\t7\nPPid:\t1\nTracerPid:\t9\nVmSize:\t   1 kB\n\
                    Seccomp:\t2\nCapEff:\t0000000000200000\nx86_Thread_features:\tshstk wrss \n";
        let expected = Status {
            state: 't',
            process: 7,
            parent: 1,
            tracer: 9,
            seccomp: 2,
            is_admin: true,
            has_shadow_stack: true,
            has_memory: true,
            is_kernel_thread: None,
            pending: 0,
        };
        assert_eq!(Status::parse(text), expected);
        let dead = Status::parse("State:\tZ (zombie)\nx86_Thread_features:\t\nx86_Thread_features_locked:\tshstk\n");
        assert!(dead.is_dead() && !dead.has_memory && !dead.has_shadow_stack);
        assert_eq!(Status::parse("State\nTgid:\tx\n"), Status::default());
        for (text, is_of_kernel) in [
            ("Tgid:\t9\nPPid:\t2\nKthread:\t1\n", true),
            ("Tgid:\t2\nPPid:\t0\n", true),
            ("Tgid:\t9\nPPid:\t2\n", true),
            // About to end: its memory is gone, and it is not a zombie yet.
            ("State:\tR\nTgid:\t9\nPPid:\t2\nKthread:\t0\n", false),
            ("State:\tR\nTgid:\t9\nPPid:\t7\n", false),
            ("Tgid:\t9\nPPid:\t2\nVmSize:\t1 kB\n", false),
        ] {
            assert_eq!(Status::parse(text).is_of_kernel(), is_of_kernel, "{text:?}");
        }
    }

    #[test]
    fn who_may_read_filters() {
        for (text, may_read) in [
            ("CapEff:\t000001ffffffffff\nSeccomp:\t0\n", true),
            ("CapEff:\t000001ffffffffff\nSeccomp:\t2\n", false),
            ("CapEff:\t000001ffffdfffff\nSeccomp:\t0\n", false),
            ("CapEff:\tx\n", false),
        ] {
            assert_eq!(Status::parse(text).may_read_filters(), may_read, "{text:?}");
        }
    }

    /// In a thread of its own, which gets the name.
    #[test]
    fn a_name_in_another_encoding_hides_nothing() {
        let named = std::thread::spawn(|| {
            // SAFETY: the name is a C string.
            unsafe { libc::prctl(libc::PR_SET_NAME, c"\xfc".as_ptr()) };
            Status::read("/proc/thread-self/status").map(|status| status.process)
        });
        assert_eq!(named.join().expect("no panic").ok(), Some(std::process::id()));
    }

    #[test]
    fn fields_are_counted_behind_the_name() {
        let own = std::fs::read_to_string("/proc/self/stat").expect("/proc is mounted");
        let forged = own.replacen('(', "(a) b 1 2 (", 1);
        assert_eq!(start_and_heap(&own), start_and_heap(&forged));
        assert!(start_and_heap(&own).is_some_and(|(start, _)| start > 0));
        assert_eq!(start_and_heap("1 (a) S 1"), None);
        assert_eq!(start_and_heap(""), None);
    }
}

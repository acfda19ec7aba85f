//! What `/proc/PID/status` and `/proc/PID/stat` say about whether a process may be stopped. Pure.

/// The content of a status file; a missing line counts as 0 or false.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// State letter; NUL if unknown.
    pub(crate) state: char,
    /// Process that the thread belongs to.
    pub(crate) process: u32,
    /// Parent of the process.
    pub(crate) parent: u32,
    /// Process that traces the thread; 0 if none.
    pub(crate) tracer: u32,
    /// Seccomp mode: 0 none, 1 strict, 2 filter.
    pub(crate) seccomp: u32,
    /// Whether shadow stacks are on.
    pub(crate) has_shadow_stack: bool,
    /// Whether it has memory: kernel threads and dead processes have none.
    pub(crate) has_memory: bool,
    /// Whether it is a kernel thread; only known from Linux 6.8 on.
    pub(crate) is_kernel_thread: Option<bool>,
}

/// The process that starts all other kernel threads.
const KTHREADD: u32 = 2;

impl Status {
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
                "x86_Thread_features" => status.has_shadow_stack = value.split(' ').any(|word| word == "shstk"),
                "VmSize" => status.has_memory = true,
                "Kthread" => status.is_kernel_thread = Some(number() != 0),
                _ => {}
            }
        }
        status
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
    // The name is in parentheses, and may contain parentheses itself.
    let fields: Vec<&str> = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse().ok();
    Some((field(22)?, field(47).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_file_tells_what_forbids_a_stop() {
        let text = "Name:\tx\\nState: Z\nState:\tt (tracing stop)\nTgid:\t7\nPPid:\t1\nTracerPid:\t9\nVmSize:\t   1 kB\n\
                    Seccomp:\t2\nx86_Thread_features:\tshstk wrss \n";
        let expected = Status {
            state: 't',
            process: 7,
            parent: 1,
            tracer: 9,
            seccomp: 2,
            has_shadow_stack: true,
            has_memory: true,
            is_kernel_thread: None,
        };
        assert_eq!(Status::parse(text), expected);
        let dead = Status::parse("State:\tZ (zombie)\nx86_Thread_features:\t\n");
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
    fn fields_are_counted_behind_the_name() {
        let own = std::fs::read_to_string("/proc/self/stat").expect("/proc is mounted");
        let forged = own.replacen('(', "(a) b 1 2 (", 1);
        assert_eq!(start_and_heap(&own), start_and_heap(&forged));
        assert!(start_and_heap(&own).is_some_and(|(start, _)| start > 0));
        assert_eq!(start_and_heap("1 (a) S 1"), None);
        assert_eq!(start_and_heap(""), None);
    }
}

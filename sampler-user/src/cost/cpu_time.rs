//! CPU time of the targets, from /proc.

use std::collections::HashMap;

/// Clock ticks of processes so far; those that ended keep what they had when last seen.
#[derive(Debug, Default)]
pub struct CpuTime {
    processes: HashMap<u32, u64>,
}

impl CpuTime {
    /// Seconds that these processes and those asked for before have used.
    pub fn of_processes(&mut self, pids: impl Iterator<Item = u32>) -> f64 {
        for pid in pids {
            let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            if let Some(ticks) = process_ticks(&text) {
                let known = self.processes.entry(pid).or_default();
                *known = ticks.max(*known);
            }
        }
        seconds(self.processes.values().sum())
    }
}

/// Seconds that all processes of this host have used.
pub fn of_host() -> f64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    seconds(host_ticks(&text).unwrap_or(0))
}

fn seconds(ticks: u64) -> f64 {
    // SAFETY: no preconditions.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1);
    ticks as f64 / per_second as f64
}

/// `pid (comm) state …`: utime and stime are the 14th and 15th field (proc_pid_stat(5)).
fn process_ticks(text: &str) -> Option<u64> {
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    user.checked_add(system)
}

/// `cpu user nice system idle …` (proc_stat(5)): what ran, not what idled, waited or was stolen.
fn host_ticks(text: &str) -> Option<u64> {
    let fields = text.lines().next()?.strip_prefix("cpu ")?;
    fields.split_ascii_whitespace().take(3).map(|field| field.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_writes() {
        let text = "12 (a (b) c) S 1 12 12 0 -1 4194560 1 2 3 4 250 50 7 8 20 0 1 0 99 100 1 184467";
        assert_eq!(process_ticks(text), Some(300));
        assert_eq!(process_ticks("12 (x"), None);
        assert_eq!(host_ticks("cpu  10 20 30 400 50 0 6 7 0 0\ncpu0 1 2 3\n"), Some(60));
        assert_eq!(host_ticks(""), None);
    }

    #[test]
    fn a_process_that_ended_keeps_its_time() {
        let mut time = CpuTime::default();
        let own = std::process::id();
        let mut spin = 0_u64;
        while time.of_processes(std::iter::once(own)) == 0.0 {
            spin = std::hint::black_box(spin + 1);
        }
        let before = time.of_processes(std::iter::empty());
        assert!(before > 0.0 && of_host() > 0.0, "{spin}");
        assert_eq!(time.of_processes(std::iter::once(u32::MAX)), before);
    }
}

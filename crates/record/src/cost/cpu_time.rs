//! CPU time of the targets, from their CPU clocks and /proc.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

pub use heapbpf_host::clock::cpu_seconds_of as of_process;
use heapbpf_host::clock::{monotonic_ns, suspended_ns};
use heapbpf_host::process::Stat;
use procfs::{CurrentSI as _, KernelStats};

/// CPU time, in seconds, that processes used since the recording began. An ended process counts with its time when last
/// read.
#[derive(Debug, Default)]
pub struct CpuTime {
    /// By process id: its CPU time when the recording began, and when last read.
    processes: HashMap<u32, (f64, f64)>,
    /// Sum over processes that have ended.
    ended: f64,
    /// Start of the recording, CLOCK_BOOTTIME rounded down to a clock tick, like start times of processes.
    began_ns: u64,
}

impl CpuTime {
    /// Starts with a recording that begins now.
    pub fn begin() -> Self {
        let (now_ns, tick_ns) = (monotonic_ns() + suspended_ns(), 1_000_000_000 / procfs::ticks_per_second());
        Self { began_ns: now_ns - now_ns % tick_ns, ..Self::default() }
    }

    /// CPU seconds that these processes, and all processes of earlier calls, have used since the recording began.
    pub fn of_processes(&mut self, pids: impl Iterator<Item = u32>) -> f64 {
        let ended = &mut self.ended;
        self.processes.retain(|pid, (before, last)| {
            let used = of_process(*pid).filter(|used| used >= last);
            match used {
                Some(used) => *last = used,
                None => *ended += *last - *before,
            }
            used.is_some()
        });
        for pid in pids {
            if let Entry::Vacant(unknown) = self.processes.entry(pid)
                // The CPU clock is exact; /proc counts in ticks of 10 ms, too coarse for a first reading.
                && let Some(used) = of_process(pid)
            {
                let is_new = Stat::read(pid).is_ok_and(|stat| stat.start_ns >= self.began_ns);
                unknown.insert((if is_new { 0.0 } else { used }, used));
            }
        }
        self.ended + self.processes.values().map(|(before, last)| last - before).sum::<f64>()
    }
}

/// CPU seconds that all processes of this host have used, without idle, waiting or stolen time.
pub fn of_host() -> f64 {
    let ticks = KernelStats::current().map_or(0, |it| it.total.user + it.total.nice + it.total.system);
    ticks as f64 / procfs::ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_a_clock_of_its_own() {
        let own = of_process(std::process::id()).unwrap();
        assert!(own > 0.0 && of_process(std::process::id()).unwrap() > own);
        assert_eq!(of_process(1 << 22), None, "process ids end below");
    }

    #[test]
    fn only_time_since_the_beginning_counts() {
        if heapbpf_testing::is_emulated("/proc/self/stat is made up") {
            return;
        }
        let own = std::process::id();
        // This process may have started in this very tick.
        let has_begun_later = |time: &CpuTime| Stat::read(own).unwrap().start_ns < time.began_ns;
        let mut time = std::iter::repeat_with(CpuTime::begin).find(has_begun_later).unwrap();
        assert_eq!(time.of_processes(std::iter::once(own)), 0.0);
        let mut spin = 0_u64;
        while time.of_processes(std::iter::once(own)) == 0.0 {
            spin = std::hint::black_box(spin + 1);
        }
        let before = time.of_processes(std::iter::empty());
        assert!(before > 0.0 && of_host() > 0.0, "{spin}");
        assert!(time.of_processes(std::iter::once(u32::MAX)) >= before);
    }

    #[test]
    fn ended_processes_are_kept_as_a_sum() {
        let mut time = CpuTime::begin();
        // Both processes start after the recording, so all of their time counts.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let spinning = || std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let mut children = [spinning(), spinning()];
        let ids = [children[0].id(), children[1].id()];
        while time.of_processes(ids.into_iter()) == 0.0 || time.processes.values().any(|(_, last)| *last == 0.0) {}
        children.iter_mut().for_each(|child| drop(child.kill().and_then(|()| child.wait())));
        let used: f64 = time.processes.values().map(|(before, last)| last - before).sum();
        assert_eq!((time.processes.len(), time.of_processes(ids.into_iter())), (2, used));
        assert!(time.processes.is_empty());
    }
}

//! The machine that a benchmark runs on.

use heapbpf_record::cost::cpus::online;

/// A description of the machine, its kernel and its load.
#[must_use]
pub fn describe() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let (info, kernel, load) = (read("/proc/cpuinfo"), read("/proc/sys/kernel/osrelease"), read("/proc/loadavg"));
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    format!(
        "{}{} CPUs ({}), kernel {}, load {}",
        if info.contains("hypervisor") { "virtual machine with " } else { "" },
        online(),
        model.map_or("?", |(_, model)| model),
        kernel.trim(),
        load.split_whitespace().next().unwrap_or("?")
    )
}

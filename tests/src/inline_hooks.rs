//! What inline hooks leave in a target, and what they count.

pub use crate::inline::counted_exactly;

/// Mappings of our memory in a process, as lines of `/proc/PID/maps`.
///
/// # Panics
/// If the process has ended.
pub fn mapped(pid: u32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the target runs");
    maps.lines().filter(|line| line.contains("/memfd:heapbpf-inline")).map(str::to_owned).collect()
}

/// Whether a process is hooked inline: our memory is in the place of an allocator's text.
///
/// # Panics
/// If the process has ended.
pub fn is_hooked(pid: u32) -> bool {
    // The memfd's name says where the blob is and how long.
    mapped(pid).iter().any(|line| {
        let mut numbers = line.rsplit('-').map(|word| word.split(' ').next().unwrap_or_default());
        let mut number = || numbers.next().and_then(|number| u64::from_str_radix(number, 16).ok()).expect("a number");
        let (bytes, base) = (number(), number());
        let start = line.split('-').next().and_then(|number| u64::from_str_radix(number, 16).ok()).expect("an address");
        !(base..base + bytes).contains(&start)
    })
}

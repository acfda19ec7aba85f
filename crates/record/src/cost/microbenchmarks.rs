//! Microbenchmarks: functions that each begin with one kind of instruction ([`heapbpf_host::arch::MICROBENCHMARKS`]). A
//! probe on the first byte of each measures what the kernel takes for that kind on this machine.

/// A function that is probed at its first byte.
pub type Microbenchmark = extern "C" fn();

/// File offset of a microbenchmark's first byte in heapbpf's own executable.
pub fn file_offset(microbenchmark: Microbenchmark) -> Option<u64> {
    let address = microbenchmark as *const () as u64;
    let maps = procfs::process::Process::myself().ok()?.maps().ok()?;
    let map = maps.iter().find(|map| (map.address.0..map.address.1).contains(&address))?;
    Some(address - map.address.0 + map.offset)
}

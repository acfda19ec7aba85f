//! Where the functions are that begin with one kind of instruction each ([`crate::arch::SPECIMENS`]): a probe on each
//! tells what that kind costs here.

/// A function to be probed at its first byte.
pub type Specimen = extern "C" fn();

/// Where a specimen is in heapbpf's own file.
pub fn file_offset(specimen: Specimen) -> Option<u64> {
    let address = specimen as *const () as u64;
    let maps = procfs::process::Process::myself().ok()?.maps().ok()?;
    let map = maps.iter().find(|map| (map.address.0..map.address.1).contains(&address))?;
    Some(address - map.address.0 + map.offset)
}

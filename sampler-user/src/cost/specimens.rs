//! Functions that begin with one kind of instruction each, to measure what a probe on that kind costs here.

/// A function to be probed at its first byte.
pub type Specimen = extern "C" fn();

/// Kinds of instruction by what the kernel does to execute one that is probed, each with a function that begins so.
#[cfg(target_arch = "x86_64")]
pub const SPECIMENS: [(&str, Specimen); 3] = [("emulated", emulated), ("stepped", stepped), ("optimized", optimized)];
/// Not known for this machine: what is measured on the allocator itself is all there is.
#[cfg(not(target_arch = "x86_64"))]
pub const SPECIMENS: [(&str, Specimen); 0] = [];

#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
extern "C" fn emulated() {
    core::arch::naked_asm!("push rbp", "pop rbp", "ret")
}

#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
extern "C" fn stepped() {
    core::arch::naked_asm!("test rdi, rdi", "nop", "ret")
}

#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
extern "C" fn optimized() {
    // nopl 0x0(%rax,%rax,1): the five-byte nop that the kernel replaces by a call.
    core::arch::naked_asm!(".byte 0x0f, 0x1f, 0x44, 0x00, 0x00", "nop", "ret")
}

/// Where a specimen is in heapbpf's own file.
pub fn file_offset(specimen: Specimen) -> Option<u64> {
    let address = specimen as *const () as u64;
    let maps = procfs::process::Process::myself().ok()?.maps().ok()?;
    let map = maps.iter().find(|map| (map.address.0..map.address.1).contains(&address))?;
    Some(address - map.address.0 + map.offset)
}

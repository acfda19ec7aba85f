//! ELF headers and build ID notes.

use heapbpf_elf::{Elf, build_id};

/// Checks a file.
pub fn check(data: &[u8]) {
    let data = data.to_vec();
    assert!(build_id::of(&data).is_none_or(|id| id.len() <= build_id::MAX_BYTES));
    let Ok(elf) = Elf::read(&data) else { return };
    for offset in (0..data.len() as u64).step_by(97) {
        if let Some(address) = elf.address_of_offset(offset) {
            let _ = elf.offset_of_address(address);
        }
    }
}

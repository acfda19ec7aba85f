//! ELF headers and notes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sampler_user::unwind::elf::Elf;

fuzz_target!(|data: &[u8]| {
    let data = data.to_vec();
    let _ = sampler_user::host::build_id::of_bytes(&data);
    let Ok(elf) = Elf::read(&data) else { return };
    assert!(elf.build_id(&data).is_none_or(|id| id.len() <= 64));
    for offset in (0..data.len() as u64).step_by(97) {
        if let Some(address) = elf.address_of_offset(offset) {
            let _ = elf.offset_of_address(address);
        }
    }
});

//! Symbols and code of a file that probes would go into: whatever is planned lies in the file.
#![no_main]

use std::io::Cursor;

use libfuzzer_sys::fuzz_target;
use sampler_user::attach::arch::Machine;
use sampler_user::attach::{FileImage, KernelRules, Table, analyse};

fuzz_target!(|data: &[u8]| {
    let Ok(image) = FileImage::read(Cursor::new(data)) else { return };
    for machine in [Machine::X86_64, Machine::Aarch64] {
        let rules = KernelRules::of(machine, (6, 18));
        let Ok(planned) = analyse(&image, &rules, &Table::default()) else { continue };
        assert!(planned.sites.iter().all(|planned| planned.site.offset < data.len() as u64));
    }
});

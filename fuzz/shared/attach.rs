//! The plan of probe sites for a file: every site is within the file.

use std::sync::LazyLock;

use heapbpf_probes::{KernelRules, Machine, Table, examine};

/// The table of functions, the same for all files.
static TABLE: LazyLock<Table> = LazyLock::new(Table::default);

/// Checks a file.
pub fn check(data: &[u8]) {
    for machine in [Machine::X86_64, Machine::Aarch64] {
        let Ok(planned) = examine(&data, "", &KernelRules::of(machine, (6, 18)), &TABLE) else { continue };
        assert!(planned.sites.iter().all(|planned| planned.site.offset < data.len() as u64));
    }
}

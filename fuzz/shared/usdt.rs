//! USDT probes that a file announces.

use heapbpf_probes::{KernelRules, Machine, announced};

/// Checks a file: every site is within the file.
pub fn check(data: &[u8]) {
    let file = data.to_vec();
    for machine in [Machine::X86_64, Machine::Aarch64] {
        let Ok(Some(found)) = announced(&file, &KernelRules::of(machine, (6, 18))) else { continue };
        assert!(found.sites.iter().all(|planned| planned.site.offset < data.len() as u64));
    }
}

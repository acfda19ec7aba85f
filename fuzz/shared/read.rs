//! Only reads a file of one profile format. That allows many more inputs a second than `profile`, which also shows and
//! writes it.

use heapbpf_profile::read;

/// Checks a file: a profile that can be read is consistent.
pub fn check(data: &[u8]) {
    let Ok(profile) = read::parse(data) else { return };
    assert!(profile.rows.iter().all(|row| row.key.process < profile.processes.len()), "each row has its process");
}

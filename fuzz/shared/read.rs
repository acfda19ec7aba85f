//! A file of one format of profiles, read and no more: many more inputs a second than `profile` has, which shows and writes it as well.

use heapbpf_profile::read;

/// Checks a file: what is read is whole in itself.
pub fn check(data: &[u8]) {
    let Ok(profile) = read::parse(data) else { return };
    assert!(profile.rows.iter().all(|row| row.key.process < profile.processes.len()), "each row has its process");
}

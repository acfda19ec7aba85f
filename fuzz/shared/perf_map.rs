//! Perf maps: the limits on entries and names hold.

use heapbpf_symbols::perf_map::{Limits, PerfMap};

/// Checks a perf map.
pub fn check(data: &[u8]) {
    let limits = Limits { file_bytes: 4096, entries: 64, name_bytes: 16 };
    let Ok(map) = PerfMap::parse(data, limits) else { return };
    // An entry can split another in two.
    assert!(map.len() <= 2 * limits.entries);
    for address in [0, 1, 0x1000, u64::MAX] {
        assert!(map.name(address).is_none_or(|name| name.len() <= limits.name_bytes));
    }
}

//! `/proc/PID/maps`, and the kernel's records of processes and mappings: mappings never overlap.

use heapbpf_host::mappings::{AddressSpace, Kind, Mapping, ModuleId};
use heapbpf_host::{proc_maps, record};

/// Checks an input, both as a list of mappings and as a record.
pub fn check(data: &[u8]) {
    let _ = record::decode(data);
    let mut space = AddressSpace::default();
    for (at, map) in proc_maps::parse(data).iter().enumerate() {
        let end = map.address.saturating_add(map.length);
        let module = ModuleId(at as u32);
        let mapping = Mapping { start: map.address, end, file_offset: map.file_offset, module, since_ns: at as u64 };
        space.insert(mapping, &|module| if module.0 % 2 == 0 { Kind::File } else { Kind::Anonymous });
    }
    assert!(space.current().windows(2).all(|pair| pair[0].end <= pair[1].start));
}

//! Handles text pages that inline hooks have replaced. They are mapped from a memfd of ours and hold the file's code at
//! the file's addresses, so they count as the file's.
//!
//! `heapbpf-remote` defines the layout. The memfd's name says where it is mapped, and the pages that it replaces are
//! outside that range. The original pages are inside the range, at the memfd offset of the pages that replace them. A
//! process can make such mappings itself, but it then only spoils its own names.

use std::ops::Range;

use super::record::MapEvent;

/// The address range in the name of the memfd that `map` maps. `None` if it is not one of ours.
fn blob(map: &MapEvent) -> Option<Range<u64>> {
    heapbpf_remote::blob_range(std::str::from_utf8(&map.path).ok()?)
}

/// Whether a mapping consists of pages that replace those of a file.
#[must_use]
pub fn replaces_text(map: &MapEvent) -> bool {
    blob(map).is_some_and(|blob| !blob.contains(&map.address))
}

/// Turns mappings of replaced pages into mappings of the original file. `maps` are all executable mappings of a
/// process.
pub fn restore(maps: &mut [MapEvent]) {
    for at in 0..maps.len() {
        if let Some(original) = original(&maps[at], maps) {
            maps[at] = original;
        }
    }
}

fn original(map: &MapEvent, maps: &[MapEvent]) -> Option<MapEvent> {
    let blob = blob(map).filter(|blob| !blob.contains(&map.address))?;
    let kept = blob.start.checked_add(map.file_offset)?;
    let kept_end = kept.checked_add(map.length).filter(|end| *end <= blob.end)?;
    let covers = |file: &&MapEvent| file.address <= kept && kept_end <= file.address.saturating_add(file.length);
    let file = maps.iter().filter(|file| file.inode != 0).find(covers)?;
    let offset = file.file_offset.checked_add(kept - file.address)?;
    let range = (map.address, map.length);
    Some(MapEvent { kept_at: Some((file.address, file.length)), file_offset: offset, ..file.clone() }.at(range))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc_maps;

    const MAPS: &str = "\
7e0000000000-7e0000001000 r-xp 00000000 00:01 5 /memfd:heapbpf-inline-7e0000000000-6000 (deleted)
7e0000004000-7e0000006000 r-xp 00028000 fe:00 9 /lib/libc.so.6
7f0000000000-7f0000001000 r-xp 00027000 fe:00 9 /lib/libc.so.6
7f0000001000-7f0000002000 r-xp 00005000 00:01 5 /memfd:heapbpf-inline-7e0000000000-6000 (deleted)
7f0000002000-7f0000003000 r-xp 0002a000 fe:00 9 /lib/libc.so.6
";

    #[test]
    fn replaced_pages_are_the_files() {
        let mut maps = proc_maps::parse(MAPS.as_bytes());
        assert_eq!(maps.iter().map(replaces_text).collect::<Vec<_>>(), [false, false, false, true, false]);
        restore(&mut maps);
        let page = &maps[3];
        assert_eq!((page.address, page.length, page.file_offset), (0x7f00_0000_1000, 0x1000, 0x29000));
        assert_eq!((page.inode, &*page.path), (9, &b"/lib/libc.so.6"[..]));
        assert_eq!(page.file_mapping(), (0x7e00_0000_4000, 0x2000), "where the kernel's link to the file is");
        assert_eq!((maps[0].inode, maps[0].file_offset), (5, 0), "the code itself is no file's");
        assert!(maps.iter().all(|map| !replaces_text(map)));
    }

    #[test]
    fn mappings_that_only_pretend_stay_what_they_are() {
        let pretend = |page: &str| {
            let mut maps = proc_maps::parse(MAPS.replace("00005000", page).as_bytes());
            let before = maps.clone();
            restore(&mut maps);
            assert_eq!(maps, before, "{page}");
        };
        // Nothing is kept there; beyond the range in the name; beyond the end of memory.
        for page in ["00003000", "00006000", "fffffffffffff000"] {
            pretend(page);
        }
        let mut alone = proc_maps::parse(b"1000-2000 r-xp 00000000 00:01 5 /memfd:heapbpf-inline-1000-1000\n");
        alone.extend(proc_maps::parse(b"3000-4000 r-xp 00000000 00:01 5 /memfd:heapbpf-inline-1000-1000\n"));
        restore(&mut alone);
        assert_eq!(alone[1].file_offset, 0, "a blob has no originals of itself");
    }
}

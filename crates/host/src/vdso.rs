//! Reads the vDSO's image. The kernel maps the same pages into every 64-bit process, so heapbpf reads its own.

use std::sync::Arc;

use super::proc_maps;

/// Largest vDSO to copy, in bytes. Real ones have a few pages.
const MAX_BYTES: u64 = 1 << 20;

/// A copy of heapbpf's own vDSO. `None` if the kernel maps none.
#[must_use]
pub fn image() -> Option<Arc<Vec<u8>>> {
    // SAFETY: `getauxval` takes a plain integer and only reads the auxiliary vector.
    let start = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    let maps = proc_maps::read(std::process::id()).ok()?;
    let map = maps.iter().find(|map| &*map.path == b"[vdso]" && map.address == start)?;
    (map.length <= MAX_BYTES && map.prot & libc::PROT_READ as u32 != 0).then_some(())?;
    // SAFETY: /proc/self/maps just listed this range as a readable mapping named `[vdso]`, of at most `MAX_BYTES`.
    // Nothing in heapbpf unmaps the vDSO, and its code never changes.
    Some(Arc::new(unsafe { std::slice::from_raw_parts(start as *const u8, map.length as usize) }.to_vec()))
}

#[cfg(test)]
mod tests {
    use heapbpf_testing::skipped;

    #[test]
    fn is_an_elf_image_with_a_build_id() {
        let Some(image) = super::image() else {
            skipped("this process has no vDSO");
            return;
        };
        assert_eq!(&image[..4], b"\x7fELF");
        assert!(heapbpf_elf::build_id::of(&*image).is_some());
    }
}

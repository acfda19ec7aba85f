//! The vDSO's image: the kernel maps the same pages into every 64-bit process, so ours will do.

use std::sync::Arc;

use super::proc_maps;

/// More than any vDSO has.
const MAX_BYTES: u64 = 1 << 20;

/// A copy of our own vDSO; `None` if the kernel gave us none.
#[must_use]
pub fn image() -> Option<Arc<Vec<u8>>> {
    // SAFETY: no preconditions.
    let start = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    let maps = proc_maps::read(std::process::id()).ok()?;
    let map = maps.iter().find(|map| &*map.path == b"[vdso]" && map.address == start)?;
    (map.length <= MAX_BYTES && map.prot & libc::PROT_READ as u32 != 0).then_some(())?;
    // SAFETY: the kernel just listed this range as readable, and never unmaps or changes it.
    Some(Arc::new(unsafe { std::slice::from_raw_parts(start as *const u8, map.length as usize) }.to_vec()))
}

#[cfg(test)]
mod tests {
    use crate::testing::skipped;

    #[test]
    fn is_an_elf_image_with_a_build_id() {
        let Some(image) = super::image() else {
            skipped("this process has no vDSO");
            return;
        };
        assert_eq!(&image[..4], b"\x7fELF");
        assert!(crate::host::build_id::of_bytes(&image).is_some());
    }
}

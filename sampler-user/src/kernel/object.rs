//! The BPF object inside this binary.

/// The bytes, aligned as an ELF file's tables want them.
#[repr(C, align(8))]
struct Aligned<T: ?Sized>(T);

static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/heapbpf-probes")));

/// The BPF programs as an ELF object at an address that is a multiple of 8, or nothing if this binary was built
/// without them (`cargo xtask build` makes them).
pub fn object() -> Option<&'static [u8]> {
    (!OBJECT.0.is_empty()).then_some(&OBJECT.0)
}

/// The bytes of another object at an address that is a multiple of 8; for the program's life.
pub fn aligned(bytes: &[u8]) -> &'static [u8] {
    let words = vec![0_u64; bytes.len().div_ceil(8)].leak();
    // SAFETY: the words' own memory, which has room for them.
    let room = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), bytes.len()) };
    room.copy_from_slice(bytes);
    room
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::skipped;

    #[test]
    fn what_is_embedded_is_an_aligned_bpf_object() {
        let Some(bytes) = object() else {
            skipped("built without the BPF programs; cargo xtask build makes them");
            return;
        };
        assert_eq!(bytes.as_ptr() as usize % 8, 0);
        assert_eq!(&bytes[..4], b"\x7fELF");
        // e_machine, little endian: EM_BPF is 247.
        assert_eq!(bytes[18..20], [247, 0]);
    }
}

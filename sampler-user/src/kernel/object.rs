//! The BPF object that is embedded in this binary.

use zerocopy::IntoBytes as _;

/// Bytes with the alignment that an ELF file's tables need.
#[repr(C, align(8))]
struct Aligned<T: ?Sized>(T);

static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/heapbpf-probes")));

/// The BPF programs as an ELF object, aligned to 8 bytes. `None` if this binary was built without them (`cargo xtask
/// build` builds them).
pub fn object() -> Option<&'static [u8]> {
    (!OBJECT.0.is_empty()).then_some(&OBJECT.0)
}

/// A copy of another object's bytes, aligned to 8 bytes. It is leaked, so it lives as long as the process.
pub fn aligned(bytes: &[u8]) -> &'static [u8] {
    let words = vec![0_u64; bytes.len().div_ceil(8)].leak();
    let room = &mut words.as_mut_bytes()[..bytes.len()];
    room.copy_from_slice(bytes);
    room
}

#[cfg(test)]
mod tests {
    use super::*;
    use heapbpf_testing::skipped;

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

    #[test]
    fn a_copy_of_any_length_is_aligned() {
        for length in [0, 1, 7, 8, 9] {
            let bytes: Vec<u8> = (1..=length).collect();
            let copy = aligned(&bytes);
            assert_eq!((copy, copy.as_ptr() as usize % 8), (&bytes[..], 0));
        }
    }
}

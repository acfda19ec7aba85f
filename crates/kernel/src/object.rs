//! The BPF object that is embedded in this program.

use std::sync::OnceLock;

use zerocopy::IntoBytes as _;

static EMBEDDED: OnceLock<&[u8]> = OnceLock::new();

/// Sets the embedded BPF programs: an ELF object, aligned to 8 bytes, or nothing.
pub fn embed(object: &'static [u8]) {
    // The command calls this once, at its start.
    let _ = EMBEDDED.set(object);
}

/// The BPF programs as an ELF object, aligned to 8 bytes. `None` if this program was built without them (`cargo xtask
/// build` builds them).
pub fn object() -> Option<&'static [u8]> {
    EMBEDDED.get().copied().filter(|object| !object.is_empty())
}

/// Copies another object's bytes, aligned to 8 bytes. The copy is leaked, so it lives as long as the process.
pub fn aligned(bytes: &[u8]) -> &'static [u8] {
    let words = vec![0_u64; bytes.len().div_ceil(8)].leak();
    let copy = &mut words.as_mut_bytes()[..bytes.len()];
    copy.copy_from_slice(bytes);
    copy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_any_length_is_aligned() {
        for length in [0, 1, 7, 8, 9] {
            let bytes: Vec<u8> = (1..=length).collect();
            let copy = aligned(&bytes);
            assert_eq!((copy, copy.as_ptr() as usize % 8), (&bytes[..], 0));
        }
    }
}

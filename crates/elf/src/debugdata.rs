//! Mini debug information: a small ELF file with a symbol table, packed with xz into `.gnu_debugdata`.

use std::io::Read as _;

/// Largest unpacked file, bytes; libc's is under 1 MiB.
const UNPACKED_MAX_BYTES: u64 = 64 << 20;

/// Unpacks the ELF file in a `.gnu_debugdata` section; `None` if it is damaged or unreasonably large.
#[must_use]
pub fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    if dictionary_bytes(packed)? > UNPACKED_MAX_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    lzma_rust2::XzReader::new(packed, false).take(UNPACKED_MAX_BYTES + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= UNPACKED_MAX_BYTES).then_some(bytes)
}

/// Returns the dictionary size of the first block, bytes (xz format 1.2.0, §3.1 and §5.3.1). The decoder allocates it
/// unchecked.
fn dictionary_bytes(packed: &[u8]) -> Option<u64> {
    // Stream header (12 bytes), block header size, block flags. The header is longer if the block states its sizes.
    let flags = *packed.get(13)?;
    let mut at = 14;
    for present in [flags & 0x40 != 0, flags & 0x80 != 0] {
        while present && *packed.get(at)? & 0x80 != 0 {
            at += 1;
        }
        at += usize::from(present);
    }
    // Flags of the last filter: LZMA2 has id 0x21 and one property byte. Filters before it are not supported; packagers
    // do not use any.
    let [0x21, 1, property] = *packed.get(at..at + 3)? else {
        return None;
    };
    match property {
        0..=39 => Some((2 | u64::from(property & 1)) << (property / 2 + 11)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a stream header followed by `block`: the flags, sizes and filters of a block header.
    fn stream(block: &[u8]) -> Vec<u8> {
        [b"\xfd7zXZ\0\0\x04\0\0\0\0\x02".as_slice(), block].concat()
    }

    #[test]
    fn the_dictionary_s_size_is_read_before_it_is_allocated() {
        // LZMA2, 8 MiB: as `xz -6` writes.
        assert_eq!(dictionary_bytes(&stream(&[0x00, 0x21, 1, 22])), Some(8 << 20));
        // With both block sizes stated: two bytes and one byte.
        assert_eq!(dictionary_bytes(&stream(&[0xc0, 0x80, 0x01, 0x10, 0x21, 1, 0])), Some(4096));
        assert_eq!(dictionary_bytes(&stream(&[0x00, 0x21, 1, 39])), Some(3 << 30));
        assert_eq!(dictionary_bytes(&stream(&[0x00, 0x21, 1, 40])), None);
        assert_eq!(dictionary_bytes(&stream(&[0x00, 0x04, 0])), None);
        assert_eq!(dictionary_bytes(b""), None);
        let mut none = crate::Symbols::default();
        assert!(!none.add_packed(&stream(&[0x00, 0x21, 1, 39])));
        assert!(!none.add_packed(&stream(&[0x00, 0x21, 1, 22])));
        assert_eq!(none.iter().count(), 0);
    }
}

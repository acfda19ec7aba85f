//! Compressed numbers in HotSpot's UNSIGNED5 format: one byte for small numbers, and up to five for others.

/// A stream of numbers.
pub struct Stream<'a> {
    bytes: &'a [u8],
    /// 1 if no byte is zero, as in version 20 and later.
    base: u32,
}

impl<'a> Stream<'a> {
    pub fn new(bytes: &'a [u8], without_zeros: bool) -> Self {
        Self { bytes, base: without_zeros.into() }
    }

    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(*first)
    }

    /// Reads the next number.
    pub fn number(&mut self) -> Option<u32> {
        // From this value on, another byte follows.
        const FIRST_HIGH: u8 = 192;
        let mut number = 0u32;
        for shift in [0, 6, 12, 18, 24] {
            let byte = self.byte()?;
            let digit = u32::from(byte).checked_sub(self.base)?;
            number = number.wrapping_add(digit << shift);
            if byte < FIRST_HIGH {
                break;
            }
        }
        Some(number)
    }

    /// Reads the next signed number, whose sign is in the lowest bit.
    pub fn signed(&mut self) -> Option<i32> {
        let number = self.number()?;
        Some((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_each_version_writes_them() {
        let of = |bytes: &[u8], without_zeros| Stream::new(bytes, without_zeros).number();
        assert_eq!([of(&[0], false), of(&[191], false), of(&[192, 0], false)], [0, 191, 192].map(Some));
        assert_eq!([of(&[1], true), of(&[191], true), of(&[192, 1], true)], [0, 190, 191].map(Some));
        assert_eq!(
            of(&[255, 255, 255, 255, 255, 7], false),
            Some(
                u32::MAX.wrapping_add(0).wrapping_sub(0).min(
                    255u32
                        .wrapping_add(255 << 6)
                        .wrapping_add(255 << 12)
                        .wrapping_add(255 << 18)
                        .wrapping_add(255u32 << 24)
                )
            )
        );
        assert_eq!([of(&[], false), of(&[192], false), of(&[0], true)], [None; 3]);
        let signed = |bytes: &[u8]| Stream::new(bytes, false).signed();
        assert_eq!([signed(&[0]), signed(&[1]), signed(&[2]), signed(&[3])], [0, -1, 1, -2].map(Some));
    }
}

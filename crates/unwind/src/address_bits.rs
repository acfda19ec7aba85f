//! Selects the address bits of a saved return address.

use crate::arch;

/// The bits of a saved return address that hold the code address.
///
/// On arm64, the bits above user addresses may hold a pointer authentication code, which `paciasp` inserts. The width
/// of user addresses depends on the kernel, so the caller specifies it. On x86-64, all bits belong to the address.
///
/// The default is [`Self::ALL`] on x86-64, and 48 bits on arm64.
/// The default is [`Self::ALL`] on x86-64, and 48 bits on arm64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressBits(u64);

impl AddressBits {
    /// Every bit: a saved return address is a plain address.
    pub const ALL: Self = Self(u64::MAX);

    /// The lowest `count` bits; all if `count` is 64 or more.
    #[must_use]
    pub const fn lowest(count: u32) -> Self {
        if count >= u64::BITS { Self::ALL } else { Self((1 << count) - 1) }
    }

    /// Returns the bits of user addresses on this architecture, for a kernel that places the main thread's stack at
    /// `stack_top`.
    ///
    /// The stack is at the top of the address space, so the highest bit of `stack_top` shows its width. Programs only
    /// get addresses above 48 bits if they ask for them. `has_52_bits` says whether processor and kernel grant them:
    /// the kernel then puts its trampoline for return probes at the end of that larger space. Both arguments are
    /// ignored on x86-64.
    #[must_use]
    pub fn of_user_space(stack_top: u64, has_52_bits: bool) -> Self {
        Self::lowest(arch::user_address_bits(stack_top, has_52_bits))
    }

    /// Returns the code address in a saved return address.
    #[must_use]
    pub const fn code_address(self, word: u64) -> u64 {
        word & self.0
    }
}

impl Default for AddressBits {
    fn default() -> Self {
        Self::lowest(arch::DEFAULT_ADDRESS_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::AddressBits;

    #[test]
    fn only_the_lowest_bits_are_kept() {
        assert_eq!(AddressBits::lowest(48).code_address(0x00a0_0000_0000_1234), 0x1234);
        assert_eq!(AddressBits::lowest(12).code_address(0xffff), 0xfff);
        assert_eq!(AddressBits::lowest(64), AddressBits::ALL);
        assert_eq!(AddressBits::ALL.code_address(u64::MAX), u64::MAX);
    }

    #[test]
    fn the_default_keeps_user_addresses_whole() {
        for address in [0x5555_5555_4000, 0x7fff_ffff_e000] {
            assert_eq!(AddressBits::default().code_address(address), address);
        }
    }
}

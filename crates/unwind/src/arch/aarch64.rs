//! Unwinding on arm64: AAPCS64, and what Linux saves for a signal.

use super::{BareTrampoline, SignalFrame};

/// The vendor whose call frame instructions are decoded in addition to the standard ones: return addresses may be
/// signed.
pub const VENDOR: gimli::Vendor = gimli::Vendor::AArch64;

/// DWARF number of the frame pointer, x29.
pub const FRAME_POINTER: u16 = 29;
/// DWARF number of the stack pointer.
pub const STACK_POINTER: u16 = 31;
/// DWARF number of the return address: that of x30.
pub const RETURN_ADDRESS: u16 = 30;
/// The register that holds the return address until it is saved.
pub const LINK: Option<u16> = Some(RETURN_ADDRESS);
/// Number of tracked registers: x0 to x30, and the stack pointer.
pub const COUNT: usize = 32;
/// Registers that a called function preserves, apart from the stack pointer.
pub const PRESERVED: [u16; 11] = [19, 20, 21, 22, 23, 24, 25, 26, 27, 28, FRAME_POINTER];
/// Registers that it does not preserve. x30 is handled separately.
pub const SCRATCH: [u16; 19] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18];

/// Number of bytes that a call pushes: none.
pub const RETURN_SLOT_BYTES: u64 = 0;
/// Whether the frame pointer determines the caller's stack pointer. The two words that it points to are the last ones
/// in the frame, and nothing says how much lies above them.
pub const FRAME_POINTER_GIVES_STACK_POINTER: bool = false;

/// The code that a signal handler returns to: `mov x8, #139; svc #0` (139 = rt_sigreturn).
pub const SIGNAL_TRAMPOLINE: [u8; 8] = [0x68, 0x11, 0x80, 0xd2, 0x01, 0, 0, 0xd4];
/// Whether the call frame information of signal trampolines locates the interrupted instruction pointer. It cannot: the
/// column of x30 would have to stand for both the instruction pointer and the interrupted x30.
pub const SIGNAL_FRAMES_BY_CFI: bool = false;
/// At the trampoline, the stack pointer is at `siginfo_t` (128 bytes). It is followed by `ucontext_t`, with
/// `uc_mcontext` at byte 176: the fault address, x0…x30, sp, pc.
pub const SIGNAL_FRAME: SignalFrame = {
    const FIRST: u64 = 128 + 176 + 8;
    const REGISTERS: [(u16, u64); 31] = {
        let mut registers = [(0, FIRST); 31];
        let mut number = 1;
        while number < 31 {
            registers[number as usize] = (number, FIRST + 8 * number as u64);
            number += 1;
        }
        registers
    };
    SignalFrame { registers: &REGISTERS, sp: FIRST + 31 * 8, ip: FIRST + 32 * 8 }
};

/// Longest call instruction, bytes.
pub const LONGEST_CALL: usize = 4;
/// None: to make a call, trampolines must save x30, and they save it together with the frame pointer.
pub const BARE_TRAMPOLINE: Option<BareTrampoline> = None;

/// Number of address bits in a return address, unless the caller specifies it.
pub const DEFAULT_ADDRESS_BITS: u32 = 48;

/// Number of bits of user addresses where processor and kernel support large ones. Programs only get them for their
/// data if they ask. The kernel puts its trampoline for return probes at the end of that space.
const LARGE_BITS: u32 = 52;

/// See [`AddressBits::of_user_space`](crate::AddressBits::of_user_space). Kernels are built for 39, 42, 47 or 48 bits,
/// and for 52 where the processor has them.
pub fn user_address_bits(stack_top: u64, has_52_bits: bool) -> u32 {
    const LEAST_BITS: u32 = 39;
    let bits = (u64::BITS - stack_top.leading_zeros()).clamp(LEAST_BITS, DEFAULT_ADDRESS_BITS);
    if has_52_bits { LARGE_BITS } else { bits }
}

#[cfg(test)]
mod tests {
    use super::{SIGNAL_FRAME, user_address_bits};

    #[test]
    fn signatures_are_above_the_bits_of_user_addresses() {
        assert_eq!(user_address_bits(0xffff_f7ff_ffe8, false), 48);
        assert_eq!(user_address_bits(0x7f_ffff_ffe8, false), 39);
        assert_eq!(user_address_bits(0, false), 39, "not told");
    }

    #[test]
    fn the_trampoline_of_return_probes_may_be_beyond_48_bits() {
        let trampoline = 0xf_ffff_ffff_f000_u64;
        assert_eq!(trampoline >> user_address_bits(0xffff_f7ff_ffe8, true), 0);
    }

    #[test]
    fn signal_frames_are_as_the_c_library_has_them() {
        let context = std::mem::offset_of!(libc::ucontext_t, uc_mcontext) as u64 + size_of::<libc::siginfo_t>() as u64;
        let at = |offset: usize| context + offset as u64;
        assert_eq!(SIGNAL_FRAME.registers[0], (0, at(std::mem::offset_of!(libc::mcontext_t, regs))));
        assert_eq!(SIGNAL_FRAME.registers[30], (30, at(std::mem::offset_of!(libc::mcontext_t, regs)) + 240));
        assert_eq!(SIGNAL_FRAME.sp, at(std::mem::offset_of!(libc::mcontext_t, sp)));
        assert_eq!(SIGNAL_FRAME.ip, at(std::mem::offset_of!(libc::mcontext_t, pc)));
    }
}

//! Unwinding on x86-64: the System V ABI, and what Linux saves for a signal.

use super::{BareTrampoline, SignalFrame};

/// The vendor whose call frame instructions are decoded in addition to the standard ones.
pub const VENDOR: gimli::Vendor = gimli::Vendor::Default;

/// Base register of `_dl_runtime_resolve`'s frame, preserved across calls.
const RBX: u16 = 3;

/// DWARF number of the frame pointer, rbp.
pub const FRAME_POINTER: u16 = 6;
/// DWARF number of the stack pointer, rsp.
pub const STACK_POINTER: u16 = 7;
/// DWARF number of the return address, which has a column of its own.
pub const RETURN_ADDRESS: u16 = 16;
/// The register that holds the return address until it is saved: none, because a call pushes it.
pub const LINK: Option<u16> = None;
/// Number of tracked registers: 0 to 15.
pub const COUNT: usize = 16;
/// Registers that a called function preserves, apart from the stack pointer.
pub const PRESERVED: [u16; 6] = [RBX, FRAME_POINTER, 12, 13, 14, 15];
/// Registers that it does not preserve.
pub const SCRATCH: [u16; 9] = [0, 1, 2, 4, 5, 8, 9, 10, 11];

/// Number of bytes that a call pushes.
pub const RETURN_SLOT_BYTES: u64 = 8;
/// Whether the frame pointer determines the caller's stack pointer: yes, the two words that it points to are the first
/// in the frame.
pub const FRAME_POINTER_GIVES_STACK_POINTER: bool = true;

/// The code that a signal handler returns to: `mov $15, %rax; syscall` (15 = rt_sigreturn).
pub const SIGNAL_TRAMPOLINE: [u8; 9] = [0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05];
/// Whether the call frame information of signal trampolines locates the interrupted instruction pointer.
pub const SIGNAL_FRAMES_BY_CFI: bool = true;
/// At the trampoline, the stack pointer is at `ucontext_t`. Its `gregs` begin at byte 40, in the order r8…r15, rdi,
/// rsi, rbp, rbx, rdx, rax, rcx, rsp, rip.
pub const SIGNAL_FRAME: SignalFrame = SignalFrame {
    registers: &[
        (8, 40),
        (9, 48),
        (10, 56),
        (11, 64),
        (12, 72),
        (13, 80),
        (14, 88),
        (15, 96),
        (5, 104),
        (4, 112),
        (FRAME_POINTER, 120),
        (RBX, 128),
        (1, 136),
        (0, 144),
        (2, 152),
    ],
    sp: 160,
    ip: 168,
};

/// Longest indirect call instruction, bytes.
pub const LONGEST_CALL: usize = 7;
/// CPython's trampolines under `-X perf`: `sub $8, %rsp; call *%rcx; add $8, %rsp; ret`.
pub const BARE_TRAMPOLINE: Option<BareTrampoline> = Some(BareTrampoline { kept_bytes: 8, ends_in_call });

/// Number of address bits in a return address, unless the caller specifies it: all.
pub const DEFAULT_ADDRESS_BITS: u32 = 64;

/// See [`AddressBits::of_user_space`](crate::AddressBits::of_user_space).
pub const fn user_address_bits(_stack_top: u64, _has_52_bits: bool) -> u32 {
    DEFAULT_ADDRESS_BITS
}

fn ends_in_call(bytes: &[u8; LONGEST_CALL]) -> bool {
    let from_end = |back: usize| bytes[LONGEST_CALL - back];
    // call rel32
    if from_end(5) == 0xe8 {
        return true;
    }
    // call r/m64 (ff /2): its length depends on the form of the operand.
    (2..=LONGEST_CALL).any(|length| {
        let (opcode, operand) = (from_end(length), from_end(length - 1));
        let (mode, register) = (operand >> 6, operand & 7);
        let sib = usize::from(mode != 3 && register == 4);
        let displacement = match (mode, register) {
            (1, _) => 1,
            (2, _) | (0, 5) => 4,
            _ => 0,
        };
        opcode == 0xff && (operand >> 3) & 7 == 2 && length == 2 + sib + displacement
    })
}

#[cfg(test)]
mod tests {
    use super::ends_in_call;

    #[test]
    fn calls_are_told_by_their_bytes() {
        for call in [
            &[0xe8, 1, 2, 3, 4][..],
            &[0xff, 0xd1],
            &[0x41, 0xff, 0xd3],
            &[0xff, 0x50, 0x18],
            &[0xff, 0x54, 0x24, 0x08],
            &[0xff, 0x15, 1, 2, 3, 4],
            &[0xff, 0x93, 1, 2, 3, 4],
            &[0xff, 0x94, 0xc3, 1, 2, 3, 4],
        ] {
            let mut bytes = [0x90; 7];
            bytes[7 - call.len()..].copy_from_slice(call);
            assert!(ends_in_call(&bytes), "{call:x?}");
        }
        for other in [[0x90; 7], [0, 0, 0, 0, 0, 0xff, 0xe1], [0x48, 0x83, 0xc4, 8, 0xc3, 0x90, 0x90]] {
            assert!(!ends_in_call(&other), "{other:x?}");
        }
    }
}

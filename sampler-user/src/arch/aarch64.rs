//! Unwinding on arm64: AAPCS64, and what Linux saves for a signal.

use std::sync::LazyLock;

use super::{BareTrampoline, SignalFrame};

/// Whose call frame instructions of its own are known: return addresses may be signed.
pub const VENDOR: gimli::Vendor = gimli::Vendor::AArch64;

/// Where the kernel's `task_struct` has the thread pointer.
pub const THREAD_POINTER: &str = "thread.uw.tp_value";

/// DWARF number of the frame pointer, x29.
pub const FRAME_POINTER: u16 = 29;
/// … of the stack pointer.
pub const STACK_POINTER: u16 = 31;
/// … of the return address: x30's own.
pub const RETURN_ADDRESS: u16 = 30;
/// The register that holds the return address until it is saved.
pub const LINK: Option<u16> = Some(RETURN_ADDRESS);
/// Registers that unwinding follows: x0 to x30, and the stack pointer's place.
pub const COUNT: usize = 32;
/// Those that a called function preserves, apart from the stack pointer.
pub const PRESERVED: [u16; 11] = [19, 20, 21, 22, 23, 24, 25, 26, 27, 28, FRAME_POINTER];
/// Those that it does not; x30 has rules of its own.
pub const SCRATCH: [u16; 19] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18];

/// What a call pushes, bytes: nothing.
pub const RETURN_SLOT_BYTES: u64 = 0;
/// Whether the stack pointer before a call is known from the called function's frame pointer: the two saved words are
/// the last things in the frame, and how much lies above them is not written down.
pub const FRAME_POINTER_GIVES_STACK_POINTER: bool = false;

/// `mov x8, #139; svc #0` (139 = rt_sigreturn), what a signal handler returns to.
pub const SIGNAL_TRAMPOLINE: [u8; 8] = [0x68, 0x11, 0x80, 0xd2, 0x01, 0, 0, 0xd4];
/// Whether call frame information of signal trampolines says where the interrupted instruction pointer is: x30's column
/// would have to stand for it and for the interrupted x30.
pub const SIGNAL_FRAMES_BY_CFI: bool = false;
/// At the trampoline the stack pointer is at `siginfo_t` (128 bytes), behind which `ucontext_t` has its `uc_mcontext` at
/// byte 176: the address of a fault, x0…x30, sp, pc.
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
/// None is known: trampolines must save x30 to call, and do so with the frame pointer.
pub const BARE_TRAMPOLINE: Option<BareTrampoline> = None;

/// The address of code in a saved return address: without the signature that `paciasp` puts into the bits above those
/// of user addresses.
pub fn code_address(word: u64) -> u64 {
    static USER_ADDRESSES: LazyLock<u64> = LazyLock::new(|| {
        // SAFETY: reads a word of the process's auxiliary vector.
        let top = unsafe { libc::getauxval(libc::AT_EXECFN) };
        user_addresses(top, has_large_addresses())
    });
    word & *USER_ADDRESSES
}

/// Bits of user addresses where processor and kernel have large ones. Programs get them for their data only if they ask;
/// the kernel puts the trampoline of return probes at their end.
const LARGE_BITS: u32 = 52;

/// Whether this machine has large user addresses: whether asking for one gives one.
fn has_large_addresses() -> bool {
    const BEYOND: usize = 1 << (LARGE_BITS - 1);
    let (flags, page) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 1);
    // SAFETY: the address is a hint; an inaccessible page is mapped where nothing is.
    let at = unsafe { libc::mmap(BEYOND as *mut libc::c_void, page, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: the page that was just mapped, which nobody knows.
    unsafe { libc::munmap(at, page) };
    at as usize >= BEYOND
}

/// The bits that user addresses have, by an address at the top of the main thread's stack, which is at the top of the
/// address space (39, 42, 47 or 48 bits, as the kernel was built), unless there are large ones beyond it.
fn user_addresses(top_of_stack: u64, large: bool) -> u64 {
    const LEAST_BITS: u32 = 39;
    let bits = (u64::BITS - top_of_stack.leading_zeros()).clamp(LEAST_BITS, 48);
    (1 << if large { LARGE_BITS } else { bits }) - 1
}

/// Kinds of instruction by what the kernel does to execute one that is probed, each with a function that begins so.
pub const SPECIMENS: [(&str, extern "C" fn()); 2] = [("emulated", emulated), ("stepped", stepped)];

#[unsafe(naked)]
extern "C" fn emulated() {
    core::arch::naked_asm!("b 2f", "2:", "ret")
}

#[unsafe(naked)]
extern "C" fn stepped() {
    core::arch::naked_asm!("cmp x0, #0", "ret")
}

// For tests and benchmarks: hands the registers of its caller, as they will be after the return, on.
std::arch::global_asm!(
    ".globl heapbpf_capture_here",
    ".type heapbpf_capture_here, @function",
    "heapbpf_capture_here:",
    ".cfi_startproc",
    "mov x0, x30",
    "mov x1, sp",
    "mov x2, x29",
    "b {keep}",
    ".cfi_endproc",
    ".size heapbpf_capture_here, . - heapbpf_capture_here",
    keep = sym crate::unwind::own_process::keep_capture,
);

#[cfg(test)]
mod tests {
    use super::{SIGNAL_FRAME, user_addresses};

    #[test]
    fn signatures_are_above_the_bits_of_user_addresses() {
        assert_eq!(user_addresses(0xffff_f7ff_ffe8, false), (1 << 48) - 1);
        assert_eq!(user_addresses(0x7f_ffff_ffe8, false), (1 << 39) - 1);
        assert_eq!(user_addresses(0, false), (1 << 39) - 1, "not told");
        assert_eq!(super::code_address(0x00a0_0000_0000_1234), 0x1234);
    }

    #[test]
    fn the_trampoline_of_return_probes_may_be_beyond_48_bits() {
        let trampoline = 0xf_ffff_ffff_f000;
        assert_eq!(trampoline & user_addresses(0xffff_f7ff_ffe8, true), trampoline);
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

//! Unwinding on x86-64: the System V ABI, and what Linux saves for a signal.

use super::{BareTrampoline, SignalFrame};

/// Whose call frame instructions of its own are known.
pub const VENDOR: gimli::Vendor = gimli::Vendor::Default;

/// Base register of `_dl_runtime_resolve`'s frame, preserved across calls.
const RBX: u16 = 3;

/// Where the kernel's `task_struct` has the thread pointer.
pub const THREAD_POINTER: &str = "thread.fsbase";

/// DWARF number of the frame pointer, rbp.
pub const FRAME_POINTER: u16 = 6;
/// … of the stack pointer, rsp.
pub const STACK_POINTER: u16 = 7;
/// … of the return address, a column of its own.
pub const RETURN_ADDRESS: u16 = 16;
/// The register that holds the return address until it is saved: none, a call pushes it.
pub const LINK: Option<u16> = None;
/// Registers that unwinding follows: 0 to 15.
pub const COUNT: usize = 16;
/// Those that a called function preserves, apart from the stack pointer.
pub const PRESERVED: [u16; 6] = [RBX, FRAME_POINTER, 12, 13, 14, 15];
/// Those that it does not.
pub const SCRATCH: [u16; 9] = [0, 1, 2, 4, 5, 8, 9, 10, 11];

/// What a call pushes, bytes.
pub const RETURN_SLOT_BYTES: u64 = 8;
/// Whether the stack pointer before a call is known from the called function's frame pointer: the two saved words are
/// the first things in the frame.
pub const FRAME_POINTER_GIVES_STACK_POINTER: bool = true;

/// `mov $15, %rax; syscall` (15 = rt_sigreturn), what a signal handler returns to.
pub const SIGNAL_TRAMPOLINE: [u8; 9] = [0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05];
/// Whether call frame information of signal trampolines says where the interrupted instruction pointer is.
pub const SIGNAL_FRAMES_BY_CFI: bool = true;
/// At the trampoline the stack pointer is at `ucontext_t`, whose `gregs` begin at byte 40, in the order r8…r15, rdi, rsi,
/// rbp, rbx, rdx, rax, rcx, rsp, rip.
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
/// CPython's under `-X perf`: `sub $8, %rsp; call *%rcx; add $8, %rsp; ret`.
pub const BARE_TRAMPOLINE: Option<BareTrampoline> = Some(BareTrampoline { kept_bytes: 8, ends_in_call });

/// The address of code in a saved return address: the word as it is.
pub const fn code_address(word: u64) -> u64 {
    word
}

fn ends_in_call(bytes: &[u8; LONGEST_CALL]) -> bool {
    let from_end = |back: usize| bytes[LONGEST_CALL - back];
    // call rel32
    if from_end(5) == 0xe8 {
        return true;
    }
    // call r/m64 (ff /2): the length of what follows the opcode tells the form of its operand.
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

/// Kinds of instruction by what the kernel does to execute one that is probed, each with a function that begins so.
pub const SPECIMENS: [(&str, extern "C" fn()); 3] =
    [("emulated", emulated), ("stepped", stepped), ("optimized", optimized)];

#[unsafe(naked)]
extern "C" fn emulated() {
    core::arch::naked_asm!("push rbp", "pop rbp", "ret")
}

#[unsafe(naked)]
extern "C" fn stepped() {
    core::arch::naked_asm!("test rdi, rdi", "nop", "ret")
}

#[unsafe(naked)]
extern "C" fn optimized() {
    // nopl 0x0(%rax,%rax,1): the five-byte nop that the kernel replaces by a call.
    core::arch::naked_asm!(".byte 0x0f, 0x1f, 0x44, 0x00, 0x00", "nop", "ret")
}

// For tests and benchmarks: hands the registers of its caller, as they will be after the return, on.
std::arch::global_asm!(
    ".globl heapbpf_capture_here",
    ".type heapbpf_capture_here, @function",
    "heapbpf_capture_here:",
    ".cfi_startproc",
    "mov rdi, [rsp]",
    "lea rsi, [rsp + 8]",
    "mov rdx, rbp",
    "jmp {keep}",
    ".cfi_endproc",
    ".size heapbpf_capture_here, . - heapbpf_capture_here",
    keep = sym crate::unwind::own_process::keep_capture,
);

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

//! x86-64.

use heapbpf_unwind::AddressBits;

/// Where the kernel's `task_struct` has the thread pointer.
pub const THREAD_POINTER: &str = "thread.fsbase";

/// Which bits of a saved return address are the address: all.
pub const fn address_bits() -> AddressBits {
    AddressBits::ALL
}

/// One function for each way in which the kernel executes a probed instruction. It begins with such an instruction.
pub const MICROBENCHMARKS: [(&str, extern "C" fn()); 3] =
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
    // nopl 0x0(%rax,%rax,1): the five-byte nop that the kernel replaces with a call.
    core::arch::naked_asm!(".byte 0x0f, 0x1f, 0x44, 0x00, 0x00", "nop", "ret")
}

/// Functions that begin with a no-op that a kernel may turn into a call when it is probed: one for each length.
pub const NO_OPS: [(usize, extern "C" fn()); 6] = [(5, nop5), (6, nop6), (7, nop7), (8, nop8), (9, nop9), (10, nop10)];

macro_rules! no_op {
    ($($name:ident: $bytes:literal,)*) => {
        $(
            #[unsafe(naked)]
            extern "C" fn $name() {
                // Aligned, because the kernel does not optimize an instruction that crosses a page.
                core::arch::naked_asm!(".balign 16", concat!(".byte ", $bytes), "ret")
            }
        )*
    };
}

no_op! {
    nop5: "0x0f, 0x1f, 0x44, 0, 0",
    nop6: "0x66, 0x0f, 0x1f, 0x44, 0, 0",
    nop7: "0x0f, 0x1f, 0x80, 0, 0, 0, 0",
    nop8: "0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0",
    nop9: "0x66, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0",
    nop10: "0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0",
}

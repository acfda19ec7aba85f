//! x86-64.

use heapbpf_unwind::AddressBits;

/// Where the kernel's `task_struct` has the thread pointer.
pub const THREAD_POINTER: &str = "thread.fsbase";

/// The bits of saved return addresses that are the address: all.
pub const fn address_bits() -> AddressBits {
    AddressBits::ALL
}

/// Each way in which the kernel executes a probed instruction, with a function that begins with such an instruction.
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
    // nopl 0x0(%rax,%rax,1): the five-byte nop that the kernel replaces by a call.
    core::arch::naked_asm!(".byte 0x0f, 0x1f, 0x44, 0x00, 0x00", "nop", "ret")
}

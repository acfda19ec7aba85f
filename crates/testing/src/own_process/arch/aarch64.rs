//! The stub on arm64.

// Passes on its caller's registers, as they will be after the return.
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
    keep = sym crate::own_process::capture::keep_capture,
);

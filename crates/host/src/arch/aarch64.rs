//! arm64.

use heapbpf_unwind::AddressBits;

/// Where the kernel's `task_struct` has the thread pointer.
pub const THREAD_POINTER: &str = "thread.uw.tp_value";

/// Which bits of a saved return address are the address: those of a user address, as this machine's kernel was built.
pub fn address_bits() -> AddressBits {
    // SAFETY: reads a word of the process's auxiliary vector. It is the address of the program's path, which the kernel
    // stores at the top of the main thread's stack.
    let stack_top = unsafe { libc::getauxval(libc::AT_EXECFN) };
    AddressBits::of_user_space(stack_top, has_52_bit_addresses())
}

/// Whether this machine has 52-bit user addresses. Asks for a mapping at such an address and checks where it lands.
fn has_52_bit_addresses() -> bool {
    const BEYOND: usize = 1 << 51;
    let (flags, page) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 1);
    // SAFETY: the address is a hint without MAP_FIXED, so the inaccessible page is mapped where nothing is.
    let at = unsafe { libc::mmap(BEYOND as *mut libc::c_void, page, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: the page was mapped just above, and no pointer to it exists elsewhere.
    unsafe { libc::munmap(at, page) };
    at as usize >= BEYOND
}

/// One function for each way in which the kernel executes a probed instruction. It begins with such an instruction.
pub const MICROBENCHMARKS: [(&str, extern "C" fn()); 2] = [("emulated", emulated), ("stepped", stepped)];

/// No-ops that a kernel may turn into a call when they are probed: none on arm64.
pub const NO_OPS: [(usize, extern "C" fn()); 0] = [];

#[unsafe(naked)]
extern "C" fn emulated() {
    core::arch::naked_asm!("b 2f", "2:", "ret")
}

#[unsafe(naked)]
extern "C" fn stepped() {
    core::arch::naked_asm!("cmp x0, #0", "ret")
}

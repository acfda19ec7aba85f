//! arm64.

use heapbpf_unwind::AddressBits;

/// Where the kernel's `task_struct` has the thread pointer.
pub const THREAD_POINTER: &str = "thread.uw.tp_value";

/// The bits of saved return addresses that are the address: those of user addresses, as this machine's kernel was built.
pub fn address_bits() -> AddressBits {
    // SAFETY: reads a word of the process's auxiliary vector. It is the address of the program's path, which the kernel stores
    // at the top of the main thread's stack.
    let stack_top = unsafe { libc::getauxval(libc::AT_EXECFN) };
    AddressBits::of_user_space(stack_top, has_52_bit_addresses())
}

/// Whether this machine has user addresses of 52 bits: whether asking for one gives one.
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

/// Each way in which the kernel executes a probed instruction, with a function that begins with such an instruction.
pub const MICROBENCHMARKS: [(&str, extern "C" fn()); 2] = [("emulated", emulated), ("stepped", stepped)];

/// No-ops that a kernel may turn into a call when they are probed: none.
pub const NO_OPS: [(usize, extern "C" fn()); 0] = [];

#[unsafe(naked)]
extern "C" fn emulated() {
    core::arch::naked_asm!("b 2f", "2:", "ret")
}

#[unsafe(naked)]
extern "C" fn stepped() {
    core::arch::naked_asm!("cmp x0, #0", "ret")
}

//! The only file of the kernel side that knows a machine's registers.

use core::ffi::c_void;
use core::ptr::read_volatile;

#[cfg(bpf_target_arch = "x86_64")]
mod registers {
    pub use aya_ebpf::bindings::pt_regs as Context;

    /// Bytes that the return instruction takes from the stack.
    pub const RETURN_SLOT: u64 = 8;

    macro_rules! argument_fields {
        ($r:expr) => {
            [
                &raw const (*$r).rdi,
                &raw const (*$r).rsi,
                &raw const (*$r).rdx,
                &raw const (*$r).rcx,
                &raw const (*$r).r8,
                &raw const (*$r).r9,
            ]
        };
    }
    pub(crate) use argument_fields;
    macro_rules! special_fields {
        ($r:expr) => {
            (&raw const (*$r).rip, &raw const (*$r).rsp, &raw const (*$r).rbp, &raw const (*$r).rax)
        };
    }
    pub(crate) use special_fields;
}

#[cfg(bpf_target_arch = "aarch64")]
mod registers {
    pub use aya_ebpf::bindings::user_pt_regs as Context;

    /// The return address is in x30: nothing is taken from the stack.
    pub const RETURN_SLOT: u64 = 0;

    macro_rules! argument_fields {
        ($r:expr) => {
            [
                &raw const (*$r).regs[0],
                &raw const (*$r).regs[1],
                &raw const (*$r).regs[2],
                &raw const (*$r).regs[3],
                &raw const (*$r).regs[4],
                &raw const (*$r).regs[5],
            ]
        };
    }
    pub(crate) use argument_fields;
    macro_rules! special_fields {
        ($r:expr) => {
            (&raw const (*$r).pc, &raw const (*$r).sp, &raw const (*$r).regs[29], &raw const (*$r).regs[0])
        };
    }
    pub(crate) use special_fields;
}

pub use registers::RETURN_SLOT;

/// Argument registers at a function's entry.
pub struct Arguments([u64; 6]);

impl Arguments {
    /// Reads all of them: at constant offsets, as the verifier demands of a context.
    #[inline(always)]
    pub fn read(ctx: *mut c_void) -> Self {
        let r = ctx.cast::<registers::Context>();
        // SAFETY: `ctx` is the program's context, a `pt_regs` for uprobe programs.
        unsafe { Self(registers::argument_fields!(r).map(|field| read_volatile(field))) }
    }

    /// The argument of that index; 0 for an index that does not exist.
    #[inline(always)]
    pub fn get(&self, index: u8) -> u64 {
        let Self([a, b, c, d, e, f]) = self;
        match index {
            0 => *a,
            1 => *b,
            2 => *c,
            3 => *d,
            4 => *e,
            5 => *f,
            _ => 0,
        }
    }
}

/// Instruction pointer.
#[inline(always)]
pub fn instruction_pointer(ctx: *mut c_void) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: as above.
    unsafe { read_volatile(registers::special_fields!(r).0) }
}

/// Stack pointer.
#[inline(always)]
pub fn stack_pointer(ctx: *mut c_void) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: as above.
    unsafe { read_volatile(registers::special_fields!(r).1) }
}

/// Frame pointer.
#[inline(always)]
pub fn frame_pointer(ctx: *mut c_void) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: as above.
    unsafe { read_volatile(registers::special_fields!(r).2) }
}

/// Return value, in a return probe.
#[inline(always)]
pub fn return_value(ctx: *mut c_void) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: as above.
    unsafe { read_volatile(registers::special_fields!(r).3) }
}

/// Return address of the function that was just entered, 0 if it cannot be read.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn return_address(_ctx: *mut c_void, stack_pointer: u64) -> u64 {
    crate::maps::read_user(stack_pointer).unwrap_or(0)
}

/// Return address of the function that was just entered, 0 if it cannot be read.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn return_address(ctx: *mut c_void, _stack_pointer: u64) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: as above.
    unsafe { read_volatile(&raw const (*r).regs[30]) }
}

//! The only file of the kernel side that knows a machine's registers.

use core::arch::asm;
use core::ffi::c_void;
use core::ptr::read_volatile;

#[cfg(bpf_target_arch = "x86_64")]
mod registers {
    use core::mem::offset_of;

    pub use aya_ebpf::bindings::pt_regs as Context;

    /// Bytes that the return instruction takes from the stack.
    pub const RETURN_SLOT: u64 = 8;

    /// Where the context holds each argument register.
    pub const ARGUMENTS: [usize; 6] = [
        offset_of!(Context, rdi),
        offset_of!(Context, rsi),
        offset_of!(Context, rdx),
        offset_of!(Context, rcx),
        offset_of!(Context, r8),
        offset_of!(Context, r9),
    ];

    macro_rules! special_fields {
        ($r:expr) => {
            (&raw const (*$r).rip, &raw const (*$r).rsp, &raw const (*$r).rbp, &raw const (*$r).rax)
        };
    }
    pub(crate) use special_fields;
}

#[cfg(bpf_target_arch = "aarch64")]
mod registers {
    use core::mem::offset_of;

    pub use aya_ebpf::bindings::user_pt_regs as Context;

    /// The return address is in x30: nothing is taken from the stack.
    pub const RETURN_SLOT: u64 = 0;

    /// Where the context holds each argument register.
    pub const ARGUMENTS: [usize; 6] = {
        let first = offset_of!(Context, regs);
        [first, first + 8, first + 16, first + 24, first + 32, first + 40]
    };

    macro_rules! special_fields {
        ($r:expr) => {
            (&raw const (*$r).pc, &raw const (*$r).sp, &raw const (*$r).regs[29], &raw const (*$r).regs[0])
        };
    }
    pub(crate) use special_fields;
}

pub use registers::RETURN_SLOT;

/// Argument registers at a function's entry.
pub struct Arguments(*mut c_void);

/// Reads one argument register. In assembly, so that the compiler cannot fold the reads of several into one at a
/// computed offset: the verifier demands constant ones.
macro_rules! read_argument {
    ($context:expr, $index:literal) => {{
        let value: u64;
        // SAFETY: reads 8 bytes of the program's context, which is a `pt_regs` for uprobe programs.
        unsafe {
            asm!(
                "{value} = *(u64 *)({context} + {offset})",
                value = out(reg) value,
                context = in(reg) $context,
                offset = const registers::ARGUMENTS[$index],
                options(nostack, pure, readonly),
            );
        }
        value
    }};
}

impl Arguments {
    /// Of the call that a program runs for. Only those asked for are read.
    #[inline(always)]
    pub const fn of(ctx: *mut c_void) -> Self {
        Self(ctx)
    }

    /// The argument of that index; 0 for an index that does not exist.
    #[inline(always)]
    pub fn get(&self, index: u8) -> u64 {
        if index == 0 {
            return read_argument!(self.0, 0);
        }
        match index {
            1 => read_argument!(self.0, 1),
            2 => read_argument!(self.0, 2),
            3 => read_argument!(self.0, 3),
            4 => read_argument!(self.0, 4),
            5 => read_argument!(self.0, 5),
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

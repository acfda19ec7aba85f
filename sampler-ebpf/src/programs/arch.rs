//! Register access: the only architecture-dependent file of the BPF side.

use core::arch::asm;
use core::ffi::c_void;
use core::ptr::read_volatile;

use sampler_ebpf::abi::{ACCUMULATOR, Registers};
#[cfg(bpf_target_arch = "x86_64")]
use sampler_ebpf::x86_condition;

use crate::memory::read_kernel;

#[cfg(bpf_target_arch = "x86_64")]
mod registers {
    use core::mem::offset_of;

    pub use aya_ebpf::bindings::pt_regs as Context;

    /// Bytes that the return instruction pops from the stack.
    pub const RETURN_SLOT: u64 = 8;

    /// The offsets of registers in the context.
    macro_rules! offsets {
        ($($register:ident)*) => {
            [$(offset_of!(Context, $register)),*]
        };
    }

    /// Offsets in the context of each argument register, and of the accumulator.
    pub const ARGUMENTS: [usize; 7] = offsets!(rdi rsi rdx rcx r8 r9 rax);

    /// Offsets in the context of each register, by its number in the instruction set.
    pub const GENERAL: [usize; 16] = offsets!(rax rcx rdx rbx rsp rbp rsi rdi r8 r9 r10 r11 r12 r13 r14 r15);
    /// Offset of the flags.
    pub const FLAGS: usize = offset_of!(Context, eflags);

    /// Offsets where the kernel saves each argument of a system call. The fourth is not in rcx.
    pub const SYSCALL_ARGUMENTS: [usize; 5] =
        [ARGUMENTS[0], ARGUMENTS[1], ARGUMENTS[2], offset_of!(Context, r10), ARGUMENTS[4]];
    /// Offsets of the instruction pointer, stack pointer and frame pointer.
    pub const SPECIAL: [usize; 3] = offsets!(rip rsp rbp);
    /// Offset of the link register, if the architecture has one.
    pub const LINK: Option<usize> = None;
    /// Offset of the system call's number.
    pub const NUMBER: usize = offset_of!(Context, orig_rax);
    /// Distinguishes 32-bit programs: the code segment, and its value in 64-bit programs.
    pub const MODE: (usize, u64, u64) = (offset_of!(Context, cs), 0xffff, 0x33);

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

    /// The return address is in x30: the return pops nothing from the stack.
    pub const RETURN_SLOT: u64 = 0;

    /// Offsets in the context of each argument register. (No site uses the last one on this architecture.)
    pub const ARGUMENTS: [usize; 7] = {
        let first = offset_of!(Context, regs);
        [first, first + 8, first + 16, first + 24, first + 32, first + 40, first + 48]
    };

    /// Offsets where the kernel saves each argument of a system call. The first argument's register holds the result in
    /// the end, so its copy is used (`orig_x0`), which follows the user's registers.
    pub const SYSCALL_ARGUMENTS: [usize; 5] =
        [size_of::<Context>(), ARGUMENTS[1], ARGUMENTS[2], ARGUMENTS[3], ARGUMENTS[4]];
    /// Offsets of the instruction pointer, stack pointer and frame pointer.
    pub const SPECIAL: [usize; 3] =
        [offset_of!(Context, pc), offset_of!(Context, sp), offset_of!(Context, regs) + 29 * 8];
    /// Offset of the link register.
    pub const LINK: Option<usize> = Some(offset_of!(Context, regs) + 30 * 8);
    /// Offset of the system call's number (`syscallno`).
    pub const NUMBER: usize = size_of::<Context>() + 8;
    /// Distinguishes 32-bit programs: a bit of the processor state.
    pub const MODE: (usize, u64, u64) = (offset_of!(Context, pstate), 0x10, 0);

    macro_rules! special_fields {
        ($r:expr) => {
            (&raw const (*$r).pc, &raw const (*$r).sp, &raw const (*$r).regs[29], &raw const (*$r).regs[0])
        };
    }
    pub(crate) use special_fields;
}

pub use registers::RETURN_SLOT;

/// Numbers of system calls.
#[cfg(bpf_target_arch = "x86_64")]
pub mod number {
    pub const MMAP: u64 = 9;
    pub const MUNMAP: u64 = 11;
    pub const BRK: u64 = 12;
    pub const MREMAP: u64 = 25;
}

/// Numbers of system calls.
#[cfg(bpf_target_arch = "aarch64")]
pub mod number {
    pub const BRK: u64 = 214;
    pub const MUNMAP: u64 = 215;
    pub const MREMAP: u64 = 216;
    pub const MMAP: u64 = 222;
}

/// The argument registers at a function's entry.
pub struct Arguments(*mut c_void);

/// Reads one register, at a constant offset in the context. Uses assembly, so that the compiler cannot merge several
/// reads into one with a computed offset: the verifier requires constant offsets.
macro_rules! read_register {
    ($context:expr, $offset:expr) => {{
        let value: u64;
        // SAFETY: reads the 8 bytes of one register from the program's context, which the kernel passes as a `pt_regs`
        // to uprobe programs; the verifier rejects a program that passes anything else here.
        unsafe {
            asm!(
                "{value} = *(u64 *)({context} + {offset})",
                value = out(reg) value,
                context = in(reg) $context,
                offset = const $offset,
                options(nostack, pure, readonly),
            );
        }
        value
    }};
}

impl Arguments {
    /// The arguments of the call for which the program runs. Only those that are used are read.
    #[inline(always)]
    pub const fn of(ctx: *mut c_void) -> Self {
        Self(ctx)
    }

    /// The argument with this index; 0 if there is no such argument.
    #[inline(always)]
    pub fn get(&self, index: u8) -> u64 {
        if index == 0 {
            return read_register!(self.0, registers::ARGUMENTS[0]);
        }
        match index {
            1 => read_register!(self.0, registers::ARGUMENTS[1]),
            2 => read_register!(self.0, registers::ARGUMENTS[2]),
            3 => read_register!(self.0, registers::ARGUMENTS[3]),
            4 => read_register!(self.0, registers::ARGUMENTS[4]),
            5 => read_register!(self.0, registers::ARGUMENTS[5]),
            ACCUMULATOR => read_register!(self.0, registers::ARGUMENTS[6]),
            _ => 0,
        }
    }
}

/// Instruction pointer.
#[inline(always)]
pub fn instruction_pointer(ctx: *mut c_void) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: `ctx` is the `pt_regs` that the kernel passes to uprobe programs; the verifier rejects any other pointer.
    unsafe { read_volatile(registers::special_fields!(r).0) }
}

/// Stack pointer.
#[inline(always)]
pub fn stack_pointer(ctx: *mut c_void) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: `ctx` is the `pt_regs` that the kernel passes to uprobe programs; the verifier rejects any other pointer.
    unsafe { read_volatile(registers::special_fields!(r).1) }
}

/// Frame pointer.
#[inline(always)]
pub fn frame_pointer(ctx: *mut c_void) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: `ctx` is the `pt_regs` that the kernel passes to uprobe programs; the verifier rejects any other pointer.
    unsafe { read_volatile(registers::special_fields!(r).2) }
}

/// The registers for unwinding, in a return probe: the caller's own.
#[inline(always)]
pub fn registers(ctx: *mut c_void) -> Registers {
    Registers { ip: instruction_pointer(ctx), sp: stack_pointer(ctx), fp: frame_pointer(ctx), lr: 0 }
}

/// The user's registers as the kernel saved them at a system call. Their values are untrusted.
#[derive(Clone, Copy)]
pub struct SystemCall(pub u64);

impl SystemCall {
    /// The system call's number.
    #[inline(always)]
    pub fn number(&self) -> u64 {
        let number: u32 = read_kernel(self.0 + registers::NUMBER as u64);
        u64::from(number)
    }

    /// Whether the call comes from a 64-bit program. 32-bit programs number system calls differently.
    #[inline(always)]
    pub fn is_native(&self) -> bool {
        let (offset, mask, native) = registers::MODE;
        let mode: u64 = read_kernel(self.0 + offset as u64);
        mode & mask == native
    }

    /// An argument of the call; the index is below 5.
    #[inline(always)]
    pub fn argument(&self, index: usize) -> u64 {
        read_kernel(self.0 + registers::SYSCALL_ARGUMENTS[index] as u64)
    }

    /// The registers for unwinding, at the instruction to which the call returns.
    #[inline(always)]
    pub fn registers(&self) -> Registers {
        let at = |offset: usize| read_kernel(self.0 + offset as u64);
        let [ip, sp, fp] = registers::SPECIAL;
        Registers { ip: at(ip), sp: at(sp), fp: at(fp), lr: registers::LINK.map_or(0, at) }
    }
}

/// Return value, in a return probe.
#[inline(always)]
pub fn return_value(ctx: *mut c_void) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: `ctx` is the `pt_regs` that the kernel passes to uprobe programs; the verifier rejects any other pointer.
    unsafe { read_volatile(registers::special_fields!(r).3) }
}

/// A register by its number in the instruction set.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn register(ctx: *mut c_void, number: u8) -> u64 {
    macro_rules! general {
        ($($number:literal)*) => {
            match number {
                $($number => read_register!(ctx, registers::GENERAL[$number]),)*
                _ => read_register!(ctx, registers::GENERAL[15]),
            }
        };
    }
    general!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

/// Whether a conditional jump with this condition would be taken now.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn holds(ctx: *mut c_void, condition: u8) -> bool {
    let flags = read_register!(ctx, registers::FLAGS);
    x86_condition::holds(condition, flags)
}

/// The result register: on this architecture, all return sites have the result there.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn register(ctx: *mut c_void, _number: u8) -> u64 {
    return_value(ctx)
}

/// On this architecture, return sites have no condition.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub const fn holds(_ctx: *mut c_void, _condition: u8) -> bool {
    true
}

/// Return address of the function that was just entered; 0 if it cannot be read.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn return_address(_ctx: *mut c_void, stack_pointer: u64) -> u64 {
    crate::memory::read_user(stack_pointer).unwrap_or(0)
}

/// Return address of the function that was just entered; 0 if it cannot be read.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn return_address(ctx: *mut c_void, _stack_pointer: u64) -> u64 {
    let r = ctx.cast::<registers::Context>();
    // SAFETY: `ctx` is the `pt_regs` that the kernel passes to uprobe programs; the verifier rejects any other pointer.
    unsafe { read_volatile(&raw const (*r).regs[30]) }
}

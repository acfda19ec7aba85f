//! Which instruction of a function to probe: the cheapest one that every call passes exactly once, arguments intact.

use sampler_ebpf::abi::NO_ARGUMENT;

use super::arch::Machine;

/// What happens to the probed instruction when the probe fires, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A 5-byte no-op that the kernel turns into a call: no trap at all.
    Optimized,
    /// One trap; the kernel does what the instruction would.
    Emulated,
    /// Two traps: the instruction is copied elsewhere and single-stepped.
    Stepped,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Optimized => "optimized",
            Self::Emulated => "emulated",
            Self::Stepped => "stepped",
        })
    }
}

/// What a kernel does with probed instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelRules {
    /// Instruction set.
    pub machine: Machine,
    /// 5-byte no-ops become calls (x86-64, Linux 6.18; measured there: 435 ns instead of 545).
    pub optimizes_nop5: bool,
    /// `nop` is emulated (always on x86-64; arm64 since Linux 6.13).
    pub emulates_nop: bool,
    /// Longer no-ops are emulated too (x86-64, Linux 6.18; measured there).
    pub emulates_long_nops: bool,
}

impl KernelRules {
    /// Rules of Linux `release` (major, minor).
    #[must_use]
    pub fn of(machine: Machine, release: (u32, u32)) -> Self {
        match machine {
            Machine::X86_64 => Self {
                machine,
                optimizes_nop5: release >= (6, 18),
                emulates_nop: true,
                emulates_long_nops: release >= (6, 18),
            },
            Machine::Aarch64 => {
                Self { machine, optimizes_nop5: false, emulates_nop: release >= (6, 13), emulates_long_nops: false }
            }
        }
    }
}

/// Numbers of the arguments that matter ([`NO_ARGUMENT`]: there is none), as the ABI's `Site` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arguments {
    /// Bytes asked for.
    pub size: u8,
    /// What the size is multiplied by.
    pub times: u8,
    /// The block to free or reallocate.
    pub old: u8,
    /// Where the result is stored; [`NO_ARGUMENT`] if it is returned.
    pub out: u8,
}

impl Arguments {
    /// No argument at all.
    pub const NONE: Self = Self { size: NO_ARGUMENT, times: NO_ARGUMENT, old: NO_ARGUMENT, out: NO_ARGUMENT };
}

/// What must still be true at the probed instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Arguments that must be in an argument register.
    pub arguments: Arguments,
    /// The return address must be where it is at entry, because it is read and may be replaced.
    pub return_address: bool,
}

/// The choice for one function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Bytes from the function's first instruction.
    pub offset: u64,
    /// How the kernel will run the probed instruction.
    pub kind: Kind,
    /// Where the arguments are there: a copy in another register is as good as the original.
    pub arguments: Arguments,
    /// How far the stack pointer has moved since entry, bytes (0 or negative).
    pub stack_pointer_moved: i64,
    /// Why this one, for the audit.
    pub reason: String,
}

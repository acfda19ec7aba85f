//! The choice of the instruction to probe: the cheapest one that every call executes exactly once, with its arguments
//! intact.

use heapbpf_audit::ProbeKind;
use sampler_ebpf::abi::{NO_ARGUMENT, Site};

/// How a kernel runs probed instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelRules {
    /// Instruction set.
    pub machine: Machine,
    /// No-ops that become calls (x86-64; 5 bytes long on Linux 6.18: 435 ns instead of 545). This is measured, not
    /// derived from the release: kernels differ, and distributions change theirs.
    pub optimized_no_ops: NoOpLengths,
    /// `nop` is emulated (always on x86-64; arm64 since Linux 6.13).
    pub emulates_nop: bool,
    /// Longer no-ops are emulated too (x86-64, Linux 6.18; measured there).
    pub emulates_long_nops: bool,
    /// Processes may have shadow stacks (x86-64). An emulated call desynchronises these on many kernels.
    pub has_shadow_stacks: bool,
}

impl KernelRules {
    /// The rules of Linux `release` (major, minor), assuming that it optimizes no no-op.
    #[must_use]
    pub fn of(machine: Machine, release: (u32, u32)) -> Self {
        let is_x86_64 = machine == Machine::X86_64;
        Self {
            machine,
            optimized_no_ops: NoOpLengths::default(),
            emulates_nop: is_x86_64 || release >= (6, 13),
            emulates_long_nops: is_x86_64 && release >= (6, 18),
            has_shadow_stacks: false,
        }
    }
}

/// A set of no-op lengths, 0 to 15 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoOpLengths(u16);

impl NoOpLengths {
    /// Whether no-ops of this many bytes are in the set.
    #[must_use]
    pub const fn contains(self, bytes: usize) -> bool {
        bytes < 16 && self.0 >> bytes & 1 != 0
    }

    /// The lengths in the set, ascending, bytes.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..16).filter(move |bytes| self.contains(*bytes))
    }
}

impl FromIterator<usize> for NoOpLengths {
    /// Lengths that no instruction has are ignored.
    fn from_iter<T: IntoIterator<Item = usize>>(lengths: T) -> Self {
        Self(lengths.into_iter().filter(|bytes| *bytes < 16).fold(0, |set, bytes| set | 1 << bytes))
    }
}

/// The meaning of a function's arguments: their numbers as in [`Site`], from 0; [`NO_ARGUMENT`] if there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arguments {
    /// The size, bytes.
    pub size: u8,
    /// The factor that the size is multiplied by.
    pub times: u8,
    /// The block to free or reallocate.
    pub old: u8,
    /// The pointer to where the result is stored; [`NO_ARGUMENT`] if the function returns the result.
    pub out: u8,
}

impl Arguments {
    /// No argument at all.
    pub const NONE: Self = Self { size: NO_ARGUMENT, times: NO_ARGUMENT, old: NO_ARGUMENT, out: NO_ARGUMENT };

    /// A site where the arguments are like this.
    pub(crate) fn site(self) -> Site {
        let Self { size: size_argument, times: times_argument, old: old_argument, out: out_argument } = self;
        Site { size_argument, times_argument, old_argument, out_argument, ..Site::default() }
    }
}

/// The instruction chosen for one function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Distance from the function's first instruction, bytes.
    pub offset: u64,
    /// How the kernel will run the probed instruction.
    pub kind: ProbeKind,
    /// Where the arguments are there. A copy in another register is as good as the original.
    pub arguments: Arguments,
    /// How far the stack pointer has moved since the entry, bytes (0 or negative).
    pub stack_pointer_moved: i64,
    /// Why this instruction was chosen, for the audit.
    pub reason: String,
}

/// An instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Machine {
    /// 64-bit x86.
    #[serde(rename = "x86_64")]
    X86_64,
    /// 64-bit Arm.
    Aarch64,
}

impl Machine {
    /// The instruction set that this crate is compiled for; `None` if it is another.
    #[must_use]
    pub fn host() -> Option<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Self::X86_64),
            "aarch64" => Some(Self::Aarch64),
            _ => None,
        }
    }
}

//! What differs between instruction sets: decoding, calling convention, and which instructions the kernel can run
//! without single-stepping.

pub mod aarch64;
pub mod x86_64;
mod x86_64_ends;
mod x86_64_returns;

use std::collections::BTreeSet;

use super::placement::{KernelRules, Needs, Placement};

/// Instruction set of a file.
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
    /// The instruction set that this program was built for.
    #[must_use]
    pub fn host() -> Option<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Self::X86_64),
            "aarch64" => Some(Self::Aarch64),
            _ => None,
        }
    }
}

/// How control leaves an instruction for another place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowKind {
    /// A call: comes back.
    Call,
    /// A jump, conditional or not.
    Jump,
}

/// A direct transfer of control, or one through a fixed slot in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Address of the instruction.
    pub from: u64,
    /// Call or jump.
    pub kind: FlowKind,
    /// Where to.
    pub target: Target,
}

/// Where a [`Flow`] goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// An address.
    Address(u64),
    /// The address that stands in memory at this address (global offset table).
    Slot(u64),
}

/// What a function can return.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Returned {
    /// Addresses that are known without running it. Small numbers and data are among them.
    pub targets: BTreeSet<Target>,
    /// It returns nothing else.
    pub is_whole: bool,
}

/// The addresses that the function at `address` can return, over all of its paths; `code_at` gives the code from an
/// address on, up to the end of the function there.
#[must_use]
pub fn returns<'a>(machine: Machine, address: u64, code_at: &dyn Fn(u64) -> &'a [u8]) -> Returned {
    match machine {
        Machine::X86_64 => x86_64_returns::returns(address, code_at),
        Machine::Aarch64 => Returned::default(),
    }
}

/// How a function ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// Addresses of its return instructions.
    pub returns: BTreeSet<u64>,
    /// What it calls.
    pub calls: BTreeSet<Target>,
    /// It calls through pointers, too.
    pub calls_unknown: bool,
}

/// How the function at `address` ends, over all of its paths; `code_at` gives the code from an address on, up to the end of
/// the function, or of a part of it that was moved away. `None` if that is not known: it ends in a jump, or cannot be
/// decoded.
#[must_use]
pub fn ends<'a>(machine: Machine, address: u64, code_at: &dyn Fn(u64) -> &'a [u8]) -> Option<Ends> {
    match machine {
        Machine::X86_64 => x86_64_ends::ends(address, code_at),
        Machine::Aarch64 => None,
    }
}

/// Every direct transfer of control in `code`, which starts at `address`; undecodable bytes are skipped.
pub fn flows(machine: Machine, address: u64, code: &[u8], found: impl FnMut(Flow)) {
    match machine {
        Machine::X86_64 => x86_64::flows(address, code, found),
        Machine::Aarch64 => aarch64::flows(address, code, found),
    }
}

/// Where a function jumps with its first instruction (after a landing pad), if it does: it then does nothing else.
#[must_use]
pub fn forwards_to(machine: Machine, address: u64, code: &[u8]) -> Option<Target> {
    match machine {
        Machine::X86_64 => x86_64::forwards_to(address, code),
        Machine::Aarch64 => aarch64::forwards_to(address, code),
    }
}

/// Chooses the instruction of a function to probe, see [`super::placement`]. `entered` tells whether some branch leads
/// to an address.
#[must_use]
pub fn place(
    rules: &KernelRules,
    address: u64,
    code: &[u8],
    needs: &Needs,
    entered: &dyn Fn(u64) -> bool,
) -> Option<Placement> {
    match rules.machine {
        Machine::X86_64 => x86_64::place(rules, address, code, needs, entered),
        Machine::Aarch64 => aarch64::place(rules, address, code, needs, entered),
    }
}

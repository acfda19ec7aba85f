//! The instruction sets: decoding, calling conventions, and which instructions the kernel runs without single-stepping.

mod aarch64;
mod x86_64;
mod x86_64_body;
mod x86_64_exits;
mod x86_64_returns;

use std::borrow::Cow;

use heapbpf_audit::ProbeKind;

use crate::allocators::Shape;
use crate::flow::{Exits, Flow, Returned, Target};
use crate::placement::{KernelRules, Machine, Placement};

/// Returns the code addresses that the function at `address` can return, over all of its paths. `code_at` gives the
/// code from an address up to the end of the function there.
pub fn returns<'a>(machine: Machine, address: u64, code_at: &dyn Fn(u64) -> Cow<'a, [u8]>) -> Returned {
    match machine {
        Machine::X86_64 => x86_64_returns::returns(address, code_at),
        Machine::Aarch64 => Returned::default(),
    }
}

/// Returns how control leaves the function at `address`, over all of its paths and through the code it jumps to; `None`
/// if that is not known. `code_at` gives the address that a jump to an address leads to, and the code from there up to
/// the end of the function; `None` if that is not known.
pub fn exits<'a>(
    machine: Machine,
    address: u64,
    code_at: &dyn Fn(u64) -> Option<(u64, Cow<'a, [u8]>)>,
) -> Option<Exits> {
    match machine {
        Machine::X86_64 => x86_64_exits::exits(address, code_at),
        Machine::Aarch64 => None,
    }
}

/// Calls `found` with every direct transfer of control in `code`, which starts at `address`. Undecodable bytes are
/// skipped.
pub fn flows(machine: Machine, address: u64, code: &[u8], found: impl FnMut(Flow)) {
    match machine {
        Machine::X86_64 => x86_64::flows(address, code, found),
        Machine::Aarch64 => aarch64::flows(address, code, found),
    }
}

/// The target of a function's jump, if after a landing pad the function does nothing but jump.
pub fn forwards_to(machine: Machine, address: u64, code: &[u8]) -> Option<Target> {
    match machine {
        Machine::X86_64 => x86_64::forwards_to(address, code),
        Machine::Aarch64 => aarch64::forwards_to(address, code),
    }
}

/// How the kernel runs a probed instruction, the first one of `bytes`, which is at `address`, together with a
/// description; `None` if the kernel refuses the probe, or this is not known.
pub fn treated(rules: &KernelRules, address: u64, bytes: &[u8]) -> Option<(ProbeKind, String)> {
    match rules.machine {
        Machine::X86_64 => x86_64::treated(rules, address, bytes),
        Machine::Aarch64 => None,
    }
}

/// Chooses the instruction to probe in a function of this shape whose `code` starts at `address`; `None` if the kernel
/// refuses all of them. `entered` says whether a branch leads to an address, and `avoided` whether the instruction there
/// should not be chosen. See [`crate::placement`].
pub fn place(
    rules: &KernelRules,
    address: u64,
    code: &[u8],
    shape: Shape,
    entered: &dyn Fn(u64) -> bool,
    avoided: &dyn Fn(u64) -> bool,
) -> Option<Placement> {
    match rules.machine {
        Machine::X86_64 => x86_64::place(rules, address, code, shape, entered, avoided),
        // Avoiding breakpoints is implemented for x86-64 only.
        Machine::Aarch64 => aarch64::place(rules, address, code, shape, entered),
    }
}

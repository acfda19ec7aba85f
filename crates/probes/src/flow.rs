//! Control flow: calls and jumps, the code addresses that a function can return, and its return sites.

use std::collections::{BTreeMap, BTreeSet};

use sampler_ebpf::abi::ResultLocation;

/// A transfer of control to a fixed address, or through a fixed slot in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Address of the instruction.
    pub from: u64,
    /// Whether it is a call; otherwise a jump, conditional or not.
    pub is_call: bool,
    /// Its target.
    pub target: Target,
}

/// The target of a [`Flow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// An address.
    Address(u64),
    /// The address stored at this address (in the global offset table).
    Slot(u64),
}

/// The code addresses that a function can return.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Returned {
    /// The addresses that its code shows. They may include small numbers and addresses of data.
    pub targets: BTreeSet<Target>,
    /// Whether it can return nothing else.
    pub is_whole: bool,
}

/// How control leaves a function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exits {
    /// Return sites: every call that returns executes one of the instructions at these addresses. Each comes with the
    /// place of the result there.
    pub return_sites: BTreeMap<u64, ResultLocation>,
    /// The functions it calls.
    pub calls: BTreeSet<Target>,
    /// Whether it also calls through pointers.
    pub calls_unknown: bool,
}

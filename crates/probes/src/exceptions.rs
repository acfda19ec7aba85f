//! Which functions a C++ exception may leave, and their return sites.
//!
//! A program's unwinder cannot pass the synthetic return address that the kernel leaves on the stack for a return
//! probe. The return sites of such a function are probed instead.

use std::collections::BTreeSet;

use crate::arch;
use crate::call_graph::{CallGraph, Extent};
use crate::elf::FileImage;
use crate::flow::{Exits, Target};

/// Most functions that are followed from one.
const FUNCTIONS_MAX: usize = 512;
/// Functions of the C++ runtime that start or resume the search for a handler.
const THROWERS: &[&str] =
    &["__cxa_throw", "__cxa_rethrow", "_Unwind_Resume", "_Unwind_RaiseException", "_Unwind_Resume_or_Rethrow"];

/// How control can leave a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// Only by returning, as far as its code tells.
    Returns,
    /// By returning or by an exception; the addresses of its return instructions.
    Throws(BTreeSet<u64>),
    /// By an exception, and otherwise in an unknown way.
    Unknown,
}

/// How control can leave `function`. C code throws nothing itself. C++ code may throw by what it calls through
/// pointers, or by C++ functions of other files.
pub(super) fn leaving(image: &FileImage, graph: &CallGraph<'_>, function: Extent) -> Leaving {
    if !is_cplusplus(image, graph) {
        return Leaving::Returns;
    }
    let exits = exits_of(image, graph, function);
    if !may_throw(image, graph, function, exits.as_ref()) {
        return Leaving::Returns;
    }
    exits
        .filter(|exits| !exits.return_sites.is_empty())
        .map_or(Leaving::Unknown, |exits| Leaving::Throws(exits.return_sites))
}

fn is_thrower(name: &str) -> bool {
    THROWERS.contains(&name)
}

fn is_cplusplus(image: &FileImage, graph: &CallGraph<'_>) -> bool {
    let ours = image.functions().any(|(name, _)| is_thrower(name) || name == "__gxx_personality_v0");
    ours || graph.imports().any(|name| is_thrower(name) || name == "__gxx_personality_v0")
}

fn exits_of(image: &FileImage, graph: &CallGraph<'_>, function: Extent) -> Option<Exits> {
    // A part that the compiler placed elsewhere has the symbol `name.cold` or none, never one that others could call.
    let code_at = |address: u64| {
        let inside = (function.start..function.end).contains(&address);
        let moved = || graph.extent_at(address).filter(|part| graph.is_cold_part(*part)).map(|part| part.end);
        let end = if inside { Some(function.end) } else { moved() };
        end.map_or(&[][..], |end| image.code_between(address, end))
    };
    arch::exits(image.machine, function.start, &code_at)
}

fn may_throw(image: &FileImage, graph: &CallGraph<'_>, function: Extent, exits: Option<&Exits>) -> bool {
    let Some(exits) = exits else { return true };
    let mut seen = BTreeSet::from([function.start]);
    let mut open = vec![exits.clone()];
    while let Some(exits) = open.pop() {
        if exits.calls_unknown {
            return true;
        }
        for call in exits.calls {
            let (Target::Address(address) | Target::Slot(address)) = call;
            if let Some(name) = graph.import_behind(address) {
                // A C++ function of another file, whose code is not read.
                if is_thrower(name) || name.starts_with("_Z") {
                    return true;
                }
                if graph.resolve(address) == address {
                    continue;
                }
            }
            let Some(next) = graph.extent_at(graph.resolve(address)) else { return true };
            if image.functions().any(|(name, symbol)| symbol.address == next.start && is_thrower(name)) {
                return true;
            }
            if seen.insert(next.start) {
                if seen.len() > FUNCTIONS_MAX {
                    return true;
                }
                match exits_of(image, graph, next) {
                    Some(exits) => open.push(exits),
                    None => return true,
                }
            }
        }
    }
    false
}

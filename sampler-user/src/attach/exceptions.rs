//! Which functions may be left by a C++ exception, and where they return if they are not.
//!
//! A program's unwinder cannot find its way past a return address that the kernel replaced to await a return. The return
//! instructions of such a function are probed instead.

use std::collections::BTreeSet;

use super::arch::{self, Ends, Target};
use super::elf::FileImage;
use super::ranges::{CallGraph, Extent};

/// Functions that are followed from one.
const FUNCTIONS_MAX: usize = 512;
/// Functions of the C++ runtime that begin or go on with the search for a handler.
const THROWERS: &[&str] =
    &["__cxa_throw", "__cxa_rethrow", "_Unwind_Resume", "_Unwind_RaiseException", "_Unwind_Resume_or_Rethrow"];

/// How a function can be left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// By returning only, as far as its code tells.
    Returns,
    /// It may throw; the addresses of its return instructions.
    Throws(BTreeSet<u64>),
    /// It may throw, and how it ends is not known.
    Unknown,
}

/// How `function` can be left. C code throws nothing of its own; what C++ code calls through pointers or of other files'
/// C++ functions may.
pub(super) fn leaving(image: &FileImage, graph: &CallGraph<'_>, function: Extent) -> Leaving {
    if !is_cplusplus(image, graph) {
        return Leaving::Returns;
    }
    let ends = ends_of(image, graph, function);
    if !may_throw(image, graph, function, ends.as_ref()) {
        return Leaving::Returns;
    }
    ends.filter(|ends| !ends.returns.is_empty()).map_or(Leaving::Unknown, |ends| Leaving::Throws(ends.returns))
}

fn is_thrower(name: &str) -> bool {
    THROWERS.contains(&name)
}

fn is_cplusplus(image: &FileImage, graph: &CallGraph<'_>) -> bool {
    let ours = image.functions().any(|(name, _)| is_thrower(name) || name == "__gxx_personality_v0");
    ours || graph.imports().any(|name| is_thrower(name) || name == "__gxx_personality_v0")
}

fn ends_of(image: &FileImage, graph: &CallGraph<'_>, function: Extent) -> Option<Ends> {
    // A part that the compiler moved away (`name.cold`) has a symbol, or none at all; never one that others could call.
    let code_at = |address: u64| {
        let inside = (function.start..function.end).contains(&address);
        let moved = || graph.extent_at(address).filter(|part| graph.is_part_moved_away(*part)).map(|part| part.end);
        let end = if inside { Some(function.end) } else { moved() };
        end.map_or(&[][..], |end| image.code_between(address, end))
    };
    arch::ends(image.machine, function.start, &code_at)
}

fn may_throw(image: &FileImage, graph: &CallGraph<'_>, function: Extent, ends: Option<&Ends>) -> bool {
    let Some(ends) = ends else { return true };
    let mut seen = BTreeSet::from([function.start]);
    let mut open = vec![ends.clone()];
    while let Some(ends) = open.pop() {
        if ends.calls_unknown {
            return true;
        }
        for call in ends.calls {
            let (Target::Address(address) | Target::Slot(address)) = call;
            if let Some(name) = graph.import_behind(address) {
                // A C++ function of another file: unread.
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
                match ends_of(image, graph, next) {
                    Some(ends) => open.push(ends),
                    None => return true,
                }
            }
        }
    }
    false
}

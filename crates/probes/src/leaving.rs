//! How control may leave a function: whether its return address may be replaced while it runs, and its return sites.
//!
//! For a return probe, the kernel replaces a function's return address by one of its own. Two things then end a
//! program. One is an exception that passes through the function, because the program's unwinder cannot get past that
//! address. The other is a switch to another stack before the function returns, because the kernel determines by the
//! stack pointer which calls have returned. For functions that may do either, the return sites are probed instead.

use std::collections::{BTreeMap, BTreeSet};

use sampler_ebpf::abi::ResultLocation;

use crate::arch;
use crate::call_graph::{CallGraph, Extent};
use crate::elf::FileImage;
use crate::flow::{Exits, Target};
use crate::placement::Machine;
use crate::table::Table;

/// Maximum functions that are followed from one.
const FUNCTIONS_MAX: usize = 512;
/// Functions of the C++ runtime that start or resume the search for a handler.
const THROWERS: &[&str] =
    &["__cxa_throw", "__cxa_rethrow", "_Unwind_Resume", "_Unwind_RaiseException", "_Unwind_Resume_or_Rethrow"];
/// Functions of libc that allocators call and that neither wait nor call back, so no fiber library replaces them by
/// functions that switch stacks. The functions in the table of allocators count as well.
const STAYING: &str = "__assert_fail __errno_location __memcpy_chk __memmove_chk __memset_chk __stack_chk_fail \
                       __tls_get_addr abort bcmp brk getpagesize getpid madvise memchr memcmp memcpy memmove memset \
                       mmap mmap64 mprotect mremap munmap pthread_self sbrk strcmp strcpy strlen strncmp strncpy \
                       sysconf";

/// How control may leave a function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Leaving {
    /// An exception may leave it.
    pub(super) throws: bool,
    /// It may switch to another stack before it returns.
    pub(super) switches: bool,
    /// Its return sites, as far as known, and where the result is at each.
    pub(super) return_sites: BTreeMap<u64, ResultLocation>,
    /// Whether it, or code that it calls in its file, calls a function of another file.
    pub(super) calls_out: bool,
    /// Whether one of those functions allocates.
    pub(super) allocates_elsewhere: bool,
    /// The name of one that does.
    pub(super) passes_on_to: Option<String>,
}

/// Determines from the code of one file how its functions are left.
pub(super) struct Reader<'a> {
    image: &'a FileImage<'a>,
    graph: &'a CallGraph<'a>,
    table: &'a Table,
    /// Whether an exception may pass through the file's code.
    is_cplusplus: bool,
}

impl<'a> Reader<'a> {
    pub(super) fn new(image: &'a FileImage<'a>, graph: &'a CallGraph<'a>, table: &'a Table) -> Self {
        let unwinds = |name: &str| is_thrower(name) || name == "__gxx_personality_v0";
        let is_cplusplus = image.functions().any(|(name, _)| unwinds(name)) || graph.imports().any(unwinds);
        Self { image, graph, table, is_cplusplus }
    }

    /// How a function that is known to throw is left, whatever its code shows.
    pub(super) fn of_thrower(&self, function: Extent) -> Leaving {
        let return_sites = self.exits_of(function).map(|exits| exits.return_sites).unwrap_or_default();
        Leaving { throws: true, return_sites, ..Leaving::default() }
    }

    /// How `function` is left, as far as its code shows. C code throws nothing itself. C++ code may throw through what
    /// it calls by pointer, or through C++ functions of other files. Code that is called by pointer, or in another
    /// file, may switch stacks.
    pub(super) fn of(&self, function: Extent) -> Leaving {
        // Instructions are only read on x86-64. Elsewhere the kernel cannot be kept from replacing return addresses.
        let unread = Leaving {
            throws: self.is_cplusplus,
            switches: self.image.machine == Machine::X86_64,
            allocates_elsewhere: true,
            ..Leaving::default()
        };
        let Some(exits) = self.exits_of(function) else { return unread };
        let mut leaving = Leaving { return_sites: exits.return_sites.clone(), ..Leaving::default() };
        let mut is_whole = true;
        let mut seen = BTreeSet::from([function.start]);
        let mut open = vec![exits];
        while let Some(exits) = open.pop() {
            is_whole &= !exits.calls_unknown;
            for call in exits.calls {
                let (Target::Address(address) | Target::Slot(address)) = call;
                match self.callee(address) {
                    Callee::Imported(name) => {
                        // The code of another file is not read.
                        leaving.calls_out = true;
                        if self.table.shape_of(name).is_some() {
                            leaving.allocates_elsewhere = true;
                            leaving.passes_on_to.get_or_insert_with(|| name.to_owned());
                        }
                        leaving.throws |= self.is_cplusplus && (is_thrower(name) || name.starts_with("_Z"));
                        leaving.switches |=
                            !STAYING.split(' ').any(|staying| staying == name) && self.table.shape_of(name).is_none();
                    }
                    Callee::Thrower => leaving.throws = true,
                    Callee::Here(next) if !seen.insert(next.start) => {}
                    Callee::Here(next)
                        if seen.len() <= FUNCTIONS_MAX
                            && let Some(exits) = self.exits_of(next) =>
                    {
                        open.push(exits);
                    }
                    Callee::Here(_) | Callee::Unknown => is_whole = false,
                }
            }
        }
        if is_whole {
            return leaving;
        }
        Leaving { return_sites: leaving.return_sites, passes_on_to: leaving.passes_on_to, ..unread }
    }

    fn callee(&self, address: u64) -> Callee<'a> {
        let resolved = self.graph.resolve(address);
        if let Some(name) = self.graph.import_behind(address)
            && (is_thrower(name) || resolved == address)
        {
            return Callee::Imported(name);
        }
        let Some(function) = self.graph.extent_at(resolved) else { return Callee::Unknown };
        let is_throwing =
            |(name, symbol): (&str, &crate::elf::Symbol)| symbol.address == function.start && is_thrower(name);
        if self.image.functions().any(is_throwing) { Callee::Thrower } else { Callee::Here(function) }
    }

    fn exits_of(&self, function: Extent) -> Option<Exits> {
        let code_at = |address: u64| {
            if (function.start..function.end).contains(&address) {
                return Some((address, self.image.code_between(address, function.end)));
            }
            // A part that the compiler placed elsewhere, or a function that this one ends in.
            let resolved = self.graph.resolve(address);
            if resolved == address && self.graph.is_import(address) {
                return None;
            }
            let other = self.graph.extent_at(resolved)?;
            Some((resolved, self.image.code_between(resolved, other.end)))
        };
        arch::exits(self.image.machine, function.start, &code_at)
    }
}

/// The target of a call.
enum Callee<'a> {
    /// A function of another file.
    Imported(&'a str),
    /// A function that throws.
    Thrower,
    /// A function of this file.
    Here(Extent),
    Unknown,
}

fn is_thrower(name: &str) -> bool {
    THROWERS.contains(&name)
}

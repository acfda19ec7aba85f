//! From the bytes of an executable to a plan of probe sites on its allocator.
//!
//! [`examine`] reads an ELF file and finds out which allocator it has (of those in a [`Table`]), which instruction of
//! each of its functions should be probed, where the arguments are there, which code makes reentrant calls, and what
//! cannot be probed, and why. The plan is an [`AllocatorFile`]. For a file without an allocator, an [`AttachError`]
//! says so.
//!
//! The probes are the Linux kernel's (uprobes). The cost of one depends on the probed instruction: the kernel turns
//! some into a call, emulates others, and single-steps the rest, which is tens of times as slow. [`KernelRules`]
//! describe what a kernel does. The plan has the cheapest instruction that every call executes once while its arguments
//! are still available.
//!
//! Nothing here attaches a probe or deals with processes; the crate reads one file, which may be hostile.
//!
//! ```
//! use heapbpf_probes::{AttachError, CustomAllocator, KernelRules, Machine, Table, examine};
//!
//! // Plan the C library of this process for Linux 6.12, with a custom allocator besides the known ones.
//! let custom: CustomAllocator = "libarena.so:arena_alloc(size=arg1)->ret,free=arena_free(arg0)".parse()?;
//! let table = Table::new(&[custom]);
//! let rules = KernelRules::of(Machine::host().expect("x86-64 or arm64"), (6, 12));
//! let maps = std::fs::read_to_string("/proc/self/maps")?;
//! let libc = maps.split_whitespace().find(|path| path.contains("/libc.so") || path.contains("/ld-musl-"));
//! let path = libc.expect("a dynamically linked program");
//! let plan = examine(&std::fs::File::open(path)?, path, &rules, &table)?;
//!
//! println!("{path}: {}", plan.allocator);
//! for site in &plan.sites {
//!     println!("{} at file offset {:#x}: {}", site.function, site.site.offset, site.reason);
//! }
//! assert!(plan.sites.iter().any(|site| site.function == "malloc" && site.return_needed));
//!
//! // A file that is no program has no allocator, so that nothing is missed.
//! let error = examine(&b"#!/bin/sh".as_slice(), "script", &rules, &table).unwrap_err();
//! assert!(matches!(error, AttachError::NotElf) && error.misses_nothing());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod allocators;
mod arch;
mod call_graph;
mod custom;
mod elf;
mod error;

mod flow;
mod found;
#[cfg(test)]
mod fuzzed;
mod inline;
mod leaving;
mod object_search;
mod object_table;
mod placement;
mod plan;
mod reentrant;
mod runtimes;
mod table;
mod usdt;

// Code that is shared with fuzz targets names the crate.
#[cfg(test)]
extern crate self as heapbpf_probes;

pub use allocators::Shape;
pub use custom::{CustomAllocator, CustomError, CustomFunction};
pub use elf::{Code, FileImage, Symbol};
pub use error::AttachError;
pub use heapbpf_audit::{Covered, FileKind, Missing, ProbeKind};
pub use inline::{InlineFile, InlineFunction, InlineSlot, defines, inline_functions, inline_functions_in};
pub use object_search::object_table;
pub use object_table::{Detour, NoObjectTable, ObjectTable};
pub use placement::{Arguments, KernelRules, Machine, NoOpLengths};
pub use plan::{AllocatorFile, EndSeen, Examination, PlannedSite, ReturnProbe, ReturnSite, examine, examine_avoiding};
pub use runtimes::Runtime;
pub use sampler_ebpf::abi::{FileRanges, ResultLocation, Site};
pub use table::{ANNOUNCED, ANNOUNCED_MMAP, BRK, MMAP, MREMAP, Table};
pub use usdt::announced;

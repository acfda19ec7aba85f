//! Unwinds native stacks by call frame information. Each stack says whether it is complete, and if not, why.
//!
//! The crate performs no I/O. The caller supplies what a walk needs:
//!
//! | Trait | Supplies |
//! |---|---|
//! | [`memory::Memory`] | words of the stack: from a copy ([`memory::StackMemory`]), a core file, a stopped process |
//! | [`mapping::Mappings`] | the executable mapping at an address |
//! | [`image::ModuleFiles`] | bytes and names of the mapped files |
//! | [`runtime::RuntimeCode`] | the frames of code that a language runtime made, if it is known |
//!
//! [`dwarf::Unwinder`] walks by call frame information, and by frame pointers where there is none. [`kernel_walk`]
//! converts the result of the kernel's own walk. Both produce a [`raw::RawStack`]: addresses with their module and file
//! offset, to be symbolized later. Files and stacks are hostile input: all work and memory is bounded, and nothing in
//! them makes a walk panic.
//!
//! Only stacks of the target architecture are unwound: x86-64 or arm64.
//!
//! ```
//! use std::collections::HashMap;
//! use std::sync::Arc;
//!
//! use heapbpf_unwind::dwarf::Unwinder;
//! use heapbpf_unwind::image::{Image, ModuleFiles};
//! use heapbpf_unwind::mapping::{Mapping, ModuleId};
//! use heapbpf_unwind::memory::{Memory, Missing};
//! use heapbpf_unwind::raw::{Completeness, Reason, SpaceView};
//! use heapbpf_unwind::{ProcessKey, Registers};
//!
//! /// Words of a stack, by address.
//! struct Words(HashMap<u64, u64>);
//!
//! impl Memory for Words {
//!     fn read(&mut self, address: u64) -> Result<u64, Missing> {
//!         self.0.get(&address).copied().ok_or(Missing::Elsewhere)
//!     }
//! }
//!
//! /// A program whose file is not available.
//! struct Program;
//!
//! impl ModuleFiles for Program {
//!     fn image(&mut self, _: ModuleId) -> Result<Arc<dyn Image>, String> {
//!         Err("the file was deleted".into())
//!     }
//!     fn path(&self, _: ModuleId) -> Arc<str> {
//!         "/usr/bin/program".into()
//!     }
//!     fn build_id(&self, _: ModuleId) -> Option<Vec<u8>> {
//!         None
//!     }
//!     fn is_anonymous(&self, _: ModuleId) -> bool {
//!         false
//!     }
//! }
//!
//! let code = Mapping { start: 0x40_0000, end: 0x40_8000, file_offset: 0x1000, module: ModuleId(0), since_ns: 0 };
//! let mappings = vec![code];
//! let space = SpaceView { key: ProcessKey::default(), generation: None, mappings: &mappings };
//! let registers = Registers { ip: 0x40_0123, sp: 0x7000, fp: 0x7010, lr: 0 };
//! // A frame record: the caller's frame pointer (0: the chain ends there), then the return address.
//! let mut memory = Words(HashMap::from([(0x7010, 0), (0x7018, 0x40_0456)]));
//!
//! let stack = Unwinder::default().unwind_in(&mut Program, &space, &registers, &[], &mut memory);
//!
//! // Frames are addresses inside of the calls, so that they can be symbolized: return addresses minus one.
//! let addresses: Vec<u64> = stack.frames.iter().map(|frame| frame.address).collect();
//! assert_eq!(addresses, [0x40_0122, 0x40_0455]);
//! assert_eq!(stack.frames[1].file_offset, 0x1455);
//! assert_eq!(stack.completeness, Completeness::Truncated(Reason::FramePointersEnd));
//! ```

#![forbid(unsafe_code)]

mod address_bits;
mod arch;
mod cache;
pub mod cfi;
pub mod dwarf;
#[cfg(test)]
mod fuzzed;
pub mod image;
pub mod kernel_walk;
pub mod mapping;
pub mod memory;
pub mod raw;
pub mod rule;
mod rules;
pub mod runtime;
mod state;
mod walk;

// Code shared with fuzz targets refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_unwind;

pub use address_bits::AddressBits;
pub use sampler_ebpf::abi::{InFlightCall, ProcessKey, Registers};

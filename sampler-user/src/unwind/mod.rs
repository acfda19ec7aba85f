//! From a sample's registers and stack copy to a raw stack: code addresses resolved to (module, file offset).
//!
//! [`dwarf::Unwinder`] walks copied stacks by the modules' call frame information, [`frame_pointer`] reads what the
//! kernel's own walk gave. Both yield a [`raw::RawStack`]; names are found later, in [`crate::symbols`].

pub mod cache;
pub mod cfi;
pub mod dwarf;
pub mod elf;
pub mod frame_pointer;
pub mod image;
pub mod memory;
pub mod own_process;
pub mod raw;
pub mod rule;
pub mod state;
#[cfg(test)]
pub(crate) mod tests;
pub mod trampoline;

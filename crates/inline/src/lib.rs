//! Inline hooks as data: the layout of what is mapped into a target, the relocation of displaced instructions, and the
//! plan of a patch.
//!
//! Nothing here touches a process. Bytes from a target's memory are hostile, and are checked before use.

#![forbid(unsafe_code)]

pub mod abi;
mod displaced;
mod error;
pub mod fault;
mod frame_rows;
#[cfg(test)]
mod fuzzed;
mod image;
pub mod noted;
mod plan;
pub mod read;
mod redirect;
mod stub;

// Code that is shared with fuzz targets names the crate.
#[cfg(test)]
extern crate self as heapbpf_inline;

pub use abi::{Code, Entries, FRAME_BYTES};
pub use error::{BuildError, ForeignBlob, Refusal};
pub use image::{Settings, site_offsets};
pub use plan::{Inputs, ObjectFunction, Plan, WantedFunction};
pub use redirect::{Jumps, Patch, Text, merged, reaches};

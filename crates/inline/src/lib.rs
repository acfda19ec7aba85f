//! Inline hooks as data: the layout of what is mapped into a target, the relocation of displaced instructions, and the
//! plan of a patch.
//!
//! Nothing here touches a process. The bytes that a target's memory holds are hostile: they are checked before use.

#![forbid(unsafe_code)]

pub mod abi;
mod code;

pub use code::{Code, Entries, FRAME_BYTES};

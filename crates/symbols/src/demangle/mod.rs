//! Demangles C++ and Rust symbol names.
//!
//! Parsing a C++ name can take time that grows exponentially with its length: `cpp_demangle` 0.5.1 takes 26 s for
//! `_Z1fIX` and 26 times `dl`, at any limit of its recursion. A target can put any names in its symbol tables. So a
//! heapbpf that symbolizes demangles them in [another process](process), which the kernel ends when a name takes too
//! long.

mod demangler;
mod messages;
mod names;
pub mod process;

pub use self::demangler::{Demangler, Refused};
pub use self::names::{demangle, is_mapping_symbol};

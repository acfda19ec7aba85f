//! A circuit breaker: finds out whether a process died of its inline hooks.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use heapbpf_inline::fault::{Layout, Place, SIGBUS, SIGILL, SIGSEGV, SIGTRAP};
use sampler_ebpf::abi::CrashRecord;

use super::crashes::Builds;
use crate::files::FileKey;

/// Our code in a process. Kept as long as the code is there and for a while afterwards, because a process that dies can
/// no longer be examined.
#[derive(Debug)]
pub(super) struct Ours {
    /// Where the code is.
    pub(super) layout: Layout,
    /// Address of the allocator's code minus its offset in the file.
    pub(super) from_file: u64,
    /// Identifies the program and its allocator.
    pub(super) builds: Option<Builds>,
}

/// A process that died of its inline hooks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blamed {
    /// The allocator's file.
    pub key: FileKey,
    /// Where it died.
    pub place: Place,
    /// Identifies the program and its allocator. `None` if one of them has no build ID.
    pub builds: Option<Builds>,
}

impl Ours {
    /// Whether our code made a process die. `file` is the allocator's file.
    pub(super) fn blamed(&self, key: FileKey, crash: &CrashRecord, file: Option<&File>) -> Option<Blamed> {
        let offset = |address: u64| address.wrapping_sub(self.from_file);
        // At the end of the file there may be fewer bytes than the longest instruction has.
        let read = |address, bytes: &mut [u8]| file.is_some_and(|file| file.read_at(bytes, offset(address)).is_ok());
        let place = match self.layout.blamed(crash.signal, crash.ip, &read)? {
            Place::Page(address) => Place::Page(offset(address)),
            place @ Place::Code(_) => place,
        };
        Some(Blamed { key, place, builds: self.builds.clone() })
    }
}

/// The name of a signal.
#[must_use]
pub fn signal_name(signal: u32) -> &'static str {
    match signal {
        SIGILL => "SIGILL",
        SIGTRAP => "SIGTRAP",
        SIGBUS => "SIGBUS",
        SIGSEGV => "SIGSEGV",
        _ => "a signal",
    }
}

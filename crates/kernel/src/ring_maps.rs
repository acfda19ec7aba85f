//! Defines the rings and creates them. A ring cannot be resized, so a larger one takes its place in an array of maps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aya_obj::generated::bpf_map_type;
use sampler_ebpf::abi::{AllocationRecord, LARGEST_STACK_COPY, StackRecord, ring};

use super::{KernelError, sys};

/// Name of the array of rings.
pub const RINGS: &str = "RINGS";

/// One of the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingId {
    /// Small records: every sample, every free of a sample, every process event.
    Events = ring::EVENTS as isize,
    /// Stack copies.
    Stacks = ring::STACKS as isize,
    /// Execs of targets.
    Execs = ring::EXECS as isize,
}

impl RingId {
    /// Its name, in messages and for `bpftool map`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Events => "EVENTS",
            Self::Stacks => "STACKS",
            Self::Execs => "EXECS",
        }
    }

    /// Length of its longest record in bytes.
    pub const fn longest_bytes(self) -> u64 {
        match self {
            Self::Events => size_of::<AllocationRecord>() as u64,
            Self::Stacks => size_of::<StackRecord>() as u64 + LARGEST_STACK_COPY,
            Self::Execs => size_of::<u32>() as u64,
        }
    }
}

/// A ring that was created.
pub struct NewRing {
    /// The map.
    pub fd: OwnedFd,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The size of a ring if this many bytes are requested: a power of two, and whole pages, which are larger on some
/// machines.
pub fn whole_size(bytes: u64) -> u64 {
    bytes.max(procfs::page_size()).next_power_of_two()
}

/// Creates a ring.
///
/// # Errors
/// The kernel refuses: it has no memory for the ring, or this user lacks permission.
pub fn create(name: &str, bytes: u64) -> Result<NewRing, KernelError> {
    let bytes = whole_size(bytes);
    let spec = sys::MapSpec {
        name,
        map_type: bpf_map_type::BPF_MAP_TYPE_RINGBUF as u32,
        key_bytes: 0,
        value_bytes: 0,
        max_entries: u32::try_from(bytes).unwrap_or(u32::MAX),
        flags: 0,
        btf: None,
        inner: None,
    };
    let fd = sys::create_map(&spec).map_err(|source| KernelError::of_map(name, source))?;
    Ok(NewRing { fd, bytes })
}

/// Creates a ring, and makes the programs write to it from now on.
///
/// # Errors
/// As for [`create`].
pub fn put_new(rings: BorrowedFd<'_>, id: RingId, bytes: u64) -> Result<NewRing, KernelError> {
    let ring = create(id.name(), bytes)?;
    put(rings, id, ring.fd.as_fd())?;
    Ok(ring)
}

/// Makes the programs write to a ring. When this returns, none of them still writes to the previous one.
///
/// # Errors
/// The kernel's error.
pub fn put(rings: BorrowedFd<'_>, id: RingId, ring: BorrowedFd<'_>) -> Result<(), KernelError> {
    sys::set_inner_map(rings, id as u32, ring).map_err(|source| KernelError::of_map(id.name(), source))
}

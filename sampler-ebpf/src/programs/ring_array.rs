//! An array of ring buffers, declared by hand because the library has no type for it yet.

use core::ffi::c_void;
use core::ptr::{NonNull, from_ref, null};

use aya_ebpf::bindings::bpf_map_type::BPF_MAP_TYPE_ARRAY_OF_MAPS;
use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, BPF_RB_RING_SIZE};
use aya_ebpf::helpers::generated::{bpf_map_lookup_elem, bpf_ringbuf_query, bpf_ringbuf_reserve};

/// A map of `N` ring buffers. The loader reads the types of the fields from BTF; the fields hold no data.
#[repr(C)]
pub struct RingArray<const N: usize> {
    r#type: *const [i32; BPF_MAP_TYPE_ARRAY_OF_MAPS as usize],
    key: *const u32,
    value: *const u32,
    max_entries: *const [i32; N],
    map_flags: *const [i32; 0],
}

// SAFETY: the fields describe the map to the loader and are never read. The map itself is accessed only through
// helpers, which may be called on any CPU.
unsafe impl<const N: usize> Sync for RingArray<N> {}

impl<const N: usize> RingArray<N> {
    /// The map's definition.
    pub const fn new() -> Self {
        Self { r#type: null(), key: null(), value: null(), max_entries: null(), map_flags: null() }
    }

    /// Returns the ring at an index. The kernel keeps it until this run of the program ends, even if it is replaced.
    #[inline(always)]
    pub fn get(&self, index: u32) -> Option<Ring> {
        // SAFETY: the map is an array of maps, and the key is an index, as the helper expects. It returns null or a
        // map.
        let ring = unsafe { bpf_map_lookup_elem(from_ref(self).cast_mut().cast(), (&raw const index).cast()) };
        NonNull::new(ring).map(Ring)
    }
}

/// A ring buffer.
#[derive(Clone, Copy)]
pub struct Ring(NonNull<c_void>);

impl Ring {
    /// Reserves space, or returns null. It must be submitted or discarded: the verifier rejects a program that does
    /// neither.
    #[inline(always)]
    pub fn reserve(self, bytes: u64) -> *mut c_void {
        // SAFETY: the map is a ring, as the helper expects. The verifier rejects a size that is not a constant.
        unsafe { bpf_ringbuf_reserve(self.0.as_ptr(), bytes, 0) }
    }

    /// Its size, bytes.
    #[inline(always)]
    pub fn size(self) -> u64 {
        self.query(BPF_RB_RING_SIZE)
    }

    /// Bytes in it that the daemon has not read yet.
    #[inline(always)]
    pub fn fill(self) -> u64 {
        self.query(BPF_RB_AVAIL_DATA)
    }

    #[inline(always)]
    fn query(self, what: u32) -> u64 {
        // SAFETY: the map is a ring, as the helper expects.
        unsafe { bpf_ringbuf_query(self.0.as_ptr(), u64::from(what)) }
    }
}

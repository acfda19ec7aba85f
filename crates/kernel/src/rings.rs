//! The two ring buffers: small records of events, and stack copies.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Bytes, BytesMut};

use super::KernelError;
use super::loader::Loader;
use super::ring_maps::{self, NewRing, RINGS, RingId, RingMemory};

/// The reading end of one of the rings. A ring that has become too small is replaced by a larger one; the contents of
/// the old one are read first. Positions continue from the old ring to the new one.
pub struct Ring {
    id: RingId,
    rings: OwnedFd,
    /// The ring that is being read.
    current: RingMemory,
    /// The ring that records go to, if that is a different one. No program writes to `current` any more.
    next: Option<RingMemory>,
    /// Bytes that were read from the rings before `current`.
    passed_bytes: u64,
    slab: BytesMut,
    ends: Vec<usize>,
}

/// Bytes to copy out of a ring before the records are processed.
const SLAB_BYTES: usize = 1 << 20;

impl Ring {
    /// Opens the ring that is created with the maps. That is possible once.
    ///
    /// # Errors
    /// It cannot be created, or cannot be mapped into memory.
    pub fn open(loader: &Loader, id: RingId) -> Result<Self, KernelError> {
        let rings = loader.map(RINGS)?.try_clone_to_owned();
        Ok(Self {
            id,
            rings: rings.map_err(|source| KernelError::Read { what: "a descriptor of a ring", source })?,
            current: map(id, loader.take_first_ring(id)?)?,
            next: None,
            passed_bytes: 0,
            slab: BytesMut::new(),
            ends: Vec::new(),
        })
    }

    /// Replaces this ring with one of another size. Returns `false` if the previous ring has not been read completely
    /// yet; then try again later.
    ///
    /// # Errors
    /// The kernel has no memory for it, or the recording has no free descriptors. The ring stays as it is.
    pub fn resize(&mut self, bytes: u64) -> Result<bool, KernelError> {
        if self.next.is_some() && !self.give_back() {
            return Ok(false);
        }
        // Mapped first, because records arrive in the new ring at once.
        let memory = map(self.id, ring_maps::create(self.id.name(), bytes)?)?;
        ring_maps::put(self.rings.as_fd(), self.id, memory.as_fd())?;
        self.next = Some(memory);
        Ok(true)
    }

    /// Its name.
    pub const fn name(&self) -> &'static str {
        self.id.name()
    }

    /// Size in bytes of the ring that records go to.
    pub fn size_bytes(&self) -> u64 {
        self.written().size_bytes()
    }

    /// Bytes of unread records in the ring that records go to.
    pub fn fill_bytes(&self) -> u64 {
        let written = self.written();
        written.reserved_up_to().saturating_sub(written.read_up_to())
    }

    /// The producer position, in bytes since the first ring was created. Every record reserved before this call is
    /// below it.
    pub fn reserved_up_to(&self) -> u64 {
        let next = self.next.as_ref().map_or(0, RingMemory::reserved_up_to);
        self.passed_bytes + self.current.reserved_up_to() + next
    }

    /// The consumer position. Every record below it has been handed out.
    pub fn read_up_to(&self) -> u64 {
        self.passed_bytes + self.current.read_up_to()
    }

    /// Copies the available records, up to about one slab, and passes each to `each`. Returns the number of records: 0
    /// if the ring is empty or its next record is still being written. Each record is copied once. The slab's memory is
    /// reused once all records in it are dropped.
    pub fn drain(&mut self, mut each: impl FnMut(Bytes)) -> usize {
        self.ends.clear();
        while self.slab.len() < SLAB_BYTES {
            let (slab, ends) = (&mut self.slab, &mut self.ends);
            let copied = self.current.read(|record| {
                if ends.is_empty() {
                    slab.reserve(SLAB_BYTES);
                }
                slab.extend_from_slice(record);
                ends.push(slab.len());
            });
            if copied.is_none() && !self.give_back() {
                break;
            }
        }
        let mut records = self.slab.split().freeze();
        let mut start = 0;
        for end in &self.ends {
            each(records.split_to(end - start));
            start = *end;
        }
        self.ends.len()
    }

    /// Passes available records below the position `up_to` to `each`, at most `most` of them. They are read in place,
    /// so what `each` does not read is not touched. The space of each record is released after its call. Returns the
    /// number of records.
    pub fn visit(&mut self, up_to: u64, most: usize, mut each: impl FnMut(&[u8])) -> usize {
        let mut count = 0;
        while count < most && self.read_up_to() < up_to {
            if self.current.read(&mut each).is_some() {
                count += 1;
            } else if !self.give_back() {
                break;
            }
        }
        count
    }

    /// Releases the slab, which a large record may have enlarged.
    pub fn shrink(&mut self) {
        self.slab = BytesMut::new();
    }

    fn written(&self) -> &RingMemory {
        self.next.as_ref().unwrap_or(&self.current)
    }

    /// Switches to the ring that replaced this one and frees the memory of this one, if there is such a ring and this
    /// one has been read completely. Reading does that only when records arrive. Returns whether it switched.
    pub fn give_back(&mut self) -> bool {
        if !self.current.is_empty() {
            return false;
        }
        let Some(next) = self.next.take() else { return false };
        self.passed_bytes += self.current.read_up_to();
        self.current = next;
        true
    }
}

impl AsFd for Ring {
    /// The ring that records go to.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.written().as_fd()
    }
}

/// Maps a ring into memory.
pub(super) fn map(id: RingId, ring: NewRing) -> Result<RingMemory, KernelError> {
    RingMemory::map(ring.fd, ring.bytes, id.longest_bytes())
        .map_err(|source| KernelError::Read { what: "a ring's memory", source })
}

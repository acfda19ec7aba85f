//! The two ring buffers: small records of events, and stack copies.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Bytes, BytesMut};

use super::KernelError;
use super::loader::Loader;
use super::ring_maps::{self, NewRing, RINGS, RingId};
use super::ring_memory::RingMemory;

/// The reading end of one of the rings. A ring that has become too small is replaced by a larger one: what is in the old
/// one is read first. Positions count on from the old one to the new one.
pub struct Ring {
    id: RingId,
    rings: OwnedFd,
    /// The ring that is read.
    current: RingMemory,
    /// The ring that records go to, if that is another one. No program writes to `current` any more.
    next: Option<RingMemory>,
    /// Bytes that were read from the rings before `current`.
    passed_bytes: u64,
    slab: BytesMut,
    ends: Vec<usize>,
}

/// Bytes copied out of a ring before its space is released and the records are processed.
const SLAB_BYTES: usize = 1 << 20;

impl Ring {
    /// Opens the ring that was created with the maps.
    ///
    /// # Errors
    /// It cannot be mapped into memory.
    pub fn open(loader: &Loader, id: RingId) -> Result<Self, KernelError> {
        let copy = |fd: BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(|source| KernelError::Read { what: "a descriptor of a ring", source })
        };
        let first = loader.first_ring(id);
        Ok(Self {
            id,
            rings: copy(loader.map(RINGS)?)?,
            current: map(id, NewRing { fd: copy(first.fd.as_fd())?, bytes: first.bytes })?,
            next: None,
            passed_bytes: 0,
            slab: BytesMut::new(),
            ends: Vec::new(),
        })
    }

    /// Puts a ring of another size in place of this one. Returns `false` if the one before has not been read up yet: then
    /// this has to be tried again.
    ///
    /// # Errors
    /// The kernel has no memory for it, or the recording's descriptors are used up. The ring stays as it is.
    pub fn resize(&mut self, bytes: u64) -> Result<bool, KernelError> {
        if self.next.is_some() && !self.turn() {
            return Ok(false);
        }
        // Mapped first, because records are in the new ring at once.
        let memory = map(self.id, ring_maps::create(self.id.name(), bytes)?)?;
        ring_maps::put(self.rings.as_fd(), self.id, memory.as_fd())?;
        self.next = Some(memory);
        Ok(true)
    }

    /// Gives back the memory of a ring that was replaced, once it has been read up. While no records come, nothing else does.
    pub fn give_back(&mut self) {
        self.turn();
    }

    /// Its name.
    pub const fn name(&self) -> &'static str {
        self.id.name()
    }

    /// Size of the ring that records go to, bytes.
    pub fn size_bytes(&self) -> u64 {
        self.written().size_bytes()
    }

    /// Bytes of records in the ring that records go to that have not been read.
    pub fn fill_bytes(&self) -> u64 {
        let written = self.written();
        written.reserved_up_to().saturating_sub(written.read_up_to())
    }

    /// The producer position, in bytes since the first ring was created. Every record reserved before this call is below
    /// it.
    pub fn reserved_up_to(&self) -> u64 {
        let next = self.next.as_ref().map_or(0, RingMemory::reserved_up_to);
        self.passed_bytes + self.current.reserved_up_to() + next
    }

    /// The consumer position. Every record below it was handed out.
    pub fn read_up_to(&self) -> u64 {
        self.passed_bytes + self.current.read_up_to()
    }

    /// Copies the available records, up to about one slab, and passes each to `each`. Returns the number of records:
    /// 0 if the ring is empty or its next record is still being written. Each record is copied once. The slab's
    /// memory is reused once all records in it are dropped.
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
            if copied.is_none() && !self.turn() {
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

    /// Passes available records below the position `up_to` to `each`, at most `most` of them. They are read in place: what
    /// `each` does not look at is not touched. The space of each is released after its call. Returns their number.
    pub fn visit(&mut self, up_to: u64, most: usize, mut each: impl FnMut(&[u8])) -> usize {
        let mut count = 0;
        while count < most && self.read_up_to() < up_to {
            if self.current.read(&mut each).is_some() {
                count += 1;
            } else if !self.turn() {
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

    /// Goes over to the ring that took the place of this one, if there is one and this one has been read up.
    fn turn(&mut self) -> bool {
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

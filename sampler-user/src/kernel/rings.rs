//! The two ring buffers: small records of events, and stack copies.

use std::os::fd::{AsFd, BorrowedFd};

use aya::maps::{MapData, RingBuf};
use bytes::{Bytes, BytesMut};

use super::KernelError;
use super::loader::Loader;

/// A ring buffer's reading end.
pub struct Ring {
    ring: RingBuf<MapData>,
    slab: BytesMut,
    ends: Vec<usize>,
}

/// Bytes copied out of a ring in one go, before the ring's room is given back and the records are worked on.
const SLAB_BYTES: usize = 1 << 20;

impl Ring {
    /// Opens a ring by the name of its map.
    ///
    /// # Errors
    /// There is no such map, or it cannot be mapped into memory.
    pub fn open(loader: &Loader, name: &'static str) -> Result<Self, KernelError> {
        let ring = RingBuf::try_from(loader.typed_map(name)?)
            .map_err(|error| KernelError::Object(format!("{name}: {error}")))?;
        Ok(Self { ring, slab: BytesMut::new(), ends: Vec::with_capacity(SLAB_BYTES / 64) })
    }

    /// Copies what is there, up to a slab's worth, and hands out each record. Returns the number of records: 0 when the
    /// ring is empty. One copy per record; the slab is used again once all records of it are gone.
    pub fn drain(&mut self, mut each: impl FnMut(Bytes)) -> usize {
        self.ends.clear();
        while self.slab.len() < SLAB_BYTES {
            let Some(record) = self.ring.next() else { break };
            if self.ends.is_empty() {
                self.slab.reserve(SLAB_BYTES);
            }
            self.slab.extend_from_slice(&record);
            self.ends.push(self.slab.len());
        }
        let mut records = self.slab.split().freeze();
        let mut start = 0;
        for end in &self.ends {
            each(records.split_to(end - start));
            start = *end;
        }
        self.ends.len()
    }

    /// Gives the slab back, which may have grown with a large record.
    pub fn shrink(&mut self) {
        self.slab = BytesMut::new();
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl std::os::fd::AsRawFd for Ring {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        std::os::fd::AsRawFd::as_raw_fd(&self.as_fd())
    }
}

//! Tests of the reader on well-formed and on hostile files.

mod build;
mod hostile;
mod plain;

use std::io;
use std::sync::Mutex;

use crate::Image;

/// An image that records its reads, and can refuse reads from a given offset on.
struct Watched {
    bytes: Vec<u8>,
    /// Its length; zeros follow `bytes`.
    length: u64,
    refused_from: u64,
    reads: Mutex<Vec<(u64, usize)>>,
}

impl Watched {
    fn new(bytes: Vec<u8>, length: u64) -> Self {
        Self { bytes, length, refused_from: u64::MAX, reads: Mutex::default() }
    }

    fn read_bytes(&self) -> u64 {
        self.reads.lock().unwrap().iter().map(|(_, bytes)| *bytes as u64).sum()
    }
}

impl Image for Watched {
    fn length_bytes(&self) -> io::Result<u64> {
        Ok(self.length)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.reads.lock().unwrap().push((offset, buffer.len()));
        let end = offset + buffer.len() as u64;
        if end > self.refused_from {
            return Err(io::Error::other("the disk is on fire"));
        }
        if end > self.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buffer.fill(0);
        let there = self.bytes.get(offset as usize..).unwrap_or_default();
        let length = there.len().min(buffer.len());
        buffer[..length].copy_from_slice(&there[..length]);
        Ok(())
    }
}

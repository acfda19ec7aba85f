//! The memory of a process as made up by a fuzzer: bytes at addresses. Pages without bytes do not exist.

use std::collections::HashMap;

const PAGE: u64 = 0x1000;
/// Maximum number of pages, so that a short input cannot request much memory.
const MOST_PAGES: usize = 1 << 10;
/// Bit in a piece's length: a single byte follows, which is repeated.
const REPEATED: u16 = 1 << 15;

/// Pages of memory.
#[derive(Default)]
pub struct Pieces(HashMap<u64, Vec<u8>>);

impl Pieces {
    /// Memory from pieces: an address (8 bytes), a length (2 bytes), and the bytes.
    pub fn parse(mut data: &[u8]) -> Self {
        let mut found = Self::default();
        while let Some((head, rest)) = data.split_first_chunk::<10>() {
            let address = u64::from_le_bytes(head[..8].try_into().expect("eight bytes"));
            let length = u16::from_le_bytes([head[8], head[9]]);
            let count = usize::from(length & !REPEATED);
            let taken = if length & REPEATED != 0 { 1 } else { count.min(rest.len()) };
            let Some((bytes, after)) = rest.split_at_checked(taken) else { break };
            match bytes {
                [byte] => found.put(address, &vec![*byte; count]),
                bytes => found.put(address, bytes),
            }
            data = after;
        }
        found
    }

    fn put(&mut self, address: u64, bytes: &[u8]) {
        let Some(end) = address.checked_add(bytes.len() as u64) else { return };
        let mut at = address;
        while at < end {
            let (page, offset) = (at / PAGE, (at % PAGE) as usize);
            let count = (PAGE - at % PAGE).min(end - at) as usize;
            if !self.0.contains_key(&page) && self.0.len() >= MOST_PAGES {
                return;
            }
            let page = self.0.entry(page).or_insert_with(|| vec![0; PAGE as usize]);
            let from = (at - address) as usize;
            page[offset..offset + count].copy_from_slice(&bytes[from..from + count]);
            at += count as u64;
        }
    }

    /// Fills a buffer. Returns whether all of it exists.
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let mut done = 0;
        while done < buffer.len() {
            let Some(at) = address.checked_add(done as u64) else { return false };
            let Some(page) = self.0.get(&(at / PAGE)) else { return false };
            let bytes = &page[(at % PAGE) as usize..];
            let count = bytes.len().min(buffer.len() - done);
            buffer[done..done + count].copy_from_slice(&bytes[..count]);
            done += count;
        }
        true
    }

    /// The word at an address.
    #[allow(dead_code, reason = "not every target reads words itself")]
    pub fn word(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes).then(|| u64::from_le_bytes(bytes))
    }
}

/// Adds a piece to an input.
#[allow(dead_code, reason = "for those who make inputs")]
pub fn piece(input: &mut Vec<u8>, address: u64, bytes: &[u8]) {
    for (part, at) in bytes.chunks(1 << 12).zip((0..).step_by(1 << 12)) {
        let is_repeated = part.len() > 1 && part.iter().all(|byte| *byte == part[0]);
        let (length, part) =
            if is_repeated { (part.len() as u16 | REPEATED, &part[..1]) } else { (part.len() as u16, part) };
        input.extend((address + at).to_le_bytes());
        input.extend(length.to_le_bytes());
        input.extend(part);
    }
}

//! Restartable sequences (rseq(2)): where a thread that made calls for us goes on if it was stopped in the middle of
//! one.
//!
//! The kernel checks this when a thread goes on: a thread that was interrupted in a sequence continues at the
//! sequence's abort handler. A thread that makes calls for us first goes on elsewhere, so the kernel sees no sequence
//! and forgets it. Afterwards the thread would finish the sequence with what it had read before. So we direct it to the
//! handler as the kernel would (`kernel/rseq.c`).

use crate::sys::RseqArea;

/// Offset in a thread's area of the address of its sequence's descriptor (`struct rseq`).
const DESCRIPTOR_AT: u64 = 8;
/// The signature precedes the handler.
const SIGNATURE_BYTES: u64 = 4;

/// The kernel would not accept the thread's sequence.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Address of the descriptor of the thread's sequence, if the thread has announced one; it may have left the sequence
/// since.
pub(crate) fn descriptor(area: &RseqArea, read: impl Fn(u64, &mut [u8]) -> bool) -> Result<Option<u64>, Malformed> {
    let mut address = [0; 8];
    if !read(area.address.wrapping_add(DESCRIPTOR_AT), &mut address) {
        return Err(Malformed);
    }
    Ok(Some(u64::from_le_bytes(address)).filter(|address| *address != 0))
}

/// Where a thread that was stopped at `ip` has to go on; `None` if it is not in a sequence.
pub(crate) fn abort_address(
    area: &RseqArea,
    ip: u64,
    read: impl Fn(u64, &mut [u8]) -> bool,
) -> Result<Option<u64>, Malformed> {
    let Some(descriptor) = descriptor(area, &read)? else { return Ok(None) };
    // `struct rseq_cs` of version 0.
    let mut words = [[0; 8]; 4];
    if !read(descriptor, words.as_flattened_mut()) {
        return Err(Malformed);
    }
    let [version_and_flags, start, length, handler] = words.map(u64::from_le_bytes);
    let is_within = |address: u64| address.wrapping_sub(start) < length;
    if !is_within(ip) {
        return Ok(None);
    }
    let mut signature = [0; SIGNATURE_BYTES as usize];
    let is_sound = version_and_flags == 0
        && !is_within(handler)
        && start.checked_add(length).is_some()
        && read(handler.wrapping_sub(SIGNATURE_BYTES), &mut signature)
        && u32::from_le_bytes(signature) == area.signature;
    if is_sound { Ok(Some(handler)) } else { Err(Malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AREA: RseqArea = RseqArea { address: 0x1000, signature: 0x5305_3053 };

    /// A process with an area, a descriptor, and a handler at 0x5004.
    struct Memory {
        descriptor: u64,
        sequence: [u64; 4],
        signature: u32,
    }

    const SOUND: Memory = Memory { descriptor: 0x2000, sequence: [0, 0x4000, 0x20, 0x5004], signature: AREA.signature };

    impl Memory {
        fn abort_address(&self, ip: u64) -> Result<Option<u64>, Malformed> {
            super::abort_address(&AREA, ip, |address, to| {
                let from = match address {
                    0x1008 => self.descriptor.to_le_bytes().to_vec(),
                    0x2000 => self.sequence.iter().flat_map(|word| word.to_le_bytes()).collect(),
                    0x5000 => self.signature.to_le_bytes().to_vec(),
                    _ => return false,
                };
                to.copy_from_slice(&from);
                true
            })
        }
    }

    #[test]
    fn a_thread_in_a_sequence_goes_on_at_its_handler() {
        for (ip, handler) in [(0x3fff, None), (0x4000, Some(0x5004)), (0x401f, Some(0x5004)), (0x4020, None)] {
            assert_eq!(SOUND.abort_address(ip), Ok(handler), "{ip:#x}");
        }
        assert_eq!(Memory { descriptor: 0, ..SOUND }.abort_address(0x4000), Ok(None));
    }

    #[test]
    fn what_the_kernel_would_not_accept_is_refused() {
        for memory in [
            Memory { descriptor: 0x9000, ..SOUND },
            Memory { signature: 1, ..SOUND },
            Memory { sequence: [1, 0x4000, 0x20, 0x5004], ..SOUND },
            Memory { sequence: [1 << 32, 0x4000, 0x20, 0x5004], ..SOUND },
            Memory { sequence: [0, 0x4000, 0x2000, 0x5004], ..SOUND },
            Memory { sequence: [0, 0x4000, 0x20, 0x6000], ..SOUND },
            Memory { sequence: [0, 0x4000, u64::MAX - 0x20, 0x1004], ..SOUND },
        ] {
            assert_eq!(memory.abort_address(0x4010), Err(Malformed), "{:x?}", memory.sequence);
        }
    }

    #[test]
    fn a_descriptor_that_is_not_the_threads_place_any_more_says_nothing() {
        // The kernel checks the position first, and does not check what it does not need.
        assert_eq!(Memory { signature: 1, ..SOUND }.abort_address(0x7000), Ok(None));
    }
}

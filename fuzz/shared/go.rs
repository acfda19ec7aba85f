//! A Go program's file and its memory, both controlled by the fuzzer.

use std::time::{Duration, Instant};

use heapbpf_go::{Heap, Memory, Moments, Program};

#[path = "memory.rs"]
pub mod memory;

use memory::Pieces;

impl Memory for Pieces {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.read(address, buffer)
    }
}

/// Maximum time for reading a heap.
const LONGEST: Duration = Duration::from_millis(200);

/// Checks an input: the process's offset from the addresses in its file, the length of the file (4 bytes), the file,
/// and memory.
pub fn check(data: &[u8]) {
    let Some((head, rest)) = data.split_first_chunk::<12>() else { return };
    let bias = u64::from_le_bytes(head[..8].try_into().expect("eight bytes"));
    let length = u32::from_le_bytes(head[8..].try_into().expect("four bytes")) as usize;
    let (file, rest) = rest.split_at(length.min(rest.len()));
    let file = file.to_vec();
    let Ok(Some(program)) = Program::find(&file) else { return };
    let _ = program.bias(bias, 0);
    let memory = Pieces::parse(rest);
    // The second way waits for data that changes while it is read, so it is used only if the first way succeeds.
    for moments in [Moments::One, Moments::OnePerStack] {
        let Ok(heap) = Heap::read(&program, bias, &memory, moments, Instant::now() + LONGEST) else { break };
        assert!(heap.rate > 0);
        for bucket in &heap.buckets {
            assert!(bucket.objects > 0 && bucket.size > 0 && bucket.objects.checked_mul(bucket.size).is_some());
            for address in &bucket.stack {
                let function = program.functions.at(&file, &heap.places, *address);
                assert!(function.is_none_or(|it| it.name.len() <= 4 * 4096 + 5));
            }
        }
    }
}

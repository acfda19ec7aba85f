//! The heap profile of a process.

use std::time::Instant;

use heapbpf_elf::Memory;

use crate::buckets::{self, Bucket, Moments};
use crate::functions::Places;
use crate::memory::{Window, words};
use crate::program::Program;
use crate::version::Unread;

/// Maximum number of bytes that are searched for the runtime's description of the program.
const MOST_SEARCHED_BYTES: u64 = 64 << 20;
/// Number of bytes per read while searching.
const PIECE_BYTES: u64 = 1 << 16;
/// Offset of `text` in `moduledata`.
const TEXT: u64 = 176;
/// Largest sampling rate that is accepted: the mean number of bytes between samples.
const MOST_RATE: u64 = 1 << 40;

/// The heap profile of a process: the objects in use among those that its runtime has sampled since it started, as of
/// the last published garbage collection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heap {
    /// `MemProfileRate`: mean number of bytes between samples. With 1, every object is sampled.
    pub rate: u64,
    /// Addresses needed to look up function names.
    pub places: Places,
    /// Sampled objects in use.
    pub buckets: Vec<Bucket>,
    /// How many moments they represent.
    pub moments: Moments,
}

impl Heap {
    /// Reads the heap profile of a process whose addresses differ from those in its file by `bias`. The process is not
    /// stopped.
    ///
    /// # Errors
    /// The reason why there is none. After [`Unread::Torn`], another attempt may succeed.
    pub fn read(
        program: &Program,
        bias: u64,
        memory: &dyn Memory,
        moments: Moments,
        deadline: Instant,
    ) -> Result<Self, Unread> {
        let variables = &program.variables;
        let at = |address: u64| address.wrapping_add(bias);
        let mut window = Window::new(memory);
        let rate = window.u64(at(variables.rate)).ok_or(Unread::Unreadable)?;
        if rate == 0 {
            let disabled = variables.disabled.and_then(|address| window.bytes(at(address), 1)?.first().copied());
            return Err(if disabled == Some(1) { Unread::LeftOut } else { Unread::Off });
        }
        if rate > MOST_RATE {
            return Err(if rate > i64::MAX as u64 { Unread::Off } else { Unread::Malformed("its rate") });
        }
        let head = window.u64(at(variables.buckets)).ok_or(Unread::Unreadable)?;
        let places = places(program, bias, memory).ok_or(Unread::Malformed("its description of the program"))?;
        let cycle_words = program.layout.cycle_words;
        let buckets = buckets::read(memory, (head, at(variables.cycle)), cycle_words, moments, deadline)?;
        Ok(Self { rate, places, buckets, moments })
    }
}

/// Finds the runtime's description of the program, which begins with the addresses of the function table and of its
/// names.
fn places(program: &Program, bias: u64, memory: &dyn Memory) -> Option<Places> {
    let functions = &program.functions;
    let table = functions.address.wrapping_add(bias);
    let names = table.wrapping_add(functions.names);
    let mut left = MOST_SEARCHED_BYTES;
    for &(start, bytes) in &program.variables.module {
        let (mut at, end) = (start.wrapping_add(bias) & !7, start.wrapping_add(bias).wrapping_add(bytes.min(left)));
        left -= bytes.min(left);
        while at < end {
            let mut piece = vec![0; usize::try_from(PIECE_BYTES.min(end - at)).ok()?];
            if memory.read(at, &mut piece) {
                for found in words(&piece).zip((at..).step_by(8)).filter(|(word, _)| *word == table) {
                    let mut window = Window::new(memory);
                    if window.u64(found.1.checked_add(8)?) == Some(names) {
                        let text = window.u64(found.1.checked_add(TEXT)?)?;
                        let gofunc = window.u64(found.1.checked_add(program.layout.gofunc)?)?;
                        return Some(Places { bias, text, gofunc });
                    }
                }
            }
            let Some(next) = at.checked_add(PIECE_BYTES) else { break };
            at = next;
        }
    }
    None
}

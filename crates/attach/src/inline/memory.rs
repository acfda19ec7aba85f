//! Reads the memory of a hooked process: its counts, and which files its loader has loaded, in load order. The target can
//! write anything there, so every step is bounded.
//!
//! Loaded files are found as debuggers do: the program's dynamic section leads to a list (`r_debug`, `link_map`).

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use heapbpf_inline::abi::{STATE, Totals};
use heapbpf_inline::read::{COUNTS_BYTES, Counts};
use libc::{AT_BASE, AT_PHDR, AT_PHNUM};
use zerocopy::FromBytes as _;

/// Opens the memory of a process.
pub fn open(pid: u32) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))
}

/// Reads the word at an address.
pub(crate) fn word_at(memory: &File, address: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    memory.read_exact_at(&mut bytes, address).map(|()| u64::from_ne_bytes(bytes))
}

thread_local! {
    /// What was read last. Hundreds of processes are read one after the other, some 132 KiB each.
    static STATE_BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The sums of everything that the hooks of an allocator count. `is_original`: the process was hooked itself, and did
/// not inherit the hooks.
///
/// # Errors
/// The memory cannot be read. `InvalidData`: whoever removed the hooks has emptied it, or its owner has written there.
pub fn counts(memory: &File, base: u64, is_original: bool) -> io::Result<Counts> {
    STATE_BYTES.with_borrow_mut(|state| {
        state.resize(COUNTS_BYTES, 0);
        memory.read_exact_at(state, base + STATE)?;
        let is_as_made = Totals::read_from_prefix(state).is_ok_and(|(totals, _)| totals.is_original == 1);
        if is_original && !is_as_made {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        Counts::of(state).map_err(io::Error::other)
    })
}

/// Reads a word of the target's memory.
pub(super) type Word<'a> = dyn Fn(u64) -> Option<u64> + 'a;

/// The value of `r_state` in `r_debug` that means that the list is complete.
const RT_CONSISTENT: u64 = 0;
const PT_DYNAMIC: u64 = 2;
const PT_PHDR: u64 = 6;
const DT_NULL: u64 = 0;
const DT_DEBUG: u64 = 21;
/// Size of a program header in bytes.
const HEADER_BYTES: u64 = 56;
/// Maximum number of program headers, of entries of a dynamic section, and of files to read.
const MOST: u64 = 4096;

/// Whether the dynamic loader of a process has loaded everything that the program needs. Also true if there is no
/// loader, or if the process's auxiliary vector or memory cannot be opened.
pub fn loader_is_done(pid: u32) -> bool {
    let (Ok(auxiliary), Ok(memory)) = (std::fs::read(format!("/proc/{pid}/auxv")), open(pid)) else { return true };
    let word = |at: u64| word_at(&memory, at).ok();
    // In the middle of an exec the vector does not exist yet.
    auxiliary.len() > 16 && is_done(&words(&auxiliary), &word)
}

fn is_done(vector: &[u64], word: &Word<'_>) -> bool {
    if value(vector, AT_BASE).unwrap_or(0) == 0 {
        return true;
    }
    let state = debug(vector, word).filter(|debug| *debug != 0).and_then(|debug| {
        let [first, state] = [8, 24].map(|offset| debug.checked_add(offset).and_then(word));
        Some((first?, state? & 0xffff_ffff))
    });
    state.is_some_and(|(first, state)| first != 0 && state == RT_CONSISTENT)
}

/// Addresses of the dynamic sections of all loaded files, in the order in which names are looked up in them. `None` if
/// the process has no such list.
pub(super) fn dynamic_sections(pid: u32, word: &Word<'_>) -> Option<Vec<u64>> {
    let auxiliary = std::fs::read(format!("/proc/{pid}/auxv")).ok()?;
    listed(&auxiliary, word)
}

fn listed(auxiliary: &[u8], word: &Word<'_>) -> Option<Vec<u64>> {
    let debug = debug(&words(auxiliary), word)?;
    // Fields: version, first entry of the list.
    let mut file = word(debug.checked_add(8)?)?;
    let mut sections = Vec::new();
    while file != 0 && (sections.len() as u64) < MOST {
        // Fields: load address, name, dynamic section, next.
        sections.push(word(file.checked_add(16)?)?);
        file = word(file.checked_add(24)?)?;
    }
    (!sections.is_empty()).then_some(sections)
}

fn words(auxiliary: &[u8]) -> Vec<u64> {
    auxiliary.chunks_exact(8).filter_map(|bytes| Some(u64::from_ne_bytes(bytes.try_into().ok()?))).collect()
}

fn value(vector: &[u64], key: u64) -> Option<u64> {
    vector.chunks_exact(2).find(|pair| pair[0] == key).map(|pair| pair[1])
}

/// Where the loader keeps its information for debuggers: the value of the program's `DT_DEBUG` entry.
fn debug(vector: &[u64], word: &Word<'_>) -> Option<u64> {
    let (headers, count) = (value(vector, AT_PHDR)?, value(vector, AT_PHNUM)?.min(MOST));
    // Fields: type and flags, offset, address, …
    let header = |kind: u64| {
        let mut all = (0..count).map(|at| headers.wrapping_add(at * HEADER_BYTES));
        let found = all.find(|at| word(*at).is_some_and(|word| word & 0xffff_ffff == kind))?;
        word(found.wrapping_add(16))
    };
    let bias = header(PT_PHDR).map_or(0, |address| headers.wrapping_sub(address));
    let dynamic = bias.wrapping_add(header(PT_DYNAMIC)?);
    let mut entries =
        (0..MOST).map(|at| dynamic.wrapping_add(at * 16)).map_while(|at| Some((word(at)?, word(at + 8)?)));
    entries.by_ref().take_while(|(tag, _)| *tag != DT_NULL).find(|(tag, _)| *tag == DT_DEBUG).map(|(_, debug)| debug)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn memory() -> HashMap<u64, u64> {
        let mut memory = HashMap::new();
        let mut put = |at: u64, words: &[u64]| {
            words.iter().zip(0..).for_each(|(word, index)| _ = memory.insert(at + index * 8, *word));
        };
        put(0x40, &[PT_PHDR | 4 << 32, 0x40, 0x40, 0, 0, 0, 0]);
        put(0x40 + HEADER_BYTES, &[PT_DYNAMIC | 6 << 32, 0, 0x1000, 0, 0, 0, 0]);
        put(0x1000, &[1, 7, DT_DEBUG, 0x2000, DT_NULL, 0]);
        put(0x2000, &[1, 0x3000]);
        put(0x3000, &[0, 0, 0x1000, 0x4000]);
        put(0x4000, &[0, 0, 0x5000, 0]);
        memory
    }

    fn sections(memory: &HashMap<u64, u64>) -> Option<Vec<u64>> {
        let auxiliary: Vec<u8> =
            [AT_PHDR, 0x40, AT_PHNUM, 2, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        listed(&auxiliary, &|at| memory.get(&at).copied())
    }

    #[test]
    fn files_are_in_the_loaders_order() {
        assert_eq!(sections(&memory()), Some(vec![0x1000, 0x5000]));
    }

    #[test]
    fn a_list_that_goes_round_or_leads_nowhere_ends() {
        let mut round = memory();
        round.insert(0x4018, 0x3000);
        assert_eq!(sections(&round).map(|all| all.len() as u64), Some(MOST));
        for gone in [0x40 + HEADER_BYTES, 0x1018, 0x2008, 0x4018] {
            let mut memory = memory();
            memory.remove(&gone);
            assert_eq!(sections(&memory), None, "{gone:#x}");
        }
        assert_eq!(listed(b"short", &|_| Some(u64::MAX)), None);
    }
}

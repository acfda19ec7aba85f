//! Redirects interpreters away from copies of their object allocator's functions.
//!
//! A compiler that optimizes with profiles lets callers run copies of these functions as long as the interpreter's
//! table of allocators contains their addresses. So the table gets other addresses: those of jumps to the same
//! functions. The jumps are written into unused bytes behind the interpreter's code, only in the memory of the process.
//! Whichever pointer a thread has read, old or new, it leads to the same function, now and after heapbpf has exited, so
//! nothing can go wrong at any moment. The pointers are restored at the end. The jumps stay, because their addresses
//! may have been saved somewhere.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use heapbpf_probes::{Detour, ObjectTable, Runtime, object_table};
use heapbpf_remote::{Error, Target, Word};

use crate::inline::memory::word_at;
use crate::inline::{self, Refused, forbidden};
use crate::stop_limit;

/// Bytes per word.
const WORD_BYTES: u64 = 8;
/// Maximum number of bytes of an interpreter's variables to search. Python 3.13 has one and a half million.
const MOST_DATA_BYTES: u64 = 64 << 20;
/// Maximum number of tables to change. There are two, plus copies made by debug hooks and by tracemalloc.
const MOST_TABLES: usize = 12;

/// Where an interpreter's table points in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leads {
    /// To the functions of the object allocator.
    There,
    /// To our jumps.
    Around,
    /// To the functions that call malloc (`PYTHONMALLOC=malloc`).
    ToMalloc,
    /// To other functions of the interpreter, such as debug hooks and tracemalloc. These call the functions through a
    /// pointer of their own.
    ToWrappers,
    /// Out of the interpreter.
    Elsewhere,
    /// Nowhere yet: the loader has not filled in the table.
    Nowhere,
}

impl Leads {
    /// Why objects of the interpreter are not counted. `None` if they can be.
    pub const fn why_not(self) -> Option<&'static str> {
        match self {
            Self::There | Self::Around | Self::ToWrappers => None,
            Self::ToMalloc => Some("its interpreter calls malloc for each, which counts them"),
            Self::Elsewhere => Some("its table of allocators leads to functions of another file"),
            Self::Nowhere => Some("its table of allocators is empty"),
        }
    }
}

/// Checks whether objects of the Python interpreter in a file would be counted in a process that is hooked inline.
/// Changes nothing in the process. `pid` is `None` for a program that is not running yet.
///
/// # Errors
/// The reason why they would not be counted.
pub fn check_objects(pid: Option<u32>, (path, file): (&str, &File)) -> Result<(), String> {
    let table = object_table(file, path).ok_or_else(|| Runtime::Python.missing().why)?;
    let table = table.map_err(|why| format!("{path}: {why}"))?;
    table.detours().ok_or_else(|| NotLed::NoSpace.to_string())?;
    let Some(pid) = pid else { return Ok(()) };
    let bias = inline::bias(pid, file).map_err(|error| error.to_string())?;
    let leads = Detours::look(pid, &table, bias).map_err(|error| NotLed::from(error).to_string())?;
    leads.why_not().map_or(Ok(()), |why| Err(why.to_owned()))
}

/// Why an interpreter is not redirected.
#[derive(Debug, thiserror::Error)]
pub enum NotLed {
    /// Its memory cannot be read.
    #[error("its memory cannot be read: {0}")]
    Unread(#[from] std::io::Error),
    /// There is no space for the jumps.
    #[error("there are no unused bytes behind its code")]
    NoSpace,
    /// A rule forbids writing into the process.
    #[error(transparent)]
    Forbidden(#[from] Box<Refused>),
    /// The process cannot be stopped, or the kernel refuses.
    #[error(transparent)]
    Stop(#[from] Error),
}

/// The interpreters that are redirected.
#[derive(Debug, Default)]
pub struct Detours {
    /// Pointers to restore, by process.
    made: HashMap<u32, Vec<Word>>,
}

impl Detours {
    /// Finds out where an interpreter's table points in a process. `bias` is the address in the process minus the
    /// address in the file.
    ///
    /// # Errors
    /// Its memory cannot be read.
    pub fn look(pid: u32, table: &ObjectTable, bias: u64) -> Result<Leads, std::io::Error> {
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        let first = table.domains.first().map_or(0, |domain| domain.wrapping_add(bias));
        let word = word_at(&memory, first)?;
        let found = word.wrapping_sub(bias);
        let around = table.detours().map(|detours| detours[0].address);
        Ok(match found {
            _ if found == table.functions[0] => Leads::There,
            _ if Some(found) == around => Leads::Around,
            _ if table.raw.is_some_and(|raw| raw[0] == found) => Leads::ToMalloc,
            _ if table.code.iter().any(|code| code.contains(&found)) => Leads::ToWrappers,
            // The value that the linker has written, or zero.
            _ if word == 0 || word == table.functions[0] => Leads::Nowhere,
            _ => Leads::Elsewhere,
        })
    }

    /// Like [`Self::lead`], but does nothing if no table points to the functions themselves.
    ///
    /// # Errors
    /// [`NotLed`]. The process continues as before.
    pub fn lead_if_there(&mut self, pid: u32, table: &ObjectTable, bias: u64) -> Result<(), NotLed> {
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        if tables(&memory, table, bias)?.is_empty() { Ok(()) } else { self.lead(pid, table, bias) }
    }

    /// Redirects the interpreter of a process away from the copies.
    ///
    /// # Errors
    /// [`NotLed`]. The process continues as before.
    pub fn lead(&mut self, pid: u32, table: &ObjectTable, bias: u64) -> Result<(), NotLed> {
        forbidden::check(pid).map_err(Box::new)?;
        let detours = table.detours().ok_or(NotLed::NoSpace)?;
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        let mut words = Vec::new();
        for detour in detours {
            let (address, code) = (detour.address.wrapping_add(bias), u64::from_le_bytes(Detour::CODE));
            let (before, to) = (word_at(&memory, address)?, detour.word().wrapping_add(bias));
            // A jump that already exists may lead to our hook code.
            if before != code {
                words.push(word(to, word_at(&memory, to)?, detour.function.wrapping_add(bias)));
                words.push(word(address, before, code));
            }
        }
        let mut pointers = Vec::new();
        for first in tables(&memory, table, bias)? {
            for (detour, at) in detours.iter().zip(0..) {
                let address = first.wrapping_add(at * WORD_BYTES);
                let [function, to] = [detour.function, detour.address].map(|at| at.wrapping_add(bias));
                pointers.push(word(address, function, to));
            }
        }
        words.extend(&pointers);
        let target = Target::look(pid).map_err(Error::from)?;
        let stopped = target.write_words(&words, stop_limit())?;
        log::info!("process {pid}: calls of its object allocator are redirected, stopped for {:?}", stopped.time);
        let made = self.made.entry(pid).or_default();
        made.retain(|known| pointers.iter().all(|new| new.address != known.address));
        made.extend(pointers.into_iter().map(|it| word(it.address, it.after, it.before)));
        Ok(())
    }

    /// Copies the state of a parent to its child, which has a copy of the parent's memory.
    pub fn inherit(&mut self, parent: u32, child: u32) {
        if let Some(made) = self.made.get(&parent).cloned() {
            self.made.insert(child, made);
        }
    }

    /// Forgets a process that has exited or runs another program.
    pub fn forget(&mut self, pid: u32) {
        self.made.remove(&pid);
    }

    /// Restores all pointers.
    pub fn release_all(&mut self) {
        for (pid, mut pointers) in self.made.drain() {
            // The interpreter may have changed some of them itself.
            let memory = File::open(format!("/proc/{pid}/mem"));
            let word_of = |pointer: &Word| word_at(memory.as_ref().ok()?, pointer.address).ok();
            pointers.retain(|pointer| word_of(pointer) == Some(pointer.before));
            let put_back =
                Target::look(pid).map_err(Error::from).and_then(|it| it.write_words(&pointers, stop_limit()));
            if let Err(error) = put_back {
                log::debug!("the table of allocators of process {pid} stays, which does no harm: {error}");
            }
        }
    }
}

impl Drop for Detours {
    fn drop(&mut self) {
        self.release_all();
    }
}

/// Addresses of the tables in the interpreter's data that point to the functions.
fn tables(memory: &File, table: &ObjectTable, bias: u64) -> std::io::Result<Vec<u64>> {
    let mut found = Vec::new();
    for range in &table.data {
        let start = range.start.next_multiple_of(WORD_BYTES);
        let bytes = range.end.saturating_sub(start).min(MOST_DATA_BYTES);
        let mut data = vec![0; bytes as usize];
        memory.read_exact_at(&mut data, start.wrapping_add(bias))?;
        let words: Vec<u64> =
            data.chunks_exact(8).filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?))).collect();
        found.extend(table.pointers_in(&words, bias).map(|at| start.wrapping_add(bias) + at as u64 * WORD_BYTES));
    }
    found.truncate(MOST_TABLES);
    Ok(found)
}

const fn word(address: u64, before: u64, after: u64) -> Word {
    Word { address, before, after }
}

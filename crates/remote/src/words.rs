//! Changes words of a process's memory while it is stopped: pointers in its data, or code that nothing runs yet.

use std::time::Duration;

use crate::error::{Busy, Error};
use crate::failure::Failure;
use crate::outcome::{Stopped, Word};
use crate::run::stopped;
use crate::sys;
use crate::target::Target;

/// Most words that are written in one stop.
const MOST_WORDS: usize = 64;

impl Target {
    /// Stops the process and writes words of its memory, each only where the word before, or the new one already, is found: all
    /// of them, or none. Also where the process itself may not write. Whether any was written.
    ///
    /// Threads may be anywhere: whatever a thread has read before must go well with what it reads afterwards.
    ///
    /// # Errors
    /// If it cannot be stopped, its memory is not as expected ([`Busy::Changed`]), or the kernel refuses.
    pub fn write_words(&self, words: &[Word], limit: Duration) -> Result<Stopped<bool>, Error> {
        let (target, words) = (self.copy()?, words.to_vec());
        let pages = words.iter().map(|word| word.address..word.address + 8).collect();
        stopped(self, limit, pages, move |stop| {
            stop.stop_all()?;
            if !target.is_same_program() || words.len() > MOST_WORDS {
                return Err(Failure::Busy(Busy::Changed));
            }
            let tid = stop.stopped_threads().next().ok_or(Failure::Ended)?;
            let mut wanted = Vec::new();
            for word in &words {
                match read(&target, word.address)? {
                    found if found == word.after => {}
                    found if found == word.before => wanted.push(word),
                    _ => return Err(Failure::Busy(Busy::Changed)),
                }
            }
            for (at, word) in wanted.iter().enumerate() {
                if let Err(source) = sys::poke(tid, word.address, word.after.to_le_bytes()) {
                    for word in &wanted[..at] {
                        let _ = sys::poke(tid, word.address, word.before.to_le_bytes());
                    }
                    return Err(Failure::Trace("writing a word of its memory", source));
                }
            }
            Ok(!wanted.is_empty())
        })
    }
}

fn read(target: &Target, address: u64) -> Result<u64, Failure> {
    let mut bytes = [0; 8];
    let is_held = target.memory.read(address, &mut bytes) && target.memory.may_write(&(address..address + 8));
    if is_held { Ok(u64::from_le_bytes(bytes)) } else { Err(Failure::Busy(Busy::Changed)) }
}

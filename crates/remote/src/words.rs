//! Changes words of a process's memory while it is stopped: pointers in its data, or code that nothing runs yet.

use crate::error::Busy;
use crate::failure::Failure;
use crate::outcome::Word;
use crate::stop::Stop;
use crate::sys;
use crate::target::Target;

/// Most words that are written in one stop.
const MOST_WORDS: usize = 64;

/// Writes all of the words, or none. Returns whether any was written.
pub(crate) fn write(target: &Target, words: &[Word], stop: &mut Stop) -> Result<bool, Failure> {
    stop.stop_all()?;
    if !target.is_same_program() || words.len() > MOST_WORDS {
        return Err(Failure::Busy(Busy::Changed));
    }
    let tid = stop.stopped_threads().next().ok_or(Failure::Ended)?;
    let mut wanted = Vec::new();
    for word in words {
        match read(target, word.address)? {
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
}

fn read(target: &Target, address: u64) -> Result<u64, Failure> {
    let mut bytes = [0; 8];
    let is_held = target.memory.read(address, &mut bytes) && target.memory.may_write(&(address..address + 8));
    if is_held { Ok(u64::from_le_bytes(bytes)) } else { Err(Failure::Busy(Busy::Changed)) }
}

//! Removes from a stopped process what was found in it, and changes words of its memory: pointers in its data, or code
//! that nothing runs yet.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use crate::error::{Busy, Failure};
use crate::found::FoundBlob;
use crate::inject::{close, leave_spare, put_back, unmap, write};
use crate::maps::Maps;
use crate::plan::{Kept, Write, writes};
use crate::probes::{Spare, advise};
use crate::remote::Remote;
use crate::stop::Stop;
use crate::sys::{self, Registers};
use crate::target::Target;
use crate::work::{FileId, Word};

/// Removes the jumps to a blob. The blob stays mapped, inert.
pub(crate) fn remove(target: &Target, found: &FoundBlob, emptied: &Range<u64>, stop: &mut Stop) -> Result<(), Failure> {
    // An injector closes the memfd as its last step before the first jump. Looking through all descriptors may take
    // longer than the stop may last.
    let left_open = target.descriptors_of(found);
    stop.stop_all()?;
    let is_as_found = if left_open.is_empty() { is_there(stop.pid, found) } else { !has_changed(stop.pid, found) };
    if !target.is_same_program() || !is_as_found {
        return Err(Failure::Busy(Busy::Changed));
    }
    let restored = found
        .pages
        .iter()
        .map(|kept| original_code(target, stop, found, *kept))
        .collect::<Result<Vec<_>, _>>()?
        .concat();
    let is_awkward = |tid, _: &Registers| target.may_be_filtered(tid);
    let mut remote = match Remote::begin(stop, target, is_awkward) {
        // The process has confined itself since it was hooked. The jumps can be removed without its help.
        Err(Failure::Refused(_)) if found.is_hooked() => {
            let tid = stop.stopped_threads().next().ok_or(Failure::Ended)?;
            return write(tid, &restored);
        }
        remote => remote?,
    };
    let result = (|| {
        write(remote.tid(), &restored)?;
        for kept in &found.pages {
            put_back(&mut remote, *kept)?;
        }
        for kept in &found.put_back {
            Spare::found(&remote, *kept).renew(&mut remote)?;
            leave_spare(&mut remote, *kept)?;
        }
        // A killed injector left these open.
        for fd in left_open.iter().filter(|fd| target.is_descriptor_of(found, **fd)) {
            close(&mut remote, *fd)?;
        }
        // If the text is not mapped, nothing has ever led to the blob.
        if found.text.is_none() && !found.is_hooked() && found.is_mapped {
            return unmap(&mut remote, &found.range);
        }
        let data = found.data.as_ref().map_or(0..0, |data| {
            let at = |offset: u64| found.range.start.saturating_add(offset).clamp(data.start, data.end);
            at(emptied.start)..at(emptied.end)
        });
        if !data.is_empty() {
            // Locked memory keeps its content.
            advise(&mut remote, data.start, data.end - data.start, libc::MADV_DONTNEED)?;
        }
        Ok(())
    })();
    remote.end(stop).and(result)
}

/// Whether a blob that no injector is still mapping is where it was found. This does not read all mappings of the
/// process: if there are hundreds of thousands, that takes longer than the stop may last. Pages that were not replaced
/// may be by now, through the last call of a killed injector. Then their spare place has the only copy of the original
/// ones.
fn is_there(pid: i32, found: &FoundBlob) -> bool {
    let is_of_blob = |range: &Range<u64>| FileId::of(pid, range).is_some_and(|file| file.inode == found.inode);
    let is_replaced = |kept: &Kept| is_of_blob(&(kept.start..kept.start + kept.bytes));
    found.text.iter().all(is_of_blob)
        && found.replaced().all(|range| is_of_blob(&range))
        && !found.put_back.iter().any(is_replaced)
}

/// Whether a blob has changed since it was found: a thread may have finished the last call of a killed injector since.
fn has_changed(pid: i32, found: &FoundBlob) -> bool {
    let maps = File::open(format!("/proc/{pid}/maps")).and_then(|file| Maps::read(file, 0));
    let Ok(maps) = maps else { return true };
    let now = crate::found::find(&maps).into_iter().find(|now| now.range == found.range && now.inode == found.inode);
    found.is_mapped != now.is_some() || now.is_some_and(|now| now.pages != found.pages || now.text != found.text)
}

/// What to write over the jumps in replaced pages. The original code comes from the memfd.
fn original_code(target: &Target, stop: &Stop, found: &FoundBlob, kept: Kept) -> Result<Vec<Write>, Failure> {
    let Kept { start, spare, bytes, .. } = kept;
    let changed = |_| Failure::Busy(Busy::Changed);
    stop.check_time(Busy::Late)?;
    let file = File::open(format!("/proc/{}/map_files/{:x}-{:x}", stop.pid, start, start + bytes)).map_err(changed)?;
    if file.metadata().map_err(changed)?.ino() != found.inode {
        return Err(Failure::Busy(Busy::Changed));
    }
    let [mut original, mut edited, mut memory] = [0; 3].map(|zero| vec![zero; bytes as usize]);
    let offset = spare - found.range.start;
    file.read_exact_at(&mut original, offset).map_err(changed)?;
    file.read_exact_at(&mut edited, found.range.end - found.range.start + offset).map_err(changed)?;
    if !target.memory.read(start, &mut memory) {
        return Err(Failure::Busy(Busy::Changed));
    }
    let is_foreign = |at: &usize| memory[*at] != original[*at] && memory[*at] != edited[*at];
    match (0..memory.len()).find(is_foreign) {
        Some(at) => Err(Failure::Patched(start + at as u64)),
        None => Ok(writes(start, &memory, &original)),
    }
}

/// Most words that are written in one stop.
const MOST_WORDS: usize = 64;

/// Writes all of the words, or none. Returns whether any was written.
pub(crate) fn write_words(target: &Target, words: &[Word], stop: &mut Stop) -> Result<bool, Failure> {
    stop.stop_all()?;
    if !target.is_same_program() || words.len() > MOST_WORDS {
        return Err(Failure::Busy(Busy::Changed));
    }
    let tid = stop.stopped_threads().next().ok_or(Failure::Ended)?;
    let mut wanted = Vec::new();
    for word in words {
        match word_at(target, word.address)? {
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

fn word_at(target: &Target, address: u64) -> Result<u64, Failure> {
    let mut bytes = [0; 8];
    let is_held = target.memory.read(address, &mut bytes) && target.memory.may_write(&(address..address + 8));
    if is_held { Ok(u64::from_le_bytes(bytes)) } else { Err(Failure::Busy(Busy::Changed)) }
}

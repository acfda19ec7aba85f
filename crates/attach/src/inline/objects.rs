//! Counts an interpreter's object allocator in the code that counts the malloc calls below it.
//!
//! The interpreter's table leads to jumps behind its code ([`crate::detours`]). Each jump goes through a word. One
//! write to the word redirects the jump to the mapped code, and another write back to the function. Nothing in the
//! interpreter's code changes.

use std::time::Duration;

pub use heapbpf_inline::ObjectFunction;
use heapbpf_inline::abi::Lead;
use heapbpf_probes::ObjectTable;
use heapbpf_remote::{Busy, Error, FoundBlob, Target, Word};
use sampler_ebpf::abi::Site;

use super::{left, memory};
use crate::stop_limit;

/// How often a process is stopped at most to write its words, and the pause in between.
const ATTEMPTS: usize = 5;
const PAUSE: Duration = Duration::from_millis(5);

/// The same function, with its number relative to another site.
pub(super) fn relative_to(function: &ObjectFunction, first_site: u32) -> ObjectFunction {
    let number = function.site.function.wrapping_sub(first_site as u16);
    ObjectFunction { site: Site { function: number, ..function.site }, ..function.clone() }
}

/// An interpreter's functions in a process. Their addresses there are `bias` higher than in the file. `sites` are their
/// names and sites; the number of each is the index of its site. `None` if there is no space for jumps to them.
pub fn hooks(table: &ObjectTable, bias: u64, sites: &[(String, Site)]) -> Option<Vec<ObjectFunction>> {
    let hook = |(detour, (name, site)): (heapbpf_probes::Detour, &(String, Site))| ObjectFunction {
        name: name.clone(),
        address: detour.function.wrapping_add(bias),
        word: detour.word().wrapping_add(bias),
        site: *site,
    };
    table.detours().map(|detours| detours.into_iter().zip(sites).map(hook).collect())
}

/// Makes words lead to the mapped code. The functions behind them are counted from then on.
pub(super) fn lead(pid: u32, leads: &[Lead]) -> Result<(), Error> {
    let words: Vec<Word> =
        leads.iter().map(|lead| Word { address: lead.word, before: lead.function, after: lead.stub }).collect();
    write(pid, &words)
}

/// Makes the words that lead to a blob lead to the functions again. The blob must not be unmapped before.
///
/// # Errors
/// The words still lead to the blob.
pub fn lead_back(target: &Target, found: &FoundBlob) -> Result<(), Error> {
    let pid = target.pid().unsigned_abs();
    if found.text.is_none() {
        // Words are written only after the text is mapped.
        return Ok(());
    }
    let changed = Error::Busy { why: Busy::Changed, stopped: Duration::ZERO };
    let leads = leads_of(pid, found).ok_or(changed)?;
    // The interpreter may have been unloaded, or another one may be there.
    let is_led = |lead: &Lead| {
        memory::open(pid).and_then(|it| memory::word_at(&it, lead.word)).is_ok_and(|word| word == lead.stub)
    };
    let words: Vec<Word> = leads
        .iter()
        .filter(|lead| lead.word != 0 && is_led(lead))
        .map(|lead| Word { address: lead.word, before: lead.stub, after: lead.function })
        .collect();
    if words.is_empty() { Ok(()) } else { target.write_words(&words, stop_limit()).map(drop) }
}

/// The words that lead to a blob, according to its header.
fn leads_of(pid: u32, found: &FoundBlob) -> Option<Vec<Lead>> {
    let file = left::open_mapped(pid, found.text.as_ref()?).ok()?;
    Some(left::blob_in(&file).ok()?.header.leads.to_vec())
}

fn write(pid: u32, words: &[Word]) -> Result<(), Error> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let written = Target::look(pid).map_err(Error::from).and_then(|target| target.write_words(words, stop_limit()));
        match written {
            Err(Error::Busy { .. }) if attempts < ATTEMPTS => std::thread::sleep(PAUSE),
            Err(error) => return Err(error),
            Ok(stopped) => {
                log::info!("process {pid}: its object allocator is counted inside it, stopped for {:?}", stopped.time);
                return Ok(());
            }
        }
    }
}

//! Plans what to map into a process, from its mappings and the allocator's file.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use heapbpf_elf::Elf;
use heapbpf_host::open::UnservedFiles;
use heapbpf_inline::abi::{CONTROL, CONTROL_BYTES, Control, MEMFD_NAME, STATE, Totals, mapped_bytes};
use heapbpf_inline::{Inputs, ObjectFunction, Patch, Plan, Settings, Text, WantedFunction, reaches};
use heapbpf_probes::InlineSlot;
use heapbpf_remote::{Data, Displaced, Draft, Mapping, PAGE_BYTES, Pages, Target};
use sampler_ebpf::abi::Site;
use zerocopy::IntoBytes as _;

use super::Refused;
use super::known::KnownFile;
use super::memory::{Word, dynamic_sections};

/// Runs of pages with at most this many pages in between are replaced together.
const GAP_PAGES: u64 = 4;

/// Where the allocator's code is in the target.
pub(super) struct Place {
    /// Its executable mapping, or the union of several adjacent ones. The kernel does not always join mappings that
    /// were split: pages that were replaced in an earlier recording may remain separate mappings.
    pub(super) mapping: Mapping,
    /// Start addresses of these mappings.
    pub(super) starts: Vec<u64>,
    /// Address in the target minus address in the file.
    pub(super) bias: u64,
    /// End of the file's code in the target. The rest of its last page is unused.
    pub(super) end: u64,
}

/// The executable mappings of a file in a process. Replaced pages that are kept elsewhere until the end are left out,
/// even if their file was unloaded in the meantime.
fn texts<'a>(target: &'a Target, file: &File) -> Result<Vec<&'a Mapping>, Refused> {
    let inode = file.metadata().map_err(|source| Refused::Read { what: "the allocator's file", source })?.ino();
    let is_kept = |mapping: &Mapping| target.found().iter().any(|found| found.range.contains(&mapping.range.start));
    let is_text = |mapping: &&Mapping| mapping.is_executable && mapping.inode == inode && !is_kept(mapping);
    let texts: Vec<&Mapping> = target.maps().as_slice().iter().filter(is_text).collect();
    if texts.is_empty() { Err(Refused::Unmapped) } else { Ok(texts) }
}

/// Address in the target minus address in the file. Some of the file's pages may be replaced, so that its code is
/// mapped in pieces.
pub(super) fn bias(target: &Target, file: &File) -> Result<u64, Refused> {
    let elf = Elf::read(file).map_err(|_| Refused::Mappings)?;
    let bias = |mapping: &&Mapping| {
        let mut code = elf.segments.iter().filter(|segment| segment.is_executable());
        code.find_map(|segment| segment.bias(mapping.range.start, mapping.offset, PAGE_BYTES))
    };
    let biases: Option<HashSet<u64>> = texts(target, file)?.iter().map(bias).collect();
    let mut biases = biases.unwrap_or_default().into_iter();
    let (Some(bias), None) = (biases.next(), biases.next()) else { return Err(Refused::Mappings) };
    Ok(bias)
}

/// Finds the allocator's code.
pub(super) fn place(target: &Target, file: &File) -> Result<Place, Refused> {
    let texts = texts(target, file)?;
    check_access(&texts)?;
    let mapping = joined(&texts).ok_or(Refused::Mappings)?;
    let elf = Elf::read(file).map_err(|_| Refused::Mappings)?;
    let mut code = elf.segments.iter().filter(|segment| segment.is_executable());
    let segment = code.find(|segment| segment.offset & !(PAGE_BYTES - 1) == mapping.offset);
    let segment = segment.ok_or(Refused::Mappings)?;
    let bias = segment.bias(mapping.range.start, mapping.offset, PAGE_BYTES).ok_or(Refused::Mappings)?;
    let end = segment.address.saturating_add(segment.file_bytes).wrapping_add(bias);
    let starts = texts.iter().map(|text| text.range.start).collect();
    Ok(Place { mapping, starts, bias, end })
}

/// Checks that replaced pages would be as these are: private, readable and not writable.
fn check_access(texts: &[&Mapping]) -> Result<(), Refused> {
    if texts.iter().any(|text| text.is_shared) {
        return Err(Refused::Text("is mapped shared (MAP_SHARED), and replaced pages would be private"));
    }
    // On processors with protection keys, the kernel gives such code a key.
    if texts.iter().any(|text| !text.is_readable) {
        return Err(Refused::Text("may be executed but not read (PROT_EXEC alone), and replaced pages could be read"));
    }
    if texts.iter().any(|text| text.is_writable) { Err(Refused::Writable) } else { Ok(()) }
}

/// Joins adjacent mappings: each must begin, in memory and in the file, where the previous one ends. `None` if they do
/// not.
fn joined(texts: &[&Mapping]) -> Option<Mapping> {
    let (first, rest) = texts.split_first()?;
    rest.iter().try_fold((*first).clone(), |mut whole, next| {
        let follows = next.range.start == whole.range.end
            && next.offset == whole.offset.checked_add(whole.bytes())?
            && (next.is_writable, next.is_shared) == (whole.is_writable, whole.is_shared);
        whole.range.end = next.range.end;
        follows.then_some(whole)
    })
}

/// How the loader has bound names in the target.
pub(super) struct Bindings<'a> {
    /// Reads a word of the target's memory.
    pub(super) word: &'a Word<'a>,
    /// Whether a lookup finds a function in another file of the target.
    pub(super) is_elsewhere: &'a dyn Fn(&str) -> bool,
}

/// Makes the plan. It depends only on the process, the files and the settings, so that the next recording makes the
/// same plan. The programs get a function's index in the file's list, and the index of the first site from the link.
pub(super) fn inline_plan(
    (known, objects): (&KnownFile, &[ObjectFunction]),
    place: &Place,
    (base, settings): (u64, &Settings),
    bindings: &Bindings<'_>,
) -> Result<Plan, Refused> {
    let code = heapbpf_inline_blob::code().ok_or(Refused::Machine)?;
    let KnownFile { found, jumps } = known;
    let jumps = &jumps.moved(place.bias);
    let at = |address: u64| address.wrapping_add(place.bias);
    let texts: Vec<Text<'_>> =
        found.code.iter().map(|code| Text { address: at(code.address), bytes: &code.bytes }).collect();
    let inner: Vec<[u64; 2]> = found.inner.iter().map(|[start, end]| [at(*start), at(*end)]).collect();
    let mut wanted: Vec<WantedFunction<'_>> = found
        .functions
        .iter()
        .enumerate()
        .map(|(number, function)| WantedFunction {
            name: &function.name,
            address: at(function.address),
            length: function.length,
            site: Site { function: number as u16, ..function.site },
            twin: function.twin,
        })
        .collect();
    // Another file may define the name first.
    let is_own = |slot: &&InlineSlot| match (bindings.word)(at(slot.slot)) {
        Some(address) if address == wanted[slot.function].address => true,
        Some(address) => is_unbound(address, &texts) && !(bindings.is_elsewhere)(&slot.name),
        None => false,
    };
    let (own, foreign): (Vec<&InlineSlot>, Vec<&InlineSlot>) = found.slots.iter().partition(is_own);
    let foreign: HashSet<u64> = foreign.into_iter().flat_map(|slot| [at(slot.slot), at(slot.stub)]).collect();
    // A function that forwards its calls to another file's allocator. They are counted there, if that allocator is
    // hooked.
    let forwards = |function: &WantedFunction<'_>| {
        let range = [function.address, function.address.saturating_add(function.length)];
        reaches(&texts, range, &|address| foreign.contains(&address))
    };
    let forwarding: Vec<usize> = (0..wanted.len()).filter(|at| forwards(&wanted[*at])).collect();
    // A function without code is not hooked.
    forwarding.iter().for_each(|at| wanted[*at].length = 0);
    let slots = own.iter().map(|slot| (at(slot.slot), slot.function)).collect();
    let stubs = own.iter().filter(|slot| slot.stub != slot.slot);
    let stubs = stubs.map(|slot| (at(slot.stub), slot.function)).collect();
    let (stubs, slots, jumps) = (&stubs, &slots, Some(jumps));
    let inputs = Inputs { texts: &texts, wanted: &wanted, inner: &inner, stubs, slots, objects, jumps, base };
    let plan = Plan::new(&code, settings, &inputs).map_err(|error| Refused::Plan(error.to_string()))?;
    match plan.refused.iter().find(|(function, _)| !forwarding.contains(function)) {
        // Some of the allocator's functions would be counted and others not.
        Some((function, why)) => Err(Refused::Plan(format!("{}: {why}", wanted[*function].name))),
        None => Ok(plan),
    }
}

/// Whether the address in a slot of the global offset table belongs to the file's own code that looks up the name at
/// the first call: a `push` of the slot's number, possibly after a landing pad.
fn is_unbound(address: u64, texts: &[Text<'_>]) -> bool {
    const PUSH: u8 = 0x68;
    const LANDING_PAD: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
    const BYTES: u64 = 5;
    let code = texts.iter().find_map(|text| text.range(address, address.checked_add(BYTES)?));
    code.is_some_and(|code| code[0] == PUSH || code.starts_with(&LANDING_PAD) && code[LANDING_PAD.len()] == PUSH)
}

/// The files that a symbol lookup in the target searches before the allocator's file: those that the loader loaded
/// earlier. If its list cannot be read, all other files. `None` stands for a file that cannot be opened, or
/// whose file system is served by a process.
pub(super) fn files_before(target: &Target, place: &Place, word: &Word<'_>) -> Vec<Option<File>> {
    let mut seen = HashSet::new();
    let listed = dynamic_sections(target.pid().unsigned_abs(), word);
    let maps = target.maps();
    let of_files = match &listed {
        Some(sections) => sections.iter().filter_map(|address| maps.at(*address)).collect::<Vec<_>>(),
        None => maps.as_slice().iter().filter(|mapping| mapping.is_executable).collect(),
    };
    let of_files = of_files.into_iter().filter(|mapping| mapping.inode != 0);
    let is_own = |mapping: &&Mapping| (&mapping.device, mapping.inode) == (&place.mapping.device, place.mapping.inode);
    let others = of_files
        .take_while(|mapping| listed.is_none() || !is_own(mapping))
        .filter(|mapping| !is_own(mapping) && seen.insert((mapping.device.as_str(), mapping.inode)));
    let mut files = UnservedFiles::of(target.pid().unsigned_abs());
    let open = |mapping: &Mapping| {
        let path = format!("/proc/{}/map_files/{:x}-{:x}", target.pid(), mapping.range.start, mapping.range.end);
        files.open(path.as_ref()).ok()
    };
    others.map(open).collect()
}

/// Converts the plan for the injector. After the end of the file's code there may be instructions with which a held
/// command waits; these stay.
pub(super) fn draft(
    plan: &Plan,
    place: &Place,
    (file, memory): (&File, &File),
    set_log2: u32,
    control: &Control,
) -> Result<Draft, Refused> {
    let read = |address: u64, bytes: &mut [u8]| {
        let within = address.checked_sub(place.mapping.range.start).filter(|_| address < place.mapping.range.end);
        let is_read = within.is_some_and(|within| file.read_exact_at(bytes, place.mapping.offset + within).is_ok());
        let own = usize::try_from(place.end.saturating_sub(address)).unwrap_or(usize::MAX);
        let behind = bytes.get_mut(own..).filter(|behind| !behind.is_empty());
        is_read && behind.is_none_or(|behind| memory.read_exact_at(behind, address + own as u64).is_ok())
    };
    let runs = plan.runs(GAP_PAGES, &read).ok_or(Refused::Changed)?;
    let parts = runs.into_iter().flat_map(|(address, bytes)| split(address, bytes, &place.starts));
    let pages = parts.map(|(start, edited)| {
        let mut original = vec![0; edited.len()];
        let pages = read(start, &mut original).then_some(Pages { start, original, edited })?;
        Some(not_alone(pages, place, &read))
    });
    let pages = pages.collect::<Option<Vec<_>>>().ok_or(Refused::Changed)?;
    let bytes = mapped_bytes(set_log2);
    let control =
        Data { range: CONTROL..CONTROL + CONTROL_BYTES, is_wiped_on_fork: false, initial: control.as_bytes().to_vec() };
    let totals = Totals { is_original: 1, ..Totals::default() };
    let state = Data { range: STATE..bytes, is_wiped_on_fork: true, initial: totals.as_bytes().to_vec() };
    Ok(Draft {
        name: MEMFD_NAME.to_owned(),
        base: plan.base,
        bytes,
        text: plan.file.clone(),
        data: vec![control, state],
        pages,
        displaced: plan.patches.iter().filter_map(|patch| displaced(patch, plan)).collect(),
    })
}

/// Splits a run of pages at the mapping boundaries in `starts`, because no call moves pages of two mappings.
fn split(address: u64, mut bytes: Vec<u8>, starts: &[u64]) -> Vec<(u64, Vec<u8>)> {
    let within = |start: &u64| start.checked_sub(address).and_then(|at| usize::try_from(at).ok());
    let mut cuts: Vec<usize> = starts.iter().filter_map(within).filter(|at| (1..bytes.len()).contains(at)).collect();
    cuts.sort_unstable();
    let mut parts: Vec<(u64, Vec<u8>)> =
        cuts.into_iter().rev().map(|at| (address + at as u64, bytes.split_off(at))).collect();
    parts.push((address, bytes));
    parts.reverse();
    parts
}

/// Adds an unchanged neighbour from the same mapping to a single page, because the kernel restores probes in two pages
/// but not in one (`heapbpf_remote`, `probes`).
fn not_alone(pages: Pages, place: &Place, read: &dyn Fn(u64, &mut [u8]) -> bool) -> Pages {
    let Pages { start, original, edited } = &pages;
    let (end, whole) = (pages.range().end, &place.mapping.range);
    let has_next = end < whole.end && !place.starts.contains(&end);
    let has_previous = *start > whole.start && !place.starts.contains(start);
    let neighbour = if has_next { end } else { start.wrapping_sub(PAGE_BYTES) };
    let mut page = vec![0; PAGE_BYTES as usize];
    if end - start > PAGE_BYTES || !(has_next || has_previous) || !read(neighbour, &mut page) {
        return pages;
    }
    let joined = |own: &[u8]| if has_next { [own, &page].concat() } else { [&page[..], own].concat() };
    Pages { start: neighbour.min(*start), original: joined(original), edited: joined(edited) }
}

/// Checks that the pages to be replaced contain the file's code, except for probes.
pub(super) fn check_memory(draft: &Draft, memory: &File) -> Result<(), Refused> {
    for pages in &draft.pages {
        let mut now = vec![0; pages.original.len()];
        let read = memory.read_exact_at(&mut now, pages.start);
        read.map_err(|source| Refused::Read { what: "the target's memory", source })?;
        if let Some(at) = heapbpf_remote::other_code(&pages.original, &now) {
            return Err(Refused::Patched(pages.start + at as u64));
        }
    }
    Ok(())
}

/// The instructions that a patch displaces. `None` if it only redirects a call.
fn displaced(patch: &Patch, plan: &Plan) -> Option<Displaced> {
    let range = patch.address..patch.address + patch.after.len() as u64;
    let copies: Vec<(u64, u64)> = plan.moved.iter().filter(|(from, _)| range.contains(from)).copied().collect();
    (!copies.is_empty()).then_some(Displaced { range, copies })
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

//! The plan of a patch: which bytes of an allocator's text change, and the file that is mapped beside it.
//!
//! The plan replaces pages instead of writing into them. Other tools' uprobes belong to the file: in pages that are not
//! the file's they neither fire nor are they restored. So the jump can be at the very entry.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use sampler_ebpf::abi::inline::TwinArguments;
use sampler_ebpf::abi::{SITE_FREES, SITE_THROWS, SITE_ZERO_FREES, Site};

use crate::abi::{
    Code, FUNCTION_OF_OBJECTS, FUNCTION_OUT, FUNCTION_REFERENCE_SECOND, FUNCTION_REFERENCE_THIRD, FUNCTION_SWAPPED,
    FUNCTION_THROWS, FUNCTION_ZERO_FREES, Function, Lead, MAX_FUNCTIONS, MAX_OBJECT_FUNCTIONS, NO_ARGUMENT, PAGE_BYTES,
    STUB_BYTES, STUBS,
};
use crate::displaced::{Displaced, JUMP_BYTES};
use crate::error::{BuildError, Refusal};
use crate::image::{self, Settings};
use crate::redirect::{Jumps, Patch, Text, inner_calls, leads, merged};
use crate::stub::{Parts, Stub, far_jump};

/// End of user addresses.
const USER_END: u64 = 1 << 47;

/// A function to hook.
#[derive(Clone, Copy, Debug)]
pub struct WantedFunction<'a> {
    /// Its name.
    pub name: &'a str,
    /// Address of its first instruction in the target.
    pub address: u64,
    /// Its length in bytes. All of it is searched for jumps into its first instructions, and for calls of hooked
    /// functions.
    pub length: u64,
    /// What its arguments, as they are at entry, mean. Only [`Site::function`], the arguments and the flags matter.
    pub site: Site,
    /// The function to call instead if this one may throw and the call is sampled: one that does the same, but returns
    /// NULL where this one throws. Its index in the list of wanted functions, and how it is called.
    pub twin: Option<(usize, TwinArguments)>,
}

/// The data that a plan is made from.
pub struct Inputs<'a> {
    /// The executable segments of the file. Functions and ranges outside are not hooked.
    pub texts: &'a [Text<'a>],
    /// Functions to hook.
    pub wanted: &'a [WantedFunction<'a>],
    /// Ranges of addresses with the allocator's own code: calls of hooked functions from there do not count. The wanted
    /// functions themselves always belong to it.
    pub inner: &'a [[u64; 2]],
    /// Addresses of stubs (PLT) that lead to a wanted function, and its index. This only includes stubs whose slot in
    /// the target holds the function's address: another file may define the name first, and then its function must
    /// still be called.
    pub stubs: &'a HashMap<u64, usize>,
    /// Addresses of slots (GOT) that hold the address of a wanted function in the target, and its index.
    pub slots: &'a HashMap<u64, usize>,
    /// Functions of an interpreter's object allocator, which calls wanted functions.
    pub objects: &'a [ObjectFunction],
    /// [`Jumps`] into the wanted functions; `None` if they have to be searched for.
    pub jumps: Option<&'a Jumps>,
    /// Address of the blob: within reach of every text. See `Maps::gap` in the crate remote.
    pub base: u64,
}

/// A function of an interpreter's object allocator. It may be anywhere, because it is called through a word and nothing
/// is displaced.
#[derive(Clone, Debug)]
pub struct ObjectFunction {
    /// Its name.
    pub name: String,
    /// Its address in the target.
    pub address: u64,
    /// Address of the word through which it is called.
    pub word: u64,
    /// As [`WantedFunction::site`].
    pub site: Site,
}

/// The plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Address of the blob.
    pub base: u64,
    /// The file to be mapped, read and execute: [`TEXT_BYTES`](crate::abi::TEXT_BYTES).
    pub file: Vec<u8>,
    /// What changes in the allocator's text, ascending, not overlapping.
    pub patches: Vec<Patch>,
    /// Instructions that move: a thread that is stopped at the first address goes on at the second. Ascending. A word
    /// with such an address on a stack may be in a signal frame, to which a handler will return: then the patch must
    /// wait.
    pub moved: Vec<(u64, u64)>,
    /// Address ranges in the blob of the copies of the functions' own instructions, ascending.
    pub originals: Vec<Range<u64>>,
    /// The hooked functions, as indices into the list of wanted ones.
    pub hooked: Vec<usize>,
    /// The functions that are not hooked, and why.
    pub refused: Vec<(usize, Refusal)>,
    /// The words that lead to functions of an object allocator.
    pub leads: Vec<Lead>,
}

/// A function that can be hooked.
struct Candidate {
    wanted: usize,
    displaced: Displaced,
    function: Function,
}

impl Plan {
    /// Makes the plan.
    ///
    /// # Errors
    /// [`BuildError`] if there can be no blob at all. Functions that cannot be hooked are in [`Plan::refused`].
    pub fn new(code: &Code<'_>, settings: &Settings, inputs: &Inputs<'_>) -> Result<Self, BuildError> {
        let functions = inputs.wanted.len().saturating_add(inputs.objects.len());
        if functions > MAX_FUNCTIONS || inputs.objects.len() > MAX_OBJECT_FUNCTIONS {
            return Err(BuildError::TooManyFunctions(functions));
        }
        // With this, no sum of addresses below overflows, whatever the file says.
        let in_user_space =
            |text: &Text<'_>| text.address < USER_END && text.bytes.len() as u64 <= USER_END - text.address;
        if !inputs.texts.iter().all(in_user_space) {
            return Err(BuildError::NothingToHook);
        }
        let mut refused = Vec::new();
        let mut candidates = candidates(inputs, &mut refused);
        loop {
            // A refused function changes which calls are redirected, and which twins exist.
            if candidates.is_empty() {
                return Err(BuildError::NothingToHook);
            }
            link_twins(&mut candidates, inputs);
            let is_unknown = |candidate: &Candidate| {
                let function = &candidate.function;
                let throws = function.flags & FUNCTION_THROWS != 0 && function.twin == 0;
                throws && function.old_argument != NO_ARGUMENT
            };
            if let Some(index) = candidates.iter().position(is_unknown) {
                refused.push((candidates.remove(index).wanted, Refusal::ThrowingReallocation));
                continue;
            }
            match assemble(code, settings, inputs, &candidates) {
                Ok((mut stubs, patches, moved)) => {
                    let mut functions: Vec<Function> = candidates.iter().map(|c| c.function).collect();
                    let mut names: Vec<&str> = candidates.iter().map(|c| inputs.wanted[c.wanted].name).collect();
                    let leads = add_objects(code, settings, inputs, (&mut functions, &mut stubs))?;
                    names.extend(inputs.objects.iter().map(|object| object.name.as_str()));
                    let file = image::file(code, settings, &functions, &names, (&stubs, &leads))?;
                    let hooked = candidates.iter().map(|c| c.wanted).collect();
                    let originals = originals(inputs.base, &stubs);
                    return Ok(Self { base: inputs.base, file, patches, moved, originals, hooked, refused, leads });
                }
                Err((index, refusal)) => {
                    refused.push((candidates.remove(index).wanted, refusal));
                }
            }
        }
    }

    /// Runs of whole pages of the allocator's text with the patches applied: address and content of each. Runs with at
    /// most `gap` pages in between are joined, because each is a mapping. `read` fills in the file's content at an
    /// address, in whole pages, as a mapping of it would, and returns whether it could. `None` if it could not, or if
    /// the file has changed.
    #[must_use]
    pub fn runs(&self, gap: u64, read: &dyn Fn(u64, &mut [u8]) -> bool) -> Option<Vec<(u64, Vec<u8>)>> {
        let page = |address: u64| address / PAGE_BYTES;
        let mut ranges: Vec<[u64; 2]> = Vec::new();
        for patch in &self.patches {
            let (first, last) = (page(patch.address), page(patch.address + patch.after.len() as u64 - 1));
            match ranges.last_mut() {
                Some([_, end]) if first <= *end + gap => *end = (*end).max(last + 1),
                _ => ranges.push([first, last + 1]),
            }
        }
        ranges.iter().map(|range| self.run(*range, read)).collect()
    }

    fn run(&self, [first, end]: [u64; 2], read: &dyn Fn(u64, &mut [u8]) -> bool) -> Option<(u64, Vec<u8>)> {
        let (address, end) = (first * PAGE_BYTES, end * PAGE_BYTES);
        let mut bytes = vec![0; (end - address) as usize];
        if !read(address, &mut bytes) {
            return None;
        }
        for patch in self.patches.iter().filter(|p| (address..end).contains(&p.address)) {
            let place = &mut bytes[(patch.address - address) as usize..][..patch.after.len()];
            if *place != *patch.before {
                return None;
            }
            place.copy_from_slice(&patch.after);
        }
        Some((address, bytes))
    }
}

/// The wanted functions whose first instructions can be displaced.
fn candidates(inputs: &Inputs<'_>, refused: &mut Vec<(usize, Refusal)>) -> Vec<Candidate> {
    let mut found = Vec::new();
    let mut ranges = Vec::new();
    for (index, wanted) in inputs.wanted.iter().enumerate() {
        match candidate(inputs, index, wanted) {
            Ok(candidate) => {
                let end = wanted.address + candidate.displaced.length as u64;
                let overlaps = ranges.iter().any(|[s, e]: &[u64; 2]| *s < end && wanted.address < *e);
                if overlaps {
                    refused.push((index, Refusal::Overlaps));
                } else {
                    ranges.push([wanted.address, end]);
                    found.push(candidate);
                }
            }
            Err(refusal) => refused.push((index, refusal)),
        }
    }
    let looked;
    let jumps = match inputs.jumps {
        Some(jumps) => jumps,
        None => {
            looked = Jumps::new(inputs.texts, ranges.iter().map(|[start, _]| *start).collect());
            &looked
        }
    };
    for entered in jumps.entered(&ranges) {
        if let Some(at) = found.iter().position(|c| inputs.wanted[c.wanted].address == ranges[entered][0]) {
            refused.push((found.remove(at).wanted, Refusal::JumpedInto));
        }
    }
    if jumps.restarts() {
        found.iter_mut().for_each(|candidate| candidate.displaced.following.clear());
    }
    found
}

fn candidate(inputs: &Inputs<'_>, index: usize, wanted: &WantedFunction<'_>) -> Result<Candidate, Refusal> {
    let site = &wanted.site;
    let throws = site.flags & SITE_THROWS != 0 && site.flags & SITE_FREES == 0;
    let code = inputs.texts.iter().find_map(|t| t.range(wanted.address, wanted.address.checked_add(wanted.length)?));
    let displaced = Displaced::read(wanted.address, code.ok_or(Refusal::TooShort)?)?;
    let mut flags = 0;
    flags |= if site.flags & SITE_ZERO_FREES != 0 { FUNCTION_ZERO_FREES } else { 0 };
    flags |= if site.out_argument == NO_ARGUMENT { 0 } else { FUNCTION_OUT };
    flags |= if throws { FUNCTION_THROWS } else { 0 };
    if site.out_argument != NO_ARGUMENT && site.out_argument != 0 {
        return Err(Refusal::Immovable);
    }
    let function = function(site, index, wanted.address);
    let function = Function { flags, displaced: displaced.length as u32, ..function };
    Ok(Candidate { wanted: index, displaced, function })
}

/// A function with this index, as its site describes it, without flags.
fn function(site: &Site, index: usize, address: u64) -> Function {
    let frees = site.flags & SITE_FREES != 0;
    Function {
        number: u32::from(site.function) | (index as u32) << 16,
        address,
        size_argument: if frees { NO_ARGUMENT } else { site.size_argument },
        times_argument: if frees { NO_ARGUMENT } else { site.times_argument },
        old_argument: site.old_argument,
        ..Function::default()
    }
}

/// Gives each function its index, and its twin's flags. Offsets are filled in once the stubs are known.
fn link_twins(candidates: &mut [Candidate], inputs: &Inputs<'_>) {
    let present: BTreeMap<usize, usize> = candidates.iter().enumerate().map(|(i, c)| (c.wanted, i)).collect();
    for (index, candidate) in candidates.iter_mut().enumerate() {
        let function = &mut candidate.function;
        function.number = function.number & 0xffff | (index as u32) << 16;
        function.flags &= !(FUNCTION_REFERENCE_SECOND | FUNCTION_REFERENCE_THIRD | FUNCTION_SWAPPED);
        function.twin = 0;
        let Some((twin, arguments)) = inputs.wanted[candidate.wanted].twin else { continue };
        let Some(at) = present.get(&twin) else { continue };
        // One more than the index, until the offset is known: 0 stands for none.
        function.twin = *at as u32 + 1;
        function.flags |= match arguments {
            TwinArguments::WithReference(1) => FUNCTION_REFERENCE_SECOND,
            TwinArguments::WithReference(2) => FUNCTION_REFERENCE_THIRD,
            TwinArguments::Swapped => FUNCTION_SWAPPED,
            TwinArguments::Same | TwinArguments::WithReference(_) => 0,
        };
    }
}

/// Adds the functions of an object allocator, and their stubs. Returns the words that have to lead there.
fn add_objects(
    code: &Code<'_>,
    settings: &Settings,
    inputs: &Inputs<'_>,
    (functions, stubs): (&mut Vec<Function>, &mut Vec<Stub>),
) -> Result<Vec<Lead>, BuildError> {
    let mut leads = Vec::new();
    for object in inputs.objects {
        let index = functions.len();
        let function = Function { flags: FUNCTION_OF_OBJECTS, ..function(&object.site, index, object.address) };
        let stub = far_jump(object.address).and_then(|original| {
            let parts = Parts {
                base: inputs.base,
                index,
                entries: &code.entries,
                function: &function,
                criterion: settings.criterion,
                original: &original,
                displaced: 0,
                may_be_inside: true,
            };
            parts.build()
        });
        stubs.push(stub.map_err(BuildError::Object)?);
        functions.push(function);
        let stub = inputs.base + STUBS + index as u64 * STUB_BYTES;
        leads.push(Lead { word: object.word, function: object.address, stub });
    }
    Ok(leads)
}

type Assembled = (Vec<Stub>, Vec<Patch>, Vec<(u64, u64)>);

/// Encodes all stubs and patches. If that is not possible, fails with the index of a candidate that cannot be hooked.
fn assemble(
    code: &Code<'_>,
    settings: &Settings,
    inputs: &Inputs<'_>,
    candidates: &[Candidate],
) -> Result<Assembled, (usize, Refusal)> {
    let at = |index: usize| STUBS + index as u64 * STUB_BYTES;
    let address = |index: usize| inputs.wanted[candidates[index].wanted].address;
    let by_address: HashMap<u64, usize> = (0..candidates.len()).map(|i| (address(i), i)).collect();
    let of_wanted: HashMap<usize, usize> = candidates.iter().enumerate().map(|(i, c)| (c.wanted, i)).collect();
    let function_at = |target: u64| {
        let behind_stub = || of_wanted.get(inputs.stubs.get(&target)?).copied();
        by_address.get(&target).copied().or_else(behind_stub)
    };
    let function_behind = |slot: u64| of_wanted.get(inputs.slots.get(&slot)?).copied();
    // Encodes a stub with the first `following` of the instructions that may be copied.
    let encode = |index: usize, following: usize, redirected: &dyn Fn(u64) -> u64| {
        let candidate = &candidates[index];
        let original = candidate.displaced.elsewhere(following, redirected)?;
        let parts = Parts {
            base: inputs.base,
            index,
            entries: &code.entries,
            function: &candidate.function,
            criterion: settings.criterion,
            original: &original,
            displaced: candidate.displaced.instructions.len(),
            may_be_inside: !inputs.objects.is_empty(),
        };
        parts.build()
    };
    // First with any near target for inner jumps and without copies, to learn where the originals are and how much
    // space is left.
    let (mut originals, mut free) = (Vec::new(), Vec::new());
    for index in 0..candidates.len() {
        let anywhere = |target: u64| function_at(target).map_or(target, |_| inputs.base + at(index));
        let shortest = encode(index, 0, &anywhere).map_err(|refusal| (index, refusal))?;
        originals.push(inputs.base + at(index) + u64::from(shortest.original));
        free.push(STUB_BYTES as usize - shortest.bytes.len());
    }
    let original = |index: usize| originals[index];
    let (mut stubs, mut patches, mut moved) = (Vec::new(), Vec::new(), Vec::new());
    for (index, candidate) in candidates.iter().enumerate() {
        let redirected = |target| function_at(target).map_or(target, original);
        let following = candidate.displaced.worth_copying(free[index]);
        // The instructions that follow may refer to something out of reach.
        let stub = encode(index, following, &redirected).or_else(|_| encode(index, 0, &redirected));
        let stub = stub.map_err(|refusal| (index, refusal))?;
        for (instruction, offset) in candidate.displaced.instructions.iter().zip(&stub.displaced).skip(1) {
            moved.push((instruction.ip(), inputs.base + at(index) + u64::from(*offset)));
        }
        stubs.push(stub);
        patches.push(entry_patch(inputs, candidate, inputs.base + at(index)).ok_or((index, Refusal::OutOfReach))?);
    }
    for range in inner_ranges(inputs, candidates) {
        let Some(text) = inputs.texts.iter().find(|t| t.range(range[0], range[1]).is_some()) else { continue };
        let leads = |instruction: &iced_x86::Instruction| leads(instruction, &function_at, &function_behind);
        let (redirects, refused) = inner_calls(text, range, &leads, &original);
        if let Some(first) = refused.into_iter().next() {
            return Err(first);
        }
        patches.extend(redirects);
    }
    patches.sort_by_key(|p| p.address);
    patches.dedup();
    moved.sort_unstable();
    Ok((stubs, patches, moved))
}

/// Where the stubs of a blob at `base` contain the functions' own instructions.
fn originals(base: u64, stubs: &[Stub]) -> Vec<Range<u64>> {
    let starts = (base + STUBS..).step_by(STUB_BYTES as usize);
    let range = |(at, stub): (u64, &Stub)| at + u64::from(stub.original)..at + u64::from(stub.original_end);
    starts.zip(stubs).map(range).collect()
}

/// The jump at the function's entry, with breakpoints in the rest of the displaced bytes.
fn entry_patch(inputs: &Inputs<'_>, candidate: &Candidate, stub: u64) -> Option<Patch> {
    let (address, length) = (candidate.function.address, candidate.displaced.length);
    let before = inputs.texts.iter().find_map(|t| t.range(address, address + length as u64))?.to_vec();
    let distance = i32::try_from(stub.wrapping_sub(address + JUMP_BYTES as u64).cast_signed()).ok()?;
    let mut after = vec![0xe9];
    after.extend_from_slice(&distance.to_le_bytes());
    after.resize(length, 0xcc);
    Some(Patch { address, before, after })
}

/// The allocator's own code without the displaced instructions: ascending, not overlapping.
fn inner_ranges(inputs: &Inputs<'_>, candidates: &[Candidate]) -> Vec<[u64; 2]> {
    let own = inputs.wanted.iter().map(|w| [w.address, w.address.saturating_add(w.length)]);
    let mut merged = merged(own.chain(inputs.inner.iter().copied()).filter(|[s, e]| s < e).collect());
    for candidate in candidates {
        let (start, end) = (candidate.function.address, candidate.function.address + candidate.displaced.length as u64);
        if let Some(at) = merged.iter().position(|[s, e]| *s <= start && end <= *e) {
            let [s, e] = merged[at];
            merged.splice(at..=at, [[s, start], [end, e]].into_iter().filter(|[s, e]| s < e));
        }
    }
    merged
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

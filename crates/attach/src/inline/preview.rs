//! Predicts what inline hooks would do to a process, without touching it, and runs trials on a process of our own to
//! measure their cost.

use std::cell::LazyCell;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::Duration;

use heapbpf_inline::Settings;
use heapbpf_inline::abi::{Control, Lead, mapped_bytes};
use heapbpf_probes::Table;
use heapbpf_remote::{Plan, Target};
use sampler_ebpf::geometric::DrawConstants;

use super::control::{ControlPage, LEAST_SET_LOG2};
use super::crashes::{self, Builds};
use super::known::{KnownFile, KnownNames};
use super::left::{self, Left};
use super::objects::ObjectFunction;
use super::plan::Place;
use super::removal::take_out;
use super::{Refused, forbidden, has_rdrand, limits, memory};

/// How long our own process may be stopped. Nothing waits for it.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of hook code copies in a process that recordings with other settings, or for other allocators, have
/// mapped.
const MOST_LEFT: usize = 16;

/// What would be done to a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preview {
    /// Functions that would be hooked.
    pub functions: usize,
    /// Bytes of the allocator's code that would be replaced, in whole pages.
    pub replaced_bytes: u64,
    /// Bytes of address space that would be used, most of them without memory.
    pub mapped_bytes: u64,
    /// Whether every thread has a seccomp filter. Its contents are read only when the process is stopped.
    pub is_filtered: bool,
}

/// What hooking the allocator in `file` would do to a process.
///
/// # Errors
/// The process cannot be hooked inline.
pub fn preview(pid: u32, (path, file): (&str, &File), table: &Table) -> Result<Preview, Refused> {
    forbidden::check(pid)?;
    crashes::check(Builds::of(pid, file)?.as_ref())?;
    let known = KnownFile::read((path, file), table)?;
    let target = Target::look(pid)?;
    if let Some(hooks) = target.found().iter().find(|found| found.is_hooked()) {
        return Err(match left::judge(pid, hooks) {
            Left::InUse => Refused::Hooked,
            Left::Foreign(why) => Refused::Left(why),
            Left::Abandoned => Refused::Abandoned,
        });
    }
    let plan = unsampled(&target, &known, file)?;
    let replaced_bytes = plan.draft().pages.iter().map(|pages| pages.original.len() as u64).sum();
    let mapped_bytes = plan.range().end - plan.range().start;
    let (functions, is_filtered) = (known.found.functions.len(), target.is_filtered());
    Ok(Preview { functions, replaced_bytes, mapped_bytes, is_filtered })
}

/// A process that counts inline, without sampling. Dropping it removes everything.
#[derive(Debug)]
pub struct Trial(u32);

impl Trial {
    /// Hooks the allocator in `file` in a process.
    ///
    /// # Errors
    /// The process cannot be hooked inline. It continues as before.
    pub fn begin(pid: u32, (path, file): (&str, &File), table: &Table) -> Result<Self, Refused> {
        let known = KnownFile::read((path, file), table)?;
        let target = Target::look(pid)?;
        let plan = unsampled(&target, &known, file)?;
        // From here on there may be something to remove.
        let trial = Self(pid);
        target.hook(&plan, PATIENCE)?;
        Ok(trial)
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        take_out(self.0);
    }
}

/// The initial sampling settings.
pub(super) struct Sampled {
    /// What a trial is: bytes or allocations.
    pub criterion: u32,
    /// The set of sampled blocks should have 2^`set_log2` entries.
    pub set_log2: u32,
    /// The control page.
    pub control: Control,
}

/// Plans hooks that sample nothing, in code of their own.
fn unsampled(target: &Target, known: &KnownFile, file: &File) -> Result<Plan, Refused> {
    let place = super::plan::place(target, file)?;
    let control = ControlPage::new(DrawConstants::default(), 0, None).page;
    let nothing = Sampled { criterion: 0, set_log2: LEAST_SET_LOG2, control };
    Ok(plan((target, &place), (known, &[]), &KnownNames::default(), file, (&nothing, false))?.plan)
}

/// What to do to a process.
pub(super) struct Planned {
    /// What to map, and which pages to replace.
    pub plan: Plan,
    /// Words that must lead to it afterwards.
    pub leads: Vec<Lead>,
    /// Where it contains copies of the functions' original instructions.
    pub originals: Vec<Range<u64>>,
    /// The memfd that an earlier recording left, if it is reused.
    pub text: Option<File>,
    /// The set of sampled blocks has 2^`set_log2` entries.
    pub set_log2: u32,
    /// What a larger set would have taken too much of.
    pub lacks: Option<&'static str>,
}

/// Plans what to do to a process, without doing any of it. With `uses_again`, code that an earlier recording left is
/// reused if it is the same.
pub(super) fn plan(
    (target, place): (&Target, &Place),
    (known, objects): (&KnownFile, &[ObjectFunction]),
    names: &KnownNames,
    file: &File,
    (sampled, uses_again): (&Sampled, bool),
) -> Result<Planned, Refused> {
    let memory = memory::open(target.pid().unsigned_abs())
        .map_err(|source| Refused::Read { what: "the target's memory", source })?;
    let word = |address: u64| memory::word_at(&memory, address).ok();
    let metadata = file.metadata().map_err(|source| Refused::Read { what: "the allocator's file", source })?;
    let settings = |set_log2| Settings {
        criterion: sampled.criterion,
        set_log2,
        has_rdrand: has_rdrand(),
        file: [metadata.dev(), metadata.ino(), metadata.mtime().cast_unsigned()],
    };
    let before = LazyCell::new(|| super::plan::files_before(target, place, &word));
    let is_elsewhere =
        |name: &str| before.iter().any(|file| file.as_ref().is_none_or(|file| names.defines(file, name)));
    let bindings = super::plan::Bindings { word: &word, is_elsewhere: &is_elsewhere };
    let draft = |base, set_log2| {
        let plan = super::plan::inline_plan((known, objects), place, (base, &settings(set_log2)), &bindings)?;
        let draft = super::plan::draft(&plan, place, (file, &memory), set_log2, &sampled.control)?;
        super::plan::check_memory(&draft, &memory)?;
        Ok::<_, Refused>((draft, plan.leads, plan.originals))
    };
    let (pid, mappings) = (target.pid().unsigned_abs(), target.maps().as_slice().len());
    let left = target.found().len();
    for (found, text, code) in left::unused(target).take(if uses_again { MOST_LEFT } else { 0 }) {
        let set_log2 = code.header.set_log2;
        // A set that is too small is reused only if there is no capacity for another copy.
        if set_log2 < sampled.set_log2 && left < MOST_LEFT {
            continue;
        }
        // The code may belong to another allocator, too far away.
        let Ok((draft, leads, originals)) = draft(found.range.start, set_log2) else { continue };
        let read = |offset, bytes: &mut [u8]| text.read_exact_at(bytes, offset).is_ok();
        if let Some(plan) = Plan::again(draft, target.maps(), &found, read) {
            limits::check(pid, (0, set_log2), mappings)?;
            return Ok(Planned { plan, leads, originals, text: Some(text), set_log2, lacks: None });
        }
    }
    if left >= MOST_LEFT {
        return Err(Refused::Full(left));
    }
    let new = |set_log2| {
        // At most the whole text is replaced.
        let reserved =
            heapbpf_remote::reserved_bytes(mapped_bytes(set_log2), place.mapping.bytes(), place.starts.len());
        let base = target.maps().gap(&place.mapping.range, reserved).ok_or(Refused::NoSpace)?;
        let (draft, leads, originals) = draft(base, set_log2)?;
        let plan = Plan::new(draft, target.maps())?;
        limits::check(pid, (plan.range().end - plan.range().start, set_log2), mappings)?;
        Ok(Planned { plan, leads, originals, text: None, set_log2, lacks: None })
    };
    let planned = new(sampled.set_log2);
    let lacks = match planned {
        Err(Refused::Limit { name, .. }) if sampled.set_log2 > LEAST_SET_LOG2 => name,
        Err(Refused::NoSpace) if sampled.set_log2 > LEAST_SET_LOG2 => "free addresses near its allocator",
        planned => return planned,
    };
    // A smaller set may fit.
    Ok(Planned { lacks: Some(lacks), ..new(LEAST_SET_LOG2)? })
}

//! Debug information that is spread over several files: shared parts that `dwz` moved into a separate file
//! (`.gnu_debugaltlink`), and split DWARF, whose skeleton refers to `.dwo` files or a package of them (`.dwp`).
//!
//! All files may be a target's. They are read into memory within a limit, and used only if they contain the requested
//! identity.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use addr2line::{Context, LookupContinuation as _, LookupResult, SplitDwarfLoad};
use gimli::{DebugAbbrev, DebugInfo, DwarfPackage, EndianArcSlice, LittleEndian, Section as _, SectionId, UnitType};
use heapbpf_elf::Elf;
use heapbpf_elf::debug_link::{self, AltLink};
use heapbpf_host::clock::thread_cpu_time;
use heapbpf_unwind::image::Image;

use super::bounded_names::shortened;
use super::debug_files::{self, DebugFile, Root};
use super::debuginfod::Debuginfod;
use super::nesting::is_too_deep;
use super::sparse_copy::debug_bytes;
use super::symbolizer::longest;

type Bytes = EndianArcSlice<LittleEndian>;
type Dwarf = gimli::Dwarf<Bytes>;

/// Maximum number of `.dwo` files opened for one module.
const MOST_SPLIT: usize = 4096;
/// Maximum number of functions inlined into each other at one address.
const MOST_INLINED: usize = 256;

/// Where the other files may be.
#[derive(Clone, Copy)]
pub struct Places<'a> {
    /// Path of the module, as its process sees it.
    pub module: &'a Path,
    /// Path of the file with the reference: the module, or its debug file.
    pub file: &'a Path,
    /// Directories with debug files.
    pub directories: &'a [PathBuf],
    /// Root directory of a process that maps the module, if it differs from heapbpf's.
    pub root: Option<Root<'a>>,
    /// Servers with debug files.
    pub debuginfod: Option<&'a Debuginfod>,
    /// How much is read, and for how long.
    pub limits: Limits,
}

/// Limits for all files of a module together.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Maximum size of their debug information, bytes.
    pub most_bytes: u64,
    /// Maximum CPU time if little is read. It grows with each file, because their sizes are not known before.
    pub least_time: Duration,
    /// CPU time of this thread at which reading began.
    pub began: Duration,
}

impl Limits {
    /// Whether the time is over if all but `left_bytes` were read.
    pub(super) fn is_over(&self, left_bytes: u64) -> bool {
        thread_cpu_time() >= self.began + longest(self.least_time, self.most_bytes.saturating_sub(left_bytes))
    }
}

/// A function at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its linkage name, shortened.
    pub name: String,
    /// Source file, shortened.
    pub file: Option<String>,
    /// Source line.
    pub line: Option<u32>,
}

/// The debug information of a file together with that of other files.
pub struct LinkedDwarf<'a> {
    context: Context<Bytes>,
    places: Places<'a>,
    package: Option<DwarfPackage<Bytes>>,
    split: HashMap<u64, Option<Arc<Dwarf>>>,
    left_bytes: u64,
    /// What was not found, as a text for the user.
    pub missing: Option<String>,
    /// Whether the file with the shared parts was not found. Most functions then have no name here.
    pub lacks_shared: bool,
    /// Whether another file was not read for lack of time.
    pub is_too_slow: bool,
}

impl<'a> LinkedDwarf<'a> {
    /// Reads the debug information of `image`. Returns `None` if it refers to no other file, exceeds the limits or is
    /// malformed.
    pub fn open(image: &dyn Image, elf: &Elf, places: Places<'a>) -> Option<Self> {
        let alt = debug_link::alt_of(image, elf);
        if alt.is_none() && elf.section(".debug_addr").is_none() {
            return None;
        }
        let limits = &places.limits;
        let mut left_bytes = limits.most_bytes;
        let mut dwarf = load(image, elf, (&mut left_bytes, limits), |id| Some(id.name()))?;
        if alt.is_none() && !has_skeletons(&dwarf) {
            return None;
        }
        let mut missing = None;
        if let Some(alt) = &alt {
            match shared(alt, &places) {
                Some(file) => {
                    let left = (&mut left_bytes, limits);
                    dwarf.set_sup(load(&file.file, &file.elf, left, |id| Some(id.name()))?);
                }
                None => missing = Some(format!("the shared debug file {} was not found", alt.path.display())),
            }
        }
        let lacks_shared = missing.is_some();
        let package = package(&places, &mut left_bytes);
        let context = Context::from_dwarf(dwarf).ok()?;
        let (split, is_too_slow) = (HashMap::new(), false);
        Some(Self { context, places, package, split, left_bytes, missing, lacks_shared, is_too_slow })
    }

    /// Whether the time is over.
    pub fn is_over(&self) -> bool {
        self.places.limits.is_over(self.left_bytes)
    }

    /// Returns the functions at an address, innermost first. Empty if no function with a name contains it.
    pub fn functions(&mut self, address: u64) -> Vec<Function> {
        let Self { context, places, package, split, left_bytes, missing, is_too_slow, .. } = self;
        let mut lookup = context.find_frames(address);
        let mut frames = loop {
            match lookup {
                LookupResult::Output(frames) => match frames {
                    Ok(frames) => break frames,
                    Err(_) => return Vec::new(),
                },
                LookupResult::Load { load, continuation } => {
                    let fits = split.len() < MOST_SPLIT;
                    let found = split
                        .entry(load.dwo_id.0)
                        .or_insert_with(|| fits.then(|| split_unit(&load, places, package.as_ref(), left_bytes))?);
                    if found.is_none() && places.limits.is_over(*left_bytes) {
                        *is_too_slow = true;
                    } else if found.is_none() {
                        let path = load.path.as_ref().map(|path| shortened(path.bytes()).into_owned());
                        missing.get_or_insert_with(|| format!("{} was not found", path.unwrap_or_default()));
                    }
                    lookup = continuation.resume(found.clone());
                }
            }
        };
        let mut functions = Vec::new();
        while let Ok(Some(frame)) = frames.next() {
            let name = frame.function.as_ref().map(|function| shortened(function.name.bytes()).into_owned());
            let Some(name) = name.filter(|_| functions.len() < MOST_INLINED) else { return Vec::new() };
            let (file, line) = frame.location.map_or((None, None), |place| (place.file, place.line));
            let file = file.map(|file| shortened(file.as_bytes()).into_owned());
            functions.push(Function { name, file, line: line.filter(|line| *line > 0) });
        }
        functions
    }
}

/// The sections with the tree of entries. `None` if they cannot be read, or if other readers might take other sections,
/// because several have these names.
pub fn entries(image: &dyn Image, elf: &Elf) -> Option<(DebugInfo<Bytes>, DebugAbbrev<Bytes>)> {
    for name in [SectionId::DebugInfo, SectionId::DebugAbbrev].map(|id| id.name()) {
        let all = elf.sections.iter().filter(|section| section.name == name).count();
        if all != usize::from(elf.section(name).is_some()) {
            return None;
        }
    }
    let load = |id: SectionId| section(image, elf, Some(id.name()));
    Some((DebugInfo::load(load).ok()?, DebugAbbrev::load(load).ok()?))
}

/// Reads debug sections. Returns `None` if they exceed the bytes or the time left, or are nested too deeply.
fn load(
    image: &dyn Image,
    elf: &Elf,
    (left_bytes, limits): (&mut u64, &Limits),
    name: impl Fn(SectionId) -> Option<&'static str>,
) -> Option<Dwarf> {
    *left_bytes = left_bytes.checked_sub(debug_bytes(image, elf))?;
    let dwarf = gimli::Dwarf::load(|id| section(image, elf, name(id))).ok()?;
    let is_over = || limits.is_over(*left_bytes);
    (!is_too_deep(&dwarf.debug_info, &dwarf.debug_abbrev, &is_over)).then_some(dwarf)
}

fn section(image: &dyn Image, elf: &Elf, name: Option<&str>) -> Result<Bytes, gimli::Error> {
    let found = name.and_then(|name| elf.section(name)).filter(|section| section.kind != heapbpf_elf::SHT_NOBITS);
    let bytes = found.map(|section| section.read(image, u64::MAX)).transpose().map_err(|_| gimli::Error::Io)?;
    Ok(EndianArcSlice::new(bytes.unwrap_or_default().into(), LittleEndian))
}

/// Whether any of its units have most of their information elsewhere.
fn has_skeletons(dwarf: &Dwarf) -> bool {
    let mut units = dwarf.units();
    while let Ok(Some(header)) = units.next() {
        let is_skeleton = match header.type_() {
            UnitType::Skeleton(_) => true,
            _ if header.version() < 5 => dwarf.unit(header).is_ok_and(|unit| unit.dwo_id.is_some()),
            _ => false,
        };
        if is_skeleton {
            return true;
        }
    }
    false
}

/// Returns the file with the parts that `dwz` moved out.
fn shared(link: &AltLink, places: &Places) -> Option<DebugFile> {
    let beside = places.file.parent().unwrap_or(Path::new("/")).join(&link.path);
    let by_id = |directory: &PathBuf| debug_files::by_build_id(directory, &link.build_id);
    let names = places.directories.iter().flat_map(by_id).chain([beside]);
    let is_it = |file: &DebugFile| heapbpf_elf::build_id::of(&file.file).as_deref() == Some(&*link.build_id);
    let found = open_first(places, names, is_it);
    found.or_else(|| {
        let file = places.debuginfod?.lock().find(&link.build_id).ok()?;
        debug_files::check(link.path.clone(), file, false)
    })
}

/// Returns the package with all split units of the module, from beside it or from a directory with debug files.
fn package(places: &Places, left_bytes: &mut u64) -> Option<DwarfPackage<Bytes>> {
    let mut name = places.module.file_name()?.to_owned();
    name.push(".dwp");
    let beside = places.module.parent()?.join(&name);
    let names = std::iter::once(beside).chain(places.directories.iter().map(|directory| directory.join(&name)));
    let file = open_first(places, names, |file| file.elf.section(".debug_cu_index").is_some())?;
    *left_bytes = left_bytes.checked_sub(debug_bytes(&file.file, &file.elf))?;
    let empty = EndianArcSlice::new(Vec::new().into(), LittleEndian);
    DwarfPackage::load(|id| section(&file.file, &file.elf, id.dwo_name()), empty).ok()
}

/// Returns the unit that a skeleton refers to.
fn split_unit(
    wanted: &SplitDwarfLoad<Bytes>,
    places: &Places,
    package: Option<&DwarfPackage<Bytes>>,
    left_bytes: &mut u64,
) -> Option<Arc<Dwarf>> {
    use std::os::unix::ffi::OsStrExt as _;
    if let Some(found) = package.and_then(|package| package.find_cu(wanted.dwo_id, &wanted.parent).ok()?) {
        let is_over = || places.limits.is_over(*left_bytes);
        return (!is_too_deep(&found.debug_info, &found.debug_abbrev, &is_over)).then(|| Arc::new(found));
    }
    let path = |bytes: &Option<Bytes>| bytes.as_ref().map(|it| PathBuf::from(std::ffi::OsStr::from_bytes(it.bytes())));
    let name = path(&wanted.path)?;
    let built = path(&wanted.comp_dir).unwrap_or_default().join(&name);
    let plain = PathBuf::from(name.file_name()?);
    let beside = places.module.parent()?.join(&plain);
    let names = [built, beside].into_iter().chain(places.directories.iter().map(|directory| directory.join(&plain)));
    let file = open_first(places, names, |file| file.elf.section(".debug_info.dwo").is_some())?;
    let mut dwarf = load(&file.file, &file.elf, (left_bytes, &places.limits), |id| id.dwo_name())?;
    dwarf.make_dwo(&wanted.parent);
    let header = dwarf.units().next().ok()??;
    let is_it = match header.type_() {
        UnitType::SplitCompilation(id) => id == wanted.dwo_id,
        _ => dwarf.unit(header).ok()?.dwo_id == Some(wanted.dwo_id),
    };
    is_it.then(|| Arc::new(dwarf))
}

/// Opens the first of these files that matches, here and then below the module's root.
fn open_first(
    places: &Places,
    names: impl Iterator<Item = PathBuf>,
    is_it: impl Fn(&DebugFile) -> bool,
) -> Option<DebugFile> {
    let names: Vec<PathBuf> = names.filter(|name| name.is_absolute()).collect();
    let roots = std::iter::once(None).chain(places.root.map(Some));
    let mut candidates = roots.flat_map(|root| names.iter().map(move |name| (root, name)));
    candidates.find_map(|(root, name)| debug_files::open_at(root, name.clone(), false).filter(&is_it))
}

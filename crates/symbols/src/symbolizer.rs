//! Symbolizes batches of (module, file offset) pairs with blazesym: functions, files, lines and inlined calls.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blazesym::symbolize::source::{Elf as ElfSource, Source};
use blazesym::symbolize::{CodeInfo, Input, Sym, Symbolized, Symbolizer as Blazesym};
use heapbpf_elf::{Elf, unpack_debugdata};
use heapbpf_host::clock::thread_cpu_time;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::own_memory::give_memory_back;
use heapbpf_host::roots::Roots;
use heapbpf_profile::model::Frame;
use heapbpf_unwind::cfi::ModuleCfi;
use heapbpf_unwind::image::{Image, ModuleFiles};

use super::bounded_names::shortened;
use super::debug_files::{self, DebugFile, Root};
use super::demangle::is_mapping_symbol;
use super::linked_dwarf::{Limits, LinkedDwarf, Places, entries};
use super::nesting::is_too_deep;
use super::options::Options;
use super::packages::KnownOwners;
use super::progress::Progress;
use super::reasons::{self, Stripped};
use super::sparse_copy::{Contents, SparseCopy, debug_bytes};

/// Bytes of debug information in a batch after which the heap is trimmed.
const TRIM_BYTES: u64 = 16 << 20;
/// Maximum number of addresses whose frames are kept from batch to batch: enough for a recording of a large host. A
/// frame has 136 bytes, without its names, which are shared.
const MOST_ADDRESSES: usize = 3 << 16;
/// Number of a module's names that may take too long to demangle. After that, its other names stay mangled.
const MOST_TOO_LONG: usize = 8;
/// Maximum size of a `.gnu_debugdata` section that is unpacked, bytes.
const MAX_PACKED_BYTES: u64 = 16 << 20;
/// Maximum CPU time for reading a file's debug information: this much, and more for each MiB. A small file may be made
/// so that reading it takes hours.
const LEAST_TIME: Duration = Duration::from_secs(5);
const TIME_OF_A_MIB: Duration = Duration::from_secs(1);
/// Number of addresses that are looked up between two looks at the clock.
const AT_ONCE: usize = 16;

/// Maximum CPU time for reading debug information of this size.
pub(super) fn longest(least: Duration, bytes: u64) -> Duration {
    least + TIME_OF_A_MIB * u32::try_from(bytes >> 20).unwrap_or(u32::MAX)
}

/// Symbolizes addresses of modules, and caches the result.
pub struct Symbolizer {
    options: Options,
    /// The frames of each address of a module, without their places.
    known: HashMap<(ModuleId, u64), Arc<[Frame]>>,
    texts: HashSet<Arc<str>>,
    notes: BTreeSet<String>,
    /// Why functions of a module have no names.
    reasons: HashMap<ModuleId, Arc<str>>,
    /// Modules of the current batch that lack names because they are stripped, with their paths.
    stripped: Vec<Stripped>,
    packages: KnownOwners,
    roots: Roots,
    /// Cache size at which the cache is cleared, addresses.
    pub(super) most_addresses: usize,
    /// Debug information used in the current batch, bytes.
    worked_bytes: u64,
    /// Number of the current module's names that were not demangled because that takes too long.
    too_long: usize,
    /// Modules for which that was reported.
    has_long_names: HashSet<ModuleId>,
    /// See [`LEAST_TIME`].
    pub(super) least_time: Duration,
    /// CPU time of this thread at which reading debug information ends.
    until: Duration,
    /// Whether reading the current module's debug information took too long.
    is_too_slow: bool,
    progress: Arc<Progress>,
}

impl Default for Symbolizer {
    fn default() -> Self {
        Self::new(Options::default())
    }
}

impl Symbolizer {
    /// A symbolizer with an empty cache.
    pub fn new(options: Options) -> Self {
        Self::reporting_to(options, Arc::default())
    }

    /// Creates a symbolizer that reports the progress of each batch to `progress`.
    pub fn reporting_to(options: Options, progress: Arc<Progress>) -> Self {
        if let Some(debuginfod) = &options.debuginfod {
            debuginfod.lock().report_to(Arc::clone(&progress));
        }
        Self {
            options,
            known: HashMap::new(),
            texts: HashSet::new(),
            notes: BTreeSet::new(),
            reasons: HashMap::new(),
            stripped: Vec::new(),
            packages: KnownOwners::default(),
            roots: Roots::default(),
            most_addresses: MOST_ADDRESSES,
            worked_bytes: 0,
            too_long: 0,
            has_long_names: HashSet::new(),
            least_time: LEAST_TIME,
            until: Duration::ZERO,
            is_too_slow: false,
            progress,
        }
    }

    /// Symbolizes all `addresses` (module, file offset) that are not in the cache, module by module. Takes seconds for
    /// large debug information, so it must not run on the event path. A cache that is too large is cleared first.
    pub fn symbolize(&mut self, modules: &mut dyn ModuleFiles, addresses: impl IntoIterator<Item = (ModuleId, u64)>) {
        if self.known.len() > self.most_addresses {
            self.known.clear();
            self.texts.clear();
            // The reasons and notes for modules that are needed again are found again.
            self.reasons.clear();
            self.notes.clear();
        }
        let mut wanted: BTreeMap<ModuleId, Vec<u64>> = BTreeMap::new();
        for (module, offset) in addresses {
            if !self.known.contains_key(&(module, offset)) {
                wanted.entry(module).or_default().push(offset);
            }
        }
        for offsets in wanted.values_mut() {
            offsets.sort_unstable();
            offsets.dedup();
        }
        self.progress.begin(wanted.values().map(Vec::len).sum());
        if let Some(debuginfod) = &self.options.debuginfod {
            debuginfod.lock().begin_batch();
        }
        for (module, offsets) in wanted {
            let found = self.symbolize_module(modules, module, &offsets);
            for (offset, symbols) in offsets.into_iter().zip(found) {
                self.known.insert((module, offset), symbols);
                self.progress.advance(1);
            }
        }
        self.advise();
        if std::mem::take(&mut self.worked_bytes) > TRIM_BYTES {
            give_memory_back();
        }
    }

    /// Forgets everything about these modules, and all notes.
    pub fn forget(&mut self, is_gone: impl Fn(&ModuleId) -> bool) {
        self.known.retain(|(module, _), _| !is_gone(module));
        self.reasons.retain(|module, _| !is_gone(module));
        self.has_long_names.retain(|module| !is_gone(module));
        // They name modules only by path.
        self.notes.clear();
        self.texts.retain(|text| Arc::strong_count(text) > 1);
    }

    /// Remarks for the user about symbols with less detail than was available.
    pub fn notes(&self) -> impl Iterator<Item = &str> {
        self.notes.iter().map(String::as_str)
    }

    /// Returns why functions of a module have no names. `None` if no function without a name was requested.
    pub fn reason(&self, module: ModuleId) -> Option<&Arc<str>> {
        self.reasons.get(&module)
    }

    /// Returns the frames of an address without their places, innermost (inlined) first. Empty if it was not
    /// symbolized.
    pub fn get(&self, module: ModuleId, file_offset: u64) -> Arc<[Frame]> {
        self.known.get(&(module, file_offset)).cloned().unwrap_or_default()
    }

    /// Number of cached addresses, including those without a name.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Symbolizes `offsets` of a module. Returns one result for each.
    fn symbolize_module(
        &mut self,
        modules: &mut dyn ModuleFiles,
        module: ModuleId,
        offsets: &[u64],
    ) -> Vec<Arc<[Frame]>> {
        let path = modules.path(module);
        let unnamed = |texts: &mut Self, reason: &str| vec![texts.unnamed(reason); offsets.len()];
        if modules.is_anonymous(module) {
            return unnamed(self, "code made at run time, and no perf map names it");
        }
        let image = match modules.image(module) {
            Ok(image) => image,
            Err(reason) => return unnamed(self, &format!("cannot read {path}: {reason}")),
        };
        let elf = match Elf::read(&*image) {
            Ok(elf) => elf,
            Err(error) => return unnamed(self, &format!("{path}: {error}")),
        };
        let build_id = modules.build_id(module).or_else(|| heapbpf_elf::build_id::of(&*image));
        let addresses: Vec<Option<u64>> =
            offsets.iter().map(|offset| modules.address_of_offset(module, &elf, *offset)).collect();
        let mut found: Vec<Option<Arc<[Frame]>>> = vec![None; offsets.len()];
        let mut reason = String::new();
        (self.too_long, self.is_too_slow) = (0, false);

        let (root, roots) = (modules.root(module), self.roots.clone());
        let root = root.as_deref().map(|root| (root, &roots));
        let (debug_file, refusal) = self.debug_file(&path, build_id.as_deref(), &*image, &elf, root);
        if let Some(debug) = debug_file {
            let places = (&*path, &*debug.path, root);
            let contents = match self.look_up_linked(&debug.file, &debug.elf, places, &addresses, &mut found) {
                true => Contents::Symbols,
                false => self.contents(&debug.path.to_string_lossy(), &debug.file, &debug.elf, debug.is_trusted),
            };
            let result = if debug.is_trusted {
                self.look_up(&debug.path, contents, &addresses, &mut found)
            } else {
                self.look_up_copied(&debug.file, &debug.elf, contents, &addresses, &mut found)
            };
            if let Err(error) = result {
                reason = format!("{}: {error}", debug.path.display());
            }
        }
        if found.iter().any(Option::is_none) {
            let places = (&*path, Path::new(&*path), root);
            let contents = match self.look_up_linked(&*image, &elf, places, &addresses, &mut found) {
                true => Contents::Symbols,
                false => self.contents(&path, &*image, &elf, false),
            };
            match self.look_up_copied(&*image, &elf, contents, &addresses, &mut found) {
                Ok(()) => {}
                Err(error) if reason.is_empty() => reason = format!("{path}: {error}"),
                Err(_) => {}
            }
        }
        if found.iter().any(Option::is_none)
            && let Some((mini, mini_elf)) = mini_debug_information(&*image, &elf)
        {
            let result = self.look_up_copied(&mini, &mini_elf, Contents::Symbols, &addresses, &mut found);
            if let (Err(error), true) = (result, reason.is_empty()) {
                reason = format!("{path} (.gnu_debugdata): {error}");
            }
        }
        if found.iter().any(Option::is_none) {
            if reason.is_empty() {
                reason = reasons::why_unnamed(&path, &elf, refusal.as_deref());
                if reasons::is_stripped(&elf) && root.is_none() {
                    self.stripped.push(Stripped { module, path: Arc::clone(&path), refusal });
                }
            }
            let text = self.text(&reason);
            self.reasons.insert(module, text);
            self.by_unwind_entries(&*image, &addresses, &mut found);
        }
        if self.too_long > 0 && self.has_long_names.insert(module) {
            log::warn!("{path}: C++ names are shown as they are, because some take too long to demangle");
        }
        if self.is_too_slow {
            self.notes.insert(format!(
                "{path}: debug information takes too long to read, so lines and inlined calls are missing"
            ));
        }
        let nameless = self.unnamed(&reason);
        found.into_iter().map(|symbols| symbols.unwrap_or_else(|| nameless.clone())).collect()
    }

    /// Returns the debug file of a module, from a directory or from a server. Otherwise returns why no server has it,
    /// if any was asked.
    fn debug_file(
        &self,
        path: &str,
        build_id: Option<&[u8]>,
        image: &dyn Image,
        elf: &Elf,
        root: Option<Root<'_>>,
    ) -> (Option<DebugFile>, Option<String>) {
        let directories = &self.options.debug_directories;
        let found = debug_files::find(directories, Path::new(path), build_id, image, elf, root);
        if found.is_some() || path.starts_with('[') || debug_bytes(image, elf) > 0 {
            return (found, None);
        }
        match self.ask_for(path, build_id) {
            Some(Ok(found)) => (Some(found), None),
            Some(Err(why)) => (None, Some(why)),
            None => (None, None),
        }
    }

    /// Fills gaps in `found` from debug information in several files. `paths` are those of the module, of the file with
    /// the references, and of the module's root if that is not ours. Returns whether names must come from symbol tables
    /// only, because a file with the names is missing.
    fn look_up_linked(
        &mut self,
        image: &dyn Image,
        elf: &Elf,
        (module, file, root): (&str, &Path, Option<Root<'_>>),
        addresses: &[Option<u64>],
        found: &mut [Option<Arc<[Frame]>>],
    ) -> bool {
        let options = self.options.clone();
        let (directories, debuginfod) = (&*options.debug_directories, options.debuginfod.as_ref());
        let limits =
            Limits { most_bytes: options.max_debug_bytes, least_time: self.least_time, began: thread_cpu_time() };
        let places = Places { module: Path::new(module), file, directories, root, debuginfod, limits };
        // The debug information may be a target's, so a panic must not escape.
        let looked_up = catch_unwind(AssertUnwindSafe(|| {
            let Some(mut linked) = LinkedDwarf::open(image, elf, places) else {
                let left_bytes = limits.most_bytes.saturating_sub(debug_bytes(image, elf));
                self.is_too_slow |= limits.is_over(left_bytes);
                return None;
            };
            self.worked_bytes += debug_bytes(image, elf);
            for (found, address) in found.iter_mut().zip(addresses).filter(|(found, _)| found.is_none()) {
                if linked.is_over() {
                    self.is_too_slow = true;
                    break;
                }
                let functions = address.map(|address| linked.functions(address)).unwrap_or_default();
                let last = functions.len().saturating_sub(1);
                let symbols = functions.iter().enumerate();
                let symbols: Vec<Frame> =
                    symbols.map(|(at, it)| self.symbol(&it.name, it.file.as_deref(), it.line, at < last)).collect();
                *found = Some(symbols.into()).filter(|symbols: &Arc<[Frame]>| !symbols.is_empty());
            }
            self.is_too_slow |= linked.is_too_slow;
            Some((linked.missing, linked.lacks_shared))
        }));
        let (missing, lacks_shared) = looked_up.ok().flatten().unwrap_or_default();
        if let Some(missing) = missing {
            self.notes.insert(format!("{module}: {missing}: lines or inlined calls may be missing"));
        }
        lacks_shared
    }

    /// Asks debuginfod servers for a module's debug file. Returns `None` if there are no servers or it has no build ID.
    fn ask_for(&self, path: &str, build_id: Option<&[u8]>) -> Option<Result<DebugFile, String>> {
        let (debuginfod, build_id) = (self.options.debuginfod.as_ref()?, build_id?);
        let found = debuginfod.lock().find(build_id);
        let name = || format!("{path} (from debuginfod)").into();
        Some(found.and_then(|file| debug_files::check(name(), file, false).ok_or_else(|| "not an ELF file".into())))
    }

    /// Fills gaps in `found` with functions that are known only by their unwind entries.
    fn by_unwind_entries(&mut self, image: &dyn Image, addresses: &[Option<u64>], found: &mut [Option<Arc<[Frame]>>]) {
        // The unwind information is a target's, like the debug information.
        let starts = catch_unwind(AssertUnwindSafe(|| {
            let cfi = ModuleCfi::read(image).ok()?;
            self.worked_bytes += cfi.size_bytes() as u64;
            let start = |(address, found): (&Option<u64>, &Option<_>)| match found {
                None => cfi.function_start((*address)?),
                Some(_) => None,
            };
            Some(addresses.iter().zip(&*found).map(start).collect::<Vec<_>>())
        }));
        for (found, start) in found.iter_mut().zip(starts.ok().flatten().unwrap_or_default()) {
            if start.is_some() {
                *found = Some([Frame { function_start: start, ..Frame::default() }].into());
            }
        }
    }

    /// Adds to the reasons of stripped modules the package that has their debug symbols.
    fn advise(&mut self) {
        let stripped = std::mem::take(&mut self.stripped);
        for (module, reason) in reasons::with_packages(&stripped, &mut self.packages) {
            let reason = self.text(&reason);
            self.reasons.insert(module, reason);
        }
    }

    /// Returns which sections of a file to use.
    fn contents(&mut self, path: &str, image: &dyn Image, elf: &Elf, is_trusted: bool) -> Contents {
        let bytes = debug_bytes(image, elf);
        if bytes == 0 {
            return Contents::Symbols;
        }
        if bytes > self.options.max_debug_bytes {
            let (has, limit) = (bytes >> 20, self.options.max_debug_bytes >> 20);
            self.notes.insert(format!(
                "{path}: debug information of {has} MiB is above the limit of {limit} MiB, so lines and inlined calls are missing"
            ));
            return Contents::Symbols;
        }
        self.worked_bytes += bytes;
        let until = thread_cpu_time() + longest(self.least_time, bytes);
        let is_over = || thread_cpu_time() >= until;
        self.until = until;
        let is_readable =
            is_trusted || entries(image, elf).is_some_and(|(info, abbrev)| !is_too_deep(&info, &abbrev, &is_over));
        if !is_readable && is_over() {
            self.is_too_slow = true;
            return Contents::Symbols;
        }
        if !is_readable {
            let consequence = "so lines and inlined calls are missing";
            self.notes.insert(format!("{path}: debug information is malformed or nested too deeply, {consequence}"));
            return Contents::Symbols;
        }
        Contents::DebugInformation
    }

    /// Does the same as [`Self::look_up`] with a sparse copy of the file.
    fn look_up_copied(
        &mut self,
        image: &dyn Image,
        elf: &Elf,
        contents: Contents,
        addresses: &[Option<u64>],
        found: &mut [Option<Arc<[Frame]>>],
    ) -> Result<(), String> {
        if let Ok(copy) = SparseCopy::new(image, elf, contents) {
            return self.look_up(&copy.path(), contents, addresses, found);
        }
        let copy = SparseCopy::new(image, elf, Contents::Symbols).map_err(|error| error.to_string())?;
        self.look_up(&copy.path(), Contents::Symbols, addresses, found)
    }

    /// Fills the gaps in `found` from one file. Falls back to its symbol tables if its debug information is malformed.
    fn look_up(
        &mut self,
        path: &Path,
        contents: Contents,
        addresses: &[Option<u64>],
        found: &mut [Option<Arc<[Frame]>>],
    ) -> Result<(), String> {
        let open: Vec<usize> =
            (0..addresses.len()).filter(|at| found[*at].is_none() && addresses[*at].is_some()).collect();
        let wanted: Vec<u64> = open.iter().filter_map(|at| addresses[*at]).collect();
        let mut result = self.ask(path, contents, &wanted);
        if result.is_err() && contents != Contents::Symbols {
            result = self.ask(path, Contents::Symbols, &wanted);
        }
        for (at, symbols) in open.into_iter().zip(result?) {
            found[at] = symbols;
        }
        Ok(())
    }

    fn ask(&mut self, path: &Path, contents: Contents, addresses: &[u64]) -> Result<Vec<Option<Arc<[Frame]>>>, String> {
        let with_debug = contents == Contents::DebugInformation;
        // Each batch gets a new blazesym instance, so that its caches cannot become stale.
        // The debug information may be a target's. Its parsers should return errors, but a panic must not escape
        // either.
        let asked = catch_unwind(AssertUnwindSafe(|| {
            let blazesym = Blazesym::builder()
                .enable_auto_reload(false)
                .enable_code_info(with_debug)
                .enable_inlined_fns(with_debug)
                .enable_demangling(false)
                .set_debug_dirs(Some(&self.options.debug_directories))
                .build();
            let mut source = ElfSource::new(path);
            source.debug_syms = with_debug;
            let source = Source::Elf(source);
            let mut found = Vec::with_capacity(addresses.len());
            for some in addresses.chunks(AT_ONCE) {
                if with_debug && thread_cpu_time() >= self.until {
                    self.is_too_slow = true;
                    return Err("debug information takes too long to read".into());
                }
                let answer = blazesym.symbolize(&source, Input::VirtOffset(some));
                let answer = answer.map_err(|error| error.to_string())?;
                found.extend(answer.iter().map(|symbolized| self.symbols(symbolized)));
            }
            Ok(found)
        }));
        asked.unwrap_or_else(|_| Err("malformed debug information".into()))
    }

    fn symbols(&mut self, symbolized: &Symbolized) -> Option<Arc<[Frame]>> {
        let Symbolized::Sym(Sym { name, code_info, inlined, .. }) = symbolized else { return None };
        // The symbol nearest to a stub in the procedure linkage table, which has no name itself.
        if is_mapping_symbol(name) {
            return None;
        }
        let mut symbols = Vec::with_capacity(1 + inlined.len());
        for call in inlined.iter().rev() {
            symbols.push(self.symbol_of(&call.name, call.code_info.as_ref(), true));
        }
        symbols.push(self.symbol_of(name, code_info.as_deref(), false));
        Some(symbols.into())
    }

    fn symbol_of(&mut self, name: &str, code: Option<&CodeInfo>, inlined: bool) -> Frame {
        let file = code.map(|code| code.to_path().to_string_lossy().into_owned());
        self.symbol(name, file.as_deref(), code.and_then(|code| code.line), inlined)
    }

    fn symbol(&mut self, name: &str, file: Option<&str>, line: Option<u32>, inlined: bool) -> Frame {
        let demangled = self.demangled(name);
        let system_name = demangled.is_some().then(|| self.text(name));
        let reason = name.is_empty().then(|| self.text("the debug information has no name for this address"));
        let function = (!name.is_empty()).then(|| self.text(demangled.as_deref().unwrap_or(name)));
        let file = file.map(|file| self.text(file));
        Frame { function, system_name, file, line, inlined, reason, ..Frame::default() }
    }

    /// Returns the demangled name, if the name is mangled and does not take too long.
    fn demangled(&mut self, name: &str) -> Option<String> {
        if self.too_long >= MOST_TOO_LONG {
            return None;
        }
        self.options.demangler.demangle(name).unwrap_or_else(|_| {
            self.too_long += 1;
            None
        })
    }

    /// Shortens a text and interns it, so that equal texts share an `Arc`.
    fn text(&mut self, text: &str) -> Arc<str> {
        let text = shortened(text.as_bytes());
        if let Some(known) = self.texts.get(&*text) {
            return known.clone();
        }
        let text: Arc<str> = text.into();
        self.texts.insert(text.clone());
        text
    }

    fn unnamed(&mut self, reason: &str) -> Arc<[Frame]> {
        let reason = Some(self.text(reason));
        [Frame { reason, ..Frame::default() }].into()
    }
}

/// Returns the compressed symbol table that some distributions embed in stripped files (`.gnu_debugdata`). It has the
/// same addresses as the file itself.
fn mini_debug_information(image: &dyn Image, elf: &Elf) -> Option<(Vec<u8>, Elf)> {
    let packed = elf.section(".gnu_debugdata")?.read(image, MAX_PACKED_BYTES).ok()?;
    let mini = unpack_debugdata(&packed)?;
    let elf = Elf::read(&mini).ok()?;
    Some((mini, elf))
}

#[cfg(test)]
mod tests {
    use super::super::bounded_names::MOST_BYTES;
    use super::*;

    /// A symbol table may hold one name as long as itself, and many names that are its ends.
    #[test]
    fn long_names_and_paths_are_kept_shortened() {
        let mut symbolizer = Symbolizer::default();
        let long = "x".repeat(3 * MOST_BYTES);
        for start in 0..20 {
            let symbol = symbolizer.symbol(&long[start..], Some(&long), Some(1), false);
            assert!(symbol.function.is_some_and(|name| name.len() == MOST_BYTES && name.ends_with('…')));
            assert!(symbol.file.is_some_and(|file| file.len() == MOST_BYTES));
        }
        // The type of each parameter is that of the first.
        let mangled = format!("_Z1f2000{}S_S_S_S_", "a".repeat(2000));
        let symbol = symbolizer.symbol(&mangled, None, None, false);
        assert!(symbol.function.is_some_and(|name| name.starts_with("f(aa") && name.len() == MOST_BYTES));
        assert_eq!(symbol.system_name.as_deref(), Some(&*mangled));
        assert!(symbolizer.texts.iter().all(|text| text.len() <= MOST_BYTES));
    }

    #[test]
    fn notes_do_not_outlive_their_modules() {
        let mut symbolizer = Symbolizer::default();
        symbolizer.notes.insert("/a: no lines".into());
        symbolizer.forget(|_| true);
        assert_eq!(symbolizer.notes().count(), 0);
    }
}

//! Tests of symbolization with real and hostile modules.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_elf::Elf;
use heapbpf_host::mappings::ModuleId;
use heapbpf_profile::model::{Frame, SharedFrames};
use heapbpf_testing::own_process::{OwnProcess, Random, captured, unwind};
use heapbpf_testing::skipped;
use heapbpf_unwind::image::{Image, ModuleFiles};
use heapbpf_unwind::raw::{Completeness, RawStack, Reason, UnwinderKind};

use super::finish::Finisher;
use super::options::Options;
use super::runtime_functions::RuntimeFunctions;
use super::symbolizer::Symbolizer;

/// A function with two levels of inlined calls, on known lines.
pub(super) const SOURCE: &str = "\
extern void *volatile sink;
static inline __attribute__((always_inline)) int innermost(int x) {
    sink = (void *)(long)x;
    return x + 1;
}
static inline __attribute__((always_inline)) int middle(int x) {
    return innermost(x) * 3;
}
__attribute__((noinline)) int outer(int x) {
    return middle(x) + 2;
}
void *volatile sink;
__attribute__((noinline)) static int hidden(int x) { sink = (void *)(long)(x * 2); return x; }
int calls_hidden(int x) { return hidden(x) + hidden(x + 1); }
";

/// One module: a file read into memory, with a path that need not exist.
pub(super) struct One {
    pub(super) image: Arc<dyn Image>,
    pub(super) path: Arc<str>,
    pub(super) root: Option<PathBuf>,
}

pub(super) const MODULE: ModuleId = ModuleId(0);

impl One {
    pub(super) fn file(path: &Path) -> Self {
        let image = Arc::new(std::fs::read(path).expect("readable"));
        Self { image, path: path.to_str().expect("UTF-8").into(), root: None }
    }
}

impl ModuleFiles for One {
    fn image(&mut self, _: ModuleId) -> Result<Arc<dyn Image>, String> {
        Ok(self.image.clone())
    }

    fn path(&self, _: ModuleId) -> Arc<str> {
        self.path.clone()
    }

    fn build_id(&self, _: ModuleId) -> Option<Vec<u8>> {
        None
    }

    fn is_anonymous(&self, _: ModuleId) -> bool {
        false
    }

    fn root(&self, _: ModuleId) -> Option<PathBuf> {
        self.root.clone()
    }
}

pub(super) fn run(program: &str, arguments: &[&str]) -> bool {
    match Command::new(program).args(arguments).status() {
        Ok(status) if status.success() => true,
        other => {
            skipped(format_args!("{program} {arguments:?}: {other:?}"));
            false
        }
    }
}

/// Compiles [`SOURCE`] into `directory/libnames.so` with debug information.
pub(super) fn compile(dir: &Path) -> Option<PathBuf> {
    let (code, library) = (dir.join("names.c"), dir.join("libnames.so"));
    std::fs::write(&code, SOURCE).expect("write");
    let arguments = ["-shared", "-fPIC", "-O2", "-g", "-Wl,--build-id", "-o"];
    let paths = [library.to_str().expect("UTF-8"), code.to_str().expect("UTF-8")];
    run("cc", &[&arguments[..], &paths[..]].concat()).then_some(library)
}

/// The same in a temporary directory.
fn compiled() -> Option<(tempfile::TempDir, PathBuf)> {
    let dir = tempfile::tempdir().expect("temporary directory");
    let library = compile(dir.path())?;
    Some((dir, library))
}

/// File offset of a symbol's first instruction, by `nm`.
pub(super) fn offset_of(library: &Path, name: &str) -> u64 {
    let listing = Command::new("nm").arg(library).output().expect("binutils come with cc");
    let listing = String::from_utf8(listing.stdout).expect("text");
    let line = listing.lines().find(|line| line.ends_with(&format!(" {name}"))).expect("symbol");
    let address = u64::from_str_radix(&line[..16], 16).expect("hexadecimal");
    let bytes = std::fs::read(library).expect("readable");
    Elf::read(&bytes).expect("ELF").offset_of_address(address).expect("in a segment")
}

fn symbolize(options: Options, modules: &mut dyn ModuleFiles, offset: u64) -> Arc<[Frame]> {
    let mut symbolizer = Symbolizer::new(options);
    symbolizer.symbolize(modules, [(MODULE, offset)]);
    symbolizer.get(MODULE, offset)
}

pub(super) fn functions(symbols: &[Frame]) -> Vec<&str> {
    symbols.iter().map(|symbol| symbol.function.as_deref().unwrap_or("?")).collect()
}

pub(super) fn no_debug_files() -> Options {
    Options { debug_directories: vec![], ..Options::default() }
}

#[test]
fn inlined_calls_files_and_lines() {
    let Some((_dir, library)) = compiled() else { return };
    let (start, mut seen) = (offset_of(&library, "outer"), None);
    // Find the instruction that carries the store of the innermost function.
    for offset in start..start + 32 {
        let symbols = symbolize(no_debug_files(), &mut One::file(&library), offset);
        if functions(&symbols) == ["innermost", "middle", "outer"] {
            seen = Some(symbols);
        }
    }
    let symbols = seen.expect("the store is somewhere in there");
    assert_eq!(symbols.iter().map(|symbol| symbol.inlined).collect::<Vec<_>>(), [true, true, false]);
    assert!(matches!(symbols[0].line, Some(3 | 4)), "{symbols:?}");
    assert_eq!((symbols[1].line, symbols[2].line), (Some(7), Some(10)));
    assert!(symbols.iter().all(|symbol| symbol.file.as_deref().is_some_and(|file| file.ends_with("names.c"))));
}

#[test]
fn progress_is_reported() {
    let Some((_dir, library)) = compiled() else { return };
    let (progress, start) = (Arc::<super::progress::Progress>::default(), offset_of(&library, "outer"));
    let mut symbolizer = Symbolizer::reporting_to(no_debug_files(), Arc::clone(&progress));
    assert_eq!(progress.get(), (0, 0));
    symbolizer.symbolize(&mut One::file(&library), [start, start + 1, start, start + 2].map(|offset| (MODULE, offset)));
    assert_eq!(progress.get(), (3, 3));
    // Cached addresses are not looked up again.
    symbolizer.symbolize(&mut One::file(&library), [start, start + 3].map(|offset| (MODULE, offset)));
    assert_eq!(progress.get(), (1, 1));
}

#[test]
fn debug_information_above_the_limit_is_not_used_and_that_is_noted() {
    let Some((_dir, library)) = compiled() else { return };
    let offset = offset_of(&library, "outer");
    let mut symbolizer = Symbolizer::new(Options { max_debug_bytes: 10, ..no_debug_files() });
    symbolizer.symbolize(&mut One::file(&library), [(MODULE, offset)]);
    let symbols = symbolizer.get(MODULE, offset);
    assert_eq!((functions(&symbols), symbols[0].line), (vec!["outer"], None));
    assert_eq!(symbolizer.notes().count(), 1);
}

/// Its time is over before anything was read.
#[test]
fn debug_information_that_takes_too_long_is_not_used_and_that_is_noted() {
    let Some((_dir, library)) = compiled() else { return };
    let offset = offset_of(&library, "outer");
    let mut symbolizer = Symbolizer::new(no_debug_files());
    symbolizer.least_time = Duration::ZERO;
    symbolizer.symbolize(&mut One::file(&library), [(MODULE, offset)]);
    let symbols = symbolizer.get(MODULE, offset);
    assert_eq!((functions(&symbols), symbols[0].line), (vec!["outer"], None));
    let notes: Vec<&str> = symbolizer.notes().collect();
    assert!(notes.len() == 1 && notes[0].contains("takes too long to read"), "{notes:?}");
}

#[test]
fn debug_files_by_build_id_and_by_link() {
    let Some((dir, library)) = compiled() else { return };
    let hidden = offset_of(&library, "hidden");
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let debug = dir.path().join("libnames.so.debug");
    let stripped = dir.path().join("stripped/libnames.so");
    std::fs::create_dir_all(dir.path().join("stripped/.debug")).expect("directory");
    let link = format!("--add-gnu-debuglink={}", text(&debug));
    if !run("objcopy", &["--only-keep-debug", &text(&library), &text(&debug)])
        || !run("objcopy", &["--strip-all", &link, &text(&library), &text(&stripped)])
    {
        return;
    }

    // Without a debug file: dynamic symbols, and a reason where there is none.
    let symbols = symbolize(no_debug_files(), &mut One::file(&stripped), hidden);
    assert_eq!(functions(&symbols), ["?"]);
    assert!(symbols[0].function_start.is_some() && symbols[0].reason.is_none(), "{symbols:?}");
    let exported = offset_of(&library, "calls_hidden");
    assert_eq!(functions(&symbolize(no_debug_files(), &mut One::file(&stripped), exported)), ["calls_hidden"]);

    // By build ID.
    let bytes = std::fs::read(&library).expect("readable");
    let id: String =
        heapbpf_elf::build_id::of(&bytes).expect("asked for").iter().map(|byte| format!("{byte:02x}")).collect();
    let store = dir.path().join("store");
    let place = store.join(".build-id").join(&id[..2]);
    std::fs::create_dir_all(&place).expect("directory");
    std::fs::copy(&debug, place.join(format!("{}.debug", &id[2..]))).expect("copy");
    let by_id = Options { debug_directories: vec![store.clone()], ..Options::default() };
    let symbols = symbolize(by_id.clone(), &mut One::file(&stripped), hidden);
    assert_eq!(functions(&symbols), ["hidden"]);
    assert_eq!(symbols[0].line, Some(13));
    // A file at the right path with another build ID is ignored.
    std::fs::copy("/proc/self/exe", place.join(format!("{}.debug", &id[2..]))).expect("copy");
    assert_eq!(functions(&symbolize(by_id, &mut One::file(&stripped), hidden)), ["?"]);

    // By link, beside the module.
    std::fs::copy(&debug, dir.path().join("stripped/.debug/libnames.so.debug")).expect("copy");
    let symbols = symbolize(no_debug_files(), &mut One::file(&stripped), hidden);
    assert_eq!((functions(&symbols), symbols[0].line), (vec!["hidden"], Some(13)));
}

#[test]
fn own_stack_down_to_the_thread_entry() {
    let mut process = OwnProcess::read().expect("/proc");
    let stack = unwind(&process, &captured(3));
    let mut symbolizer = Symbolizer::default();
    let places = stack.frames.iter().filter_map(|frame| Some((frame.module?, frame.file_offset)));
    symbolizer.symbolize(&mut process, places);
    let finisher = Finisher {
        symbolizer: &symbolizer,
        modules: &process,
        runtime_functions: &RuntimeFunctions::default(),
        perf_map: None,
        perf_map_reason: None,
    };
    let finished = finisher.finish(&stack, &mut |module| module.0 as usize, &mut SharedFrames::default());
    let names: Vec<&str> = finished.frames.iter().filter_map(|frame| frame.function.as_deref()).collect();
    assert!(names[..4].iter().all(|name| *name == "heapbpf_testing::own_process::recursion::descend"), "{names:?}");
    assert!(finished.frames[0].system_name.as_deref().is_some_and(|name| name.starts_with("_")));
    assert!(finished.frames[0].file.as_deref().is_some_and(|file| file.ends_with("recursion.rs")));
    assert!(names.iter().any(|name| name.contains("thread_start") || name.contains("start_thread")), "{names:?}");
    assert_eq!((finished.unwinder, finished.cut), ("dwarf", None));

    // An incomplete stack counts as complete if its last function is an outermost one, and only then.
    let cut = |frames: usize| RawStack {
        frames: stack.frames[..frames].into(),
        unwinder: UnwinderKind::FramePointers,
        completeness: Completeness::Truncated(Reason::FramePointersEnd),
    };
    let finish =
        |raw: &RawStack| finisher.finish(raw, &mut |module| module.0 as usize, &mut SharedFrames::default()).cut;
    assert_eq!(finish(&cut(3)).as_deref(), Some("frame pointers end here"));
}

#[test]
fn vdso_has_names() {
    let mut process = OwnProcess::read().expect("/proc");
    let Some(module) = process.module("[vdso]") else {
        skipped("no vDSO");
        return;
    };
    let image = process.image(module).expect("memory");
    let elf = Elf::read(&*image).expect("ELF");
    let code = elf.section(".text").expect("code");
    let places: Vec<(ModuleId, u64)> = (code.offset..code.offset + code.bytes).map(|at| (module, at)).collect();
    let mut symbolizer = Symbolizer::default();
    symbolizer.symbolize(&mut process, places.iter().copied());
    let is_clock = |(module, at): &(ModuleId, u64)| {
        symbolizer.get(*module, *at)[0].function.as_deref().is_some_and(|name| name.contains("clock_gettime"))
    };
    assert!(places.iter().any(is_clock));
}

/// On a host where programs come and go, modules without names do not accumulate.
#[test]
fn what_is_said_of_modules_goes_with_the_cache() {
    let Some((_dir, library)) = compiled() else { return };
    if !run("strip", &[library.to_str().expect("UTF-8")]) {
        return skipped("there is no program strip");
    }
    let mut one = One::file(&library);
    let mut symbolizer = Symbolizer::new(no_debug_files());
    symbolizer.most_addresses = 1;
    for module in 0..10 {
        symbolizer.symbolize(&mut one, [(ModuleId(module), 0x10), (ModuleId(module), 0x20)]);
        assert!(symbolizer.reason(ModuleId(module)).is_some());
    }
    let kept: Vec<u32> = (0..10).filter(|module| symbolizer.reason(ModuleId(*module)).is_some()).collect();
    assert_eq!(kept, [9]);
}

/// With mutated debug information, symbols and headers, there is always a name or a reason, and no panic escapes.
#[test]
fn mutated_modules_give_names_or_reasons() {
    let Some((_dir, library)) = compiled() else { return };
    let offsets: Vec<u64> = ["outer", "hidden", "calls_hidden"].iter().map(|name| offset_of(&library, name)).collect();
    let pristine = std::fs::read(&library).expect("readable");
    let elf = Elf::read(&pristine).expect("ELF");
    let ranges: Vec<(usize, usize)> = elf
        .sections
        .iter()
        .filter(|section| section.name.starts_with(".debug_") || section.name.contains("sym"))
        .map(|section| (section.offset as usize, section.bytes as usize))
        .chain([(0, 64), (elf.section_headers_at.expect("has them") as usize, elf.sections.len() * 64)])
        .collect();
    let mut random = Random(99);
    let mut unnamed = 0;
    let is_known = |symbol: &Frame| symbol.function.is_some() || symbol.function_start.is_some();
    for _ in 0..400 {
        let mut bytes = pristine.clone();
        for _ in 0..=random.below(4) {
            let (start, length) = ranges[random.below(ranges.len())];
            for _ in 0..1 + (length >> random.below(12)) {
                bytes[start + random.below(length)] = random.next_u64() as u8;
            }
        }
        if random.below(10) == 0 {
            bytes.truncate(random.below(pristine.len()));
        }
        let mut one = One { image: Arc::new(bytes), path: "/mutated".into(), root: None };
        let mut symbolizer = Symbolizer::new(no_debug_files());
        symbolizer.symbolize(&mut one, offsets.iter().map(|offset| (MODULE, *offset)));
        for offset in &offsets {
            let symbols = symbolizer.get(MODULE, *offset);
            assert!(symbols.iter().all(|symbol| is_known(symbol) != symbol.reason.is_some()), "{symbols:?}");
            unnamed += u32::from(functions(&symbols) == ["?"]);
        }
    }
    assert!(unnamed > 20, "mutations reach what is read: {unnamed}");
}

#[test]
fn compressed_debug_information_counts_decompressed() {
    let Some((dir, library)) = compiled() else { return };
    for method in ["zlib", "zstd"] {
        let packed = dir.path().join(method);
        let paths = [library.to_str().expect("UTF-8"), packed.to_str().expect("UTF-8")];
        if !run("objcopy", &[&format!("--compress-debug-sections={method}"), paths[0], paths[1]]) {
            continue;
        }
        let hidden = offset_of(&library, "hidden");
        let symbols = symbolize(no_debug_files(), &mut One::file(&packed), hidden);
        assert_eq!((functions(&symbols), symbols[0].line), (vec!["hidden"], Some(13)), "{method}");

        let pristine = std::fs::read(&packed).expect("readable");
        let elf = Elf::read(&pristine).expect("ELF");
        let Some(section) = elf.sections.iter().find(|section| section.is_compressed()) else {
            skipped("nothing was worth compressing");
            continue;
        };
        // A section that claims to unpack to 2^60 bytes is not unpacked, and neither is one with a damaged body.
        let at = section.offset as usize;
        let claims: &dyn Fn(&mut [u8]) = &|bytes| bytes[at + 8..at + 16].copy_from_slice(&(1u64 << 60).to_le_bytes());
        let damages: &dyn Fn(&mut [u8]) = &|bytes| bytes[at + 24..at + section.bytes as usize].fill(0x5a);
        let unknown: &dyn Fn(&mut [u8]) = &|bytes| bytes[at] = 99;
        for harm in [claims, damages, unknown] {
            let mut bytes = pristine.clone();
            harm(&mut bytes);
            let mut one = One { image: Arc::new(bytes), path: "/bomb".into(), root: None };
            let symbols = symbolize(no_debug_files(), &mut one, hidden);
            assert_eq!((functions(&symbols), symbols[0].line), (vec!["hidden"], None), "{method}");
        }
    }
}

/// Every address of a function without a name has the function's start, and its module has the reason.
#[test]
fn functions_of_stripped_files_are_found_by_their_unwind_entries() {
    let Some((dir, library)) = compiled() else { return };
    let stripped = dir.path().join("stripped.so");
    if !run("strip", &["-o", stripped.to_str().expect("UTF-8"), library.to_str().expect("UTF-8")]) {
        return;
    }
    let listing = Command::new("nm").arg("-S").arg(&library).output().expect("binutils come with cc");
    let listing = String::from_utf8(listing.stdout).expect("text");
    let line = listing.lines().find(|line| line.ends_with(" t hidden")).expect("symbol");
    let number = |text: &str| u64::from_str_radix(text, 16).expect("hexadecimal");
    let (start, size) = (number(&line[..16]), number(&line[17..33]));
    let mut symbolizer = Symbolizer::new(no_debug_files());
    let first = offset_of(&library, "hidden");
    symbolizer.symbolize(&mut One::file(&stripped), (first..first + size).map(|offset| (MODULE, offset)));
    assert!(size > 1);
    for offset in first..first + size {
        let expected = Frame { function_start: Some(start), ..Frame::default() };
        assert_eq!(*symbolizer.get(MODULE, offset), [expected]);
    }
    let reason = symbolizer.reason(MODULE).expect("there is no name");
    assert_eq!(&**reason, "stripped.so is stripped: install its debug symbols, or set DEBUGINFOD_URLS");
    // Headers are not code, so nothing is known there.
    symbolizer.symbolize(&mut One::file(&stripped), [(MODULE, 0)]);
    assert_eq!(symbolizer.get(MODULE, 0)[0].reason.as_ref(), symbolizer.reason(MODULE));
    // If all functions have names, there is nothing to report.
    let mut symbolizer = Symbolizer::new(no_debug_files());
    symbolizer.symbolize(&mut One::file(&library), [(MODULE, first)]);
    assert_eq!(symbolizer.reason(MODULE), None);
}

/// The compressed symbol table that Fedora and its derivatives embed in stripped files.
#[test]
fn packed_symbol_tables_name_functions_of_stripped_files() {
    let Some((dir, library)) = compiled() else { return };
    let hidden = offset_of(&library, "hidden");
    let script = "cp libnames.so mini && objcopy --strip-debug mini && xz -f mini && strip -o stripped.so libnames.so \
                  && objcopy --add-section .gnu_debugdata=mini.xz stripped.so";
    let made = Command::new("sh").current_dir(dir.path()).args(["-c", script]).status();
    if !made.is_ok_and(|status| status.success()) {
        skipped("needs objcopy, strip and xz");
        return;
    }
    let stripped = dir.path().join("stripped.so");
    assert_eq!(functions(&symbolize(no_debug_files(), &mut One::file(&stripped), hidden)), ["hidden"]);
    let exported = offset_of(&library, "calls_hidden");
    assert_eq!(functions(&symbolize(no_debug_files(), &mut One::file(&stripped), exported)), ["calls_hidden"]);
}

/// A container's debug files are found below its root, links cannot lead out of it, and the files are not trusted.
#[test]
fn debug_files_below_another_root() {
    if heapbpf_testing::is_emulated("no openat2(2)") {
        return;
    }
    let Some((dir, library)) = compiled() else { return };
    let root = dir.path().join("root");
    let bytes = std::fs::read(&library).expect("readable");
    let id = heapbpf_elf::build_id::of(&bytes).expect("asked for");
    let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let place = root.join("usr/lib/debug/.build-id").join(&id[..2]);
    std::fs::create_dir_all(&place).expect("directory");
    std::fs::create_dir_all(root.join("store")).expect("directory");
    let (stripped, debug) = (dir.path().join("stripped.so"), root.join("store/x.debug"));
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    if !run("objcopy", &["--only-keep-debug", &text(&library), &text(&debug)])
        || !run("objcopy", &["--strip-all", &text(&library), &text(&stripped)])
    {
        return;
    }
    // An absolute link, which is resolved below that root.
    std::os::unix::fs::symlink("/store/x.debug", place.join(format!("{}.debug", &id[2..]))).expect("link");
    let hidden = offset_of(&library, "hidden");
    let mut one = One::file(&stripped);
    assert_eq!(functions(&symbolize(Options::default(), &mut one, hidden)), ["?"]);
    one.root = Some(root);
    let symbols = symbolize(Options::default(), &mut one, hidden);
    assert_eq!((functions(&symbols), symbols[0].line), (vec!["hidden"], Some(13)));
}

#[test]
fn the_overflow_bucket_and_lost_stacks_have_a_frame_that_says_so() {
    let together = RawStack {
        frames: Box::new([]),
        unwinder: UnwinderKind::Caller,
        completeness: Completeness::Truncated(Reason::OverflowBucket),
    };
    let process = OwnProcess::read().expect("/proc");
    let finisher = Finisher {
        symbolizer: &Symbolizer::default(),
        modules: &process,
        runtime_functions: &RuntimeFunctions::default(),
        perf_map: None,
        perf_map_reason: None,
    };
    let cases =
        [(together, "[other stacks]", "put together"), (RawStack::lost(), "[stack lost]", "its record was lost")];
    for (raw, name, why) in cases {
        let stack = finisher.finish(&raw, &mut |_| 0, &mut SharedFrames::default());
        assert_eq!(stack.frames.len(), 1);
        assert_eq!(stack.frames[0].function.as_deref(), Some(name));
        assert!(stack.cut.as_ref().is_some_and(|cut| cut.starts_with(why)), "{:?}", stack.cut);
    }
}

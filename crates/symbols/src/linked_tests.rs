//! Tests of debug information in several files, with real files of dwz, gcc and dwp, and with hostile ones.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_elf::Elf;
use heapbpf_profile::model::Frame;
use heapbpf_testing::own_process::Random;
use heapbpf_testing::skipped;

use super::options::Options;
use super::symbolizer::Symbolizer;
use super::tests::{MODULE, One, SOURCE, functions, no_debug_files, offset_of, run};

/// Compiles code with inlined calls twice, so that `dwz` finds something to share.
fn compile_two(dir: &Path, flags: &[&str]) -> Option<[PathBuf; 2]> {
    let made = ["a", "b"].map(|name| {
        let (code, library) = (dir.join(format!("{name}.c")), dir.join(format!("lib{name}.so")));
        std::fs::write(&code, SOURCE.replace("calls_hidden", &format!("calls_hidden_{name}"))).expect("write");
        let mut command = Command::new("cc");
        command.current_dir(dir).args(["-shared", "-fPIC", "-O2", "-g", "-Wl,--build-id"]).args(flags);
        let is_made = command.arg("-o").arg(&library).arg(&code).status().is_ok_and(|status| status.success());
        is_made.then_some(library)
    });
    match made {
        [Some(a), Some(b)] => Some([a, b]),
        _ => {
            skipped("cc cannot compile this");
            None
        }
    }
}

/// Returns functions, files, lines and inlined calls at every address of two functions.
fn all_symbols(library: &Path, options: &Options) -> Vec<Vec<Frame>> {
    let mut symbolizer = Symbolizer::new(options.clone());
    let starts = ["outer", "hidden"].map(|name| offset_of(library, name));
    let offsets: Vec<u64> = starts.iter().flat_map(|start| *start..start + 16).collect();
    symbolizer.symbolize(&mut One::file(library), offsets.iter().map(|offset| (MODULE, *offset)));
    offsets.iter().map(|offset| symbolizer.get(MODULE, *offset).to_vec()).collect()
}

#[test]
fn debug_information_that_dwz_shares_is_found() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let Some([library, other]) = compile_two(dir.path(), &[]) else { return };
    let expected = all_symbols(&library, &no_debug_files());
    assert!(expected.iter().any(|symbols| functions(symbols) == ["innermost", "middle", "outer"]));
    let common = dir.path().join("common.debug");
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    if !run("dwz", &["-L", "none", "-m", &text(&common), &text(&library), &text(&other)]) {
        return;
    }
    let bytes = std::fs::read(&library).expect("readable");
    let elf = Elf::read(&bytes).expect("ELF");
    let link = heapbpf_elf::debug_link::alt_of(&bytes, &elf).expect("dwz leaves a link");
    let id: String = link.build_id.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(all_symbols(&library, &no_debug_files()), expected, "beside the file");
    // In a debug directory, by build ID.
    let store = dir.path().join("store");
    let place = store.join(".build-id").join(&id[..2]);
    std::fs::create_dir_all(&place).expect("directory");
    let kept = place.join(format!("{}.debug", &id[2..]));
    std::fs::rename(&common, &kept).expect("our own");
    let by_id = Options { debug_directories: vec![store], ..Options::default() };
    assert_eq!(all_symbols(&library, &by_id), expected, "by build ID");
    // A different file in its place is not used, and functions get names from the symbol table.
    std::fs::copy("/proc/self/exe", kept).expect("our own");
    let symbols = all_symbols(&library, &by_id);
    assert!(symbols.iter().all(|symbols| symbols.last().is_some_and(|it| it.function.is_some())), "{symbols:?}");
    let mut symbolizer = Symbolizer::new(by_id);
    symbolizer.symbolize(&mut One::file(&library), [(MODULE, offset_of(&library, "hidden"))]);
    assert!(
        symbolizer.notes().any(|note| note.contains("common.debug")),
        "{:?}",
        symbolizer.notes().collect::<Vec<_>>()
    );
}

#[test]
fn split_debug_information_has_inlined_calls() {
    for (flags, package) in [
        (&["-gsplit-dwarf"][..], false),
        (&["-gsplit-dwarf", "-gdwarf-4"], false),
        (&["-gsplit-dwarf", "-gdwarf-4"], true),
    ] {
        let dir = tempfile::tempdir().expect("temporary directory");
        let plain = dir.path().join("plain");
        std::fs::create_dir(&plain).expect("directory");
        let (Some([whole, _]), Some([library, _])) = (compile_two(&plain, &flags[1..]), compile_two(dir.path(), flags))
        else {
            return;
        };
        let without_dirs = |symbols: Vec<Vec<Frame>>| -> Vec<Vec<Frame>> {
            let name = |file: Arc<str>| file.rsplit('/').next().unwrap_or_default().into();
            let short = |it: Frame| Frame { file: it.file.map(name), ..it };
            symbols.into_iter().map(|symbols| symbols.into_iter().map(short).collect()).collect()
        };
        let expected = without_dirs(all_symbols(&whole, &no_debug_files()));
        assert!(expected.iter().any(|symbols| functions(symbols) == ["innermost", "middle", "outer"]));
        let dwo = dir.path().join("liba.so-a.dwo");
        if package {
            let made = dir.path().join("liba.so.dwp");
            if !run("dwp", &["-e", library.to_str().expect("UTF-8"), "-o", made.to_str().expect("UTF-8")]) {
                return;
            }
            std::fs::remove_file(&dwo).expect("gcc makes it");
        }
        assert_eq!(without_dirs(all_symbols(&library, &no_debug_files())), expected, "{flags:?}");
        if !package {
            // Without it, functions and lines remain, and the loss is noted. A file of another unit is not used.
            std::fs::copy(dir.path().join("libb.so-b.dwo"), &dwo).expect("gcc makes it");
            let symbols = all_symbols(&library, &no_debug_files());
            assert!(symbols.iter().all(|symbols| symbols.last().is_some_and(|it| it.function.is_some())));
            let mut symbolizer = Symbolizer::new(no_debug_files());
            symbolizer.symbolize(&mut One::file(&library), [(MODULE, offset_of(&library, "hidden"))]);
            assert!(symbolizer.notes().any(|note| note.contains("a.dwo")));
        }
    }
}

/// Its time is over before anything was read: how much may be read gives no time, only what is read.
#[test]
fn split_debug_information_that_takes_too_long_is_not_used_and_that_is_noted() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let Some([library, _]) = compile_two(dir.path(), &["-gsplit-dwarf"]) else { return };
    let offset = offset_of(&library, "outer");
    let mut symbolizer = Symbolizer::new(no_debug_files());
    symbolizer.least_time = Duration::ZERO;
    symbolizer.symbolize(&mut One::file(&library), [(MODULE, offset)]);
    let symbols = symbolizer.get(MODULE, offset);
    assert_eq!((functions(&symbols), symbols[0].line), (vec!["outer"], None));
    let notes: Vec<&str> = symbolizer.notes().collect();
    assert!(notes.len() == 1 && notes[0].contains("takes too long to read"), "{notes:?}");
}

/// With mutated debug information, there is always a name or a reason, and no panic escapes.
#[test]
fn mutated_links_do_no_harm() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let Some([library, other]) = compile_two(dir.path(), &["-gsplit-dwarf"]) else { return };
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let Some([shared, _]) = compile_two(dir.path(), &[]) else { return };
    let common = dir.path().join("common.debug");
    let has_dwz = run("dwz", &["-L", "none", "-m", &text(&common), &text(&shared), &text(&other)]);
    let mut random = Random(7);
    for path in
        [dir.path().join("libb.so-b.dwo"), library, shared, common].into_iter().filter(|it| has_dwz || it.exists())
    {
        let pristine = std::fs::read(&path).expect("readable");
        let elf = Elf::read(&pristine).expect("ELF");
        let is_link = |name: &str| name.starts_with(".debug_") || name == ".gnu_debugaltlink";
        let sections = elf.sections.iter().filter(|section| is_link(&section.name) && section.bytes > 0);
        let ranges: Vec<(usize, usize)> = sections.map(|it| (it.offset as usize, it.bytes as usize)).collect();
        for _ in 0..60 {
            let mut bytes = pristine.clone();
            let (start, length) = ranges[random.below(ranges.len())];
            for _ in 0..1 + (length >> random.below(12)) {
                bytes[start + random.below(length)] = random.next_u64() as u8;
            }
            std::fs::write(&path, bytes).expect("our own");
            for library in ["liba.so", "libb.so"].map(|name| dir.path().join(name)) {
                let mut symbolizer = Symbolizer::new(no_debug_files());
                symbolizer.symbolize(&mut One::file(&library), (0x1000..0x1200).step_by(16).map(|at| (MODULE, at)));
                let known = |it: &Frame| it.function.is_some() || it.function_start.is_some() || it.reason.is_some();
                let all = (0x1000..0x1200).step_by(16).map(|at| symbolizer.get(MODULE, at));
                assert!(all.clone().all(|symbols| !symbols.is_empty() && symbols.iter().all(known)));
            }
        }
        std::fs::write(&path, pristine).expect("our own");
    }
}

/// Debug files that refer to themselves, by both kinds of links: names are found, and the search ends.
#[test]
fn links_in_a_circle_end() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let Some([library, _]) = compile_two(dir.path(), &[]) else { return };
    let expected = all_symbols(&library, &no_debug_files());
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let id = heapbpf_elf::build_id::of(&std::fs::read(&library).expect("readable")).expect("it has one");
    let debug = dir.path().join("a.debug");
    let link = dir.path().join("link");
    std::fs::write(&link, [b"a.debug\0", &*id].concat()).expect("our own");
    // Its debug information is shared with itself, and it is its own debug file.
    let alt = format!(".gnu_debugaltlink={}", text(&link));
    let steps: [Vec<String>; 4] = [
        vec!["--only-keep-debug".into(), text(&library), text(&debug)],
        vec!["--add-section".into(), alt, text(&debug)],
        vec![format!("--add-gnu-debuglink={}", text(&debug)), text(&debug)],
        vec!["--strip-debug".into(), format!("--add-gnu-debuglink={}", text(&debug)), text(&library)],
    ];
    for step in &steps {
        let words: Vec<&str> = step.iter().map(String::as_str).collect();
        if !run("objcopy", &words) {
            return;
        }
    }
    let found = all_symbols(&library, &no_debug_files());
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().flatten().any(|symbol| symbol.function.as_deref() == Some("outer")), "{found:?}");
}

//! The input that inline hooks get for Debian 12's libraries.

use super::*;
use heapbpf_testing::skipped;

fn functions(path: &str) -> Option<InlineFile> {
    let Ok(file) = std::fs::File::open(path) else {
        skipped(format_args!("{path} is not there"));
        return None;
    };
    Some(inline_functions(&file, path, &Table::default()).unwrap())
}

fn index(file: &InlineFile, name: &str) -> usize {
    file.functions.iter().position(|f| f.name == name).unwrap_or_else(|| panic!("{name}"))
}

#[test]
fn glibc_s_reallocarray_reaches_realloc_through_the_linkage_table() {
    let Some(file) = functions("/lib/x86_64-linux-gnu/libc.so.6") else { return };
    let realloc = index(&file, "realloc");
    assert!(file.slots.iter().any(|s| s.function == realloc && s.stub != s.slot));
    let site = file.functions[index(&file, "reallocarray")].site;
    assert_eq!((site.size_argument, site.times_argument, site.old_argument), (2, 1, 0), "as at the entry");
    assert!(file.functions.iter().all(|f| f.twin.is_none() && f.length > 0));
    assert!(!file.inner.is_empty() && file.missing.is_empty(), "{:?}", file.missing);
    let names =
        ["malloc", "calloc", "realloc", "reallocarray", "memalign", "posix_memalign", "valloc", "pvalloc", "free"];
    assert_eq!(file.functions.len(), names.len(), "aligned_alloc is memalign, cfree is free");
    names.into_iter().for_each(|name| _ = index(&file, name));
}

#[test]
fn operators_have_twins_that_do_not_throw() {
    for library in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2"] {
        let path = format!("/usr/lib/x86_64-linux-gnu/{library}");
        let path = path.as_str();
        let Some(file) = functions(path) else { continue };
        for function in file.functions.iter().filter(|f| f.site.flags & SITE_THROWS != 0) {
            let (twin, arguments) = function.twin.unwrap_or_else(|| panic!("{path}: {}", function.name));
            // C functions have the alignment first; mimalloc's own functions have it last, as operators do.
            let twin_name = file.functions[twin].name.as_str();
            let is_swapped = ["aligned_alloc", "memalign"].iter().any(|name| twin_name.contains(name));
            let expected = if is_swapped { TwinArguments::Swapped } else { TwinArguments::Same };
            assert!(
                is_swapped || !function.name.contains("align") || twin_name.starts_with("mi_"),
                "{path}: {twin_name}"
            );
            assert_eq!(arguments, expected, "{path}: {}", function.name);
            assert_eq!(file.functions[twin].site.flags & SITE_THROWS, 0);
            assert!(!file.functions[twin].name.contains("nothrow"), "{path}: {}", file.functions[twin].name);
        }
    }
}

/// A custom allocator is hooked if its code shows that it calls no other one.
#[test]
fn custom_functions_are_hooked_if_their_code_tells_enough() {
    let dir = tempfile::tempdir().unwrap();
    let (code, library) = (dir.path().join("arena.c"), dir.path().join("libarena.so"));
    std::fs::write(
        &code,
        "#include <stdlib.h>
         #include <sys/mman.h>
         static char *next, *end;
         void *arena_map(size_t n) {
             if (next + n > end) { next = mmap(0, 1 << 20, 3, 34, -1, 0); end = next + (1 << 20); }
             next += n;
             return next - n;
         }
         void arena_unmap(void *p) { if (munmap(p, 1)) next = 0; }
         void *arena_bump(size_t n) { next += n; return next - n; }
         void *arena_malloc(size_t n) { return (char *)malloc(n + 16) + 16; }
         void *arena_back(size_t n, void *(*f)(size_t)) { return (char *)f(n) + 1; }",
    )
    .unwrap();
    let built =
        std::process::Command::new("cc").args(["-O2", "-shared", "-fPIC", "-o"]).args([&library, &code]).status();
    if !built.is_ok_and(|status| status.success()) {
        skipped("there is no C compiler");
        return;
    }
    let functions = |custom: &str| {
        let table = Table::new(&[custom.parse().unwrap()]);
        inline_functions(&std::fs::File::open(&library).unwrap(), library.to_str().unwrap(), &table)
    };
    let found = functions("libarena.so:arena_map(size=arg0)->ret,free=arena_unmap(arg0)").unwrap();
    let hooked: Vec<&str> = found.functions.iter().map(|f| f.name.as_str()).collect();
    assert_eq!((hooked, found.missing.len()), (vec!["arena_map", "arena_unmap"], 0));
    for (function, expected) in [
        ("arena_bump", "it calls nothing"),
        ("arena_malloc", "it may call another allocator"),
        ("arena_back", "it may call another allocator"),
    ] {
        // Together with one of these functions, none is hooked.
        let custom = format!("libarena.so:arena_map(size=arg0)->ret,{function}(size=arg0)->ret");
        let Err(AttachError::Unhookable { what, why }) = functions(&custom) else { panic!("{function} is hooked") };
        assert_eq!((what.as_str(), why.starts_with(expected)), (function, true), "{why}");
    }
}

/// Large libraries have their own `operator new`, which calls another file's malloc, and code of 100 MB.
#[test]
fn the_code_of_a_file_is_read_only_if_an_allocator_applies_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let build = |name: &str, code: &str| {
        let (source, library) = (dir.path().join("code.c"), dir.path().join(name));
        std::fs::write(&source, code).unwrap();
        let mut compiler = std::process::Command::new("cc");
        let built = compiler.args(["-O2", "-shared", "-fPIC", "-o"]).args([&library, &source]).status();
        built.is_ok_and(|status| status.success()).then_some(library)
    };
    let own = "void *malloc(unsigned long); void *_Znwm(unsigned long n) { return malloc(n); }";
    let whole = "void *mi_malloc(unsigned long n) { return (void *)n; }";
    let (Some(own), Some(whole)) = (build("libown.so", own), build("libwhole.so", whole)) else {
        skipped("there is no C compiler");
        return;
    };
    let table = Table::default();
    let reads_code = |path: &std::path::Path| {
        let file = std::fs::File::open(path).unwrap();
        let image = FileImage::read_if(&file, path.to_str().unwrap(), |image| table.is_in(image)).unwrap();
        !image.code.is_empty()
    };
    assert_eq!([reads_code(&own), reads_code(&whole)], [false, true]);
}

//! Plans for the libraries of Debian 12, compared with their disassembly, and for compiled programs.

use heapbpf_audit::ProbeKind;
use heapbpf_testing::skipped;

use super::*;
use crate::placement::Machine;

/// The file, read and planned for Linux 6.17 (which optimizes nothing); `None`, reported as skipped, if the file does
/// not exist.
fn plan(path: &str) -> Option<(FileImage<'static>, AllocatorFile)> {
    let Ok(file) = std::fs::File::open(path) else {
        skipped(format_args!("{path} is not there"));
        return None;
    };
    let image = FileImage::read_if(Box::leak(Box::new(file)), path, |_| true).unwrap();
    let rules = KernelRules::of(Machine::X86_64, (6, 17));
    let planned = analyse(&image, &rules, &Table::default()).unwrap();
    Some((image, planned))
}

/// The plan of a file that was already read.
pub(super) fn analyse(image: &FileImage, rules: &KernelRules, table: &Table) -> Result<AllocatorFile, AttachError> {
    super::plan(image, rules, table, &BTreeSet::new())
}

/// Distance of the site of `function` from its symbol, bytes.
fn offset_in_function(image: &FileImage, planned: &AllocatorFile, symbol: &str, function: &str) -> u64 {
    let (_, symbol) = image.functions().find(|(name, _)| *name == symbol).unwrap();
    let site = planned.sites.iter().find(|s| s.function == function).unwrap();
    site.site.offset - image.file_offset(symbol.address).unwrap()
}

#[test]
fn glibc_2_36_is_probed_where_the_kernel_is_cheap() {
    let Some((image, planned)) = plan("/lib/x86_64-linux-gnu/libc.so.6") else { return };
    if planned.allocator != "glibc 2.36" {
        skipped(format_args!("the offsets are those of glibc 2.36, this is {}", planned.allocator));
        return;
    }
    let outer = SITE_MAY_TAIL_JUMP | SITE_MAY_CALL_INSIDE;
    let expected = [
        // These two never call a hooked function, so no call is reentrant.
        ("malloc", 0, 0),
        ("calloc", 0, 0),
        ("realloc", 0, outer | sampler_ebpf::abi::SITE_ZERO_FREES),
        // Its first cheap instruction follows the multiplication and its overflow check; the product is in rsi.
        ("reallocarray", 0xb, outer | sampler_ebpf::abi::SITE_ZERO_FREES | sampler_ebpf::abi::SITE_PASSES_BLOCK_ON),
        ("memalign", 7, outer),
        ("posix_memalign", 7, SITE_MAY_CALL_INSIDE),
        ("valloc", 7, outer),
        ("pvalloc", 7, outer),
        ("free", 3, sampler_ebpf::abi::SITE_FREES),
    ];
    for (function, offset, flags) in expected {
        assert_eq!(offset_in_function(&image, &planned, function, function), offset, "{function}");
        let site = planned.sites.iter().find(|s| s.function == function).unwrap();
        assert_eq!((site.kind, site.site.flags), (ProbeKind::Emulated, flags), "{function}: {}", site.reason);
        assert_eq!(site.return_needed, function != "free");
    }
    assert_eq!(planned.sites.len(), expected.len(), "aligned_alloc is memalign, cfree is free");
    let reallocarray = planned.sites.iter().find(|s| s.function == "reallocarray").unwrap().site;
    assert_eq!((reallocarray.size_argument, reallocarray.times_argument), (1, sampler_ebpf::abi::NO_ARGUMENT));
    assert!(planned.missing.is_empty(), "{:?}", planned.missing);
}

#[test]
fn glibc_ranges_hold_the_helper_that_jumps_to_malloc_and_not_strdup() {
    let Some((image, planned)) = plan("/lib/x86_64-linux-gnu/libc.so.6") else { return };
    let inside = |offset: u64| {
        planned.ranges.ranges[..planned.ranges.count as usize].iter().any(|r| (r[0]..r[1]).contains(&offset))
    };
    let offset = |name: &str| {
        image.functions().find(|(n, _)| *n == name).map(|(_, s)| image.file_offset(s.address).unwrap()).unwrap()
    };
    for name in ["malloc", "free", "calloc", "realloc", "posix_memalign", "valloc"] {
        assert!(inside(offset(name)), "{name}");
    }
    for name in ["strdup", "asprintf", "getline", "fopen", "qsort"] {
        assert!(!inside(offset(name)), "{name}");
    }
    if planned.allocator == "glibc 2.36" {
        // _mid_memalign lies between malloc and free, so all are one range.
        assert!(inside(offset("malloc") + 0x320) && inside(offset("free") - 0x20));
        assert_eq!(planned.ranges.count, 4);
    }
    // `_int_malloc` and others, which have no symbols, are glibc's as well.
    let is_own = |offset: u64| planned.own.iter().any(|[start, end]| (*start..*end).contains(&offset));
    assert!(["malloc", "free", "calloc", "realloc", "posix_memalign"].iter().all(|name| is_own(offset(name))));
    assert!(!["strdup", "getline", "mmap", "sbrk", "malloc_trim"].iter().any(|name| is_own(offset(name))));
    let bytes = |ranges: &[[u64; 2]]| ranges.iter().map(|[start, end]| end - start).sum::<u64>();
    assert!(bytes(&planned.own) > bytes(&planned.ranges.ranges[..planned.ranges.count as usize]));
}

/// Each throwing form of operator new, with the numbers of its single-stepped return sites in the function itself, and
/// of all others.
fn ends(image: &FileImage, planned: &AllocatorFile) -> std::collections::BTreeMap<String, (usize, usize)> {
    let throwing = planned.sites.iter().filter(|site| site.site.flags & SITE_THROWS != 0);
    let count = |site: &PlannedSite| {
        let start = site.site.offset;
        let end =
            image.functions().filter_map(|(_, s)| image.file_offset(s.address)).filter(|next| *next > start).min();
        let is_slow = |end_site: &&ReturnSite| {
            (start..end.unwrap_or(u64::MAX)).contains(&end_site.offset) && end_site.result == ResultLocation::RETURN
        };
        let slow = site.return_sites.iter().filter(is_slow).count();
        (slow, site.return_sites.len() - slow)
    };
    throwing.map(|site| (site.function.clone(), count(site))).collect()
}

/// Where an allocator throws, no return address is replaced, and the ends of calls are seen, mostly without two traps.
#[test]
fn the_ends_of_operator_new_are_seen() {
    for path in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2"] {
        let Some((image, planned)) = plan(&format!("/usr/lib/x86_64-linux-gnu/{path}")) else { continue };
        let ends = ends(&image, &planned);
        assert!(ends.contains_key("operator new"), "{path}: {ends:?}");
        for function in ends.keys() {
            let site = planned.sites.iter().find(|site| site.function == *function).unwrap();
            assert_eq!(site.end_seen(true), EndSeen::AtReturnSites, "{path}: {}", site.reason);
        }
        assert_eq!(ends["operator new"].0, 0, "{path}: {ends:?}");
    }
}

/// Sites and covered functions of a plan: offset from the function's symbol, and kind.
fn summary(image: &FileImage, planned: &AllocatorFile) -> std::collections::BTreeMap<String, (u64, ProbeKind)> {
    let start_of = |offset: u64| {
        let starts =
            image.functions().filter_map(|(_, s)| image.file_offset(s.address)).filter(|start| *start <= offset);
        starts.max().unwrap_or(0)
    };
    let sites = planned.sites.iter();
    sites.map(|s| (s.function.clone(), (s.site.offset - start_of(s.site.offset), s.kind))).collect()
}

#[test]
fn jemalloc_5_3_0() {
    let Some((image, planned)) = plan("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2") else { return };
    assert_eq!((planned.allocator.as_str(), planned.kind), ("jemalloc 5.3.0", FileKind::Library));
    let sites = summary(&image, &planned);
    // From a disassembly of Debian 12's library.
    for (function, offset) in
        [("malloc", 7), ("calloc", 0), ("realloc", 0), ("free", 0x30), ("rallocx", 2), ("operator new", 7)]
    {
        assert_eq!(sites.get(function), Some(&(offset, ProbeKind::Emulated)), "{function}");
    }
    assert!(planned.sites.iter().all(|s| s.kind == ProbeKind::Emulated) && planned.missing.is_empty());
    let covered = |function: &str| planned.covered.iter().find(|c| c.function == function).map(|c| c.by.as_str());
    assert_eq!(covered("operator delete"), Some("free"));
    assert_eq!(covered("operator new[]"), Some("operator new"));
    let realloc = planned.sites.iter().find(|s| s.function == "realloc").unwrap();
    assert_ne!(realloc.site.flags & sampler_ebpf::abi::SITE_ZERO_FREES, 0, "realloc(p, 0) returns NULL there");
    assert_eq!(planned.limits.iter().map(|l| l.what.as_str()).collect::<Vec<_>>(), ["xallocx"]);
}

#[test]
fn tcmalloc_2_10() {
    let Some((image, planned)) = plan("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4") else { return };
    assert_eq!(planned.allocator, "tcmalloc 2.10");
    let sites = summary(&image, &planned);
    for (function, offset) in [("malloc", 0xa), ("free", 0xa), ("calloc", 0), ("realloc", 0), ("operator new", 0xa)] {
        assert_eq!(sites.get(function), Some(&(offset, ProbeKind::Emulated)), "{function}");
    }
    assert!(!sites.contains_key("operator delete"), "the same code as free");
    assert!(planned.missing.is_empty(), "{:?}", planned.missing);
}

#[test]
fn mimalloc_2_0() {
    let Some((image, planned)) = plan("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2.0") else { return };
    assert_eq!(planned.allocator, "mimalloc 2.0");
    let sites = summary(&image, &planned);
    assert_eq!(sites.get("malloc"), Some(&(0x15, ProbeKind::Emulated)));
    assert_eq!(sites.get("free"), Some(&(6, ProbeKind::Emulated)));
    // rdi is overwritten earlier: the size is taken from its copy in rsi.
    let malloc = planned.sites.iter().find(|s| s.function == "malloc").unwrap();
    assert_eq!(malloc.site.size_argument, 1);
    // The branch around the multiplication: the count is in rax there.
    assert_eq!(sites.get("calloc"), Some(&(0x12, ProbeKind::Emulated)));
    let calloc = planned.sites.iter().find(|s| s.function == "calloc").unwrap().site;
    assert_eq!((calloc.size_argument, calloc.times_argument), (1, sampler_ebpf::abi::ACCUMULATOR));
    // realloc(p, 0) returns a block there.
    assert!(planned.sites.iter().all(|s| s.site.flags & sampler_ebpf::abi::SITE_ZERO_FREES == 0));
    assert!(planned.missing.is_empty(), "{:?}", planned.missing);
}

#[test]
fn musl_1_2_3() {
    let Some((image, planned)) = plan("/lib/ld-musl-x86_64.so.1") else { return };
    assert_eq!((planned.allocator.as_str(), planned.kind), ("musl 1.2.3", FileKind::Library));
    let sites = summary(&image, &planned);
    for function in ["malloc", "calloc", "realloc", "free", "aligned_alloc", "posix_memalign"] {
        assert_eq!(sites.get(function), Some(&(0, ProbeKind::Emulated)), "{function}");
    }
    assert!(planned.sites.iter().all(|s| s.site.flags & sampler_ebpf::abi::SITE_ZERO_FREES == 0));
    assert_eq!(planned.covered, [Covered { function: "memalign".to_owned(), by: "aligned_alloc".to_owned() }]);
}

/// Compiles `source` and reads the result; `None`, reported as skipped, if a tool is missing or fails.
pub(super) fn compiled(
    directory: &std::path::Path,
    name: &str,
    source: &str,
    commands: &[&str],
) -> Option<FileImage<'static>> {
    std::fs::write(directory.join("source.c"), source).unwrap();
    for command in commands {
        let run = std::process::Command::new("sh").args(["-c", command]).current_dir(directory).output().unwrap();
        if !run.status.success() {
            skipped(format_args!("{command}: {}", String::from_utf8_lossy(&run.stderr)));
            return None;
        }
    }
    let path = directory.join(name);
    let file = std::fs::File::open(&path).unwrap();
    Some(FileImage::read_if(Box::leak(Box::new(file)), path.to_str().unwrap(), |_| true).unwrap())
}

/// The rules of Linux 6.17 on x86-64.
pub(super) const RULES: fn() -> KernelRules = || KernelRules::of(Machine::X86_64, (6, 17));
const PROGRAM: &str = "#include <stdlib.h>\nint main(void) { free(realloc(calloc(3, 5), 40)); return 0; }";

#[test]
fn files_without_an_allocator_to_probe_say_why() {
    let Ok(libc) = std::fs::File::open("/lib/x86_64-linux-gnu/libc.so.6") else {
        skipped("there is no glibc");
        return;
    };
    let foreign = examine(&libc, "libc.so.6", &KernelRules::of(Machine::Aarch64, (6, 17)), &Table::default());
    assert!(matches!(foreign, Err(AttachError::ForeignMachine)), "{foreign:?}");
    assert!(!AttachError::ForeignMachine.misses_nothing());
    assert!(examine(&libc, "libc.so.6", &RULES(), &Table::default()).is_ok());
    let Ok(loader) = std::fs::File::open("/lib64/ld-linux-x86-64.so.2") else { return };
    let refused = examine(&loader, "ld-linux-x86-64.so.2", &RULES(), &Table::default()).unwrap_err();
    assert!(matches!(refused, AttachError::Loader) && refused.misses_nothing(), "{refused}");
}

#[test]
fn programs_of_go_have_a_heap_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let commands = [
        "cc -O1 -nostartfiles -static source.c -o program",
        "echo text > info && objcopy --add-section .go.buildinfo=info program",
    ];
    let source = "void _start(void) { for (;;) {} }";
    let Some(image) = compiled(directory.path(), "program", source, &commands) else { return };
    let refused = analyse(&image, &RULES(), &Table::default()).unwrap_err();
    assert!(matches!(refused, AttachError::Go) && !refused.misses_nothing(), "{refused}");
}

#[test]
fn a_program_for_arm64_is_planned_on_any_machine() {
    const OWN: &str = "#![no_std]\n#![crate_type = \"cdylib\"]\n\
        #[panic_handler] fn panic(_: &core::panic::PanicInfo) -> ! { loop {} }\n\
        static mut HEAP: [u8; 4096] = [0; 4096]; static mut USED: usize = 0;\n\
        #[unsafe(no_mangle)] pub unsafe extern \"C\" fn malloc(size: usize) -> *mut u8 {\n\
            unsafe { USED = USED.wrapping_add(size); (&raw mut HEAP as *mut u8).wrapping_add(USED & 4095) } }\n\
        #[unsafe(no_mangle)] pub unsafe extern \"C\" fn calloc(count: usize, size: usize) -> *mut u8 {\n\
            let block = unsafe { malloc(count.wrapping_mul(size)) }; unsafe { *block = 0 }; block }\n\
        #[unsafe(no_mangle)] pub unsafe extern \"C\" fn free(_: *mut u8) { unsafe { USED = USED.wrapping_sub(1) } }\n";
    let directory = tempfile::tempdir().unwrap();
    let build = ["rustc --edition 2024 --target aarch64-unknown-linux-gnu -C linker=rust-lld -C linker-flavor=ld.lld \
                  -C panic=abort -O source.c -o lib.so"];
    let Some(image) = compiled(directory.path(), "lib.so", OWN, &build) else { return };
    assert_eq!(image.machine, Machine::Aarch64);
    let plan = analyse(&image, &KernelRules::of(Machine::Aarch64, (6, 12)), &Table::default()).unwrap();
    let functions: Vec<_> = plan.sites.iter().map(|site| (site.function.as_str(), site.return_needed)).collect();
    let mut sorted = functions.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [("calloc", true), ("free", false), ("malloc", true)]);
    for site in &plan.sites {
        assert_eq!(site.site.offset % 4, 0, "{}", site.reason);
        assert!(["is simulated", "is single-stepped"].iter().any(|how| site.reason.contains(how)), "{}", site.reason);
    }
}

#[test]
fn static_executables_with_symbols() {
    let directory = tempfile::tempdir().unwrap();
    for (compiler, allocator) in [("cc", "glibc"), ("musl-gcc", "musl")] {
        let command = format!("{compiler} -O0 -static source.c -o program");
        let Some(image) = compiled(directory.path(), "program", PROGRAM, &[&command]) else { continue };
        let planned = analyse(&image, &RULES(), &Table::default()).unwrap();
        assert_eq!(planned.kind, FileKind::StaticExecutable);
        assert!(planned.allocator.starts_with(allocator), "{}", planned.allocator);
        let names: Vec<&str> = planned.sites.iter().map(|s| s.function.as_str()).collect();
        assert!(names.contains(&"malloc") && names.contains(&"free"), "{names:?}");
        assert!(names.contains(&"realloc") && names.contains(&"calloc"), "{names:?}");
        let Some(image) = compiled(directory.path(), "program", PROGRAM, &["strip program"]) else { continue };
        let refused = analyse(&image, &RULES(), &Table::default()).unwrap_err();
        assert!(matches!(refused, AttachError::StaticStripped) && !refused.misses_nothing(), "{refused}");
    }
}

#[test]
fn symbols_in_mini_debug_information() {
    let directory = tempfile::tempdir().unwrap();
    let commands = [
        "cc -O1 -static source.c -o program",
        "objcopy --only-keep-debug program debug && objcopy -S --remove-section .comment --keep-symbols=/dev/null debug mini; \
         cp debug mini && xz -f mini && strip program && objcopy --add-section .gnu_debugdata=mini.xz program",
    ];
    let Some(image) = compiled(directory.path(), "program", PROGRAM, &commands) else { return };
    assert!(image.damaged.is_empty(), "{:?}", image.damaged);
    let planned = analyse(&image, &RULES(), &Table::default()).unwrap();
    assert!(planned.allocator.starts_with("glibc"), "{}", planned.allocator);
    assert!(planned.sites.iter().any(|s| s.function == "malloc"));
}

#[test]
fn a_custom_allocator_that_takes_its_blocks_from_malloc() {
    const ARENA: &str = "#include <stdlib.h>\n\
        __attribute__((noinline)) void *arena_take(void *arena, size_t size) { char *p = malloc(size + 8); return p ? p + 8 : arena; }\n\
        void arena_give(void *p) { if (p) free((char *)p - 8); }";
    let directory = tempfile::tempdir().unwrap();
    let Some(image) = compiled(directory.path(), "lib.so", ARENA, &["cc -O1 -fPIC -shared source.c -o lib.so"]) else {
        return;
    };
    let spec = |text: &str| Table::new(&[text.parse().unwrap()]);
    let planned = analyse(&image, &RULES(), &spec("lib.so:arena_take(size=arg1)->ret,free=arena_give(arg0)")).unwrap();
    assert_eq!(planned.allocator, "custom");
    let outer = planned.sites.iter().find(|s| s.function == "arena_take").unwrap();
    assert!(outer.site.flags & SITE_CALLS_OUT != 0, "arena_take calls malloc");
    let functions: Vec<_> = planned.sites.iter().map(|s| (s.function.as_str(), s.return_needed)).collect();
    assert_eq!(functions, [("arena_take", true), ("arena_give", false)]);

    let unknown = analyse(&image, &RULES(), &spec("lib.so:arena_tak(size=arg1)->ret")).unwrap_err();
    assert!(unknown.to_string().contains("similar names there: arena_take"), "{unknown}");
    let elsewhere = analyse(&image, &RULES(), &spec("other.so:arena_take(size=arg1)->ret")).unwrap_err();
    assert!(elsewhere.to_string().contains("looked for custom, jemalloc"), "{elsewhere}");
}

#[test]
fn a_helper_makes_reentrant_calls_only_if_nobody_else_calls_it() {
    // `mi_zalloc` and `mi_malloc` share `grow`, which calls mi_malloc; in the second program `user` calls `grow` as
    // well.
    const OWN: &str = "typedef unsigned long n;\n#define KEEP __attribute__((noinline, noclone))\n\
        char heap[4096]; n used; extern void *mi_malloc(n);\n\
        KEEP void *mi_malloc(n size) { if (used + size > 4096) return 0; used += size; return heap + used; }\n\
        static KEEP void *grow(n size) { char *p = mi_malloc(size + 1); return p ? p + 1 : 0; }\n\
        KEEP void *mi_zalloc(n size) { char *p = grow(size); if (p) *p = 0; return p; }\n\
        int main(void) { return !mi_zalloc(3) EXTRA; }\n";
    let directory = tempfile::tempdir().unwrap();
    let mut planned = Vec::new();
    for extra in ["", "+ !grow(4)"] {
        let source = OWN.replace("EXTRA", extra);
        let build = ["cc -O1 -fno-pie -no-pie source.c -o program"];
        let Some(image) = compiled(directory.path(), "program", &source, &build) else { return };
        let grow =
            image.functions().find(|(n, _)| *n == "grow").map(|(_, s)| image.file_offset(s.address).unwrap()).unwrap();
        let plan = analyse(&image, &RULES(), &Table::default()).unwrap();
        let inside = plan.ranges.ranges[..plan.ranges.count as usize].iter().any(|r| (r[0]..r[1]).contains(&grow));
        planned.push((inside, plan.missing.iter().map(|m| m.what.clone()).collect::<Vec<_>>()));
    }
    assert_eq!(planned, [(true, vec![]), (false, vec!["grow".to_owned()])]);
}

#[test]
fn code_that_only_an_allocator_leads_to_is_its_own() {
    // `mi_malloc` ends in a jump to `slow`, which calls `grow`; in the second program `main` calls `grow` as well.
    const OWN: &str = "typedef unsigned long n;\n#define KEEP __attribute__((noinline, noclone))\n\
        char heap[4096]; n used;\n\
        static KEEP void grow(n size) { used += size & 8; }\n\
        static KEEP void *slow(n size) { grow(size); return heap + used; }\n\
        KEEP void *mi_malloc(n size) { if (used + size > 64) return slow(size); used += size; return heap + used; }\n\
        KEEP void *mi_zalloc(n size) { char *p = mi_malloc(size); if (p) *p = 0; return p; }\n\
        int main(void) { EXTRA return !mi_zalloc(3); }\n";
    let directory = tempfile::tempdir().unwrap();
    for (extra, is_shared) in [("", false), ("grow(4);", true)] {
        let source = OWN.replace("EXTRA", extra);
        let build = ["cc -O2 -fno-pie -no-pie source.c -o program"];
        let Some(image) = compiled(directory.path(), "program", &source, &build) else { return };
        let planned = analyse(&image, &RULES(), &Table::default()).unwrap();
        let is_own = |name: &str| {
            let (_, symbol) = image.functions().find(|(known, _)| *known == name).unwrap();
            let offset = image.file_offset(symbol.address).unwrap();
            planned.own.iter().any(|[start, end]| (*start..*end).contains(&offset))
        };
        let own = ["mi_malloc", "slow", "grow", "main"].map(is_own);
        assert_eq!(own, [true, true, !is_shared, false], "{extra:?}");
    }
}

#[test]
fn a_rust_program_s_own_allocator() {
    const OWN: &str = "use std::alloc::{GlobalAlloc, Layout, System};\n\
        use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};\n\
        static USED: AtomicUsize = AtomicUsize::new(0);\n\
        static mut HEAP: [u64; 9999] = [0; 9999];\n\
        #[allow(dead_code)] struct Own; #[allow(dead_code)] struct Counting;\n\
        unsafe impl GlobalAlloc for Own {\n\
            unsafe fn alloc(&self, l: Layout) -> *mut u8 { unsafe {\n\
                (&raw mut HEAP as *mut u8).wrapping_add(USED.fetch_add(l.size() + 31 & !15, Relaxed)) } }\n\
            unsafe fn dealloc(&self, _: *mut u8, l: Layout) { USED.fetch_sub(l.size() & 0, Relaxed); } }\n\
        unsafe impl GlobalAlloc for Counting {\n\
            unsafe fn alloc(&self, l: Layout) -> *mut u8 { USED.fetch_add(1, Relaxed); unsafe { System.alloc(l) } }\n\
            unsafe fn dealloc(&self, p: *mut u8, l: Layout) { unsafe { System.dealloc(p, l) } } }\n\
        GLOBAL\n\
        fn main() { println!(\"{:?}\", std::env::args().collect::<Vec<_>>()); }\n";
    let directory = tempfile::tempdir().unwrap();
    let build = ["rustc --edition 2021 -O source.c -o program"];
    let analysed = |global: &str| {
        let image = compiled(directory.path(), "program", &OWN.replace("GLOBAL", global), &build)?;
        Some(analyse(&image, &RULES(), &Table::default()))
    };
    let Some(own) = analysed("#[global_allocator] static A: Own = Own;") else { return };
    let own = own.unwrap();
    assert_eq!(own.allocator, "Rust global allocator");
    assert!(own.sites.iter().any(|s| s.return_needed) && own.sites.iter().any(|s| !s.return_needed), "{:?}", own.sites);
    let Some(counting) = analysed("#[global_allocator] static A: Counting = Counting;") else { return };
    assert!(matches!(counting, Err(AttachError::PassesOn { .. })), "{counting:?}");
    let Some(default) = analysed("") else { return };
    assert!(matches!(default, Err(AttachError::NoAllocator { .. })), "{default:?}");
}

/// A function with an allocator's name, beside a known allocator or without one, is named unless it gets its blocks
/// from a hooked one.
#[test]
fn functions_that_allocate_and_are_not_hooked_are_named() {
    const OWN: &str = "#include <stdlib.h>\n\
        char heap[4096]; unsigned long used;\n\
        __attribute__((noinline)) void *_Znwm(unsigned long n) { used += n & 8; return FROM; }\n\
        __attribute__((noinline)) void *_Znam(unsigned long n) { return _Znwm(n); }\n\
        MAIN\n";
    let directory = tempfile::tempdir().unwrap();
    let main = "int main(int n, char **v) { free(malloc(n)); return _Znwm(n) == _Znam(n); }";
    for (from, expected) in [("heap + used", &["operator new and 1 more"][..]), ("malloc(n)", &[])] {
        let source = OWN.replace("FROM", from).replace("MAIN", main);
        let build = ["cc -O1 -static source.c -o program"];
        let Some(mut image) = compiled(directory.path(), "program", &source, &build) else { return };
        for is_whole in [true, false] {
            image.code_is_whole = is_whole;
            let planned = analyse(&image, &RULES(), &Table::default()).unwrap();
            assert!(planned.allocator.starts_with("glibc"), "{}", planned.allocator);
            let named = planned.missing.iter().map(|missing| missing.what.as_str());
            let named: Vec<&str> = named.filter(|what| what.starts_with("operator new")).collect();
            assert_eq!(named, expected, "{from}, {is_whole}");
        }
    }
    for (from, is_alone) in [("heap + used", true), ("malloc(n)", false)] {
        let source = OWN.replace("FROM", from).replace("MAIN", "");
        let build = ["cc -O1 -shared -fPIC source.c -o library.so"];
        if compiled(directory.path(), "library.so", &source, &build).is_none() {
            return;
        }
        let path = directory.path().join("library.so");
        let file = std::fs::File::open(&path).unwrap();
        let why = examine(&file, path.to_str().unwrap(), &RULES(), &Table::default()).unwrap_err();
        assert_eq!(matches!(why, AttachError::Alone { .. }), is_alone, "{why}");
        assert_eq!(why.misses_nothing(), !is_alone, "{why}");
    }
}

/// Of a program with too much code to be scanned, what is around its own `operator new` is read: one that takes memory of
/// its own is hooked, one that calls malloc is not.
#[test]
fn operators_of_a_very_large_program_are_read() {
    const OWN: &str = "#include <stdlib.h>\n\
        __asm__(\".section .text.large,\\\"ax\\\",@progbits\\n.zero 0x4100000\\n.text\");\n\
        char heap[4096]; unsigned long used;\n\
        __attribute__((noinline)) void *take(unsigned long n) { used += n & 8; return FROM; }\n\
        __attribute__((noinline)) void *_Znwm(unsigned long n) { char *p = take(n + 8); return p + 8; }\n\
        __attribute__((noinline)) void _ZdlPv(void *p) { used -= p == heap; }\n\
        int main(int n, char **v) { _ZdlPv(_Znwm(n)); return 0; }";
    let directory = tempfile::tempdir().unwrap();
    for (from, is_hooked) in [("heap + used", true), ("malloc(n)", false)] {
        let build = ["cc -O1 source.c -o program"];
        let Some(image) = compiled(directory.path(), "program", &OWN.replace("FROM", from), &build) else { return };
        assert!(!image.code_is_whole && image.code.iter().all(|code| code.bytes.is_none()));
        match analyse(&image, &RULES(), &Table::default()) {
            Ok(planned) => assert!(is_hooked && planned.allocator == "operator new of its own", "{planned:?}"),
            Err(why) => assert!(!is_hooked && matches!(why, AttachError::PassesOn { .. }), "{from}: {why}"),
        }
    }
}

/// glibc's reallocarray jumps to the `realloc` that the loader finds first. Allocators that make such calls find their
/// own function.
#[test]
fn a_c_librarys_calls_may_be_another_allocators() {
    for (path, may) in [
        ("/lib/x86_64-linux-gnu/libc.so.6", true),
        ("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", false),
        ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", false),
        ("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2", false),
    ] {
        if let Some((_, planned)) = plan(path) {
            assert_eq!((planned.may_call_out, planned.may_be_interposed), (false, may), "{path}");
        }
    }
}

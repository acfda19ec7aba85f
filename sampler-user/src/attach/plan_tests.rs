//! Plans for the libraries of Debian 12, against what a disassembler shows.

use super::*;
use crate::attach::arch::Machine;

/// The file, read and planned for Linux 6.17 (nothing optimized); `None`, said loudly, if it is not there.
fn plan(path: &str) -> Option<(FileImage, AllocatorFile)> {
    let Ok(file) = std::fs::File::open(path) else {
        eprintln!("skipped: {path} is not there");
        return None;
    };
    let image = FileImage::read(file).unwrap();
    let rules = KernelRules::of(Machine::X86_64, (6, 17));
    let planned = analyse(&image, &rules, &Table::default()).unwrap();
    Some((image, planned))
}

/// Where the site of `function` is, from its symbol on.
fn offset_in_function(image: &FileImage, planned: &AllocatorFile, symbol: &str, function: &str) -> u64 {
    let (_, symbol) = image.functions().find(|(name, _)| *name == symbol).unwrap();
    let site = planned.sites.iter().find(|s| s.function == function).unwrap();
    site.site.offset - image.file_offset(symbol.address).unwrap()
}

#[test]
fn glibc_2_36_is_probed_where_the_kernel_is_cheap() {
    let Some((image, planned)) = plan("/lib/x86_64-linux-gnu/libc.so.6") else {
        return;
    };
    if planned.allocator != "glibc 2.36" {
        eprintln!("skipped: the offsets are those of glibc 2.36, this is {}", planned.allocator);
        return;
    }
    let expected = [
        ("malloc", 0, 0),
        ("calloc", 0, 0),
        ("realloc", 0, SITE_MAY_TAIL_JUMP | sampler_ebpf::abi::SITE_ZERO_FREES),
        // Its first cheap instruction follows the multiplication and its overflow check, the product in rsi.
        ("reallocarray", 0xb, SITE_MAY_TAIL_JUMP | sampler_ebpf::abi::SITE_ZERO_FREES),
        ("memalign", 7, SITE_MAY_TAIL_JUMP),
        ("posix_memalign", 7, 0),
        ("valloc", 7, SITE_MAY_TAIL_JUMP),
        ("pvalloc", 7, SITE_MAY_TAIL_JUMP),
        ("free", 3, sampler_ebpf::abi::SITE_FREES),
    ];
    for (function, offset, flags) in expected {
        assert_eq!(offset_in_function(&image, &planned, function, function), offset, "{function}");
        let site = planned.sites.iter().find(|s| s.function == function).unwrap();
        assert_eq!((site.kind, site.site.flags), (Kind::Emulated, flags), "{function}: {}", site.reason);
        assert_eq!(site.return_needed, function != "free");
    }
    assert_eq!(planned.sites.len(), expected.len(), "aligned_alloc is memalign, cfree is free");
    let reallocarray = planned.sites.iter().find(|s| s.function == "reallocarray").unwrap().site;
    assert_eq!((reallocarray.size_argument, reallocarray.times_argument), (1, sampler_ebpf::abi::NO_ARGUMENT));
    assert!(planned.missing.is_empty(), "{:?}", planned.missing);
}

#[test]
fn glibc_ranges_hold_the_helper_that_jumps_to_malloc_and_not_strdup() {
    let Some((image, planned)) = plan("/lib/x86_64-linux-gnu/libc.so.6") else {
        return;
    };
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
        // _mid_memalign lies between malloc and free: one range.
        assert!(inside(offset("malloc") + 0x320) && inside(offset("free") - 0x20));
        assert_eq!(planned.ranges.count, 4);
    }
}

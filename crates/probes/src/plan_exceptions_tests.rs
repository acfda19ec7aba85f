//! Plans for custom allocators that a C++ exception may leave.

use super::tests::{RULES, analyse, compiled};
use super::*;

/// Every function is like `malloc`; the second argument of `FUNCTION` is its body.
const POOL: &str = "#include <cstdlib>\n#include <new>\n\
    typedef void *(*take)(std::size_t);\n\
    __attribute__((visibility(\"hidden\"))) volatile take hook; __attribute__((visibility(\"hidden\"))) volatile int count;\n\
    #define FUNCTION(name, ...) extern \"C\" __attribute__((noinline, noclone)) void *name(std::size_t size) { __VA_ARGS__ }\n\
    static __attribute__((noinline, noclone)) void check(void *block) { if (!block) throw std::bad_alloc(); count++; }\n\
    FUNCTION(pool_plain, void *block = std::malloc(size); count++; return block;)\n\
    FUNCTION(pool_throws, void *block = std::malloc(size); if (!block) throw std::bad_alloc(); count++; return block;)\n\
    FUNCTION(pool_checks, void *block = std::malloc(size); check(block); return block;)\n\
    FUNCTION(pool_hooked, void *block = hook(size); count++; return block;)\n\
    FUNCTION(pool_new, void *block = ::operator new(size); count++; return block;)\n\
    FUNCTION(pool_jumps, return hook(size);)\n\
    extern \"C\" void pool_free(void *block) { std::free(block); }\n";

fn planned() -> Option<(Vec<u8>, AllocatorFile)> {
    let directory = tempfile::tempdir().unwrap();
    let build = ["cp source.c source.cc && c++ -O2 -fPIC -shared -fcf-protection=none source.cc -o lib.so"];
    let image = compiled(directory.path(), "lib.so", POOL, &build)?;
    let functions = ["plain", "throws", "checks", "hooked", "new", "jumps"];
    let functions: String = functions.iter().map(|name| format!("pool_{name}(size=arg0)->ret,")).collect();
    let custom = format!("lib.so:{functions}free=pool_free(arg0)").parse().unwrap();
    let plan = analyse(&image, &RULES(), &Table::new(&[custom])).unwrap();
    Some((std::fs::read(directory.path().join("lib.so")).unwrap(), plan))
}

#[test]
fn return_sites_are_probed_where_an_exception_may_pass() {
    let Some((file, plan)) = planned() else { return };
    let site = |function: &str| plan.sites.iter().find(|site| site.function == function).unwrap();
    for function in ["pool_throws", "pool_checks", "pool_hooked", "pool_new"] {
        let site = site(function);
        assert!(!site.return_sites.is_empty() && site.reason.contains("may throw"), "{function}: {}", site.reason);
        assert_ne!(site.site.flags & SITE_THROWS, 0, "{function}");
        assert_eq!(site.end_seen(true), EndSeen::AtReturnSites, "{function}");
        for ReturnSite { offset, result } in &site.return_sites {
            let at_return = file[*offset as usize] == 0xc3;
            assert_eq!(at_return, *result == ResultLocation::RETURN, "{function}: at {offset:#x}");
        }
    }
    // Code that only calls C functions cannot throw, but a signal handler may leave it. The return of a freeing
    // function need not be seen.
    for (function, end_seen) in [("pool_plain", EndSeen::AtReturnSites), ("pool_free", EndSeen::Returning)] {
        assert_eq!(site(function).return_sites.is_empty(), end_seen == EndSeen::Returning, "{function}");
        assert_eq!(site(function).site.flags & SITE_THROWS, 0, "{function}");
        assert_eq!(site(function).end_seen(false), end_seen, "{function}");
    }
}

#[test]
fn a_function_that_may_throw_and_ends_in_a_jump_is_not_probed() {
    let Some((_, plan)) = planned() else { return };
    let missing = plan.missing.iter().find(|missing| missing.what == "pool_jumps").unwrap();
    assert!(missing.why.starts_with("it may throw an exception"), "{}", missing.why);
    assert!(plan.sites.iter().all(|site| site.function != "pool_jumps"));
}

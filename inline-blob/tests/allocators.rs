//! Allocators other than the C library's, C++ operators and exceptions.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs)]

mod common;

use std::process::Command;

use common::{Event, Hooked, Options, SiteKind, events, record, turn};

const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";
const TCMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4";
const MIMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libmimalloc.so.2";

/// More than an address space can hold.
const TOO_MUCH: u64 = (1 << 47) - (1 << 36);

/// Runs a test in a separate process, whose loader has space for the thread-local data of further libraries.
fn with_tls_space(test: &str, body: impl FnOnce()) {
    const TLS_SPACE: &str = "glibc.rtld.optional_static_tls=65536";
    if std::env::var("GLIBC_TUNABLES").is_ok_and(|set| set == TLS_SPACE) {
        return body();
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args([test, "--exact", "--nocapture"]).env("GLIBC_TUNABLES", TLS_SPACE);
    assert!(again.status().unwrap().success());
}

const DRIVER: &str = r#"
#include <new>
#include <cstdlib>
struct Thrown : std::bad_alloc {};
struct Throws { long x; __attribute__((noinline)) Throws() { if (x != 77) throw Thrown(); } };
struct alignas(64) Wide { char c[64]; };
static void handler() { throw Thrown(); }
extern "C" int caught(unsigned long n) {
    try { void *volatile p = operator new(n); operator delete(p); } catch (std::bad_alloc &) { return 1; }
    return 0;
}
extern "C" int caught_aligned(unsigned long n) {
    try { void *volatile p = operator new(n, std::align_val_t(64)); operator delete(p, std::align_val_t(64)); }
    catch (std::bad_alloc &) { return 1; }
    return 0;
}
extern "C" int caught_own(unsigned long n) {
    std::set_new_handler(handler);
    int r = 0;
    try { void *volatile p = operator new[](n); operator delete[](p); } catch (std::bad_alloc &) { r = 1; }
    std::set_new_handler(nullptr);
    return r;
}
static int handlings;
static void counts() { handlings++; throw Thrown(); }
static void gives_up() { if (++handlings == 3) std::set_new_handler(nullptr); }
template <class F> static int handled(std::new_handler handler, F allocate) {
    handlings = 0;
    std::set_new_handler(handler);
    try { allocate(); } catch (std::bad_alloc &) { handlings += 100; }
    std::set_new_handler(nullptr);
    return handlings;
}
extern "C" int handled_once(unsigned long n) { return handled(counts, [=] { void *volatile p = operator new(n); (void)p; }); }
extern "C" int handled_aligned(unsigned long n) {
    return handled(counts, [=] { void *volatile p = operator new[](n, std::align_val_t(64)); (void)p; });
}
extern "C" int handled_thrice(unsigned long n) { return handled(gives_up, [=] { void *volatile p = operator new(n); (void)p; }); }
extern "C" int constructor() { try { Throws *volatile t = new Throws; (void)t; } catch (Thrown &) { return 1; } return 0; }
extern "C" void ordinary(int n) {
    for (int i = 0; i < n; i++) {
        int *volatile a = new int; delete a;
        char *volatile b = new char[100 + i]; delete[] b;
        Wide *volatile c = new Wide; delete c;
        void *volatile d = operator new(8, std::nothrow); operator delete(d);
    }
}
"#;

fn hook(path: &str, options: &Options) -> Option<Hooked> {
    if !std::path::Path::new(path).exists() {
        heapbpf_testing::skipped(format!("{path} is not installed"));
        return None;
    }
    let hooked = Hooked::new(path, options);
    println!(
        "{path}: {} hooked, refused {:?}, missing {:?}",
        hooked.plan.hooked.len(),
        hooked.plan.refused,
        hooked.missing
    );
    Some(hooked)
}

fn exceptions_pass(path: &str, throws: bool) {
    let _turn = turn();
    record(false);
    let options = Options { driver: Some(DRIVER), ..Options::default() };
    let Some(hooked) = hook(path, &options) else { return };
    let call = |name: &str, bytes: u64| -> i32 {
        let function: extern "C" fn(u64) -> i32 = unsafe { hooked.function(name) };
        function(bytes)
    };
    let counted = |name: &str, bytes: u64| {
        let before = hooked.counts();
        let result = call(name, bytes);
        let after = hooked.counts();
        (result, after.calls - before.calls, after.bytes - before.bytes, after.failed - before.failed)
    };
    assert_eq!(counted("caught", 100), (0, 1, 100, 0));
    // Thrown exceptions are allocated too: by the C++ library, with malloc.
    let thrown = |(result, calls, bytes, failed): (i32, u64, u64, u64)| (result, calls - 1, bytes < 1000, failed);
    if throws {
        assert_eq!(thrown(counted("caught", TOO_MUCH)), (1, 1, true, 1));
        assert_eq!(thrown(counted("caught", u64::MAX / 2)), (1, 1, true, 1));
        assert_eq!(thrown(counted("caught_aligned", TOO_MUCH)), (1, 1, true, 1));
        assert_eq!(call("caught_own", TOO_MUCH), 1);
        // The handler is called as often as without hooks, and its exception, or bad_alloc, is caught.
        assert_eq!((call("handled_once", TOO_MUCH), call("handled_aligned", TOO_MUCH)), (101, 101));
        assert_eq!(call("handled_thrice", TOO_MUCH), 103);
    }
    assert_eq!(thrown(counted("constructor", 0)), (1, 1, true, 0));
    let before = hooked.counts();
    call("ordinary", 1000);
    let after = hooked.counts();
    assert_eq!((after.calls - before.calls, after.frees_matched - before.frees_matched), (4000, 4000));
    assert_eq!(after.sampled, after.reported + after.failed);
}

/// Without a twin, results are not seen: the call is reported before it is made.
#[test]
fn calls_whose_results_are_unseen() {
    let _turn = turn();
    let options = Options { twins: false, driver: Some(DRIVER), interval: 50, ..Options::default() };
    let Some(hooked) = hook(TCMALLOC, &options) else { return };
    record(true);
    let caught: extern "C" fn(u64) -> i32 = unsafe { hooked.function("caught") };
    for _ in 0..10 {
        assert_eq!((caught(5000), caught(TOO_MUCH)), (0, 1));
    }
    let unseen: Vec<Event> = events().into_iter().filter(|e| e.kind() == SiteKind::Unseen).collect();
    // The probability that 5000 bytes are not sampled is e^−100.
    assert_eq!(unseen.len(), 20);
    for (event, bytes) in unseen.iter().zip([5000, TOO_MUCH].into_iter().cycle()) {
        assert_eq!((event.r11, event.rdi, event.rax >> 32), (bytes, bytes, 50));
        assert!(event.rax as u32 <= 44 * 50, "an offset");
        assert_eq!(hooked.names[usize::from(event.index())], "operator new");
    }
}

#[test]
fn exceptions_pass_through_jemalloc() {
    with_tls_space("exceptions_pass_through_jemalloc", || exceptions_pass(JEMALLOC, true));
}

#[test]
fn exceptions_pass_through_tcmalloc() {
    exceptions_pass(TCMALLOC, true);
}

#[test]
fn exceptions_pass_through_mimalloc() {
    // Debian builds mimalloc such that it ends the program where others throw.
    exceptions_pass(MIMALLOC, false);
}

//! Every allocator is recorded exactly: at interval 1 the figures equal the truth, and the allocator's own count where
//! it has one. Includes allocators on top of one another and those that the user describes.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, tool, turn};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::{library, program, program_with};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;
use serde::Deserialize;

const ARENA: &str = "libarena.so:arena_take(size=arg1)->ret,arena_take_zeroed(size=arg2,times=arg1)->ret,\
                     arena_resize(old=arg1,size=arg2)->ret,free=arena_give(arg1)";

/// Path of a shared library from the distribution, if it is installed.
fn shared(name: &str) -> Option<PathBuf> {
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]
        .iter()
        .map(|dir| Path::new(dir).join(name))
        .find(|path| path.exists())
}

/// The allocator's own count, as `anywhere.c` reports it.
#[derive(Debug, Deserialize)]
struct OwnCount {
    source: String,
    grew: u64,
    usable: u64,
}

/// An allocator with the library to preload and the settings that make its own count exact.
struct Preloaded {
    name: &'static str,
    file: &'static str,
    package: &'static str,
    source: &'static str,
    environment: (&'static str, &'static str),
    /// Bytes per block that the allocator counts in addition to the usable ones.
    head_bytes: u64,
}

/// The allocators. Two of them count blocks in thread caches as in use, so those caches are disabled.
const PRELOADED: &[Preloaded] = &[
    Preloaded {
        name: "glibc",
        file: "",
        package: "libc6",
        source: "mallinfo2",
        environment: ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"),
        head_bytes: 8,
    },
    Preloaded {
        name: "jemalloc",
        file: "libjemalloc.so.2",
        package: "libjemalloc2",
        source: "mallctl",
        environment: ("MALLOC_CONF", "tcache:false"),
        head_bytes: 0,
    },
    Preloaded {
        name: "tcmalloc",
        file: "libtcmalloc_minimal.so.4",
        package: "libtcmalloc-minimal4",
        source: "MallocExtension",
        environment: ("UNUSED", ""),
        head_bytes: 0,
    },
    Preloaded {
        name: "mimalloc",
        file: "libmimalloc.so.2",
        package: "libmimalloc2.0",
        source: "none",
        environment: ("UNUSED", ""),
        head_bytes: 0,
    },
];

impl Preloaded {
    /// A command that runs with this allocator. Returns `None` and logs a skip if it is not installed.
    fn command(&self, case: &str, program: &Path) -> Option<Command> {
        let mut command = Command::new(program);
        if !self.file.is_empty() {
            let Some(path) = shared(self.file) else {
                skipped(case, &format!("no {} (Debian: {})", self.file, self.package));
                return None;
            };
            command.env("LD_PRELOAD", path);
        }
        command.env(self.environment.0, self.environment.1);
        Some(command)
    }
}

/// Checks that no allocation of the program was missed or counted twice.
fn exact(name: &str, profile: &Profile, stats: &Stats, truth: &Truth) {
    println!("{name}: {stats:?}");
    checks::sites(profile, truth, 1, Compare::All);
    assert_eq!(stats.submitted, truth.allocs(), "{name}: {stats:?}");
    assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{name}");
    assert_eq!((stats.failed, stats.lost()), (0, 0), "{name}: {stats:?}");
}

fn uses(profile: &Profile, pid: u32, allocator: &str) {
    let found = &profile.process(pid).allocators;
    assert!(found.iter().any(|name| name.starts_with(allocator)), "{allocator} is not in {found:?}");
}

/// The figures equal the truth, and the allocator's own count of memory in use equals the profile's.
#[test]
fn each_allocator_equals_the_truth_and_its_own_count() {
    let case = "each_allocator_equals_the_truth_and_its_own_count";
    let Some(_turn) = turn(case) else { return };
    for allocator in PRELOADED {
        let Some(mut command) = allocator.command(case, &program("anywhere")) else { continue };
        let mut target = Target::start_command(command.arg("90"));
        let recording = Recorder::of(target.pid(), 1).start();
        target.go();
        let own: OwnCount = serde_json::from_str(&target.line()).expect("the program's own count");
        let (pid, truth) = (target.pid(), target.truth());
        let (profile, stats) = recording.stop().results();
        exact(allocator.name, &profile, &stats, &truth);
        uses(&profile, pid, allocator.name);
        assert_eq!(own.source, allocator.source, "{}", allocator.name);
        if own.source == "none" {
            continue;
        }
        let blocks: f64 = checks::site_sums(&profile, None).values().map(|site| site.figures[3]).sum();
        let in_use = own.usable as f64 + blocks * allocator.head_bytes as f64;
        assert_eq!(in_use, own.grew as f64, "{}: {own:?}", own.source);
    }
}

/// Where operator new itself is hooked, an exception leaves a hooked function. It must reach its handler and must not
/// terminate the program. (Other reasons for the failure and other kinds of link are in the long set. mimalloc's
/// library is C and terminates the program itself.)
#[test]
fn exceptions_out_of_operator_new() {
    let case = "exceptions_out_of_operator_new";
    let Some(_turn) = turn(case) else { return };
    let Some(_compiler) = tool("c++") else { return skipped(case, "no C++ compiler (Debian: g++)") };
    thrown(case, &THROWN[..1]);
}

/// Arguments that decide why an allocation fails, and the kind of link.
const THROWN: [(&[&str], &str); 5] = [
    (&["200", "refused"], "session"),
    (&["200"], "session"),
    (&["200", "limit"], "session"),
    (&["200", "refused"], "multi"),
    (&["200", "refused"], "perf"),
];

/// Runs these cases with each allocator.
fn thrown(case: &str, cases: &[(&[&str], &str)]) {
    let throwing = program("throwing");
    for allocator in PRELOADED.iter().filter(|allocator| allocator.name != "mimalloc") {
        for &(arguments, link) in cases {
            let Some(mut command) = allocator.command(case, &throwing) else { continue };
            let mut target = Target::start_command(command.args(arguments));
            let (profile, stats, truth) =
                Recorder::of(target.pid(), 1).option("--hook", "probe").option("--link", link).results_of(&mut target);
            checks::sites(&profile, &truth, 1, Compare::All);
            assert!(stats.failed >= truth.failed && stats.lost() == 0, "{}, {link}: {stats:?}", allocator.name);
        }
    }
}

fn nested() -> PathBuf {
    let arena = library("arena", "libarena.so", &[]);
    let dir = arena.parent().expect("has a directory").display().to_string();
    let arena = arena.display().to_string();
    program_with("nested", "nested", &[&arena, &format!("-Wl,-rpath,{dir}")])
}

/// An arena that gets its chunks from malloc in another file, through an exported function and a pointer.
#[test]
fn an_arena_above_malloc_counts_once() {
    let Some(_turn) = turn("an_arena_above_malloc_counts_once") else { return };
    for interval in [1, 2000] {
        let mut target = Target::start(&nested(), ["plain", "2000"]);
        let pid = target.pid();
        let (profile, stats, truth) = Recorder::of(pid, interval).option("--alloc", ARENA).results_of(&mut target);
        checks::sites(&profile, &truth, interval, Compare::All);
        assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
        assert!(stats.reentrant > 0, "{stats:?}");
        uses(&profile, pid, "custom");
        uses(&profile, pid, "glibc");
    }
}

/// An arena call that never returns does not hide the calls after it.
#[test]
fn an_arena_left_half_way() {
    let Some(_turn) = turn("an_arena_left_half_way") else { return };
    for mode in ["jump", "thread"] {
        let mut target = Target::start(&nested(), [mode, "200"]);
        let (mut profile, stats, truth) =
            Recorder::of(target.pid(), 1).option("--alloc", ARENA).results_of(&mut target);
        // Only site_03 can be compared: the arena's own calls never return.
        profile.stacks.retain(|stack| stack.site() == Some("site_03"));
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!(stats.lost(), truth.abandoned, "{mode}: {stats:?}");
    }
}

/// A pool in C++ that throws exceptions: they must not terminate the program, calls that throw count as failed, and
/// later allocations count.
#[test]
fn exceptions_out_of_a_custom_allocator() {
    let case = "exceptions_out_of_a_custom_allocator";
    let Some(_turn) = turn(case) else { return };
    let Some(_compiler) = tool("c++") else { return skipped(case, "no C++ compiler (Debian: g++)") };
    if std::env::consts::ARCH != "x86_64" {
        return skipped(case, "returns are read off x86-64 code only");
    }
    let pool = program("pool");
    let specification =
        format!("{}:pool_take(size=arg0)->ret,pool_grow(old=arg0,size=arg1)->ret,free=pool_give(arg0)", pool.display());
    let cases = [
        ("session", 1, "dwarf"),
        ("session", 1, "fp"),
        ("session", 500, "dwarf"),
        ("multi", 1, "dwarf"),
        ("perf", 1, "dwarf"),
    ];
    for (link, interval, unwind) in cases {
        let mut target = Target::start(&pool, ["200"]);
        let recorder = Recorder::of(target.pid(), interval).option("--alloc", &specification);
        let (profile, stats, truth) = recorder
            .option("--hook", "probe")
            .option("--link", link)
            .option("--unwind", unwind)
            .results_of(&mut target);
        checks::sites(&profile, &truth, interval, Compare::All);
        let exact = (stats.exact_alloc_objects, stats.exact_alloc_bytes);
        assert_eq!(exact, (truth.allocs(), truth.bytes()), "{link}, {interval}, {unwind}: {stats:?}");
        assert_eq!(stats.lost(), 0, "{link}: {stats:?}");
        let probe = stats.attach.iter().find(|probe| probe.function == "pool_take").expect("it is hooked");
        assert!(probe.reason.contains("may throw"), "{probe:?}");
    }
}

#[test]
fn specifications_that_cannot_be_right() {
    let Some(_turn) = turn("specifications_that_cannot_be_right") else { return };
    let target = Target::start(&nested(), ["plain", "1"]);
    let arena = nested().parent().map(|_| library("arena", "libarena.so", &[])).expect("has a directory");
    let by_path = format!("{}:arena_tak(size=arg1)->ret", arena.display());
    for (specification, words) in [
        ("libarena.so:arena_take(size=arg1", &["expected"][..]),
        ("libarena.so:arena_take(bytes=arg1)->ret", &["\"bytes\" is not one of"]),
        ("libarena.so:arena_tak(size=arg1)->ret", &["arena_take"]),
        (&by_path, &["arena_take"]),
        ("@/no/such/file", &["No such file"]),
    ] {
        let refused = Recorder::of(target.pid(), 1).option("--alloc", specification).refused();
        refused.check(2, words);
    }
}

/// A process with more executable mappings than heapbpf keeps: its allocator is found, its stacks unwind through its
/// libraries, and the profile reports the mappings that were not kept.
#[test]
fn a_crowd_of_mappings_hides_no_allocator() {
    let Some(_turn) = turn("a_crowd_of_mappings_hides_no_allocator") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    for (kind, begin) in [
        ("code", "mappings of code made at run time"),
        ("pieces", "executable mappings of files"),
        ("files", "executable mappings of files (/"),
    ] {
        let crowded = [OsStr::new(kind), "9000".as_ref(), "1000".as_ref(), dir.path().as_ref()];
        let mut target = Target::start(&program("crowded"), crowded);
        let pid = target.pid();
        let (profile, stats, truth) = Recorder::of(pid, 1).results_of(&mut target);
        exact(kind, &profile, &stats, &truth);
        uses(&profile, pid, "glibc");
        assert!(profile.stacks.iter().all(|stack| stack.complete), "{kind}: {:?}", profile.stacks);
        let missing = &profile.process(pid).missing;
        let what = missing.iter().find(|missing| missing.what.starts_with(begin));
        assert!(
            what.is_some_and(|missing| missing.why.contains("are not kept, as there are more than 8192")),
            "{missing:?}"
        );
    }
}

/// Tests of the long set.
mod long {
    use super::*;

    #[test]
    fn exceptions_out_of_operator_new_of_each_allocator() {
        let case = "exceptions_out_of_operator_new_of_each_allocator";
        let Some(_turn) = turn(case) else { return };
        thrown(case, &THROWN);
    }

    /// Like the test above, with processes that have their own links, from one recording or two. If a link of one
    /// process awaits returns, the kernel runs it in calls of the other processes too, up to replacing their return
    /// addresses.
    #[test]
    fn exceptions_out_of_operator_new_beside_another_process() {
        let case = "exceptions_out_of_operator_new_beside_another_process";
        let Some(_turn) = turn(case) else { return };
        let Some(_compiler) = tool("c++") else { return skipped(case, "no C++ compiler (Debian: g++)") };
        let throwing = program("throwing");
        for allocator in PRELOADED.iter().filter(|allocator| allocator.name != "mimalloc") {
            for (recordings, link) in [(1, "session"), (2, "session"), (2, "multi"), (2, "perf")] {
                let Some(mut command) = allocator.command(case, &throwing) else { continue };
                command.args(["200"]);
                let mut targets = [Target::start_command(&mut command), Target::start_command(&mut command)];
                let [first, second] = [targets[0].pid(), targets[1].pid()];
                let of = |pid: u32| {
                    Recorder::of(pid, 1).option("--hook", "probe").option("--link", link).flag("--no-follow")
                };
                let recordings: Vec<_> = match recordings {
                    1 => vec![of(first).pid(second).start()],
                    _ => vec![of(first).start(), of(second).start()],
                };
                let truths = targets.each_mut().map(Target::run);
                let outcomes: Vec<_> = recordings.into_iter().map(|recording| recording.stop().results()).collect();
                for ((pid, truth), (profile, stats)) in
                    [first, second].into_iter().zip(&truths).zip(outcomes.iter().cycle())
                {
                    checks::sites_of(profile, pid, truth, 1, Compare::All);
                    assert!(stats.failed >= truth.failed && stats.lost() == 0, "{}, {link}: {stats:?}", allocator.name);
                }
            }
        }
    }
}

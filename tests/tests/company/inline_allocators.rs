//! Inline hooks of allocators other than the shared glibc, of several in one process, and of C++ operators.

use std::path::Path;
use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, tool, turn};
use heapbpf_tests::inline::{Hook, begin, counted_exactly, hooked_files, is_hooked, recorder};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::{library, program, program_with};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until};
use heapbpf_tests::truth::Truth;

const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";
const MUSL: &str = "-specs=/usr/lib/x86_64-linux-musl/musl-gcc.specs";
/// Allocators to preload. The first is libc's own.
const PRELOADED: [&str; 4] = ["", "libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2"];

/// A command that runs a program with this allocator. Returns `None` and logs a skip if it is not installed.
fn with_allocator(case: &str, file: &str, program: &Path, arguments: &[&str]) -> Option<Command> {
    let mut command = Command::new(program);
    command.args(arguments);
    if !file.is_empty() {
        let path = Path::new(LIBRARIES).join(file);
        if !path.exists() {
            skipped(case, &format!("no {file}"));
            return None;
        }
        command.env("LD_PRELOAD", path);
    }
    Some(command)
}

/// Records a program hooked inline, at interval 1. `file` is part of the path of the file that must be hooked. `line`
/// says that the program prints a line before its report.
fn record(command: &mut Command, file: &str, options: &[[&str; 2]], line: bool) -> (Profile, Stats, Truth) {
    let command = std::cell::RefCell::new(command);
    let start = || Target::start_command(*command.borrow_mut());
    let (mut target, recording) = begin(&start, Hook::Inline, file, 1, options);
    let pid = target.pid();
    target.go();
    if line {
        target.line();
    }
    let truth = target.truth();
    let (profile, stats) = recording.stop().results();
    assert!(!is_hooked(pid), "the original pages are back");
    assert!(target.end().success(), "{file}: it comes to no harm");
    (profile, stats, truth)
}

fn exact(profile: &Profile, stats: &Stats, truth: &Truth) {
    checks::sites(profile, truth, 1, Compare::All);
    counted_exactly(stats, truth);
    assert_eq!((stats.submitted, stats.failed), (truth.allocs(), 0), "{stats:?}");
}

#[test]
fn every_form_of_new_and_delete_is_exact() {
    let case = "every_form_of_new_and_delete_is_exact";
    let Some(_turn) = turn(case) else { return };
    let Some(_compiler) = tool("c++") else { return skipped(case, "no C++ compiler (Debian: g++)") };
    let operators = program_with("operators", "operators", &["-std=c++17", "-fsized-deallocation"]);
    for file in PRELOADED {
        let Some(mut command) = with_allocator(case, file, &operators, &["100"]) else { continue };
        let (profile, stats, truth) = record(&mut command, file, &[], false);
        exact(&profile, &stats, &truth);
    }
}

/// Every allocator refuses for one reason, and libc's for the other, too.
#[test]
fn exceptions_reach_their_handlers() {
    exceptions("exceptions_reach_their_handlers", "limit", &PRELOADED[..1]);
    exceptions("exceptions_reach_their_handlers", "refused", &PRELOADED[..3]);
}

/// Exceptions leave a hooked operator new and pass through frames of a hooked program. (mimalloc's library is C and
/// ends the program itself.)
fn exceptions(case: &str, reason: &str, files: &[&str]) {
    let Some(_turn) = turn(case) else { return };
    let Some(_compiler) = tool("c++") else { return skipped(case, "no C++ compiler (Debian: g++)") };
    for file in files {
        let Some(mut command) = with_allocator(case, file, &program("throwing"), &["200", reason]) else { continue };
        let (profile, stats, truth) = record(&mut command, file, &[], false);
        checks::sites(&profile, &truth, 1, Compare::All);
        assert!(stats.failed >= truth.failed && stats.lost() == 0, "{file}, {reason}: {stats:?}");
    }
}

#[test]
fn static_programs_and_musl_are_exact() {
    let case = "static_programs_and_musl_are_exact";
    let Some(_turn) = turn(case) else { return };
    let musl = Path::new("/usr/lib/x86_64-linux-musl/musl-gcc.specs").exists();
    if !musl {
        skipped(case, "no musl (Debian: musl-tools, musl-dev)");
    }
    let variants: [(&str, &str, &[&str]); 4] = [
        ("glibc", "anywhere-static", &["-static", "-DNO_STATISTICS"]),
        ("glibc", "anywhere-static-pie", &["-static-pie", "-DNO_STATISTICS"]),
        ("musl", "anywhere-musl", &[MUSL]),
        ("musl", "anywhere-musl-static", &[MUSL, "-static"]),
    ];
    for (allocator, output, flags) in variants.into_iter().filter(|(allocator, ..)| musl || *allocator != "musl") {
        let mut command = Command::new(program_with("anywhere", output, flags));
        let file = if output == "anywhere-musl" { "linux-musl" } else { output };
        let (profile, stats, truth) = record(command.arg("60"), file, &[], false);
        exact(&profile, &stats, &truth);
        let found = &profile.process(truth.sites[0].pid).allocators;
        assert!(found.iter().any(|name| name.starts_with(allocator)), "{allocator} is not in {found:?}");
    }
}

/// glibc's allocator, and another one that is loaded later.
#[test]
fn an_allocator_that_is_loaded_later_is_hooked_too() {
    let case = "an_allocator_that_is_loaded_later_is_hooked_too";
    let Some(_turn) = turn(case) else { return };
    let jemalloc = Path::new(LIBRARIES).join("libjemalloc.so.2");
    if !jemalloc.exists() {
        return skipped(case, "no libjemalloc.so.2 (Debian: libjemalloc2)");
    }
    loads(&program("newcomer"), &jemalloc, "jemalloc");
}

/// A plugin is opened so that its calls go to the allocator that it brings (`RTLD_DEEPBIND`). The program's calls go to
/// the C library's.
#[test]
fn an_allocator_that_only_a_plugin_uses_is_hooked_too() {
    let case = "an_allocator_that_only_a_plugin_uses_is_hooked_too";
    let Some(_turn) = turn(case) else { return };
    let deep = program_with("newcomer", "newcomer-deep", &["-DDEEP"]);
    for file in &PRELOADED[1..] {
        let path = Path::new(LIBRARIES).join(file);
        if !path.exists() {
            skipped(case, &format!("no {file}"));
            continue;
        }
        let flags = ["-Wl,--no-as-needed", &path.display().to_string()];
        loads(&deep, &library("deep_plugin", &format!("deep-{file}"), &flags), file);
    }
}

/// Records a program while it loads a library that brings an allocator, whose file has `name` in its path.
fn loads(program: &Path, library: &Path, name: &str) {
    let start = || {
        let mut command = Command::new(program);
        // jemalloc needs more thread-local memory than the loader reserves for libraries that are loaded later.
        Target::start_command(command.arg(library).env("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=32768"))
    };
    let (mut target, recording) = begin(&start, Hook::Inline, "libc.so.6", 1, &[]);
    let pid = target.pid();
    target.go();
    target.step();
    until("both are hooked", || hooked_files(pid).len() == 2);
    assert!(hooked_files(pid).iter().any(|path| path.contains(name)), "{:?}", hooked_files(pid));
    // Links are made after the jumps.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    checks::identity(&stats);
    assert_eq!(stats.lost(), 0, "{stats:?}");
    assert!(!is_hooked(pid), "the original pages are back");
    // Between the loading and the hooking there is a gap.
    let process = profile.process(pid);
    let shares = [Some(process.coverage), process.cpu_coverage];
    assert!(shares.iter().all(|share| share.is_some_and(|share| share < 1.0)), "{shares:?}");
}

/// Prints how long the calls of such an allocator are not counted, from before its file is mapped on: the program makes
/// one every 0.1 ms, and those that are missing are the first ones.
#[test]
fn the_first_calls_of_an_allocator_that_is_loaded_later_are_missing() {
    let case = "the_first_calls_of_an_allocator_that_is_loaded_later_are_missing";
    let Some(_turn) = turn(case) else { return };
    for file in &PRELOADED[1..] {
        let path = Path::new(LIBRARIES).join(file);
        if !path.exists() {
            skipped(case, &format!("no {file}"));
            continue;
        }
        let start = || {
            let mut command = Command::new(program("newcomer"));
            let command = command.arg(&path).arg("100000");
            Target::start_command(command.env("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=32768"))
        };
        let (mut target, recording) = begin(&start, Hook::Inline, "libc.so.6", 1, &[]);
        let pid = target.pid();
        target.go();
        until("both are hooked", || hooked_files(pid).len() == 2);
        let truth = target.run();
        let (profile, stats) = recording.stop().results();
        let of_site = profile.stacks.iter().filter(|stack| stack.site() == Some("site_01"));
        let counted: u64 = of_site.map(|stack| stack.samples).sum();
        let made = truth.site("site_01").allocs;
        println!("{file}: {:.1} ms, {counted} of {made} calls", made.saturating_sub(counted) as f64 * 0.1);
        assert!((1..made).contains(&counted) && stats.lost() == 0, "{file}: {counted} of {made}, {stats:?}");
    }
}

/// A custom allocator in a program, and one in a library that is unloaded and loaded again.
#[test]
fn custom_allocators_are_exact() {
    let Some(_turn) = turn("custom_allocators_are_exact") else { return };
    let dir = library("bumps", "libbumps.so", &[]);
    let bumps = dir.display().to_string();
    let specification = "libbumps.so:bumps_take(size=arg0)->ret,free=bumps_give(arg0)";
    let start = || Target::start(&program("bumped"), [&bumps]);
    let (mut target, recording) = begin(&start, Hook::Inline, "libbumps", 1, &[["--alloc", specification]]);
    let pid = target.pid();
    let has_both = || hooked_files(pid).iter().any(|path| path.contains("bumps"));
    until("it is hooked", has_both);
    target.go();
    target.step();
    // The library was unloaded and loaded again.
    until("it is hooked again", has_both);
    std::thread::sleep(std::time::Duration::from_millis(500));
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    checks::identity(&stats);
    assert!(target.end().success());
}

/// A variadic function reads a register besides those of its arguments, which inline hooks do not keep.
#[test]
fn a_variadic_allocator_is_probed() {
    let case = "a_variadic_allocator_is_probed";
    let Some(_turn) = turn(case) else { return };
    if !cfg!(target_arch = "x86_64") {
        return skipped(case, "inline hooks are of x86-64");
    }
    let variadic = program("variadic");
    let specification = format!("{}:make(size=arg0)->ret,free=unmake(arg0)", variadic.display());
    let mut target = Target::start(&variadic, ["2000"]);
    let recorder = recorder(target.pid(), Hook::Inline, 1).option("--alloc", &specification).flag("-v");
    let recording = recorder.start();
    assert!(!hooked_files(target.pid()).iter().any(|path| path.ends_with("/variadic")), "{}", recording.said());
    let truth = target.run();
    let outcome = recording.stop();
    assert!(outcome.stderr.contains("it reads registers other than those of its arguments"), "{}", outcome.stderr);
    let (profile, _) = outcome.results();
    checks::sites(&profile, &truth, 1, Compare::All);
    assert!(target.end().success(), "it came to harm");
}

/// Static programs run as commands, hooked from their first call on, with and without threads. (musl programs without
/// signal handlers have no code that returns from a handler. Position-independent glibc programs have no program header
/// for the program headers.)
#[test]
fn static_commands_are_exact() {
    let case = "static_commands_are_exact";
    let Some(_turn) = turn(case) else { return };
    if !Path::new("/usr/lib/x86_64-linux-musl/musl-gcc.specs").exists() {
        return skipped(case, "no musl (Debian: musl-tools, musl-dev)");
    }
    for (name, library, flags) in [
        ("anywhere", "musl", &[MUSL, "-static"][..]),
        ("threads", "musl", &[MUSL, "-static"]),
        ("pairs", "musl", &[MUSL, "-static-pie"]),
        ("pairs", "glibc", &["-static-pie"]),
        ("pairs", "fixed-glibc", &["-static"]),
    ] {
        let command = program_with(name, &format!("{name}-{library}-command"), flags);
        let recorder = Recorder::new().interval(1).variable("FREE_RUNNING", "1".as_ref());
        let outcome = recorder.command(&command, ["1280"]).start().finish();
        let truth = Truth::in_output(&outcome.stdout);
        let (profile, stats) = outcome.results();
        assert!(stats.hooks.iter().all(|process| process.hook == "inline"), "{name}: {stats:?}: {}", outcome.stderr);
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!((stats.lost(), stats.unsampled), (0, 0), "{name}: {stats:?}");
    }
}

/// Tests of the long set.
mod long {
    use super::*;

    #[test]
    fn exceptions_of_other_allocators_at_a_limit_reach_their_handlers() {
        exceptions("exceptions_of_other_allocators_at_a_limit_reach_their_handlers", "limit", &PRELOADED[1..3]);
    }
}

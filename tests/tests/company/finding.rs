//! Allocators in unusual places: each is found, and hooked once.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::constant::Load;
use heapbpf_tests::doctor::doctor_of;
use heapbpf_tests::environment::{programs_dir, skipped, tool, tool_or_install, turn};
use heapbpf_tests::output::{self, Profile};
use heapbpf_tests::program::{library, program, program_with, rust_program};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::torture::Overlay;
use serde_json::Value;
use tempfile::TempDir;

fn run(command: &mut Command) -> bool {
    command.status().is_ok_and(|status| status.success())
}

/// Copies files by a shell: a file that this process wrote cannot be executed while a forked sibling may still have it
/// open.
fn shell(script: &str, dir: &Path, arguments: &[&Path]) -> bool {
    run(Command::new("sh").current_dir(dir).args(["-e", "-c", script, "sh"]).args(arguments))
}

fn exact(target: &mut Target) -> Vec<String> {
    let (profile, stats, truth) = Recorder::of(target.pid(), 1).results_of(target);
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
    profile.process(target.pid()).allocators.clone()
}

/// A sanitizer's operators do not call its `malloc`.
#[test]
fn sanitizers_have_operators_of_their_own() {
    let case = "sanitizers_have_operators_of_their_own";
    let Some(_turn) = turn(case) else { return };
    let Some(_compiler) = tool("c++") else { return skipped(case, "no C++ compiler (Debian: g++)") };
    // GCC 12's ThreadSanitizer does not start if addresses are randomized in more than 28 bits.
    if !run(Command::new("setarch").args(["-R", "true"])) {
        return skipped(case, "address space randomization cannot be switched off here (setarch -R)");
    }
    for sanitizer in ["address", "thread"] {
        let flags = ["-std=c++17", "-fsized-deallocation", &format!("-fsanitize={sanitizer}")];
        let built = program_with("operators", &format!("operators-{sanitizer}"), &flags);
        for hook in ["probe", "inline"] {
            let mut command = Command::new("setarch");
            let mut target =
                Target::start_command(command.arg("-R").arg(&built).arg("100").env("ASAN_OPTIONS", "detect_leaks=0"));
            let (profile, stats, truth) = Recorder::of(target.pid(), 1).option("--hook", hook).results_of(&mut target);
            checks::sites(&profile, &truth, 1, Compare::All);
            let counted = (stats.exact_alloc_objects, stats.exact_alloc_bytes);
            assert_eq!(counted, (truth.allocs(), truth.bytes()), "{sanitizer}, {hook}: {stats:?}");
            let process = profile.process(target.pid());
            assert!(process.allocators.iter().any(|allocator| allocator == "sanitizer"), "{:?}", process.allocators);
        }
    }
}

/// Two names of one inode, and one file seen beneath an overlay mount and through two such mounts. With targets by name,
/// links serve every process, so a second link on an inode would count everything twice.
#[test]
fn one_file_by_many_names_is_hooked_once() {
    let case = "one_file_by_many_names_is_hooked_once";
    let Some(_turn) = turn(case) else { return };
    let dir = TempDir::with_prefix("heapbpf-overlay-").expect("a temporary directory");
    let built = program_with("mix", "mix-static", &["-static"]);
    let script = "mkdir below; cp \"$1\" below/manyname; ln below/manyname manyname";
    assert!(shell(script, dir.path(), &[&built]));
    let below = dir.path().join("below");
    let mounts: Vec<_> = ["1", "2"].into_iter().filter_map(|name| Overlay::mount(dir.path(), name, &below)).collect();
    if mounts.len() < 2 {
        skipped(case, "overlay file systems cannot be mounted here: hard links only");
    }
    let mut paths = vec![below.join("manyname"), dir.path().join("manyname")];
    paths.extend(mounts.iter().map(|mount| mount.path("manyname")));
    for by_name in [false, true] {
        let mut targets: Vec<Target> = paths.iter().map(|path| Target::start(path, ["2000"])).collect();
        let recorder = Recorder::new().interval(1).option("--hook", "probe");
        let recorder = match by_name {
            true => recorder.option("--comm", "manyname"),
            false => targets.iter().fold(recorder, |recorder, target| recorder.pid(target.pid())),
        };
        let recording = recorder.start();
        let truths: Vec<_> = targets.iter_mut().map(Target::run).collect();
        let (profile, stats) = recording.stop().results();
        for (target, truth) in targets.iter().zip(&truths) {
            checks::sites_of(&profile, target.pid(), truth, 1, Compare::All);
            let (bytes, objects) = checks::exact(profile.process(target.pid()));
            assert_eq!((objects, bytes), (Some(truth.allocs()), Some(truth.bytes())));
        }
        let probes = |function: &str| stats.attach.iter().filter(|probe| probe.function == function).count();
        assert!(by_name || probes("malloc") == 1, "{:?}", stats.attach);
    }
}

/// A program may have its own `operator new`, exported or not, besides the C library's malloc. What it makes from its
/// own memory is counted there, and what comes from malloc is counted once. The same holds for stand-ins with the names
/// of Chromium's allocator, which replaces malloc as well, and of Firefox's arena functions.
#[test]
fn operators_of_the_programs_own_are_counted_once() {
    let case = "operators_of_the_programs_own_are_counted_once";
    let Some(_turn) = turn(case) else { return };
    let Some(_compiler) = tool("c++") else { return skipped(case, "no C++ compiler (Debian: g++)") };
    let own = Some("operator new of its own");
    for (kind, export, name) in [
        ("ARENA", false, own),
        ("ARENA", true, own),
        ("LARGE", true, own),
        ("THROWS", true, own),
        ("POINTER", true, own),
        ("WRAPPED", true, None),
        ("SHIM", true, Some("malloc of its own")),
        ("MOZ", true, Some("mozjemalloc")),
    ] {
        let define = format!("-D{kind}");
        let flags: &[&str] = if export { &[&define, "-rdynamic"] } else { &[&define] };
        let built = program_with("own_operators", &format!("own_operators-{kind}-{export}"), flags);
        let allocators = exact(&mut Target::start(&built, ["500"]));
        let is_beside_glibc = !["SHIM", "MOZ"].contains(&kind);
        assert!(allocators.iter().any(|it| it.starts_with("glibc")) || !is_beside_glibc, "{kind}: {allocators:?}");
        let found = allocators.iter().find(|it| !it.starts_with("glibc")).map(String::as_str);
        assert_eq!(found, name, "{kind}: {allocators:?}");
    }
}

/// A stand-in with snmalloc's symbol names (Debian does not package snmalloc), which are all that heapbpf finds it by.
#[test]
fn snmalloc_by_its_names() {
    let Some(_turn) = turn("snmalloc_by_its_names") else { return };
    let stand_in = library("snmalloc", "libsnmallocshim.so", &[]);
    let dir = stand_in.parent().expect("has a directory").display().to_string();
    let flags = [stand_in.display().to_string(), format!("-Wl,-rpath,{dir}")];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let allocators = exact(&mut Target::start(&program_with("sn_names", "sn_names", &flags), ["500"]));
    assert!(allocators.iter().any(|name| name.starts_with("snmalloc")), "{allocators:?}");
}

/// `__rust_alloc` and its relatives, in an unstripped program with its own global allocator. (With optimization the
/// compiler inlines them into their callers, where they cannot be probed.)
#[test]
fn a_rust_program_with_its_own_allocator() {
    let case = "a_rust_program_with_its_own_allocator";
    let Some(_turn) = turn(case) else { return };
    let Some(built) = rust_program("own_allocator", "opt-level=0") else {
        return skipped(case, "no Rust compiler that works");
    };
    let mut target = Target::start(&built, ["2000"]);
    let (profile, _, truth) = Recorder::of(target.pid(), 1).results_of(&mut target);
    // Its report allocates as well, so only the site is compared.
    checks::sites(&profile, &truth, 1, Compare::All);
    let allocators = &profile.process(target.pid()).allocators;
    assert!(allocators.iter().any(|name| name.starts_with("Rust")), "{allocators:?}");
}

/// A malloc that is chosen at program start (IFUNC), in a library with lazy or immediate binding and in a static
/// executable: every candidate is hooked, and the chosen one counts exactly.
#[test]
fn indirect_functions() {
    let case = "indirect_functions";
    let Some(_turn) = turn(case) else { return };
    if std::env::consts::ARCH != "x86_64" {
        return skipped(case, "what a resolver chooses is read off x86-64 code only");
    }
    let chosen = library("ifunc", "libifunc.so", &[]);
    let source = programs_dir().join("ifunc.c").display().to_string();
    let built = [
        (program("mix"), Some(&chosen)),
        (program_with("mix", "mix-bound-now", &["-Wl,-z,now"]), Some(&chosen)),
        (program_with("mix", "mix-static-ifunc", &["-static", &source]), None),
    ];
    for (program, preloaded) in built {
        let mut command = Command::new(&program);
        if let Some(path) = preloaded {
            command.env("LD_PRELOAD", path);
        }
        let mut target = Target::start_command(command.arg("3000"));
        let pid = target.pid();
        let (profile, stats, truth) = Recorder::of(pid, 1).option("--hook", "probe").results_of(&mut target);
        checks::sites(&profile, &truth, 1, Compare::All);
        let exact = (stats.exact_alloc_objects, stats.exact_alloc_bytes);
        assert_eq!(exact, (truth.allocs(), truth.bytes()), "{}: {stats:?}", program.display());
        assert!(stats.reentrant > 0, "calloc calls malloc: {stats:?}");
        let ours = || stats.attach.iter().filter(|probe| !probe.file.contains("libc.so"));
        let probes = |function: &str| ours().filter(|probe| probe.function == function).count();
        assert_eq!((probes("malloc"), probes("free"), probes("calloc")), (2, 2, 1), "{:?}", stats.attach);
        let is_reported = |profile: &Profile| profile.process(pid).missing.iter().any(|gap| gap.why.contains("IFUNC"));
        assert!(!is_reported(&profile), "{:?}", profile.process(pid).missing);
    }
}

/// If heapbpf cannot know what a resolver chooses, doctor and the profile say so.
#[test]
fn a_choice_that_cannot_be_read_is_told() {
    let Some(_turn) = turn("a_choice_that_cannot_be_read_is_told") else { return };
    let chosen = library("ifunc", "libifunc-late.so", &["-DLATE"]);
    let mut command = Command::new(program("mix"));
    let mut target = Target::start_command(command.arg("500").env("LD_PRELOAD", &chosen));
    let (status, found) = doctor_of(target.pid());
    assert_eq!(status, Some(1), "{found}");
    let missing = found["missing"].as_array().expect("a list");
    let is_reported =
        |gap: &Value| gap["what"] == "malloc" && gap["why"].as_str().is_some_and(|why| why.contains("IFUNC"));
    assert!(missing.iter().any(is_reported), "{found}");
    let (profile, ..) = Recorder::of(target.pid(), 1).option("--hook", "probe").results_of(&mut target);
    let missing = &profile.process(target.pid()).missing;
    assert!(missing.iter().any(|gap| gap.what == "malloc" && gap.why.contains("IFUNC")), "{missing:?}");
    assert!(profile.notes.iter().any(|note| note.contains("IFUNC")), "{:?}", profile.notes);
}

/// A hand-written allocator. Where no instruction is cheap to probe, or the first cannot be decoded, the probe is at
/// the entry. What the kernel refuses there is reported and does not affect other functions. The reasons are in
/// `--stats`, in the profile and in doctor.
#[test]
fn hand_written_functions() {
    let case = "hand_written_functions";
    let Some(_turn) = turn(case) else { return };
    if std::env::consts::ARCH != "x86_64" {
        return skipped(case, "the allocator is written in x86-64 assembly");
    }
    let handmade = library("handmade", "libhandmade.so", &[]);
    for link in ["session", "perf"] {
        let mut command = Command::new(program("mix"));
        let mut target = Target::start_command(command.arg("500").env("LD_PRELOAD", &handmade));
        let pid = target.pid();
        let (profile, stats, truth) =
            Recorder::of(pid, 1).option("--hook", "probe").option("--link", link).results_of(&mut target);
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{link}");
        let probe =
            |function: &str| stats.attach.iter().find(|p| p.function == function && p.file.contains("handmade"));
        for function in ["malloc", "free"] {
            let probe = probe(function).expect("it is hooked");
            assert_eq!(probe.kind, "stepped", "{probe:?}");
            assert!(probe.reason.starts_with("+0x0 ") && probe.reason.contains("nothing cheaper before"), "{probe:?}");
        }
        assert!(probe("valloc").is_none(), "{:?}", stats.attach);
        let process = profile.process(pid);
        let explains = |why: &str| {
            // The code does not reveal its returns either, and without session links that reason comes first.
            let is_refused =
                why.contains("an instruction that heapbpf does not know") && why.contains("the kernel refuses a probe");
            is_refused || link != "session" && why.contains("it needs Linux 6.13")
        };
        assert!(process.missing.iter().any(|gap| gap.what == "valloc" && explains(&gap.why)), "{:?}", process.missing);
        let reasons = |list: &Value| list.as_array().is_some_and(|list| list.iter().all(|p| p["reason"] != ""));
        assert!(profile.audit.iter().all(|file| reasons(&file["attach"])), "{:?}", profile.audit);
        assert!(stats.attach.iter().all(|probe| !probe.reason.is_empty()), "{:?}", stats.attach);
        if link != "session" {
            continue;
        }
        let (status, found) = doctor_of(pid);
        let missing = found["missing"].as_array().expect("a list");
        let refused = |gap: &Value| gap["what"] == "valloc" && gap["why"].as_str().is_some_and(explains);
        assert!(missing.iter().any(refused) && status == Some(1), "{found}");
    }
}

/// What doctor says about a process: its exit status, and the gaps, each with the reason.
fn missed(pid: u32) -> (Option<i32>, Vec<(String, String)>) {
    let (status, found) = doctor_of(pid);
    let text = |gap: &Value, key: &str| gap[key].as_str().expect("text").to_owned();
    let missing = found["missing"].as_array().expect("a list");
    (status, missing.iter().map(|gap| (text(gap, "what"), text(gap, "why"))).collect())
}

fn command(program: &Path, arguments: &[OsString]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

/// Java's and JavaScript's own objects are in no figure, and Python's are not in a recording with probes. doctor names
/// what is missed by default. So do the profile's process and one of its notes.
#[test]
fn runtimes_with_heaps_of_their_own_are_named() {
    let case = "runtimes_with_heaps_of_their_own_are_named";
    let Some(_turn) = turn(case) else { return };
    let script = [programs_dir().join("json_loop.py").into_os_string(), "20".into()];
    let python = tool_or_install("python3", "python3").map(|python| command(&python, &script));
    let script =
        "console.log('READY'.concat(' ', process.pid)); process.stdin.once('data', () => { console.log('{}') })";
    let node = tool("node").map(|node| command(&node, &["-e".into(), script.into()]));
    // heapbpf takes any file mapped under the name of HotSpot's library for it.
    let mut java = Command::new(program("mix"));
    java.arg("500").env("LD_PRELOAD", library("plugin", "libjvm.so", &["-DPLUGIN=00"]));
    // Inline hooks, the default, count Python's objects.
    for (command, hook, heap) in [
        (python, "probe", "Python's own heap"),
        (node, "auto", "V8's own heap"),
        (Some(java), "auto", "Java's own heap"),
    ] {
        let Some(mut command) = command else {
            skipped(case, &format!("the part about {heap}: its program is not here"));
            continue;
        };
        let mut target = Target::start_command(&mut command);
        let (status, gaps) = missed(target.pid());
        let names = |what: &str, why: &str| what.starts_with(heap) && why.starts_with("not included, as ");
        // doctor says what a recording started now would miss.
        let is_missed = gaps.iter().any(|(what, why)| names(what, why));
        assert_eq!((status, is_missed), (Some(i32::from(hook == "auto")), hook == "auto"), "{heap}: {gaps:?}");
        let recording = Recorder::of(target.pid(), 4 << 10).option("--hook", hook).start();
        target.go();
        target.line();
        let outcome = recording.stop();
        let (profile, _) = outcome.results();
        let process = profile.process(target.pid());
        assert!(process.missing.iter().any(|gap| names(&gap.what, &gap.why)), "{:?}", process.missing);
        let remark = |note: &&String| note.starts_with(heap) && note.contains(" is not included (");
        assert_eq!(profile.notes.iter().filter(remark).count(), 1, "{:?}", profile.notes);
        assert!(outcome.stdout.contains(heap), "{}", outcome.stdout);
    }
    let plain = Target::start(&program("mix"), ["500"]);
    assert_eq!(missed(plain.pid()), (Some(0), Vec::new()));
}

/// A static program without symbols has an allocator that cannot be found. That is the reason given, not that the
/// program ended too soon, and the report does not say that nothing was missed. If it ran for some seconds, it has a
/// line with its last known memory.
#[test]
fn a_static_program_without_symbols_is_named() {
    let Some(_turn) = turn("a_static_program_without_symbols_is_named") else { return };
    let stripped = program_with("mix", "mix-stripped", &["-static", "-s"]);
    let recorder = Recorder::new().interval(1).variable("FREE_RUNNING", OsStr::new("1"));
    let outcome = recorder.command(&stripped, ["500"]).start().finish();
    let (profile, _) = outcome.results();
    let text = outcome.report(&[]);
    let missed_line = text.lines().find(|line| line.starts_with("  missed")).unwrap_or_default();
    assert!(!missed_line.is_empty() && !missed_line.contains("nothing"), "{text}");
    let notes = profile.notes.join("\n");
    assert!(notes.contains("mix-stripped: a static program without symbols (stripped)"), "{notes}");
    assert!(!notes.contains("could be counted: what"), "{notes}");
    let lasting = program_with("constant", "constant-stripped", &["-static", "-s"]);
    let recorder = Recorder::new().variable("FREE_RUNNING", OsStr::new("1"));
    let outcome = recorder.command(&lasting, Load::SLOW.arguments(4)).start().finish();
    let profile: Value = output::read(&outcome.file("profile.json"));
    let process = &profile["processes"][0];
    assert!(process["idle"] == true && process["ended"] == true, "{process}");
    assert!(process["resident"]["before_end"] == true && process["resident"]["heap"] != 0, "{process}");
    assert!(process["missing"][0]["why"].as_str().is_some_and(|why| why.contains("a static program")), "{process}");
    let target = Target::start(&stripped, ["500"]);
    let (status, gaps) = missed(target.pid());
    assert!(
        status == Some(1) && gaps.iter().any(|(_, why)| why.contains("a static program without symbols")),
        "{gaps:?}"
    );
}

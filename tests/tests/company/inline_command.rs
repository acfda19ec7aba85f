//! `-- COMMAND`: the command is hooked inline at its entry point, before its own first call, and so are the programs
//! that it starts.

use std::path::Path;

use heapbpf_tests::checks;
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::held;
use heapbpf_tests::output::{Estimate, Stack};
use heapbpf_tests::program::{library, program, program_with};
use heapbpf_tests::recorder::Recorder;

/// Blocks that a library's constructor allocates before the entry point are sampled by probes, and their frees are
/// seen. A child has the hooks from its first call on.
#[test]
fn a_command_is_counted_inside_from_its_entry_point() {
    let Some(_turn) = turn("a_command_is_counted_inside_from_its_entry_point") else { return };
    let early = library("early", "libearly.so", &["-DLIBRARY"]);
    let dir = early.parent().expect("in a directory");
    let search = format!("-Wl,--no-as-needed,-rpath,{}", dir.display());
    let program = program_with("early", "early", &[&search, &early.display().to_string()]);
    let outcome = Recorder::new().interval(1).command(&program, [] as [&str; 0]).start().ends();
    assert_eq!(outcome.status.code(), Some(3), "the command's own: {}", outcome.stderr);
    let (profile, stats) = outcome.results();
    assert!(!stats.hooks.is_empty() && stats.hooks.iter().all(|process| process.hook == "inline"), "{stats:?}");
    assert_eq!((stats.hits, stats.exact_alloc_objects, stats.lost()), (210, 210, 0), "{stats:?}");
    assert_eq!(stats.exact_alloc_bytes, 10 * 1000 + 200 * 100, "{stats:?}");
    assert_eq!((stats.frees_matched, stats.unsampled), (205, 0), "{stats:?}");
    assert!(profile.processes.iter().any(|process| checks::exact(process).0 == Some(10 * 1000 + 100 * 100)));
    checks::identity(&stats);
}

/// How often a script runs `steady`, and how many blocks each run allocates and frees, besides the 50 of 1000 bytes
/// that it keeps.
const RUNS: usize = 20;
const BLOCKS: u64 = 2000;

/// Records a shell that runs `steady` again and again, and finally execs it. Returns how many of these were counted
/// completely. They lose no block and no call.
fn record_script(hook: &str) -> usize {
    let (steady, others) = (program("steady"), RUNS - 1);
    let runs = format!("{} {BLOCKS}", steady.display());
    let script = format!("i=0; while [ $((i += 1)) -le {others} ]; do {runs}; done; exec {runs}");
    let recorder = Recorder::new().interval(1).option("--hook", hook).option("--max-overhead", "none");
    let outcome = recorder.command(Path::new("/bin/sh"), ["-c", &script]).start().ends();
    assert!(outcome.status.success(), "{}", outcome.stderr);
    assert_eq!(outcome.stdout, vec![BLOCKS.to_string(); RUNS].join("\n"));
    let (profile, stats) = outcome.results();
    checks::identity(&stats);
    assert_eq!(stats.lost(), 0, "{stats:?}");
    let of_shell = profile.processes.iter().find(|process| process.comm == "sh").expect("the shell");
    let expected = if hook == "probe" { "probe" } else { "inline" };
    assert_eq!(of_shell.hook.as_deref(), Some(expected), "{hook}: {:?}", stats.hooks);
    let mut whole = 0;
    let all: Vec<_> = profile.processes.iter().filter(|process| process.comm == "steady").collect();
    for steady in &all {
        let exact = (Some(100 * BLOCKS + 50_000), Some(BLOCKS + 50));
        let counted = checks::exact(steady);
        if counted != exact {
            assert!(counted < exact && held::is_reported(&profile, Some(steady)), "{steady:?}, {:?}", profile.notes);
            continue;
        }
        whole += 1;
        assert_eq!(steady.figures.alloc_objects.value() as u64, BLOCKS + 50, "{hook}");
        let is_kept = |stack: &&Stack| {
            let in_use = stack.figures.inuse_bytes.as_ref().map(Estimate::value);
            stack.pid == steady.pid && in_use == Some(50_000.0)
        };
        let kept = profile.stacks.iter().filter(is_kept).count();
        assert_eq!(kept, 1, "{hook}: only what it kept is in use");
        assert_eq!(steady.hook.as_deref(), Some(expected), "{hook}: {:?}", stats.hooks);
    }
    assert!(all.len() == RUNS || all.len() < RUNS && held::is_reported(&profile, None), "{all:?} {:?}", profile.notes);
    whole
}

/// A program that a command starts or execs is held at its entry point until it is hooked.
#[test]
fn what_a_command_starts_is_counted_inside_from_its_entry_point() {
    let Some(_turn) = turn("inline_what_a_command_starts_is_counted_from_its_entry_point") else { return };
    assert_eq!(record_script("probe"), RUNS);
    held::most_are_whole("auto", || [record_script("auto"), RUNS]);
}

/// The C library's `reallocarray` calls the preloaded allocator's `realloc`. A former bug counted each call twice:
/// `realloc` was hooked inline because the C library was not mapped yet, and the C library's probes from before the
/// exec counted the same calls.
#[test]
fn a_program_with_a_preloaded_allocator_counts_no_call_twice() {
    let Some(_turn) = turn("inline_a_program_with_a_preloaded_allocator") else { return };
    const CALLS: u64 = 6000;
    // What a shell execs, and what `env` execs.
    for (allocator, wrapper) in [("libjemalloc.so.2", "/bin/sh"), ("libmimalloc.so.2", "/usr/bin/env")] {
        let allocator = Path::new("/usr/lib/x86_64-linux-gnu").join(allocator);
        if !allocator.exists() {
            skipped("inline_a_program_with_a_preloaded_allocator", &format!("no {}", allocator.display()));
            continue;
        }
        let (preload, resized) = (format!("LD_PRELOAD={}", allocator.display()), program("resized"));
        let resized = resized.display().to_string();
        let script = format!("{preload} exec {resized}");
        let arguments = if wrapper == "/bin/sh" { ["-c", script.as_str()] } else { [preload.as_str(), &resized] };
        let recorder = Recorder::new().interval(1).option("--hook", "inline").option("--max-overhead", "none");
        let outcome = recorder.command(Path::new(wrapper), arguments).start().ends();
        assert!(outcome.status.success(), "{}", outcome.stderr);
        let (profile, stats) = outcome.results();
        checks::identity(&stats);
        let resized = profile.processes.iter().find(|process| process.comm == "resized").expect("a line");
        let calls = checks::exact(resized).1.expect("calls are counted");
        // Calls before the allocator is hooked may be missed, which is reported.
        assert!((1..=CALLS).contains(&calls), "{wrapper}: {calls}: {:?}, {stats:?}", profile.notes);
        let is_reported = held::is_reported(&profile, Some(resized));
        assert!(calls == CALLS || is_reported, "{wrapper}: {calls}: {:?}, {stats:?}", profile.notes);
    }
}

/// Where a program's text ends within its last page.
fn end_of_text(program: &Path) -> u64 {
    let file = std::fs::read(program).expect("it was built");
    let word = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().expect("eight bytes"));
    let (headers, count) = (word(32) as usize, word(56) as usize & 0xffff);
    let mut headers = (0..count).map(|index| headers + 56 * index);
    // PT_LOAD, readable and executable.
    let text = headers.find(|at| word(*at) == 1 | 5 << 32).expect("it has code");
    (word(text + 16) + word(text + 32)) % 4096
}

/// After a program's text there is usually space for the instructions that make it wait. If not, heapbpf uses the space
/// after the loader's text.
#[test]
fn a_command_without_space_behind_its_text_waits_behind_its_loaders() {
    let Some(_turn) = turn("inline_a_command_without_space_behind_its_text") else { return };
    let pad = 4096 - end_of_text(&program("crammed")) - 24;
    let crammed = program_with("crammed", "crammed-full", &[&format!("-DPAD=\"{pad}\"")]);
    let left = 4096 - end_of_text(&crammed);
    assert!(left < 64, "{left} bytes are left");
    let (profile, stats) = Recorder::new().interval(1).command(&crammed, [] as [&str; 0]).start().ends().results();
    assert_eq!((stats.exact_alloc_objects, stats.lost()), (1000, 0), "{stats:?}");
    assert!(profile.processes.iter().all(|process| process.hook.as_deref() == Some("inline")), "{:?}", stats.hooks);
}

/// With an option that inline hooks do not support, a command gets probes without a message.
#[test]
fn a_command_is_probed_where_inline_hooks_cannot_count() {
    let Some(_turn) = turn("a_command_is_probed_where_inline_hooks_cannot_count") else { return };
    let recorder = Recorder::new().interval(4096).option("--criterion", "size-class");
    let outcome = recorder.command(&program("steady"), ["2000"]).start().ends();
    let warnings =
        outcome.stderr.matches("instead of inline hooks: they do not work with --criterion size-class").count();
    assert!(outcome.status.success() && warnings == 1, "{}", outcome.stderr);
    let (_, stats) = outcome.results();
    assert!(stats.hooks.iter().all(|process| process.hook == "probe" && process.not_inline.is_none()), "{stats:?}");
}

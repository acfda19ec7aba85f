//! `--hook inline -- COMMAND`: hooked at its entry point, before its own first call.

use heapbpf_tests::checks;
use heapbpf_tests::environment::turn;
use heapbpf_tests::program::{library, program_with};
use heapbpf_tests::recorder::Recorder;

/// Blocks that a library's constructor allocated before the entry point were sampled by probes; their frees are seen. A child has
/// the hooks from its first call on.
#[test]
fn a_command_is_counted_inside_from_its_entry_point() {
    let Some(_turn) = turn("a_command_is_counted_inside_from_its_entry_point") else { return };
    let early = library("early", "libearly.so", &["-DLIBRARY"]);
    let folder = early.parent().expect("in a folder");
    let search = format!("-Wl,--no-as-needed,-rpath,{}", folder.display());
    let program = program_with("early", "early", &[&search, &early.display().to_string()]);
    let recorder = Recorder::new().interval(1).option("--hook", "inline").command(&program, [] as [&str; 0]);
    let outcome = recorder.start().ends();
    assert_eq!(outcome.status.code(), Some(3), "the command's own: {}", outcome.stderr);
    let (profile, stats) = outcome.results();
    assert!(!stats.hooks.is_empty() && stats.hooks.iter().all(|process| process.hook == "inline"), "{stats:?}");
    assert_eq!((stats.hits, stats.exact_alloc_objects, stats.lost()), (210, 210, 0), "{stats:?}");
    assert_eq!(stats.exact_alloc_bytes, 10 * 1000 + 200 * 100, "{stats:?}");
    assert_eq!((stats.frees_matched, stats.unsampled), (205, 0), "{stats:?}");
    assert!(profile.processes.iter().any(|process| checks::exact(process).0 == Some(10 * 1000 + 100 * 100)));
    checks::identity(&stats);
}

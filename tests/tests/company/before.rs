//! Memory that was in use before the recording, from glibc's arenas, which heapbpf reads from outside.

use std::process::Command;

use flate2::read::GzDecoder;
use heapbpf_tests::doctor::doctor_text_of;
use heapbpf_tests::environment::turn;
use heapbpf_tests::output;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::{Target, until};
use serde_json::Value;

/// Upper bound for blocks that the C library itself has in use: buffers, caches, per-thread data.
const ITS_OWN: f64 = 16384.0;

fn number(of: &Value, name: &str) -> f64 {
    of[name].as_f64().unwrap_or_else(|| panic!("no {name} in {of}"))
}

/// Records a program that has much memory from before and frees half of it. Compares with glibc's own figures.
fn compare(case: &str, tunables: &str) {
    let Some(_turn) = turn(case) else { return };
    let mut target = Target::start_command(Command::new(program("before")).env("GLIBC_TUNABLES", tunables));
    let text = doctor_text_of(target.pid());
    // Its large blocks have mappings of their own, which a recording knows, too.
    assert!(text.contains("allocators  glibc") && !text.contains("in no known heap"), "{text}");
    let (recording, address) = Recorder::of(target.pid(), 1).serve();
    target.go();
    let [at_first, _, _, _] = target.sums();
    // The arenas are read in the background, while the program waits.
    until("what was in use at first", || {
        let json = get(address, "/debug/pprof/heap?format=json").body;
        let profile: Value = serde_json::from_reader(GzDecoder::new(&json[..])).expect("a profile");
        profile["processes"][0]["resident"]["glibc"]["at_attach"].is_u64()
    });
    target.go();
    let [inuse, older, free, fast] = target.sums();
    let truth = target.truth();
    let outcome = recording.stop();
    let profile: Value = output::read(&outcome.file("profile.json"));
    let process = &profile["processes"][0];
    let glibc = &process["resident"]["glibc"];
    assert_eq!(glibc["exact"], true, "{process}");

    // glibc counts what thread caches hold as in use. Without caches, all figures are equal.
    let has_caches = tunables.is_empty();
    let in_caches = number(glibc, "cached") - fast as f64;
    assert_eq!(in_caches > 0.0, has_caches, "{glibc}");
    assert_eq!(number(glibc, "in_use") + in_caches, inuse as f64, "{glibc}");
    assert_eq!(number(glibc, "free") - in_caches, free as f64, "{glibc}");
    let at_attach = number(glibc, "at_attach");
    assert!(if has_caches { at_attach < at_first as f64 } else { at_attach == at_first as f64 }, "{at_first}: {glibc}");

    // The older memory, exact except for the rounding of the recorded blocks.
    let before = &process["inuse_before"];
    let (low, estimate, high) = (number(before, "low"), number(before, "estimate"), number(before, "high"));
    let (older, blocks) = (older as f64, truth.site("site_00").live_allocs as f64);
    assert!(low <= older + ITS_OWN && older <= high, "{older}: {before}");
    assert!((older..older + ITS_OWN + 8.0 * blocks).contains(&estimate), "{older}: {before}");
    assert!(high - low <= 24.0 * blocks + 4096.0, "{before}");

    let text = outcome.report(&["--details"]);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for said in ["the heap = ", "in recorded blocks + ", "in older blocks + ", "free inside glibc"] {
        assert!(words.contains(said), "{said:?} is not in\n{text}");
    }
    assert!(target.end().success(), "nothing was done to it");
}

#[test]
fn what_was_in_use_before_is_known_exactly() {
    compare("what_was_in_use_before_is_known_exactly", "glibc.malloc.tcache_count=0");
}

#[test]
fn what_caches_of_threads_hold_is_not_in_use() {
    compare("what_caches_of_threads_hold_is_not_in_use", "");
}

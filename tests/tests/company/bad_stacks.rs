//! Stacks that cannot be unwound say why, and everything else stays correct.

use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, tool, turn};
use heapbpf_tests::output::Profile;
use heapbpf_tests::program::program_with;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;
use tempfile::TempDir;

/// Builds deep.c without frame pointers.
fn deep() -> PathBuf {
    program_with("deep", "deep-bad", &["-fomit-frame-pointer"])
}

/// Records every allocation of deep.c below twenty calls.
fn record(program: &Path, unwind: &str) -> (Profile, Outcome) {
    let mut target = Target::start(program, ["100", "20"]);
    let recording = Recorder::of(target.pid(), 1).option("--unwind", unwind).start();
    let truth = target.run();
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    assert_eq!(stats.lost(), 0, "{stats:?}");
    checks::sites(&profile, &truth, 1, Compare::All);
    (profile, outcome)
}

/// Why stacks were cut, as the profile states it.
fn cuts(outcome: &Outcome) -> Vec<String> {
    let text = std::fs::read_to_string(outcome.file("profile.json")).expect("written");
    let profile: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let stacks = profile["stacks"].as_array().expect("a list");
    stacks.iter().filter_map(|stack| stack["cut"].as_str()).map(str::to_owned).collect()
}

/// The table says once for how many stacks frame pointers were missing. Each such stack is marked incomplete.
#[test]
fn frame_pointers_that_are_not_there_are_told_once() {
    let Some(_turn) = turn("frame_pointers_that_are_not_there_are_told_once") else { return };
    let (profile, outcome) = record(&deep(), "fp");
    assert!(profile.stacks.iter().all(|stack| !stack.complete), "{:?}", cuts(&outcome));
    let said = format!("{}\n{}", outcome.stdout, outcome.stderr);
    assert_eq!(said.matches("of the samples have broken stacks").count(), 1, "{said}");
    assert!(said.contains("100.0 % of the samples have broken stacks") && said.contains("--unwind auto"), "{said}");
    // With stack copies there is no such note.
    let (profile, outcome) = record(&deep(), "auto");
    assert!(profile.stacks.iter().all(|stack| stack.complete), "{:?}", cuts(&outcome));
    assert!(!outcome.stdout.contains("broken stacks"), "{}", outcome.stdout);
}

/// Unwind information that is garbage, contradicts itself, or is truncated ends the stack with a reason that names the
/// file. Figures are still exact.
#[test]
fn hostile_unwind_information_gives_a_reason() {
    let case = "hostile_unwind_information_gives_a_reason";
    let Some(_turn) = turn(case) else { return };
    let Some(objcopy) = tool("objcopy") else { return skipped(case, "no objcopy (Debian: binutils)") };
    let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
    let section = dir.path().join("eh_frame");
    let dump = format!("--dump-section=.eh_frame={}", section.display());
    let dumped = Command::new(&objcopy).arg(dump).arg(deep()).arg("/dev/null").status().expect("objcopy runs");
    assert!(dumped.success());
    let pristine = std::fs::read(&section).expect("dumped");
    type Harm = fn(&mut [u8]);
    let harms: [(&str, Harm); 4] = [
        ("zeros", |bytes| bytes.fill(0)),
        ("garbage", |bytes| (0..).zip(bytes).for_each(|(i, byte)| *byte = (i * 151 + 7) as u8)),
        ("no-instructions", |bytes| bytes.iter_mut().skip(24).step_by(2).for_each(|byte| *byte ^= 0x55)),
        ("endless", |bytes| bytes.chunks_mut(4).for_each(|length| length.fill(0xff))),
    ];
    for (name, harm) in harms {
        let mut bytes = pristine.clone();
        harm(&mut bytes);
        std::fs::write(&section, &bytes).expect("our own directory");
        let program = dir.path().join(name);
        let update = format!("--update-section=.eh_frame={}", section.display());
        let updated = Command::new(&objcopy).arg(update).arg(deep()).arg(&program).status().expect("objcopy runs");
        assert!(updated.success());
        let (profile, outcome) = record(&program, "auto");
        let cuts = cuts(&outcome);
        println!("{name}: {cuts:?}");
        assert!(profile.stacks.iter().all(|stack| !stack.complete && stack.has("site_00")), "{name}: {cuts:?}");
        assert!(cuts.iter().all(|why| why.contains("unwind information") && why.contains(name)), "{name}: {cuts:?}");
    }
}

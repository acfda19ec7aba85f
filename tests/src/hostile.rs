//! A profile whose functions have hostile names.

use crate::environment::programs_dir;
use crate::program::program;
use crate::recorder::Recorder;
use crate::target::Target;

/// Markup that would run a script.
pub const MARKUP: &str = "<img src=x onerror=\"window.broken=1\"></script><script>window.broken=1</script>";
/// Marks that reverse text, and terminal escape sequences: red text, clear the screen, set the title.
pub const REVERSED: &str =
    "evil_\u{202e}txt.exe \u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{1b}[31m\nred\u{1b}[2J\u{1b}]2;stolen\u{7}";

/// Records a program with known lifetimes and gives its functions hostile names: markup, [`REVERSED`], 10,000 letters.
///
/// # Panics
/// If it cannot be recorded.
pub fn profile() -> serde_json::Value {
    let mut target = Target::start(&program("lifetimes"), ["300"]);
    let recording = Recorder::of(target.pid(), 1).start();
    target.run();
    let outcome = recording.stop();
    let long = "x".repeat(10_000);
    let text = std::fs::read_to_string(outcome.file("profile.json")).expect("the profile");
    // Screenshots for the documents show where the sources are.
    let sources = programs_dir().display().to_string();
    assert!(text.contains(&sources), "source lines");
    let text = text.replace(&sources, "/usr/src/heapbpf/tests/programs");
    let mut profile: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for stack in profile["stacks"].as_array_mut().expect("stacks") {
        for frame in stack["frames"].as_array_mut().expect("frames") {
            let hostile = match frame["function"].as_str() {
                Some("site_00") => MARKUP,
                Some("site_03") => REVERSED,
                Some("site_04") => &long,
                _ => continue,
            };
            frame["function"] = hostile.into();
        }
    }
    profile
}

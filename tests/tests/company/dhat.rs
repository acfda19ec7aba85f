//! DHAT's viewer, which is part of Debian's valgrind, opens heapbpf's files.

use std::path::Path;
use std::process::Command;

use heapbpf_tests::browser::Browser;
use heapbpf_tests::environment::{heapbpf, skipped, turn};
use heapbpf_tests::hostile::{self, MARKUP};

const VIEWER: &str = "/usr/libexec/valgrind/dh_view.html";

#[test]
fn the_viewer_shows_what_was_recorded() {
    let case = "the_viewer_shows_what_was_recorded";
    let Some(_turn) = turn(case) else { return };
    if !Path::new(VIEWER).exists() {
        return skipped(case, "there is no viewer: Debian's valgrind has it");
    }
    let Some(mut browser) = Browser::start(1300, 900) else { return skipped(case, "there is no chromium") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (json, dhat) = (dir.path().join("x.json"), dir.path().join("x.dhat.json"));
    let profile = hostile::profile();
    std::fs::write(&json, profile.to_string()).expect("there is space");
    let output = Command::new(heapbpf()).arg("report").arg(&json).arg("-o").arg(&dhat).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    browser.open_file(Path::new(VIEWER), "typeof loadFile === 'function' && gInput !== undefined");
    // As if a user chose a file.
    let text = serde_json::Value::from(std::fs::read_to_string(&dhat).expect("written"));
    browser.value(&format!("(() => {{ const chosen = new DataTransfer(); chosen.items.add(new File([{text}], 'x.dhat.json')); gInput.files = chosen.files; loadFile() }})()"));
    browser.until("document.title.includes('x.dhat.json - ')");
    let shown = browser.text("gMainDiv.innerText");

    // The root's totals equal those of the profile.
    let figure = |name: &str| profile["totals"][name]["estimate"].as_f64().expect("a figure").round() as u64;
    let root = |label: &str| -> (u64, u64) {
        let line = shown.lines().find(|line| line.contains(label)).unwrap_or_else(|| panic!("{label}: {shown}"));
        let number = |unit: &str| {
            let before = line.split(unit).next().and_then(|text| text.trim().rsplit([' ', '│']).next());
            before.and_then(|text| text.replace(',', "").parse().ok()).unwrap_or_else(|| panic!("{unit}: {line}"))
        };
        (number(" bytes"), number(" blocks"))
    };
    assert_eq!(root("Total:").0, figure("alloc_bytes"));
    assert_eq!(root("At t-end:").0, figure("inuse_bytes"));
    assert!(shown.contains("site_06") && shown.contains("Allocated at"), "{shown}");
    let whole = browser.text("document.body.textContent");
    assert!(whole.contains(MARKUP), "a name is shown as it is: {shown}");
    assert_eq!(browser.value("document.querySelectorAll('img').length"), 0);
    assert_eq!(browser.value("window.broken ?? null"), serde_json::Value::Null, "no name was run");
    assert_eq!(browser.errors, [""; 0]);
}

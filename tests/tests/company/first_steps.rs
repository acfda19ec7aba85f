//! What a new user sees first: heapbpf without arguments on a terminal, and the demonstration.

use std::process::Command;

use heapbpf_tests::environment::{heapbpf, turn};

#[test]
fn the_demonstration_shows_its_leak() {
    let Some(_turn) = turn("the_demonstration_shows_its_leak") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let output = Command::new(heapbpf())
        .args(["demo", "--duration", "3s"])
        .current_dir(folder.path())
        .output()
        .expect("the binary under test runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    let first = text.lines().find(|line| line.starts_with(" 1 "));
    assert!(first.is_some_and(|line| line.contains("begin_session")), "the largest:\n{text}");
    assert!(text.contains("begin_session +") && text.contains("nothing freed in"), "{text}");
    assert!(text.contains("no file was written") && text.lines().count() <= 25, "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).expect("our own").count(), 0);
}

#[test]
fn on_a_terminal_the_first_steps_are_shown() {
    // script(1) gives its command a terminal.
    let output = Command::new("script")
        .args(["--quiet", "--return", "--command", &heapbpf().display().to_string(), "/dev/null"])
        .output()
        .expect("script runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("sudo heapbpf demo") && text.lines().count() == 6, "{text}");
    assert_eq!(output.status.code(), Some(2), "nothing was recorded");
    // Without a terminal, the message is short.
    let output = Command::new(heapbpf()).output().expect("the binary under test runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("what should be profiled?") && text.lines().count() == 1, "{text}");
}

//! What a new user sees first: heapbpf without arguments on a terminal, the demonstration, and the answers to six
//! everyday questions. Each answer is on the first screen of a recording with default options: 25 lines of 80 columns,
//! or the page without scrolling.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use heapbpf_tests::browser::Browser;
use heapbpf_tests::environment::{heapbpf, skipped, tool, turn};
use heapbpf_tests::program::{copy_of, program, program_with};
use heapbpf_tests::pty::SlowTerminal;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::{Target, until};

#[test]
fn the_demonstration_shows_its_leak() {
    let Some(_turn) = turn("the_demonstration_shows_its_leak") else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let output = Command::new(heapbpf())
        .args(["demo", "--duration", "3s"])
        .current_dir(dir.path())
        .output()
        .expect("the binary under test runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    let first = text.lines().find(|line| line.starts_with(" 1 "));
    assert!(first.is_some_and(|line| line.contains("begin_session")), "the largest:\n{text}");
    assert!(text.contains("begin_session +") && text.contains("nothing freed in"), "{text}");
    assert!(text.contains("no file was written") && text.lines().count() <= 25, "{text}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("our own").count(), 0);
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

/// The number of lines and columns of a screen.
const SCREEN: [usize; 2] = [25, 80];
/// The length of recordings in which something grows: at the default interval, dozens of samples are kept.
const GROWING: &str = "8s";
/// More operations than a program makes during a test.
const ENDLESS: &str = "100000000";

/// What heapbpf prints in a terminal.
fn in_terminal(command: &str, files: &[PathBuf]) -> String {
    let mut words = Command::new(heapbpf());
    words.arg(command).args(files).env("NO_COLOR", "1");
    let mut terminal = SlowTerminal::start(&mut words, 1 << 20).expect("a pseudo-terminal");
    let status = terminal.end(Duration::from_secs(60));
    // Its last lines may not have been read yet.
    terminal.read_for(Duration::from_millis(500));
    let text = String::from_utf8_lossy(&terminal.shown).replace('\r', "");
    assert!(status.is_some_and(|status| status.success()), "{command}: {status:?}\n{text}");
    text
}

/// The report of a recording. It is no larger than a screen.
fn report(outcome: &Outcome) -> String {
    let text = in_terminal("report", &[outcome.file("profile.json")]);
    let [lines, columns] = SCREEN;
    assert!(text.lines().count() <= lines, "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= columns), "{text}");
    text
}

/// What follows a title in a report, such as `growing`; without that, nothing.
fn said<'a>(text: &'a str, title: &str) -> &'a str {
    text.lines().find_map(|line| line.trim_start().strip_prefix(title)).unwrap_or_default().trim()
}

/// The first row of the table of functions.
fn first_function(text: &str) -> &str {
    text.lines().find(|line| line.starts_with(" 1 ")).unwrap_or_default()
}

/// Of eight functions that allocate by `operator new`, one keeps a part of its blocks.
#[test]
fn the_leak_of_a_server_in_cpp_is_named() {
    let case = "the_leak_of_a_server_in_cpp_is_named";
    let Some(_turn) = turn(case) else { return };
    let Some(_compiler) = tool("c++") else { return skipped(case, "no C++ compiler (Debian: g++)") };
    let server = program_with("operators", "operators", &["-std=c++17", "-fsized-deallocation"]);
    let mut target = Target::start(&server, [ENDLESS, "2000"]);
    let recording = Recorder::new().pid(target.pid()).option("--duration", GROWING).start();
    target.go();
    let text = report(&recording.finish());
    let growing = said(&text, "growing");
    assert!(growing.starts_with("site_05 +") && growing.contains("/s ["), "{text}");
    assert!(first_function(&text).contains("site_05 operators.cc:"), "{text}");
    assert!(said(&text, "next").contains("heapbpf report --suspects"), "{text}");
}

/// Two of three blocks are freed, but those between them keep the heap from shrinking: it holds twice as much free
/// memory as Python's objects.
#[test]
fn why_the_memory_of_python_is_three_times_what_its_objects_take() {
    const SCRIPT: &str = "
import os, sys
def fill():
    blocks = []
    for _ in range(30000): blocks.append(bytearray(4000))
    return blocks
def thin(blocks):
    del blocks[1::3]
    del blocks[1::2]
print('READY', os.getpid(), flush=True)
sys.stdin.readline()
held = fill()
thin(held)
print('DONE', flush=True)
sys.stdin.readline()
";
    let case = "why_the_memory_of_python_is_three_times_what_its_objects_take";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let mut target = Target::start_command(Command::new(python).args(["-c", SCRIPT]));
    let recording = Recorder::new().pid(target.pid()).start();
    target.go();
    assert_eq!(target.line(), "DONE");
    let text = report(&recording.stop());
    assert!(first_function(&text).contains("fill"), "{text}");
    // 10,000 gaps of 8,032 bytes are 76.6 MiB. Python's arenas may have some free memory, too.
    let free = said(&text, "free").split_once(" MiB inside ").and_then(|(free, _)| free.parse::<f64>().ok());
    assert!(free.is_some_and(|free| (60.0..90.0).contains(&free)), "{text}");
}

#[test]
fn a_change_is_reported_in_either_direction() {
    let Some(_turn) = turn("a_change_is_reported_in_either_direction") else { return };
    let run = |operations: &str| {
        let recorder = Recorder::new().variable("FREE_RUNNING", OsStr::new("1"));
        recorder.command(&program("growing"), [operations]).start().finish()
    };
    let [less, more] = ["200000", "1000000"].map(run);
    let files = [&less, &more].map(|outcome| outcome.file("profile.json"));
    let [few, many] = &files;
    for (before, after, verdict) in [(few, many, "grew, sure"), (many, few, "shrank, sure")] {
        let text = in_terminal("diff", &[before.clone(), after.clone()]);
        // The function is in the same row, or on a line of its own.
        let screen: Vec<&str> = text.lines().take(SCREEN[0]).collect();
        let is_reported = |rows: &[&str]| rows[0].contains(verdict) && rows.concat().contains("site_00");
        assert!(screen.windows(2).any(is_reported), "{verdict}:\n{text}");
    }
}

#[test]
fn which_of_fifteen_services_takes_the_memory() {
    let Some(_turn) = turn("which_of_fifteen_services_takes_the_memory") else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let service = |number: usize| {
        let copy = copy_of(&program("growing"), dir.path(), &format!("jobs-svc-{number:02}"));
        Target::start(&copy, [ENDLESS, if number == 7 { "100000" } else { "1000" }])
    };
    let mut services: Vec<Target> = (0..15).map(service).collect();
    let recording = Recorder::new().option("--comm", "jobs-svc-*").option("--duration", GROWING).start();
    services.iter_mut().for_each(Target::go);
    let text = report(&recording.finish());
    let mut table = text.lines().skip_while(|line| !line.trim_start().starts_with("PROGRAM")).skip(1);
    assert!(table.next().is_some_and(|line| line.trim_start().starts_with("jobs-svc-07 ")), "{text}");
}

/// The page names the leak without scrolling, the metrics tell which process grows, and the service ends with three
/// lines.
#[test]
fn a_service_that_runs_on_shows_what_grows() {
    let case = "a_service_that_runs_on_shows_what_grows";
    let Some(_turn) = turn(case) else { return };
    let mut target = Target::start(&program("growing"), [ENDLESS, "50000"]);
    let (recording, address) = Recorder::new().service().pid(target.pid()).without_outputs().serve();
    target.go();
    let least = || get(address, "/metrics").metric_of("heapbpf_process_growth_low_bytes_per_second", target.pid());
    until("growth that is certain", || least().is_some_and(|bytes| bytes > 0.0));
    if let Some(mut browser) = Browser::start(1400, 900) {
        let card = "document.querySelector('.card.growing')";
        browser.open(&format!("http://{address}/"), &format!("{card}?.innerText.includes('site_00')"));
        let text = browser.text(&format!("{card}.innerText"));
        assert!(text.contains("/s [") && text.contains('+'), "{text}");
        // Neither the page nor the card needs to be scrolled to see the name.
        let name = format!("[...{card}.querySelectorAll('button')].find(it => it.innerText.includes('site_00'))");
        let place = |of: &str| format!("{of}.getBoundingClientRect().bottom");
        let (name, card) = (place(&name), place(card));
        assert_eq!(browser.value(&format!("scrollY === 0 && {name} <= Math.min(900, {card})")), true, "{text}");
    } else {
        skipped(case, "the part about the page: there is no chromium");
    }
    let said = recording.stop().stdout;
    // Losses are told, too.
    assert_eq!(said.lines().filter(|line| !line.trim_start().starts_with('!')).count(), 3, "{said}");
}

/// The closing table says how each file is opened, and a line before it where Prometheus and a browser find the rest.
#[test]
fn other_tools_find_what_they_open() {
    let Some(_turn) = turn("other_tools_find_what_they_open") else { return };
    let mut target = Target::start(&program("pairs"), ["500"]);
    let recorder = Recorder::of(target.pid(), 1).without_outputs().option("--listen", "127.0.0.1:0");
    let recording = recorder.option("-o", "x.pb.gz").option("-o", "x.speedscope.json").start();
    target.run();
    let Outcome { stdout: shown, stderr: said, .. } = recording.stop();
    assert!(shown.lines().count() <= SCREEN[0], "{shown}");
    for (file, command) in [("x.pb.gz", "go tool pprof -http=: "), ("x.speedscope.json", "npx speedscope ")] {
        let line = format!("wrote {file} · open it with {command}{file}");
        assert!(shown.lines().any(|shown| shown.starts_with(&line)), "{line}:\n{shown}");
    }
    let served = said.lines().find(|line| line.starts_with("heapbpf: listening on http://127.0.0.1:"));
    assert!(served.is_some_and(|line| line.contains("web page; /metrics for Prometheus")), "{said}");
}

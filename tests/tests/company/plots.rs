//! Plots, views as data, the summary at the top of a report, and progress, for recordings as users make them.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use heapbpf_tests::environment::{heapbpf, skipped, stop_limit, turn};
use heapbpf_tests::program::program;
use heapbpf_tests::target::Target;
use heapbpf_tests::tmux::Tmux;
use tempfile::TempDir;

fn run(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(heapbpf());
    command.envs(stop_limit()).current_dir(dir).args(arguments).output().expect("the binary under test runs")
}

/// Standard output of a command, which must succeed and write nothing to standard error (not a terminal here).
fn said(dir: &Path, arguments: &[&str]) -> String {
    let output = run(dir, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{arguments:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Error message of a command that must be refused.
fn refused(dir: &Path, arguments: &[&str]) -> String {
    let output = run(dir, arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A recording of a growing program with snapshots, in a temporary directory: `x.json`, `x.0001.json`, …. Tests that
/// run at the same time share it.
fn recorded() -> Arc<TempDir> {
    static MADE: Mutex<Weak<TempDir>> = Mutex::new(Weak::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    made.upgrade().unwrap_or_else(|| {
        let dir = Arc::new(record());
        *made = Arc::downgrade(&dir);
        dir
    })
}

fn record() -> TempDir {
    let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
    let mut target = Target::start(&program("growing"), ["100000000", "20000"]);
    target.go();
    let pid = target.pid().to_string();
    let options = ["--pid", &pid, "-i", "4096", "-d", "4s", "--every", "1s", "-q", "-o", "x.json"];
    let output = run(dir.path(), &options);
    assert!(output.status.success(), "{output:?}");
    dir
}

fn snapshots(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).expect("our directory").flatten();
    let mut names: Vec<String> = names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| name.starts_with("x.") && name.ends_with(".json"));
    names.sort();
    names
}

/// Width and height of a PNG.
fn size(path: &Path) -> (u32, u32) {
    let bytes = std::fs::read(path).expect("written");
    assert!(bytes.starts_with(b"\x89PNG\r\n\x1a\n") && bytes.len() > 10_000, "{} bytes", bytes.len());
    let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    (number(16), number(20))
}

#[test]
fn recordings_are_drawn() {
    let Some(_turn) = turn("recordings_are_drawn") else { return };
    let dir = recorded();
    let dir = dir.path();
    let files = snapshots(dir);
    assert!(files.len() >= 3, "{files:?}");
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    for (plot, of) in [("timeline", &files[..]), ("overhead", &files[..]), ("survival", &["x.json"][..])] {
        let (svg, png) = (format!("{plot}.svg"), format!("{plot}.png"));
        let mut arguments = vec!["report", "--plot", plot, "-o", &svg, "-o", &png];
        arguments.extend(of);
        assert_eq!(said(dir, &arguments), "");
        let text = std::fs::read_to_string(dir.join(&svg)).expect("written");
        assert!(
            text.starts_with("<svg") && text.contains("growing (") && text.trim_end().ends_with("</svg>"),
            "{text}"
        );
        assert!(text.contains("one sample per 4.00 KiB"), "{text}");
        let (width, height) = size(&dir.join(&png));
        assert!(width == 1800 && height > 1000, "{width} × {height}");
        assert!(plot == "overhead" || text.contains("site_0"), "{text}");
    }
    let costs = ["--probe-ns", "1000", "--inline-ns", "2", "--sample-ns", "2000"];
    said(dir, &[&["plan", "x.json", "--plot", "plan.png"][..], &costs].concat());
    assert_eq!(size(&dir.join("plan.png")).0, 1800);
    let shown = said(dir, &["report", "x.json", "--plot", "survival", "--format", "svg"]);
    assert!(shown.starts_with("<svg"), "{shown}");
    // These are refused before anything is read, or with the reason.
    let one = run(dir, &["report", "x.json", "--plot", "timeline", "-o", "y.svg"]);
    assert!(String::from_utf8_lossy(&one.stderr).contains("--every TIME"), "{one:?}");
    assert!(refused(dir, &["report", "x.json", "--plot", "survival"]).contains("-o x.svg"));
    assert!(refused(dir, &["report", "x.json", "--plot", "survival", "-o", "y.gif"]).contains(".svg or .png"));
    assert!(refused(dir, &["report", "x.json", "x.json"]).contains("heapbpf merge"));
    assert!(run(dir, &["report", "x.json", "--plot", "survival", "-o", "survival.svg"]).status.code() != Some(0));
    assert!(!dir.join("y.svg").exists());
}

/// Each view in each format is written, or refused with a sentence that names what works. The refusals do not complain
/// about a missing file, so nothing was read.
#[test]
fn views_are_written_or_refused_before_reading() {
    let Some(_turn) = turn("views_are_written_or_refused_before_reading") else { return };
    let dir = recorded();
    let dir = dir.path();
    let views: [&[&str]; 9] = [
        &["--by", "function"],
        &["--by", "module"],
        &["--by", "file"],
        &["--by", "program"],
        &["--by", "size"],
        &["--by", "thread"],
        &["--suspects"],
        &["--tree"],
        &["--callers", "^site_00$"],
    ];
    for view in views {
        let is_tree = matches!(view[0], "--tree" | "--callers");
        for format in ["csv", "json", "svg", "folded", "html", "pprof", "parquet", "speedscope", "json.gz", "firefox"] {
            let mut arguments = vec!["report", "x.json", "--format", format];
            arguments.extend(view);
            let works = matches!(format, "csv" | "json") || (is_tree && matches!(format, "svg" | "folded"));
            if !works {
                arguments[1] = "missing.json";
                let why = refused(dir, &arguments);
                assert!(
                    why.contains(view[0]) && why.contains("csv") && !why.contains("missing.json"),
                    "{arguments:?}: {why}"
                );
                continue;
            }
            let text = said(dir, &arguments);
            match format {
                "json" => {
                    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
                    assert!(json["rows"].as_array().is_some_and(|rows| !rows.is_empty()), "{arguments:?}: {text}");
                }
                "csv" => {
                    assert!(text.lines().count() > 1 && text.contains("inuse_space_high"), "{arguments:?}: {text}")
                }
                "svg" => assert!(text.contains("<svg") && text.contains("site_00"), "{arguments:?}"),
                _ => assert!(text.contains("site_00"), "{arguments:?}: {text}"),
            }
        }
    }
    // Filters apply to plots and written data, too.
    for format in ["svg", "csv", "folded"] {
        let text = said(dir, &["report", "x.json", "--format", format, "--focus", "^site_00$", "--hide", "^main$"]);
        assert!(text.contains("site_00") && !text.contains("site_01"), "{format}: {text}");
    }
    let callers = said(dir, &["report", "x.json", "--format", "folded", "--callers", "^site_00$"]);
    assert!(callers.lines().all(|line| line.starts_with("site_00;")), "{callers}");
    // The summary comes first.
    let text = said(dir, &["report", "x.json"]);
    let head: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).collect();
    assert!(head.len() <= 10 && text.lines().count() <= 25 && text.contains("\nBy function · "), "{text}");
    for title in ["in use", "allocated", "resident", "growing", "missed", "next"] {
        assert!(head.iter().any(|line| line.trim_start().starts_with(title)), "{title}: {text}");
    }
}

/// On a terminal, work that takes longer than a second shows a progress line, which is erased afterwards. Reading a
/// FIFO is as slow as its writer.
#[test]
fn slow_work_has_a_line_of_progress_on_a_terminal_alone() {
    let case = "slow_work_has_a_line_of_progress_on_a_terminal_alone";
    let Some(_turn) = turn(case) else { return };
    let dir = recorded();
    let (profile, fifo) = (dir.path().join("x.json"), dir.path().join("slow"));
    let feed = |seconds: u32| {
        format!("mkfifo {0} 2> /dev/null; (sleep {seconds}; cat {1} > {0}) &", fifo.display(), profile.display())
    };
    let command = format!("{} {} report {}; echo \"exit $?\"; sleep 600", feed(4), heapbpf().display(), fifo.display());
    let Some(tmux) = Tmux::run(&command, 80, 24) else { return skipped(case, "there is no tmux") };
    tmux.await_text("reading /");
    let screen = tmux.await_text("exit 0");
    assert!(!screen.contains("reading /") && screen.contains("growing ("), "{screen}");
    // The same, with standard error in a file.
    let script = format!("{} {} report {} 2> err > out; cat err", feed(2), heapbpf().display(), fifo.display());
    let output = Command::new("sh").args(["-c", &script]).current_dir(dir.path()).output().expect("a shell");
    assert!(output.stdout.is_empty(), "{output:?}");
}

//! Runs every command that the documents show, and compares its output with theirs. With `HEAPBPF_BLESS=1`, the plots
//! that the commands draw are saved in `docs/images`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use heapbpf_tests::document::{Step, compare, steps};
use heapbpf_tests::environment::{heapbpf, stop_limit, turn};
use tempfile::TempDir;

/// Separator between the outputs of commands.
const BETWEEN: &str = "\u{1}status ";
/// Time limit for all commands of a document, in seconds.
const MOST_SECONDS: &str = "300";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the sources")
}

/// Returns the exit status and output of each command. One shell runs them all in an empty directory, with `heapbpf`
/// (the binary under test) and a `sudo` that only runs its command.
fn run(commands: &[&str]) -> Vec<(String, String)> {
    let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
    let (tools, work) = (dir.path().join("tools"), dir.path().join("work"));
    for it in [&tools, &work] {
        fs::create_dir(it).expect("an empty directory");
    }
    symlink(heapbpf(), tools.join("heapbpf")).expect("an empty directory");
    fs::write(tools.join("sudo"), "#!/bin/sh\nexec \"$@\"\n").expect("an empty directory");
    fs::set_permissions(tools.join("sudo"), fs::Permissions::from_mode(0o755)).expect("our own file");
    let mut script = String::from("trap 'kill $(jobs -p) 2> /dev/null' EXIT\nexec 2>&1\n");
    for command in commands {
        script += &format!("{command}\nprintf '{BETWEEN}%d\\n' $?\n");
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("timeout")
        .args([MOST_SECONDS, "bash", "-c", &script])
        .envs(stop_limit())
        .current_dir(&work)
        .env("PATH", format!("{}:{path}", tools.display()))
        .env("HEAPBPF", root())
        .stdin(Stdio::null())
        .output()
        .expect("timeout and bash run");
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    let text = String::from_utf8_lossy(&output.stdout).replace(&format!(" on {} ", host.trim()), " on host1 ");
    if std::env::var_os("HEAPBPF_BLESS").is_some() {
        keep_pictures(&work, host.trim());
    }
    let mut outputs = Vec::new();
    let mut rest = text.as_str();
    while let Some((output, after)) = rest.split_once(BETWEEN) {
        let (status, next) = after.split_once('\n').expect("a status has a line");
        outputs.push((status.to_owned(), output.to_owned()));
        rest = next;
    }
    assert_eq!(outputs.len(), commands.len(), "the shell ended early ({}):\n{text}", output.status);
    outputs
}

/// Plots that the tutorial's commands draw, and their file names in the documents.
const PICTURES: [(&str, &str); 2] = [("growth.svg", "plot-timeline.svg"), ("lives.svg", "plot-survival.svg")];

/// Copies the plots into the documents, without this host's name.
fn keep_pictures(work: &Path, host: &str) {
    for (drawn, kept) in PICTURES {
        let picture = fs::read_to_string(work.join(drawn)).expect("the tutorial draws it");
        let picture = picture.replace(&format!("on {host} "), "on host1 ");
        fs::write(root().join("docs/images").join(kept), picture).expect("writable");
    }
}

/// Runs all commands, and tries once more if one of them fails or prints something else.
///
/// In one of some dozens of runs, a block that lives for microseconds is still in use when a recording ends, and gets a
/// row.
fn check(steps: &[Step]) {
    if let Err(first) = differs(steps) {
        println!("{first}\nonce more");
        if let Err(second) = differs(steps) {
            panic!("{second}");
        }
    }
}

/// Runs all commands.
///
/// # Errors
/// Names the first command that fails or prints something else, and describes the difference.
fn differs(steps: &[Step]) -> Result<(), String> {
    let commands: Vec<&str> = steps.iter().map(|step| step.command.as_str()).collect();
    for (step, (status, output)) in steps.iter().zip(run(&commands)) {
        let command = &step.command;
        if status != "0" {
            return Err(format!("{command}: status {status}:\n{output}"));
        }
        compare(&step.output, &output).map_err(|why| format!("{command}: {why}\nwhole output:\n{output}"))?;
    }
    Ok(())
}

#[test]
fn the_tutorial_shows_what_its_commands_print() {
    let Some(_turn) = turn("the_tutorial_shows_what_its_commands_print") else { return };
    let document = fs::read_to_string(root().join("docs/tutorial.md")).expect("docs/tutorial.md");
    let steps = steps(&document);
    assert!(steps.len() >= 15, "{} commands", steps.len());
    check(&steps);
}

/// The README records a program that is already running. Here it is started first.
#[test]
fn the_readme_shows_what_its_command_prints() {
    let Some(_turn) = turn("the_readme_shows_what_its_command_prints") else { return };
    let document = fs::read_to_string(root().join("README.md")).expect("README.md");
    let mut shown = steps(&document);
    assert_eq!(shown.len(), 1, "{shown:?}");
    let options = shown[0].command.split_once("--pid ").and_then(|(_, rest)| rest.split_once(' '));
    let pid = options.expect("it names a process").0.to_owned();
    shown[0].command = shown[0].command.replace(&format!("--pid {pid}"), "--pid $!");
    // Figures may differ, words may not.
    for line in &mut shown[0].output {
        *line = line.replace(&format!("leak-{pid}."), "leak-PID.");
    }
    shown[0].command += " 2>&1 | sed \"s/leak-$!\\./leak-PID./g\"";
    let prepared = [
        "cp $HEAPBPF/tests/programs/leak.c .",
        "cc -g -O2 -D_GNU_SOURCE -pthread leak.c -o leak",
        "./leak 300 > leak.log &",
    ];
    let prepared = prepared.map(|command| Step { command: command.to_owned(), output: Vec::new() });
    check(&[&prepared[..], &shown].concat());
}

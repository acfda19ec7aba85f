//! `heapbpf census` on programs with known populations, stopped and running.

use std::path::Path;
use std::process::{Command, Output};

use heapbpf_tests::environment::{heapbpf, programs_dir, skipped, tool, turn};
use heapbpf_tests::guardian::signal;
use heapbpf_tests::output;
use heapbpf_tests::program::{program_with, program_without_libc};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, stat, until};
use serde_json::Value;

const SESSION: &str = "shop::Session";
const BASKET: &str = "shop::(anonymous namespace)::Basket";
const ARCHIVE: &str = "shop::Archive<int>";

fn census(arguments: &[&str]) -> Output {
    Command::new(heapbpf()).arg("census").args(arguments).output().expect("the binary under test runs")
}

fn of(pid: u32) -> Value {
    let output = census(&["--format", "json", "--pid", &pid.to_string()]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let json: Value = serde_json::from_str(&text).expect("JSON");
    json["processes"][0].clone()
}

fn blocks(census: &Value, is_one: impl Fn(&Value) -> bool) -> u64 {
    let rows = census["rows"].as_array().expect("rows");
    rows.iter().filter(|row| is_one(row)).map(|row| row["blocks"].as_u64().expect("a number")).sum()
}

fn of_type(census: &Value, name: &str) -> u64 {
    blocks(census, |row| row["type"] == name)
}

/// State, page faults (minor and major) and resident pages of a process.
fn state_and_pages(pid: u32) -> (char, [u64; 3]) {
    let stat = stat(pid);
    (stat.state, [stat.minflt, stat.majflt, stat.rss])
}

#[test]
fn a_stopped_program_is_counted_exactly_without_names_in_its_file() {
    let Some(_turn) = turn("a_stopped_program_is_counted_exactly_without_names_in_its_file") else { return };
    let target = Target::start::<&str>(&program_with("census", "census_stripped", &["-s"]), []);
    signal(libc::SIGSTOP, [target.pid()]);
    until("it is stopped", || state_and_pages(target.pid()).0 == 'T');
    let (_, pages) = state_and_pages(target.pid());
    let found = of(target.pid());
    assert_eq!(state_and_pages(target.pid()), ('T', pages), "nothing is done to it, nor to its memory");
    assert_eq!(
        (&found["exact"], &found["late"], &found["inconsistent_bytes"]),
        (&true.into(), &false.into(), &0.into())
    );
    assert_eq!([SESSION, BASKET, ARCHIVE].map(|name| of_type(&found, name)), [20_000, 5_000, 3], "{found}");
    // Plain blocks of 100 bytes. The C library may have a few of its own.
    let plain = blocks(&found, |row| row["sizes"] == serde_json::json!([89, 104]));
    assert!((7_000..7_010).contains(&plain), "{plain}: {found}");
    let rows = found["rows"].as_array().expect("rows");
    for sum in ["bytes", "blocks"] {
        let of_rows: u64 = rows.iter().filter_map(|row| row[sum].as_u64()).sum();
        assert_eq!(found[format!("inuse_{sum}")], of_rows, "{found}");
    }
    signal(libc::SIGCONT, [target.pid()]);
    assert!(target.end().success(), "nothing was done to it");
}

#[test]
fn a_program_that_allocates_meanwhile_is_counted_within_one_percent() {
    let Some(_turn) = turn("a_program_that_allocates_meanwhile_is_counted_within_one_percent") else { return };
    // Also with changing and constant objects in one arena, and with constant merging of free blocks.
    for tunables in ["", "glibc.malloc.arena_max=1", "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"] {
        let program = program_with("census", "census_stripped", &["-s"]);
        let mut target = Target::start_command(Command::new(program).env("GLIBC_TUNABLES", tunables));
        target.go();
        target.step();
        for _ in 0..10 {
            let found = of(target.pid());
            for (name, truth) in [(SESSION, 22_048), (BASKET, 5_000), (ARCHIVE, 3)] {
                let blocks = of_type(&found, name);
                assert!(blocks.abs_diff(truth) <= truth / 100, "{tunables}: {name}: {blocks}, not {truth}: {found}");
            }
        }
        target.go();
        target.truth();
        assert!(target.end().success(), "nothing was done to it");
    }
}

/// The rest of the arena is inconsistent. What is before it, and the other arena, are counted.
#[test]
fn a_heap_that_lies_costs_the_rest_of_its_arena() {
    let Some(_turn) = turn("a_heap_that_lies_costs_the_rest_of_its_arena") else { return };
    let target = Target::start(&program_with("census", "census_stripped", &["-s"]), ["1"]);
    let found = of(target.pid());
    assert_eq!([BASKET, ARCHIVE].map(|name| of_type(&found, name)), [5_000, 3], "{found}");
    assert!((5_000..19_000).contains(&of_type(&found, SESSION)), "{found}");
    let lost = found["inconsistent_bytes"].as_u64().expect("a number");
    assert!((500_000..3_000_000).contains(&lost) && found["exact"] == false, "{found}");
}

#[test]
fn python_objects_are_counted_by_type() {
    let case = "python_objects_are_counted_by_type";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "no python3 (Debian: python3)") };
    let target = Target::start(&python, [programs_dir().join("python_census.py")]);
    // After READY, it makes a block to read its input.
    until("the program to wait for input", || state_and_pages(target.pid()).0 == 'S');
    let found = of(target.pid());
    assert!(found["python_small_bytes"].as_u64().is_some_and(|bytes| bytes > 100_000), "{found}");
    let [sessions, baskets, notes] = ["Session", "Basket", "bytes"].map(|name| of_type(&found, name));
    assert_eq!((sessions, baskets), (3_000, 2_000), "{found}");
    assert!(notes >= 1_000, "{found}");
    assert_eq!(found["inconsistent_bytes"], 0, "{found}");
    // A recording finds the same in Python's arenas, which are part of its heap.
    let outcome = Recorder::of(target.pid(), 1 << 20).start().stop();
    let profile: Value = output::read(&outcome.file("profile.json"));
    let resident = &profile["processes"][0]["resident"];
    let (python, glibc) = (&resident["python"], &resident["glibc"]);
    assert_eq!((&python["in_use"], &python["inconsistent"]), (&found["python_small_bytes"], &0.into()), "{resident}");
    let bytes = |of: &Value| of.as_u64().unwrap_or_else(|| panic!("no number in {resident}"));
    // Both are read one after the other, and may release pages meanwhile.
    let parts = bytes(&python["resident"]) + bytes(&glibc["resident"]);
    assert!(bytes(&python["resident"]) >= bytes(&python["in_use"]), "{resident}");
    assert!(bytes(&resident["heap"]) + (1 << 20) >= parts, "{resident}");
}

#[test]
fn what_cannot_be_counted_is_said() {
    let Some(_turn) = turn("what_cannot_be_counted_is_said") else { return };
    let refused = |arguments: &[&str], status: i32, said: &str| {
        let output = census(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{text}");
        assert!(text.contains(said) && text.lines().count() == 1 || status == 2, "{said:?} is not in {text}");
    };
    refused(&[], 2, "--pid");
    let nolibc = Target::start::<&str>(&program_without_libc("nolibc"), []);
    let pid = nolibc.pid().to_string();
    refused(&["--pid", &pid], 1, "no glibc");
    let mut ended = Command::new("/bin/true").spawn().expect("/bin/true");
    ended.wait().expect("our own child");
    refused(&["--pid", &ended.id().to_string()], 1, "no process");
    // A time limit that is over at once.
    let target = Target::start::<&str>(&program_with("census", "census_stripped", &["-s"]), []);
    refused(&["--pid", &target.pid().to_string(), "--limit", "1ns"], 1, "took too long");
    // If one of two processes fails, the other one is still reported.
    let output = census(&["--pid", &format!("{pid},{}", target.pid()), "--format", "json"]);
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((output.status.code(), json["processes"].as_array().map(Vec::len)), (Some(1), Some(1)));
    if let Some(setpriv) = tool("setpriv") {
        as_nobody(&setpriv, target.pid());
    }
}

/// Without permission for a process, the message says so.
fn as_nobody(setpriv: &Path, pid: u32) {
    let dir = tempfile::tempdir().expect("a directory");
    let copy = dir.path().join("heapbpf");
    heapbpf_tests::program::copy_file(heapbpf(), &copy);
    std::os::unix::fs::chown(dir.path(), Some(65534), Some(65534)).expect("root may");
    let drop = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let output = Command::new(setpriv).args(drop).arg(copy).args(["census", "--pid", &pid.to_string()]).output();
    let text = String::from_utf8(output.expect("it runs").stderr).expect("text");
    assert!(text.contains("CAP_SYS_PTRACE") && text.lines().count() == 1, "{text}");
}

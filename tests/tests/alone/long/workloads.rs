//! Programs that allocators and heap profilers are compared with, or their like in Debian. Both ways of hooking count
//! their calls and bytes exactly as valgrind does. Not beside other tests: probes that serve every process end what
//! valgrind runs.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use heapbpf_tests::environment::{skipped, tool_or_install, turn};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::{checks, held};

/// Stands for the path of the file with a program's input.
const FILE: &str = "FILE";
/// Fewer calls would say little.
const LEAST_CALLS: u64 = 1000;

const MINIMIZE: &str = "read_pla FILE; strash; balance; rewrite; refactor; balance; rewrite; collapse; print_stats";

/// A program that allocates the same in each run.
struct Workload {
    name: &'static str,
    /// Debian's package.
    package: &'static str,
    arguments: &'static [&'static str],
    input: fn() -> String,
}

const WORKLOADS: [Workload; 5] = [
    Workload { name: "lua5.4", package: "lua5.4", arguments: &[FILE], input: lua },
    // As cfrac: continued fractions of long numbers, each in a block of its own.
    Workload { name: "bc", package: "bc", arguments: &["-q", FILE], input: bc },
    // As espresso: minimizes logic.
    Workload { name: "berkeley-abc", package: "berkeley-abc", arguments: &["-c", MINIMIZE], input: abc },
    Workload { name: "z3", package: "z3", arguments: &["-smt2", FILE], input: z3 },
    Workload {
        name: "gs",
        package: "ghostscript",
        arguments: &["-q", "-dNOPAUSE", "-dBATCH", "-sDEVICE=nullpage", FILE],
        input: gs,
    },
];

fn lua() -> String {
    "local function tree(depth)\n\
     if depth == 0 then return {} end\n\
     return {tree(depth - 1), tree(depth - 1)}\n\
     end\n\
     for _ = 1, 4 do tree(12) end\n\
     local words = {}\n\
     for i = 1, 5000 do words[i] = string.rep('x', i % 50) .. i end\n\
     print(#table.concat(words))\n"
        .to_owned()
}

fn bc() -> String {
    "n = 1000012000027\n\
     scale = 60\n\
     x = sqrt(n)\n\
     for (i = 0; i < 2000; i++) {\n\
     scale = 0\n\
     a = x / 1\n\
     scale = 60\n\
     s += a\n\
     x = 1 / (x - a + 10 ^ -60)\n\
     }\n\
     s\n\
     quit\n"
        .to_owned()
}

/// An adder of two numbers of three bits as a table, one line for each pair.
fn abc() -> String {
    let rows = (0..64).map(|pair| format!("{pair:06b} {:04b}\n", (pair >> 3) + (pair & 7)));
    format!(".i 6\n.o 4\n{}.e\n", rows.collect::<String>())
}

/// Seven pigeons do not fit into six holes.
fn z3() -> String {
    let (pigeons, holes) = (7, 6);
    let mut text = String::new();
    for pigeon in 0..pigeons {
        let names: Vec<String> = (0..holes).map(|hole| format!("p{pigeon}_{hole}")).collect();
        text.extend(names.iter().map(|name| format!("(declare-const {name} Bool)\n")));
        text += &format!("(assert (or {}))\n", names.join(" "));
    }
    for hole in 0..holes {
        for one in 0..pigeons {
            let both = |other| format!("(assert (not (and p{one}_{hole} p{other}_{hole})))\n");
            text.extend((one + 1..pigeons).map(both));
        }
    }
    text + "(check-sat)\n"
}

fn gs() -> String {
    "%!\n\
     /Times-Roman findfont 12 scalefont setfont\n\
     0 10 700 { dup 72 exch moveto 20 string cvs show } for\n\
     0 1 500 { /n exch def newpath n n 50 0 360 arc stroke } for\n\
     showpage\n\
     quit\n"
        .to_owned()
}

/// Numbers of calls and of bytes, from valgrind's last lines.
fn by_valgrind(valgrind: &Path, log: &Path, program: &Path, words: &[OsString]) -> [u64; 2] {
    let mut command = Command::new(valgrind);
    command.arg(format!("--log-file={}", log.display())).arg(program).args(words);
    command.output().expect("valgrind runs");
    let text = std::fs::read_to_string(log).expect("valgrind's log");
    let used = text.lines().find_map(|line| line.split_once("total heap usage: "));
    // `1,234 allocs, 1,200 frees, 56,789 bytes allocated`
    let parts = used.unwrap_or_else(|| panic!("no heap usage in {text}")).1.split(", ");
    let number = |part: &str| part.split(' ').next().and_then(|number| number.replace(',', "").parse().ok());
    let numbers: Vec<u64> = parts.filter_map(number).collect();
    let [calls, _frees, bytes] = numbers[..] else { panic!("{text}") };
    [calls, bytes]
}

#[test]
fn workloads_of_comparisons_are_counted_as_valgrind_counts_them() {
    let case = "workloads_of_comparisons_are_counted_as_valgrind_counts_them";
    let Some(_turn) = turn(case) else { return };
    let Some(valgrind) = tool_or_install("valgrind", "valgrind") else { return skipped(case, "no valgrind") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    for Workload { name, package, arguments, input } in WORKLOADS {
        let Some(program) = tool_or_install(name, package) else {
            skipped(case, &format!("the part with {name}: it is not installed (Debian: {package})"));
            continue;
        };
        let file = dir.path().join(name);
        std::fs::write(&file, input()).expect("our own directory");
        let path = file.display().to_string();
        let words: Vec<OsString> = arguments.iter().map(|word| word.replace(FILE, &path).into()).collect();
        // What it keeps in files for its next run is there then.
        let alone = Command::new(&program).args(&words).output().expect("it runs");
        let [calls, bytes] = by_valgrind(&valgrind, &dir.path().join("log"), &program, &words);
        assert!(calls >= LEAST_CALLS, "{name}: {calls} calls: {}", String::from_utf8_lossy(&alone.stderr));
        for hook in ["probe", "inline"] {
            held::most_are_whole(&format!("{case}: {name}, {hook}, {calls} calls"), || {
                let recorder = Recorder::new().interval(1).option("--hook", hook).command(&program, &words);
                let outcome = recorder.start().ends();
                assert_eq!(outcome.status.code(), alone.status.code(), "{}", outcome.stderr);
                let (profile, stats) = outcome.results();
                let process = profile.processes.iter().rfind(|process| process.comm == name);
                let counted = process.and_then(|process| checks::exact(process).1).unwrap_or_default();
                if counted < calls {
                    assert!(held::is_reported(&profile, process), "{name}: {counted} calls: {:?}", profile.notes);
                    return [0, 1];
                }
                let process = process.expect("it was counted");
                assert_eq!(checks::exact(process), (Some(bytes), Some(calls)), "{name}, {hook}: bytes and calls");
                // It waits for the recording where it is hooked inline.
                if hook == "inline" {
                    assert_eq!((stats.lost(), stats.other["stacks_lost"]), (0, 0), "{name}: {stats:?}");
                }
                [1, 1]
            });
        }
    }
}

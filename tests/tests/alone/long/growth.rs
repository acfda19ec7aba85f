//! How often `heapbpf diff` reports growth in real programs where there is none, and how large a leak must be to be
//! found. A benchmark (`cargo xtask bench growth`) for figures in docs/sampling.md.

use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::environment::{heapbpf, programs_dir, skipped, tool, turn};
use heapbpf_tests::recorder::{Outcome, Recorder};
use serde_json::Value;

/// Pairs of runs per workload. Every run is in only one pair.
const PAIRS: u64 = 60;
/// Sampling intervals of a pair's two runs, used in turn, because profiles with different R must be comparable.
const INTERVALS: [(u64, u64); 4] = [(FINE, FINE), (FINE, FINE), (FINE, COARSE), (COARSE, FINE)];
const FINE: u64 = 16 << 10;
const COARSE: u64 = 64 << 10;
/// Sizes of the added leaks, in expected samples at [`FINE`].
const LEAKS: [u64; 5] = [4, 8, 16, 32, 64];
/// Bytes that one stack allocates for a byte array of 100.
const LEAKED_BLOCK: u64 = 101;
/// Number of pairs per leak.
const LEAK_PAIRS: u64 = 20;

struct Workload {
    name: &'static str,
    program: PathBuf,
    arguments: Vec<String>,
}

impl Workload {
    fn python(leak: u64) -> Option<Self> {
        let script = programs_dir().join("work.py").display().to_string();
        Some(Self { name: "python3", program: tool("python3")?, arguments: vec![script, leak.to_string()] })
    }

    /// The compiler proper, on one preprocessed file.
    fn compiler(dir: &Path) -> Option<Self> {
        let gcc = tool("gcc")?;
        let input = dir.join("mix.i");
        let made = Command::new(&gcc).arg("-E").arg(programs_dir().join("mix.c")).arg("-o").arg(&input).status();
        made.ok().filter(std::process::ExitStatus::success)?;
        let named = Command::new(&gcc).arg("-print-prog-name=cc1").output().ok()?;
        let program = PathBuf::from(String::from_utf8(named.stdout).ok()?.trim());
        let arguments = ["-quiet", "-O2", "-fpreprocessed", input.to_str()?, "-o", "/dev/null"].map(str::to_owned);
        program.is_file().then_some(Self { name: "cc1", program, arguments: arguments.into() })
    }

    /// Records a whole run, with different draws each time.
    fn record(&self, interval: u64, seed: u64) -> Outcome {
        Recorder::new()
            .without_outputs()
            .interval(interval)
            .option("--seed", &seed.to_string())
            .option("-o", "profile.json")
            .variable("PYTHONHASHSEED", "0".as_ref())
            // Makes each object an allocation instead of a part of an arena.
            .variable("PYTHONMALLOC", "malloc".as_ref())
            .command(&self.program, &self.arguments)
            .start()
            .finish()
    }
}

/// The stacks of a comparison.
fn compared(before: &Outcome, after: &Outcome, value: &str) -> Vec<Value> {
    let file = |outcome: &Outcome| outcome.file("profile.json");
    let output = Command::new(heapbpf())
        .args(["diff", "--json", "--value", value])
        .args([file(before), file(after)])
        .output()
        .expect("the binary under test runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut diff: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    serde_json::from_value(diff["stacks"].take()).expect("a list")
}

fn is_significant(stack: &&Value) -> bool {
    stack["significant"] == true
}

/// Nothing grows between two equal runs, so any reported growth is a false discovery: a pair's false discovery share is
/// 1 if it reports any growth, and the rate is the share of such pairs. The test fails if the rate is above 5 % and not
/// by chance (more false pairs than 1 of 1,000 such benchmarks would have at a rate of 5 %).
#[test]
#[ignore = "a benchmark: cargo xtask bench growth"]
fn nothing_grows_between_equal_runs() {
    let case = "nothing_grows_between_equal_runs";
    let Some(_turn) = turn(case) else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    println!(
        "\n| program | figures | pairs | stacks in a pair | pairs with a false discovery | false-discovery rate |"
    );
    println!("|---|---|---|---|---|---|");
    let (mut pairs, mut wrong) = (0, 0);
    for workload in [Workload::python(0), Workload::compiler(dir.path())] {
        let Some(workload) = workload else {
            skipped(case, "python3 or gcc is missing");
            continue;
        };
        let figures = ["inuse_space", "alloc_space"];
        let (mut stacks, mut false_pairs) = ([0; 2], [0; 2]);
        for pair in 0..PAIRS {
            let (r_before, r_after) = INTERVALS[(pair % 4) as usize];
            let before = workload.record(r_before, 2 * pair + 1);
            let after = workload.record(r_after, 2 * pair + 2);
            for (index, value) in figures.iter().enumerate() {
                let found = compared(&before, &after, value);
                stacks[index] += found.len() as u64;
                for stack in found.iter().filter(is_significant) {
                    println!("{} {value} pair {pair}: {stack}", workload.name);
                }
                false_pairs[index] += u64::from(found.iter().any(|stack| is_significant(&stack)));
            }
        }
        for (index, value) in figures.iter().enumerate() {
            let of = false_pairs[index];
            let rate = of as f64 / PAIRS as f64;
            let each = stacks[index] / PAIRS;
            println!("| {} | {value} | {PAIRS} | {each} | {of} | {rate:.3} |", workload.name);
            pairs += PAIRS;
            wrong += of;
        }
    }
    println!("\n{wrong} of {pairs} comparisons have a false discovery: {:.4}", wrong as f64 / pairs.max(1) as f64);
    assert!(wrong as f64 <= 0.05 * pairs as f64 + 3.1 * (0.05 * 0.95 * pairs as f64).sqrt(), "{wrong} of {pairs}");
}

/// Adds a leak of the expected size to the same program, and measures how often the leaking stack is found.
#[test]
#[ignore = "a benchmark: cargo xtask bench growth"]
fn an_added_leak_is_found() {
    let case = "an_added_leak_is_found";
    let Some(_turn) = turn(case) else { return };
    println!("\n| leak, bytes | expected samples before, of the leak | found | pairs |\n|---|---|---|---|");
    let mut found_most = 0;
    for samples in LEAKS {
        let blocks = samples * FINE / LEAKED_BLOCK;
        let mut found = 0;
        for pair in 0..LEAK_PAIRS {
            let (Some(usual), Some(leaking)) = (Workload::python(0), Workload::python(blocks)) else {
                return skipped(case, "python3 is missing");
            };
            let before = usual.record(FINE, 1_000 + 2 * pair);
            let after = leaking.record(FINE, 1_001 + 2 * pair);
            let leaks = |stack: &&Value| {
                let mut names = stack["frames"].as_array().into_iter().flatten().filter_map(|f| f["function"].as_str());
                names.any(|name| name.starts_with("PyByteArray_"))
            };
            let stacks = compared(&before, &after, "inuse_space");
            found += u64::from(stacks.iter().filter(leaks).any(|stack| is_significant(&stack)));
        }
        let base = 500.0 * LEAKED_BLOCK as f64 / FINE as f64;
        println!("| {} | {base:.1}, {samples} | {found} | {LEAK_PAIRS} |", blocks * LEAKED_BLOCK);
        found_most = found;
    }
    assert!(found_most >= LEAK_PAIRS - 1, "the largest leak is found {found_most} times of {LEAK_PAIRS}");
}

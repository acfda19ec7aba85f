//! What the profilers are compared on: our own program with known truth, and three that nobody here wrote.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::peers::Pace;

/// A workload.
pub struct Workload {
    /// What the table calls it.
    pub name: &'static str,
    /// What one of its operations is.
    pub unit: &'static str,
    /// Operations at each pace.
    pub slow: u64,
    /// Likewise.
    pub middle: u64,
    /// Likewise.
    pub fast: u64,
    /// Whether it uses all CPUs.
    pub all_cpus: bool,
    /// Whether it knows nothing of our protocol.
    pub to_end: bool,
    /// Whether it works at a rate of its own.
    pub paced: bool,
    /// Part of `--quick`.
    pub quick: bool,
}

const OWN: Workload = Workload {
    name: "",
    unit: "allocation",
    slow: 50_000,
    middle: 600_000,
    fast: 3_000_000,
    all_cpus: false,
    to_end: false,
    paced: false,
    quick: false,
};
const THEIRS: Workload = Workload { to_end: true, ..OWN };

/// All of them.
pub const WORKLOADS: &[Workload] = &[
    Workload { name: "pairs", unit: "malloc/free pair", fast: 20_000_000, quick: true, ..OWN },
    Workload { name: "pairs, 4 threads", unit: "malloc/free pair", fast: 20_000_000, all_cpus: true, ..OWN },
    Workload { name: "mix", quick: true, ..OWN },
    Workload { name: "paced", slow: 50_000, middle: 50_000, fast: 50_000, paced: true, ..OWN },
    Workload { name: "leak", ..OWN },
    Workload { name: "sqlite3", unit: "row", slow: 2_000, middle: 15_000, fast: 30_000, quick: true, ..THEIRS },
    Workload { name: "python3", unit: "dumps and loads", slow: 500, middle: 3_000, fast: 3_000, ..THEIRS },
    Workload { name: "gcc", unit: "function", slow: 30, middle: 200, fast: 200, ..THEIRS },
];

/// Where the inputs and programs are.
pub struct Files {
    /// `churn`, and what else was compiled for this.
    pub programs: PathBuf,
    /// The sources of the test programs.
    pub sources: PathBuf,
    /// For inputs that are made up.
    pub inputs: PathBuf,
}

impl Workload {
    /// Operations under a profiler of that pace.
    pub fn operations(&self, pace: Pace) -> u64 {
        match pace {
            Pace::Slow => self.slow,
            Pace::Middle => self.middle,
            Pace::Fast => self.fast,
        }
    }

    /// The command line for so many operations.
    pub fn words(&self, operations: u64, files: &Files) -> anyhow::Result<Vec<String>> {
        let churn = files.programs.join("churn").display().to_string();
        let own = |mode: &str, more: &[&str]| -> Vec<String> {
            let mut words = vec![churn.clone(), mode.into(), operations.to_string()];
            words.extend(more.iter().map(|word| (*word).to_owned()));
            words
        };
        Ok(match self.name {
            "pairs" => own("pairs", &["1"]),
            "pairs, 4 threads" => own("pairs", &["4"]),
            "sqlite3" => {
                let script = made(&files.inputs.join(format!("fill-{operations}.sql")), || rows(operations))?;
                vec![
                    "/usr/bin/sqlite3".into(),
                    "-batch".into(),
                    ":memory:".into(),
                    format!(".read {}", script.display()),
                ]
            }
            "python3" => {
                let script = files.sources.join("json_loop.py").display().to_string();
                let rounds = operations.to_string();
                ["/usr/bin/env", "FREE_RUNNING=1", "/usr/bin/python3", &script, &rounds].map(str::to_owned).into()
            }
            "gcc" => {
                let source = made(&files.inputs.join(format!("functions-{operations}.c")), || functions(operations))?;
                let compiler = Command::new("gcc").arg("-print-prog-name=cc1").output().context("no gcc")?;
                let compiler = String::from_utf8(compiler.stdout)?.trim().to_owned();
                vec![
                    compiler,
                    "-quiet".into(),
                    "-O1".into(),
                    source.display().to_string(),
                    "-o".into(),
                    "/dev/null".into(),
                ]
            }
            mode => own(mode, &[]),
        })
    }
}

/// A file of that content, made once.
fn made(path: &Path, content: impl FnOnce() -> String) -> anyhow::Result<PathBuf> {
    if !path.exists() {
        fs::write(path, content()).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(path.to_path_buf())
}

/// An SQL script that fills a table with an index.
fn rows(count: u64) -> String {
    let mut text = String::from("CREATE TABLE items(id INTEGER PRIMARY KEY, name TEXT, note TEXT, price REAL);\n");
    text += "CREATE INDEX names ON items(name);\nBEGIN;\n";
    for i in 0..count {
        let (name, words) = (i.wrapping_mul(2_654_435_761) % 1_000_003, "word ".repeat((i % 40) as usize));
        text +=
            &format!("INSERT INTO items VALUES({i}, hex('item {name}'), upper('{words}of row {i}'), {i} * 1.25);\n");
    }
    text + "COMMIT;\nSELECT count(*), sum(length(note)) FROM items;\n"
}

/// C source with loops and switches for a compiler to think about.
fn functions(count: u64) -> String {
    let function = |i: u64| {
        let (length, factor) = (i % 9 + 1, i % 13 + 1);
        format!(
            "struct node{i} {{ int values[{length}]; double weight; struct node{i} *next; }};\n\
             int walk{i}(struct node{i} *n, int limit) {{\n  int sum = {i};\n  for (; n; n = n->next) {{\n    for (int k = 0; k < \
             {length}; k++)\n      if (n->values[k] > limit) sum += n->values[k] * {factor};\n      else sum ^= limit << (k & 7);\n    \
             n->weight += sum / {factor}.0;\n  }}\n  switch (sum & 7) {{\n    case 0: return sum;\n    case 3: return sum * \
             5;\n    case 5: return -sum;\n    default: return sum + limit;\n  }}\n}}\n"
        )
    };
    (0..count).map(function).collect()
}

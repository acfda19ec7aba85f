//! `heapbpf-vectors DIR`: checks the library against every file of known answers in a directory, each number within the
//! tolerance that the file's header states. Prints `N passed, M failed` at the end.

mod check;
mod growth;
mod misc;
mod pathological;
mod samples;
mod waiting;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use check::Checker;

/// Compares all numbers of a file.
type Check = fn(&Value, &mut Checker);

/// The title in a file's header, and the function that checks such a file.
const SCHEMAS: [(&str, Check); 9] = [
    ("per-allocation sampling probability and Horvitz-Thompson weights", samples::weights),
    ("stack estimates from sampled sizes", samples::stacks),
    ("growth test and difference interval between two profiles", growth::growth),
    ("integer geometric draw", waiting::geometric),
    (".NET estimator 2 (negative binomial)", waiting::negative_binomial),
    ("numbers behind heapprofd-sampling.md", misc::detection_all),
    ("jemalloc open question: optimal per-size-class sampling probabilities", misc::optimum_all),
    ("jeprof / heap_v2 pre-distortion", misc::predistortion),
    ("Chromium pathological sequences, repeated cyclically", pathological::pathological),
];

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(dir), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: heapbpf-vectors DIR");
        return ExitCode::from(2);
    };
    match run(Path::new(&dir)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("heapbpf-vectors: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Checks the directory, and returns the number of failures.
fn run(dir: &Path) -> Result<u64> {
    let (mut passed, mut failed) = (0, 0);
    for path in vector_files(dir)? {
        let mut checker = Checker::default();
        check_file(&path, &mut checker)?;
        println!("{}: {} passed, {} failed", path.display(), checker.passed, checker.failed);
        for failure in &checker.failures {
            println!("  {failure}");
        }
        passed += checker.passed;
        failed += checker.failed;
    }
    println!("{passed} passed, {failed} failed");
    Ok(failed)
}

fn vector_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in dir.read_dir().with_context(|| format!("cannot read the directory {}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        bail!("no .json file in {}", dir.display());
    }
    Ok(files)
}

fn check_file(path: &Path, checker: &mut Checker) -> Result<()> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file: Value = serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
    let title = file["header"]["title"].as_str().unwrap_or_default();
    match SCHEMAS.iter().find(|(known, _)| *known == title) {
        Some((_, check)) => {
            let before = checker.passed + checker.failed;
            check(&file, checker);
            if checker.passed + checker.failed == before {
                checker.fail("the file holds no number to check");
            }
        }
        None => checker.fail(&format!("unknown title {title:?}: nothing here knows how to check it")),
    }
    Ok(())
}

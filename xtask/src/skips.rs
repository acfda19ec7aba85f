//! Lists which tests were skipped, and why, at the end of `cargo xtask test`. In CI, a skip that `.ci/allowed-skips`
//! does not expect is a failure: a test that is never run proves nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use crate::context::Context;
use crate::shell::say;

/// The variable that names the file to which tests write what they skip (`heapbpf_testing::skipped`).
const VARIABLE: &str = "HEAPBPF_SKIPPED";

/// The list of skips that CI accepts, in the workspace.
const ALLOWED: &str = ".ci/allowed-skips";

/// A test, or a part of one, that did not run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Skip {
    test: String,
    why: String,
}

impl Skip {
    fn parse(line: &str) -> Option<Self> {
        let (test, why) = line.split_once('\t')?;
        Some(Self { test: test.into(), why: why.into() })
    }
}

/// The skips of one run.
pub struct Skips {
    file: PathBuf,
    /// What xtask itself skipped.
    own: BTreeSet<Skip>,
}

impl Skips {
    /// Creates an empty list. The file has this name in the target directory. A run that was started by another run has
    /// a different file.
    ///
    /// # Errors
    /// The target directory cannot be written.
    pub fn begin(context: &Context, name: &str) -> anyhow::Result<Self> {
        let dir = context.target();
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let file = dir.join(name);
        fs::write(&file, "").with_context(|| format!("cannot write {}", file.display()))?;
        Ok(Self { file, own: BTreeSet::new() })
    }

    /// Makes the tests of a command report what they skip.
    pub fn listen<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env(VARIABLE, &self.file)
    }

    /// Records something that xtask itself skips.
    pub fn note(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.own.insert(Skip { test: what.into(), why: why.into().replace('\n', " ") });
    }

    /// Lists what was skipped. Returns whether that is acceptable: always, except in CI.
    ///
    /// # Errors
    /// A list cannot be read.
    pub fn report(&self, context: &Context) -> anyhow::Result<bool> {
        let listed = fs::read_to_string(&self.file).with_context(|| format!("cannot read {}", self.file.display()))?;
        let skips: BTreeSet<Skip> = listed.lines().filter_map(Skip::parse).chain(self.own.iter().cloned()).collect();
        if skips.is_empty() {
            say!("nothing was skipped");
            return Ok(true);
        }
        say!("skipped:");
        for Skip { test, why } in &skips {
            say!("  {test}: {why}");
        }
        if !in_ci() {
            return Ok(true);
        }
        let file = context.root.join(ALLOWED);
        let allowed = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let unexpected = unexpected(&skips, &allowed)?;
        for Skip { test, why } in &unexpected {
            say!("failed: {test} was skipped ({why}): make it run here, or expect that in {ALLOWED}");
        }
        Ok(unexpected.is_empty())
    }
}

/// Whether this is a CI run, whose output is not read line by line.
fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true" || value == "1")
}

/// Returns the skips that no line of the allowed list expects. A line is `TEST: part of the reason`, where `*` is any
/// test. An empty part would allow everything and is an error.
fn unexpected<'a>(skips: &'a BTreeSet<Skip>, allowed: &str) -> anyhow::Result<Vec<&'a Skip>> {
    let mut expected = Vec::new();
    for line in allowed.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (test, why) = line.split_once(": ").unwrap_or((line, ""));
        anyhow::ensure!(!why.trim().is_empty(), "{ALLOWED}: {line:?} is not `TEST: part of the reason`");
        expected.push((test, why.trim()));
    }
    let is_expected = |skip: &&Skip| {
        expected.iter().any(|(test, why)| (*test == "*" || *test == skip.test) && skip.why.contains(why))
    };
    Ok(skips.iter().filter(|skip| !is_expected(skip)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_expected_for_its_reason_is_unexpected() {
        let listed = "spark\tno module pyspark\nreach\tneeds root\nreach\tno musl\nnot a skip\n";
        let skips: BTreeSet<Skip> = listed.lines().filter_map(Skip::parse).collect();
        let left = |allowed| -> Vec<&str> {
            let unexpected = unexpected(&skips, allowed).expect("a list");
            unexpected.into_iter().map(|skip| skip.why.as_str()).collect()
        };
        assert_eq!(left("# half a gigabyte\n\nspark: pyspark\n"), ["needs root", "no musl"]);
        assert_eq!(left("spark: pyspark\nreach: musl\n"), ["needs root"], "another reason is another skip");
        assert_eq!(left("*: no mus\n"), ["needs root", "no module pyspark"]);
        assert!(unexpected(&skips, "reach: \n").is_err(), "this would allow every reason");
    }
}

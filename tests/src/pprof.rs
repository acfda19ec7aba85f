//! Reads `.pb.gz` profiles with their main consumer, `go tool pprof`.

use std::io::Read;
use std::path::Path;
use std::process::Command;

use heapbpf_profile::proto::pprof::Profile;
use prost::Message as _;

use crate::environment::tool_or_install;

/// A profile as `go tool pprof -raw` prints it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Raw {
    /// `space bytes`.
    pub period_type: String,
    /// The sampling interval R.
    pub period: u64,
    /// `type/unit` of each value; `[dflt]` marks the default one.
    pub sample_types: Vec<String>,
    /// Values of each sample.
    pub samples: Vec<Vec<i64>>,
    /// The printed text.
    pub text: String,
}

impl Raw {
    /// Sum of one value over the samples.
    pub fn sum(&self, value: usize) -> i64 {
        self.samples.iter().map(|sample| sample[value]).sum()
    }
}

/// Runs `go tool pprof` with these arguments. Returns `None` if Go is not installed and cannot be.
///
/// # Panics
/// If it refuses the file.
pub fn go_tool_pprof(arguments: &[&str], profile: &Path) -> Option<String> {
    let go = tool_or_install("go", "golang-go")?;
    let home = tempfile::tempdir().expect("a temporary directory");
    let output = Command::new(go)
        .args(["tool", "pprof", "-symbolize=none"])
        .args(arguments)
        .arg(profile)
        .env("HOME", home.path())
        .env("PPROF_TMPDIR", home.path())
        .output()
        .expect("go runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "go tool pprof {arguments:?} refuses {}:\n{said}", profile.display());
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads a profile with `-raw`. Returns `None` as [`go_tool_pprof`] does.
///
/// # Panics
/// If its output cannot be parsed.
pub fn raw(profile: &Path) -> Option<Raw> {
    let text = go_tool_pprof(&["-raw"], profile)?;
    Some(parse_raw(text))
}

fn parse_raw(text: String) -> Raw {
    let mut raw = Raw::default();
    let mut section = "";
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("PeriodType: ") {
            rest.clone_into(&mut raw.period_type);
        } else if let Some(rest) = line.strip_prefix("Period: ") {
            raw.period = rest.trim().parse().expect("a number");
        } else if matches!(line, "Samples:" | "Locations" | "Mappings") {
            section = line;
        } else if section == "Samples:" {
            if raw.sample_types.is_empty() {
                raw.sample_types = line.split_whitespace().map(str::to_owned).collect();
            } else if let Some((values, _)) = line.split_once(':')
                && let Ok(values) = values.split_whitespace().map(str::parse).collect::<Result<Vec<i64>, _>>()
                && values.len() == raw.sample_types.len()
            {
                raw.samples.push(values);
            }
        }
    }
    raw.text = text;
    raw
}

/// A gzipped profile as its message.
///
/// # Panics
/// If it is none.
pub fn profile(gzipped: &[u8]) -> Profile {
    Profile::decode(&unpacked(gzipped)[..]).expect("a pprof")
}

/// Sums of the first four values over all samples of a gzipped profile, in the order of the contract: `[alloc objects,
/// alloc bytes, in-use objects, in-use bytes]`.
///
/// # Panics
/// If it is not a gzipped profile with at least four values in each sample.
pub fn sums(gzipped: &[u8]) -> [i64; 4] {
    let samples = profile(gzipped).sample;
    [0, 1, 2, 3].map(|at| samples.iter().map(|sample| sample.value[at]).sum())
}

/// Whether a comment of a gzipped profile says that records are missing: lost, or not read in time.
///
/// # Panics
/// If it is not a gzipped profile.
pub fn says_that_records_are_missing(gzipped: &[u8]) -> bool {
    // A line of losses may be only about slack, which is not missing from the figures.
    let bounds = [" inuse_missing=", " inuse_stale=", " inuse_unbounded=", " unbounded="];
    profile(gzipped).string_table.iter().any(|text| {
        text.starts_with("unread=") || text.starts_with("losses ") && bounds.iter().any(|bound| text.contains(bound))
    })
}

/// Decompresses gzip, and checks that it is whole.
///
/// # Panics
/// If it is not.
pub fn unpacked(gzipped: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    flate2::read::MultiGzDecoder::new(gzipped).read_to_end(&mut bytes).expect("whole gzip");
    bytes
}

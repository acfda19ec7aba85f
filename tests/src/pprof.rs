//! Reads `.pb.gz` profiles with the consumer that matters: `go tool pprof`.

use std::path::Path;
use std::process::Command;

use crate::environment::tool_or_install;

/// What `go tool pprof -raw` says of a profile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Raw {
    /// `space bytes`.
    pub period_type: String,
    /// R.
    pub period: u64,
    /// `type/unit` of each value; `[dflt]` marks the default one.
    pub sample_types: Vec<String>,
    /// Values of each sample.
    pub samples: Vec<Vec<i64>>,
    /// The text.
    pub text: String,
}

impl Raw {
    /// Sum of one value over the samples.
    pub fn sum(&self, value: usize) -> i64 {
        self.samples.iter().map(|sample| sample[value]).sum()
    }
}

/// Runs `go tool pprof` with these arguments; `None` if there is no Go here and it could not be installed.
///
/// # Panics
/// If it refuses the file.
pub fn go_tool_pprof(arguments: &[&str], profile: &Path) -> Option<String> {
    let go = tool_or_install("go", "golang-go")?;
    let home = tempfile::tempdir().expect("a temporary folder");
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

/// Reads a profile with `-raw`; `None` as in [`go_tool_pprof`].
///
/// # Panics
/// If what pprof prints is not understood.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_raw_text_is_understood() {
        let text = "PeriodType: space bytes\nPeriod: 4096\nTime: now\nSamples:\n\
                    alloc_objects/count alloc_space/bytes inuse_objects/count inuse_space/bytes[dflt]\n\
                    \x20        1        100          0          0: 1 2 3 \n                comm:[sh]\n                pid:[7]\n\
                    \x20        2        300          1        150: 4 \nLocations\n     1: 0x1 M=1 malloc :0 s=0\nMappings\n";
        let raw = parse_raw(text.into());
        assert_eq!((raw.period_type.as_str(), raw.period), ("space bytes", 4096));
        assert_eq!(raw.samples, [[1, 100, 0, 0], [2, 300, 1, 150]]);
        assert_eq!(raw.sum(1), 400);
        assert_eq!(raw.sample_types[3], "inuse_space/bytes[dflt]");
    }
}

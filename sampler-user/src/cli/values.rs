//! Option values: parsers with their ranges (sizes, durations, intervals, levels), and values that are chosen from a few
//! words, which completions and `--help` list.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command, ValueEnum};
use heapbpf_kernel::programs::LinkKind;
use heapbpf_profile::adjust::At;
use heapbpf_profile::diff::Exposure;
use heapbpf_profile::formats::{self, FORMATS, Format, FormatError};
use heapbpf_profile::group::GroupBy;
use heapbpf_profile::model::Criterion;
use heapbpf_profile::report::By;
use heapbpf_profile::units;
use heapbpf_profile::value::Value;
use heapbpf_statistics::plan::LARGEST_INTERVAL;

/// The sampling interval as the user writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Interval {
    /// R: mean bytes, or allocations, between samples.
    Size(u64),
    /// `auto`: the smallest interval at which samples cost under 1 % of what the probes cost.
    Auto,
    /// `@FILE`: intervals by size class, as `heapbpf plan --classes` writes them.
    Classes(PathBuf),
}

/// A sampling interval.
pub fn parse_interval(text: &str) -> Result<Interval, String> {
    let range = "the range is 0 (exact totals only), 1 (every allocation) to 64MiB; or auto";
    if let Some(path) = text.strip_prefix('@') {
        return if path.is_empty() { Err("@ needs a file name".into()) } else { Ok(Interval::Classes(path.into())) };
    }
    if text == "auto" {
        return Ok(Interval::Auto);
    }
    let interval = units::parse_size(text).map_err(|error| format!("{error}; {range}"))?;
    if interval > LARGEST_INTERVAL { Err(format!("too large; {range}")) } else { Ok(Interval::Size(interval)) }
}

/// An output file, with its format if one is given: `FORMAT:FILE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputFile {
    /// The file; `-` is standard output.
    pub path: PathBuf,
    /// Name of its format.
    pub format: Option<String>,
}

impl From<OsString> for OutputFile {
    fn from(text: OsString) -> Self {
        let (format, path) = text.to_str().map_or((None, Path::new(&text)), |text| {
            let (format, file) = formats::split(text);
            (format, Path::new(file))
        });
        Self { format: format.map(str::to_owned), path: path.into() }
    }
}

impl OutputFile {
    /// Returns its format: the one given here, else `format`, else the one of its extension.
    ///
    /// # Errors
    /// The format does not exist.
    pub fn format(&self, format: Option<&str>) -> Result<&'static Format, FormatError> {
        formats::choose(&self.path, self.format.as_deref().or(format))
    }
}

/// The overhead budget for probes, as the user writes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Overhead {
    /// No budget.
    Unlimited,
    /// Maximum share of the targets' CPU time, above 0 and at most 1.
    Share(f64),
}

/// An overhead budget: `2%`, `2.5` or `none`.
pub fn parse_overhead(text: &str) -> Result<Overhead, String> {
    if text == "none" {
        return Ok(Overhead::Unlimited);
    }
    let number = text.strip_suffix('%').unwrap_or(text).trim_end();
    match number.parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Overhead::Share(percent / 100.0)),
        _ => Err("must be a percentage above 0 and up to 100, or `none`".into()),
    }
}

/// A process ID.
pub fn parse_pid(text: &str) -> Result<u32, String> {
    let process = text.trim();
    process.parse().map_err(|_| {
        let digits = process.strip_prefix('-').unwrap_or(process);
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        match process {
            "" => "a process id is missing here".to_owned(),
            _ if is_number && digits.len() < process.len() => "process ids are above 0".to_owned(),
            _ if is_number => "too large for a process id".to_owned(),
            // Not a program name.
            _ if process.parse::<f64>().is_ok() => "a process id is a whole number".to_owned(),
            _ => format!(
                "a process id is a number: `pidof {process}` prints those of a program, --comm selects processes by name"
            ),
        }
    })
}

/// A size in bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    units::parse_size(text).map_err(|error| error.to_string())
}

/// A duration above zero.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration = units::parse_duration(text).map_err(|error| error.to_string())?;
    if duration.is_zero() { Err("must be longer than 0".into()) } else { Ok(duration) }
}

/// A confidence level, as a fraction or in percent.
pub fn parse_confidence(text: &str) -> Result<f64, String> {
    let (number, scale) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let confidence = number.trim().parse::<f64>().map_err(|_| "not a number".to_owned())? / scale;
    if (0.5..=0.9999).contains(&confidence) { Ok(confidence) } else { Err("the range is 0.5 to 0.9999".into()) }
}

/// A number of nanoseconds, not negative.
pub fn parse_nanoseconds(text: &str) -> Result<f64, String> {
    let number = text.trim().parse::<f64>().map_err(|_| "not a number of nanoseconds".to_owned())?;
    if (0.0..=1e9).contains(&number) { Ok(number) } else { Err("the range is 0 to 1000000000 (a second)".into()) }
}

/// A seed other than 0, which means "no seed" to the BPF programs.
pub fn parse_seed(text: &str) -> Result<u64, String> {
    let seed = text.parse().ok().filter(|seed| *seed > 0);
    seed.ok_or_else(|| format!("the range is 1 to {}", u64::MAX))
}

/// The unit that allocations are counted per.
pub fn parse_exposure(text: &str) -> Result<Exposure, String> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
    let given = || {
        let (before, after) = text.split_once(':')?;
        Some(Exposure::Given(number(before)?, number(after)?))
    };
    match text {
        "second" => Ok(Exposure::Seconds),
        "recording" => Ok(Exposure::Recording),
        _ => {
            given().ok_or_else(|| "must be `second`, `recording`, or BEFORE:AFTER with two numbers above 0".to_owned())
        }
    }
}

/// An address to listen on. A bare port (`6060`, `:6060`) means loopback.
pub fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.strip_prefix(':').unwrap_or(text).parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    let numeric = text.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
    numeric
        .as_deref()
        .unwrap_or(text)
        .parse()
        .map_err(|_| "must be an address and a port, like 127.0.0.1:6060, [::1]:6060, or 6060 for loopback".to_owned())
}

/// One of the values of a heap profile.
pub fn parse_value(text: &str) -> Result<Value, String> {
    Value::from_name(text).ok_or_else(|| {
        let names = Value::ALL.map(Value::name).join(", ");
        format!("must be one of {names}")
    })
}

/// When a snapshot is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Each time this period has passed.
    Each(Duration),
    /// When this many bytes are in use.
    InUse(u64),
    /// At each new peak of memory in use.
    Peak,
    /// Near a memory limit.
    Limit,
}

/// Parses a moment: `10s`, `1GiB`, `peak` or `limit`.
///
/// # Errors
/// It is none of these.
pub fn parse_moment(text: &str) -> Result<Moment, String> {
    match text {
        "peak" => Ok(Moment::Peak),
        "limit" => Ok(Moment::Limit),
        _ => (parse_duration(text).map(Moment::Each).map_err(drop))
            .or_else(|()| parse_size(text).map(Moment::InUse))
            .map_err(|_| "must be a time (10s), a size (1GiB), peak or limit".to_owned()),
    }
}

/// How a census is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CensusFormat {
    /// A table
    #[default]
    Text,
    /// JSON
    Json,
}

/// Yes or no, as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum YesNoArg {
    /// Yes
    Yes,
    /// No
    No,
}

/// From when on programs that children execute are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FollowArg {
    /// From their entry point, or as soon as possible
    Entry,
    /// From their first call, by probes that also slow other processes
    Exec,
}

/// What is drawn of profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlotArg {
    /// A value over time, with error bands; needs snapshots
    Timeline,
    /// Share of blocks still in use by age, with error bands
    Survival,
    /// Time in probes, and calls; needs snapshots
    Overhead,
}

impl PlotArg {
    /// Whether the plot needs several snapshots.
    pub const fn is_of_snapshots(self) -> bool {
        matches!(self, Self::Timeline | Self::Overhead)
    }
}

/// A parser of a few words, each with what `--help` says about it and with its value.
fn one_of<T: Clone + Send + Sync + 'static, const N: usize>(
    words: [(&'static str, &'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    let shown = words.each_ref().map(|(word, help, _)| PossibleValue::new(*word).help(*help));
    let value = move |given: String| words.iter().find(|(word, ..)| *word == given).map(|(.., value)| value.clone());
    PossibleValuesParser::new(shown).try_map(move |given| value(given).ok_or("not one of these words"))
}

/// Criteria of sampling.
pub fn criteria() -> impl TypedValueParser<Value = Criterion> {
    one_of([
        ("bytes", "Each byte: shows where memory goes", Criterion::Bytes),
        ("allocations", "Each allocation: shows which code is most active", Criterion::Allocations),
        ("size-class", "Each size class, or by given intervals (-i @plan.json)", Criterion::SizeClass),
    ])
}

/// The kind of link, if one is forced. (Under this name, clap does not take the option itself for optional.)
pub type ForcedLink = Option<LinkKind>;

/// How uprobes are linked.
pub fn links() -> impl TypedValueParser<Value = ForcedLink> {
    one_of([
        ("auto", "The best that this kernel has", None),
        ("session", "Sessions (kernel 6.13)", Some(LinkKind::Session)),
        ("multi", "Multi links (kernel 6.6)", Some(LinkKind::Multi)),
        ("perf", "Perf events", Some(LinkKind::Perf)),
    ])
}

/// Moments of the figures in use.
pub fn moments_of_figures() -> impl TypedValueParser<Value = At> {
    one_of([
        ("end", "The end of the recording", At::End),
        ("peak", "When the estimated total in use was highest", At::Peak),
    ])
}

/// A parser of names. Its function decides what it accepts, and what it says about other words.
#[derive(Clone)]
pub struct Names<T> {
    names: Vec<&'static str>,
    parse: fn(&str) -> Result<T, String>,
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Names<T> {
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, clap::Error> {
        self.parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.names.iter().copied().map(PossibleValue::new)))
    }
}

/// What stacks can be grouped by.
pub fn groups() -> Names<GroupBy> {
    Names { names: GroupBy::ALL.map(GroupBy::name).into(), parse: parsed }
}

/// What a table can have rows for.
pub fn tables() -> Names<By> {
    Names { names: By::ALL.map(By::name).into(), parse: parsed }
}

/// Values of a profile.
pub fn values() -> Names<Value> {
    Names { names: Value::ALL.map(Value::name).into(), parse: parse_value }
}

/// Formats in which profiles are written. They are checked where a file's extension may choose them as well.
pub fn formats() -> Names<String> {
    Names { names: FORMATS.iter().map(|format| format.name()).collect(), parse: parsed }
}

/// The same formats, and those that only `heapbpf report` has: text tables and plots.
pub fn report_formats() -> Names<String> {
    let names = formats().names;
    Names { names: [&["text"], names.as_slice(), &["png"]].concat(), parse: parsed }
}

fn parsed<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::*;
    use crate::cli::args::Cli;

    #[test]
    fn a_moment_is_a_time_a_size_or_a_word() {
        assert_eq!(parse_moment("10s"), Ok(Moment::Each(Duration::from_secs(10))));
        assert_eq!(parse_moment("1GiB"), Ok(Moment::InUse(1 << 30)));
        assert_eq!([parse_moment("peak"), parse_moment("limit")], [Ok(Moment::Peak), Ok(Moment::Limit)]);
        assert!(parse_moment("never").is_err_and(|why| why.contains("10s")));
    }

    #[test]
    fn intervals_have_a_range() {
        assert_eq!(parse_interval("0"), Ok(Interval::Size(0)));
        assert_eq!(parse_interval("64MiB"), Ok(Interval::Size(64 << 20)));
        assert_eq!(parse_interval("auto"), Ok(Interval::Auto));
        assert_eq!(parse_interval("@a.json"), Ok(Interval::Classes("a.json".into())));
        assert!(parse_interval("@").is_err());
        assert!(parse_interval("64.1MiB").is_err());
        assert!(parse_interval("-1").unwrap_err().contains("range"));
        assert!(parse_interval("lots").unwrap_err().contains("range"));
    }

    #[test]
    fn budgets_are_percentages() {
        assert_eq!(parse_overhead("2%"), Ok(Overhead::Share(0.02)));
        assert_eq!(parse_overhead("2.5"), Ok(Overhead::Share(0.025)));
        assert_eq!(parse_overhead("none"), Ok(Overhead::Unlimited));
        for bad in ["0", "0%", "-1", "101", "NaN", "inf", "much", "", "%"] {
            assert!(parse_overhead(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_are_on_loopback_unless_told() {
        for text in ["6060", ":6060", "localhost:6060", "127.0.0.1:6060"] {
            assert_eq!(parse_listen(text).unwrap().to_string(), "127.0.0.1:6060", "{text}");
        }
        assert_eq!(parse_listen("[::1]:80").unwrap().to_string(), "[::1]:80");
        for bad in ["", "example.org", "1.2.3.4", "70000", "1.2.3.4:99999", "host:1"] {
            assert!(parse_listen(bad).unwrap_err().contains("127.0.0.1:6060"), "{bad}");
        }
    }

    #[test]
    fn what_is_no_process_id_is_explained() {
        assert_eq!(parse_pid(" 12"), Ok(12));
        for (text, part) in [
            ("", "missing"),
            (" ", "missing"),
            ("99999999999", "too large"),
            ("-1", "above 0"),
            ("1.5", "whole number"),
            ("nginx", "`pidof nginx`"),
        ] {
            let error = parse_pid(text).unwrap_err();
            assert!(error.contains(part) && error.contains("pidof") == (text == "nginx"), "{text}: {error}");
        }
    }

    #[test]
    fn seeds_and_exposures_have_a_range() {
        assert_eq!(parse_seed("18446744073709551615"), Ok(u64::MAX));
        for bad in ["0", "-1", "18446744073709551616", "x", ""] {
            assert!(parse_seed(bad).unwrap_err().contains("range is 1 to 18446744073709551615"), "{bad}");
        }
        assert_eq!(parse_exposure("second"), Ok(Exposure::Seconds));
        assert_eq!(parse_exposure("1000:2.5e3"), Ok(Exposure::Given(1000.0, 2500.0)));
        for bad in ["", "1", "1:0", "-1:1", "1:inf", "a:b", "1:2:3"] {
            assert!(parse_exposure(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn levels_are_shares_or_percent() {
        assert_eq!(parse_confidence("0.9"), Ok(0.9));
        assert_eq!(parse_confidence("99%"), Ok(0.99));
        for bad in ["1", "0", "NaN", "ninety", "100%"] {
            assert!(parse_confidence(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn each_listed_name_is_accepted_and_others_are_explained() {
        let mut number = 0;
        for (command, of) in [(&[][..], "record"), (&["report", "x.json"], "report"), (&["diff", "a", "b"], "diff")] {
            let all = Cli::command();
            let found = all.find_subcommand(of).expect("a command");
            for (option, other) in
                [("value", "one of alloc_"), ("group-by", "choose program, pid"), ("by", "choose stack")]
            {
                let Some(arg) = found.get_arguments().find(|arg| arg.get_long() == Some(option)) else { continue };
                let values = arg.get_possible_values();
                assert!(values.len() >= 4, "{of} --{option}");
                let words = |value: &str| [&["heapbpf"], command, &[&format!("--{option}={value}")]].concat().join(" ");
                for value in &values {
                    let words = words(value.get_name());
                    Cli::try_parse_from(words.split(' ')).unwrap_or_else(|error| panic!("{words}: {error}"));
                    number += 1;
                }
                let error = Cli::try_parse_from(words("nonsense").split(' ')).unwrap_err().to_string();
                assert!(error.contains(other), "{error}");
            }
        }
        assert!(number > 30, "{number}");
        Cli::try_parse_from(["heapbpf", "--group-by", "process"]).expect("another name of pid");
    }
}

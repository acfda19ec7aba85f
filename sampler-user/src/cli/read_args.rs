//! The options of the commands that read profiles, as the user writes them.

use std::path::PathBuf;

use clap::Args;
use heapbpf_profile::diff::Exposure;
use heapbpf_profile::group::GroupBy;
use heapbpf_profile::report::By;
use heapbpf_profile::value::Value;
use heapbpf_record::terminal::Color;
use heapbpf_statistics::estimators::Estimator;
use heapbpf_symbols::debuginfod::settings::parse_url;
use regex::Regex;

use super::choices::{AtArg, PlotArg};
use super::names;
use super::record_args::FrameArgs;
use super::values::{OutputFile, parse_confidence, parse_exposure, parse_size};

/// Options of `heapbpf diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// Profile before
    pub before: PathBuf,
    /// Profile after
    pub after: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Value to compare
    #[arg(long, value_name = "VALUE", value_parser = names::values())]
    pub value: Option<Value>,
    /// What stacks are told apart by
    #[arg(long, value_name = "GROUP", value_parser = names::groups())]
    pub group_by: Option<GroupBy>,
    /// What allocations are counted per: `second`, `recording`, or BEFORE:AFTER of anything else, such as requests;
    /// without it per second, unless both recordings lasted until their processes ended
    #[arg(long, value_name = "UNIT", value_parser = parse_exposure)]
    pub per: Option<Exposure>,
    /// Show stacks that grew, with their q-values, instead of functions
    #[arg(long)]
    pub stacks: bool,
    /// Most functions or stacks shown
    #[arg(short = 'n', long, default_value_t = 20)]
    pub top: usize,
    /// Which frames are shown.
    #[command(flatten)]
    pub frames: FrameArgs,
    /// Write the comparison instead of showing it: x.html (a page), x.csv, x.json; `-` is standard output
    #[arg(short, long = "output", value_name = "FILE")]
    pub outputs: Vec<OutputFile>,
    /// Overwrite files named by -o
    #[arg(long)]
    pub force: bool,
    /// Confidence level of error bars
    #[arg(long, value_name = "LEVEL", default_value = "0.95", value_parser = parse_confidence)]
    pub confidence: f64,
    /// Colours
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub color: Color,
}

/// Options of `heapbpf merge`.
#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Where the sum goes: a file, or FORMAT:FILE
    #[arg(short, long, value_name = "FILE")]
    pub output: OutputFile,
    /// Format, where the file's extension does not tell
    #[arg(long, value_name = "FORMAT", value_parser = names::formats())]
    pub format: Option<String>,
    /// Overwrite the output
    #[arg(long)]
    pub force: bool,
    /// Profiles to add
    #[arg(required = true)]
    pub profiles: Vec<PathBuf>,
}

/// Options of `heapbpf report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Profile to show; snapshots of one recording, for --plot timeline and overhead
    #[arg(required = true, value_name = "PROFILE")]
    pub profiles: Vec<PathBuf>,
    /// Draw instead, to -o FILE.svg or FILE.png (or --format svg, png)
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with_all = ["by", "suspects", "tree", "callers"])]
    pub plot: Option<PlotArg>,
    /// Find names for addresses, by build IDs: in debug files, and in files at their paths
    #[arg(long)]
    pub symbolize: bool,
    /// Another folder with debug information, or with the files themselves (besides /usr/lib/debug); may be repeated
    #[arg(long, value_name = "FOLDER", requires = "symbolize")]
    pub debug_dir: Vec<PathBuf>,
    /// Get debug files that are missing here from this debuginfod server, by build ID (besides those of DEBUGINFOD_URLS); may be
    /// repeated
    #[arg(long, value_name = "URL", value_parser = parse_url, requires = "symbolize")]
    pub debuginfod: Vec<String>,
    /// Largest debug information of a file that is used for lines and inlined calls
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = parse_size, requires = "symbolize")]
    pub max_debug_bytes: u64,
    /// Write instead of showing: the profile, or what --by, --tree, --callers, --suspects or --plot make of it; `-` is standard
    /// output; may be repeated
    #[arg(short, long = "output", value_name = "FILE")]
    pub outputs: Vec<OutputFile>,
    /// Format: text (tables), or one that is written, without -o to standard output; with -o where the file's extension does not
    /// tell. --by, --tree, --callers and --suspects: csv, json; --tree and --callers also svg, folded; --plot: svg, png
    #[arg(long, value_name = "FORMAT", value_parser = names::report_formats())]
    pub format: Option<String>,
    /// Overwrite files named by -o
    #[arg(long, requires = "outputs")]
    pub force: bool,
    /// Show everything: the largest stacks, leak suspects, all processes, resident memory, all remarks
    #[arg(long)]
    pub details: bool,
    /// What the table has rows for
    #[arg(long, value_name = "WHAT", value_parser = names::tables())]
    pub by: Option<By>,
    /// Leak suspects instead of the table: what grows, by bytes per second, and what lives far beyond the lifetimes of its stack
    #[arg(long, conflicts_with_all = ["by", "tree", "callers"])]
    pub suspects: bool,
    /// A tree of calls instead of the table, from the outermost functions down
    #[arg(long, conflicts_with = "by")]
    pub tree: bool,
    /// A tree of the callers of functions whose name, source file or module matches
    #[arg(long, value_name = "REGEX", conflicts_with_all = ["by", "tree"])]
    pub callers: Option<Regex>,
    /// Only stacks with a frame whose function, source file or module matches
    #[arg(long, value_name = "REGEX")]
    pub focus: Option<Regex>,
    /// No stacks with a frame that matches
    #[arg(long, value_name = "REGEX")]
    pub ignore: Option<Regex>,
    /// Stacks without the frames that match
    #[arg(long, value_name = "REGEX")]
    pub hide: Option<Regex>,
    /// Stacks with no other frames than those that match
    #[arg(long, value_name = "REGEX")]
    pub show: Option<Regex>,
    /// Most rows shown (20; csv and json have all), or stacks drawn by --plot (5)
    #[arg(short = 'n', long, value_name = "N")]
    pub top: Option<usize>,
    /// Also so many functions, with all that is allocated through them
    #[arg(long, value_name = "N", default_value_t = 0, default_missing_value = "20", num_args = 0..=1, require_equals = true)]
    pub functions: usize,
    /// Value to sort by
    #[arg(long, value_name = "VALUE", value_parser = names::values())]
    pub value: Option<Value>,
    /// Which frames are shown.
    #[command(flatten)]
    pub frames: FrameArgs,
    /// Confidence level of error bars
    #[arg(long, value_name = "LEVEL", default_value = "0.95", value_parser = parse_confidence)]
    pub confidence: f64,
    /// Error bars of bytes whose coverage is guaranteed for every mix of sizes, beside the usual ones
    #[arg(long)]
    pub guaranteed: bool,
    /// Bring allocation totals in line with the exact counts (error bars stay those of the raw estimates)
    #[arg(long)]
    pub calibrate: bool,
    /// Figures in use at this moment
    #[arg(long, value_enum, default_value_t, value_name = "MOMENT")]
    pub at: AtArg,
    /// Estimate bytes by another rule, to compare
    #[arg(long, value_name = "NAME", default_value = "horvitz-thompson", value_parser = names::estimators(), conflicts_with = "calibrate")]
    pub estimator: Estimator,
    /// Fold recursion in stacks: those that differ in its depth alone are one (default)
    #[arg(long, overrides_with = "no_fold_recursion")]
    pub fold_recursion: bool,
    /// Every stack by itself, with all calls of a recursion
    #[arg(long)]
    pub no_fold_recursion: bool,
    /// What stacks are put together by
    #[arg(long, value_name = "GROUP", value_parser = names::groups())]
    pub group_by: Option<GroupBy>,
    /// Colours
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub color: Color,
}

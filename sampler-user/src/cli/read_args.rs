//! The options of the commands that read profiles, as the user writes them.

use std::path::PathBuf;

use clap::Args;
use heapbpf_profile::adjust::At;
use heapbpf_profile::diff::Exposure;
use heapbpf_profile::group::GroupBy;
use heapbpf_profile::report::By;
use heapbpf_profile::value::Value;
use heapbpf_record::terminal::Color;
use heapbpf_symbols::debuginfod::settings::parse_url;
use regex::Regex;

use super::record_args::FrameArgs;
use super::values::{self, OutputFile, PlotArg, parse_confidence, parse_exposure, parse_size};

/// Options of `heapbpf diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// Earlier profile
    pub before: PathBuf,
    /// Later profile
    pub after: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Value to compare
    #[arg(long, value_name = "VALUE", value_parser = values::values())]
    pub value: Option<Value>,
    /// How stacks are grouped
    #[arg(long, value_name = "GROUP", value_parser = values::groups())]
    pub group_by: Option<GroupBy>,
    /// Compare allocations per `second`, per `recording`, or per unit of BEFORE:AFTER, two counts of something else, such
    /// as requests. Default: per second, or per recording if both recordings lasted until their processes ended
    #[arg(long, value_name = "UNIT", value_parser = parse_exposure)]
    pub per: Option<Exposure>,
    /// Show stacks that grew, with their q-values, instead of functions
    #[arg(long)]
    pub stacks: bool,
    /// Maximum number of functions or stacks shown
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
    /// Output file, or FORMAT:FILE
    #[arg(short, long, value_name = "FILE")]
    pub output: OutputFile,
    /// Format, if the file's extension does not determine it
    #[arg(long, value_name = "FORMAT", value_parser = values::formats())]
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
    /// Profile to show, or the snapshots of one recording for --plot timeline and overhead
    #[arg(required = true, value_name = "PROFILE")]
    pub profiles: Vec<PathBuf>,
    /// Draw a plot instead, into -o FILE.svg or FILE.png (or --format svg, png)
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with_all = ["by", "suspects", "tree", "callers"])]
    pub plot: Option<PlotArg>,
    /// Look up names for addresses by build ID, in debug files and in the files at their recorded paths
    #[arg(long)]
    pub symbolize: bool,
    /// Another directory with debug information, or with the files themselves (besides /usr/lib/debug); may be repeated
    #[arg(long, value_name = "DIR", requires = "symbolize")]
    pub debug_dir: Vec<PathBuf>,
    /// Fetch missing debug files from this debuginfod server, by build ID (in addition to DEBUGINFOD_URLS); may be repeated
    #[arg(long, value_name = "URL", value_parser = parse_url, requires = "symbolize")]
    pub debuginfod: Vec<String>,
    /// Maximum size of a file's debug information that is read for lines and inlined calls
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = parse_size, requires = "symbolize")]
    pub max_debug_bytes: u64,
    /// Write a file instead of showing tables: the profile, or what --by, --tree, --callers, --suspects or --plot make
    /// of it; `-` is standard output; may be repeated
    #[arg(short, long = "output", value_name = "FILE")]
    pub outputs: Vec<OutputFile>,
    /// Format: text (tables) or a file format. Without -o, a file goes to standard output. With -o, this is only needed
    /// if the file's extension does not determine the format. --by, --tree, --callers and --suspects can be csv and
    /// json, --tree and --callers also svg and folded, --plot svg and png
    #[arg(long, value_name = "FORMAT", value_parser = values::report_formats())]
    pub format: Option<String>,
    /// Overwrite files named by -o
    #[arg(long, requires = "outputs")]
    pub force: bool,
    /// Show everything: the largest stacks, leak suspects, all processes, resident memory, all remarks
    #[arg(long)]
    pub details: bool,
    /// What each row of the table stands for
    #[arg(long, value_name = "WHAT", value_parser = values::tables())]
    pub by: Option<By>,
    /// Show leak suspects instead of the table: what grows, by bytes per second, and what lives far longer than usual
    /// for its stack
    #[arg(long, conflicts_with_all = ["by", "tree", "callers"])]
    pub suspects: bool,
    /// Show a tree of calls instead of the table, from the outermost functions down
    #[arg(long, conflicts_with = "by")]
    pub tree: bool,
    /// Show a tree of the callers of functions whose name, source file or module matches
    #[arg(long, value_name = "REGEX", conflicts_with_all = ["by", "tree"])]
    pub callers: Option<Regex>,
    /// Show source lines of the functions with the most bytes in use, from files in this directory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["by", "suspects", "tree", "callers", "plot", "details", "outputs", "format"])]
    pub source: Option<PathBuf>,
    /// Keep only stacks with a frame whose function, source file or module matches
    #[arg(long, value_name = "REGEX")]
    pub focus: Option<Regex>,
    /// Leave out stacks with a frame that matches
    #[arg(long, value_name = "REGEX")]
    pub ignore: Option<Regex>,
    /// Leave out the frames that match
    #[arg(long, value_name = "REGEX")]
    pub hide: Option<Regex>,
    /// Keep only the frames that match
    #[arg(long, value_name = "REGEX")]
    pub show: Option<Regex>,
    /// Maximum number of rows shown (20; csv and json have all), or of stacks drawn by --plot (5)
    #[arg(short = 'n', long, value_name = "N")]
    pub top: Option<usize>,
    /// Also list this many functions, with everything allocated through them
    #[arg(long, value_name = "N", default_value_t = 0, default_missing_value = "20", num_args = 0..=1, require_equals = true)]
    pub functions: usize,
    /// Value to sort by
    #[arg(long, value_name = "VALUE", value_parser = values::values())]
    pub value: Option<Value>,
    /// Which frames are shown.
    #[command(flatten)]
    pub frames: FrameArgs,
    /// Confidence level of error bars
    #[arg(long, value_name = "LEVEL", default_value = "0.95", value_parser = parse_confidence)]
    pub confidence: f64,
    /// Adjust allocations so that their totals are the exact counts (error bars stay those of the raw estimates)
    #[arg(long)]
    pub calibrate: bool,
    /// Moment of the in-use figures
    #[arg(long, value_parser = values::moments_of_figures(), default_value = "end", value_name = "MOMENT")]
    pub at: At,
    /// How stacks are grouped
    #[arg(long, value_name = "GROUP", value_parser = values::groups())]
    pub group_by: Option<GroupBy>,
    /// Colours
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub color: Color,
}

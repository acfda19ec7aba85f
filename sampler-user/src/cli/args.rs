//! The command line as the user writes it. Checks that depend on the system are elsewhere.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use heapbpf_record::plan::Hook;
use heapbpf_record::terminal::Color;

use super::read_args::{DiffArgs, MergeArgs, ReportArgs};
use super::record_args::{FrameArgs, LimitArgs, RecordArgs, SamplingArgs, StackArgs, TargetArgs};
use super::values::{
    CensusFormat, Interval, parse_confidence, parse_duration, parse_interval, parse_nanoseconds, parse_pid,
};

/// Heap profiles of running programs: unbiased, host-wide, with error bars.
///
/// Attaches to the allocators of processes that already run, without restarting, relinking or preloading anything.
#[derive(Debug, Parser)]
#[command(name = "heapbpf", version, args_conflicts_with_subcommands = true, max_term_width = 100)]
pub struct Cli {
    /// What to do; recording is the default.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of recording.
    #[command(flatten)]
    pub record: RecordArgs,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Record a profile (the default command)
    Record(Box<RecordArgs>),
    /// Record until stopped: serve a web page, pprof and metrics (--listen), or send profiles (--push)
    Serve(Box<RecordArgs>),
    /// Watch running processes, or a running `heapbpf serve`, live in this terminal
    Top(Box<TopArgs>),
    /// Show a saved profile as text tables
    Report(ReportArgs),
    /// Show what grew between two profiles, and whether that is more than chance
    Diff(DiffArgs),
    /// Add profiles of many runs or hosts, error bars included
    Merge(MergeArgs),
    /// Show what each sampling interval would see of a program, and what it would cost
    Plan(Box<PlanArgs>),
    /// Count what processes have in use now, by type and size, including memory from before heapbpf started
    Census(CensusArgs),
    /// Check what can be recorded on this machine and in these processes, and what cannot
    Doctor(DoctorArgs),
    /// Record a program with a leak, for a first look
    Demo(DemoArgs),
    /// Print completions for a shell
    Completions(CompletionArgs),
    /// Write the man pages
    Man(ManArgs),
}

/// Options of `heapbpf top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Address of a running `heapbpf serve`, such as http://127.0.0.1:6060
    #[arg(value_name = "URL")]
    pub url: Option<String>,
    /// Or which processes.
    #[command(flatten)]
    pub target: TargetArgs,
    /// Which allocations.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// How stacks are found and named.
    #[command(flatten)]
    pub stacks: StackArgs,
    /// Space and costs.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Minimum time between two refreshes; longer if a refresh takes more than an eightieth of it in CPU time
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = parse_duration)]
    pub refresh: Duration,
    /// Which frames are shown.
    #[command(flatten)]
    pub frames: FrameArgs,
    /// File with the token for URL (the first one is used), as for `serve --token-file`; or use http://TOKEN@HOST:PORT
    #[arg(long, value_name = "FILE", requires = "url")]
    pub token_file: Option<PathBuf>,
    /// Confidence level of error bars
    #[arg(long, value_name = "LEVEL", default_value = "0.95", value_parser = parse_confidence)]
    pub confidence: f64,
    /// Print more after the screen is closed
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Colours
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub color: Color,
}

/// Options of `heapbpf plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Profile to plan from
    pub profile: Option<PathBuf>,
    /// Or which running processes to look at.
    #[command(flatten)]
    pub target: TargetArgs,
    /// How long to record running processes
    #[arg(short, long, value_name = "TIME", default_value = "3s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Single interval to compare intervals by size class with; both take the same number of samples
    #[arg(short, long, value_name = "SIZE", default_value = "512KiB", value_parser = parse_interval)]
    pub interval: Interval,
    /// Write the best intervals by size class to this file, for --criterion size-class -i @FILE
    #[arg(long, value_name = "FILE")]
    pub classes: Option<PathBuf>,
    /// Plot error and cost against the interval, into this file (.svg, .png)
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Overwrite the files of --classes and --plot
    #[arg(long)]
    pub force: bool,
    /// How calls will be counted; not `usdt`
    #[arg(long, value_enum, default_value_t)]
    pub hook: Hook,
    /// Cost of inline hooks on an allocation and its free on your machine, in nanoseconds
    #[arg(long, value_name = "NS", value_parser = parse_nanoseconds)]
    pub inline_ns: Option<f64>,
    /// Cost of the probes on an allocation and its free on your machine, in nanoseconds
    #[arg(long, value_name = "NS", value_parser = parse_nanoseconds)]
    pub probe_ns: Option<f64>,
    /// Cost that a sample adds on your machine, in nanoseconds
    #[arg(long, value_name = "NS", value_parser = parse_nanoseconds)]
    pub sample_ns: Option<f64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Colours
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub color: Color,
}

/// Options of `heapbpf census`.
#[derive(Debug, Args)]
pub struct CensusArgs {
    /// Processes to examine
    #[arg(short, long = "pid", value_name = "PID", value_delimiter = ',', value_parser = parse_pid, allow_negative_numbers = true, required = true)]
    pub pids: Vec<u32>,
    /// Time limit for each process; memory that was not read by then is reported
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub limit: Duration,
    /// Maximum number of rows shown (json has all)
    #[arg(short = 'n', long, value_name = "N", default_value_t = 15)]
    pub top: usize,
    /// Output format
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub format: CensusFormat,
    /// Colours
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub color: Color,
}

/// Options of `heapbpf demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// How long to record
    #[arg(short, long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pub duration: Duration,
}

/// Options of `heapbpf completions`.
#[derive(Debug, Args)]
pub struct CompletionArgs {
    /// The shell
    pub shell: Shell,
}

/// Options of `heapbpf man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Directory for the pages: heapbpf.1, and one for each command
    pub dir: PathBuf,
}

/// Options of `heapbpf doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Which processes; without any, the kernel alone.
    #[command(flatten)]
    pub target: TargetArgs,
    /// Measure what probes cost on this machine (otherwise, costs measured since the last boot are shown)
    #[arg(long)]
    pub measure: bool,
    /// Only remove inline hooks that a killed heapbpf left, from all processes or those named by --pid
    #[arg(long, conflicts_with_all = ["measure", "json"])]
    pub clean: bool,
    /// Only forget which programs crashed under inline hooks, so that they get inline hooks again
    #[arg(long, conflicts_with_all = ["clean", "measure", "json"])]
    pub forget_crashes: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Another directory with debug information (besides /usr/lib/debug); may be repeated
    #[arg(long, value_name = "DIR")]
    pub debug_dir: Vec<PathBuf>,
    /// Colours
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub color: Color,
}

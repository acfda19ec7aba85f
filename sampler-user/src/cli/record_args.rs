//! The options of recording, in groups, as the user writes them.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use heapbpf_profile::group::GroupBy;
use heapbpf_profile::value::Value;
use heapbpf_record::plan::TriggerOptions;
use heapbpf_record::terminal::Color;
use heapbpf_symbols::debuginfod::settings::parse_url;

use super::choices::{AtArg, CriterionArg, HookArg, LinkArg, PythonObjectsArg, UnwindArg, YesNoArg};
use super::names;
use super::values::{
    Interval, Moment, OutputFile, Overhead, parse_confidence, parse_duration, parse_interval, parse_listen,
    parse_moment, parse_overhead, parse_pid, parse_seed, parse_size,
};

/// Options of recording.
#[derive(Debug, Args)]
pub struct RecordArgs {
    /// Which processes.
    #[command(flatten)]
    pub target: TargetArgs,
    /// Which allocations.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// How long to record: `30s`, `5m`; without it until Ctrl-C or until every target has ended
    #[arg(short, long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,
    /// What is written.
    #[command(flatten)]
    pub output: OutputArgs,
    /// When snapshots are written, and which of them stay.
    #[command(flatten)]
    pub snapshots: SnapshotArgs,
    /// For pipelines.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// How stacks are found and named.
    #[command(flatten)]
    pub stacks: StackArgs,
    /// Room and costs.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// What is shown.
    #[command(flatten)]
    pub display: DisplayArgs,
}

/// Which processes.
#[derive(Clone, Debug, Default, Args)]
pub struct TargetArgs {
    /// Processes to profile
    #[arg(short, long = "pid", value_name = "PID", value_delimiter = ',', value_parser = parse_pid, allow_negative_numbers = true, help_heading = "Target")]
    pub pids: Vec<u32>,
    /// Every process on this host, present and future
    #[arg(short, long, help_heading = "Target")]
    pub all: bool,
    /// Processes whose name matches (`*` and `?` as in a shell), present and future
    #[arg(long, value_name = "GLOB", help_heading = "Target")]
    pub comm: Option<String>,
    /// Processes in this cgroup or below it, present and future
    #[arg(long, value_name = "PATH", help_heading = "Target")]
    pub cgroup: Option<PathBuf>,
    /// Processes in the container with this ID, or the beginning of one, present and future
    #[arg(long, value_name = "ID", conflicts_with = "cgroup", help_heading = "Target")]
    pub container: Option<String>,
    /// What a target has started, starts or becomes is a target too, whatever its name and cgroup (default)
    #[arg(long, overrides_with = "no_follow", help_heading = "Target")]
    pub follow: bool,
    /// Only processes that are named or match themselves; other processes pay nothing for up to eight named ones
    #[arg(long, help_heading = "Target")]
    pub no_follow: bool,
    /// Another allocator: 'lib.so:my_alloc(size=arg0)->ret,free=my_free(arg0)', or @FILE with one per line; may be
    /// repeated
    #[arg(long = "alloc", value_name = "SPEC", help_heading = "Target")]
    pub allocators: Vec<String>,
    /// Python's own objects, up to 512 bytes (x86-64)
    #[arg(long, value_enum, value_name = "WHERE", num_args = 0..=1, require_equals = true, default_value_t, default_missing_value = "yes", help_heading = "Target")]
    pub python_objects: PythonObjectsArg,
    /// Start this command and profile it from its first allocation
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Which allocations are sampled, and what is known of them.
#[derive(Clone, Debug, Args)]
pub struct SamplingArgs {
    /// Mean bytes between samples: `4096`, `64k`, `64KiB`, `1MB`; 1 is every allocation, 0 is exact totals only, `auto`
    /// the smallest at which samples cost little; for other criteria allocations instead of bytes; `@plan.json` for
    /// intervals by size class
    #[arg(short, long, value_name = "SIZE", default_value = "512KiB", value_parser = parse_interval, allow_negative_numbers = true, help_heading = "Sampling")]
    pub interval: Interval,
    /// What a trial is
    #[arg(long, value_enum, default_value_t, help_heading = "Sampling")]
    pub criterion: CriterionArg,
    /// Allocations only: no probe on free, no figures of memory in use, half the cost
    #[arg(long, help_heading = "Sampling")]
    pub no_live: bool,
    /// Also what programs map themselves, without an allocator: mmap, munmap, mremap, brk
    #[arg(long, help_heading = "Sampling")]
    pub mmap: bool,
    /// Bring allocation totals in line with the exact counts (error bars stay those of the raw estimates)
    #[arg(long, help_heading = "Sampling")]
    pub calibrate: bool,
    /// Reproducible draws (for tests)
    #[arg(long, value_name = "N", help_heading = "Sampling", value_parser = parse_seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

/// What is written, and how.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Figures in use at this moment
    #[arg(long, value_enum, default_value_t, value_name = "MOMENT", help_heading = "Output")]
    pub at: AtArg,
    /// Output file, or FORMAT:FILE; `-` is standard output; may be repeated
    #[arg(short, long = "output", value_name = "FILE", help_heading = "Output")]
    pub outputs: Vec<OutputFile>,
    /// Format, where the file's extension does not tell
    #[arg(long, value_name = "FORMAT", value_parser = names::formats(), help_heading = "Output")]
    pub format: Option<String>,
    /// Overwrite files named by -o and --stats, and write to where symbolic links of yours lead
    #[arg(long, help_heading = "Output")]
    pub force: bool,
    /// Value in formats that hold one
    #[arg(long, value_name = "VALUE", value_parser = names::values(), help_heading = "Output")]
    pub value: Option<Value>,
    /// What stacks are put together by
    #[arg(long, value_name = "GROUP", value_parser = names::groups(), help_heading = "Output")]
    pub group_by: Option<GroupBy>,
    /// Confidence level of error bars
    #[arg(long, value_name = "LEVEL", default_value = "0.95", value_parser = parse_confidence, help_heading = "Output")]
    pub confidence: f64,
    /// Write the accounting as JSON at the end; `-` is standard output
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub stats: Option<PathBuf>,
}

/// How stacks are found and named.
#[derive(Clone, Debug, Args)]
pub struct StackArgs {
    /// How stacks are found
    #[arg(long, value_enum, default_value_t, help_heading = "Stacks")]
    pub unwind: UnwindArg,
    /// Most bytes of stack that are copied per sample; less than a page counts as a page. A copy is only as long as the stack is deep
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_size, help_heading = "Stacks")]
    pub stack_bytes: u64,
    /// Most frames per stack
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Stacks")]
    pub max_depth: u32,
    /// Keep addresses only, no names
    #[arg(long, help_heading = "Stacks")]
    pub no_symbolize: bool,
    /// Another folder with debug information (besides /usr/lib/debug); may be repeated
    #[arg(long, value_name = "FOLDER", help_heading = "Stacks")]
    pub debug_dir: Vec<PathBuf>,
    /// Get debug files that are missing here from this debuginfod server, by build ID (besides those of DEBUGINFOD_URLS); may be
    /// repeated
    #[arg(long, value_name = "URL", value_parser = parse_url, help_heading = "Stacks")]
    pub debuginfod: Vec<String>,
    /// Largest debug information of a file that is used for lines and inlined calls; it takes up to 1.6 times as much
    /// memory. Of a file with more, functions alone are named
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = parse_size, help_heading = "Stacks")]
    pub max_debug_bytes: u64,
}

/// Room for data, and what probes may cost.
#[derive(Clone, Debug, Args)]
pub struct LimitArgs {
    /// Room for events; stacks have four times as much. Without it, both begin with what the interval needs, and grow with
    /// need: up to 16 MiB for events, 64 MiB for stacks
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Limits")]
    pub ring_bytes: Option<u64>,
    /// Most tracked live samples
    #[arg(long, value_name = "N", default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(1..=(1 << 26)), help_heading = "Limits")]
    pub live_max: u32,
    /// Most stacks that are told apart (by process, thread name and function, too): beyond it, the half with the fewest
    /// samples is put together as `[other stacks]`
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(100..=(1 << 26)), help_heading = "Limits")]
    pub stacks_max: u32,
    /// Most probe time, as a share of the targets' CPU time: `2%`, `none`; default 25 with --all, none otherwise
    #[arg(long, value_name = "PERCENT", value_parser = parse_overhead, allow_negative_numbers = true, help_heading = "Limits")]
    pub max_overhead: Option<Overhead>,
    /// How calls are counted
    #[arg(long, value_enum, default_value_t, help_heading = "Limits")]
    pub hook: HookArg,
    /// Programs wait where samples come faster than they are taken in, 1 s at most at once, so that none is lost; inline hooks only.
    /// Default for -- COMMAND with an interval of at most 4 KiB: `--lossless=no` lets it run on
    #[arg(long, value_enum, value_name = "YES", num_args = 0..=1, require_equals = true, default_missing_value = "yes", help_heading = "Limits")]
    pub lossless: Option<YesNoArg>,
    /// How uprobes are linked
    #[arg(long, value_enum, default_value_t, help_heading = "Limits")]
    pub link: LinkArg,
}

/// What is shown on the terminal.
#[derive(Debug, Args)]
pub struct DisplayArgs {
    /// Say less: no closing table, no status line
    #[arg(short, long)]
    pub quiet: bool,
    /// Say more
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// No status line
    #[arg(long)]
    pub no_progress: bool,
    /// Colours in tables
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub color: Color,
    /// Which frames tables show.
    #[command(flatten)]
    pub frames: FrameArgs,
}

/// How tables show frames.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct FrameArgs {
    /// Show library frames and allocation wrappers in tables
    #[arg(long)]
    pub all_frames: bool,
    /// Show function names with template arguments, parameters and return types
    #[arg(long)]
    pub full_names: bool,
}

/// Snapshots on the way: numbered files beside the outputs. SIGUSR1 asks for one at any time.
#[derive(Debug, Default, Args)]
pub struct SnapshotArgs {
    /// Also write a snapshot each TIME (name.0001.pb.gz, …): the same as `--snapshot TIME`
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Snapshots")]
    pub every: Option<Duration>,
    /// Also write a snapshot each `TIME`; when `SIZE` is in use (`1GiB`); at each new `peak` of memory in use (a tenth above the last); or as a
    /// target nears its cgroup's memory `limit`, or the host runs out of memory. May be repeated
    #[arg(long = "snapshot", value_name = "WHEN", value_parser = parse_moment, help_heading = "Snapshots")]
    pub moments: Vec<Moment>,
    /// The same as `--snapshot SIZE`
    #[arg(long, hide = true, value_name = "SIZE", value_parser = parse_size)]
    at_bytes: Option<u64>,
    /// The same as `--snapshot peak`
    #[arg(long, hide = true)]
    at_peak: bool,
    /// The same as `--snapshot limit`
    #[arg(long, hide = true)]
    at_limit: bool,
    /// Keep the last N snapshots, remove older ones
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Snapshots")]
    pub keep: Option<u32>,
}

impl SnapshotArgs {
    /// Returns when snapshots are written.
    pub fn triggers(&self) -> TriggerOptions {
        let mut options = TriggerOptions {
            every: self.every,
            at_bytes: self.at_bytes,
            at_peak: self.at_peak,
            at_limit: self.at_limit,
        };
        for moment in &self.moments {
            match moment {
                Moment::Each(time) => options.every = Some(*time),
                Moment::InUse(bytes) => options.at_bytes = Some(*bytes),
                Moment::Peak => options.at_peak = true,
                Moment::Limit => options.at_limit = true,
            }
        }
        options
    }
}

/// Serving and pushing.
#[derive(Debug, Default, Args)]
pub struct ServeArgs {
    /// Answer HTTP here: `127.0.0.1:6060`, `[::1]:6060`, or a port alone, which is on loopback
    #[arg(long, value_name = "ADDR", value_parser = parse_listen, help_heading = "Pipelines")]
    pub listen: Option<SocketAddr>,
    /// Who may see what: a line per token, `TOKEN [pid=PID] [comm=GLOB] [cgroup=PATH] [container=ID] [pod=UID] [unit=UNIT]`
    #[arg(long, value_name = "FILE", requires = "listen", help_heading = "Pipelines")]
    pub token_file: Option<PathBuf>,
    /// Answer HTTPS, with this certificate (PEM) and those that lead to its authority
    #[arg(long, value_name = "FILE", requires = "listen", requires = "tls_key", help_heading = "Pipelines")]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key (PEM), which only its owner and group may read
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = "Pipelines")]
    pub tls_key: Option<PathBuf>,
    /// Send profiles there: otlp+http://HOST:4318, otlp+grpc://HOST:4317, pyroscope://HOST:4040,
    /// pyroscope-push://HOST:4040, http://HOST/PATH; may be repeated
    #[arg(long, value_name = "URL", help_heading = "Pipelines")]
    pub push: Vec<String>,
    /// Time between pushed profiles
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s", help_heading = "Pipelines")]
    pub push_every: Duration,
    /// Keep profiles that wait to be pushed here, over restarts; without it they wait in memory
    #[arg(long, value_name = "FOLDER", requires = "push", help_heading = "Pipelines")]
    pub spool: Option<PathBuf>,
    /// Most bytes in the spool for each destination; the oldest make room
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "256MiB", help_heading = "Pipelines")]
    pub spool_bytes: u64,
}

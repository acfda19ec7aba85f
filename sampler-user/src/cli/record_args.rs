//! The options of recording, in groups, as the user writes them.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use heapbpf_profile::adjust::At;
use heapbpf_profile::group::GroupBy;
use heapbpf_profile::model::Criterion;
use heapbpf_profile::value::Value;
use heapbpf_record::plan::{Hook, PythonObjects, TriggerOptions, Unwind};
use heapbpf_record::terminal::Color;
use heapbpf_symbols::debuginfod::settings::parse_url;

use super::values::{
    self, FollowArg, ForcedLink, Interval, Moment, OutputFile, Overhead, YesNoArg, parse_confidence, parse_duration,
    parse_interval, parse_listen, parse_moment, parse_overhead, parse_pid, parse_seed, parse_size,
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
    /// How long to record: `30s`, `5m`; default: until Ctrl-C or until every target has ended
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
    /// Space and costs.
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
    /// Processes in the container with this ID (or the beginning of it), present and future
    #[arg(long, value_name = "ID", conflicts_with = "cgroup", help_heading = "Target")]
    pub container: Option<String>,
    /// Also profile the children of these processes, existing and future ones, and the programs they execute (default)
    #[arg(long, value_enum, value_name = "FROM", num_args = 0..=1, require_equals = true, default_missing_value = "entry", overrides_with = "no_follow", help_heading = "Target")]
    pub follow: Option<FollowArg>,
    /// Do not profile children (with --hook probe and at most eight --pid, other processes are then not slowed)
    #[arg(long, help_heading = "Target")]
    pub no_follow: bool,
    /// Hook another allocator: 'lib.so:my_alloc(size=arg0)->ret,free=my_free(arg0)', or @FILE with one per line; may be
    /// repeated
    #[arg(long = "alloc", value_name = "SPEC", help_heading = "Target")]
    pub allocators: Vec<String>,
    /// Where Python objects of up to 512 bytes are counted (x86-64)
    #[arg(long, value_enum, value_name = "WHERE", num_args = 0..=1, require_equals = true, default_value_t, default_missing_value = "yes", help_heading = "Target")]
    pub python_objects: PythonObjects,
    /// Start this command and profile it from its first allocation
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

impl TargetArgs {
    /// Whether any process is named.
    pub fn is_some(&self) -> bool {
        let Self { pids, all, comm, cgroup, container, command, .. } = self;
        *all || !pids.is_empty() || comm.is_some() || cgroup.is_some() || container.is_some() || !command.is_empty()
    }
}

/// Which allocations are sampled, and what is known of them.
#[derive(Clone, Debug, Args)]
pub struct SamplingArgs {
    /// Mean number of bytes between samples: `4096`, `64k`, `64KiB`, `1MB`. 1 samples every allocation, 0 only counts,
    /// `auto` picks the smallest interval at which samples cost little
    #[arg(short, long, value_name = "SIZE", default_value = "512KiB", value_parser = parse_interval, allow_negative_numbers = true, help_heading = "Sampling")]
    pub interval: Interval,
    /// What is sampled with equal probability. Except with `bytes`, -i is a number of allocations
    #[arg(long, value_parser = values::criteria(), default_value = "bytes", help_heading = "Sampling")]
    pub criterion: Criterion,
    /// Count allocations only: no probe on free, no in-use figures, half the cost
    #[arg(long, help_heading = "Sampling")]
    pub no_live: bool,
    /// Also record memory that programs map without an allocator: mmap, munmap, mremap, brk
    #[arg(long, help_heading = "Sampling")]
    pub mmap: bool,
    /// Adjust allocations so that their totals are the exact counts (error bars stay those of the raw estimates)
    #[arg(long, help_heading = "Sampling")]
    pub calibrate: bool,
    /// Seed for reproducible sampling (for tests)
    #[arg(long, value_name = "N", help_heading = "Sampling", value_parser = parse_seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

/// What is written, and how.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Moment of the in-use figures
    #[arg(long, value_parser = values::moments_of_figures(), default_value = "end", value_name = "MOMENT", help_heading = "Output")]
    pub at: At,
    /// Write the profile to this file. The suffix names the format: x.json has everything, x.pb.gz is for pprof, x.html
    /// is a page; or FORMAT:FILE. `-` is standard output; may be repeated
    #[arg(short, long = "output", value_name = "FILE", help_heading = "Output")]
    pub outputs: Vec<OutputFile>,
    /// Format, if the file's extension does not determine it
    #[arg(long, value_name = "FORMAT", value_parser = values::formats(), help_heading = "Output")]
    pub format: Option<String>,
    /// Overwrite files named by -o and --stats, and follow your own symbolic links to them
    #[arg(long, help_heading = "Output")]
    pub force: bool,
    /// Value to write in formats that hold only one
    #[arg(long, value_name = "VALUE", value_parser = values::values(), help_heading = "Output")]
    pub value: Option<Value>,
    /// How stacks are grouped
    #[arg(long, value_name = "GROUP", value_parser = values::groups(), help_heading = "Output")]
    pub group_by: Option<GroupBy>,
    /// Confidence level of error bars
    #[arg(long, value_name = "LEVEL", default_value = "0.95", value_parser = parse_confidence, help_heading = "Output")]
    pub confidence: f64,
    /// Write the accounting (calls, samples, losses, costs) as JSON at the end; `-` is standard output
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub stats: Option<PathBuf>,
}

/// How stacks are found and named.
#[derive(Clone, Debug, Args)]
pub struct StackArgs {
    /// How stacks are unwound
    #[arg(long, value_enum, default_value_t, help_heading = "Stacks")]
    pub unwind: Unwind,
    /// Maximum bytes of stack copied per sample, at least a page. A copy is only as long as the stack is deep
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_size, help_heading = "Stacks")]
    pub stack_bytes: u64,
    /// Maximum number of frames per stack
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Stacks")]
    pub max_depth: u32,
    /// Keep addresses only, no names
    #[arg(long, help_heading = "Stacks")]
    pub no_symbolize: bool,
    /// Another directory with debug information (besides /usr/lib/debug); may be repeated
    #[arg(long, value_name = "DIR", help_heading = "Stacks")]
    pub debug_dir: Vec<PathBuf>,
    /// Fetch missing debug files from this debuginfod server, by build ID (in addition to DEBUGINFOD_URLS); may be repeated
    #[arg(long, value_name = "URL", value_parser = parse_url, help_heading = "Stacks")]
    pub debuginfod: Vec<String>,
    /// Maximum size of a file's debug information that is read for lines and inlined calls; this takes up to 1.6 times
    /// as much memory. Files with more get function names only
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = parse_size, help_heading = "Stacks")]
    pub max_debug_bytes: u64,
}

/// Space for data, and what probes may cost.
#[derive(Clone, Debug, Args)]
pub struct LimitArgs {
    /// Buffer size for events; the buffer for stacks is four times as large. Default: both start with what the interval
    /// needs and grow as needed, up to 16 MiB for events and 64 MiB for stacks
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Limits")]
    pub ring_bytes: Option<u64>,
    /// Maximum number of live samples that are tracked
    #[arg(long, value_name = "N", default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(1..=(1 << 26)), help_heading = "Limits")]
    pub live_max: u32,
    /// Maximum number of distinct stacks (by process, thread name and function, too). Beyond it, the half with the
    /// fewest samples is merged into `[other stacks]`
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(100..=(1 << 26)), help_heading = "Limits")]
    pub stacks_max: u32,
    /// Maximum time in probes and samples, as a share of the targets' CPU time: `2%`, `none`; default: 25% with --all,
    /// none otherwise
    #[arg(long, value_name = "PERCENT", value_parser = parse_overhead, allow_negative_numbers = true, help_heading = "Limits")]
    pub max_overhead: Option<Overhead>,
    /// How calls are counted
    #[arg(long, value_enum, default_value_t, help_heading = "Limits")]
    pub hook: Hook,
    /// Make programs wait (at most 1 s at a time) when samples arrive faster than they are read, so that none is lost;
    /// inline hooks only. Default for -- COMMAND with an interval of at most 4 KiB; `--lossless=no` turns it off
    #[arg(long, value_enum, value_name = "YES", num_args = 0..=1, require_equals = true, default_missing_value = "yes", help_heading = "Limits")]
    pub lossless: Option<YesNoArg>,
    /// How uprobes are attached
    #[arg(long, value_parser = values::links(), default_value = "auto", help_heading = "Limits")]
    pub link: ForcedLink,
}

/// What is shown on the terminal.
#[derive(Debug, Args)]
pub struct DisplayArgs {
    /// Print less: no closing table, no status line
    #[arg(short, long)]
    pub quiet: bool,
    /// Print more
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
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Also write a snapshot every TIME (name.0001.pb.gz, …): the same as `--snapshot TIME`
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Snapshots")]
    pub every: Option<Duration>,
    /// Also write a snapshot every `TIME`; when `SIZE` is in use (`1GiB`); at each new `peak` of memory in use (a tenth
    /// above the last); or at a memory `limit`: when a target nears that of its cgroup, or the host runs out of memory.
    /// May be repeated
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
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Serve HTTP at this address: `127.0.0.1:6060`, `[::1]:6060`, or a port alone, which means loopback
    #[arg(long, value_name = "ADDR", value_parser = parse_listen, help_heading = "Pipelines")]
    pub listen: Option<SocketAddr>,
    /// Who may see what: a line per token, `TOKEN [pid=PID] [comm=GLOB] [cgroup=PATH] [container=ID] [pod=UID] [unit=UNIT]`
    #[arg(long, value_name = "FILE", requires = "listen", help_heading = "Pipelines")]
    pub token_file: Option<PathBuf>,
    /// Serve HTTPS with this certificate and its chain (PEM)
    #[arg(long, value_name = "FILE", requires = "listen", requires = "tls_key", help_heading = "Pipelines")]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key (PEM), readable only by its owner and group
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = "Pipelines")]
    pub tls_key: Option<PathBuf>,
    /// Send profiles to this URL: otlp+http://HOST:4318, otlp+grpc://HOST:4317, pyroscope://HOST:4040,
    /// pyroscope-push://HOST:4040, http://HOST/PATH; may be repeated
    #[arg(long, value_name = "URL", help_heading = "Pipelines")]
    pub push: Vec<String>,
    /// Time between pushed profiles
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s", help_heading = "Pipelines")]
    pub push_every: Duration,
    /// Keep undelivered profiles in this directory across restarts, and with --listen also the totals of the last 24
    /// hours; default: in memory
    #[arg(long, value_name = "DIR", help_heading = "Pipelines")]
    pub spool: Option<PathBuf>,
    /// Maximum size of the spool for each destination; the oldest profiles are dropped first
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "256MiB", help_heading = "Pipelines")]
    pub spool_bytes: u64,
}

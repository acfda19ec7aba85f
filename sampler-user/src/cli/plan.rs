//! What a recording will do: options checked against each other and against the system, before anything is attached.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sampler_ebpf::abi::{Config, stack_kind};

use super::allocators::{self, AllocatorError};
use super::args::{Color, Link, RecordArgs, Unwind};
use super::pipelines;
use super::targets::{Targets, check_program, level_of, rules, target_rules};
use super::values::{Interval, Overhead};
use crate::host::cgroup::CgroupError;
use crate::host::limits::Limits;
use crate::host::process::{TargetError, select};
use crate::kernel::loader::MapSizes;
use crate::kernel::programs::LinkKind;
use crate::profile::adjust::{Adjustments, At};
use crate::profile::formats::{self, FormatError, WriteOptions};
use crate::profile::model::Criterion;
use crate::profile::output::{self, Output, OutputError};
use crate::record::TriggerOptions;
use crate::sampling::plan::{ClassPlan, ClassPlanError};
use crate::sampling::size_classes::{CLASS_INTERVAL, ClassRule};
use crate::serve::listen::{Listen, ListenError};
use crate::serve::push::{PushError, PushPlan};
use crate::symbols::symbolizer::Options;
use crate::view::units;

/// Why there is nothing to be done. Wrong usage is exit status 2, the rest 1.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The options do not fit together.
    #[error("{0}")]
    Usage(String),
    /// The system forbids it.
    #[error("{0}")]
    Blocked(String),
    /// A process.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A cgroup.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// An output.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// A format.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A file of intervals by size class cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    ClassesUnreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It holds something else.
    #[error("{}: {source}", path.display())]
    Classes {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ClassPlanError,
    },
    /// An allocator that the user describes.
    #[error(transparent)]
    Allocator(#[from] AllocatorError),
    /// Where to listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Where to push.
    #[error(transparent)]
    Push(#[from] PushError),
}

impl PlanError {
    /// heapbpf's exit status.
    pub const fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Format(_) | Self::Classes { .. } | Self::Allocator(_) => 2,
            Self::Push(PushError::Destination(_)) => 2,
            _ => 1,
        }
    }
}

/// A recording, decided.
pub struct RecordPlan {
    /// What is profiled.
    pub targets: Targets,
    /// Sampling interval R; 0: totals only.
    pub interval: u64,
    /// What a trial is.
    pub criterion: Criterion,
    /// Whether the interval is chosen by the call rate.
    pub automatic: bool,
    /// Largest share of the targets' CPU time that probes may take.
    pub budget: Option<f64>,
    /// Whether nobody asked for that budget.
    pub budget_is_default: bool,
    /// How size classes get their intervals, under the criterion of that name.
    pub classes: Option<ClassRule>,
    /// What is done to profiles before they are written.
    pub adjustments: Adjustments,
    /// Whether frees are followed.
    pub live: bool,
    /// Whether mappings that programs make themselves count as allocations.
    pub mappings: bool,
    /// Length.
    pub duration: Option<Duration>,
    /// Where profiles go; empty: to a default name that needs the targets' names.
    pub outputs: Vec<Output>,
    /// Format of the default output.
    pub default_format: &'static dyn formats::Format,
    /// How they are written.
    pub write: WriteOptions,
    /// When there are snapshots.
    pub triggers: TriggerOptions,
    /// Snapshots that stay on disk.
    pub keep: Option<usize>,
    /// Where scrapers are answered: bound already.
    pub listen: Option<Listen>,
    /// Where profiles are sent.
    pub push: Option<PushPlan>,
    /// Whether profiles are asked for, or sent, while this runs.
    pub serves: bool,
    /// Where the accounting goes.
    pub stats: Option<PathBuf>,
    /// Whether existing files may be replaced.
    pub force: bool,
    /// How stacks are found.
    pub unwind: Unwind,
    /// Most frames of a stack.
    pub max_depth: usize,
    /// Whether addresses get names.
    pub symbolize: bool,
    /// How names are looked for.
    pub symbols: Options,
    /// Constants for the kernel side.
    pub config: Config,
    /// Sizes of its maps.
    pub sizes: MapSizes,
    /// Most stacks that are told apart.
    pub stacks_max: u32,
    /// Kind of link, if forced.
    pub link: Option<LinkKind>,
    /// No table, no status line.
    pub quiet: bool,
    /// Whether a status line may be shown.
    pub progress: bool,
    /// When to colour.
    pub color: Color,
}

impl RecordPlan {
    /// Whether this is a service that outlives processes: what they leave is put together, what they had in use goes
    /// with them.
    pub const fn keeps_running(&self) -> bool {
        self.serves
    }

    /// Whether what ended processes held when they ended stands apart from what is in use: of who was named it is what
    /// was asked for, and a server tells of the moment.
    pub fn ended_apart(&self) -> bool {
        self.keeps_running() || !self.targets.are_named()
    }
}

/// Largest reservation of a stack copy.
const LARGEST_STACK_COPY: u64 = 1 << 20;
/// Pages of memory per ring: powers of two, and an `int` to the kernel.
const LARGEST_RING: u64 = 1 << 30;

/// Decides.
///
/// # Errors
/// One sentence with what to do.
pub fn plan(args: &RecordArgs) -> Result<RecordPlan, PlanError> {
    let default_format = match args.format.as_deref() {
        Some(name) => formats::by_name(name)?,
        None => formats::by_name("pprof")?,
    };
    let outputs = pipelines::outputs(args)?;
    let (interval, classes) = sampling(args)?;
    if args.no_live && At::from(args.at) == At::Peak {
        return Err(PlanError::Usage("--at peak is about what is in use, which --no-live leaves out".into()));
    }
    let (rules, comm_pattern, cgroup) = rules(&args.target)?;
    if rules.is_empty() && args.target.command.is_empty() {
        return Err(PlanError::Usage(
            "what should be profiled? --pid PID, --all, --comm GLOB, --cgroup PATH or -- COMMAND (see --help)".into(),
        ));
    }
    if args.stack_bytes > LARGEST_STACK_COPY {
        return Err(PlanError::Usage(format!("--stack-bytes: the most is {LARGEST_STACK_COPY} bytes (1MiB)")));
    }
    if args.ring_bytes == 0 || args.ring_bytes > LARGEST_RING {
        return Err(PlanError::Usage(format!("--ring-bytes: the range is 1 to {LARGEST_RING} bytes (1GiB)")));
    }

    let limits = Limits::read();
    if let Some(blocker) = limits.blockers().into_iter().next() {
        return Err(PlanError::Blocked(blocker));
    }
    check_debug_dirs(&args.debug_dir)?;
    for output in &outputs {
        output.check()?;
    }
    if let Some(stats) = args.stats.as_ref().filter(|path| path.as_os_str() != output::STANDARD_OUTPUT) {
        output::check_new_file(stats, args.force)?;
    }
    let listen = match args.serve.listen {
        Some(address) => Some(Listen::open(address, args.serve.token_file.as_deref())?),
        None => None,
    };
    let push = pipelines::push(&args.serve)?;
    if outputs.is_empty() && listen.is_none() && push.is_none() {
        output::check_new_file(Path::new(&format!("heapbpf.{}.probe", std::process::id())), false)?;
    }
    if let Some(program) = args.target.command.first() {
        check_program(program)?;
    }
    let allocators = allocators::resolve(&args.target.allocators)?;
    let running = select(&rules)?;
    let targets =
        Targets { rules, running, command: args.target.command.clone(), follow: !args.target.no_follow, allocators };

    let events_bytes = args.ring_bytes.next_power_of_two().max(procfs::page_size());
    // The largest class of copies that this limit can ask for must fit several times.
    let stacks_bytes = (4 * events_bytes).max(4 * args.stack_bytes.next_power_of_two()).clamp(1 << 18, LARGEST_RING);
    let config = Config {
        target_rules: target_rules(&targets),
        follow: u32::from(targets.follow),
        live: u32::from(!args.no_live),
        stack_kind: match args.unwind {
            Unwind::Fp => stack_kind::FRAME_POINTERS,
            Unwind::Auto | Unwind::Dwarf => stack_kind::COPIED,
        },
        criterion: Criterion::from(args.criterion).code(),
        self_tgid: std::process::id(),
        memory_bytes: crate::host::limits::memory_bytes(),
        page_bytes: procfs::page_size(),
        stack_bytes: args.stack_bytes,
        seed: args.seed.unwrap_or(0),
        events_mark: events_bytes / 4,
        stacks_mark: stacks_bytes / 4,
        cgroup_id: cgroup.as_ref().map_or(0, |group| group.id),
        cgroup_level: cgroup.as_ref().map_or(0, level_of),
        comm_pattern,
        ..Config::default()
    };
    Ok(RecordPlan {
        targets,
        interval,
        automatic: args.interval == Interval::Auto,
        budget: match args.max_overhead {
            Some(Overhead::Share(share)) => Some(share),
            Some(Overhead::Unlimited) => None,
            None => args.target.all.then_some(HOST_BUDGET),
        },
        budget_is_default: args.max_overhead.is_none(),
        classes,
        adjustments: Adjustments { calibrate: args.calibrate, at: args.at.into(), ..Adjustments::default() },
        criterion: args.criterion.into(),
        live: !args.no_live,
        mappings: args.mmap,
        duration: args.duration,
        outputs,
        default_format,
        write: WriteOptions { value: args.value, confidence: args.confidence, group_by: args.group_by },
        triggers: TriggerOptions {
            every: args.snapshots.every,
            at_bytes: args.snapshots.at_bytes,
            at_peak: args.snapshots.at_peak,
            at_limit: args.snapshots.at_limit,
        },
        keep: args.snapshots.keep.map(|keep| keep as usize),
        serves: listen.is_some() || push.is_some(),
        listen,
        push,
        stats: args.stats.clone(),
        force: args.force,
        unwind: args.unwind,
        max_depth: args.max_depth as usize,
        symbolize: !args.no_symbolize,
        symbols: Options::new(&args.debug_dir, args.max_debug_bytes),
        config,
        sizes: MapSizes {
            events_bytes: events_bytes as u32,
            stacks_bytes: stacks_bytes as u32,
            live_max: args.live_max,
            stack_traces_max: 16384,
        },
        stacks_max: args.stacks_max,
        link: match args.link {
            Link::Auto => None,
            Link::Session => Some(LinkKind::Session),
            Link::Multi => Some(LinkKind::Multi),
            Link::Perf => Some(LinkKind::Perf),
        },
        quiet: args.quiet,
        progress: !args.quiet && !args.no_progress,
        color: args.color,
    })
}

/// Sampling interval under `-i auto` until the call rate is known: short, so small that it hardly widens error bars.
const AUTOMATIC_START: u64 = 64 << 10;
/// Largest share of CPU time that probes on every process take by default: the kernel's own for perf events.
const HOST_BUDGET: f64 = 0.25;

/// The interval in trials, and how size classes get theirs.
fn sampling(args: &RecordArgs) -> Result<(u64, Option<ClassRule>), PlanError> {
    match (Criterion::from(args.criterion), &args.interval) {
        (Criterion::SizeClass, Interval::Size(0)) => Ok((0, None)),
        (Criterion::SizeClass, Interval::Size(overall)) => Ok((CLASS_INTERVAL, Some(ClassRule::Even(*overall)))),
        (Criterion::SizeClass, Interval::Classes(path)) => {
            let classes = read_classes(path)?;
            Ok((CLASS_INTERVAL, Some(ClassRule::Given(classes.classes))))
        }
        (_, Interval::Size(interval)) => Ok((*interval, None)),
        (Criterion::Bytes, Interval::Auto) => Ok((AUTOMATIC_START, None)),
        (criterion, Interval::Auto) => {
            Err(PlanError::Usage(format!("-i auto chooses bytes, not what --criterion {} counts", criterion.name())))
        }
        (criterion, Interval::Classes(path)) => Err(PlanError::Usage(format!(
            "-i @{}: intervals by size class need --criterion size-class, not {}",
            path.display(),
            criterion.name()
        ))),
    }
}

/// Most bytes of a file of intervals by size class: far more than 256 of them take.
const LARGEST_CLASS_FILE: u64 = 1 << 20;

fn read_classes(path: &Path) -> Result<ClassPlan, PlanError> {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(LARGEST_CLASS_FILE).read_to_string(&mut text))
        .map_err(|source| PlanError::ClassesUnreadable { path: path.into(), source })?;
    ClassPlan::read(&text).map_err(|source| PlanError::Classes { path: path.into(), source })
}

impl RecordPlan {
    /// How it samples, for people: `one sample per 512 KiB`.
    pub fn sampling(&self) -> String {
        let allocations = |n: u64| format!("one sample in {} allocations", units::count(n as f64));
        match (self.criterion, self.interval, &self.classes) {
            (_, 0, _) => "totals only".into(),
            (_, 1, _) | (_, _, Some(ClassRule::Even(1))) => "every allocation".into(),
            (_, _, Some(ClassRule::Even(overall))) => {
                format!("{}, divided evenly among size classes", allocations(*overall))
            }
            (_, _, Some(ClassRule::Given(classes))) => format!("intervals given for {} size classes", classes.len()),
            (Criterion::Bytes, interval, None) => format!("one sample per {}", units::bytes(interval as f64)),
            (_, interval, None) => allocations(interval),
        }
    }

    /// What must be known of the way of sampling beside the figures.
    pub fn sampling_note(&self) -> Option<String> {
        let by = match self.criterion {
            Criterion::Bytes => return None,
            Criterion::Allocations => "allocation",
            Criterion::SizeClass => "size class",
        };
        let sampling = self.sampling();
        Some(format!("sampled by {by}: {sampling}; estimates of bytes and of counts are unbiased"))
    }
}

/// Whether folders with debug information are there.
///
/// # Errors
/// The first that is not.
pub fn check_debug_dirs(folders: &[PathBuf]) -> Result<(), PlanError> {
    let is_missing = |folder: &&PathBuf| !folder.is_dir();
    folders.iter().find(is_missing).map_or(Ok(()), |folder| {
        Err(PlanError::Blocked(format!("--debug-dir {}: there is no such folder", folder.display())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Cli;
    use clap::Parser;

    fn refusal(words: &[&str]) -> (String, u8) {
        let cli = Cli::try_parse_from(std::iter::once(&"heapbpf").chain(words)).unwrap();
        let error = plan(&cli.record).err().unwrap();
        (error.to_string(), error.exit_status())
    }

    #[test]
    fn the_definition_of_options_is_sound() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn wrong_usage_is_status_2_and_says_what_to_do() {
        for (words, part) in [
            (&[][..], "--pid"),
            (&["--all", "--pid", "1"], "leave"),
            (&["--all", "-o", "x.unknown"], "known"),
            (&["--all", "-o", "-", "--every", "1s"], "--every"),
            (&["--all", "--stack-bytes", "2MiB"], "1MiB"),
            (&["--all", "--ring-bytes", "0"], "range"),
            (&["--all", "-i", "@x.json"], "--criterion size-class"),
            (&["--all", "--no-live", "--at", "peak"], "--no-live"),
            (&["--all", "--no-live", "--at-bytes", "1GiB"], "--no-live"),
            (&["--all", "--no-live", "--at-peak"], "--no-live"),
            (&["--comm", "a-name-of-17-byte"], "pattern"),
        ] {
            let (message, status) = refusal(words);
            assert!(message.contains(part), "{words:?}: {message}");
            assert_eq!(status, 2, "{words:?}");
        }
    }

    #[test]
    fn intervals_out_of_range_are_refused_while_parsing() {
        for bad in ["65MiB", "-5", "x"] {
            let error = Cli::try_parse_from(["heapbpf", "--all", "--interval", bad]).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{bad}");
        }
    }
}

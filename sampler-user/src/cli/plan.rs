//! Plans a recording: checks options against each other and against the system, before anything is attached.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use heapbpf_attach::inline::forbidden;
use heapbpf_host::limits::{Limits, forbid_inline_hooks, memory_bytes};
use heapbpf_host::process::select;
use heapbpf_kernel::loader::MapSizes;
use heapbpf_kernel::ring_maps::whole_size;
use heapbpf_profile::adjust::{Adjustments, At};
use heapbpf_profile::formats::{self, WriteOptions};
use heapbpf_profile::model::Criterion;
use heapbpf_profile::report::FrameView;
use heapbpf_profile::units;
use heapbpf_record::output::{self, Output};
use heapbpf_record::plan::{
    Display, Hook, KernelPlan, OutputPlan, PythonObjects, RecordPlan, SamplingPlan, StackPlan, Targets, Unwind,
};
use heapbpf_record::ring_sizes::{RingSizes, WAKE_SHARE};
use heapbpf_record::sampling::size_classes::ClassRule;
use heapbpf_serve::ServePlan;
use heapbpf_serve::listen::Listen;
use heapbpf_serve::tls::TlsFiles;
use heapbpf_statistics::plan::ClassPlan;
use heapbpf_statistics::size_classes::CLASS_INTERVAL;
use heapbpf_symbols::debuginfod::settings;
use heapbpf_symbols::options::Options;
use sampler_ebpf::abi::{Config, LARGEST_STACK_COPY, SMALLEST_STACK_COPY, stack_kind};

use super::allocators;
use super::error::PlanError;
use super::record_args::{RecordArgs, SamplingArgs, StackArgs};
use super::targets::{Rules, check_program, level_of, rules, target_rules};
use super::values::{FollowArg, Interval, Overhead, YesNoArg};
use super::{frames, pipelines};
use crate::run::RunPlan;

/// Maximum size of a ring, in bytes. Sizes are powers of two, and the kernel holds them in an `int`.
const LARGEST_RING: u64 = 1 << 30;

/// Plans a recording.
///
/// # Errors
/// A sentence that says what to do.
pub fn plan(args: &RecordArgs) -> Result<RunPlan, PlanError> {
    let recording = recording(args, args.serve.listen.is_some() || !args.serve.push.is_empty())?;
    let serving = serving(args, recording.display.frames)?;
    Ok(RunPlan { recording, serving })
}

/// Plans a recording without its services. `keeps_running`: it outlives its targets.
///
/// # Errors
/// A sentence that says what to do.
pub fn recording(args: &RecordArgs, keeps_running: bool) -> Result<RecordPlan, PlanError> {
    let default_format = formats::by_name(args.output.format.as_deref().unwrap_or("pprof"))?;
    let outputs = pipelines::outputs(args)?;
    let (interval, classes) = sampling(&args.sampling)?;
    let rules = check_options(args)?;
    if let Some(note) = rare_samples(args).filter(|_| !args.display.quiet) {
        log::warn!("{note}");
    }
    check_system(args, &outputs)?;
    if let Some(program) = args.target.command.first() {
        check_program(program)?;
    }
    let allocators = allocators::resolve(&args.target.allocators)?;
    let running = select(&rules.targets)?;
    let targets = Targets {
        rules: rules.targets.clone(),
        running,
        command: args.target.command.clone(),
        follow: !args.target.no_follow,
        from_first_call: args.target.follow == Some(FollowArg::Exec),
        allocators,
        objects: args.target.python_objects,
    };
    let frames = frames::view(args.display.frames)?;
    let kernel = kernel(args, &targets, &rules, ring_sizes(args, interval, classes.as_ref()));
    Ok(RecordPlan {
        targets,
        duration: args.duration,
        keeps_running,
        sampling: SamplingPlan {
            interval,
            criterion: args.sampling.criterion,
            automatic: args.sampling.interval == Interval::Auto,
            classes,
            live: !args.sampling.no_live,
            mappings: args.sampling.mmap,
        },
        stacks: StackPlan {
            unwind: args.stacks.unwind,
            max_depth: args.stacks.max_depth as usize,
            most: args.limits.stacks_max,
            symbolize: !args.stacks.no_symbolize,
            symbols: symbol_options(&args.stacks),
        },
        outputs: output_plan(args, outputs, default_format, frames),
        budget: budget(args),
        kernel,
        display: Display {
            quiet: args.display.quiet,
            progress: !args.display.quiet && !args.display.no_progress,
            color: args.display.color,
            frames,
        },
    })
}

/// Checks options against each other. Returns the target rules.
fn check_options(args: &RecordArgs) -> Result<Rules, PlanError> {
    if args.sampling.no_live && args.output.at == At::Peak {
        return Err(PlanError::Usage("--at peak needs in-use figures: leave out --no-live".into()));
    }
    if let Some(value) = args.output.value.filter(|value| args.sampling.no_live && value.needs_frees()) {
        return Err(PlanError::Usage(format!(
            "--value {} needs frees, which --no-live does not record: choose alloc_space or alloc_objects",
            value.name()
        )));
    }
    let rules = rules(&args.target)?;
    if rules.targets.is_empty() && args.target.command.is_empty() {
        return Err(PlanError::Usage(
            "what should be profiled? --pid PID, --all, --comm GLOB, --cgroup PATH, --container ID or -- COMMAND (see --help)".into(),
        ));
    }
    if args.stacks.stack_bytes > LARGEST_STACK_COPY {
        return Err(PlanError::Usage(format!("--stack-bytes: the maximum is {LARGEST_STACK_COPY} bytes (1MiB)")));
    }
    if args.limits.ring_bytes.is_some_and(|bytes| bytes == 0 || bytes > LARGEST_RING) {
        return Err(PlanError::Usage(format!("--ring-bytes: the range is 1 to {LARGEST_RING} bytes (1GiB)")));
    }
    if args.limits.lossless == Some(YesNoArg::Yes) && !matches!(args.limits.hook, Hook::Auto | Hook::Inline) {
        return Err(PlanError::Usage("--lossless works only with inline hooks: leave --hook out".into()));
    }
    match args.limits.hook {
        Hook::Inline => check_inline(args)?,
        Hook::Usdt => check_usdt(args)?,
        Hook::Auto | Hook::Probe => {}
    }
    Ok(rules)
}

/// Checks that no options apply to samples that the processes take themselves.
fn check_usdt(args: &RecordArgs) -> Result<(), PlanError> {
    let sampling = &args.sampling;
    let refusal = if sampling.interval != Interval::Size(DEFAULT_INTERVAL) {
        "processes choose their interval themselves: leave -i out"
    } else if sampling.criterion != Criterion::Bytes {
        "processes sample by bytes: leave --criterion out"
    } else if sampling.mmap {
        "an allocator's own mappings cannot be distinguished from others: leave --mmap out"
    } else if !args.target.allocators.is_empty() {
        "no allocator is hooked: leave --alloc out"
    } else if args.target.python_objects == PythonObjects::Always {
        "no allocator is hooked: leave --python-objects out"
    } else {
        return Ok(());
    };
    Err(PlanError::Usage(format!("--hook usdt: {refusal}")))
}

/// Checks that inline hooks support the requested options.
fn check_inline(args: &RecordArgs) -> Result<(), PlanError> {
    let refusal = if args.sampling.criterion == Criterion::SizeClass {
        "only one interval for all sizes is supported: leave --criterion size-class out"
    } else if args.target.follow == Some(FollowArg::Exec) {
        "only probes count what children execute from its first call: leave --follow=exec out"
    } else {
        return Ok(());
    };
    Err(PlanError::Usage(format!("--hook inline: {refusal}")))
}

/// Checks options against the system: what it forbids, and files that cannot be read or written.
fn check_system(args: &RecordArgs, outputs: &[Output]) -> Result<(), PlanError> {
    if let Some(blocker) = Limits::read().blockers().into_iter().next() {
        return Err(PlanError::Blocked(blocker));
    }
    forbidden::rules()?;
    check_debug_dirs(&args.stacks.debug_dir)?;
    for output in outputs {
        output.check()?;
    }
    let stats = args.output.stats.as_ref().filter(|path| path.as_os_str() != output::STANDARD_OUTPUT);
    stats.map_or(Ok(()), |stats| output::check_new_file(stats, args.output.force))?;
    Ok(())
}

fn symbol_options(stacks: &StackArgs) -> Options {
    // Without names, nothing is requested over the network.
    let settings = (!stacks.no_symbolize).then(|| settings::read(&stacks.debuginfod, |name| std::env::var_os(name)));
    Options::new(&stacks.debug_dir, stacks.max_debug_bytes).with_debuginfod(settings.flatten()).demangling_apart()
}

fn serving(args: &RecordArgs, frames: FrameView) -> Result<ServePlan, PlanError> {
    let files = args.serve.tls_cert.as_deref().zip(args.serve.tls_key.as_deref());
    let tls = files.map(|(certificates, key)| TlsFiles { certificates, key });
    let listen = match args.serve.listen {
        Some(address) => Some(Listen::open(address, args.serve.token_file.as_deref(), tls)?),
        None => None,
    };
    Ok(ServePlan { listen, history: pipelines::history(&args.serve)?, push: pipelines::push(&args.serve)?, frames })
}

fn output_plan(
    args: &RecordArgs,
    files: Vec<Output>,
    default_format: &'static formats::Format,
    frames: FrameView,
) -> OutputPlan {
    let (output, snapshots) = (&args.output, &args.snapshots);
    let (value, confidence, group_by) = (output.value, output.confidence, output.group_by);
    OutputPlan {
        files,
        default_format,
        write: WriteOptions { value, confidence, group_by, frames },
        adjustments: Adjustments { calibrate: args.sampling.calibrate, at: output.at },
        triggers: snapshots.triggers(),
        keep: snapshots.keep.map(|keep| keep as usize),
        stats: output.stats.clone(),
        force: output.force,
    }
}

fn budget(args: &RecordArgs) -> Option<f64> {
    match args.limits.max_overhead {
        Some(Overhead::Share(share)) => Some(share),
        Some(Overhead::Unlimited) => None,
        None => args.target.all.then_some(HOST_BUDGET),
    }
}

/// Returns the ring sizes: the given ones, or else sizes for the amount of sampling.
fn ring_sizes(args: &RecordArgs, interval: u64, classes: Option<&ClassRule>) -> RingSizes {
    if let Some(bytes) = args.limits.ring_bytes {
        return RingSizes::fixed(whole_size(bytes), LARGEST_RING);
    }
    let interval = match classes {
        Some(ClassRule::Even(overall)) => *overall,
        Some(ClassRule::Given(_)) => 1,
        None => interval,
    };
    let copies = args.stacks.unwind != Unwind::FramePointers;
    RingSizes::of_interval(interval, args.sampling.criterion, copies)
}

fn kernel(args: &RecordArgs, targets: &Targets, rules: &Rules, rings: RingSizes) -> KernelPlan {
    let (limits, stacks) = (&args.limits, &args.stacks);
    let config = Config {
        target_rules: target_rules(targets),
        follow: u32::from(targets.follow),
        live: u32::from(!args.sampling.no_live),
        stack_kind: match stacks.unwind {
            Unwind::FramePointers => stack_kind::FRAME_POINTERS,
            Unwind::Auto | Unwind::Dwarf => stack_kind::COPIED,
        },
        criterion: heapbpf_record::sampling::criterion_code(args.sampling.criterion),
        self_tgid: std::process::id(),
        memory_bytes: memory_bytes(),
        page_bytes: procfs::page_size(),
        stack_bytes: stacks.stack_bytes.max(SMALLEST_STACK_COPY),
        seed: args.sampling.seed.unwrap_or(0),
        wake_share: WAKE_SHARE,
        cgroup_id: rules.cgroup.as_ref().map_or(0, |group| group.id),
        cgroup_level: rules.cgroup.as_ref().map_or(0, level_of),
        comm_pattern: rules.comm_pattern,
        ..Config::default()
    };
    let sizes = MapSizes {
        events_bytes: rings.events.first_bytes as u32,
        stacks_bytes: rings.stacks.first_bytes as u32,
        live_max: limits.live_max,
        stack_traces_max: 16384,
    };
    KernelPlan {
        config,
        sizes,
        rings,
        link: limits.link,
        hook: limits.hook,
        no_inline: forbid_inline_hooks(),
        lossless: is_lossless(args),
    }
}

/// Largest interval at which a command waits for its samples to be read, bytes.
const LOSSLESS_INTERVAL: u64 = 4 << 10;

/// Whether programs wait when samples arrive faster than they are read.
fn is_lossless(args: &RecordArgs) -> bool {
    let is_small = matches!(args.sampling.interval, Interval::Size(1..=LOSSLESS_INTERVAL));
    let by_bytes = args.sampling.criterion == Criterion::Bytes;
    let is_default = !args.target.command.is_empty() && is_small && by_bytes;
    args.limits.lossless.map_or(is_default, |arg| arg == YesNoArg::Yes)
}

/// Sampling interval under `-i auto` until the call rate is known. That takes little time, and the interval is so small
/// that it hardly widens error bars.
const AUTOMATIC_START: u64 = 64 << 10;
/// Default sampling interval.
const DEFAULT_INTERVAL: u64 = 512 << 10;
/// Default share of CPU time that probes may take with `--all`: the kernel's own limit for perf events.
const HOST_BUDGET: f64 = 0.25;

/// Returns the sampling interval in trials, and the rule for size classes.
fn sampling(args: &SamplingArgs) -> Result<(u64, Option<ClassRule>), PlanError> {
    match (args.criterion, &args.interval) {
        (Criterion::SizeClass, Interval::Size(0)) => Ok((0, None)),
        (Criterion::SizeClass, Interval::Size(overall)) => Ok((CLASS_INTERVAL, Some(ClassRule::Even(*overall)))),
        (Criterion::SizeClass, Interval::Classes(path)) => {
            let classes = read_classes(path)?;
            Ok((CLASS_INTERVAL, Some(ClassRule::Given(classes.classes))))
        }
        (_, Interval::Size(interval)) => Ok((*interval, None)),
        (Criterion::Bytes, Interval::Auto) => Ok((AUTOMATIC_START, None)),
        (criterion, Interval::Auto) => {
            Err(PlanError::Usage(format!("-i auto works only with --criterion bytes, not with {}", criterion.name())))
        }
        (criterion, Interval::Classes(path)) => Err(PlanError::Usage(format!(
            "-i @{}: intervals by size class need --criterion size-class, not {}",
            path.display(),
            criterion.name()
        ))),
    }
}

/// Returns a warning if the default interval, which is meant for bytes, counts allocations.
fn rare_samples(args: &RecordArgs) -> Option<String> {
    let criterion = args.sampling.criterion;
    let is_default = args.sampling.interval == Interval::Size(DEFAULT_INTERVAL);
    (is_default && criterion != Criterion::Bytes).then(|| {
        format!(
            "--criterion {} without -i takes one sample in {} allocations; -i 1000 would take one in 1,000",
            criterion.name(),
            units::count(DEFAULT_INTERVAL as f64)
        )
    })
}

/// Maximum size of a file of intervals by size class, in bytes: far more than 256 intervals need.
const LARGEST_CLASS_FILE: u64 = 1 << 20;

fn read_classes(path: &Path) -> Result<ClassPlan, PlanError> {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(LARGEST_CLASS_FILE).read_to_string(&mut text))
        .map_err(|source| PlanError::ClassesUnreadable { path: path.into(), source })?;
    ClassPlan::read(&text).map_err(|source| PlanError::Classes { path: path.into(), source })
}

/// Checks that the directories with debug information exist.
///
/// # Errors
/// Names the first directory that does not exist.
pub fn check_debug_dirs(dirs: &[PathBuf]) -> Result<(), PlanError> {
    let is_missing = |dir: &&PathBuf| !dir.is_dir();
    dirs.iter().find(is_missing).map_or(Ok(()), |dir| {
        Err(PlanError::Blocked(format!("--debug-dir {}: there is no such directory", dir.display())))
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::args::Cli;

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
            (&["--all", "-o", "x.unknown"], "known"),
            (&["--all", "-o", "-", "--every", "1s"], "--every"),
            (&["--all", "--stack-bytes", "2MiB"], "1MiB"),
            (&["--all", "--ring-bytes", "0"], "range"),
            (&["--all", "-i", "@x.json"], "--criterion size-class"),
            (&["--all", "--no-live", "--at", "peak"], "--no-live"),
            (&["--all", "--no-live", "--snapshot", "1GiB"], "--no-live"),
            (&["--all", "--no-live", "--snapshot", "peak"], "--no-live"),
            (&["--all", "--snapshot", "limit"], "name one with -o"),
            (&["--all", "--lossless", "--hook", "probe"], "--hook"),
            (&["--all", "--hook", "inline", "--follow=exec"], "leave --follow=exec out"),
            (&["--all", "--hook", "usdt", "-i", "4096"], "leave -i out"),
            (&["--all", "--hook", "usdt", "--criterion", "allocations"], "leave --criterion out"),
            (&["--all", "--hook", "usdt", "--alloc", "a.so:f(size=arg0)->ret"], "leave --alloc out"),
            (&["--all", "--no-live", "--at-peak"], "--no-live"),
            (&["--all", "--no-live", "--value", "inuse_space"], "choose alloc_space"),
            (&["--all", "--no-live", "--value", "at_exit_objects", "-o", "x.folded"], "--no-live"),
            (&["--all", "-o", "x.json", "--stats", "x.json"], "-o x.json and --stats x.json are the same file"),
            (&["--all", "-o", "x.json", "--stats", "src/../x.json", "--force"], "--stats src/../x.json"),
            (&["--all", "-o", "x.json", "-o", "./x.json"], "-o ./x.json are the same file"),
            (&["--all", "--format", "json", "-o", "-", "-o", "-"], "standard output"),
            (&["--all", "--format", "json", "-o", "-", "--stats", "-"], "standard output"),
            (&["--comm", "a-name-of-17-byte"], "pattern"),
        ] {
            let (message, status) = refusal(words);
            assert!(message.contains(part), "{words:?}: {message}");
            assert_eq!(status, 2, "{words:?}");
        }
    }

    #[test]
    fn former_names_of_snapshots_mean_the_same() {
        let triggers = |words: &[&str]| {
            let words = [&["heapbpf", "--all", "-o", "x.json"], words].concat();
            Cli::try_parse_from(words).unwrap().record.snapshots.triggers()
        };
        for (former, now) in [
            (&["--every", "10s"][..], "10s"),
            (&["--at-bytes", "1GiB"], "1GiB"),
            (&["--at-peak"], "peak"),
            (&["--at-limit"], "limit"),
        ] {
            let now = triggers(&["--snapshot", now]);
            assert!(triggers(former) == now && now != triggers(&[]), "{former:?}");
        }
        let all = triggers(&["--snapshot", "10s", "--snapshot", "1GiB", "--snapshot", "peak", "--snapshot", "limit"]);
        assert!(all == triggers(&["--every", "10s", "--at-bytes", "1GiB", "--at-peak", "--at-limit"]));
    }

    #[test]
    fn the_last_word_about_children_counts() {
        for (words, follow, no_follow) in [
            (&["--follow"][..], Some(FollowArg::Entry), false),
            (&["--no-follow", "--follow=exec"], Some(FollowArg::Exec), false),
            (&["--follow=exec", "--no-follow"], None, true),
        ] {
            let words = [&["heapbpf", "--all"], words].concat();
            let target = Cli::try_parse_from(&words).unwrap().record.target;
            assert_eq!((target.follow, target.no_follow), (follow, no_follow), "{words:?}");
        }
    }

    #[test]
    fn commands_wait_at_small_intervals_and_others_if_asked_to() {
        let waits = |words: &[&str]| {
            let words = [&["heapbpf"], words].concat();
            is_lossless(&Cli::try_parse_from(words).unwrap().record)
        };
        for words in [
            &["-i", "1", "--", "x"][..],
            &["-i", "4KiB", "--", "x"],
            &["--lossless", "--", "x"],
            &["--all", "--lossless"],
        ] {
            assert!(waits(words), "{words:?}");
        }
        for words in [
            &["--", "x"][..],
            &["-i", "4097", "--", "x"],
            &["-i", "0", "--", "x"],
            &["-i", "auto", "--", "x"],
            &["-i", "1", "--criterion", "allocations", "--", "x"],
            &["-i", "1", "--lossless=no", "--", "x"],
            &["-i", "1", "--all"],
        ] {
            assert!(!waits(words), "{words:?}");
        }
    }

    #[test]
    fn the_default_interval_is_told_where_it_counts_allocations() {
        let note = |words: &[&str]| {
            let words = [&["heapbpf", "--all"], words].concat();
            rare_samples(&Cli::try_parse_from(words).unwrap().record)
        };
        for criterion in ["allocations", "size-class"] {
            let note = note(&["--criterion", criterion]).unwrap();
            assert!(note.contains("one sample in 524,288 allocations") && note.contains("-i 1000"), "{note}");
        }
        assert_eq!(note(&["--criterion", "allocations", "-i", "100"]), None);
        assert_eq!(note(&["--criterion", "size-class", "-i", "@x.json"]), None);
        assert_eq!(note(&[]), None);
    }

    #[test]
    fn intervals_out_of_range_are_refused_while_parsing() {
        for bad in ["65MiB", "-5", "x"] {
            let error = Cli::try_parse_from(["heapbpf", "--all", "--interval", bad]).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{bad}");
        }
    }
}

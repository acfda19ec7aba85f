//! The plan of a recording: all options, resolved and checked before anything is attached. Each group of options
//! configures one part of the recording.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use heapbpf_host::invoking_user::invoking_user;
use heapbpf_host::process::{ProcessInfo, Target};
use heapbpf_kernel::loader::MapSizes;
use heapbpf_kernel::programs::LinkKind;
use heapbpf_probes::CustomAllocator;
use heapbpf_profile::adjust::Adjustments;
use heapbpf_profile::formats::{Format, WriteOptions};
use heapbpf_profile::model::Criterion;
use heapbpf_profile::report::FrameView;
use heapbpf_profile::units;
use heapbpf_symbols::options::Options;
use sampler_ebpf::abi::Config;

use crate::output::Output;
use crate::ring_sizes::RingSizes;
use crate::sampling::size_classes::ClassRule;
use crate::terminal::Color;

/// Plan of a recording.
pub struct RecordPlan {
    /// Which processes are profiled.
    pub targets: Targets,
    /// Length of the recording; `None`: unlimited.
    pub duration: Option<Duration>,
    /// Whether this is a service that outlives its targets. Profiles of exited processes are then merged by program,
    /// together with the memory that these processes held at exit.
    pub keeps_running: bool,
    /// Which allocations are sampled, and what is recorded about them.
    pub sampling: SamplingPlan,
    /// How stacks are unwound and symbolized.
    pub stacks: StackPlan,
    /// What is written, when and where.
    pub outputs: OutputPlan,
    /// Largest share of the targets' CPU time that probes may take; `None`: unlimited.
    pub budget: Option<f64>,
    /// How the kernel side is loaded.
    pub kernel: KernelPlan,
    /// What is shown on the terminal.
    pub display: Display,
}

impl RecordPlan {
    /// Whether files are written, maybe in directories of another user. A service that names no output files writes one
    /// only if a signal tells it to. Its directory is its own, unless it was started by sudo.
    pub fn writes_files(&self) -> bool {
        let outputs = &self.outputs;
        !self.keeps_running || !outputs.files.is_empty() || outputs.stats.is_some() || invoking_user().is_some()
    }

    /// Whether processes are hooked inline where that is possible.
    pub fn hooks_inline(&self) -> bool {
        match self.kernel.hook {
            Hook::Inline => true,
            Hook::Auto => self.kernel.no_inline.is_none() && self.asks_for_probes().is_none(),
            Hook::Probe | Hook::Usdt => false,
        }
    }

    /// The options without which processes would be hooked inline where probes count now. `None` if there are none.
    pub fn asks_for_probes(&self) -> Option<&'static str> {
        let by_size = self.sampling.criterion == Criterion::SizeClass;
        asking(self.kernel.hook, by_size, self.targets.from_first_call).filter(|_| self.kernel.no_inline.is_none())
    }

    /// Whether announcements of samples are followed, in addition to allocators or instead of them. By default they are
    /// not followed with `--mmap`, as an announcing allocator's own mappings could not be told from others; nor under
    /// criteria other than bytes, as announced intervals are in bytes.
    pub fn follows_announcements(&self) -> bool {
        let sampling = &self.sampling;
        match self.kernel.hook {
            Hook::Usdt => true,
            Hook::Auto => !sampling.mappings && sampling.criterion == Criterion::Bytes,
            Hook::Probe | Hook::Inline => false,
        }
    }

    /// Whether memory held at exit by exited processes is reported separately from memory in use. With named targets it
    /// counts as in use, because it is what the user asked about. A service reports the present moment, so it is always
    /// separate.
    pub fn ended_apart(&self) -> bool {
        self.keeps_running || !self.targets.are_named()
    }
}

/// Names the options that ask for probes. `by_size`: `--criterion size-class` was given. `at_exec`: `--follow=exec` was.
const fn asking(hook: Hook, by_size: bool, at_exec: bool) -> Option<&'static str> {
    match (hook, by_size, at_exec) {
        (Hook::Probe, false, false) => Some("--hook probe"),
        (Hook::Auto, true, false) => Some("--criterion size-class"),
        (Hook::Auto, false, true) => Some("--follow=exec"),
        (Hook::Auto, true, true) => Some("--criterion size-class and --follow=exec"),
        _ => None,
    }
}

/// Which processes are profiled.
#[derive(Debug)]
pub struct Targets {
    /// Rules that select processes, those that run now and those that start later.
    pub rules: Vec<Target>,
    /// Targets that are already running.
    pub running: Vec<ProcessInfo>,
    /// Command to start and profile; empty: none.
    pub command: Vec<OsString>,
    /// Whether children of targets are profiled too.
    pub follow: bool,
    /// Whether programs that children execute are counted from their first call, by links that serve every process.
    pub from_first_call: bool,
    /// Custom allocators that the user described.
    pub allocators: Vec<CustomAllocator>,
    /// Whether Python's own object allocator is counted.
    pub objects: PythonObjects,
}

/// Whether Python's own object allocator is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PythonObjects {
    /// In processes with inline hooks, where each costs a few nanoseconds
    #[default]
    #[value(name = "auto")]
    Inline,
    /// Also with probes, if no process is counted from inside: each object then traps three times (call, return, free), so the program is much slower
    #[value(name = "yes")]
    Always,
    /// Nowhere
    #[value(name = "no")]
    Never,
}

impl PythonObjects {
    /// Whether they are probed. `hooks_inline`: processes are hooked inline where that is possible. Python objects are
    /// then counted only there, because a process that switches to inline hooks must not be counted in both ways.
    #[must_use]
    pub fn are_probed(self, hooks_inline: bool) -> bool {
        self == Self::Always && !hooks_inline
    }

    /// Whether they are counted inside processes that are hooked inline.
    #[must_use]
    pub fn are_counted_inside(self, hooks_inline: bool) -> bool {
        self != Self::Never && hooks_inline
    }
}

/// Which allocations are sampled, and what is recorded about them.
#[derive(Clone, Debug)]
pub struct SamplingPlan {
    /// Sampling interval R, in trials of the criterion (usually bytes); 0: totals only.
    pub interval: u64,
    /// Sampling criterion: what counts as a trial.
    pub criterion: Criterion,
    /// Whether the interval is adapted to the rate of calls.
    pub automatic: bool,
    /// How the sampling intervals of size classes are chosen, if the criterion is [`Criterion::SizeClass`].
    pub classes: Option<ClassRule>,
    /// Whether frees are tracked.
    pub live: bool,
    /// Whether memory that programs map themselves counts as allocations.
    pub mappings: bool,
}

/// Method of unwinding stacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Unwind {
    /// The best method available for each sample
    #[default]
    Auto,
    /// With call frame information, on a copy of the stack
    Dwarf,
    /// With frame pointers, in the kernel
    #[value(name = "fp")]
    FramePointers,
}

impl Unwind {
    /// Name of the method in profiles.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Dwarf => "dwarf",
            Self::FramePointers => "fp",
        }
    }
}

/// How stacks are unwound and symbolized.
#[derive(Clone, Debug)]
pub struct StackPlan {
    /// Method of unwinding.
    pub unwind: Unwind,
    /// Maximum number of frames per stack.
    pub max_depth: usize,
    /// Maximum number of rows (distinct stacks) of the heap. Beyond it, rows with few samples are merged.
    pub most: u32,
    /// Whether addresses are symbolized.
    pub symbolize: bool,
    /// Where symbols are looked up.
    pub symbols: Options,
}

/// What is written, when and where.
pub struct OutputPlan {
    /// Output files of the profile.
    pub files: Vec<Output>,
    /// Format of snapshots that a signal asks for, if there are no output files.
    pub default_format: &'static Format,
    /// Options of the writers.
    pub write: WriteOptions,
    /// Adjustments made to profiles before they are written.
    pub adjustments: Adjustments,
    /// When snapshots are taken.
    pub triggers: TriggerOptions,
    /// Number of snapshots kept on disk; `None`: all.
    pub keep: Option<usize>,
    /// Output file of the accounting (`--stats`).
    pub stats: Option<PathBuf>,
    /// Whether existing files may be replaced.
    pub force: bool,
}

/// Events that trigger a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TriggerOptions {
    /// Time between snapshots.
    pub every: Option<Duration>,
    /// Bytes in use at which a snapshot is taken.
    pub at_bytes: Option<u64>,
    /// At each new peak of bytes in use.
    pub at_peak: bool,
    /// Shortly before the targets or the host run out of memory.
    pub at_limit: bool,
}

/// How calls are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Hook {
    /// Inline where possible (x86-64), else with probes; usdt if a process has no allocator that can be hooked
    #[default]
    Auto,
    /// With probes, which trap on every call; nothing is written into processes
    Probe,
    /// From inside the process, by code that heapbpf puts into it (x86-64); warns where that is refused
    Inline,
    /// By the process itself, which announces samples through USDT probes of the provider otel_memory (x86-64)
    Usdt,
}

/// How the kernel side is loaded.
#[derive(Clone, Debug)]
pub struct KernelPlan {
    /// Configuration constants of the BPF programs.
    pub config: Config,
    /// Sizes of the BPF maps.
    pub sizes: MapSizes,
    /// Limits of the ring sizes.
    pub rings: RingSizes,
    /// Kind of link to attach with, if the user forced one.
    pub link: Option<LinkKind>,
    /// How calls are counted.
    pub hook: Hook,
    /// Why no process can be hooked inline, if that is so.
    pub no_inline: Option<&'static str>,
    /// Whether processes that are hooked inline wait when samples arrive faster than they are taken in.
    pub lossless: bool,
}

/// What is shown on the terminal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Display {
    /// Whether the table and the status line are suppressed.
    pub quiet: bool,
    /// Whether a status line may be shown.
    pub progress: bool,
    /// When output is coloured.
    pub color: Color,
    /// Which frames of stacks the closing table shows.
    pub frames: FrameView,
}

impl Targets {
    /// The rules that may match no process; `None` if targets are named by process id, or are all processes.
    pub fn rules_to_match(&self) -> Option<String> {
        if !self.command.is_empty() {
            return None;
        }
        let rules = self.rules.iter().map(|rule| match rule {
            Target::Comm(glob) => Some(format!("--comm {}", glob.pattern())),
            Target::Cgroup(cgroup) => Some(format!("--cgroup {}", cgroup.path)),
            Target::Pid(_) | Target::All => None,
        });
        let rules: Vec<String> = rules.collect::<Option<_>>()?;
        (!rules.is_empty()).then(|| rules.join(" or "))
    }

    /// Whether every target is given by its process ID, or descends from one that is.
    pub fn are_named(&self) -> bool {
        self.rules.iter().all(|rule| matches!(rule, Target::Pid(_)))
    }

    /// Whether all processes are targets.
    pub fn are_all(&self) -> bool {
        self.rules.iter().any(|rule| matches!(rule, Target::All))
    }

    /// Whether a process is given by its process ID.
    pub fn name(&self, pid: u32) -> bool {
        self.rules.iter().any(|rule| matches!(rule, Target::Pid(named) if *named == pid))
    }

    /// Whether processes become targets by their name or cgroup, which may change while they run.
    pub fn have_changing_members(&self) -> bool {
        self.rules.iter().any(|rule| matches!(rule, Target::Comm(_) | Target::Cgroup(_)))
    }
}

impl SamplingPlan {
    /// Describes the sampling for the user, as in `one sample per 512 KiB`.
    pub fn describe(&self) -> String {
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

    /// A note for the profile on how allocations were sampled; `None` for the default criterion, bytes.
    pub fn note(&self) -> Option<String> {
        let by = match self.criterion {
            Criterion::Bytes => return None,
            Criterion::Allocations => "allocation",
            Criterion::SizeClass => "size class",
        };
        let sampling = self.describe();
        Some(format!("sampled by {by}: {sampling}; estimates of bytes and of counts are unbiased"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(criterion: Criterion, interval: u64, classes: Option<ClassRule>) -> SamplingPlan {
        SamplingPlan { interval, criterion, automatic: false, classes, live: true, mappings: false }
    }

    #[test]
    fn all_options_that_ask_for_probes_are_named_or_none() {
        let asking =
            |hook| [(false, false), (true, false), (false, true), (true, true)].map(|(by, at)| asking(hook, by, at));
        let (size, exec, both) =
            ("--criterion size-class", "--follow=exec", "--criterion size-class and --follow=exec");
        assert_eq!(asking(Hook::Auto), [None, Some(size), Some(exec), Some(both)]);
        assert_eq!(asking(Hook::Probe), [Some("--hook probe"), None, None, None], "without it, another one stays");
        assert_eq!([Hook::Inline, Hook::Usdt].map(asking), [[None; 4]; 2]);
    }

    #[test]
    fn sampling_is_described_in_the_unit_of_its_criterion() {
        let text = |criterion, interval, classes| sampling(criterion, interval, classes).describe();
        assert_eq!(text(Criterion::Bytes, 0, None), "totals only");
        assert_eq!(text(Criterion::Allocations, 1, None), "every allocation");
        assert_eq!(text(Criterion::Bytes, 512 << 10, None), "one sample per 512 KiB");
        assert_eq!(text(Criterion::Allocations, 1000, None), "one sample in 1,000 allocations");
        let even = text(Criterion::SizeClass, 64, Some(ClassRule::Even(500)));
        assert_eq!(even, "one sample in 500 allocations, divided evenly among size classes");
    }

    #[test]
    fn only_criteria_other_than_bytes_need_a_note() {
        assert_eq!(sampling(Criterion::Bytes, 4096, None).note(), None);
        let note = sampling(Criterion::Allocations, 10, None).note().unwrap();
        assert!(note.starts_with("sampled by allocation: one sample in 10 allocations;"), "{note}");
    }
}

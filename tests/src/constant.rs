//! A program whose memory in use is constant (`tests/programs/constant.c`), and checks of in-use figures against it.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use crate::output::{self, Estimate, Figures, Profile};
use crate::pprof;
use crate::program::program;
use crate::scrape::{Answer, get};
use crate::target::Target;
use crate::truth::{Law, Truth};

/// The program's workload.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Number of blocks in use, over all threads.
    pub blocks: u64,
    /// Size of the smallest block in bytes.
    pub size: u64,
    /// Number of distinct sizes: 1 to this many times the smallest.
    pub sizes: u64,
    /// Number of threads, 1 to 8.
    pub threads: u64,
    /// Number of blocks that a thread replaces per batch.
    pub batch: u64,
    /// Pause between two batches. 0 means none.
    pub pause_us: u64,
}

impl Load {
    /// One thread with 200 blocks, which replaces about 5,000 blocks a second.
    pub const SLOW: Self = Self { blocks: 200, size: 5000, sizes: 1, threads: 1, batch: 16, pause_us: 3000 };
    /// Like `SLOW`, without a pause.
    pub const FAST: Self = Self { pause_us: 0, ..Self::SLOW };

    /// The load with this many threads, each with as many blocks as one thread had before.
    #[must_use]
    pub const fn with_threads(self, threads: u64) -> Self {
        Self { threads, blocks: self.blocks / self.threads * threads, ..self }
    }

    /// Arguments of the program. With `FREE_RUNNING`, it ends by itself after `seconds`.
    pub fn arguments(&self, seconds: u64) -> Vec<String> {
        [self.blocks, self.size, self.threads, self.batch, self.pause_us, seconds, self.sizes]
            .map(|number| number.to_string())
            .to_vec()
    }

    /// Starts the program.
    ///
    /// # Panics
    /// As [`Target::start`].
    pub fn start(&self) -> Target {
        Target::start(&program("constant"), self.arguments(0))
    }

    /// Number of blocks that may be missing at any moment: each thread frees a block before it allocates the next.
    const fn missing_blocks(&self) -> f64 {
        self.threads as f64
    }

    /// Bytes of these blocks.
    const fn missing_bytes(&self) -> f64 {
        (self.threads * self.size * self.sizes) as f64
    }
}

/// Reason of figures that lack records: what `.json` says for records that were not read in time.
const RECORDS_MISSING: &str = "not read in time";

/// Whether a figure makes no claim because records were not read in time.
fn is_unread(figure: &Estimate) -> bool {
    figure.reason.as_deref().is_some_and(|why| why.contains(RECORDS_MISSING))
}

/// The figures in use at one moment.
#[derive(Clone, Debug)]
pub struct Cut {
    /// Their origin, for messages.
    pub from: String,
    /// Bytes, with or without an interval.
    pub bytes: Estimate,
    /// Blocks, with or without an interval.
    pub objects: Estimate,
}

impl Cut {
    /// The figures of a `.json` profile.
    ///
    /// # Panics
    /// If it has no figures in use.
    pub fn of_figures(from: impl Into<String>, figures: &Figures) -> Self {
        let figure = |estimate: &Option<Estimate>| estimate.clone().expect("frees are followed");
        Self { from: from.into(), bytes: figure(&figures.inuse_bytes), objects: figure(&figures.inuse_objects) }
    }

    /// The figures of a process in a response of `/metrics`, which has no interval for blocks.
    ///
    /// # Panics
    /// If it has no such series.
    pub fn of_metrics(from: impl Into<String>, answer: &Answer, pid: u32) -> Self {
        let metric = |name: &str| answer.metric_of(&format!("heapbpf_process_inuse_{name}"), pid);
        let (low, high) = (metric("low_bytes"), metric("high_bytes"));
        // A withdrawn interval has no series.
        let reason = (low.is_none() || high.is_none()).then(|| RECORDS_MISSING.to_owned());
        let bytes = Estimate { estimate: metric("bytes"), low, high, reason: reason.clone(), ..Estimate::default() };
        let objects = Estimate { estimate: metric("objects"), reason, ..Estimate::default() };
        assert!(bytes.estimate.is_some() && objects.estimate.is_some(), "{pid} is not in\n{}", answer.text());
        Self { from: from.into(), bytes, objects }
    }

    /// The figures of a scraped pprof profile. It has no intervals: if its comments say that records are missing, the
    /// figures make no claim.
    pub fn of_pprof(from: impl Into<String>, answer: &Answer) -> Self {
        let [_, _, objects, bytes] = pprof::sums(&answer.body);
        let reason = pprof::says_that_records_are_missing(&answer.body).then(|| RECORDS_MISSING.to_owned());
        let figure =
            |value: i64| Estimate { estimate: Some(value as f64), reason: reason.clone(), ..Estimate::default() };
        Self { from: from.into(), bytes: figure(bytes), objects: figure(objects) }
    }

    /// The figures of one scrape of each kind.
    pub fn scrapes(number: u32, address: SocketAddr, pid: u32) -> [Self; 2] {
        [
            Self::of_metrics(format!("metrics {number}"), &get(address, "/metrics"), pid),
            Self::of_pprof(format!("scrape {number}"), &get(address, "/debug/pprof/heap")),
        ]
    }

    /// Snapshots `profile.NNNN.json` of a directory, without the first `passed`.
    ///
    /// # Panics
    /// If one is malformed.
    pub fn snapshots(dir: &Path, passed: u32) -> Vec<Self> {
        let later = |number: &u32| *number > passed;
        let cut = |number| {
            let name = format!("profile.{number:04}.json");
            let profile: Profile = output::read(&dir.join(&name));
            Self::of_figures(name, &profile.totals)
        };
        numbers_of_snapshots(dir).into_iter().filter(later).map(cut).collect()
    }

    /// Whether there is an interval that is a single value.
    pub fn is_certain(&self) -> bool {
        self.bytes.low.is_some() && self.bytes.low == self.bytes.high
    }
}

/// Numbers of the snapshots in a recording's directory, ascending.
///
/// # Panics
/// If the directory is gone.
pub fn numbers_of_snapshots(dir: &Path) -> Vec<u32> {
    let entries = fs::read_dir(dir).expect("the recording's directory").flatten();
    let number = |name: &str| name.strip_prefix("profile.")?.strip_suffix(".json")?.parse().ok();
    let mut numbers: Vec<u32> = entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect();
    numbers.sort_unstable();
    numbers
}

/// Collects wrong figures in the cuts of one recording.
pub struct Judge<'a> {
    load: &'a Load,
    truth: &'a Truth,
    wrong: Vec<String>,
}

impl<'a> Judge<'a> {
    /// Compares with a load and its report.
    ///
    /// # Panics
    /// If the report is not of this load.
    pub fn new(load: &'a Load, truth: &'a Truth) -> Self {
        assert_eq!(truth.live_allocs(), load.blocks, "the program holds something else");
        Self { load, truth, wrong: Vec::new() }
    }

    fn figures<'b>(&self, cut: &'b Cut) -> [(&'static str, &'b Estimate, f64, f64); 2] {
        [
            ("bytes", &cut.bytes, self.truth.live_bytes() as f64, self.load.missing_bytes()),
            ("objects", &cut.objects, self.truth.live_allocs() as f64, self.load.missing_blocks()),
        ]
    }

    /// Checks a cut of which every allocation is sampled: both figures are the truth up to one block per thread.
    pub fn exact(&mut self, cut: &Cut) {
        // On a busy machine records are lost. That is reported, and then the intervals must contain the truth.
        let figures = self.figures(cut);
        let is_reported = figures.iter().any(|(_, figure, ..)| figure.low < figure.high || is_unread(figure));
        let holds = is_reported && self.covered(cut);
        for (what, figure, truth, missing) in figures {
            if (figure.value() - truth).abs() > missing && !holds {
                self.wrong.push(format!("{}: {what} {figure:?} instead of {truth} ± {missing}", cut.from));
            }
            self.ordered(cut, what, figure);
        }
    }

    /// Checks a cut at sampling interval R: both figures are the truth up to `sigmas` standard deviations of the
    /// estimate and one block per thread. The standard deviation is that of independent draws for each block (`Law`).
    /// On a busy machine records are lost. That is reported: the interval is wider by it, or withdrawn.
    pub fn estimated(&mut self, cut: &Cut, interval: u64, sigmas: f64) {
        let live = self.truth.sites.iter().flat_map(|site| &site.sizes).map(|&[size, _, live]| (size, live));
        let law = Law::of(live, interval);
        let variances = [law.bytes.variance, law.objects.variance];
        for ((what, figure, truth, missing), variance) in self.figures(cut).into_iter().zip(variances) {
            let tolerance = sigmas * variance.sqrt() + missing;
            // The part beyond 95 %, where the interval ends without losses.
            let beyond = (sigmas - 1.96) * variance.sqrt() + missing;
            let is_covered = figure.low.is_some_and(|low| low - beyond <= truth)
                && figure.high.is_some_and(|high| high + beyond >= truth);
            if (figure.value() - truth).abs() > tolerance && !is_covered && !is_unread(figure) {
                self.wrong.push(format!("{}: {what} {} instead of {truth} ± {tolerance}", cut.from, figure.value()));
            }
            self.ordered(cut, what, figure);
        }
    }

    /// Whether each interval of a cut contains the truth, which may be less by one block per thread. A withdrawn
    /// interval makes no claim.
    pub fn covered(&self, cut: &Cut) -> bool {
        self.figures(cut).into_iter().all(|(_, figure, truth, missing)| {
            figure.low.is_none_or(|low| low <= truth) && figure.high.is_none_or(|high| high >= truth - missing)
        })
    }

    /// Checks that low ≤ estimate ≤ high.
    fn ordered(&mut self, cut: &Cut, what: &str, figure: &Estimate) {
        let (low, estimate, high) = (figure.low, figure.value(), figure.high);
        if low.is_some_and(|low| low > estimate) || high.is_some_and(|high| high < estimate) {
            self.wrong.push(format!("{}: {what} {estimate} is not in its interval {low:?} to {high:?}", cut.from));
        }
    }

    /// Adds another problem, as a sentence.
    pub fn remark(&mut self, what: impl Into<String>) {
        self.wrong.push(what.into());
    }

    /// All problems, with the load.
    pub fn into_wrong(self) -> Vec<String> {
        let load = self.load;
        self.wrong.into_iter().map(|wrong| format!("{load:?}: {wrong}")).collect()
    }
}

//! The cost per pair as a function of the number of threads, processes and live samples, the stack depth and the
//! interval.

use heapbpf_bench::document::replace_in;
use heapbpf_bench::machine;
use heapbpf_kernel::guardian::Guardian;
use heapbpf_record::cost::cpus::pin;
use heapbpf_record::cost::quantiles::{median, quantile};
use heapbpf_record::cost::trial::{Allocator, Baseline, Recording, Setting, Where};
use heapbpf_record::cost::workload::Workload;
use sampler_ebpf::abi::stack_kind;

use super::Options;
use super::pinned::Library;

const PAIRS: u64 = 40_000;
/// Maximum number of rounds. There are many conditions, each compared with the no-op baseline.
const MOST_ROUNDS: usize = 7;
/// Pairs in a slice if each is sampled. Their stacks fit in the rings.
const SAMPLED_PAIRS: u64 = 500;
/// Blocks allocated in one go while each is sampled. Their records fit in the ring.
const HELD: u64 = 40_000;

/// One figure: ns per pair, and as a multiple of the baseline with its quartiles.
struct Figure {
    place: f64,
    ns: f64,
    to_baseline: [f64; 3],
}

/// The figures of one condition that grows.
struct Study {
    what: &'static str,
    figures: Vec<Figure>,
}

/// Measures and prints, and writes a table of medians if the options say where.
pub fn run(options: &Options, object: &[u8], library: &Library) -> anyhow::Result<()> {
    let bench = Bench { options, object, library };
    let studies = [
        bench.study("threads of one process", &[1, 2, 4, 8, 16], Bench::threads)?,
        bench.study("named processes of one library", &[1, 2, 4, 8, 9, 50, 200], Bench::processes)?,
        bench.study(
            "named processes of one library, seen by one that is not named",
            &[1, 8, 9, 50],
            Bench::bystander,
        )?,
        bench.study("live samples", &[1, 1_000, 10_000, 100_000, 1_000_000], Bench::live_samples)?,
        bench.study("calls on the stack, every allocation sampled", &[1, 10, 30, 100, 300, 1000], Bench::depth)?,
        bench.study(
            "sampling interval R, bytes",
            &[1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000],
            Bench::interval,
        )?,
    ];
    let conditions = format!(
        "{}. Medians of {} rounds; the baseline was measured just before and after each.\n",
        machine::describe(),
        bench.rounds()
    );
    println!("{conditions}");
    let mut text = conditions;
    text += "\n| what grows | a malloc/free pair, as a multiple of the baseline |\n|---|---|\n";
    for study in &studies {
        println!("{}", study.markdown());
        text += &study.row();
    }
    match &options.document {
        Some(path) => replace_in(path, "scaling", &text),
        None => Ok(()),
    }
}

impl Study {
    /// Everything that was measured, for the terminal.
    fn markdown(&self) -> String {
        let mut text = format!("| {} | ns per pair | of the baseline [quartiles] |\n|---|---|---|\n", self.what);
        for Figure { place, ns, to_baseline: [low, middle, high] } in &self.figures {
            text += &format!("| {place} | {ns:.0} | {middle:.3} [{low:.3}, {high:.3}] |\n");
        }
        text
    }

    /// A row of the document's table: the medians.
    fn row(&self) -> String {
        let median = |figure: &Figure| format!("{}: {:.3}", figure.place, figure.to_baseline[1]);
        let medians: Vec<String> = self.figures.iter().map(median).collect();
        format!("| {} | {} |\n", self.what, medians.join(" · "))
    }
}

struct Bench<'a> {
    options: &'a Options,
    object: &'a [u8],
    library: &'a Library,
}

impl Bench<'_> {
    fn rounds(&self) -> usize {
        self.options.rounds.min(MOST_ROUNDS)
    }

    fn study(
        &self,
        what: &'static str,
        places: &[u64],
        measure: impl Fn(&Self, u64) -> anyhow::Result<Figure>,
    ) -> anyhow::Result<Study> {
        let mut figures = Vec::new();
        for place in places {
            figures.push(measure(self, *place)?);
            eprintln!("{what}: {place} done");
        }
        Ok(Study { what, figures })
    }

    fn start(&self, threads: u64, depth: u64) -> anyhow::Result<Workload> {
        self.library.start(&self.options.pairs, &[&threads.to_string(), &depth.to_string()])
    }

    fn threads(&self, threads: u64) -> anyhow::Result<Figure> {
        let mut workload = self.start(threads, 0)?;
        if threads > 1 {
            pin(workload.pid(), |_| true);
        }
        self.against_baseline(&mut workload, Setting::DEFAULT, threads, threads, PAIRS, |_, _| Ok(()))
    }

    /// The cost to one named process while other named processes use the same library.
    fn processes(&self, processes: u64) -> anyhow::Result<Figure> {
        let others = (1..processes).map(|_| self.start(1, 0)).collect::<anyhow::Result<Vec<_>>>()?;
        let mut workload = self.start(1, 0)?;
        self.against_baseline(&mut workload, Setting::DEFAULT, processes, 1, PAIRS, |_, recording| {
            others.iter().for_each(|other| recording.also(other.pid()));
            Ok(())
        })
    }

    /// The cost to a process that is not named but maps the same library as named ones.
    fn bystander(&self, processes: u64) -> anyhow::Result<Figure> {
        let named = (0..processes).map(|_| self.start(1, 0)).collect::<anyhow::Result<Vec<_>>>()?;
        let mut workload = self.start(1, 0)?;
        self.against_baseline(&mut workload, Setting::DEFAULT, processes, 1, PAIRS, |_, recording| {
            recording.leave_all();
            named.iter().for_each(|process| recording.also(process.pid()));
            Ok(())
        })
    }

    fn live_samples(&self, live: u64) -> anyhow::Result<Figure> {
        let mut workload = self.start(1, 0)?;
        let setting = Setting { interval: 1, stack_kind: stack_kind::NONE, ..Setting::DEFAULT };
        let hold = |workload: &mut Workload, recording: &mut Recording| {
            let mut held = 0;
            while held < live {
                let count = HELD.min(live - held);
                workload.hold(count, 64)?;
                recording.drain();
                held += count;
            }
            recording.set_interval(Setting::DEFAULT.interval)
        };
        self.against_baseline(&mut workload, setting, live, 1, PAIRS, hold)
    }

    fn depth(&self, depth: u64) -> anyhow::Result<Figure> {
        let mut workload = self.start(1, depth)?;
        self.against_baseline(
            &mut workload,
            Setting { interval: 1, ..Setting::DEFAULT },
            depth,
            1,
            SAMPLED_PAIRS,
            |_, _| Ok(()),
        )
    }

    fn interval(&self, interval: u64) -> anyhow::Result<Figure> {
        let mut workload = self.start(1, 0)?;
        let pairs = if interval < 1000 { PAIRS / 8 } else { PAIRS };
        self.against_baseline(
            &mut workload,
            Setting { interval, ..Setting::DEFAULT },
            interval,
            1,
            pairs,
            |_, _| Ok(()),
        )
    }

    /// Measures heapbpf after `prepare`, with the baseline just before and after.
    fn against_baseline(
        &self,
        workload: &mut Workload,
        setting: Setting,
        place: u64,
        threads: u64,
        pairs: u64,
        prepare: impl Fn(&mut Workload, &mut Recording) -> anyhow::Result<()>,
    ) -> anyhow::Result<Figure> {
        let pid = workload.pid();
        let allocator = Allocator::of_process(pid)?;
        let mut recording = Recording::load(self.object, setting, &allocator, pid, &Guardian::default())?;
        let mut baseline = Baseline::load(self.object, &Guardian::default())?;
        recording.on()?;
        prepare(workload, &mut recording)?;
        recording.off();
        let size = self.options.size;
        let slice = |workload: &mut Workload, pairs: u64| -> anyhow::Result<f64> {
            let each = (pairs / threads).max(1);
            workload.run(each.min(100), size)?;
            Ok(workload.run(each, size)?.cpu_ns as f64 / (each * threads) as f64)
        };
        let (mut ns, mut to_baseline) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds() {
            let mut at_baseline = |workload: &mut Workload| -> anyhow::Result<f64> {
                baseline.on(&allocator, pid, Where::Everywhere, false)?;
                let spent = slice(workload, PAIRS)?;
                baseline.off();
                Ok(spent)
            };
            let before = at_baseline(workload)?;
            recording.on()?;
            let spent = slice(workload, pairs)?;
            recording.off();
            let after = at_baseline(workload)?;
            ns.push(spent);
            to_baseline.push(spent / (0.5 * (before + after)));
        }
        let quartiles = [0.25, 0.5, 0.75].map(|q| quantile(&to_baseline, q));
        Ok(Figure { place: place as f64, ns: median(&ns), to_baseline: quartiles })
    }
}

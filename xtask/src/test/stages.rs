//! How long each stage took, how busy the processors were, and the slowest tests: the table at the end of
//! `cargo xtask test` and `.ci/run`.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;

use super::programs::Outcome;

/// Number of slowest tests shown.
const SLOWEST: usize = 10;

/// The variable that names a file to which the stages are appended, one per line, for the table of a larger run.
pub const VARIABLE: &str = "HEAPBPF_STAGES";

/// The stages that have ended.
#[derive(Default)]
pub struct Stages(Vec<Stage>);

struct Stage {
    name: String,
    seconds: f64,
    /// Share of time that the processors were busy, percent.
    busy: Option<f64>,
    tests: usize,
}

/// When a stage began.
pub struct Clock {
    begun: Instant,
    ticks: Option<[u64; 2]>,
}

impl Stages {
    /// Starts a stage.
    pub fn begin(&self) -> Clock {
        Clock { begun: Instant::now(), ticks: processor_ticks() }
    }

    /// Ends a stage, in which this many tests ran.
    pub fn end(&mut self, clock: Clock, name: &str, tests: usize) {
        let busy = clock.ticks.zip(processor_ticks()).and_then(|(before, after)| percent(before, after));
        self.0.push(Stage { name: name.to_owned(), seconds: clock.begun.elapsed().as_secs_f64(), busy, tests });
    }

    /// Returns the table, in Markdown, and the slowest of these tests.
    pub fn table(&self, tests: &[(String, f64)]) -> String {
        let mut text = "| stage | seconds | processors busy, % | tests |\n|---|---|---|---|\n".to_owned();
        text.extend(self.0.iter().map(|stage| format!("| {} |\n", stage.cells().join(" | "))));
        text + "\n| slowest tests | seconds |\n|---|---|\n" + &slowest(tests)
    }

    /// Appends the stages to the file that the variable names, if it is set. Writes the slowest tests and the failures
    /// to files beside it.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn append(&self, outcome: &Outcome) -> anyhow::Result<()> {
        let Some(path) = std::env::var_os(VARIABLE).map(PathBuf::from) else { return Ok(()) };
        let stages = self.0.iter().map(|stage| format!("{}\n", stage.cells().join("\t"))).collect();
        let failed = outcome.failed.iter().map(|(name, reason)| format!("failed: {name}: {reason}\n")).collect();
        let texts: [(PathBuf, String); 3] = [
            (path.clone(), stages),
            (path.with_extension("slowest"), slowest(&outcome.passed)),
            (path.with_extension("failed"), failed),
        ];
        for (path, text) in texts {
            let file = fs::File::options().create(true).append(true).open(&path);
            file.and_then(|mut file| file.write_all(text.as_bytes()))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }
}

fn slowest(tests: &[(String, f64)]) -> String {
    let mut slowest: Vec<&(String, f64)> = tests.iter().collect();
    slowest.sort_by(|a, b| b.1.total_cmp(&a.1));
    slowest.iter().take(SLOWEST).map(|(name, seconds)| format!("| {name} | {seconds:.1} |\n")).collect()
}

impl Stage {
    fn cells(&self) -> [String; 4] {
        let busy = self.busy.map_or_else(String::new, |busy| format!("{busy:.0}"));
        let tests = if self.tests == 0 { String::new() } else { self.tests.to_string() };
        [self.name.clone(), format!("{:.0}", self.seconds), busy, tests]
    }
}

/// Returns the ticks in which processors were busy, and all ticks, since the machine started (proc_stat(5)).
fn processor_ticks() -> Option<[u64; 2]> {
    ticks(&fs::read_to_string("/proc/stat").ok()?)
}

fn ticks(stat: &str) -> Option<[u64; 2]> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line.split_whitespace().map_while(|ticks| ticks.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal. Later fields are included in user and nice.
    let (all, idle) = (ticks.iter().take(8).sum::<u64>(), ticks.get(3)? + ticks.get(4)?);
    Some([all - idle, all])
}

fn percent(before: [u64; 2], after: [u64; 2]) -> Option<f64> {
    let [worked, all] = [0, 1].map(|i| after[i].saturating_sub(before[i]) as f64);
    (all > 0.0).then(|| 100.0 * worked / all)
}
